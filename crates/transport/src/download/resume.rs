//! Resumable downloads: the loop that requests the missing part of a file.
//!
//! A download appends to a [`PartialFile`] on disk. After a lost connection, or in a later process,
//! the next request starts at the end of that file. `If-Range` keeps content of two versions from
//! being mixed. If the content is verified by a checksum afterwards, a partial file of unknown
//! version is continued as well. The complete file is verified, flushed and renamed.

use std::fmt;
use std::io;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{
    ACCEPT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, ETAG, HeaderMap, HeaderName, HeaderValue,
    IF_RANGE, RANGE,
};
use http::{Request, Response, Uri};
use url::{Origin, Url};

use crate::error::{Error, ErrorKind, Result};
use crate::http::{HttpService, Lane, ResponseBody};
use crate::request::redirect;
use crate::retry::failed_attempt::FailedAttempt;

use super::attempts::Attempts;

/// Number of bytes that are collected before they are written to the file.
const BUFFER: usize = 1 << 20;
/// Maximum number of bytes to read from the body of an error response.
const MAX_ERROR_BODY: usize = 4 << 10;

/// File on disk that a download appends to.
#[expect(clippy::len_without_is_empty, reason = "the length is the position of the download")]
pub trait PartialFile: Send + 'static {
    /// Value that a finished download returns.
    type Complete: Send + 'static;

    /// Length in bytes.
    fn len(&self) -> u64;

    /// Appends to the file.
    fn append(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// Checks that the disk has space for `bytes` more bytes. Called before the first byte of a
    /// response is written.
    fn require_space(&mut self, _bytes: u64) -> io::Result<()> {
        Ok(())
    }

    /// Discards the content.
    fn restart(&mut self) -> io::Result<()>;

    /// Stores the strong entity tag of the content for a later process; `None` if the content has
    /// no such tag.
    fn set_etag(&mut self, etag: Option<&str>) -> io::Result<()>;

    /// Returns whether the complete file has the expected size and checksum.
    fn verify(&mut self) -> io::Result<bool>;

    /// Flushes the file and renames it to its final name.
    fn finish(self) -> io::Result<Self::Complete>;

    /// Converts a failure to read or write the file to an error.
    fn error(error: &io::Error) -> Error;
}

/// Version of a partial file's content, which `If-Range` sends to the server.
#[derive(Clone, Debug)]
pub struct Validator {
    /// Strong entity tag.
    pub etag: String,
    /// The origin that issued the tag; `None` if the tag is valid on every server that has the
    /// file.
    pub origin: Option<Origin>,
}

/// Parameters of a resumable download.
pub struct ResumableDownload<'a> {
    /// Sends the requests.
    pub http: &'a dyn HttpService,
    /// Class of traffic of the requests.
    pub lane: Lane,
    /// Maximum time without received bytes.
    pub idle_timeout: Duration,
    /// Number of bytes per request; `None` requests all missing bytes in one request.
    pub piece: Option<u64>,
    /// Largest acceptable size in bytes.
    pub max_size: Option<u64>,
    /// Whether [`PartialFile::verify`] compares a checksum. If so, a partial file of unknown
    /// version may be continued, and an entity tag is only sent to the origin that issued it: the
    /// same file has different tags on a hub and on its storage servers.
    pub verified: bool,
    /// Returns the headers for a request to an origin, credentials included.
    pub headers: &'a (dyn Fn(&Origin) -> Result<HeaderMap> + Send + Sync),
    /// Describes a response with an unexpected status.
    pub refused: &'a (dyn Fn(u16, &HeaderMap, &[u8]) -> FailedAttempt + Send + Sync),
    /// Called with the number of bytes on disk and the total size in bytes, if known.
    pub on_progress: &'a (dyn Fn(u64, Option<u64>) + Send + Sync),
}

/// State of a download between requests.
struct DownloadState {
    validator: Option<Validator>,
    /// Size of the complete file in bytes, once known.
    total: Option<u64>,
    /// Whether the server has rejected the requested range (416), and the partial file was
    /// discarded. Happens at most once per download.
    range_rejected: bool,
}

