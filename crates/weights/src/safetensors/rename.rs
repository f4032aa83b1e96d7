//! Copies a safetensors file with other tensor names, or without some of its tensors.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::{self, Read as _, Seek as _, SeekFrom, Write};
use std::path::Path;

use serde_json::json;

use super::header::TensorEntry;
use super::read::{TensorFile, TensorFileBytes};
use crate::atomic::write_file;
use crate::{Error, Result};

/// Size of the buffer through which tensor data is copied, in bytes.
const BUFFER: usize = 1 << 20;

impl TensorFile {
    /// Writes a copy of the file to `path`, with the names that `rename` returns and without the
    /// tensors for which it returns `None`. Atomically replaces the file at `path`, which may be this
    /// one.
    ///
    /// The data is copied in pieces of 1 MiB.
    ///
    /// ```
    /// # use tinkex_weights::{NamedTensor, TensorFile, TensorSlice, write_tensors};
    /// # let folder = tempfile::tempdir()?;
    /// # let path = folder.path().join("x.safetensors");
    /// # let values = TensorSlice::F32(&[1.0, -2.0]);
    /// # write_tensors(&path, &[NamedTensor { name: "old", shape: &[2, 1], values }], &[])?;
    /// TensorFile::open(&path)?.write_renamed(&path, |name| {
    ///     Some(name.replace("old", "new").into())
    /// })?;
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
        rename: impl Fn(&'a str) -> Option<Cow<'a, str>>,
    ) -> Result<()> {
        let mut kept: Vec<(Cow<'a, str>, &TensorEntry)> = self
            .header
            .tensors
            .iter()
            .filter_map(|(name, entry)| Some((rename(name)?, entry)))
            .collect();
        kept.sort_by_key(|(_, entry)| (entry.start, entry.end));
        let header = self.renamed_header(&kept)?;
        write_file(path.as_ref(), |out| {
            out.write_all(&(header.len() as u64).to_le_bytes())?;
            out.write_all(&header)?;
            kept.iter().try_for_each(|(_, entry)| self.copy_data(entry, out))
        })
    }

    /// Returns the JSON header of the tensors `kept`, which are in the order of their data.
    fn renamed_header(&self, kept: &[(Cow<'_, str>, &TensorEntry)]) -> Result<Vec<u8>> {
        let mut entries = BTreeMap::new();
        let mut start = 0;
        for (renamed, entry) in kept {
            let end = start + (entry.end - entry.start);
            let value = json!({
                "dtype": entry.dtype.name(),
                "shape": entry.shape,
                "data_offsets": [start, end],
            });
            start = end;
            if renamed == "__metadata__" || entries.contains_key(renamed) {
                return Err(Error::invalid_tensor(
                    renamed,
                    "the name is already taken or reserved",
                ));
            }
            entries.insert(renamed.clone(), value);
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

    /// Writes the data of a tensor to `out`.
    fn copy_data(&self, entry: &TensorEntry, out: &mut dyn Write) -> io::Result<()> {
        let start = self.data_start + entry.start;
        let mut remaining = entry.end - entry.start;
        let mut file = match &self.source {
            TensorFileBytes::File(file) => file,
            TensorFileBytes::Static(bytes) => {
                return out.write_all(&bytes[start..start + remaining]);
            }
        };
        file.seek(SeekFrom::Start(start as u64))?;
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
