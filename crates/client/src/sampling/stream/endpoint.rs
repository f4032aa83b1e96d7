//! [`TokenEvents`]: reads the tokens of a completion from the server's OpenAI-compatible endpoint.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use http::header::{ACCEPT, CONTENT_TYPE};
use http::{HeaderValue, Response};
use tinkex_wire::codec::sse::SseDecoder;
use tinkex_wire::{
    ErrorCategory, RequestFailed, SampleStreamChoice, SampleStreamEvent, SampleStreamRequest,
    header as wire_header,
};

use crate::call_options::ApplyOptions as _;
use crate::dispatch::Permit;
use crate::error::{Error, ErrorKind, Result};
use crate::hint::Hint;
use crate::sampling::SamplingView;
use crate::session::Session;
use crate::transport::RequestOptions;
use crate::transport::http::{HttpFailure, ResponseBody};
use crate::transport::request::header;
use crate::transport::retry::call_progress::CallProgress;
use crate::transport::retry::shared_backoff::RequestBackoff;

use super::StreamedToken;

const EVENT_STREAM: &str = "text/event-stream";
/// Maximum size of an event, in bytes. Events hold a few tokens at most, so a larger event is
/// invalid.
const MAX_EVENT: usize = 1 << 20;

/// Response to the request for a stream.
pub(super) enum OpenedEndpoint {
    /// The stream of tokens, whose first token has arrived, and the concurrency permit of the
    /// sample.
    Stream(Box<TokenEvents>, Option<Permit>),
    /// The server does not have the endpoint.
    Unsupported,
}

/// Tokens of a completion, read from the events of a response.
pub(super) struct TokenEvents {
    body: ResponseBody,
    decoder: SseDecoder,
    ready: VecDeque<StreamedToken>,
    /// Number of tokens received so far.
    received: usize,
    /// Whether the last token was received.
    complete: bool,
    /// Whether the end of the stream was received.
    done: bool,
}

/// Sends the request once admission control and the shared backoff allow it, and waits for the
/// first token.
pub(super) async fn open(
    view: &SamplingView,
    request: &SampleStreamRequest,
    idle_timeout: Duration,
    call: &mut CallProgress,
) -> Result<OpenedEndpoint> {
    let session = &view.shared.session;
    let sent = session.run_until_closed(send(view, request, idle_timeout, call)).await;
    let (response, permit) = match sent {
        Err(error) if is_missing_endpoint(&error) => {
            session.connection().set_cannot_stream_samples();
            return Ok(OpenedEndpoint::Unsupported);
        }
        Err(error) if may_be_unsupported(&error) => return Ok(OpenedEndpoint::Unsupported),
        sent => sent?,
    };
    if !is_event_stream(&response) {
        session.connection().set_cannot_stream_samples();
        return Ok(OpenedEndpoint::Unsupported);
    }
    let mut events = TokenEvents::new(response.into_body());
    match events.receive(session).await {
        Err(ReadError::NoTokenIds) => {
            session.connection().set_cannot_stream_samples();
            Ok(OpenedEndpoint::Unsupported)
        }
        Err(ReadError::Failed(error)) => Err(call.finish(error).during("sample_stream")),
        Ok(()) => Ok(OpenedEndpoint::Stream(Box::new(events), permit)),
    }
}

async fn send(
    view: &SamplingView,
    request: &SampleStreamRequest,
    idle_timeout: Duration,
    call: &mut CallProgress,
) -> Result<(Response<ResponseBody>, Option<Permit>)> {
    let session = &view.shared.session;
    let active = view.active.start().await.into_permit();
    let bytes = size_of_val(&request.prompt[..]) as u64;
    let admission = session.admission();
    // Hold the admission permit until the server has accepted the request, as for other samples.
    let _permit = admission.acquire(bytes).await;
    call.admit();
    let backoff = RequestBackoff { backoff: Arc::clone(admission.backoff()), bytes };
    let mut options = RequestOptions { backoff: Some(backoff), ..view.options.request_options() };
    header::put(&mut options.headers, wire_header::SAMPLING_BACKPRESSURE, "1");
    options.headers.insert(ACCEPT, HeaderValue::from_static(EVENT_STREAM));
    let transport = session.transport();
    let sent = transport.send_streaming_in_call(request, &options, idle_timeout, call).await;
    Ok((sent?, active))
}

/// Returns whether the error says that the server does not have the endpoint. A 404 whose body is
/// an OpenAI error object means that the model is unknown: the endpoint exists.
fn is_missing_endpoint(error: &Error) -> bool {
    match error.status() {
        Some(405 | 501) => true,
        Some(404) => error.body_json().is_none_or(|body| !body["error"].is_object()),
        _ => false,
    }
}

/// Returns whether the server may have the endpoint but not support this model or the extensions
/// that the request uses. If the request is invalid instead, sampling in pieces also fails, with
/// the error of the Tinker API. The exception is a prompt that exceeds the context length together
/// with `max_tokens`: this error is returned at once, because the first pieces could be short
/// enough to succeed.
fn may_be_unsupported(error: &Error) -> bool {
    matches!(error.status(), Some(400 | 404 | 422)) && error.hint() != Some(Hint::ShortenPrompt)
}

