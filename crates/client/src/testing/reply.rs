//! [`Reply`]: what a [`FakeServer`](super::FakeServer) does with a request.

use std::num::NonZeroU64;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};
use serde::Serialize;
use tinkex_wire::{
    ErrorCategory, ForwardBackwardOutput, JSON, OptimStepOutput, PollResponse, RequestFailed,
    RequestId, ResultPayload, SampleResponse, SampledSequence, Tokens,
};

use super::stream::{EVENT_STREAM, ScriptedStream, StreamEnd, token_events};

/// What a [`FakeServer`](super::FakeServer) does with a request.
///
/// There are three kinds of replies: the default response ([`ok`](Self::ok)), an HTTP response or
/// failure ([`status`](Self::status), [`json`](Self::json), [`stream`](Self::stream),
/// [`connection_lost`](Self::connection_lost), …), and an outcome of submitted work
/// ([`sampled`](Self::sampled), [`sample`](Self::sample),
/// [`forward_backward`](Self::forward_backward), [`optim_step`](Self::optim_step),
/// [`result`](Self::result), [`failed`](Self::failed)). For an outcome the server accepts the
/// request and resolves its future to it.
///
/// ```
/// use std::time::Duration;
/// use tinkex::testing::Reply;
///
/// let overloaded = Reply::status(503).text("overloaded").times(3);
/// let slow = Reply::ok().delay(Duration::from_secs(30));
/// let down = Reply::connection_lost().always();
/// ```
#[derive(Clone, Debug)]
#[must_use = "a reply does nothing until it is passed to `FakeServer::on`"]
pub struct Reply {
    pub(super) action: Action,
    pub(super) delay: Duration,
    pub(super) request_id: Option<RequestId>,
    /// How many requests the reply is still used for; `None` for all.
    remaining: Option<NonZeroU64>,
}

#[derive(Clone, Debug)]
pub(super) enum Action {
    Default,
    Response(ScriptedResponse),
    Stream(Box<ScriptedStream>),
    Outcome(PollResponse),
    ConnectionLost,
    ConnectionRefused,
    TimedOut,
    Never,
}

/// HTTP response of a [`Reply`].
#[derive(Clone, Debug)]
pub(super) struct ScriptedResponse {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
}

impl ScriptedResponse {
    pub(super) fn json(status: StatusCode, body: &impl Serialize) -> Self {
        Self::with_content_type(status, JSON, serde_json::to_vec(body).unwrap_or_default())
    }

    pub(super) fn with_content_type(
        status: StatusCode,
        content_type: &'static str,
        body: impl Into<Bytes>,
    ) -> Self {
        let content_type = (header::CONTENT_TYPE, HeaderValue::from_static(content_type));
        Self { status, headers: HeaderMap::from_iter([content_type]), body: body.into() }
    }

    pub(super) fn to_http(&self) -> Response<Bytes> {
        let mut response = Response::new(self.body.clone());
        *response.status_mut() = self.status;
        *response.headers_mut() = self.headers.clone();
        response
    }
}

impl Reply {
    fn new(action: Action) -> Self {
        let delay = Duration::ZERO;
        let remaining = Some(NonZeroU64::MIN);
        Self { action, delay, request_id: None, remaining }
    }

    /// Gives the default response of the route.
    pub fn ok() -> Self {
        Self::new(Action::Default)
    }

    /// Responds with a status and an empty body.
    ///
    /// # Panics
    /// If `status` is not between 100 and 999.
    pub fn status(status: u16) -> Self {
        let status = StatusCode::from_u16(status).expect("a status is between 100 and 999");
        let headers = HeaderMap::new();
        let body = Bytes::new();
        Self::new(Action::Response(ScriptedResponse { status, headers, body }))
    }

    /// Responds with status 200 and a JSON body, for example a `serde_json::json!` value or a type
    /// of [`tinkex::rest`](crate::rest).
    ///
    /// # Panics
    /// If `body` cannot be encoded.
    pub fn json(body: impl Serialize) -> Self {
        Self::status(200).with_json(body)
    }

