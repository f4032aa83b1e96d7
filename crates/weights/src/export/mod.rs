//! Export of LoRA adapters: merged into their base model, or as PEFT folders.
//!
//! [`plan`] checks the adapter against the base model before the first byte is written, [`merge`]
//! computes the merged tensors row by row, [`tensor_rows`] encodes them, [`hf`], [`gguf`] and
//! [`peft_folder`] list the files of the three formats, and [`output`] writes them.

mod card;
mod dtype;
mod gguf;
mod gguf_tokenizer;
mod hf;
mod merge;
mod output;
mod peft_folder;
mod plan;
mod tensor_rows;

use std::fmt;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use tinkex_files::{StagedFolder, available_space, recover_folder};

use crate::{Error, Result, StoredAdapter};

pub use dtype::ExportDType;

use card::CardDetails;
use output::OutputFile;
use plan::MergePlan;

/// Default limit of the size of a safetensors file, in bytes; that of `transformers` 4.
const SHARD_BYTES: u64 = 5_000_000_000;

/// Format of an export.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ExportFormat {
    /// Hugging Face model folder with the merged weights: safetensors, configuration, tokenizer.
    #[default]
    Hf,
    /// PEFT adapter folder: the adapter alone, without the base model.
    Peft,
    /// Folder with one GGUF file, which contains the merged weights, the tokenizer and the chat
    /// template.
    Gguf,
}

impl ExportFormat {
    /// All formats.
    pub const ALL: [Self; 3] = [Self::Hf, Self::Peft, Self::Gguf];

    /// Returns the name of the format, for example `hf`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Hf => "hf",
            Self::Peft => "peft",
            Self::Gguf => "gguf",
        }
    }
}

impl fmt::Display for ExportFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for ExportFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = Self::ALL;
        all.into_iter().find(|format| format.as_str() == text).ok_or_else(|| {
            let names = all.map(Self::as_str).join(", ");
            format!("unknown format {text:?}, expected one of {names}")
        })
    }
}

/// Exports a LoRA adapter: merges it into its base model, or writes it as a PEFT folder.
///
/// Merging adds `alpha / rank · B · A` to the weights in f32 and rounds each result once to the
/// element type of the export. It holds a few rows of one tensor in memory at a time. If the
/// adapter changes the unembedding of a model with tied embeddings, the merged model is untied: it
/// has a separate `lm_head.weight`, and its configuration says so.
///
/// [`prepare`](Self::prepare) checks the inputs and the free space before anything is written. The
/// target folder appears when it is complete.
///
/// ```no_run
/// use std::ops::ControlFlow;
/// use tinkex_weights::{AdapterExport, ExportDType};
///
/// let export = AdapterExport::new("adapter", "merged")
///     .base("models/Qwen3-0.6B")
///     .dtype(ExportDType::Bf16)
///     .prepare()?;
/// println!("{} bytes", export.bytes());
/// let merged = export.write(|now| {
///     println!("{} of {} bytes", now.bytes, now.bytes_total);
///     ControlFlow::Continue(())
/// })?;
/// println!("{}", merged.folder.display());
/// # Ok::<_, tinkex_weights::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "an export does nothing until it is prepared and written"]
pub struct AdapterExport {
    adapter: PathBuf,
    to: PathBuf,
    base: Option<PathBuf>,
    format: ExportFormat,
    dtype: Option<ExportDType>,
    replace: bool,
    shard_bytes: u64,
    details: Vec<(String, String)>,
}

impl AdapterExport {
    /// Exports the adapter folder `adapter` to the folder `to`.
    pub fn new(adapter: impl Into<PathBuf>, to: impl Into<PathBuf>) -> Self {
        Self {
            adapter: adapter.into(),
            to: to.into(),
            base: None,
            format: ExportFormat::default(),
            dtype: None,
            replace: false,
            shard_bytes: SHARD_BYTES,
            details: Vec::new(),
        }
    }

    /// Replaces the adapter folder that was passed to [`new`](Self::new).
    pub fn adapter(mut self, folder: impl Into<PathBuf>) -> Self {
        self.adapter = folder.into();
        self
    }

    /// Sets the folder of the base model. Required unless the format is [`ExportFormat::Peft`].
    pub fn base(mut self, folder: impl Into<PathBuf>) -> Self {
        self.base = Some(folder.into());
        self
    }

    /// Sets the format. Defaults to [`ExportFormat::Hf`].
    pub fn format(mut self, format: ExportFormat) -> Self {
        self.format = format;
        self
    }

    /// Sets the element type of the weights.
    ///
    /// [`ExportFormat::Hf`] by default keeps the type that each tensor has in the base model, and
    /// cannot store quantized types. [`ExportFormat::Gguf`] defaults to f16. With
    /// [`ExportFormat::Peft`], which keeps the types of the adapter, setting one is an error.
    pub fn dtype(mut self, dtype: ExportDType) -> Self {
        self.dtype = Some(dtype);
        self
    }

    /// Replaces the target folder if it exists, once the export is complete. Defaults to false.
    pub fn replace(mut self, replace: bool) -> Self {
        self.replace = replace;
        self
    }

    /// Sets the size in bytes at which the weights are split into several safetensors files.
    /// Defaults to 5 GB. A larger tensor has a file of its own.
    pub fn shard_bytes(mut self, bytes: u64) -> Self {
        self.shard_bytes = bytes;
        self
    }

    /// Adds a row to the table of the model card, for example `checkpoint` and its path.
    pub fn detail(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.details.push((name.into(), value.into()));
        self
    }

