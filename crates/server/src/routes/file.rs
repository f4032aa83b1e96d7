//! File downloads: a URL with a valid token needs no API key.

use std::fs::Metadata;
use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::UNIX_EPOCH;

use bytes::Bytes;
use http::header::{
    ACCEPT_RANGES, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG, HeaderName, HeaderValue,
    IF_NONE_MATCH, IF_RANGE, RANGE,
};
use http::request::Parts;
use http::{Response, StatusCode};
use http_body_util::{Either, Full};
use hyper::body::{Body, Frame, SizeHint};
use tinkex_store::error::ServerError;
use tokio::fs::File;
use tokio::io::{AsyncRead as _, AsyncSeekExt as _, ReadBuf};

use super::{ResponseBody, RouteResult, mark_authenticated, while_valid};
use crate::state::ServerState;

/// Size of the read buffer in bytes.
const BUFFER: usize = 256 << 10;

/// Sends a file or a byte range of the file, so that an interrupted download can be resumed. `path`
/// is `TOKEN/FILE`.
pub(super) async fn download(state: &ServerState, path: &str, parts: &Parts) -> RouteResult {
    let not_found = || ServerError::not_found("unknown or expired download URL; request new URLs");
    let (token, name) = path.split_once('/').ok_or_else(not_found)?;
    let grant = state.downloads.find(token).ok_or_else(not_found)?;
    if !grant.key.is_valid() {
        return Err(not_found().into());
    }
    while_valid(&grant.key, send(state, &grant.folder, name, parts)).await
}

/// Sends the file `name` of a folder under `weights/`.
async fn send(state: &ServerState, folder: &str, name: &str, parts: &Parts) -> RouteResult {
    let headers = &parts.headers;
    let not_found = || ServerError::not_found("unknown or expired download URL; request new URLs");
    mark_authenticated(parts);
    // Compare `name` with the names in the folder instead of joining it to the path: `..` would
    // lead out of the folder.
    let path = find_file(state.weights_dir.join(folder), name).ok_or_else(not_found)?;
    let mut file = File::open(&path).await.map_err(|_| not_found())?;
    let metadata = file.metadata().await.map_err(|error| ServerError::read_failed(&error))?;
    let length = metadata.len();
    let tag = entity_tag(&metadata);
    let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    if text(IF_NONE_MATCH) == Some(&*tag) {
        return Ok(file_response(StatusCode::NOT_MODIFIED, &tag, Either::Left(Full::default())));
    }
    let unchanged = text(IF_RANGE).is_none_or(|expected| expected == tag);
    let (status, from, to) = match text(RANGE).filter(|_| unchanged).and_then(parse_range) {
        None => (StatusCode::OK, 0, length),
        Some((from, _)) if from >= length => {
            let body = Either::Left(Full::default());
            let mut response = file_response(StatusCode::RANGE_NOT_SATISFIABLE, &tag, body);
            insert_header(&mut response, CONTENT_RANGE, &format!("bytes */{length}"));
            return Ok(response);
        }
        Some((from, last)) => {
            let to = last.map_or(length, |last| length.min(last.saturating_add(1)));
            (StatusCode::PARTIAL_CONTENT, from, to)
        }
    };
    if from > 0 {
        let sought = file.seek(io::SeekFrom::Start(from)).await;
        sought.map_err(|error| ServerError::read_failed(&error))?;
    }
    let remaining = to - from;
    let body = FileBody { file, remaining, buffer: vec![0; BUFFER] };
    let mut response = file_response(status, &tag, Either::Right(Either::Left(body)));
    response.headers_mut().insert(CONTENT_LENGTH, remaining.into());
    if status == StatusCode::PARTIAL_CONTENT {
        let range = format!("bytes {from}-{}/{length}", to - 1);
        insert_header(&mut response, CONTENT_RANGE, &range);
    }
    Ok(response)
}

fn file_response(status: StatusCode, tag: &str, body: ResponseBody) -> Response<ResponseBody> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    insert_header(&mut response, ETAG, tag);
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    response
}

/// Inserts a header. The values are visible ASCII, so the conversion does not fail.
fn insert_header(response: &mut Response<ResponseBody>, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        response.headers_mut().insert(name, value);
    }
}

/// Returns an entity tag made of length and modification time. Length and time identify the
/// content, because checkpoint files are replaced, never modified.
fn entity_tag(metadata: &Metadata) -> String {
    let modified = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    format!("\"{:x}-{:x}\"", metadata.len(), modified.map_or(0, |time| time.as_nanos()))
}

/// Parses a range of the form `bytes=FIRST-` or `bytes=FIRST-LAST`. Other forms return `None`, and
/// the response is the whole file.
fn parse_range(text: &str) -> Option<(u64, Option<u64>)> {
    let (first, last) = text.strip_prefix("bytes=")?.split_once('-')?;
    let first = first.trim().parse().ok()?;
    match last.trim() {
        "" => Some((first, None)),
        last => Some((first, Some(last.parse().ok().filter(|last| *last >= first)?))),
    }
}

fn find_file(folder: PathBuf, name: &str) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?.flatten();
    entries.map(|entry| entry.path()).find(|path| path.file_name().is_some_and(|n| n == name))
}

/// Response body that streams a file.
#[derive(Debug)]
pub(crate) struct FileBody {
    file: File,
    remaining: u64,
    buffer: Vec<u8>,
}

impl Body for FileBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = self.get_mut();
        if this.remaining == 0 {
            return Poll::Ready(None);
        }
        let mut buffer = ReadBuf::new(&mut this.buffer);
        let read: io::Result<()> = ready!(Pin::new(&mut this.file).poll_read(context, &mut buffer));
        let filled = buffer.filled();
        if read.is_err() || filled.is_empty() {
            // End the body early: the client sees fewer bytes than `content-length` and reports an
            // error.
            this.remaining = 0;
            return Poll::Ready(None);
        }
        let length = usize::try_from(this.remaining).unwrap_or(usize::MAX).min(filled.len());
        let data = Bytes::copy_from_slice(&filled[..length]);
        this.remaining -= length as u64;
        Poll::Ready(Some(Ok(Frame::data(data))))
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.remaining)
    }
}

#[cfg(test)]
mod tests {
    use super::parse_range;

    #[test]
    fn only_a_single_range_with_a_start_is_accepted() {
        assert_eq!(parse_range("bytes=5-"), Some((5, None)));
        assert_eq!(parse_range("bytes=0-9"), Some((0, Some(9))));
        for other in ["", "bytes=-5", "bytes=9-5", "bytes=1-2,4-5", "lines=1-2", "bytes=a-"] {
            assert_eq!(parse_range(other), None, "{other}");
        }
    }
}
