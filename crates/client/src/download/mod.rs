//! Downloads of checkpoints and of single files.
//!
//! [`part_file`] downloads files that need no credential with the loop of [`resume`], [`space`] checks that they fit, [`convert`] makes an adapter loadable by
//! `peft`, and [`folder`] publishes all files of a checkpoint at once.

#[cfg(feature = "export")]
mod convert;
mod export;
mod folder;
mod part_file;
mod space;

use std::collections::BTreeMap;
use std::fmt;
use std::future::IntoFuture;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use parking_lot::Mutex;
use tinkex_files::{DiskSpace, NameFilter};
use tinkex_wire::rest::ExternalWeightsUrls;
use tinkex_wire::{CheckpointKind, TinkerPath};
use tokio::time::Instant;

use crate::clock::WallClock;
use crate::error::{Error, ErrorKind, Result, convert};
use crate::rest_client::RestClient;
use crate::service::ServiceClient;
use crate::transport::download::resume;

use export::Export;
use folder::StagingFolder;
#[cfg(feature = "export")]
pub(crate) use part_file::SPACE_HINT;
use part_file::{FileFetcher, FilePaths};
use space::SpaceBudget;

/// Default number of files downloaded at the same time.
const DEFAULT_PARALLEL: usize = 4;
/// URLs that expire within this time, in seconds, are requested again before they are used.
const EXPIRY_MARGIN: f64 = 300.0;
/// Age up to which a URL is used regardless of its expiry: the clocks of client and server may
/// differ.
const TRUSTED_URL_AGE: Duration = Duration::from_secs(60);

type OnProgress = Arc<dyn Fn(&DownloadProgress) + Send + Sync>;

/// Builder for the download of a checkpoint; created by [`RestClient::download`] and run by
/// `.await`.
///
/// The target folder appears when all files are complete. An interrupted download leaves
/// `NAME.part` beside it, which the next download into the same folder continues.
///
/// The files are kept as the server sends them. `peft`, a method of the feature `export`, converts an
/// adapter, so that the library `peft` loads every tensor.
///
/// ```no_run
/// # async fn run(service: tinkex::ServiceClient) -> tinkex::Result<()> {
/// let checkpoint = service
///     .rest()
///     .download("tinker://run/weights/final", "adapter")
///     .exclude("*.md")
///     .on_progress(|now| println!("{} of {:?} bytes", now.bytes, now.bytes_total))
///     .await?;
/// println!("{} bytes in {}", checkpoint.bytes, checkpoint.folder.display());
/// # Ok(()) }
/// ```
///
/// # Errors
/// [`ErrorKind::Conflict`] if the folder exists and may not be replaced, or another download into
/// it is running; [`ErrorKind::NotFound`] if no file matches; [`ErrorKind::Io`] if files cannot be
/// written, or the disk has less free space than the sizes that the server announces; any error of
/// the requests. The hosted service offers no sampler weights for download.
///
/// # Cancel safety
/// Dropping the future stops the download; the next one continues it. The export of a training
/// checkpoint then remains on the server until it expires within an hour.
#[must_use = "a download does nothing until it is awaited"]
pub struct CheckpointDownload {
    service: ServiceClient,
    /// Path, or the error if the argument is not one; the download returns it.
    path: Result<TinkerPath>,
    folder: PathBuf,
    replace: bool,
    filter: NameFilter,
    parallel: usize,
    /// Whether to convert an adapter for the library `peft`.
    #[cfg(feature = "export")]
    peft: bool,
    disk: DiskSpace,
    /// Bytes that must stay free.
    reserved: u64,
    on_progress: Option<OnProgress>,
}

impl fmt::Debug for CheckpointDownload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CheckpointDownload")
            .field("path", &self.path)
            .field("folder", &self.folder)
            .finish_non_exhaustive()
    }
}

/// Progress of a download.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DownloadProgress {
    /// Number of complete files.
    pub files: usize,
    /// Number of all files.
    pub files_total: usize,
    /// Bytes on disk.
    pub bytes: u64,
    /// Size of all files in bytes; `None` until the server has announced the size of each.
    pub bytes_total: Option<u64>,
}

/// Checkpoint that was downloaded.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DownloadedCheckpoint {
    /// The folder with the files.
    pub folder: PathBuf,
    /// Names of the files, relative to the folder, sorted.
    pub files: Vec<String>,
    /// Size of all files in bytes.
    pub bytes: u64,
}

