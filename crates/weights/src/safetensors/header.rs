//! Parses and validates the JSON header of a safetensors file.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};

use crate::DType;

/// Maximum size of a header, in bytes. The reference implementation has the same limit.
pub(super) const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Maximum number of dimensions of a tensor.
const MAX_DIMENSIONS: usize = 8;

/// Type, shape and location of a tensor.
#[derive(Debug)]
pub(super) struct TensorEntry {
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
    /// Byte range relative to the end of the header.
    pub(super) start: usize,
    pub(super) end: usize,
}

/// The validated header of a file.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) tensors: BTreeMap<String, TensorEntry>,
    pub(super) metadata: BTreeMap<String, String>,
}

impl Header {
    /// Parses the JSON `text` of a file with `data_len` bytes after its header.
    ///
    /// # Errors
    /// A description of the problem if the text is not a valid header, a tensor's byte range does
    /// not match its shape, or the tensors do not cover the data exactly.
    pub(super) fn parse(text: &[u8], data_len: usize) -> Result<Self, String> {
        let raw: RawHeader =
            serde_json::from_slice(text).map_err(|e| format!("invalid header: {e}"))?;
        let mut tensors = BTreeMap::new();
        for (name, info) in raw.tensors {
            let entry = info.validate().map_err(|reason| format!("tensor {name:?}: {reason}"))?;
            if tensors.contains_key(&name) {
                return Err(format!("tensor {name:?} is defined twice"));
            }
            tensors.insert(name, entry);
        }
        check_coverage(&tensors, data_len)?;
        Ok(Self { tensors, metadata: raw.metadata })
    }
}

/// Checks that the tensors cover the data without overlap or gap.
fn check_coverage(tensors: &BTreeMap<String, TensorEntry>, data_len: usize) -> Result<(), String> {
    let mut order: Vec<(&String, &TensorEntry)> = tensors.iter().collect();
    order.sort_by_key(|(_, entry)| (entry.start, entry.end));
    let mut at = 0;
    for (name, entry) in order {
        if entry.start != at {
            let fault = if entry.start < at {
                "overlaps the previous one"
            } else {
                "leaves a gap before it"
            };
            return Err(format!("tensor {name:?} starts at byte {} and {fault}", entry.start));
        }
        at = entry.end;
    }
    if at == data_len {
        Ok(())
    } else {
        Err(format!("the header describes {at} bytes of data, but the file has {data_len}"))
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
    /// Checks the type, the shape and the byte range of a tensor.
    fn validate(self) -> Result<TensorEntry, String> {
        let dtype = DType::from_name(&self.dtype)
            .ok_or_else(|| format!("unknown element type {:?}", self.dtype))?;
        if self.shape.len() > MAX_DIMENSIONS {
            let dimensions = self.shape.len();
            return Err(format!("{dimensions} dimensions exceed the limit of {MAX_DIMENSIONS}"));
        }
        let shape: Vec<usize> = self
            .shape
            .iter()
            .map(|&side| usize::try_from(side))
            .collect::<Result<_, _>>()
            .map_err(|_| format!("shape {:?} is too large", self.shape))?;
        let bytes = shape
            .iter()
            .try_fold(1_usize, |product, &side| product.checked_mul(side))
            .and_then(|count| dtype.byte_len(count))
            .ok_or_else(|| format!("shape {shape:?} is too large"))?;
        let (start, end) = self.data_offsets;
        let len = end.checked_sub(start).and_then(|len| usize::try_from(len).ok());
        if len != Some(bytes) {
            return Err(format!(
                "shape {shape:?} of {} takes {bytes} bytes, but the offsets are {start}..{end}",
                dtype.name()
            ));
        }
        let offset = |at: u64| usize::try_from(at).map_err(|_| format!("offset {at} is too large"));
        Ok(TensorEntry { dtype, shape, start: offset(start)?, end: offset(end)? })
    }
}

// Implemented by hand: a map type would silently keep the last of two tensors with the same name.
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
        let mut has_metadata = false;
        while let Some(key) = map.next_key::<String>()? {
            if key == "__metadata__" {
                if std::mem::replace(&mut has_metadata, true) {
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
