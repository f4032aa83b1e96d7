//! Export of LoRA adapters: merged into their base model, or as PEFT folders.
//!
//! [`plan`] checks the adapter against the base model before the first byte is written, [`merge`]
//! computes the merged tensors row by row, [`tensor_rows`] encodes them, [`hf`], [`gguf`] and
//! [`peft_folder`] list the files of the three formats, and [`prepared`] and [`output`] write them.

mod card;
mod dtype;
mod format;
mod gguf;
mod gguf_tokenizer;
mod hf;
mod merge;
mod output;
mod peft_folder;
mod plan;
mod prepared;
mod remote_adapter;
mod tensor_rows;

use std::path::{Path, PathBuf};

use tinkex_files::{DiskSpace, recover_folder};

use crate::{Error, Result, StoredAdapter};

pub use dtype::ExportDType;
pub use format::ExportFormat;
pub use prepared::{ConversionProgress, ExportedModel, PreparedExport};
pub use remote_adapter::RemoteAdapter;

use card::CardDetails;
use plan::MergePlan;

/// Default limit of the size of a safetensors file in bytes. `transformers` 4 has the same default.
const SHARD_BYTES: u64 = 5_000_000_000;

/// Exports a LoRA adapter: merges it into its base model, or writes it as a PEFT folder.
///
/// Merging adds `alpha / rank · B · A` to the weights in f32 and rounds each result once to the
/// element type of the export. An export holds a few rows of one tensor in memory at a time. If the
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
    /// `None` for [`SHARD_BYTES`].
    shard_bytes: Option<u64>,
    details: Vec<(String, String)>,
    disk: DiskSpace,
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
            shard_bytes: None,
            details: Vec::new(),
            disk: DiskSpace::default(),
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

    /// Sets the maximum size in bytes of a safetensors file of [`ExportFormat::Hf`], at least 1.
    /// Larger weights are split into several files. A larger tensor has a file of its own. Defaults
    /// to 5 GB. Setting it for another format is an error.
    pub fn shard_bytes(mut self, bytes: u64) -> Self {
        self.shard_bytes = Some(bytes);
        self
    }

    /// Adds a row to the table of the model card, for example `checkpoint` and its path.
    pub fn detail(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.details.push((name.into(), value.into()));
        self
    }

    /// Sets the function that returns the free bytes of the file system of a folder, or `None` if
    /// they are not known. Defaults to the free space that the system reports, which does not
    /// include every quota.
    pub fn free_space(
        mut self,
        free_space: impl Fn(&Path) -> Option<u64> + Send + Sync + 'static,
    ) -> Self {
        self.disk = DiskSpace::new(free_space);
        self
    }

    /// Checks what needs neither adapter nor base model: that the target does not exist or may be
    /// replaced, that the format can store the element type, and that it can split the weights if
    /// [`shard_bytes`](Self::shard_bytes) is set.
    ///
    /// # Errors
    /// - [`Error::AlreadyExists`] if the target exists and may not be replaced.
    /// - [`Error::InvalidExport`] if an option does not suit the format.
    pub fn check_options(&self) -> Result<()> {
        recover_folder(&self.to).map_err(Error::io("write", &self.to))?;
        if !self.replace && self.to.symlink_metadata().is_ok() {
            return Err(Error::AlreadyExists { path: self.to.clone() });
        }
        let dtype = self.dtype.map_or(Ok(()), |dtype| self.format.check_dtype(dtype));
        let shards = self.shard_bytes.map_or(Ok(()), |bytes| self.format.check_shard_bytes(bytes));
        dtype.and(shards).map_err(|reason| Error::invalid_export(&self.to, reason))
    }

    /// Checks everything that does not need the adapter, so that a caller can check before it
    /// downloads the adapter: the options, the headers and shapes of the base model, its tokenizer
    /// if the format converts it, and the free space for a merged model, with what is known about
    /// the size of `adapter`. Returns the minimum size of the export in bytes, which is 0 for
    /// [`ExportFormat::Peft`].
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare).
    pub fn check(&self, adapter: Option<&RemoteAdapter>) -> Result<u64> {
        self.check_options()?;
        let Some(folder) = self.base_folder()? else { return Ok(0) };
        let mut plan = MergePlan::of_base(folder, self.dtype)?;
        self.check_architecture(&plan)?;
        if adapter.is_some_and(|adapter| adapter.unembedding) {
            plan.untie()?;
        }
        let bytes = match self.format {
            ExportFormat::Gguf => gguf::size(&plan, &self.name())?,
            ExportFormat::Hf | ExportFormat::Peft => plan.bytes(),
        };
        let download = adapter.map_or(0, |adapter| adapter.min_bytes(&plan));
        self.check_space(bytes.saturating_add(download))?;
        Ok(bytes)
    }

    /// Opens the adapter and the base model, and checks everything that can be checked before
    /// writing: the target, the options, the headers and shapes of all tensors, the values of the
    /// adapter, and the free space.
    ///
    /// # Errors
    /// - [`Error::AlreadyExists`] if the target exists and may not be replaced.
    /// - [`Error::InvalidExport`] if an option does not suit the format, or the format cannot store
    ///   the base model.
    /// - [`Error::InvalidBase`] if no base model was set although the format needs one, or it is a
    ///   file.
    /// - [`Error::NotEnoughSpace`] if the file system of the target is too full.
    /// - [`Error::BadFile`] if the adapter does not fit the base model.
    /// - As [`StoredAdapter::open`] and [`ModelFolder::open`](crate::ModelFolder::open).
    pub fn prepare(self) -> Result<PreparedExport> {
        self.check_options()?;
        let base = self.base_folder()?;
        let adapter = StoredAdapter::open(&self.adapter)?;
        adapter.check_finite()?;
        let plan = base.map(|folder| MergePlan::new(folder, &adapter, self.dtype)).transpose()?;
        if let Some(plan) = &plan {
            self.check_architecture(plan)?;
        }
        let dtype = match (&plan, self.format) {
            (_, ExportFormat::Gguf) => Some(self.dtype.unwrap_or(ExportDType::F16)),
            (Some(plan), _) => plan.only_dtype().and_then(ExportDType::from_stored),
            (None, _) => adapter.only_dtype().and_then(ExportDType::from_stored),
        };
        let card = CardDetails {
            name: self.name(),
            config: adapter.config().clone(),
            modules: adapter.modules().map(str::to_owned).collect(),
            base: base.map(Path::to_owned),
            unties: plan.as_ref().is_some_and(MergePlan::unties),
            dtype,
            details: self.details.clone(),
        };
        let files = match &plan {
            Some(plan) if self.format == ExportFormat::Gguf => gguf::files(plan, &card)?,
            Some(plan) => hf::files(plan, &card, self.shard_bytes.unwrap_or(SHARD_BYTES))?,
            None => peft_folder::files(&self.adapter, &adapter, &card)?,
        };
        let to = self.to.clone();
        let replace = self.replace;
        let prepared = PreparedExport { to, replace, adapter, plan, dtype, files };
        self.check_space(prepared.bytes())?;
        Ok(prepared)
    }

    /// Returns the folder of the base model, or `None` if the format needs none.
    fn base_folder(&self) -> Result<Option<&Path>> {
        let folder = match (self.format, &self.base) {
            (ExportFormat::Peft, _) => return Ok(None),
            (_, Some(folder)) => folder,
            (format, None) => {
                let reason = format!("format {format} needs the folder of the base model");
                return Err(Error::invalid_base(&self.to, reason));
            }
        };
        if folder.is_file() {
            let reason = format!(
                "the base model {} is a file, expected a Hugging Face folder; an adapter cannot be \
                 merged into a GGUF file",
                folder.display()
            );
            return Err(Error::invalid_base(&self.to, reason));
        }
        Ok(Some(folder))
    }

    /// Checks that the format can store models of the base model's architecture and settings.
    fn check_architecture(&self, plan: &MergePlan) -> Result<()> {
        if self.format != ExportFormat::Gguf {
            return Ok(());
        }
        gguf::check_architecture(plan.config()).map_err(|reason| {
            let config = plan.folder().join("config.json");
            Error::invalid_export(&self.to, format!("{}: {reason}", config.display()))
        })
    }

    /// Returns the name of the target folder.
    fn name(&self) -> String {
        self.to.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Checks that `needed` bytes are free on the file system of the target.
    fn check_space(&self, needed: u64) -> Result<()> {
        let failed = |shortage| Error::NotEnoughSpace { path: self.to.clone(), shortage };
        self.disk.check(&self.to, needed).map_err(failed)
    }
}