/// Builder for the download of a single file; created by [`RestClient::download_file`] and run by
/// `.await`, which returns the size in bytes.
///
/// # Errors
/// If the file cannot be downloaded or written. The URL is not part of the error.
///
/// # Cancel safety
/// Dropping the future stops the download; the next one continues it.
#[must_use = "a download does nothing until it is awaited"]
pub struct FileDownload {
    service: ServiceClient,
    url: String,
    file: PathBuf,
    on_progress: Option<OnProgress>,
}

impl fmt::Debug for FileDownload {
    /// Leaves out the URL, which may be signed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileDownload").field("file", &self.file).finish_non_exhaustive()
    }
}

impl RestClient {
    /// Downloads the files of a checkpoint into `folder`.
    ///
    /// A training checkpoint is exported first, in a session of its own that is closed afterwards.
    pub fn download(
        &self,
        path: impl TryInto<TinkerPath, Error: Into<Error>>,
        folder: impl Into<PathBuf>,
    ) -> CheckpointDownload {
        CheckpointDownload {
            service: self.service().clone(),
            path: convert("download", path),
            folder: folder.into(),
            replace: false,
            filter: NameFilter::default(),
            parallel: DEFAULT_PARALLEL,
            #[cfg(feature = "export")]
            peft: false,
            disk: DiskSpace::default(),
            reserved: 0,
            on_progress: None,
        }
    }

    /// Downloads a file from a URL that needs no credential, for example an exported trace.
    ///
    /// An existing file is replaced once the new one is complete. An interrupted download leaves
    /// `NAME.part`, which the next one continues.
    ///
    /// ```no_run
    /// # async fn run(rest: tinkex::RestClient, url: &str) -> tinkex::Result<()> {
    /// let bytes = rest.download_file(url, "session.pftrace").await?;
    /// # Ok(()) }
    /// ```
    pub fn download_file(&self, url: impl Into<String>, file: impl Into<PathBuf>) -> FileDownload {
        FileDownload {
            service: self.service().clone(),
            url: url.into(),
            file: file.into(),
            on_progress: None,
        }
    }
}

fn fetcher<'a>(service: &'a ServiceClient, space: &'a Arc<SpaceBudget>) -> FileFetcher<'a> {
    FileFetcher { http: &**service.settings().http(), options: *service.options(), space }
}

impl FileDownload {
    /// Calls `callback` whenever bytes were written to disk.
    pub fn on_progress(
        mut self,
        callback: impl Fn(&DownloadProgress) + Send + Sync + 'static,
    ) -> Self {
        self.on_progress = Some(Arc::new(callback));
        self
    }

    async fn run(self) -> Result<u64> {
        let with_suffix = |suffix: &str| {
            let mut name = self.file.as_os_str().to_owned();
            name.push(suffix);
            PathBuf::from(name)
        };
        let part = with_suffix(".part");
        let etag = with_suffix(".part.etag");
        let paths = FilePaths { complete: self.file.clone(), part, etag, managed: false };
        let on_progress = |bytes, bytes_total| {
            if let Some(callback) = &self.on_progress {
                callback(&DownloadProgress { files: 0, files_total: 1, bytes, bytes_total });
            }
        };
        let name = file_name(&self.file);
        let space = Arc::default();
        fetcher(&self.service, &space).fetch(&name, &self.url, paths, &on_progress).await
    }
}

fn file_name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

impl IntoFuture for FileDownload {
    type Output = Result<u64>;
    type IntoFuture = BoxFuture<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        let service = self.service.clone();
        service.transfer(Box::pin(self.run()))
    }
}

impl CheckpointDownload {
    /// Replaces the folder if it exists, once all files are complete. Defaults to false.
    pub fn replace(mut self, replace: bool) -> Self {
        self.replace = replace;
        self
    }

    /// Adds a pattern of files to download, such as `*.json`. `*` matches any number of
    /// characters, `?` one. Defaults to all files.
    pub fn include(mut self, pattern: impl Into<String>) -> Self {
        self.filter.include.push(pattern.into());
        self
    }

    /// Adds a pattern of files to leave out. Takes precedence over [`include`](Self::include).
    pub fn exclude(mut self, pattern: impl Into<String>) -> Self {
        self.filter.exclude.push(pattern.into());
        self
    }

