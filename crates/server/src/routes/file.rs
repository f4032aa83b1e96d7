//! Files to download: whoever has the URL may have them, while it lasts.

use std::fs::Metadata;
use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Instant, UNIX_EPOCH};

use bytes::Bytes;
use http::header::{
    ACCEPT_RANGES, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG, HeaderName, HeaderValue,
    IF_NONE_MATCH, IF_RANGE, RANGE,
};
use http::{HeaderMap, Response, StatusCode};
use http_body_util::{Either, Full};
use hyper::body::{Body, Frame, SizeHint};
use tokio::fs::File;
use tokio::io::{AsyncRead as _, AsyncSeekExt as _, ReadBuf};

use super::Reply;
use crate::error::ApiError;
use crate::state::Shared;

/// Bytes that are read at once.
const PIECE: usize = 256 << 10;

/// `rest` is the token and the file's name. A download that broke may ask for the rest of a file.
pub(super) async fn download(shared: &Shared, rest: &str, asked: &HeaderMap) -> Reply {
    let gone = || ApiError::not_found("there is nothing to download here; ask for new URLs");
    let (token, name) = rest.split_once('/').ok_or_else(gone)?;
    let folder = {
        let downloads = shared.downloads();
        let download = downloads.get(token).filter(|download| download.until > Instant::now());
        download.ok_or_else(gone)?.folder.clone()
    };
    // Only a name that the folder has: nothing that a request says becomes part of a path.
    let path = named(shared.folders.join(folder), name).ok_or_else(gone)?;
    let mut file = File::open(&path).await.map_err(|_| gone())?;
    let facts = file.metadata().await.map_err(|why| ApiError::disk(&why))?;
    let (length, tag) = (facts.len(), tag(&facts));
    let text = |name: HeaderName| asked.get(name).and_then(|value| value.to_str().ok());
    if text(IF_NONE_MATCH) == Some(&*tag) {
        return Ok(answer(StatusCode::NOT_MODIFIED, &tag, Either::Left(Full::default())));
    }
    let same = text(IF_RANGE).is_none_or(|wanted| wanted == tag);
    let (status, from, to) = match text(RANGE).filter(|_| same).and_then(range) {
        None => (StatusCode::OK, 0, length),
        Some((from, _)) if from >= length => {
            let nothing = Either::Left(Full::default());
            let mut reply = answer(StatusCode::RANGE_NOT_SATISFIABLE, &tag, nothing);
            put(&mut reply, CONTENT_RANGE, &format!("bytes */{length}"));
            return Ok(reply);
        }
        Some((from, last)) => {
            let to = last.map_or(length, |last| length.min(last.saturating_add(1)));
            (StatusCode::PARTIAL_CONTENT, from, to)
        }
    };
    if from > 0 {
        file.seek(io::SeekFrom::Start(from)).await.map_err(|why| ApiError::disk(&why))?;
    }
    let left = to - from;
    let body = FileBody { file, left, buffer: vec![0; PIECE] };
    let mut reply = answer(status, &tag, Either::Right(body));
    reply.headers_mut().insert(CONTENT_LENGTH, left.into());
    if status == StatusCode::PARTIAL_CONTENT {
        put(&mut reply, CONTENT_RANGE, &format!("bytes {from}-{}/{length}", to - 1));
    }
    Ok(reply)
}

fn answer(status: StatusCode, tag: &str, body: super::Body) -> Response<super::Body> {
    let mut reply = Response::new(body);
    *reply.status_mut() = status;
    put(&mut reply, ETAG, tag);
    let headers = reply.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    reply
}

/// Puts a header that is made of digits and quotes.
fn put(reply: &mut Response<super::Body>, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        reply.headers_mut().insert(name, value);
    }
}

/// What tells a file from any other: checkpoints do not change, they are replaced.
fn tag(facts: &Metadata) -> String {
    let changed = facts.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    format!("\"{:x}-{:x}\"", facts.len(), changed.map_or(0, |time| time.as_nanos()))
}

/// The first byte and, if it is named, the last. Anything else is answered with the whole file.
fn range(text: &str) -> Option<(u64, Option<u64>)> {
    let (first, last) = text.strip_prefix("bytes=")?.split_once('-')?;
    let first = first.trim().parse().ok()?;
    match last.trim() {
        "" => Some((first, None)),
        last => Some((first, Some(last.parse().ok().filter(|last| *last >= first)?))),
    }
}

fn named(folder: PathBuf, name: &str) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?.flatten();
    entries.map(|entry| entry.path()).find(|path| path.file_name().is_some_and(|own| own == name))
}

/// A file as it is read.
#[derive(Debug)]
pub(crate) struct FileBody {
    file: File,
    left: u64,
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
        if this.left == 0 {
            return Poll::Ready(None);
        }
        let mut buffer = ReadBuf::new(&mut this.buffer);
        let read: io::Result<()> = ready!(Pin::new(&mut this.file).poll_read(context, &mut buffer));
        let filled = buffer.filled();
        if read.is_err() || filled.is_empty() {
            // Fewer bytes than announced: the client sees that something is wrong.
            this.left = 0;
            return Poll::Ready(None);
        }
        let most = usize::try_from(this.left).unwrap_or(usize::MAX).min(filled.len());
        let piece = Bytes::copy_from_slice(&filled[..most]);
        this.left -= most as u64;
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}

#[cfg(test)]
mod tests {
    use super::range;

    #[test]
    fn only_plain_ranges_are_parts() {
        assert_eq!(range("bytes=5-"), Some((5, None)));
        assert_eq!(range("bytes=0-9"), Some((0, Some(9))));
        for other in ["", "bytes=-5", "bytes=9-5", "bytes=1-2,4-5", "lines=1-2", "bytes=a-"] {
            assert_eq!(range(other), None, "{other}");
        }
    }
}