/// Result of one request.
enum RequestOutcome {
    /// The file is complete.
    Complete,
    /// The requested piece arrived, or the download starts over.
    Continue,
    Failed(FailedAttempt),
}

impl fmt::Debug for ResumableDownload<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResumableDownload").field("lane", &self.lane).finish_non_exhaustive()
    }
}

impl ResumableDownload<'_> {
    /// Downloads the missing part of `file`, verifies the file and renames it to its final name.
    ///
    /// `size` is the expected size in bytes, if known.
    ///
    /// # Errors
    /// The last error, when no retry is left; [`ErrorKind::Decode`] if the server's responses are
    /// inconsistent or the content does not match its size or checksum. The partial file is kept on
    /// disk for a later download, unless its content is wrong.
    ///
    /// # Cancel safety
    /// Dropping the future stops the download; the partial file is kept on disk.
    pub async fn run<F: PartialFile>(
        &self,
        url: &Url,
        mut file: F,
        validator: Option<Validator>,
        size: Option<u64>,
        mut attempts: Attempts,
    ) -> Result<F::Complete> {
        let mut state = DownloadState { validator, total: size, range_rejected: false };
        let mut resumed = file.len() > 0;
        loop {
            while state.total != Some(file.len()) {
                let before = file.len();
                let mut requested = url.clone();
                let outcome;
                (file, outcome) = self.request(&mut requested, file, &mut state).await?;
                if file.len() > before {
                    attempts.record_progress();
                }
                match outcome {
                    RequestOutcome::Complete => break,
                    RequestOutcome::Continue => {}
                    RequestOutcome::Failed(failed) => {
                        attempts.wait_before_retry(failed, self.lane, &requested).await?;
                    }
                }
            }
            let expected;
            (file, expected) = on_file(file, PartialFile::verify).await?;
            if expected {
                return blocking(move || file.finish().map_err(|error| F::error(&error))).await;
            }
            (file, ()) = on_file(file, PartialFile::restart).await?;
            if !resumed {
                let error = Error::new(
                    ErrorKind::Decode,
                    "size or checksum differ from what the server announced",
                );
                return Err(error.with_hint(
                    "Try again. If the error persists, check whether a proxy modifies files.",
                ));
            }
            // Start over once: the partial file of an earlier process may have been damaged.
            resumed = false;
            state.validator = None;
            state.total = size;
        }
    }

    /// Requests the missing bytes, or the next piece of them, and appends the received bytes to the
    /// file. After redirects, `url` is the URL of the last request.
    ///
    /// # Errors
    /// If a retry cannot resolve the failure. All other failures are a [`RequestOutcome::Failed`].
    async fn request<F: PartialFile>(
        &self,
        url: &mut Url,
        mut file: F,
        state: &mut DownloadState,
    ) -> Result<(F, RequestOutcome)> {
        let continues = self.verified || state.validator.is_some();
        let start = if continues { file.len() } else { 0 };
        let response = match self.send(url, start, state.validator.as_ref()).await {
            Ok(response) => response,
            Err(error) => return Ok((file, RequestOutcome::Failed(error.into()))),
        };
        let origin = url.origin();
        let (head, body) = response.into_parts();
        let (from, total) = match head.status.as_u16() {
            206 => match content_range(&head.headers) {
                Some((from, total)) if from == start => (from, total),
                _ => return Err(unexpected("the server sent another range than requested")),
            },
            // The server does not support ranges, or the content has changed.
            200 => (0, number(&head.headers, &CONTENT_LENGTH)),
            // The partial file is at least as long as the file on the server, but it is unknown
            // whether its content is complete: discard the partial file.
            416 if start > 0 && !state.range_rejected => {
                state.range_rejected = true;
                file = restart(file, state).await?;
                return Ok((file, RequestOutcome::Continue));
            }
            status => {
                let body = error_body(body).await;
                let failed = (self.refused)(status, &head.headers, &body);
                return Ok((file, RequestOutcome::Failed(failed)));
            }
        };
        self.check_size(total.unwrap_or_default())?;
        let etag = strong_etag(&head.headers);
        if from > 0
            && let (Some(etag), Some(known)) = (&etag, &state.validator)
            && known.applies_to(&origin)
            && known.etag != *etag
        {
            file = restart(file, state).await?;
            let changed = Error::new(ErrorKind::Connect, "the file changed during the download");
            return Ok((file, RequestOutcome::Failed(changed.into())));
        }
        if from == 0 || etag.is_some() {
            let stored = etag.clone();
            let prepare = move |file: &mut F| {
                if from == 0 {
                    file.restart()?;
                }
                file.set_etag(stored.as_deref())
            };
            (file, ()) = on_file(file, prepare).await?;
            let origin = self.verified.then_some(origin);
            state.validator = etag.map(|etag| Validator { etag, origin });
        }
        state.total = total;
        if let Some(total) = total {
            let require = move |file: &mut F| file.require_space(total.saturating_sub(file.len()));
            (file, ()) = on_file(file, require).await?;
        }
        (self.on_progress)(file.len(), total);
        self.receive(file, body, from, total, head.status == 206).await
    }

    /// Appends a response body to the file.
    async fn receive<F: PartialFile>(
        &self,
        mut file: F,
        mut body: ResponseBody,
        from: u64,
        total: Option<u64>,
        is_partial: bool,
    ) -> Result<(F, RequestOutcome)> {
        let mut buffer = BytesMut::new();
        loop {
            let (ended, failure) = match body.next().await {
                Some(Ok(bytes)) => {
                    buffer.extend_from_slice(&bytes);
                    (false, None)
                }
                Some(Err(failure)) => (true, Some(Error::from(failure))),
                None => (true, None),
            };
            if (ended && !buffer.is_empty()) || buffer.len() >= BUFFER {
                let bytes = buffer.split().freeze();
                let length = file.len() + bytes.len() as u64;
                self.check_size(length)?;
                if total.is_some_and(|total| length > total) {
                    return Err(unexpected("the server sent more bytes than announced"));
                }
                (file, ()) = on_file(file, move |file| file.append(&bytes)).await?;
                (self.on_progress)(file.len(), total);
            }
            if let Some(error) = failure {
                return Ok((file, RequestOutcome::Failed(error.into())));
            }
            if ended {
                break;
            }
        }
        let length = file.len();
        let outcome = match total {
            Some(total) if length < total => {
                if self.piece.is_some() && is_partial && length > from {
                    RequestOutcome::Continue
                } else {
                    let message =
                        format!("the connection was closed after {length} of {total} bytes");
                    RequestOutcome::Failed(Error::new(ErrorKind::Connect, message).into())
                }
            }
            _ => RequestOutcome::Complete,
        };
        Ok((file, outcome))
    }

    /// Sends one request for the bytes from `start` on, following redirects.
    async fn send(
        &self,
        url: &mut Url,
        start: u64,
        validator: Option<&Validator>,
    ) -> Result<Response<ResponseBody>> {
        let send = |url: Url| -> futures_util::future::BoxFuture<'_, _> {
            let request = self.build(&url, start, validator);
            Box::pin(async move {
                let sent = self.http.send_streaming(self.lane, request?, self.idle_timeout);
                sent.await.map_err(Error::from)
            })
        };
        redirect::follow(url, send, |_| false).await
    }

    /// Creates the request for the bytes from `start` on.
    fn build(
        &self,
        url: &Url,
        start: u64,
        validator: Option<&Validator>,
    ) -> Result<Request<Bytes>> {
        let origin = url.origin();
        let mut request = Request::new(Bytes::new());
        *request.uri_mut() = to_uri(url)?;
        let headers = request.headers_mut();
        *headers = (self.headers)(&origin)?;
        // Sizes, ranges and checksums refer to the uncompressed file.
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        let range = match self.piece {
            Some(piece) => Some(format!("bytes={start}-{}", start + piece - 1)),
            None => (start > 0).then(|| format!("bytes={start}-")),
        };
        let value =
            |text: &str| HeaderValue::from_str(text).map_err(|_| unexpected("invalid entity tag"));
        if let Some(range) = range {
            headers.insert(RANGE, value(&range)?);
        }
        if let Some(validator) = validator.filter(|known| start > 0 && known.applies_to(&origin)) {
            headers.insert(IF_RANGE, value(&validator.etag)?);
        }
        Ok(request)
    }

    fn check_size(&self, size: u64) -> Result<()> {
        match self.max_size {
            Some(max) if size > max => {
                Err(unexpected(&format!("the file is larger than the limit of {max} bytes")))
            }
            _ => Ok(()),
        }
    }
}

