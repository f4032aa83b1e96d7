//! Writing, whole or not at all.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use half::bf16;
use serde_json::json;

use crate::file::atomic::write_file;
use crate::{Error, Result};

/// A tensor to be written.
#[derive(Clone, Copy, Debug)]
pub struct NamedTensor<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its sides, outermost first.
    pub shape: &'a [usize],
    /// Its numbers, the last dimension next to each other.
    pub values: TensorSlice<'a>,
}

/// TensorValues to be written.
#[derive(Clone, Copy, Debug)]
pub enum TensorSlice<'a> {
    /// As f32.
    F32(&'a [f32]),
    /// As bf16.
    Bf16(&'a [bf16]),
}

impl TensorSlice<'_> {
    fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Bf16(values) => values.len(),
        }
    }

    fn dtype(&self) -> super::DType {
        match self {
            Self::F32(_) => super::DType::F32,
            Self::Bf16(_) => super::DType::Bf16,
        }
    }

    /// Through a small buffer, so that it is right on every machine.
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

/// Writes a safetensors file, replacing what was at `path` at once.
///
/// Tensors are stored in the order of their names, f32 before bf16, so that equal content gives
/// equal bytes and every tensor is aligned.
///
/// # Errors
/// [`Error::Shape`] if a tensor's numbers do not fill its shape, [`Error::Invalid`] if a name is
/// there twice, [`Error::Io`] if the disk refuses; `path` is then as it was.
pub fn write_tensors(
    path: impl AsRef<Path>,
    tensors: &[NamedTensor<'_>],
    metadata: &[(&str, &str)],
) -> Result<()> {
    let path = path.as_ref();
    let mut order: Vec<&NamedTensor<'_>> = tensors.iter().collect();
    order.sort_by_key(|tensor| (std::cmp::Reverse(tensor.values.dtype().size()), tensor.name));
    let header = header(&order, metadata)?;
    write_file(path, |out| {
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        order.iter().try_for_each(|tensor| tensor.values.write(out))
    })
}

fn header(tensors: &[&NamedTensor<'_>], metadata: &[(&str, &str)]) -> Result<Vec<u8>> {
    let mut entries = BTreeMap::new();
    let mut at = 0;
    for tensor in tensors {
        let count = tensor.shape.iter().try_fold(1_usize, |n, &side| n.checked_mul(side));
        if count != Some(tensor.values.len()) {
            return Err(Error::Shape {
                what: tensor.name.to_owned(),
                expected: tensor.shape.to_vec(),
                got: vec![tensor.values.len()],
            });
        }
        let dtype = tensor.values.dtype();
        let end = at + tensor.values.len() * dtype.size();
        let entry =
            json!({ "dtype": dtype.name(), "shape": tensor.shape, "data_offsets": [at, end] });
        if tensor.name == "__metadata__" || entries.insert(tensor.name, entry).is_some() {
            return Err(Error::invalid(tensor.name, "is not the name of one tensor"));
        }
        at = end;
    }
    if !metadata.is_empty() {
        let texts: BTreeMap<_, _> = metadata.iter().copied().collect();
        entries.insert("__metadata__", json!(texts));
    }
    let mut text = serde_json::to_vec(&entries).expect("texts and numbers are always JSON");
    // Data starts at a multiple of eight, so that views into the mapped file are aligned.
    text.resize(text.len().next_multiple_of(8), b' ');
    Ok(text)
}