    /// Opens the adapter and the base model, and checks everything that can be checked before
    /// writing: the target, the options, the headers and shapes of all tensors, the values of the
    /// adapter, and the free space.
    ///
    /// # Errors
    /// - [`Error::AlreadyExists`] if the target exists and may not be replaced.
    /// - [`Error::InvalidExport`] if an option does not suit the format, or no base model was set.
    /// - [`Error::NotEnoughSpace`] if the file system of the target is too full.
    /// - [`Error::BadFile`] if the adapter does not fit the base model.
    /// - As [`StoredAdapter::open`] and [`ModelFolder::open`](crate::ModelFolder::open).
    pub fn prepare(self) -> Result<PreparedExport> {
        recover_folder(&self.to).map_err(Error::io("write", &self.to))?;
        if !self.replace && self.to.symlink_metadata().is_ok() {
            return Err(Error::AlreadyExists { path: self.to });
        }
        if let Some(dtype) = self.dtype
            && self.format == ExportFormat::Hf
            && dtype.stored().is_none()
        {
            let reason = format!("format hf cannot store {dtype}; choose format gguf for it");
            return Err(Error::invalid_export(&self.adapter, reason));
        }
        let adapter = StoredAdapter::open(&self.adapter)?;
        adapter.check_finite()?;
        let base = match (self.format, &self.base) {
            (ExportFormat::Peft, _) => None,
            (_, Some(folder)) => Some(folder),
            (format, None) => {
                let reason = format!("format {format} needs the folder of the base model");
                return Err(Error::invalid_export(&self.adapter, reason));
            }
        };
        if let Some(file) = base.filter(|path| path.is_file()) {
            let reason = format!(
                "the base model {} is a file, expected a Hugging Face folder; an adapter cannot be \
                 merged into a GGUF file",
                file.display()
            );
            return Err(Error::invalid_export(&self.adapter, reason));
        }
        let plan = base.map(|folder| MergePlan::new(folder, &adapter, self.dtype)).transpose()?;
        let name = self.to.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let dtype = match (&plan, self.format) {
            (_, ExportFormat::Gguf) => Some(self.dtype.unwrap_or(ExportDType::F16)),
            (Some(plan), _) => plan.only_dtype().and_then(ExportDType::from_stored),
            (None, _) => adapter.only_dtype().and_then(ExportDType::from_stored),
        };
        let card = CardDetails {
            name,
            config: adapter.config().clone(),
            modules: adapter.modules().map(str::to_owned).collect(),
            base: base.cloned(),
            unties: plan.as_ref().is_some_and(MergePlan::unties),
            dtype,
            details: self.details,
        };
        let files = match (&plan, self.dtype) {
            (Some(plan), _) if self.format == ExportFormat::Gguf => gguf::files(plan, &card)?,
            (Some(plan), _) => hf::files(plan, &card, self.shard_bytes)?,
            (None, None) => peft_folder::files(&self.adapter, &adapter, &card)?,
            (None, Some(dtype)) => {
                let reason = format!(
                    "format peft keeps the element type of the adapter and cannot convert it to \
                     {dtype}"
                );
                return Err(Error::invalid_export(&self.adapter, reason));
            }
        };
        let (to, replace) = (self.to, self.replace);
        let prepared = PreparedExport { to, replace, adapter, plan, dtype, files };
        check_space(&prepared.to, prepared.bytes())?;
        Ok(prepared)
    }
}

/// An export whose inputs were checked; created by [`AdapterExport::prepare`].
#[derive(Debug)]
#[must_use = "nothing is exported until it is written"]
pub struct PreparedExport {
    to: PathBuf,
    replace: bool,
    adapter: StoredAdapter,
    plan: Option<MergePlan>,
    dtype: Option<ExportDType>,
    files: Vec<OutputFile>,
}

/// Progress of [`PreparedExport::write`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExportProgress {
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
    /// [`AdapterExport::dtype`], each tensor keeps its own.
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
        mut progress: impl FnMut(ExportProgress) -> ControlFlow<()>,
    ) -> Result<ExportedModel> {
        let bytes = self.bytes();
        if let Some(parent) = self.to.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            std::fs::create_dir_all(parent).map_err(Error::io("create", parent))?;
        }
        let staged = StagedFolder::new(&self.to).map_err(Error::io("create", &self.to))?;
        let mut written = 0;
        let mut count = |more: u64| {
            written += more;
            match progress(ExportProgress { bytes: written, bytes_total: bytes }) {
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
        let (folder, dtype) = (self.to, self.dtype);
        Ok(ExportedModel { folder, files, bytes, dtype, has_tokenizer, is_untied })
    }
}

/// Checks that the file system of `path`, which need not exist, has `needed` free bytes.
fn check_space(path: &Path, needed: u64) -> Result<()> {
    let absolute = std::path::absolute(path).map_err(Error::io("write", path))?;
    let existing = absolute.ancestors().find(|folder| folder.exists());
    let available = existing.and_then(available_space);
    match (existing, available) {
        (Some(folder), Some(available)) if available < needed => Err(Error::NotEnoughSpace {
            path: path.to_owned(),
            folder: folder.to_owned(),
            needed,
            available,
        }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(unix)]
    #[test]
    fn a_full_disk_is_found_before_writing() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("not/yet/there");
        check_space(&target, 1).unwrap();
        let error = check_space(&target, 2_400_000_000_000_000_000).unwrap_err();
        let message = error.to_string();
        assert!(message.contains("not/yet/there: needs 2400000000.0 GB, but only "), "{message}");
        assert!(message.ends_with(&format!("free on {}", folder.path().display())), "{message}");
    }
}
