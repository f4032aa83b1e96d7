//! [`EventBody`]: a response body of server-sent events.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame};

use crate::inference::EventSource;

/// Body that sends events as its source produces them. hyper drops it when the client disconnects,
/// which cancels the generations of the source.
pub(crate) struct EventBody(pub(super) Box<dyn EventSource>);

impl Body for EventBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.get_mut()
            .0
            .poll_events(context)
            .map(|events| events.map(|bytes| Ok(Frame::data(bytes))))
    }
}
