//! Bringing the files of a checkpoint here.

mod export;
mod file;
mod folder;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use tinkex_wire::rest::ExternalWeightsUrls;
use tinkex_wire::{CheckpointKind, TinkerPath};
use tokio::time::Instant;

use crate::clock;
use crate::error::{Error, ErrorKind, Result};
use crate::rest_client::RestClient;
use crate::service::ServiceClient;

use export::Export;
use file::{Fetch, Place};
use folder::Staging;

/// Files that are fetched side by side, unless told otherwise.
const PARALLEL: usize = 4;
/// URLs that last no longer than this are asked for again before they are used…
const SHORTLY: f64 = 300.0;
/// … unless they are new: the server's clock may not be ours.
const NEW: Duration = Duration::from_secs(60);

type OnProgress = Arc<dyn Fn(&DownloadProgress) + Send + Sync>;

/// Collects how a checkpoint is downloaded; made by [`RestClient::download`].
///
/// Nothing appears under the target's name before all of it is there. What an interrupted download
/// leaves beside it (`NAME.part`) is used by the next one into the same folder.
///
/// ```no_run
/// # async fn run(service: tinkex::ServiceClient) -> tinkex::Result<()> {
/// let path = "tinker://run/weights/final".parse()?;
/// let files = service
///     .rest()
///     .download(path)
///     .on_progress(|now| println!("{} of {:?} bytes", now.bytes, now.bytes_total))
///     .to("adapter")
///     .await?;
/// println!("{} bytes in {}", files.bytes, files.folder.display());
/// # Ok(()) }
/// ```
#[must_use]
pub struct Download {
    service: ServiceClient,
    path: TinkerPath,
    replace: bool,
    include: Vec<String>,
    exclude: Vec<String>,
    parallel: usize,
    on_progress: Option<OnProgress>,
}

impl fmt::Debug for Download {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Download").field("path", &self.path).finish_non_exhaustive()
    }
}

/// How far a download is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DownloadProgress {
    /// Files that are whole.
    pub files: usize,
    /// All files.
    pub files_total: usize,
    /// Bytes that are here.
    pub bytes: u64,
    /// All bytes, once the server has told the size of every file.
    pub bytes_total: Option<u64>,
}

/// What was downloaded.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Downloaded {
    /// Where it is.
    pub folder: PathBuf,
    /// The files' names there.
    pub files: Vec<String>,
    /// How large they are together.
    pub bytes: u64,
}

impl RestClient {
    /// Downloads a checkpoint's files, which `peft` and others load as they are.
    ///
    /// A training checkpoint is exported first, in a session of its own that is closed afterwards.
    pub fn download(&self, path: TinkerPath) -> Download {
        Download {
            service: self.service().clone(),
            path,
            replace: false,
            include: Vec::new(),
            exclude: Vec::new(),
            parallel: PARALLEL,
            on_progress: None,
        }
    }

    /// Downloads one file from a URL that needs no credential, such as that of a trace, and returns
    /// its size. A file of that name is replaced once the new one is whole.
    ///
    /// # Errors
    /// If the file cannot be fetched or written. The URL is not part of the error.
    pub async fn download_file(
        &self,
        url: &str,
        file: &Path,
        on_progress: impl Fn(&DownloadProgress) + Send + Sync,
    ) -> Result<u64> {
        let beside = |ending: &str| {
            let mut name = file.as_os_str().to_owned();
            name.push(ending);
            PathBuf::from(name)
        };
        // A file that is here already may be anything: only a part of ours is gone on with.
        let (part, tag) = (beside(".part"), beside(".part.tag"));
        let grown = beside(".part.whole");
        let place = Place { whole: grown.clone(), part, tag: tag.clone() };
        let told = |bytes, bytes_total| {
            on_progress(&DownloadProgress { files: 0, files_total: 1, bytes, bytes_total });
        };
        let name = file.file_name().map(|name| name.to_string_lossy().into_owned());
        let bytes =
            fetch(self.service()).file(&name.unwrap_or_default(), url, &place, &told).await?;
        let file = file.to_owned();
        file::off_runtime(move || {
            std::fs::rename(grown, file)?;
            // It may not have had one.
            let _ = std::fs::remove_file(tag);
            Ok(())
        })
        .await?;
        Ok(bytes)
    }
}

fn fetch(service: &ServiceClient) -> Fetch<'_> {
    Fetch { http: service.settings().http(), retry: service.settings().retry }
}

impl Download {
    /// Replaces the folder if it exists, once the new files are all there.
    pub fn replace(mut self, replace: bool) -> Self {
        self.replace = replace;
        self
    }

    /// Only files whose names fit one of these patterns (`*.json`).
    pub fn include(mut self, pattern: impl Into<String>) -> Self {
        self.include.push(pattern.into());
        self
    }

    /// No files whose names fit one of these patterns.
    pub fn exclude(mut self, pattern: impl Into<String>) -> Self {
        self.exclude.push(pattern.into());
        self
    }

    /// How many files are fetched side by side.
    pub fn parallel(mut self, files: usize) -> Self {
        self.parallel = files.max(1);
        self
    }

    /// Called whenever more of it is here.
    pub fn on_progress(mut self, told: impl Fn(&DownloadProgress) + Send + Sync + 'static) -> Self {
        self.on_progress = Some(Arc::new(told));
        self
    }

