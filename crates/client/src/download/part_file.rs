//! Downloads of files from URLs that need no credential: checkpoint files and traces.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::IF_NONE_MATCH;
use http::{HeaderMap, HeaderValue, Request};
use tinkex_files::{no_follow, remove_file_if_exists};
use url::Url;

use crate::error::{Error, ErrorKind, Result};
use crate::transport::CallOptions;
use crate::transport::http::{HttpService, Lane};
use crate::transport::request::redirect;
use crate::transport::retry::failed_attempt::FailedAttempt;

use super::space::SpaceBudget;
use crate::transport::download::attempts::Attempts;
use crate::transport::download::resume::{
    PartialFile, ResumableDownload, Validator, blocking, parse_url, to_uri,
};

/// Maximum time without received bytes.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum number of consecutive retries without progress.
const MAX_RETRIES: u32 = 5;

/// Paths of a file during and after its download.
#[derive(Clone, Debug)]
pub(super) struct FilePaths {
    /// Path of the complete file.
    pub(super) complete: PathBuf,
    /// Path of the file while it is incomplete.
    pub(super) part: PathBuf,
    /// Path of the file that stores the entity tag of the content.
    pub(super) etag: PathBuf,
    /// Whether the file at `complete` was put there by an earlier download, together with its
    /// entity tag. It is then reused if the server confirms the tag, and removed when other content
    /// arrives. Otherwise it is a user's file, which is kept until it is replaced.
    pub(super) managed: bool,
}

/// Downloads files without credentials.
#[derive(Clone, Copy)]
pub(super) struct FileFetcher<'a> {
    pub(super) http: &'a dyn HttpService,
    pub(super) options: CallOptions,
    pub(super) space: &'a Arc<SpaceBudget>,
}

impl FileFetcher<'_> {
    /// Downloads `url` to `paths` and returns the size in bytes.
    ///
    /// `name` appears in errors instead of the URL: a signed URL grants access like a credential.
    pub(super) async fn fetch(
        self,
        name: &str,
        url: &str,
        paths: FilePaths,
        on_progress: &(dyn Fn(u64, Option<u64>) + Send + Sync),
    ) -> Result<u64> {
        self.fetch_url(url, paths, on_progress).await.map_err(|error| {
            let error = error.during(format!("the download of {name}"));
            match error.status() {
                Some(400 | 401 | 403 | 404 | 410) => error.with_hint(EXPIRED_HINT),
                _ => error,
            }
        })
    }

    async fn fetch_url(
        self,
        url: &str,
        paths: FilePaths,
        on_progress: &(dyn Fn(u64, Option<u64>) + Send + Sync),
    ) -> Result<u64> {
        let url = parse_url(url)?;
        if paths.managed
            && let Some(size) = self.unchanged(&url, paths.clone()).await?
        {
            on_progress(size, Some(size));
            return Ok(size);
        }
        let space = Arc::clone(self.space);
        let open = || PartFile::open(paths, space).map_err(|error| PartFile::error(&error));
        let (file, etag) = blocking(open).await?;
        let download = ResumableDownload {
            http: self.http,
            lane: Lane::File,
            idle_timeout: IDLE_TIMEOUT,
            piece: None,
            max_size: None,
            verified: false,
            headers: &|_| Ok(HeaderMap::new()),
            refused: &refused,
            on_progress,
        };
        let validator = etag.map(|etag| Validator { etag, origin: None });
        let retries = MAX_RETRIES.min(self.options.attempt_limit() - 1);
        let attempts = Attempts::new(retries).within(self.options.retry_limit());
        download.run(&url, file, validator, None, attempts).await
    }

    /// Returns the size of a file from an earlier download if the server confirms that its content
    /// is current.
    async fn unchanged(self, url: &Url, paths: FilePaths) -> Result<Option<u64>> {
        let stored = blocking(move || {
            let size = fs::metadata(&paths.complete).ok().map(|metadata| metadata.len());
            Ok(size.zip(paths.stored_etag()))
        });
        let Some((size, etag)) = stored.await? else { return Ok(None) };
        let Ok(etag) = HeaderValue::from_str(&etag) else { return Ok(None) };
        let send = |url: Url| -> futures_util::future::BoxFuture<'_, _> {
            let etag = etag.clone();
            Box::pin(async move {
                let mut request = Request::new(Bytes::new());
                *request.uri_mut() = to_uri(&url)?;
                request.headers_mut().insert(IF_NONE_MATCH, etag);
                let sent = self.http.send_streaming(Lane::File, request, IDLE_TIMEOUT);
                sent.await.map_err(Error::from)
            })
        };
        // Ignore failures: they occur again, and are retried, when the file itself is requested.
        let response = redirect::follow(&mut url.clone(), send, |_| false).await;
        Ok(response.is_ok_and(|response| response.status() == 304).then_some(size))
    }
}