    /// Responds with status 200 and a body of the type `text/event-stream` that arrives in these
    /// parts.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tinkex::testing::Reply;
    ///
    /// let broken = Reply::stream(["data: {\"choices\": []}\n\n", ": ping\n\n"])
    ///     .part_delay(Duration::from_secs(1))
    ///     .then_connection_lost();
    /// ```
    pub fn stream(parts: impl IntoIterator<Item = impl Into<Bytes>>) -> Self {
        let ok = StatusCode::OK;
        Self::new(Action::Stream(Box::new(ScriptedStream {
            head: ScriptedResponse::with_content_type(ok, EVENT_STREAM, Bytes::new()),
            parts: parts.into_iter().map(Into::into).collect(),
            part_delay: Duration::ZERO,
            end: StreamEnd::Complete,
        })))
    }

    /// Streams a sample of these tokens: one event per token, with its id after a space as the text
    /// and a log-probability of −0.5.
    pub fn streamed(tokens: impl Into<Tokens>) -> Self {
        Self::stream(token_events(&tokens.into()))
    }

    /// Waits before each part of a streamed body.
    ///
    /// # Panics
    /// If the reply is not a [`stream`](Self::stream).
    pub fn part_delay(mut self, delay: Duration) -> Self {
        self.scripted_stream().part_delay = delay;
        self
    }

    /// Interrupts the connection after the last part of a streamed body.
    ///
    /// # Panics
    /// If the reply is not a [`stream`](Self::stream).
    pub fn then_connection_lost(mut self) -> Self {
        self.scripted_stream().end = StreamEnd::Lost;
        self
    }

    /// Sends nothing after the last part of a streamed body, so that the idle timeout of the client
    /// expires.
    ///
    /// # Panics
    /// If the reply is not a [`stream`](Self::stream).
    pub fn then_silence(mut self) -> Self {
        self.scripted_stream().end = StreamEnd::Silence;
        self
    }

    /// Accepts a sample, whose result is one sequence of these tokens, with a log-probability of
    /// −0.5 each.
    pub fn sampled(tokens: impl Into<Tokens>) -> Self {
        let sequence = sequence_of(tokens.into());
        Self::sample(&SampleResponse::default().sequences(vec![sequence]))
    }

    /// Accepts a sample with this result.
    pub fn sample(response: &SampleResponse) -> Self {
        Self::new(Action::Outcome(ready_proto(response.to_proto())))
    }

    /// Accepts a training pass with this result.
    pub fn forward_backward(output: &ForwardBackwardOutput) -> Self {
        Self::new(Action::Outcome(ready_proto(output.to_proto())))
    }

    /// Accepts an optimizer step with this result.
    pub fn optim_step(output: &OptimStepOutput) -> Self {
        Self::result(output)
    }

    /// Accepts submitted work, whose result is this JSON.
    ///
    /// # Panics
    /// If `result` cannot be encoded.
    pub fn result(result: impl Serialize) -> Self {
        let body = serde_json::to_vec(&result).expect("the result can be encoded as JSON");
        Self::new(Action::Outcome(PollResponse::Ready(ResultPayload::Json(body.into()))))
    }

    /// Accepts submitted work, which fails when the server executes it.
    pub fn failed(category: ErrorCategory, message: impl Into<String>) -> Self {
        let failed = RequestFailed::new(message, category);
        Self::new(Action::Outcome(PollResponse::Failed(failed)))
    }

    /// Interrupts the connection before a response arrives.
    pub fn connection_lost() -> Self {
        Self::new(Action::ConnectionLost)
    }

    /// Refuses the connection, as if no server was running.
    pub fn connection_refused() -> Self {
        Self::new(Action::ConnectionRefused)
    }

