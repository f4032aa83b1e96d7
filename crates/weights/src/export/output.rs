//! [`OutputFile`]: a file of an export, whose size is known before it is written.

use std::fs::File;
use std::io::{self, BufWriter, Read as _, Write};
use std::path::{Path, PathBuf};

use tinkex_files::AtomicWrite;

use super::gguf::GgufContent;
use super::plan::{MergePlan, PlannedTensor};
use super::tensor_rows::TensorRows;
use crate::safetensors::{TensorInfo, header};
use crate::{Error, Result, StoredAdapter};

/// Size of the buffer through which files are copied, in bytes.
const COPY_BUFFER: usize = 1 << 20;

/// A file of an export.
#[derive(Debug)]
pub(super) struct OutputFile {
    name: String,
    content: Content,
    bytes: u64,
}

#[derive(Debug)]
enum Content {
    /// A safetensors file with merged tensors, given by their indexes in the plan.
    Merged { header: Vec<u8>, tensors: Vec<usize> },
    /// A safetensors file with the tensors of the adapter, given by their names there.
    Adapter { header: Vec<u8>, tensors: Vec<String> },
    /// A GGUF file.
    Gguf(Box<GgufContent>),
    /// A copy of a file.
    Copy(PathBuf),
    /// A text.
    Text(Vec<u8>),
}

/// Counts written bytes. Returns [`Error::Cancelled`] to stop the export.
pub(super) type Count<'a> = &'a mut dyn FnMut(u64) -> Result<()>;

impl OutputFile {
    /// Creates a safetensors file with tensors of the plan.
    pub(super) fn merged(
        name: impl Into<String>,
        plan: &MergePlan,
        mut tensors: Vec<usize>,
    ) -> Result<Self> {
        let all = plan.tensors();
        // Larger elements first, so that every tensor is aligned. The sort is stable.
        tensors.sort_by_key(|&i| std::cmp::Reverse(all[i].dtype.block_bytes()));
        let info: Vec<TensorInfo<'_>> = tensors
            .iter()
            .map(|&i| &all[i])
            .map(|PlannedTensor { name, dtype, shape, .. }| TensorInfo {
                name,
                dtype: *dtype,
                shape,
            })
            .collect();
        let header = header(&info, &[("format", "pt")])?;
        let data: u64 = tensors.iter().map(|&i| all[i].bytes()).sum();
        let bytes = 8 + header.len() as u64 + data;
        Ok(Self { name: name.into(), content: Content::Merged { header, tensors }, bytes })
    }

    /// Creates a safetensors file with tensors of the adapter. `tensors` has the name of each in
    /// the adapter and in the file.
    pub(super) fn adapter(
        name: impl Into<String>,
        adapter: &StoredAdapter,
        mut tensors: Vec<(String, String)>,
    ) -> Result<Self> {
        let size =
            |name: &String| adapter.file().get(name).map_or(0, |found| found.dtype().block_bytes());
        tensors.sort_by_key(|(source, _)| std::cmp::Reverse(size(source)));
        let mut info = Vec::with_capacity(tensors.len());
        let mut data = 0;
        for (source, name) in &tensors {
            let stored = adapter.file().tensor(source)?;
            info.push(TensorInfo { name, dtype: stored.dtype(), shape: stored.shape() });
            data += (stored.count() * stored.dtype().block_bytes()) as u64;
        }
        let header = header(&info, &[("format", "pt")])?;
        let bytes = 8 + header.len() as u64 + data;
        let tensors = tensors.into_iter().map(|(source, _)| source).collect();
        Ok(Self { name: name.into(), content: Content::Adapter { header, tensors }, bytes })
    }

    /// Creates a GGUF file.
    pub(super) fn gguf(name: impl Into<String>, content: GgufContent) -> Self {
        let bytes = content.bytes();
        Self { name: name.into(), content: Content::Gguf(Box::new(content)), bytes }
    }

