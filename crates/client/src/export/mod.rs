//! Exports of checkpoints: as models merged with their base model, and as PEFT adapters.

mod base;

use std::fmt;
use std::future::{IntoFuture, pending};
use std::io;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::future::{BoxFuture, Either, select};
use tinkex_files::StagedFolder;
use tinkex_weights::{AdapterExport, Error as FileError, StoredAdapter};
use tinkex_wire::{CheckpointKind, TinkerPath};

pub use tinkex_weights::{ExportDType, ExportFormat, ExportedModel};

use crate::config::Env;
use crate::download::resume::blocking;
use crate::error::{Error, ErrorKind, Result, convert};
use crate::rest_client::RestClient;
use crate::service::ServiceClient;

use base::BaseFinder;

type OnProgress = Arc<dyn Fn(&CheckpointExportProgress) + Send + Sync>;
type FindBase = Box<dyn FnOnce(&str) -> io::Result<Option<PathBuf>> + Send>;

/// Builder for the export of a checkpoint; created by [`RestClient::export`] or
/// [`CheckpointExport::from_adapter`] and run by `.await`.
///
/// The default format, [`ExportFormat::Hf`], is a Hugging Face folder with the adapter merged into
/// the base model. It contains the base model's configuration, tokenizer and chat template, and a
/// model card. [`ExportFormat::Peft`] is the adapter alone, [`ExportFormat::Gguf`] a folder with
/// one GGUF file for llama.cpp.
///
/// The base model is taken from the first of these that has it:
///
/// 1. the folder of [`base`](Self::base);
/// 2. the function of [`find_base`](Self::find_base);
/// 3. the folder that the server of the checkpoint serves, if that server is on this machine;
/// 4. the local hub cache;
/// 5. a folder whose path is the name of the base model.
///
/// It must be a Hugging Face folder. GGUF files are not accepted.
///
/// Headers and shapes of all tensors, the values of the adapter and the free space are checked
/// before the first file is written. The target folder appears when it is complete.
///
/// ```no_run
/// # async fn run(service: tinkex::ServiceClient) -> tinkex::Result<()> {
/// use tinkex::{ExportDType, ExportFormat};
///
/// let model = service
///     .rest()
///     .export("tinker://run/weights/final", "my-model")
///     .format(ExportFormat::Hf)
///     .dtype(ExportDType::Bf16)
///     .on_progress(|now| println!("{:?} {} of {:?} bytes", now.stage, now.bytes, now.bytes_total))
///     .await?;
/// println!("{} bytes in {}", model.bytes, model.folder.display());
/// # Ok(()) }
/// ```
///
/// # Errors
/// [`ErrorKind::Conflict`] if the folder exists and may not be replaced; [`ErrorKind::NotFound`] if
/// checkpoint or base model do not exist; [`ErrorKind::InvalidInput`] if an option does not fit the
/// format, or the checkpoint is not a LoRA adapter; [`ErrorKind::Decode`] if a file is damaged or
/// the adapter does not fit the base model; [`ErrorKind::Config`] if files cannot be read or
/// written, or the disk is too full; [`ErrorKind::Closed`] if [`cancel_on`](Self::cancel_on)
/// stopped it; any error of the requests.
///
/// # Cancel safety
/// Dropping the future stops the export. A thread may still remove the temporary folder beside the
/// target; [`cancel_on`](Self::cancel_on) waits for it.
#[must_use = "an export does nothing until it is awaited"]
pub struct CheckpointExport {
    source: ExportSource,
    env: Env,
    /// Adapter and target are set when the export runs.
    options: AdapterExport,
    to: PathBuf,
    base: Option<PathBuf>,
    format: ExportFormat,
    replace: bool,
    find_base: Option<FindBase>,
    on_progress: Option<OnProgress>,
    cancel: Option<BoxFuture<'static, ()>>,
}

/// Where the adapter is.
enum ExportSource {
    /// A checkpoint on a server: its path, or the error if the argument is not one, which the
    /// export returns.
    Checkpoint { service: ServiceClient, path: Result<TinkerPath> },
    /// A local PEFT folder.
    Adapter(PathBuf),
}

