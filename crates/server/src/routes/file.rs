//! Files to download: whoever has the URL may have them, while it lasts.

use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use bytes::Bytes;
use http::Response;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderValue};
use http_body_util::Either;
use hyper::body::{Body, Frame, SizeHint};
use tokio::fs::File;
use tokio::io::{AsyncRead as _, ReadBuf};

use super::Reply;
use crate::error::ApiError;
use crate::state::Shared;

/// Bytes that are read at once.
const PIECE: usize = 256 << 10;

/// `rest` is the token and the file's name.
pub(super) async fn download(shared: &Shared, rest: &str) -> Reply {
    let gone = || ApiError::not_found("there is nothing to download here; ask for new URLs");
    let (token, name) = rest.split_once('/').ok_or_else(gone)?;
    let folder = {
        let downloads = shared.downloads();
        let download = downloads.get(token).filter(|download| download.until > Instant::now());
        download.ok_or_else(gone)?.folder.clone()
    };
    // Only a name that the folder has: nothing that a request says becomes part of a path.
    let path = named(shared.folders.join(folder), name).ok_or_else(gone)?;
    let file = File::open(&path).await.map_err(|_| gone())?;
    let length = file.metadata().await.map_err(|why| ApiError::disk(&why))?.len();
    let mut reply =
        Response::new(Either::Right(FileBody { file, left: length, buffer: vec![0; PIECE] }));
    let headers = reply.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(CONTENT_LENGTH, length.into());
    Ok(reply)
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