    /// Sets the number of files downloaded at the same time, at least 1. Defaults to 4.
    pub fn parallel(mut self, files: usize) -> Self {
        self.parallel = files.max(1);
        self
    }

    /// Checks and converts an adapter (`adapter_config.json` and `adapter_model.safetensors`) before
    /// the folder appears, so that `peft` and programs that read its format load every tensor.
    /// Defaults to false.
    ///
    /// The hosted service names the unembedding `model.unembed_tokens`, which becomes `lm_head`;
    /// `target_modules` lists the modules that the tensors adapt.
    ///
    /// # Errors
    /// Awaiting the download then also fails with [`ErrorKind::Decode`] if the adapter is damaged or
    /// its tensors do not match its configuration.
    #[cfg(feature = "export")]
    pub fn peft(mut self, peft: bool) -> Self {
        self.peft = peft;
        self
    }

    /// Calls `callback` whenever bytes were written to disk.
    pub fn on_progress(
        mut self,
        callback: impl Fn(&DownloadProgress) + Send + Sync + 'static,
    ) -> Self {
        self.on_progress = Some(Arc::new(callback));
        self
    }

    /// Sets the function that returns the free bytes of the file system of a folder, or `None` if
    /// they are not known. Defaults to the free space that the system reports, which does not
    /// include every quota.
    pub fn free_space(
        self,
        free_space: impl Fn(&Path) -> Option<u64> + Send + Sync + 'static,
    ) -> Self {
        self.disk(DiskSpace::new(free_space))
    }

    /// Sets where the free space is looked up.
    pub(crate) fn disk(mut self, disk: DiskSpace) -> Self {
        self.disk = disk;
        self
    }

    /// Leaves at least `bytes` of the disk free. Defaults to 0.
    #[cfg(feature = "export")]
    pub(crate) fn reserve(mut self, bytes: u64) -> Self {
        self.reserved = bytes;
        self
    }

    async fn run(self) -> Result<DownloadedCheckpoint> {
        let path = self.path.clone()?;
        let folder = self.folder.clone();
        let replace = self.replace;
        let staging = resume::blocking(move || StagingFolder::open(&folder, replace)).await?;
        if path.kind() != CheckpointKind::Training {
            let urls = self.request_urls(&path, false).await.map_err(|error| {
                match path.kind() {
                CheckpointKind::Sampler if error.status().is_some() => error.with_hint(
                    "Download a training checkpoint (weights) of the run: not every server offers \
                     sampler weights for download.",
                ),
                _ => error,
            }
            })?;
            return self.fetch_all(staging, &path, None, urls).await;
        }
        let export = Export::create(&self.service, &path).await?;
        let downloaded = match self.request_urls(&export.path, true).await {
            Ok(urls) => self.fetch_all(staging, &path, Some(&export), urls).await,
            Err(error) => Err(error),
        };
        export.remove(downloaded.is_ok()).await;
        downloaded
    }

    /// Requests the URLs of the files. Renews the lifetime of an export.
    async fn request_urls(&self, path: &TinkerPath, exported: bool) -> Result<ExternalWeightsUrls> {
        let rest = self.service.rest();
        let urls = rest.get_external_weights_urls(path).await?;
        if exported {
            // A large download may take longer than the lifetime.
            rest.set_checkpoint_ttl(path, Some(export::TTL)).await?;
        }
        Ok(urls)
    }

