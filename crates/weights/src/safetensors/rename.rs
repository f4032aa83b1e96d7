//! Copies a safetensors file with other tensor names.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::{self, Read as _, Seek as _, SeekFrom, Write};
use std::path::Path;

use serde_json::json;

use super::read::{TensorFile, TensorFileBytes};
use crate::atomic::write_file;
use crate::{Error, Result};

/// Size of the buffer through which tensor data is copied, in bytes.
const BUFFER: usize = 1 << 20;

impl TensorFile {
    /// Writes a copy of the file to `path`, with the names that `rename` returns. Atomically
    /// replaces the file at `path`, which may be this one.
    ///
    /// The data is copied in pieces of 1 MiB.
    ///
    /// ```
    /// # use tinkex_weights::{NamedTensor, TensorFile, TensorSlice, write_tensors};
    /// # let folder = tempfile::tempdir()?;
    /// # let path = folder.path().join("x.safetensors");
    /// # let values = TensorSlice::F32(&[1.0, -2.0]);
    /// # write_tensors(&path, &[NamedTensor { name: "old", shape: &[2, 1], values }], &[])?;
    /// TensorFile::open(&path)?.write_renamed(&path, |name| name.replace("old", "new").into())?;
    /// assert_eq!(TensorFile::open(&path)?.tensor("new")?.to_f32()?, [1.0, -2.0]);
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidTensor`] if two tensors would have the same name; [`Error::Io`] if the file
    /// cannot be read or written. The file at `path` is then unchanged.
    pub fn write_renamed<'a>(
        &'a self,
        path: impl AsRef<Path>,
        rename: impl Fn(&'a str) -> Cow<'a, str>,
    ) -> Result<()> {
        let header = self.renamed_header(rename)?;
        write_file(path.as_ref(), |out| {
            out.write_all(&(header.len() as u64).to_le_bytes())?;
            out.write_all(&header)?;
            self.copy_data(out)
        })
    }

    /// Returns the JSON header with other names.
    fn renamed_header<'a>(&'a self, rename: impl Fn(&'a str) -> Cow<'a, str>) -> Result<Vec<u8>> {
        let mut entries = BTreeMap::new();
        for (name, entry) in &self.header.tensors {
            let renamed = rename(name);
            let value = json!({
                "dtype": entry.dtype.name(),
                "shape": entry.shape,
                "data_offsets": [entry.start, entry.end],
            });
            if renamed == "__metadata__" || entries.contains_key(&renamed) {
                return Err(Error::invalid_tensor(
                    &renamed,
                    "the name is already taken or reserved",
                ));
            }
            entries.insert(renamed, value);
        }
        if !self.header.metadata.is_empty() {
            entries.insert("__metadata__".into(), json!(self.header.metadata));
        }
        let mut text =
            serde_json::to_vec(&entries).expect("maps of strings and numbers serialize to JSON");
        // Readers that map the file expect the data at a multiple of eight bytes.
        let old = self.data_start - 8;
        let keeps_length = text.len() <= old && old.is_multiple_of(8);
        let length = if keeps_length { old } else { text.len().next_multiple_of(8) };
        text.resize(length, b' ');
        Ok(text)
    }

    /// Writes the data of all tensors to `out`.
    fn copy_data(&self, out: &mut dyn Write) -> io::Result<()> {
        let mut file = match &self.source {
            TensorFileBytes::File(file) => file,
            TensorFileBytes::Static(bytes) => return out.write_all(&bytes[self.data_start..]),
        };
        let mut remaining = self.header.tensors.values().map(|entry| entry.end).max().unwrap_or(0);
        file.seek(SeekFrom::Start(self.data_start as u64))?;
        let mut buffer = vec![0; BUFFER.min(remaining)];
        while remaining > 0 {
            let piece = &mut buffer[..BUFFER.min(remaining)];
            file.read_exact(piece)?;
            out.write_all(piece)?;
            remaining -= piece.len();
        }
        Ok(())
    }
}
