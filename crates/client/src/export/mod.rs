//! Exports of checkpoints: as models merged with their base model, and as PEFT adapters.

mod base;
mod file_error;
mod stop_flag;

use std::fmt;
use std::future::{IntoFuture, pending};
use std::io;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;

use futures_util::future::{BoxFuture, Either, select};
use tinkex_files::{DiskSpace, StagedFolder};
use tinkex_weights::{
    AdapterConversion, AdapterExport, Error as FileError, PeftConfig, RemoteAdapter,
};
use tinkex_wire::{CheckpointKind, TinkerPath, WeightsInfo};

pub use tinkex_weights::{ExportDType, ExportFormat, ExportedModel};

use crate::config::Env;
use crate::error::{Error, ErrorKind, Result, convert};
use crate::rest_client::RestClient;
use crate::service::ServiceClient;
use crate::transport::download::resume::blocking;

use base::BaseFinder;
use file_error::file_error;
use stop_flag::{StopFlag, StopOnDrop};

type OnProgress = Arc<dyn Fn(&ExportProgress) + Send + Sync>;
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
/// Target, options, the headers and shapes of the base model, and the free space are checked before
/// the checkpoint is downloaded; the tensors and values of the adapter before the first file is
/// written. The target folder appears when it is complete. If [`base`](Self::base) is set and has
/// another name than the base model that the adapter names, a warning is logged.
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
/// the adapter does not fit the base model; [`ErrorKind::Io`] if files cannot be read or
/// written, or the disk is too full; [`ErrorKind::Cancelled`] if [`cancel_on`](Self::cancel_on)
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
    disk: DiskSpace,
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
pub struct ExportProgress {
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
        Self {
            source,
            env,
            options: AdapterExport::new("", &to),
            to,
            base: None,
            format: ExportFormat::default(),
            disk: DiskSpace::default(),
            find_base: None,
            on_progress: None,
            cancel: None,
        }
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

    /// Sets the element type of the weights. Defaults to the element type of the base model, and to f16 for
    /// [`ExportFormat::Gguf`].
    pub fn dtype(mut self, dtype: ExportDType) -> Self {
        self.options = self.options.dtype(dtype);
        self
    }

    /// Replaces the folder if it exists, once the export is complete. Defaults to false.
    pub fn replace(mut self, replace: bool) -> Self {
        self.options = self.options.replace(replace);
        self
    }

    /// Sets the maximum size in bytes of a safetensors file of [`ExportFormat::Hf`], at least 1.
    /// Larger weights are split into several files. A larger tensor has a file of its own. Defaults
    /// to 5 GB. Setting it for another format is an error.
    pub fn shard_bytes(mut self, bytes: u64) -> Self {
        self.options = self.options.shard_bytes(bytes);
        self
    }

    /// Adds a row to the table of the model card, for example `dataset` and its name.
    pub fn detail(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.options = self.options.detail(name, value);
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
        let disk = self.disk.clone();
        self.options = self.options.free_space(move |folder| disk.available(folder));
        self
    }

    /// Calls `callback` whenever bytes were written to disk.
    pub fn on_progress(
        mut self,
        callback: impl Fn(&ExportProgress) + Send + Sync + 'static,
    ) -> Self {
        self.on_progress = Some(Arc::new(callback));
        self
    }