/// Stage of an export.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExportStage {
    /// The files of the checkpoint are downloaded.
    #[default]
    Downloading,
    /// The files of the export are written.
    Writing,
}

/// Progress of a [`CheckpointExport`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CheckpointExportProgress {
    /// Current stage.
    pub stage: ExportStage,
    /// Bytes of this stage that are on disk.
    pub bytes: u64,
    /// Size of all files of this stage in bytes, if it is known.
    pub bytes_total: Option<u64>,
}

impl fmt::Debug for CheckpointExport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CheckpointExport")
            .field("to", &self.to)
            .field("format", &self.format)
            .finish_non_exhaustive()
    }
}

impl RestClient {
    /// Exports a checkpoint to the folder `to`: by default merged with its base model, as a Hugging
    /// Face folder.
    ///
    /// The files of the checkpoint are downloaded first, as by [`download`](Self::download).
    pub fn export(
        &self,
        path: impl TryInto<TinkerPath, Error: Into<Error>>,
        to: impl Into<PathBuf>,
    ) -> CheckpointExport {
        let service = self.service().clone();
        let env = service.settings().env().clone();
        let path = convert("export", path);
        CheckpointExport::new(ExportSource::Checkpoint { service, path }, to.into(), env)
    }
}

impl CheckpointExport {
    /// Exports an adapter in a local PEFT folder, without a server. `env` locates the hub cache.
    ///
    /// ```no_run
    /// # async fn run() -> tinkex::Result<()> {
    /// use tinkex::{CheckpointExport, Env};
    ///
    /// CheckpointExport::from_adapter("adapter", "my-model", &Env::from_process()).await?;
    /// # Ok(()) }
    /// ```
    pub fn from_adapter(folder: impl Into<PathBuf>, to: impl Into<PathBuf>, env: &Env) -> Self {
        Self::new(ExportSource::Adapter(folder.into()), to.into(), env.clone())
    }

    fn new(source: ExportSource, to: PathBuf, env: Env) -> Self {
        let (options, format) = (AdapterExport::new("", &to), ExportFormat::default());
        let (base, find_base, on_progress, cancel) = (None, None, None, None);
        let replace = false;
        Self { source, env, options, to, base, format, replace, find_base, on_progress, cancel }
    }

    /// Sets the folder of the base model. Defaults to a search by name.
    pub fn base(mut self, folder: impl Into<PathBuf>) -> Self {
        self.base = Some(folder.into());
        self
    }

    /// Sets a function that returns the folder of a base model by its name, or `None`. It is called
    /// before the search by name, and not at all if [`base`](Self::base) is set.
    pub fn find_base(
        mut self,
        find: impl FnOnce(&str) -> io::Result<Option<PathBuf>> + Send + 'static,
    ) -> Self {
        self.find_base = Some(Box::new(find));
        self
    }

    /// Sets the format. Defaults to [`ExportFormat::Hf`].
    pub fn format(mut self, format: ExportFormat) -> Self {
        self.format = format;
        self.options = self.options.format(format);
        self
    }

    /// Sets the element type of the weights. Defaults to that of the base model, and to f16 for
    /// [`ExportFormat::Gguf`].
    pub fn dtype(mut self, dtype: ExportDType) -> Self {
        self.options = self.options.dtype(dtype);
        self
    }

    /// Replaces the folder if it exists, once the export is complete. Defaults to false.
    pub fn replace(mut self, replace: bool) -> Self {
        self.replace = replace;
        self.options = self.options.replace(replace);
        self
    }

    /// Sets the size in bytes at which the weights are split into several safetensors files.
    /// Defaults to 5 GB.
    pub fn shard_bytes(mut self, bytes: u64) -> Self {
        self.options = self.options.shard_bytes(bytes);
        self
    }

    /// Adds a row to the table of the model card, for example `dataset` and its name.
    pub fn detail(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.options = self.options.detail(name, value);
        self
    }

    /// Calls `callback` whenever bytes were written to disk.
    pub fn on_progress(
        mut self,
        callback: impl Fn(&CheckpointExportProgress) + Send + Sync + 'static,
    ) -> Self {
        self.on_progress = Some(Arc::new(callback));
        self
    }