    /// Lets the request time out: waits as long as the client allows.
    pub fn timeout() -> Self {
        Self::new(Action::TimedOut)
    }

    /// Never responds, and ignores the timeout of the request.
    pub fn never() -> Self {
        Self::new(Action::Never)
    }

    /// Sets the body of an HTTP response as JSON.
    ///
    /// # Panics
    /// If `body` cannot be encoded, or the reply is not an HTTP response.
    pub fn with_json(mut self, body: impl Serialize) -> Self {
        let body = serde_json::to_vec(&body).expect("the body can be encoded as JSON");
        let response = self.response();
        response.body = body.into();
        response.headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(JSON));
        self
    }

    /// Sets the body of an HTTP response, without a content type.
    ///
    /// # Panics
    /// If the reply is not an HTTP response.
    pub fn text(mut self, body: impl Into<Bytes>) -> Self {
        self.response().body = body.into();
        self
    }

    /// Sets a header of an HTTP response.
    ///
    /// # Panics
    /// If the name or the value is invalid, or the reply is not an HTTP response.
    pub fn header(mut self, name: &str, value: &str) -> Self {
        let name: HeaderName = name.parse().expect("the header name is valid");
        let value: HeaderValue = value.parse().expect("the header value is valid");
        self.response().headers.insert(name, value);
        self
    }

    /// Asks the client to retry after `delay`: sets `retry-after` to whole seconds, or else
    /// `retry-after-ms` to milliseconds.
    ///
    /// # Panics
    /// If the reply is not an HTTP response.
    pub fn retry_after(self, delay: Duration) -> Self {
        match delay.subsec_nanos() {
            0 => self.header("retry-after", &delay.as_secs().to_string()),
            _ => self.header("retry-after-ms", &delay.as_millis().to_string()),
        }
    }

    /// Waits before replying.
    pub fn delay(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// Sets the id under which submitted work is accepted (default `request-1`, `request-2`, …), so
    /// that a test can recognize the polls for its result.
    pub fn request_id(mut self, id: impl Into<RequestId>) -> Self {
        self.request_id = Some(id.into());
        self
    }

    /// Uses the reply for this many requests (default 1).
    ///
    /// # Panics
    /// If `requests` is 0.
    pub fn times(mut self, requests: u64) -> Self {
        self.remaining =
            Some(NonZeroU64::new(requests).expect("a reply is used for at least one request"));
        self
    }

    /// Uses the reply for all further requests of the route. Replies queued after it are not used.
    pub fn always(mut self) -> Self {
        self.remaining = None;
        self
    }

    /// Counts a use. Returns whether it was the last.
    pub(super) fn use_up(&mut self) -> bool {
        let Some(remaining) = self.remaining else { return false };
        let left = NonZeroU64::new(remaining.get() - 1);
        self.remaining = left.or(self.remaining);
        left.is_none()
    }

    #[expect(clippy::panic, reason = "documented: a mistake in the script fails the test")]
    fn response(&mut self) -> &mut ScriptedResponse {
        match &mut self.action {
            Action::Response(response) => response,
            Action::Stream(stream) => &mut stream.head,
            _ => panic!("only an HTTP response has a status, headers and a body"),
        }
    }

    #[expect(clippy::panic, reason = "documented: a mistake in the script fails the test")]
    fn scripted_stream(&mut self) -> &mut ScriptedStream {
        match &mut self.action {
            Action::Stream(stream) => stream,
            _ => panic!("only a stream has parts"),
        }
    }
}

/// Returns a sequence of `tokens` with a log-probability of −0.5 each.
pub(super) fn sequence_of(tokens: Tokens) -> SampledSequence {
    let logprobs = vec![-0.5; tokens.len()].into();
    SampledSequence::default().tokens(tokens).logprobs(Some(logprobs))
}

pub(super) fn ready_proto(body: Bytes) -> PollResponse {
    PollResponse::Ready(ResultPayload::Proto(body))
}
