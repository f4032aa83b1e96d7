//! Parses and validates everything before the data of a GGUF file.

use std::collections::BTreeMap;

use super::cursor::{GgufCursor, ParseError};
use super::tensor_type::TensorType;
use super::value::GgufValue;
use super::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAGIC, MAX_DIMENSIONS};

/// Type, shape and location of a tensor.
#[derive(Debug)]
pub(super) struct GgufTensorEntry {
    pub(super) kind: TensorType,
    /// Dimensions, outermost first.
    pub(super) shape: Vec<usize>,
    /// First byte in the file.
    pub(super) start: u64,
    /// Size in bytes; 0 for a type that is not supported.
    pub(super) len: usize,
}

/// The validated header of a file.
#[derive(Debug)]
pub(super) struct GgufHeader {
    pub(super) metadata: BTreeMap<String, GgufValue>,
    pub(super) tensors: BTreeMap<String, GgufTensorEntry>,
}

/// Description of a tensor before its location is checked.
struct RawTensor {
    name: String,
    /// Dimensions, innermost first.
    dimensions: Vec<u64>,
    kind: TensorType,
    offset: u64,
}

impl GgufHeader {
    /// Parses the header of a file of `file_len` bytes.
    pub(super) fn parse(cursor: &mut GgufCursor<'_>, file_len: u64) -> Result<Self, ParseError> {
        let magic: [u8; 4] = cursor.array().map_err(|error| error.at("not a GGUF file"))?;
        if magic != *MAGIC {
            return Err("not a GGUF file: it does not start with GGUF".to_owned().into());
        }
        match cursor.u32()? {
            2 | 3 => {}
            version if matches!(version.swap_bytes(), 1..=3) => {
                return Err("big-endian files are not supported".to_owned().into());
            }
            version => {
                return Err(
                    format!("GGUF version {version} is not supported, expected 2 or 3").into()
                );
            }
        }
        let tensor_count = cursor.u64()?;
        let value_count = cursor.u64()?;
        let mut metadata = BTreeMap::new();
        let values = cursor.repeat(value_count, 12, |cursor| {
            let key = cursor.string().map_err(|error| error.at("metadata"))?;
            let value = GgufValue::read(cursor);
            let value = value.map_err(|error| error.at(format_args!("metadata {key:?}")))?;
            if metadata.contains_key(&key) {
                return Err(format!("metadata {key:?} is defined twice").into());
            }
            metadata.insert(key, value);
            Ok(())
        });
        values?;
        let raw = cursor.repeat(tensor_count, 24, RawTensor::read)?;
        let alignment = alignment(metadata.get(ALIGNMENT_KEY))?;
        let data_start = cursor.position().checked_next_multiple_of(alignment);
        let data_start = data_start.ok_or_else(|| "the header is too long".to_owned())?;
        let mut tensors = BTreeMap::new();
        for tensor in raw {
            let name = tensor.name.clone();
            let entry = tensor
                .validate(alignment, data_start, file_len)
                .map_err(|reason| format!("tensor {name:?}: {reason}"))?;
            if tensors.contains_key(&name) {
                return Err(format!("tensor {name:?} is defined twice").into());
            }
            tensors.insert(name, entry);
        }
        check_overlap(&tensors)?;
        Ok(Self { metadata, tensors })
    }
}

/// Returns the alignment of a file whose metadata has `value` as [`ALIGNMENT_KEY`].
pub(super) fn alignment(value: Option<&GgufValue>) -> Result<u64, String> {
    match value {
        None => Ok(DEFAULT_ALIGNMENT),
        Some(GgufValue::U32(value)) if value.is_power_of_two() => Ok((*value).into()),
        Some(other) => Err(format!(
            "metadata {ALIGNMENT_KEY} is {}, expected a u32 that is a power of two",
            other.shown()
        )),
    }
}

/// Checks that no two tensors share bytes.
fn check_overlap(tensors: &BTreeMap<String, GgufTensorEntry>) -> Result<(), String> {
    let mut order: Vec<(&String, &GgufTensorEntry)> = tensors.iter().collect();
    order.sort_by_key(|(_, entry)| (entry.start, entry.len));
    for pair in order.windows(2) {
        let [(first, entry), (second, next)] = pair else { continue };
        if entry.start + entry.len as u64 > next.start {
            return Err(format!("tensor {second:?} overlaps tensor {first:?}"));
        }
    }
    Ok(())
}

impl RawTensor {
    fn read(cursor: &mut GgufCursor<'_>) -> Result<Self, ParseError> {
        let name = cursor.string().map_err(|error| error.at("name of a tensor"))?;
        let at = |error: ParseError| error.at(format_args!("tensor {name:?}"));
        let count = cursor.u32().map_err(at)? as usize;
        if count > MAX_DIMENSIONS {
            let reason = format!("{count} dimensions exceed the limit of {MAX_DIMENSIONS}");
            return Err(at(reason.into()));
        }
        let mut dimensions = Vec::with_capacity(count);
        for _ in 0..count {
            dimensions.push(cursor.u64().map_err(at)?);
        }
        let kind = TensorType::from_number(cursor.u32().map_err(at)?);
        let offset = cursor.u64().map_err(at)?;
        Ok(Self { name, dimensions, kind, offset })
    }

    /// Checks the shape and the location, which must be inside the file.
    fn validate(
        self,
        alignment: u64,
        data_start: u64,
        file_len: u64,
    ) -> Result<GgufTensorEntry, String> {
        let too_large = || format!("shape {:?} is too large", self.dimensions);
        let shape: Vec<usize> = self
            .dimensions
            .iter()
            .rev()
            .map(|side| usize::try_from(*side))
            .collect::<Result<_, _>>()
            .map_err(|_| too_large())?;
        if !self.offset.is_multiple_of(alignment) {
            let offset = self.offset;
            return Err(format!("offset {offset} is not a multiple of the alignment {alignment}"));
        }
        let count = shape
            .iter()
            .try_fold(1_usize, |product, side| product.checked_mul(*side))
            .ok_or_else(too_large)?;
        let len = match self.kind {
            TensorType::Unsupported(_) => 0,
            TensorType::Supported(dtype) => {
                let row = shape.last().copied().unwrap_or(1);
                if !row.is_multiple_of(dtype.block_len()) {
                    return Err(format!(
                        "rows of {row} elements are not whole blocks of {} elements of {}",
                        dtype.block_len(),
                        dtype.name()
                    ));
                }
                dtype.byte_len(count).ok_or_else(too_large)?
            }
        };
        let start = data_start.checked_add(self.offset);
        match start.and_then(|start| Some((start, start.checked_add(len as u64)?))) {
            Some((start, end)) if end <= file_len => {
                Ok(GgufTensorEntry { kind: self.kind, shape, start, len })
            }
            _ => Err(format!(
                "the file is truncated: {len} bytes at offset {} exceed its {file_len} bytes",
                self.offset
            )),
        }
    }
}
