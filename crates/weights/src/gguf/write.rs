//! [`GgufWriter`]: writes GGUF files atomically, one tensor at a time.

use std::io::{self, Read as _, Write};
use std::path::Path;

use super::header::alignment;
use super::value::GgufValue;
use super::value_encoding::write_string;
use super::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAGIC, MAX_DIMENSIONS, tensor_type};
use crate::atomic::write_file;
use crate::{DType, Error, Result};

/// Version of the files that are written.
const VERSION: u32 = 3;

/// Description of a GGUF file to write: its metadata, and the names, types and shapes of its
/// tensors.
///
/// See [`GgufFile`](crate::GgufFile) for an example.
#[derive(Clone, Debug, Default)]
pub struct GgufWriter {
    metadata: Vec<(String, GgufValue)>,
    tensors: Vec<TensorDescription>,
}

/// Name, type, shape and size of a tensor to write.
#[derive(Clone, Debug)]
struct TensorDescription {
    name: String,
    /// Number of the tensor type.
    kind: u32,
    /// Dimensions, outermost first.
    shape: Vec<usize>,
    /// Size in bytes.
    len: u64,
}

impl GgufWriter {
    /// Creates the description of a file without metadata and tensors.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a value to the metadata, replacing an earlier value with the same key.
    ///
    /// The value of `general.alignment` is the alignment of the tensors in bytes: a `u32` that is a
    /// power of two. Without it, the alignment is 32 bytes.
    pub fn metadata(&mut self, key: impl Into<String>, value: impl Into<GgufValue>) -> &mut Self {
        let key = key.into();
        self.metadata.retain(|(other, _)| *other != key);
        self.metadata.push((key, value.into()));
        self
    }

    /// Adds a tensor with dimensions `shape`, outermost first. The tensors are stored in the order
    /// in which they are added.
    ///
    /// # Errors
    /// [`Error::InvalidTensor`] if the name is taken, GGUF has no such type, rows are not whole
    /// blocks, or the tensor has more than four dimensions or is too large.
    pub fn tensor(&mut self, name: &str, dtype: DType, shape: &[usize]) -> Result<&mut Self> {
        let invalid = |reason: String| Err(Error::invalid_tensor(name, reason));
        if self.tensors.iter().any(|tensor| tensor.name == name) {
            return invalid("the name is already taken".to_owned());
        }
        let Some(kind) = tensor_type::number(dtype) else {
            return invalid(format!("GGUF has no type {}", dtype.name()));
        };
        let row = shape.last().copied().unwrap_or(1);
        if shape.len() > MAX_DIMENSIONS || !row.is_multiple_of(dtype.block_len()) {
            return invalid(format!(
                "{} cannot have shape {shape:?}, expected at most {MAX_DIMENSIONS} dimensions and \
                 rows of whole blocks of {} elements",
                dtype.name(),
                dtype.block_len()
            ));
        }
        let count = shape.iter().try_fold(1_usize, |product, side| product.checked_mul(*side));
        let Some(len) = count.and_then(|count| dtype.byte_len(count)) else {
            return invalid(format!("shape {shape:?} is too large"));
        };
        let name = name.to_owned();
        let shape = shape.to_vec();
        self.tensors.push(TensorDescription { name, kind, shape, len: len as u64 });
        Ok(self)
    }

    /// Returns the number of tensors.
    #[must_use]
    pub fn tensor_count(&self) -> usize {
        self.tensors.len()
    }

    /// Returns the size of the file in bytes.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        // `write` returns the error of an invalid alignment.
        let alignment = self.alignment().unwrap_or(DEFAULT_ALIGNMENT);
        let header = (self.header(alignment).len() as u64).next_multiple_of(alignment);
        let data = self.tensors.iter().map(|tensor| tensor.len.next_multiple_of(alignment));
        header + data.sum::<u64>()
    }

    fn alignment(&self) -> Result<u64, String> {
        let found = self.metadata.iter().find(|(key, _)| key == ALIGNMENT_KEY);
        alignment(found.map(|(_, value)| value))
    }

    /// Writes the file, atomically replacing the file at `path`.
    ///
    /// `fill` is called with the index of each tensor, in the order in which they were added, and
    /// must write exactly the bytes of that tensor.
    ///
    /// # Errors
    /// - The error of `fill`.
    /// - [`Error::InvalidTensor`] if `fill` writes fewer or more bytes than the tensor has.
    /// - [`Error::BadFile`] if the alignment in the metadata is invalid.
    /// - [`Error::Io`] if the file cannot be written.
    ///
    /// The file at `path` is unchanged after an error.
    pub fn write(
        &self,
        path: impl AsRef<Path>,
        mut fill: impl FnMut(usize, &mut dyn Write) -> Result<(), FillError>,
    ) -> Result<()> {
        let path = path.as_ref();
        let alignment = self.alignment().map_err(|reason| Error::bad_file(path, reason))?;
        let mut failed = None;
        let written = write_file(path, |out| {
            let header = self.header(alignment);
            out.write_all(&header)?;
            pad(header.len() as u64, alignment, out)?;
            for (i, tensor) in self.tensors.iter().enumerate() {
                let mut counted = ByteCounter { out: &mut *out, written: 0 };
                match fill(i, &mut counted) {
                    Ok(()) if counted.written == tensor.len => {}
                    Ok(()) => {
                        let written = counted.written;
                        let len = tensor.len;
                        let reason = format!("{written} bytes were written, expected {len}");
                        failed = Some(Error::invalid_tensor(&tensor.name, reason));
                        return Err(io::Error::other("wrong size of a tensor"));
                    }
                    Err(FillError::Write(error)) => return Err(error),
                    Err(FillError::Source(error)) => {
                        failed = Some(error);
                        return Err(io::Error::other("a tensor cannot be read"));
                    }
                }
                pad(tensor.len, alignment, out)?;
            }
            Ok(())
        });
        failed.map_or(written, Err)
    }

    /// Returns everything before the data, without padding.
    fn header(&self, alignment: u64) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend(MAGIC);
        out.extend(VERSION.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            write_string(key, &mut out);
            value.write(&mut out);
        }
        let mut offset = 0_u64;
        for tensor in &self.tensors {
            write_string(&tensor.name, &mut out);
            out.extend(u32::try_from(tensor.shape.len()).unwrap_or(u32::MAX).to_le_bytes());
            out.extend(tensor.shape.iter().rev().flat_map(|side| (*side as u64).to_le_bytes()));
            out.extend(tensor.kind.to_le_bytes());
            out.extend(offset.to_le_bytes());
            offset += tensor.len.next_multiple_of(alignment);
        }
        out
    }
}

/// Why the bytes of a tensor could not be written.
#[derive(Debug)]
#[non_exhaustive]
pub enum FillError {
    /// The file cannot be written.
    Write(io::Error),
    /// The source of the tensor cannot be read.
    Source(Error),
}

impl From<io::Error> for FillError {
    fn from(error: io::Error) -> Self {
        Self::Write(error)
    }
}

impl From<Error> for FillError {
    fn from(error: Error) -> Self {
        Self::Source(error)
    }
}

/// Writes the zeros between `len` bytes and the next multiple of the alignment.
fn pad(len: u64, alignment: u64, out: &mut dyn Write) -> io::Result<()> {
    let padding = len.next_multiple_of(alignment) - len;
    io::copy(&mut io::repeat(0).take(padding), out).map(drop)
}

/// Writer that counts the bytes written through it.
struct ByteCounter<'a> {
    out: &'a mut dyn Write,
    written: u64,
}

impl Write for ByteCounter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.out.write(bytes)?;
        self.written += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