    /// Stops the export when `signal` resolves. It then removes its temporary files and returns an
    /// error of kind [`ErrorKind::Closed`].
    pub fn cancel_on(mut self, signal: impl Future<Output = ()> + Send + 'static) -> Self {
        self.cancel = Some(Box::pin(signal));
        self
    }

    async fn run(mut self) -> Result<ExportedModel> {
        let cancel = self.cancel.take().unwrap_or_else(|| Box::pin(pending()));
        let mut cancel = pin!(cancel);
        // The thread that writes stops at the flag and removes its files before `work` resolves.
        let stop = StopFlag::default();
        let work = pin!(self.execute(stop.clone()));
        match select(work, cancel.as_mut()).await {
            Either::Left((result, _)) => result,
            Either::Right((_, work)) => {
                stop.set();
                if stop.is_writing() {
                    // The thread checks the flag after every few megabytes.
                    let _ = work.await;
                }
                Err(Error::new(ErrorKind::Closed, "the export was cancelled"))
            }
        }
        .map_err(|error| error.during("export"))
    }

    async fn execute(mut self, stop: StopFlag) -> Result<ExportedModel> {
        if !self.replace && self.to.symlink_metadata().is_ok() {
            return Err(file_error(FileError::AlreadyExists { path: self.to.clone() }));
        }
        let needs_base = self.format != ExportFormat::Peft;
        // The base model first: without it, nothing needs to be downloaded.
        let mut base_is_known = !needs_base;
        if let Some(name) = self.base_name().await?
            && needs_base
        {
            self.set_base(&name).await?;
            base_is_known = true;
        }
        // The files of a checkpoint are removed when the export ends.
        let (adapter, downloaded) = self.fetch_adapter().await?;
        if !base_is_known {
            let path = adapter.clone();
            let open = move || StoredAdapter::open(path).map_err(file_error);
            let name = blocking(open).await?.config().base_model.clone();
            self.set_base(&name).await?;
        }
        let (options, callback) = (self.options.adapter(adapter), self.on_progress);
        let _stop_on_drop = StopOnDrop(stop.clone());
        stop.start_writing();
        let write = move || {
            let prepared = options.prepare().map_err(file_error)?;
            let written = prepared.write(|now| {
                if let Some(callback) = &callback {
                    let (bytes, bytes_total) = (now.bytes, Some(now.bytes_total));
                    let stage = ExportStage::Writing;
                    callback(&CheckpointExportProgress { stage, bytes, bytes_total });
                }
                if stop.is_set() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
            drop(downloaded);
            written.map_err(file_error)
        };
        blocking(write).await
    }

    /// Returns the name of the base model, or `None` if only the files of the checkpoint name it.
    async fn base_name(&mut self) -> Result<Option<String>> {
        let ExportSource::Checkpoint { service, path } = &self.source else { return Ok(None) };
        let path = path.clone()?;
        let name = base_model(service, &path).await?;
        self.options = self.options.clone().detail("checkpoint", path.to_string());
        Ok(name)
    }

    /// Returns the folder of the adapter, and the temporary folder to which a checkpoint was
    /// downloaded.
    async fn fetch_adapter(&mut self) -> Result<(PathBuf, Option<StagedFolder>)> {
        let (service, path) = match &self.source {
            ExportSource::Adapter(folder) => return Ok((folder.clone(), None)),
            ExportSource::Checkpoint { service, path } => (service, path.clone()?),
        };
        let staged = staging(&self.to).await?;
        let target = staged.path().join("adapter");
        let mut download = service.rest().download(path, &target);
        if let Some(callback) = self.on_progress.clone() {
            download = download.on_progress(move |now| {
                let stage = ExportStage::Downloading;
                let (bytes, bytes_total) = (now.bytes, now.bytes_total);
                callback(&CheckpointExportProgress { stage, bytes, bytes_total });
            });
        }
        download.await?;
        Ok((target, Some(staged)))
    }

    async fn set_base(&mut self, name: &str) -> Result<()> {
        let folder = self.find_base_folder(name).await?;
        self.options = self.options.clone().base(folder);
        Ok(())
    }

    /// Returns the folder of the base model.
    async fn find_base_folder(&mut self, name: &str) -> Result<PathBuf> {
        if let Some(folder) = self.base.take() {
            return Ok(folder);
        }
        if let Some(find) = self.find_base.take() {
            let model = name.to_owned();
            let find = move || {
                let failed = |error: io::Error| {
                    let message = format!("cannot provide the base model {model:?}: {error}");
                    Error::new(ErrorKind::Config, message)
                };
                find(&model).map_err(failed)
            };
            if let Some(folder) = blocking(find).await? {
                return Ok(folder);
            }
        }
        let service = match &self.source {
            ExportSource::Checkpoint { service, .. } => Some(service),
            ExportSource::Adapter(_) => None,
        };
        BaseFinder { env: &self.env, service }.find(name).await
    }
}

impl IntoFuture for CheckpointExport {
    type Output = Result<ExportedModel>;
    type IntoFuture = BoxFuture<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.run())
    }
}