    /// Stops the export when `signal` resolves. It then removes its temporary files and returns an
    /// error of kind [`ErrorKind::Cancelled`].
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
                Err(Error::new(ErrorKind::Cancelled, "the export was cancelled"))
            }
        }
        .map_err(|error| error.during("export"))
    }

    async fn execute(mut self, stop: StopFlag) -> Result<ExportedModel> {
        let needs_base = self.format != ExportFormat::Peft;
        // Check what can be checked before the first request, and the rest before the download.
        let given_base = self.base.clone().filter(|_| needs_base);
        if let Some(folder) = &given_base {
            self.options = self.options.base(folder);
        }
        let mut has_base = !needs_base || given_base.is_some();
        let mut min_export_bytes = check(&self.options, has_base, None).await?;
        if let Some(info) = self.weights_info().await? {
            if !has_base {
                self.set_base(&info.base_model).await?;
                has_base = true;
            }
            let adapter = RemoteAdapter {
                rank: info.lora_rank.map_or(0, u64::from),
                unembedding: info.train_unembed == Some(true),
            };
            min_export_bytes = check(&self.options, has_base, Some(adapter)).await?;
        }
        // The files of a checkpoint are removed when the export ends.
        let (adapter, downloaded) = self.fetch_adapter(min_export_bytes).await?;
        if !has_base || given_base.is_some() {
            let path = adapter.join(AdapterConversion::FILES[0]);
            let config = blocking(move || PeftConfig::read(path).map_err(file_error)).await?;
            match given_base {
                Some(folder) => warn_of_other_base(&config, &folder),
                None => self.set_base(&config.base_model).await?,
            }
        }
        let options = self.options.adapter(adapter);
        let callback = self.on_progress;
        let _stop_on_drop = StopOnDrop(stop.clone());
        stop.start_writing();
        let write = move || {
            let prepared = options.prepare().map_err(file_error)?;
            let written = prepared.write(|now| {
                if let Some(callback) = &callback {
                    let bytes = now.bytes;
                    let bytes_total = Some(now.bytes_total);
                    let stage = ExportStage::Writing;
                    callback(&ExportProgress { stage, bytes, bytes_total });
                }
                if stop.is_set() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
            drop(downloaded);
            written.map_err(file_error)
        };
        blocking(write).await
    }

    /// Returns the description of the checkpoint, or `None` if only its files have one.
    async fn weights_info(&mut self) -> Result<Option<WeightsInfo>> {
        let ExportSource::Checkpoint { service, path } = &self.source else { return Ok(None) };
        let path = path.clone()?;
        let info = weights_info(service, &path).await?;
        self.options = self.options.clone().detail("checkpoint", path.to_string());
        Ok(info)
    }

    /// Returns the folder of the adapter, and the temporary folder to which a checkpoint was
    /// downloaded. The download leaves `reserved` bytes of the disk free.
    async fn fetch_adapter(&mut self, reserved: u64) -> Result<(PathBuf, Option<StagedFolder>)> {
        let (service, path) = match &self.source {
            ExportSource::Adapter(folder) => return Ok((folder.clone(), None)),
            ExportSource::Checkpoint { service, path } => (service, path.clone()?),
        };
        let staged = staging(&self.to).await?;
        let target = staged.path().join("adapter");
        let mut download = service.rest().download(path, &target).peft(true);
        download = download.disk(self.disk.clone()).reserve(reserved);
        if let Some(callback) = self.on_progress.clone() {
            download = download.on_progress(move |now| {
                let stage = ExportStage::Downloading;
                let bytes = now.bytes;
                let bytes_total = now.bytes_total;
                callback(&ExportProgress { stage, bytes, bytes_total });
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

    /// Returns the folder of the base model `name`.
    async fn find_base_folder(&mut self, name: &str) -> Result<PathBuf> {
        if let Some(find) = self.find_base.take() {
            let model = name.to_owned();
            let find = move || {
                let failed = |error: io::Error| {
                    let message = format!("cannot provide the base model {model:?}: {error}");
                    Error::new(ErrorKind::Io, message)
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
        let service = match &self.source {
            ExportSource::Checkpoint { service, .. } => Some(service.clone()),
            ExportSource::Adapter(_) => None,
        };
        let run = Box::pin(self.run());
        match service {
            Some(service) => service.transfer(run),
            None => run,
        }
    }
}

/// Checks the options. If the base model is known, also checks it and the free space. Returns the
/// minimum size of the export in bytes, or 0 if the base model is not known.
async fn check(
    options: &AdapterExport,
    has_base: bool,
    adapter: Option<RemoteAdapter>,
) -> Result<u64> {
    let options = options.clone();
    let check = move || {
        let checked = if has_base {
            options.check(adapter.as_ref())
        } else {
            options.check_options().map(|()| 0)
        };
        checked.map_err(file_error)
    };
    blocking(check).await
}

/// Creates a temporary folder beside the target, for the files of the checkpoint. The free space was
/// checked on the file system of the target; the system's temporary folder may have less.
async fn staging(to: &Path) -> Result<StagedFolder> {
    let to = to.to_owned();
    blocking(move || {
        let failed = |error| file_error(FileError::io("create", &to)(error));
        StagedFolder::with_parents(&to).map_err(failed)
    })
    .await
}

/// Logs a warning if the adapter names another base model than the folder that the caller chose.
/// The export checks the shapes of the tensors, which variants of a model have in common.
fn warn_of_other_base(config: &PeftConfig, folder: &Path) {
    let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
    if !config.may_be_base(&folder.to_string_lossy()) {
        let named = &config.base_model;
        let folder = folder.display();
        tracing::warn!(
            "the adapter was trained on {named:?} but is exported with {folder}; results are wrong \
             unless both are the same model"
        );
    }
}

/// Returns the description of a checkpoint, or `None` if the server has none.
async fn weights_info(service: &ServiceClient, path: &TinkerPath) -> Result<Option<WeightsInfo>> {
    match service.rest().get_weights_info(path).await {
        Ok(info) if !info.is_lora => {
            let message = format!("{path} is a fully trained model, not a LoRA adapter");
            let hint = "Download its files with `tinkex checkpoint download`.";
            Err(Error::new(ErrorKind::InvalidInput, message).with_hint(hint))
        }
        Ok(info) => Ok(Some(info)),
        // Not every server describes external weights.
        Err(error) if path.kind() == CheckpointKind::External && error.status().is_some() => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}
