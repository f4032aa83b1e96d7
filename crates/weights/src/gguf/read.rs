//! [`GgufFile`]: an open GGUF file.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use super::cursor::{GgufCursor, ParseError};
use super::header::{GgufHeader, GgufTensorEntry};
use super::tensor_type::{SUPPORTED, TensorType};
use super::value::GgufValue;
use crate::stored_tensor::StoredBytes;
use crate::{Error, Result, StoredTensor};

/// An open GGUF file of version 2 or 3, little endian.
///
/// The metadata and the descriptions of the tensors are read and validated once, on construction:
/// every tensor lies inside the file and has the length that its shape and type require. The
/// elements of a tensor are read when they are used, so that an open file takes no memory for them.
///
/// ```
/// use tinkex_weights::{DType, GgufFile, GgufWriter};
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("x.gguf");
/// let mut writer = GgufWriter::new();
/// writer.metadata("general.name", "example");
/// writer.tensor("x", DType::F32, &[2, 1])?;
/// writer.write(&path, |_, out| Ok(out.write_all(&[0, 0, 128, 63, 0, 0, 0, 192])?))?;
/// let file = GgufFile::open(&path)?;
/// assert_eq!(file.get("general.name").and_then(|name| name.as_str()), Some("example"));
/// assert_eq!(file.tensor("x")?.to_f32()?, [1.0, -2.0]);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct GgufFile {
    path: PathBuf,
    source: GgufBytes,
    header: GgufHeader,
}

/// Source of a file's bytes.
#[derive(Debug)]
enum GgufBytes {
    File(File),
    Memory(Vec<u8>),
}

impl GgufFile {
    /// Opens the file `path` and validates its header.
    ///
    /// If the file is replaced by rename, the old contents stay readable; if it is truncated, a
    /// later read returns an error.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read, [`Error::BadFile`] if it is not a complete GGUF
    /// file.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file = File::open(path).map_err(Error::io("open", path))?;
        let metadata = file.metadata().map_err(Error::io("read", path))?;
        if !metadata.is_file() {
            return Err(Error::bad_file(path, "not a regular file"));
        }
        let len = metadata.len();
        let mut reader = BufReader::with_capacity(1 << 16, &file);
        let header = GgufHeader::parse(&mut GgufCursor::new(&mut reader, len), len)
            .map_err(|error| parse_error(path, error))?;
        Ok(Self { path: path.to_owned(), source: GgufBytes::File(file), header })
    }

    /// Validates the header of a file in memory. `path` is used only in errors.
    ///
    /// # Errors
    /// [`Error::BadFile`] if it is not a complete GGUF file.
    pub fn from_bytes(bytes: Vec<u8>, path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let len = bytes.len() as u64;
        let header = GgufHeader::parse(&mut GgufCursor::new(&mut bytes.as_slice(), len), len)
            .map_err(|error| parse_error(path, error))?;
        Ok(Self { path: path.to_owned(), source: GgufBytes::Memory(bytes), header })
    }

    /// Returns the path that errors name.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the metadata, in the order of its keys.
    #[must_use]
    pub fn metadata(&self) -> &BTreeMap<String, GgufValue> {
        &self.header.metadata
    }

    /// Returns a value of the metadata, or `None` if there is no such key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&GgufValue> {
        self.header.metadata.get(key)
    }

    /// Returns the names of the tensors, in sorted order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.header.tensors.keys().map(String::as_str)
    }

    /// Returns whether the file has the tensor `name`.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        self.header.tensors.contains_key(name)
    }

    /// Returns the tensor `name`.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] if the file does not contain it, [`Error::BadFile`] if its type is
    /// not supported.
    pub fn tensor(&self, name: &str) -> Result<StoredTensor<'_>> {
        let Some((name, entry)) = self.header.tensors.get_key_value(name) else {
            return Err(Error::MissingTensor { path: self.path.clone(), name: name.to_owned() });
        };
        let GgufTensorEntry { kind, shape, start, len } = entry;
        let TensorType::Supported(dtype) = *kind else {
            let kind = kind.name();
            // llama.cpp stores rows that are not whole blocks of Q6_K as Q8_0, so that these files
            // have only supported types. Q4_K_M files of such models have Q5_0.
            let reason = format!(
                "tensor {name} has type {kind}, supported are {SUPPORTED}; get the model as a file \
                 of type Q8_0, Q6_K or F16"
            );
            return Err(Error::bad_file(&self.path, reason));
        };
        let data = match &self.source {
            GgufBytes::File(file) => StoredBytes::File { file, offset: *start, len: *len },
            GgufBytes::Memory(bytes) => {
                let start = usize::try_from(*start).unwrap_or(usize::MAX);
                StoredBytes::Memory(bytes.get(start..start + len).unwrap_or_default())
            }
        };
        Ok(StoredTensor::new(&self.path, name, dtype, shape, data))
    }
}

fn parse_error(path: &Path, error: ParseError) -> Error {
    match error {
        ParseError::Io(source) => Error::io("read", path)(source),
        ParseError::Invalid(reason) => Error::bad_file(path, reason),
    }
}
