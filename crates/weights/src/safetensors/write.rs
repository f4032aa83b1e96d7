//! Writes safetensors files atomically.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use half::bf16;
use serde_json::json;

use crate::atomic::write_file;
use crate::{DType, Error, Result};

/// A tensor to write.
#[derive(Clone, Copy, Debug)]
pub struct NamedTensor<'a> {
    /// Name in the file.
    pub name: &'a str,
    /// Dimensions, outermost first.
    pub shape: &'a [usize],
    /// Elements in row-major order.
    pub values: TensorSlice<'a>,
}

/// Elements of a tensor to write.
#[derive(Clone, Copy, Debug)]
pub enum TensorSlice<'a> {
    /// Elements that are stored as f32.
    F32(&'a [f32]),
    /// Elements that are stored as bf16.
    Bf16(&'a [bf16]),
}

impl TensorSlice<'_> {
    fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Bf16(values) => values.len(),
        }
    }

    fn dtype(&self) -> DType {
        match self {
            Self::F32(_) => DType::F32,
            Self::Bf16(_) => DType::Bf16,
        }
    }

    /// Writes the elements in little-endian order, whatever the byte order of the machine.
    fn write(&self, out: &mut dyn Write) -> std::io::Result<()> {
        let mut buffer = [0; 8192];
        match self {
            Self::F32(values) => {
                for values in values.chunks(buffer.len() / 4) {
                    for (to, value) in buffer.as_chunks_mut::<4>().0.iter_mut().zip(values) {
                        *to = value.to_le_bytes();
                    }
                    out.write_all(&buffer[..values.len() * 4])?;
                }
            }
            Self::Bf16(values) => {
                for values in values.chunks(buffer.len() / 2) {
                    for (to, value) in buffer.as_chunks_mut::<2>().0.iter_mut().zip(values) {
                        *to = value.to_le_bytes();
                    }
                    out.write_all(&buffer[..values.len() * 2])?;
                }
            }
        }
        Ok(())
    }
}

/// Writes a safetensors file, atomically replacing the file at `path`.
///
/// Tensors are stored in the order of their names, f32 before bf16, so that equal content gives
/// equal bytes and every tensor is aligned to its element size.
///
/// # Errors
/// - [`Error::InvalidTensor`] if the number of elements does not match the shape of a tensor, two
///   tensors have the same name, or one is named `__metadata__`.
/// - [`Error::Io`] if the file cannot be written.
///
/// The file at `path` is unchanged after an error.
pub fn write_tensors(
    path: impl AsRef<Path>,
    tensors: &[NamedTensor<'_>],
    metadata: &[(&str, &str)],
) -> Result<()> {
    let path = path.as_ref();
    let mut order: Vec<&NamedTensor<'_>> = tensors.iter().collect();
    order.sort_by_key(|tensor| {
        (std::cmp::Reverse(tensor.values.dtype().block_bytes()), tensor.name)
    });
    for tensor in &order {
        let count = tensor.shape.iter().try_fold(1_usize, |n, &side| n.checked_mul(side));
        if count != Some(tensor.values.len()) {
            let count = tensor.values.len();
            let shape = tensor.shape;
            let reason = format!("it has {count} elements, but its shape is {shape:?}");
            return Err(Error::invalid_tensor(tensor.name, reason));
        }
    }
    let entries: Vec<TensorInfo<'_>> = order
        .iter()
        .map(|tensor| TensorInfo {
            name: tensor.name,
            dtype: tensor.values.dtype(),
            shape: tensor.shape,
        })
        .collect();
    let header = header(&entries, metadata)?;
    write_file(path, |out| {
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        order.iter().try_for_each(|tensor| tensor.values.write(out))
    })
}

/// Name, type and shape of a tensor in a header.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorInfo<'a> {
    pub(crate) name: &'a str,
    pub(crate) dtype: DType,
    pub(crate) shape: &'a [usize],
}

/// Returns the JSON header of a file with these tensors in this order. The eight bytes of its
/// length precede it in the file, and the data of the tensors follows.
///
/// Tensors of larger elements must come first, so that every tensor is aligned to its element size.
pub(crate) fn header(tensors: &[TensorInfo<'_>], metadata: &[(&str, &str)]) -> Result<Vec<u8>> {
    let mut entries = BTreeMap::new();
    let mut at = 0_usize;
    for TensorInfo { name, dtype, shape } in tensors {
        let bytes = shape.iter().try_fold(dtype.block_bytes(), |n, &side| n.checked_mul(side));
        let Some(end) = bytes.and_then(|bytes| at.checked_add(bytes)) else {
            return Err(Error::invalid_tensor(name, format!("shape {shape:?} is too large")));
        };
        let entry = json!({ "dtype": dtype.name(), "shape": shape, "data_offsets": [at, end] });
        if *name == "__metadata__" || entries.insert(*name, entry).is_some() {
            return Err(Error::invalid_tensor(name, "the name is already taken or reserved"));
        }
        at = end;
    }
    if !metadata.is_empty() {
        let texts: BTreeMap<_, _> = metadata.iter().copied().collect();
        entries.insert("__metadata__", json!(texts));
    }
    let mut text =
        serde_json::to_vec(&entries).expect("maps of strings and numbers serialize to JSON");
    // The data starts at a multiple of eight bytes: programs that map the file need it aligned.
    text.resize(text.len().next_multiple_of(8), b' ');
    Ok(text)
}
