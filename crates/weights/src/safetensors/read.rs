//! Reads safetensors files.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use tinkex_files::{FileOperation, announce};

use super::header::{Header, MAX_HEADER_BYTES, TensorEntry};
use crate::stored_tensor::StoredBytes;
use crate::{Error, Result, StoredTensor};

/// An open safetensors file.
///
/// The header is read and validated once, on construction: every tensor lies inside the file and
/// has the length that its shape requires. The elements of a tensor are read when they are used, so
/// that an open file takes no memory for them.
///
/// ```
/// use tinkex_weights::{NamedTensor, TensorFile, TensorSlice, write_tensors};
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("x.safetensors");
/// let values = TensorSlice::F32(&[1.0, -2.0]);
/// write_tensors(&path, &[NamedTensor { name: "x", shape: &[2, 1], values }], &[])?;
/// let file = TensorFile::open(&path)?;
/// assert_eq!(file.tensor("x")?.to_f32()?, [1.0, -2.0]);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    pub(super) source: TensorFileBytes,
    pub(super) header: Header,
    /// Length of everything before the data of the tensors.
    pub(super) data_start: usize,
}

/// Source of a file's bytes.
#[derive(Debug)]
pub(super) enum TensorFileBytes {
    File(File),
    Static(&'static [u8]),
}

impl TensorFile {
    /// Opens the file `path` and validates its header.
    ///
    /// If the file is replaced by rename, the old contents stay readable; if it is truncated, a
    /// later read returns an error.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read, [`Error::BadFile`] if it is not a complete
    /// safetensors file.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let opened = announce(FileOperation::Read(path)).and_then(|()| File::open(path));
        let mut file = opened.map_err(Error::io("open", path))?;
        let metadata = file.metadata().map_err(Error::io("read", path))?;
        if !metadata.is_file() {
            return Err(Error::bad_file(path, "not a regular file"));
        }
        let file_len = usize::try_from(metadata.len())
            .map_err(|_| Error::bad_file(path, "the file is too large for this machine"))?;
        let mut start = [0; 8];
        let length = match file_len {
            0..8 => None,
            _ => {
                file.read_exact(&mut start).map_err(Error::io("read", path))?;
                Some(start)
            }
        };
        let header_len = header_len(length.as_ref(), file_len)
            .map_err(|reason| Error::bad_file(path, reason))?;
        let mut text = vec![0; header_len];
        file.read_exact(&mut text).map_err(Error::io("read", path))?;
        Self::new(path, TensorFileBytes::File(file), &text, file_len)
    }

    /// Validates the header of a file that is embedded in the program. `path` is used only in
    /// errors.
    ///
    /// # Errors
    /// [`Error::BadFile`] if it is not a complete safetensors file.
    pub fn from_static(bytes: &'static [u8], path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let header_len = header_len(bytes.first_chunk(), bytes.len())
            .map_err(|reason| Error::bad_file(path, reason))?;
        let text = &bytes[8..8 + header_len];
        Self::new(path, TensorFileBytes::Static(bytes), text, bytes.len())
    }

    fn new(path: &Path, source: TensorFileBytes, text: &[u8], file_len: usize) -> Result<Self> {
        let data_start = 8 + text.len();
        let header = Header::parse(text, file_len - data_start)
            .map_err(|reason| Error::bad_file(path, reason))?;
        Ok(Self { path: path.to_owned(), source, header, data_start })
    }

    /// Returns the path that errors name.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the names of the tensors, in sorted order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.header.tensors.keys().map(String::as_str)
    }

    /// Returns the metadata of the header, a map of strings.
    #[must_use]
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.header.metadata
    }

    /// Returns the tensor `name`, or `None` if the file does not contain it.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<StoredTensor<'_>> {
        let (name, entry) = self.header.tensors.get_key_value(name)?;
        Some(self.view(name, entry))
    }

    /// Returns the tensor `name`.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] if the file does not contain it.
    pub fn tensor(&self, name: &str) -> Result<StoredTensor<'_>> {
        self.get(name)
            .ok_or_else(|| Error::MissingTensor { path: self.path.clone(), name: name.to_owned() })
    }

    /// Returns all tensors, in the order of their names.
    pub fn tensors(&self) -> impl Iterator<Item = StoredTensor<'_>> {
        self.header.tensors.iter().map(|(name, entry)| self.view(name, entry))
    }

    fn view<'a>(&'a self, name: &'a str, entry: &'a TensorEntry) -> StoredTensor<'a> {
        let start = self.data_start + entry.start;
        let end = self.data_start + entry.end;
        let data = match &self.source {
            TensorFileBytes::File(file) => {
                StoredBytes::File { file, offset: start as u64, len: end - start }
            }
            TensorFileBytes::Static(bytes) => StoredBytes::Memory(&bytes[start..end]),
        };
        StoredTensor::new(&self.path, name, entry.dtype, &entry.shape, data)
    }
}

/// Checks the length of the header, which the first eight bytes of a file contain. `start` is
/// `None` if the file has fewer bytes.
fn header_len(start: Option<&[u8; 8]>, file_len: usize) -> Result<usize, String> {
    let start = start.ok_or_else(|| format!("the file is truncated: {file_len} bytes"))?;
    let length = u64::from_le_bytes(*start);
    if length > MAX_HEADER_BYTES {
        return Err(format!("not a safetensors file: the header would have {length} bytes"));
    }
    match usize::try_from(length) {
        Ok(length) if length <= file_len - 8 => Ok(length),
        _ => {
            Err(format!("the file is truncated: {file_len} bytes with a header of {length} bytes"))
        }
    }
}