/// Creates the error for a response with an unexpected status.
fn refused(status: u16, headers: &HeaderMap, body: &[u8]) -> FailedAttempt {
    let failed = FailedAttempt::from_parts(status, headers, body);
    match failed.error.kind() {
        // Replace the hint about the API key: none was sent.
        ErrorKind::Auth => failed.with_hint(EXPIRED_HINT),
        _ => failed,
    }
}

impl FilePaths {
    /// Reads the entity tag that an earlier download stored.
    fn stored_etag(&self) -> Option<String> {
        fs::read_to_string(&self.etag).ok().filter(|etag| !etag.is_empty())
    }
}

/// Incomplete file, with its entity tag in a file beside it.
struct PartFile {
    paths: FilePaths,
    file: File,
    length: u64,
    space: Arc<SpaceBudget>,
}

impl PartFile {
    /// Opens the incomplete file of an earlier download, or a new file. Returns its entity tag, if
    /// known.
    fn open(paths: FilePaths, space: Arc<SpaceBudget>) -> io::Result<(Self, Option<String>)> {
        for path in [&paths.part, &paths.complete, &paths.etag] {
            if let Some(folder) = path.parent() {
                fs::create_dir_all(folder)?;
            }
        }
        let mut options = OpenOptions::new();
        let file = no_follow(options.create(true).append(true)).open(&paths.part)?;
        let length = file.metadata()?.len();
        let etag = paths.stored_etag();
        Ok((Self { paths, file, length, space }, etag))
    }
}

impl PartialFile for PartFile {
    type Complete = u64;

    fn len(&self) -> u64 {
        self.length
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let count = bytes.len() as u64;
        // Record the bytes before the write: if another file checked the space between the two, it
        // would subtract them twice, as used space and as space that this file still needs.
        self.space.record_written(&self.paths.part, count);
        self.file.write_all(bytes)?;
        self.length += count;
        Ok(())
    }

    fn require_space(&mut self, bytes: u64) -> io::Result<()> {
        self.space.require(&self.paths.part, bytes)
    }

    fn restart(&mut self) -> io::Result<()> {
        self.file.set_len(0)?;
        self.length = 0;
        if self.paths.managed {
            // Otherwise the next entity tag would seem to belong to the old complete file.
            remove_file_if_exists(&self.paths.complete)?;
        }
        Ok(())
    }

    fn set_etag(&mut self, etag: Option<&str>) -> io::Result<()> {
        match etag {
            Some(etag) => tinkex_files::write(&self.paths.etag, etag),
            None => remove_file_if_exists(&self.paths.etag),
        }
    }

    fn verify(&mut self) -> io::Result<bool> {
        Ok(true)
    }

    fn finish(self) -> io::Result<u64> {
        tinkex_files::publish(&self.file, &self.paths.part, &self.paths.complete)?;
        if !self.paths.managed {
            remove_file_if_exists(&self.paths.etag)?;
        }
        Ok(self.length)
    }

    fn error(error: &io::Error) -> Error {
        let message = format!("cannot write the downloaded file: {error}");
        Error::new(ErrorKind::Io, message).with_hint(write_hint(error))
    }
}

/// Hint of errors because of a full disk.
pub(crate) const SPACE_HINT: &str = "Free disk space, or choose a folder on another disk.";
const EXPIRED_HINT: &str = "Run the download again: the URL may have expired.";
const WRITE_HINT: &str =
    "Check the free space and the permissions of the folder, or choose another folder.";

/// Error returned when a file or folder cannot be written.
pub(super) fn write_error(path: &Path, error: &io::Error) -> Error {
    let message = format!("cannot write {}: {error}", path.display());
    Error::new(ErrorKind::Io, message).with_hint(write_hint(error))
}

/// Returns what to do about a file that cannot be written.
fn write_hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull => SPACE_HINT,
        _ => WRITE_HINT,
    }
}
