//! The header: what is where, and whether that can be true.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};

use super::DType;

/// FusedGemm than any model has; the reference reader draws the same line.
pub(super) const MOST_HEADER_BYTES: u64 = 100_000_000;
/// No tensor of ours has more than two.
const MOST_DIMENSIONS: usize = 8;

/// Where a tensor lies.
#[derive(Debug)]
pub(super) struct TensorEntry {
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
    /// Relative to the end of the header.
    pub(super) start: usize,
    pub(super) end: usize,
}

#[derive(Debug)]
pub(super) struct Header {
    pub(super) tensors: BTreeMap<String, TensorEntry>,
    pub(super) metadata: BTreeMap<String, String>,
}

impl Header {
    /// Reads the JSON `text` of a file that has `data_len` bytes after its header.
    pub(super) fn parse(text: &[u8], data_len: usize) -> Result<Self, String> {
        let raw: RawHeader =
            serde_json::from_slice(text).map_err(|e| format!("bad header: {e}"))?;
        let mut tensors = BTreeMap::new();
        for (name, info) in raw.tensors {
            let entry = info.check().map_err(|why| format!("tensor {name:?}: {why}"))?;
            if tensors.contains_key(&name) {
                return Err(format!("tensor {name:?} is there twice"));
            }
            tensors.insert(name, entry);
        }
        tile(&tensors, data_len)?;
        Ok(Self { tensors, metadata: raw.metadata })
    }
}

/// Tensors must lie one after the other and fill the file: no overlap, no hole, nothing outside.
fn tile(tensors: &BTreeMap<String, TensorEntry>, data_len: usize) -> Result<(), String> {
    let mut order: Vec<(&String, &TensorEntry)> = tensors.iter().collect();
    order.sort_by_key(|(_, entry)| (entry.start, entry.end));
    let mut at = 0;
    for (name, entry) in order {
        if entry.start != at {
            let fault = if entry.start < at { "overlaps the one before" } else { "leaves a hole" };
            return Err(format!("tensor {name:?} begins at byte {} and {fault}", entry.start));
        }
        at = entry.end;
    }
    if at == data_len {
        Ok(())
    } else {
        Err(format!("the header describes {at} bytes of data, but there are {data_len}"))
    }
}

struct RawHeader {
    tensors: Vec<(String, RawTensorInfo)>,
    metadata: BTreeMap<String, String>,
}

#[derive(serde::Deserialize)]
struct RawTensorInfo {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

impl RawTensorInfo {
    fn check(self) -> Result<TensorEntry, String> {
        let dtype = DType::from_name(&self.dtype)
            .ok_or_else(|| format!("element type {:?} is not known", self.dtype))?;
        if self.shape.len() > MOST_DIMENSIONS {
            return Err(format!("{} dimensions are too many", self.shape.len()));
        }
        let shape: Vec<usize> = self
            .shape
            .iter()
            .map(|&side| usize::try_from(side))
            .collect::<Result<_, _>>()
            .map_err(|_| format!("shape {:?} is too large", self.shape))?;
        let bytes = shape
            .iter()
            .try_fold(dtype.size(), |product, &side| product.checked_mul(side))
            .ok_or_else(|| format!("shape {shape:?} is too large"))?;
        let (start, end) = self.data_offsets;
        let span = end.checked_sub(start).and_then(|span| usize::try_from(span).ok());
        if span != Some(bytes) {
            return Err(format!(
                "shape {shape:?} of {} takes {bytes} bytes, but the offsets are {start}..{end}",
                dtype.name()
            ));
        }
        let place = |at: u64| usize::try_from(at).map_err(|_| format!("offset {at} is too large"));
        Ok(TensorEntry { dtype, shape, start: place(start)?, end: place(end)? })
    }
}

// By hand, because a map type would silently keep the last of two tensors with one name.
impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(RawHeaderVisitor)
    }
}

struct RawHeaderVisitor;

impl<'de> Visitor<'de> for RawHeaderVisitor {
    type Value = RawHeader;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
        let mut raw = RawHeader { tensors: Vec::new(), metadata: BTreeMap::new() };
        let mut seen_metadata = false;
        while let Some(key) = map.next_key::<String>()? {
            if key == "__metadata__" {
                if std::mem::replace(&mut seen_metadata, true) {
                    return Err(A::Error::duplicate_field("__metadata__"));
                }
                raw.metadata = map.next_value()?;
            } else {
                raw.tensors.push((key, map.next_value()?));
            }
        }
        Ok(raw)
    }
}