/// Two flags shared with the thread that writes an export: whether it has to stop, and whether it
/// has started.
#[derive(Clone, Debug, Default)]
struct StopFlag(Arc<(AtomicBool, AtomicBool)>);

impl StopFlag {
    fn set(&self) {
        self.0.0.store(true, Ordering::Relaxed);
    }

    fn is_set(&self) -> bool {
        self.0.0.load(Ordering::Relaxed)
    }

    fn start_writing(&self) {
        self.0.1.store(true, Ordering::Relaxed);
    }

    fn is_writing(&self) -> bool {
        self.0.1.load(Ordering::Relaxed)
    }
}

/// Stops the thread that writes when the future of the export is dropped.
struct StopOnDrop(StopFlag);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.set();
    }
}

/// Creates a temporary folder beside the target, for the files of the checkpoint: the target's file
/// system has the space for them, the system's temporary folder perhaps not.
async fn staging(to: &Path) -> Result<StagedFolder> {
    let to = to.to_owned();
    blocking(move || {
        if let Some(parent) = to.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            std::fs::create_dir_all(parent)
                .map_err(|error| file_error(FileError::io("create", parent)(error)))?;
        }
        StagedFolder::new(&to).map_err(|error| file_error(FileError::io("create", &to)(error)))
    })
    .await
}

/// Returns the name of a checkpoint's base model, or `None` if the server does not know it.
async fn base_model(service: &ServiceClient, path: &TinkerPath) -> Result<Option<String>> {
    match service.rest().get_weights_info(path).await {
        Ok(info) if !info.is_lora => {
            let message = format!("{path} is a fully trained model, not a LoRA adapter");
            let hint = "Download its files with `tinkex checkpoint download`.";
            Err(Error::new(ErrorKind::InvalidInput, message).with_hint(hint))
        }
        Ok(info) => Ok(Some(info.base_model)),
        // Not every server describes external weights.
        Err(error) if path.kind() == CheckpointKind::External && error.status().is_some() => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Converts an error of reading or writing files.
fn file_error(error: FileError) -> Error {
    let (kind, hint) = match &error {
        FileError::AlreadyExists { .. } => {
            (ErrorKind::Conflict, "Choose another folder, or allow this one to be replaced.")
        }
        FileError::NotEnoughSpace { .. } => {
            (ErrorKind::Config, "Free disk space, or choose a folder on another disk.")
        }
        FileError::Io { .. } => {
            (ErrorKind::Config, "Check that the path exists and is accessible.")
        }
        FileError::InvalidExport { .. } => {
            (ErrorKind::InvalidInput, "Choose another format or element type.")
        }
        FileError::Cancelled => (ErrorKind::Closed, "Run the export again."),
        FileError::InvalidTensor { .. } => {
            (ErrorKind::Decode, "Choose another element type, or an earlier checkpoint.")
        }
        FileError::BadFile { path, .. } if path.ends_with("tokenizer.json") => (
            ErrorKind::Decode,
            "Choose the format hf: GGUF files support the tokenizers of Llama 3, Qwen2, Qwen3, GPT-2 \
             and SmolLM.",
        ),
        _ => (
            ErrorKind::Decode,
            "Check that adapter and base model belong together and are complete.",
        ),
    };
    Error::new(kind, error.to_string()).with_source(error).with_hint(hint)
}