    /// Brings the files into this folder.
    ///
    /// # Errors
    /// [`ErrorKind::Conflict`] if the folder exists, [`ErrorKind::InvalidInput`] if the checkpoint
    /// was saved to sample from, and whatever keeps files from being fetched or written. What is
    /// here by then is used by the next attempt.
    pub async fn to(self, folder: impl Into<PathBuf>) -> Result<Downloaded> {
        if self.path.kind() == CheckpointKind::Sampler {
            let why = format!("{} was saved to sample from, and has no files", self.path);
            let hint = "download a training checkpoint (weights) or external weights";
            return Err(Error::new(ErrorKind::InvalidInput, why).with_hint(hint));
        }
        let (folder, replace) = (folder.into(), self.replace);
        let staging = tokio::task::spawn_blocking(move || Staging::open(&folder, replace)).await;
        let staging = staging.expect("it does not panic")?;
        if self.path.kind() == CheckpointKind::External {
            let urls = self.urls(&self.path, false).await?;
            return self.bring(staging, &self.path, false, urls).await;
        }
        let export = Export::make(&self.service, &self.path).await?;
        let brought = match self.urls(&export.path, true).await {
            Ok(urls) => self.bring(staging, &export.path, true, urls).await,
            Err(error) => Err(error),
        };
        export.end(brought.is_ok()).await;
        brought
    }

    async fn urls(&self, path: &TinkerPath, exported: bool) -> Result<ExternalWeightsUrls> {
        let rest = self.service.rest();
        let urls = rest.get_external_weights_urls(path).await?;
        if exported {
            // It must not go while its files are fetched.
            rest.set_checkpoint_ttl(path, Some(export::KEPT.as_secs())).await?;
        }
        Ok(urls)
    }

    async fn bring(
        &self,
        staging: Staging,
        path: &TinkerPath,
        exported: bool,
        urls: ExternalWeightsUrls,
    ) -> Result<Downloaded> {
        let names = self.chosen(&urls)?;
        let so_far = SoFar::new(&names, self.on_progress.clone());
        let fresh = tokio::sync::Mutex::new((urls, Instant::now()));
        let (staging_ref, fresh, so_far) = (&staging, &fresh, &so_far);
        let one = |name: String| async move {
            let url = {
                // Held while new URLs are asked for: one of the files asks, the others use them.
                let mut urls = fresh.lock().await;
                if ends_shortly(&urls.0) && urls.1.elapsed() > NEW {
                    *urls = (self.urls(path, exported).await?, Instant::now());
                }
                let gone = || Error::new(ErrorKind::NotFound, format!("{name} is gone meanwhile"));
                urls.0.urls.get(&name).cloned().ok_or_else(gone)?
            };
            let told = |bytes, total| so_far.note(&name, bytes, total);
            let bytes =
                fetch(&self.service).file(&name, &url, &staging_ref.place(&name), &told).await?;
            so_far.whole(&name, bytes);
            Ok::<_, Error>(bytes)
        };
        let all = stream::iter(names.clone()).map(one).buffer_unordered(self.parallel);
        let bytes = all.try_fold(0, |sum, bytes| async move { Ok(sum + bytes) }).await?;
        let files = names.clone();
        let folder = tokio::task::spawn_blocking(move || {
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            staging.keep_only(&names).map_err(|why| file::disk(Path::new("."), &why))?;
            staging.finish()
        })
        .await
        .expect("it does not panic")?;
        Ok(Downloaded { folder, files, bytes })
    }

    /// The names that are wanted, all of them harmless.
    fn chosen(&self, urls: &ExternalWeightsUrls) -> Result<Vec<String>> {
        for name in urls.urls.keys() {
            folder::check(name)?;
        }
        let any = |patterns: &[String], name: &str| {
            patterns.iter().any(|pattern| folder::fits(pattern, name))
        };
        let wanted = |name: &&String| {
            (self.include.is_empty() || any(&self.include, name)) && !any(&self.exclude, name)
        };
        let names: Vec<String> = urls.urls.keys().filter(wanted).cloned().collect();
        let nothing = |why: String| Err(Error::new(ErrorKind::NotFound, why));
        match (urls.urls.len(), names.is_empty()) {
            (0, _) => nothing(format!("{} has no files", self.path)),
            (all, true) => nothing(format!("none of the {all} files of {} is wanted", self.path)),
            (_, false) => Ok(names),
        }
    }
}

fn ends_shortly(urls: &ExternalWeightsUrls) -> bool {
    #[expect(clippy::cast_precision_loss, reason = "seconds are enough")]
    let until = urls.expires.unix_micros() as f64 / 1e6;
    until - clock::unix_now() < SHORTLY
}

/// How far one file is.
#[derive(Clone, Copy, Default)]
struct Growth {
    bytes: u64,
    total: Option<u64>,
    whole: bool,
}

/// How far every file is.
struct SoFar {
    files: Mutex<BTreeMap<String, Growth>>,
    on_progress: Option<OnProgress>,
}

impl SoFar {
    fn new(names: &[String], on_progress: Option<OnProgress>) -> Self {
        let files = names.iter().map(|name| (name.clone(), Growth::default())).collect();
        Self { files: Mutex::new(files), on_progress }
    }

    fn note(&self, name: &str, bytes: u64, total: Option<u64>) {
        self.change(name, Growth { bytes, total, whole: false });
    }

    fn whole(&self, name: &str, bytes: u64) {
        self.change(name, Growth { bytes, total: Some(bytes), whole: true });
    }

    fn change(&self, name: &str, to: Growth) {
        let now = {
            let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(file) = files.get_mut(name) {
                *file = to;
            }
            DownloadProgress {
                files: files.values().filter(|file| file.whole).count(),
                files_total: files.len(),
                bytes: files.values().map(|file| file.bytes).sum(),
                bytes_total: files.values().map(|file| file.total).sum(),
            }
        };
        if let Some(told) = &self.on_progress {
            told(&now);
        }
    }
}
