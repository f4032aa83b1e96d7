//! [`EventBody`]: a response body of server-sent events.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Frame};
use tokio::time::{Instant, Sleep, sleep};

/// Time without an event after which a comment is sent. Many proxies close connections without
/// traffic after 30 or 60 seconds, and a stream may wait for longer while a model is trained.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// A comment, which readers of events ignore.
const COMMENT: &[u8] = b": keep-alive\n\n";

/// Returns the next events, or `None` after the last event.
type PollEvents = Box<dyn FnMut(&mut Context<'_>) -> Poll<Option<Bytes>> + Send>;

/// Body that sends events as `poll_events` returns them. hyper drops the body when the client
/// disconnects, which cancels the generations that the events come from.
pub(crate) struct EventBody {
    poll_events: PollEvents,
    timer: Pin<Box<Sleep>>,
}

impl EventBody {
    pub(super) fn new(
        poll_events: impl FnMut(&mut Context<'_>) -> Poll<Option<Bytes>> + Send + 'static,
    ) -> Self {
        Self { poll_events: Box::new(poll_events), timer: Box::pin(sleep(KEEP_ALIVE)) }
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
        let bytes = match (this.poll_events)(context) {
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

    #[tokio::test(start_paused = true)]
    async fn comments_are_sent_while_a_stream_waits() {
        let mut event = Some(Box::pin(sleep(Duration::from_secs(40))));
        let body = EventBody::new(move |context| {
            let Some(timer) = &mut event else { return Poll::Ready(None) };
            std::task::ready!(timer.as_mut().poll(context));
            event = None;
            Poll::Ready(Some(Bytes::from_static(b"data: 1\n\n")))
        });
        let body = body.collect().await.unwrap();
        let text = String::from_utf8(body.to_bytes().to_vec()).unwrap();
        assert_eq!(text, ": keep-alive\n\n: keep-alive\n\ndata: 1\n\n");
    }
}