    /// Creates a copy of the file `path`.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read.
    pub(super) fn copy(name: impl Into<String>, path: PathBuf) -> Result<Self> {
        let bytes = std::fs::metadata(&path).map_err(Error::io("read", &path))?.len();
        Ok(Self { name: name.into(), content: Content::Copy(path), bytes })
    }

    /// Creates a text file.
    pub(super) fn text(name: impl Into<String>, text: impl Into<Vec<u8>>) -> Self {
        let text = text.into();
        let bytes = text.len() as u64;
        Self { name: name.into(), content: Content::Text(text), bytes }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the size of the file in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Writes the file into `folder`, durably.
    ///
    /// # Errors
    /// As [`PreparedExport::write`](super::PreparedExport::write).
    pub(super) fn write(
        &self,
        folder: &Path,
        plan: Option<&MergePlan>,
        adapter: &StoredAdapter,
        count: Count<'_>,
    ) -> Result<()> {
        let path = folder.join(&self.name);
        if let Content::Gguf(content) = &self.content
            && let Some(plan) = plan
        {
            return content.write(&path, plan, adapter, count);
        }
        let failed = |error: io::Error| Error::io("write", &path)(error);
        let mut staged = AtomicWrite::new(&path).stage().map_err(failed)?;
        let mut out = CountedWriter {
            out: BufWriter::with_capacity(COPY_BUFFER, &mut staged),
            path: &path,
            count,
        };
        match &self.content {
            Content::Merged { header, tensors } => {
                out.write_header(header)?;
                // Unreachable: only exports with a plan have merged files.
                let plan = plan.ok_or(Error::Cancelled)?;
                for tensor in tensors.iter().map(|&i| &plan.tensors()[i]) {
                    let merged = plan.open(adapter, tensor)?;
                    let name = &*tensor.name;
                    let dtype = tensor.dtype;
                    let rows = TensorRows { merged, name, dtype, interleaved_heads: None };
                    rows.write(|bytes| out.write(bytes))?;
                }
            }
            Content::Adapter { header, tensors } => {
                out.write_header(header)?;
                let mut buffer = Vec::new();
                for name in tensors {
                    let tensor = adapter.file().tensor(name)?;
                    for start in (0..tensor.byte_len()).step_by(COPY_BUFFER) {
                        buffer.resize(COPY_BUFFER.min(tensor.byte_len() - start), 0);
                        tensor.read_bytes(start, &mut buffer)?;
                        out.write(&buffer)?;
                    }
                }
            }
            Content::Copy(from) => copy(from, self.bytes, &mut out)?,
            Content::Text(text) => out.write(text)?,
            // Written above.
            Content::Gguf(_) => {}
        }
        out.out.flush().map_err(failed)?;
        drop(out);
        staged.commit().map(drop).map_err(failed)
    }
}

/// Writer that reports the bytes it wrote.
struct CountedWriter<'a, W: Write> {
    out: BufWriter<W>,
    path: &'a Path,
    count: Count<'a>,
}

impl<W: Write> CountedWriter<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write_all(bytes).map_err(Error::io("write", self.path))?;
        (self.count)(bytes.len() as u64)
    }

    /// Writes the header of a safetensors file with its length.
    fn write_header(&mut self, header: &[u8]) -> Result<()> {
        self.write(&(header.len() as u64).to_le_bytes())?;
        self.write(header)
    }
}

/// Copies a file, whose length must not have changed.
fn copy<W: Write>(from: &Path, bytes: u64, out: &mut CountedWriter<'_, W>) -> Result<()> {
    let failed = |error: io::Error| Error::io("read", from)(error);
    let mut file = File::open(from).map_err(failed)?;
    let mut buffer = vec![0; COPY_BUFFER];
    let mut copied = 0;
    loop {
        let read = file.read(&mut buffer).map_err(failed)?;
        if read == 0 {
            break;
        }
        copied += read as u64;
        out.write(&buffer[..read])?;
    }
    if copied == bytes {
        return Ok(());
    }
    Err(Error::bad_file(from, "its length changed during the export"))
}