impl Validator {
    fn applies_to(&self, origin: &Origin) -> bool {
        self.origin.as_ref().is_none_or(|issuer| issuer == origin)
    }
}

/// Discards the content of the partial file and its version.
async fn restart<F: PartialFile>(file: F, state: &mut DownloadState) -> Result<F> {
    state.validator = None;
    let discard = |file: &mut F| {
        file.restart()?;
        file.set_etag(None)
    };
    Ok(on_file(file, discard).await?.0)
}

/// Runs blocking work on a file and returns the file with the result.
async fn on_file<F: PartialFile, T: Send + 'static>(
    mut file: F,
    work: impl FnOnce(&mut F) -> io::Result<T> + Send + 'static,
) -> Result<(F, T)> {
    blocking(move || match work(&mut file) {
        Ok(done) => Ok((file, done)),
        Err(error) => Err(F::error(&error)),
    })
    .await
}

/// Runs file work on the blocking thread pool.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| {
        // The runtime drops the work if it ends before the work starts.
        let kind = if error.is_panic() { ErrorKind::Panicked } else { ErrorKind::Closed };
        Err(Error::new(kind, "file operation was interrupted").with_source(error))
    })
}

/// Reads the beginning of an error response.
async fn error_body(mut body: ResponseBody) -> BytesMut {
    let mut text = BytesMut::new();
    while text.len() < MAX_ERROR_BODY
        && let Some(Ok(bytes)) = body.next().await
    {
        text.extend_from_slice(&bytes);
    }
    text.truncate(MAX_ERROR_BODY);
    text
}

