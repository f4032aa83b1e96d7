//! [`SampleStream`]: a completion that arrives token by token.
//!
//! [`endpoint`] reads the tokens from the server's OpenAI-compatible endpoint. For a server without
//! the endpoint, [`pieces`] samples the completion in several requests.

mod endpoint;
mod piece_text;
mod pieces;
mod stream_end;

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::stream::{self, BoxStream, Stream, StreamExt};
use tinkex_wire::{ModelInput, SampleRequest, SampleStreamRequest, SamplingParams, StopReason};
use tokio::runtime::Handle;
use tokio::time::{Instant, timeout_at};
use tracing::Span;

use crate::dispatch::Permit;
use crate::error::{Error, Result};
use crate::future::RequestFuture;
#[cfg(feature = "tokenizer")]
use crate::tokenizer::Tokenizer;
use crate::transport::http::Lane;
use crate::transport::retry::call_progress::CallProgress;
use crate::validated::Validated;

use super::{SamplingClient, SamplingShared};
use endpoint::{OpenedEndpoint, TokenEvents};
use pieces::Pieces;
use stream_end::StreamEnd;

/// Default of [`SampleStreamOptions::idle_timeout`].
const IDLE_TIMEOUT: Duration = Duration::from_secs(300);

/// Token of a [`SampleStream`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct StreamedToken {
    /// Token id.
    pub token: u32,
    /// Text that became certain with this token. Empty while a character or a possible stop string
    /// is incomplete. The concatenation of all texts is the text of the completion, without special
    /// tokens and without the stop string that ended it.
    pub text: String,
    /// Log-probability of the token; `None` if the server does not report it.
    pub logprob: Option<f32>,
    /// Reason why the completion ended. Set on the last token only.
    pub stop_reason: Option<StopReason>,
}

/// Stream of the tokens of one completion, returned by [`SamplingClient::sample_stream`].
///
/// The stream ends after the token with a [`stop_reason`](StreamedToken::stop_reason), or after the
/// first error.
///
/// ```no_run
/// # async fn run(sampler: tinkex::SamplingClient) -> tinkex::Result<()> {
/// use tinkex::SamplingParams;
///
/// let params = SamplingParams::new().max_tokens(64);
/// let mut stream = sampler.sample_stream([1, 2, 3], params);
/// while let Some(token) = stream.next().await {
///     print!("{}", token?.text);
/// }
/// # Ok(()) }
/// ```
///
/// # How the tokens arrive
///
/// A `tinkex` server sends each token when it is sampled, through its OpenAI-compatible endpoint.
/// The tokens and log-probabilities equal the result of [`SamplingClient::sample`] with the same
/// seed and parameters.
///
/// A server without that endpoint (status 404, 405 or 501, or no token ids in its events) or
/// without its extensions (400 or 422), and any server for a prompt with images, is sampled in
/// pieces: 8 tokens first, then as many tokens per piece as take about 0.3 seconds. Each piece
/// continues the previous pieces. Sampling in pieces has three consequences: the prompt is sent and
/// charged with every piece; with a seed, the tokens differ from the tokens of
/// [`SamplingClient::sample`]; and the client decodes the text, which needs the feature `tokenizer`
/// (without the feature, the text is empty).
///
/// # Failures
///
/// The request is retried like any other until the first byte of the response. Afterwards, a lost
/// connection or the [idle timeout](SampleStreamOptions::idle_timeout) ends the stream with an
/// error: the tokens of a retried request may differ from the tokens that the program has used.
///
/// # Cancel safety
///
/// Dropping the stream closes its connection, which cancels the sample on the server.
/// [`next`](Self::next) is cancel safe: no token is lost if its future is dropped.
#[must_use = "dropping a SampleStream cancels the sample; poll it"]
pub struct SampleStream {
    tokens: BoxStream<'static, Result<StreamedToken>>,
    /// Runtime in which the stream was created, for a stream that is polled outside of a runtime.
    runtime: Option<Handle>,
    end: StreamEnd,
    /// Span in which the stream was created. Often another task polls the stream, for example the
    /// connection of a web server; its requests and events still belong to the span.
    span: Span,
}