    /// Downloads the selected files and publishes the folder.
    async fn fetch_all(
        &self,
        staging: StagingFolder,
        path: &TinkerPath,
        export: Option<&Export>,
        urls: ExternalWeightsUrls,
    ) -> Result<DownloadedCheckpoint> {
        let names = self.select(path, &urls)?;
        let source = export.map_or(path, |export| &export.path);
        let exported = export.is_some();
        let tracker = ProgressTracker::new(&names, self.on_progress.clone());
        let current = tokio::sync::Mutex::new((urls, Instant::now()));
        let mut budget = SpaceBudget::new(self.disk.clone(), self.reserved);
        let files_closed = budget.drop_signal();
        let budget = Arc::new(budget);
        // References, which the tasks of all files copy.
        let staging_ref = &staging;
        let current = &current;
        let tracker = &tracker;
        let space = &budget;
        let fetch_one = |name: String| async move {
            let url = {
                // Hold the lock while requesting new URLs, so that only one task requests them.
                let mut urls = current.lock().await;
                if expires_soon(&urls.0, &self.service.settings().clock)
                    && urls.1.elapsed() > TRUSTED_URL_AGE
                {
                    *urls = (self.request_urls(source, exported).await?, Instant::now());
                }
                let url = urls.0.urls.get(&name).cloned();
                url.ok_or_else(|| {
                    let message = format!(
                        "cannot download {name}: the server no longer lists it in {source}"
                    );
                    Error::new(ErrorKind::NotFound, message)
                })?
            };
            let on_progress = |bytes, total| tracker.set(&name, bytes, total);
            let paths = staging_ref.paths(&name);
            let fetcher = fetcher(&self.service, space);
            let bytes = fetcher.fetch(&name, &url, paths, &on_progress).await?;
            tracker.finish(&name, bytes);
            Ok::<_, Error>(bytes)
        };
        let all = stream::iter(names.clone()).map(fetch_one).buffer_unordered(self.parallel);
        if let Err(error) = all.try_for_each(|_| async { Ok(()) }).await {
            // Nothing is written any more when the caller receives the error.
            drop(budget);
            let _ = files_closed.await;
            return Err(error);
        }
        #[cfg(feature = "export")]
        if self.peft {
            convert::convert_adapter(&self.service, &staging, path, space).await?;
        }
        let files = names.clone();
        let publish = move || {
            staging.retain(&names)?;
            let bytes = staging.size(&names)?;
            Ok((staging.finish()?, bytes))
        };
        let (folder, bytes) = resume::blocking(publish).await?;
        Ok(DownloadedCheckpoint { folder, files, bytes })
    }

    /// Returns the names of the files to download, after checking that all are safe.
    fn select(&self, path: &TinkerPath, urls: &ExternalWeightsUrls) -> Result<Vec<String>> {
        for name in urls.urls.keys() {
            folder::check_name(name)?;
        }
        let is_selected = |name: &&String| self.filter.selects(name);
        let names: Vec<String> = urls.urls.keys().filter(is_selected).cloned().collect();
        let not_found = |message: String| Err(Error::new(ErrorKind::NotFound, message));
        match (urls.urls.len(), names.is_empty()) {
            (0, _) => not_found(format!("{path} has no files")),
            (all, true) => {
                not_found(format!("no pattern selects any of the {all} files of {path}"))
            }
            (_, false) => Ok(names),
        }
    }
}

impl IntoFuture for CheckpointDownload {
    type Output = Result<DownloadedCheckpoint>;
    type IntoFuture = BoxFuture<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        let service = self.service.clone();
        service.transfer(Box::pin(self.run()))
    }
}

/// Returns whether the URLs expire within [`EXPIRY_MARGIN`].
fn expires_soon(urls: &ExternalWeightsUrls, clock: &WallClock) -> bool {
    #[expect(clippy::cast_precision_loss, reason = "only whole seconds matter")]
    let expires = urls.expires.unix_micros() as f64 / 1e6;
    expires - clock.unix_now() < EXPIRY_MARGIN
}

/// Progress of one file.
#[derive(Clone, Copy, Default)]
struct FileProgress {
    bytes: u64,
    total: Option<u64>,
    is_complete: bool,
}

/// Adds up the progress of all files.
struct ProgressTracker {
    files: Mutex<BTreeMap<String, FileProgress>>,
    on_progress: Option<OnProgress>,
}

impl ProgressTracker {
    fn new(names: &[String], on_progress: Option<OnProgress>) -> Self {
        let files = names.iter().map(|name| (name.clone(), FileProgress::default())).collect();
        Self { files: Mutex::new(files), on_progress }
    }

    fn set(&self, name: &str, bytes: u64, total: Option<u64>) {
        self.update(name, FileProgress { bytes, total, is_complete: false });
    }

    fn finish(&self, name: &str, bytes: u64) {
        self.update(name, FileProgress { bytes, total: Some(bytes), is_complete: true });
    }

    fn update(&self, name: &str, progress: FileProgress) {
        let now = {
            let mut files = self.files.lock();
            if let Some(file) = files.get_mut(name) {
                *file = progress;
            }
            DownloadProgress {
                files: files.values().filter(|file| file.is_complete).count(),
                files_total: files.len(),
                bytes: files.values().map(|file| file.bytes).sum(),
                bytes_total: files.values().map(|file| file.total).sum(),
            }
        };
        if let Some(callback) = &self.on_progress {
            callback(&now);
        }
    }
}
