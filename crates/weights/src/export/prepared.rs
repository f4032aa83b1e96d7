//! [`PreparedExport`]: a checked export, and how it is written.

use std::ops::ControlFlow;
use std::path::PathBuf;

use tinkex_files::StagedFolder;

use super::ExportDType;
use super::output::OutputFile;
use super::plan::MergePlan;
use crate::{Error, Result, StoredAdapter};

/// An export whose inputs were checked; created by
/// [`AdapterExport::prepare`](super::AdapterExport::prepare).
#[derive(Debug)]
#[must_use = "nothing is exported until it is written"]
pub struct PreparedExport {
    pub(super) to: PathBuf,
    pub(super) replace: bool,
    pub(super) adapter: StoredAdapter,
    pub(super) plan: Option<MergePlan>,
    pub(super) dtype: Option<ExportDType>,
    pub(super) files: Vec<OutputFile>,
}

/// Progress of [`PreparedExport::write`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConversionProgress {
    /// Bytes that were written.
    pub bytes: u64,
    /// Size of all files in bytes.
    pub bytes_total: u64,
}

/// An export that was written.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExportedModel {
    /// The folder with the files.
    pub folder: PathBuf,
    /// Names of the files, in the order in which they were written.
    pub files: Vec<String>,
    /// Size of all files in bytes.
    pub bytes: u64,
    /// Element type of the weights, or `None` if the tensors have different types: without
    /// [`AdapterExport::dtype`](super::AdapterExport::dtype), each tensor keeps its own.
    ///
    /// GGUF files also have some tensors in other types; see [`ExportDType`].
    pub dtype: Option<ExportDType>,
    /// Whether the export contains a tokenizer. Programs cannot load a merged model without one; a
    /// PEFT folder needs none.
    pub has_tokenizer: bool,
    /// Whether the merged model has a separate unembedding although the base model shares it with
    /// the embedding.
    pub is_untied: bool,
}

impl PreparedExport {
    /// Returns the size of all files in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(OutputFile::bytes).sum()
    }

    /// Writes the files to a temporary folder beside the target, then renames it to the target.
    ///
    /// Calls `progress` at least every few megabytes. If it returns [`ControlFlow::Break`], the
    /// export stops. After an error the temporary folder is removed and the target is unchanged.
    ///
    /// # Errors
    /// - [`Error::Cancelled`] if `progress` stopped the export.
    /// - [`Error::InvalidTensor`] if a merged value is not finite or outside the range of the
    ///   element type.
    /// - [`Error::AlreadyExists`] if the target appeared meanwhile and may not be replaced.
    /// - [`Error::Io`] if a file cannot be read or written.
    pub fn write(
        self,
        mut progress: impl FnMut(ConversionProgress) -> ControlFlow<()>,
    ) -> Result<ExportedModel> {
        let bytes = self.bytes();
        let staged = StagedFolder::with_parents(&self.to).map_err(Error::io("create", &self.to))?;
        let mut written = 0;
        let mut count = |more: u64| {
            written += more;
            match progress(ConversionProgress { bytes: written, bytes_total: bytes }) {
                ControlFlow::Continue(()) => Ok(()),
                ControlFlow::Break(()) => Err(Error::Cancelled),
            }
        };
        count(0)?;
        for file in &self.files {
            file.write(staged.path(), self.plan.as_ref(), &self.adapter, &mut count)?;
        }
        if !self.replace && self.to.symlink_metadata().is_ok() {
            return Err(Error::AlreadyExists { path: self.to });
        }
        staged.commit().map_err(Error::io("replace", &self.to))?;
        let files: Vec<String> = self.files.iter().map(|file| file.name().to_owned()).collect();
        let has_tokenizer =
            files.iter().any(|name| name == "tokenizer.json" || name.ends_with(".gguf"));
        let is_untied = self.plan.as_ref().is_some_and(MergePlan::unties);
        let folder = self.to;
        let dtype = self.dtype;
        Ok(ExportedModel { folder, files, bytes, dtype, has_tokenizer, is_untied })
    }
}