/// Sampling parameters with the optional settings of a stream, for
/// [`SamplingClient::sample_stream`].
///
/// [`SamplingParams`] convert into options without further settings. Parameters and options convert
/// by value and by reference.
///
/// ```
/// use std::time::Duration;
/// use tinkex::{SampleStreamOptions, SamplingParams};
///
/// let params = SamplingParams::new().max_tokens(64);
/// let options = SampleStreamOptions::new(params).idle_timeout(Duration::from_secs(60));
/// ```
#[derive(Clone, Debug)]
#[must_use = "options do nothing until they are passed to `SamplingClient::sample_stream`"]
pub struct SampleStreamOptions {
    params: SamplingParams,
    idle_timeout: Duration,
    text: TextSource,
}

/// Source of the tokenizer that decodes pieces.
#[derive(Clone, Debug)]
enum TextSource {
    /// The tokenizer of the base model, loaded when the first piece has arrived.
    BaseModel,
    #[cfg(feature = "tokenizer")]
    Tokenizer(Tokenizer),
    /// Pieces have no text.
    None,
}

impl SampleStreamOptions {
    /// Creates options with the sampling parameters.
    pub fn new(params: SamplingParams) -> Self {
        Self { params, idle_timeout: IDLE_TIMEOUT, text: TextSource::BaseModel }
    }

    /// Sets the longest time without data from the server, also before the first token. Defaults to
    /// 5 minutes.
    pub fn idle_timeout(mut self, timeout: Duration) -> Self {
        self.idle_timeout = timeout;
        self
    }

    /// Sets the tokenizer that decodes the text if the server is sampled in pieces. By default the
    /// client then loads the tokenizer of the base model, as [`SamplingClient::tokenizer`] does.
    #[cfg(feature = "tokenizer")]
    pub fn tokenizer(mut self, tokenizer: Tokenizer) -> Self {
        self.text = TextSource::Tokenizer(tokenizer);
        self
    }

    /// Leaves the text empty if the server is sampled in pieces, so that no tokenizer is needed.
    pub fn without_text(mut self) -> Self {
        self.text = TextSource::None;
        self
    }

    /// Sends the request to the endpoint and waits for the first token, or prepares the stream for
    /// pieces if the server does not have the endpoint.
    async fn open(self, client: SamplingClient, prompt: ModelInput) -> Result<OpenStream> {
        let Self { params, idle_timeout, text } = self;
        client.check_open().map_err(|error| error.during("sample_stream"))?;
        let limit = client.options().call_limit();
        let deadline = limit.and_then(|limit| Some((limit, Instant::now().checked_add(limit)?)));
        // Check the parameters as `sample` does, so that the endpoint and sampling in pieces reject
        // the same parameters.
        Validated::new(SampleRequest::new(prompt.clone(), params.clone()))
            .map_err(|error| Error::from(error).during("sample_stream"))?;
        let connection = client.0.shared.session.connection();
        let mut call = CallProgress::new();
        let source = match prompt.to_tokens() {
            Some(tokens) if connection.may_stream_samples() => {
                let model = client.sampler_id().as_str();
                let request = SampleStreamRequest::new(model, tokens, params.clone());
                let opening = endpoint::open(&client.0, &request, idle_timeout, &mut call);
                let opened = match deadline {
                    None => opening.await,
                    Some((limit, end)) => {
                        let opened = timeout_at(end, opening).await;
                        opened.unwrap_or_else(|_| Err(call.deadline(limit).during("sample_stream")))
                    }
                };
                let log = client.0.shared.session.transport().retry_log();
                match &opened {
                    Ok(OpenedEndpoint::Unsupported) => {}
                    Ok(OpenedEndpoint::Stream(..)) => log.ended(&call, Lane::Sample, &Ok(())),
                    Err(error) => log.ended(&call, Lane::Sample, &Err::<(), _>(error.clone())),
                }
                match connection.record_failure(opened)? {
                    OpenedEndpoint::Stream(events, permit) => Some((events, permit)),
                    OpenedEndpoint::Unsupported => None,
                }
            }
            _ => None,
        };
        let source = match source {
            Some((events, permit)) => TokenSource::Endpoint(events, permit),
            None => TokenSource::Pieces(Pieces::new(client.clone(), prompt, params, text)),
        };
        Ok(OpenStream { client, source, deadline, call })
    }
}

impl From<SamplingParams> for SampleStreamOptions {
    fn from(params: SamplingParams) -> Self {
        Self::new(params)
    }
}

impl From<&SamplingParams> for SampleStreamOptions {
    fn from(params: &SamplingParams) -> Self {
        Self::new(params.clone())
    }
}

impl From<&Self> for SampleStreamOptions {
    fn from(options: &Self) -> Self {
        options.clone()
    }
}

