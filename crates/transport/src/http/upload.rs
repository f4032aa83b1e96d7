//! [`UploadFile`]: a file that is sent as part of a request's body without being held in memory.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::Request;
use http_body::{Body, Frame, SizeHint};
use tokio::sync::mpsc;

use super::{HttpFailure, HttpFailureKind};

/// Size of the parts in which a file is sent, in bytes.
const PART_BYTES: usize = 256 * 1024;
/// Maximum number of parts that are read from the file before they are sent.
const PARTS_AHEAD: usize = 4;

/// A file whose content follows the bytes of a request's body.
#[derive(Clone, Debug)]
pub struct UploadFile {
    path: Arc<Path>,
    len: u64,
}

impl UploadFile {
    /// Creates the upload of the file `path` and determines its length. Blocks.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub(crate) fn new(path: PathBuf) -> io::Result<Self> {
        let len = std::fs::metadata(&path)?.len();
        Ok(Self { path: path.into(), len })
    }

    /// Returns the path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the number of bytes to send: the length of the file when this value was created.
    /// Bytes that were appended to the file since are not sent.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "an empty file is sent like any other")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Reads the file into memory and appends it to the body of `request`.
    ///
    /// # Errors
    /// [`HttpFailureKind::InvalidRequest`] if the file cannot be read.
    pub async fn append_to(&self, request: Request<Bytes>) -> Result<Request<Bytes>, HttpFailure> {
        let file = self.clone();
        let (head, body) = request.into_parts();
        let read = move || {
            let mut all = body.to_vec();
            all.reserve_exact(usize::try_from(file.len).unwrap_or(0));
            File::open(&file.path)?.take(file.len).read_to_end(&mut all)?;
            if all.len() as u64 != body.len() as u64 + file.len {
                return Err(became_shorter());
            }
            Ok(all)
        };
        let body = self.run_blocking(read).await?;
        Ok(Request::from_parts(head, body.into()))
    }

    /// Opens the file and returns a body that consists of `head` and the content of the file. A
    /// thread reads the file while the body is sent.
    ///
    /// # Errors
    /// [`HttpFailureKind::InvalidRequest`] if the file cannot be opened.
    pub(crate) async fn stream(&self, head: Bytes) -> Result<UploadBody, HttpFailure> {
        let path = Arc::clone(&self.path);
        let file = self.run_blocking(move || File::open(path)).await?;
        let (sender, parts) = mpsc::channel(PARTS_AHEAD);
        let len = self.len;
        // The thread ends when the file is read, or when the body is dropped.
        tokio::task::spawn_blocking(move || send_parts(file, len, &sender));
        let unsent = head.len() as u64 + self.len;
        Ok(UploadBody { head: Some(head).filter(|head| !head.is_empty()), parts, unsent })
    }

    /// Runs `read` on a blocking thread. The error contains the path of the file.
    async fn run_blocking<T: Send + 'static>(
        &self,
        read: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> Result<T, HttpFailure> {
        let failed = |error: io::Error| {
            let message = format!("cannot read {}: {error}", self.path.display());
            HttpFailure::new(HttpFailureKind::InvalidRequest, message)
        };
        let done = tokio::task::spawn_blocking(read).await;
        done.unwrap_or_else(|error| Err(io::Error::other(error))).map_err(failed)
    }
}

/// Reads `len` bytes of the file in parts, until the receiver is dropped.
fn send_parts(mut file: File, len: u64, parts: &mpsc::Sender<io::Result<Bytes>>) {
    let mut unread = len;
    while unread > 0 {
        let size = usize::try_from(unread).unwrap_or(usize::MAX).min(PART_BYTES);
        let mut part = vec![0; size];
        let read = file.read_exact(&mut part).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => became_shorter(),
            _ => error,
        });
        let is_last = read.is_err();
        if parts.blocking_send(read.map(|()| part.into())).is_err() || is_last {
            return;
        }
        unread -= size as u64;
    }
}

fn became_shorter() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the file became shorter during the upload")
}

/// Body of a request: bytes, then the content of a file.
pub(crate) struct UploadBody {
    head: Option<Bytes>,
    parts: mpsc::Receiver<io::Result<Bytes>>,
    /// Number of bytes that the body has not yet passed to the HTTP library.
    unsent: u64,
}

impl UploadBody {
    /// Returns the number of bytes that are not sent yet.
    pub(crate) fn len(&self) -> u64 {
        self.unsent
    }
}

impl Body for UploadBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let part = match self.head.take() {
            Some(head) => Some(Ok(head)),
            None => ready!(self.parts.poll_recv(context)),
        };
        Poll::Ready(part.map(|part| {
            let part = part?;
            self.unsent = self.unsent.saturating_sub(part.len() as u64);
            Ok(Frame::data(part))
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.unsent == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.unsent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the parts of a body.
    async fn parts(mut body: UploadBody) -> io::Result<Vec<Bytes>> {
        let mut parts = Vec::new();
        while let Some(frame) =
            std::future::poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await
        {
            parts.push(frame?.into_data().unwrap());
        }
        assert!(body.is_end_stream());
        Ok(parts)
    }

    #[tokio::test]
    async fn a_file_is_sent_in_parts_after_the_head() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let content: Vec<u8> = (0..2 * PART_BYTES + 17).map(|i| i.to_le_bytes()[0]).collect();
        std::fs::write(&path, &content).unwrap();
        let file = UploadFile::new(path.clone()).unwrap();
        let body = file.stream(Bytes::from_static(b"head")).await.unwrap();
        assert_eq!(body.size_hint().exact(), Some(content.len() as u64 + 4));
        let parts = parts(body).await.unwrap();
        assert!(parts.iter().all(|part| part.len() <= PART_BYTES));
        let expected = [b"head", &content[..]].concat();
        assert!(parts.concat() == expected);
        let request = file.append_to(Request::new(Bytes::from_static(b"head"))).await.unwrap();
        assert!(request.body() == &expected);
    }

    #[tokio::test]
    async fn a_file_that_shrinks_or_disappears_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "content").unwrap();
        let file = UploadFile::new(path.clone()).unwrap();
        std::fs::write(&path, "cont").unwrap();
        let error = parts(file.stream(Bytes::new()).await.unwrap()).await.unwrap_err();
        assert_eq!(error.to_string(), "the file became shorter during the upload");
        let failure = file.append_to(Request::new(Bytes::new())).await.unwrap_err();
        assert_eq!(failure.kind(), HttpFailureKind::InvalidRequest);
        std::fs::remove_file(&path).unwrap();
        let failure = file.stream(Bytes::new()).await.err().unwrap();
        assert_eq!(failure.kind(), HttpFailureKind::InvalidRequest);
        let cause = std::error::Error::source(&failure).unwrap().to_string();
        assert!(cause.contains("cannot read") && cause.contains("file"), "{cause}");
    }
}
