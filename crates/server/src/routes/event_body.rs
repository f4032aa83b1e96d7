//! [`EventBody`]: a response body of server-sent events.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Frame};
use tokio::time::{Instant, Sleep, sleep};

use crate::inference::EventSource;

/// Time without an event after which a comment is sent. Proxies close connections without traffic,
/// many of them after 30 or 60 seconds, and a stream may wait for longer while a model is trained.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// A comment, which readers of events ignore.
const COMMENT: &[u8] = b": keep-alive\n\n";

/// Body that sends events as its source produces them. hyper drops it when the client disconnects,
/// which cancels the generations of the source.
pub(crate) struct EventBody {
    source: Box<dyn EventSource>,
    timer: Pin<Box<Sleep>>,
}

impl EventBody {
    pub(super) fn new(source: Box<dyn EventSource>) -> Self {
        Self { source, timer: Box::pin(sleep(KEEP_ALIVE)) }
    }
}

impl Body for EventBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = self.get_mut();
        let bytes = match this.source.poll_events(context) {
            Poll::Ready(bytes) => bytes,
            Poll::Pending if this.timer.as_mut().poll(context).is_ready() => {
                Some(Bytes::from_static(COMMENT))
            }
            Poll::Pending => return Poll::Pending,
        };
        this.timer.as_mut().reset(Instant::now() + KEEP_ALIVE);
        Poll::Ready(bytes.map(|bytes| Ok(Frame::data(bytes))))
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;

    use super::*;

    /// Produces one event after a minute.
    struct SlowSource(Option<Pin<Box<Sleep>>>);

    impl EventSource for SlowSource {
        fn poll_events(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
            let Some(timer) = &mut self.0 else { return Poll::Ready(None) };
            std::task::ready!(timer.as_mut().poll(context));
            self.0 = None;
            Poll::Ready(Some(Bytes::from_static(b"data: 1\n\n")))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn comments_are_sent_while_a_stream_waits() {
        let source = SlowSource(Some(Box::pin(sleep(Duration::from_secs(40)))));
        let body = EventBody::new(Box::new(source)).collect().await.unwrap();
        let text = String::from_utf8(body.to_bytes().to_vec()).unwrap();
        assert_eq!(text, ": keep-alive\n\n: keep-alive\n\ndata: 1\n\n");
    }
}