impl SamplingClient {
    /// Samples one completion of `prompt` and streams its tokens.
    ///
    /// The request starts [at once](crate#calls); later tokens are read when the stream is polled.
    pub fn sample_stream(
        &self,
        prompt: impl Into<ModelInput>,
        options: impl Into<SampleStreamOptions>,
    ) -> SampleStream {
        let opening = Box::pin(options.into().open(self.clone(), prompt.into()));
        let _entered = self.0.shared.session.settings().enter_runtime();
        let start = StreamProgress::Opening(RequestFuture::start(opening));
        SampleStream {
            tokens: stream::unfold(start, StreamProgress::next).fuse().boxed(),
            runtime: Handle::try_current().ok(),
            end: StreamEnd::new(self.sampler_id().clone()),
            span: Span::current(),
        }
    }
}

impl SampleStream {
    /// Returns the next token, or `None` at the end.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput) if a parameter is invalid;
    /// otherwise fails if the request fails, or if the connection breaks before the last token.
    /// `None` follows an error.
    ///
    /// # Cancel safety
    /// Cancel safe: no token is lost if the future is dropped.
    pub async fn next(&mut self) -> Option<Result<StreamedToken>> {
        StreamExt::next(self).await
    }
}

impl Stream for SampleStream {
    type Item = Result<StreamedToken>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Self { tokens, runtime, end, span } = &mut *self;
        let outside = Handle::try_current().is_err();
        let _entered = runtime.as_ref().filter(|_| outside).map(Handle::enter);
        let _in_span = span.enter();
        let next = ready!(tokens.poll_next_unpin(context));
        end.observe(next.as_ref());
        Poll::Ready(next)
    }
}

impl Drop for SampleStream {
    fn drop(&mut self) {
        self.span.in_scope(|| self.end.dropped());
    }
}

impl fmt::Debug for SampleStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SampleStream")
    }
}

/// A stream after the choice between the endpoint and sampling in pieces.
struct OpenStream {
    client: SamplingClient,
    source: TokenSource,
    /// Maximum duration of the call, and the time at which it is over.
    deadline: Option<(Duration, Instant)>,
    call: CallProgress,
}

/// Source of the tokens of a stream.
enum TokenSource {
    /// Tokens from the endpoint, with the concurrency permit of the sample.
    Endpoint(Box<TokenEvents>, #[expect(dead_code, reason = "released on drop")] Option<Permit>),
    Pieces(Box<Pieces>),
}

impl OpenStream {
    async fn next(&mut self) -> Result<Option<StreamedToken>> {
        let SamplingShared { session, .. } = &*self.client.0.shared;
        match &mut self.source {
            TokenSource::Endpoint(events, _) => {
                let next = within(self.deadline, events.next(session)).await;
                let next = next.map_err(|error| self.call.finish(error).during("sample_stream"));
                session.connection().record_failure(next)
            }
            // Each piece is a sample of its own, which records its failures.
            TokenSource::Pieces(pieces) => within(self.deadline, pieces.next()).await,
        }
    }
}

/// State of the stream between two tokens.
enum StreamProgress {
    Opening(RequestFuture<OpenStream>),
    Open(Box<OpenStream>),
    /// The last token was returned; the response has not been read to its end.
    Finished(Box<OpenStream>),
    Failed,
}

impl StreamProgress {
    async fn next(self) -> Option<(Result<StreamedToken>, Self)> {
        let mut open = match self {
            Self::Opening(opening) => match opening.await {
                Ok(open) => Box::new(open),
                Err(error) => return Some((Err(error), Self::Failed)),
            },
            Self::Open(open) => open,
            Self::Finished(mut open) => {
                // Read the response to its end, so that its connection can be reused. An error does
                // not matter: all tokens were returned.
                while let Ok(Some(_)) = open.next().await {}
                return None;
            }
            Self::Failed => return None,
        };
        match open.next().await {
            Ok(Some(token)) if token.stop_reason.is_some() => {
                open.client.0.active.record_success();
                Some((Ok(token), Self::Finished(open)))
            }
            Ok(Some(token)) => Some((Ok(token), Self::Open(open))),
            Ok(None) => None,
            Err(error) => Some((Err(error), Self::Failed)),
        }
    }
}

/// Runs `work`, or fails when the deadline of the call has passed.
async fn within<T>(
    deadline: Option<(Duration, Instant)>,
    work: impl Future<Output = Result<T>>,
) -> Result<T> {
    let Some((limit, end)) = deadline else { return work.await };
    timeout_at(end, work).await.unwrap_or_else(|_| Err(Error::call_deadline(limit)))
}