/// Returns the entity tag if it is strong. A weak tag does not guarantee equal bytes.
pub(crate) fn strong_etag(headers: &HeaderMap) -> Option<String> {
    let etag = headers.get(ETAG)?.to_str().ok()?.trim();
    etag.starts_with('"').then(|| etag.to_owned())
}

fn number(headers: &HeaderMap, name: &HeaderName) -> Option<u64> {
    headers.get(name)?.to_str().ok()?.trim().parse().ok()
}

/// Parses the position of the first byte and the total size from `content-range`, such as 5 and 100
/// from `bytes 5-9/100`. The total size may be unknown (`*`).
fn content_range(headers: &HeaderMap) -> Option<(u64, Option<u64>)> {
    let text = headers.get(CONTENT_RANGE)?.to_str().ok()?.strip_prefix("bytes ")?;
    let (range, total) = text.split_once('/')?;
    Some((range.split_once('-')?.0.trim().parse().ok()?, total.trim().parse().ok()))
}

/// Parses a URL. The error does not quote the URL: a signed URL grants access like a credential.
pub fn parse_url(url: &str) -> Result<Url> {
    Url::parse(url).map_err(|_| unexpected("invalid URL"))
}

/// Converts a URL for a request. Like [`parse_url`], the error does not quote the URL.
pub fn to_uri(url: &Url) -> Result<Uri> {
    url.as_str().parse().map_err(|_| unexpected("invalid URL"))
}

/// Error returned for a URL or response of the server that cannot be used.
fn unexpected(message: &str) -> Error {
    Error::new(ErrorKind::Decode, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_ranges_are_parsed() {
        let range = |text: &'static str| {
            content_range(&[(CONTENT_RANGE, HeaderValue::from_static(text))].into_iter().collect())
        };
        assert_eq!(range("bytes 5-9/100"), Some((5, Some(100))));
        assert_eq!(range("bytes 0-9/*"), Some((0, None)));
        assert_eq!(range("bytes */100"), None);
    }

    #[test]
    fn weak_entity_tags_are_ignored() {
        let etag = |text: &'static str| {
            strong_etag(&[(ETAG, HeaderValue::from_static(text))].into_iter().collect())
        };
        assert_eq!(etag("\"a\"").as_deref(), Some("\"a\""));
        assert_eq!(etag("W/\"a\""), None);
    }
}