fn is_event_stream(response: &Response<ResponseBody>) -> bool {
    let kind = response.headers().get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    kind.is_some_and(|kind| {
        let kind = kind.split(';').next().unwrap_or_default();
        kind.trim().eq_ignore_ascii_case(EVENT_STREAM)
    })
}

/// Failure to read a token.
enum ReadError {
    /// The first tokens have no ids: the server does not support the option `return_token_ids`.
    NoTokenIds,
    Failed(Error),
}

type ReadResult = std::result::Result<(), ReadError>;

impl From<Error> for ReadError {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl TokenEvents {
    fn new(body: ResponseBody) -> Self {
        Self {
            body,
            decoder: SseDecoder::new(MAX_EVENT),
            ready: VecDeque::new(),
            received: 0,
            complete: false,
            done: false,
        }
    }

    /// Returns the next token, or `None` at the end.
    pub(super) async fn next(&mut self, session: &Session) -> Result<Option<StreamedToken>> {
        if self.ready.is_empty() {
            match self.receive(session).await {
                Ok(()) => {}
                Err(ReadError::Failed(error)) => return Err(error),
                Err(ReadError::NoTokenIds) => return Err(invalid("it has no token ids")),
            }
        }
        Ok(self.ready.pop_front())
    }

    /// Reads events until a token is ready or the stream ends.
    async fn receive(&mut self, session: &Session) -> ReadResult {
        while self.ready.is_empty() && !self.done {
            if let Some(event) = self.decoder.next_event() {
                self.accept(&event.data)?;
                continue;
            }
            let part = session.run_until_closed(async { Ok(self.body.next().await) }).await?;
            match part {
                Some(Ok(bytes)) => self.decoder.push(&bytes).map_err(Error::from)?,
                // All tokens were received, so a missing end of the stream is not an error.
                Some(Err(_)) | None if self.complete => self.done = true,
                Some(Err(failure)) => return Err(self.interrupted(failure).into()),
                None => return Err(self.interrupted(HttpFailure::connect("end of body")).into()),
            }
        }
        Ok(())
    }

    fn accept(&mut self, data: &str) -> ReadResult {
        match SampleStreamEvent::from_data(data).map_err(Error::from)? {
            SampleStreamEvent::Done if self.complete => self.done = true,
            SampleStreamEvent::Done => {
                return Err(invalid("the stream ends before the last token").into());
            }
            SampleStreamEvent::Failed(message) => {
                let failed = RequestFailed::new(message, ErrorCategory::Unknown);
                return Err(Error::from_failed_request(failed).into());
            }
            SampleStreamEvent::Choices(choices) => {
                for choice in choices.into_iter().filter(|choice| choice.index == 0) {
                    self.add(choice)?;
                }
            }
            // Ignore other events: the type is non-exhaustive, and a client need not know all
            // events.
            _ => {}
        }
        Ok(())
    }

    /// Adds the tokens of an event.
    fn add(&mut self, choice: SampleStreamChoice) -> ReadResult {
        let texts = choice.token_texts();
        let SampleStreamChoice { text, token_ids, logprobs, finish_reason, .. } = choice;
        let Some(tokens) = token_ids else {
            return match (self.received, text.is_empty() && finish_reason.is_none()) {
                // Some servers first send an event without content.
                (_, true) => Ok(()),
                (0, false) => Err(ReadError::NoTokenIds),
                (_, false) => Err(invalid("it has text without token ids").into()),
            };
        };
        if self.complete {
            if tokens.is_empty() {
                return Ok(());
            }
            return Err(invalid("it follows the last token").into());
        }
        let Some(last) = tokens.len().checked_sub(1) else {
            if text.is_empty() && finish_reason.is_none() {
                return Ok(());
            }
            return Err(invalid("it has text without a token").into());
        };
        let logprobs = logprobs.map(|logprobs| logprobs.token_logprobs).unwrap_or_default();
        for (at, (token, text)) in tokens.into_iter().zip(texts).enumerate() {
            self.ready.push_back(StreamedToken {
                token,
                text,
                logprob: logprobs.get(at).copied().flatten(),
                stop_reason: finish_reason.filter(|_| at == last),
            });
        }
        self.received += last + 1;
        if finish_reason.is_some() {
            self.complete = true;
            self.body.set_complete();
        }
        Ok(())
    }

    /// Returns the error for a body that breaks before the last token.
    fn interrupted(&self, failure: HttpFailure) -> Error {
        let received = self.received;
        let tokens = if received == 1 { "token" } else { "tokens" };
        Error::from(failure).map_message(|message| {
            format!("stream was interrupted after {received} {tokens}: {message}")
        })
    }
}

/// Returns the error for an event that violates the protocol.
fn invalid(reason: &str) -> Error {
    Error::new(ErrorKind::Decode, format!("cannot decode an event of the stream: {reason}"))
        .with_hint(Hint::CheckServer)
}
