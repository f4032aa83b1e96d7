//! Streamed responses of a [`FakeServer`](super::FakeServer).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use http::Response;
use serde_json::json;
use tokio::time::sleep;

use crate::transport::http::{HttpFailure, ResponseBody};

use super::reply::ScriptedResponse;

/// Content type of server-sent events.
pub(super) const EVENT_STREAM: &str = "text/event-stream";

/// Response whose body arrives in parts.
#[derive(Clone, Debug)]
pub(super) struct ScriptedStream {
    /// Status and headers; the body is empty.
    pub(super) head: ScriptedResponse,
    pub(super) parts: Vec<Bytes>,
    /// Time before each part.
    pub(super) part_delay: Duration,
    pub(super) end: StreamEnd,
}

/// How a streamed body ends after its last part.
#[derive(Clone, Copy, Debug)]
pub(super) enum StreamEnd {
    Complete,
    /// The connection is lost.
    Lost,
    /// No data and no end: the client times out.
    Silence,
}

impl ScriptedStream {
    /// Returns the response. `timeout` is the idle timeout of the client, and `open` counts the
    /// bodies that are neither read to their end nor dropped.
    pub(super) fn to_http(
        &self,
        timeout: Duration,
        open: &Arc<AtomicUsize>,
    ) -> Response<ResponseBody> {
        let Self { part_delay, end, .. } = *self;
        let state = Some((self.parts.clone().into_iter(), OpenStreamGuard::new(open)));
        let parts = stream::unfold(state, move |state| async move {
            let (mut parts, guard) = state?;
            if let Some(part) = parts.next() {
                if part_delay > timeout {
                    sleep(timeout).await;
                    return Some((Err(HttpFailure::timeout("scripted silence")), None));
                }
                if !part_delay.is_zero() {
                    sleep(part_delay).await;
                }
                return Some((Ok(part), Some((parts, guard))));
            }
            match end {
                StreamEnd::Complete => None,
                StreamEnd::Lost => {
                    Some((Err(HttpFailure::connect("scripted connection loss")), None))
                }
                StreamEnd::Silence => {
                    sleep(timeout).await;
                    Some((Err(HttpFailure::timeout("scripted silence")), None))
                }
            }
        });
        self.head.to_http().map(|_| ResponseBody::new(parts))
    }
}

/// Counts an open stream until it is dropped.
struct OpenStreamGuard(Arc<AtomicUsize>);

impl OpenStreamGuard {
    fn new(open: &Arc<AtomicUsize>) -> Self {
        open.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(open))
    }
}

impl Drop for OpenStreamGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Returns the events of a streamed sample: one per token, with its id after a space as the text
/// and a log-probability of −0.5, and the end of the stream.
pub(super) fn token_events(tokens: &[u32]) -> Vec<Bytes> {
    let last = tokens.len().wrapping_sub(1);
    let event = |(at, token): (usize, &u32)| {
        let data = json!({"object": "text_completion", "choices": [{
            "index": 0, "text": format!(" {token}"), "token_ids": [token],
            "logprobs": {"token_logprobs": [-0.5]},
            "finish_reason": (at == last).then_some("stop"),
        }]});
        Bytes::from(format!("data: {data}\n\n"))
    };
    let done = Bytes::from_static(b"data: [DONE]\n\n");
    tokens.iter().enumerate().map(event).chain([done]).collect()
}
