//! [`SampleStream`]: a completion that arrives token by token.
//!
//! [`endpoint`] reads the tokens from the server's OpenAI-compatible endpoint. A server without it
//! is sampled in [`pieces`].

mod endpoint;
mod piece_text;
mod pieces;

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::stream::{self, BoxStream, Stream, StreamExt};
use tinkex_wire::{ModelInput, SampleRequest, SampleStreamRequest, SamplingParams, StopReason};
use tokio::time::{Instant, timeout_at};

use crate::call_options::CallOptions;
use crate::dispatch::Permit;
use crate::error::{Error, Result};
#[cfg(feature = "tokenizer")]
use crate::tokenizer::Tokenizer;
use crate::transport::call_progress::CallProgress;
use crate::transport::http::Lane;
use crate::transport::retry_policy::RetryPolicy;
use crate::validated::Validated;

use super::{SamplingClient, SamplingShared};
use endpoint::{OpenedEndpoint, TokenEvents};
use pieces::Pieces;

/// Default of [`SampleStream::idle_timeout`].
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
/// Nothing is sent before the stream is polled for the first time; set options before that. The
/// stream ends after the token with a [`stop_reason`](StreamedToken::stop_reason), or after the
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
/// The tokens and log-probabilities are those of [`SamplingClient::sample`] with the same seed and
/// parameters.
///
/// A server without that endpoint (status 404, 405 or 501, or no token ids in its events) or
/// without its extensions (400 or 422), and any server for a prompt with images, is sampled in
/// pieces: 8 tokens first, then as many as take about 0.3 seconds, each continuing the previous
/// ones. Then the prompt is sent and charged with every piece, tokens with a seed differ from those
/// of `sample`, and the text is decoded on the client, which needs the feature `tokenizer`: it is
/// empty without the feature.
///
/// # Failures
///
/// The request is retried like any other until the first byte of the response. After it, a lost
/// connection or the [idle timeout](Self::idle_timeout) ends the stream with an error: the tokens
/// of a retried request may differ from those that the program has used.
///
/// # Cancel safety
///
/// Dropping the stream closes its connection, which cancels the sample on the server.
/// [`next`](Self::next) is cancel safe: no token is lost if its future is dropped.
#[must_use = "nothing is sent until the stream is polled"]
pub struct SampleStream {
    /// Set until the first poll.
    unstarted: Option<Box<UnstartedStream>>,
    /// Set from the first poll on.
    tokens: Option<BoxStream<'static, Result<StreamedToken>>>,
}

/// A stream that has not been started.
struct UnstartedStream {
    client: SamplingClient,
    prompt: ModelInput,
    params: SamplingParams,
    idle_timeout: Duration,
    text: TextSource,
}

/// Where the text of pieces comes from.
enum TextSource {
    /// The tokenizer of the base model, loaded when the first piece has arrived.
    BaseModel,
    #[cfg(feature = "tokenizer")]
    Tokenizer(Tokenizer),
    /// Pieces have no text.
    None,
}

impl SamplingClient {
    /// Samples one completion of `prompt` and streams its tokens.
    ///
    /// Poll the returned [`SampleStream`], or call its [`next`](SampleStream::next) method; nothing
    /// is sent before that.
    pub fn sample_stream(
        &self,
        prompt: impl Into<ModelInput>,
        params: SamplingParams,
    ) -> SampleStream {
        let unstarted = UnstartedStream {
            client: self.clone(),
            prompt: prompt.into(),
            params,
            idle_timeout: IDLE_TIMEOUT,
            text: TextSource::BaseModel,
        };
        SampleStream { unstarted: Some(Box::new(unstarted)), tokens: None }
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

    /// Sets the longest time without data from the server, also before the first token. Defaults to
    /// 5 minutes.
    pub fn idle_timeout(self, timeout: Duration) -> Self {
        self.set(|options| options.idle_timeout = timeout)
    }

    /// Sets how often and how long the request is retried before the response begins. Defaults to
    /// the policy of the client.
    pub fn retry(self, policy: RetryPolicy) -> Self {
        self.set_call(|options| options.retry(policy))
    }

    /// Sets the maximum duration of the stream, from the first poll to the last token. Unlimited by
    /// default.
    pub fn timeout(self, timeout: Duration) -> Self {
        self.set_call(|options| options.timeout(timeout))
    }

    /// Sets the tokenizer that decodes the text if the server is sampled in pieces. By default that
    /// of the base model is loaded then, as by [`SamplingClient::tokenizer`].
    #[cfg(feature = "tokenizer")]
    pub fn tokenizer(self, tokenizer: Tokenizer) -> Self {
        self.set(|options| options.text = TextSource::Tokenizer(tokenizer))
    }

    /// Leaves the text empty if the server is sampled in pieces, so that no tokenizer is needed.
    pub fn without_text(self) -> Self {
        self.set(|options| options.text = TextSource::None)
    }

    fn set(mut self, change: impl FnOnce(&mut UnstartedStream)) -> Self {
        if let Some(options) = &mut self.unstarted {
            change(options);
        }
        self
    }

    fn set_call(self, change: impl FnOnce(CallOptions) -> CallOptions) -> Self {
        self.set(|options| {
            let changed = change(options.client.options());
            options.client = options.client.with_options(changed);
        })
    }
}

impl Stream for SampleStream {
    type Item = Result<StreamedToken>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(unstarted) = self.unstarted.take() {
            self.tokens = Some(unstarted.start());
        }
        match &mut self.tokens {
            Some(tokens) => tokens.poll_next_unpin(context),
            None => Poll::Ready(None),
        }
    }
}

impl fmt::Debug for SampleStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SampleStream")
    }
}

impl UnstartedStream {
    fn start(self: Box<Self>) -> BoxStream<'static, Result<StreamedToken>> {
        stream::unfold(StreamProgress::New(self), StreamProgress::next).fuse().boxed()
    }

    /// Sends the request to the endpoint and waits for the first token, or prepares the stream for
    /// pieces if the server does not have the endpoint.
    async fn open(self: Box<Self>) -> Result<OpenStream> {
        let Self { client, prompt, params, idle_timeout, text } = *self;
        let limit = client.options().call_limit();
        let deadline = limit.and_then(|limit| Some((limit, Instant::now().checked_add(limit)?)));
        // Check the parameters as `sample` does, so that both sources of tokens reject the same.
        Validated::new(SampleRequest::new(prompt.clone(), params.clone()))
            .map_err(|error| Error::from(error).during("sample_stream"))?;
        let connection = client.0.shared.session.connection();
        let mut call = CallProgress::new();
        let source = match prompt.to_tokens() {
            Some(tokens) if connection.streams_samples() => {
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

/// A stream whose source of tokens is known.
struct OpenStream {
    client: SamplingClient,
    source: TokenSource,
    /// Maximum duration, and its end.
    deadline: Option<(Duration, Instant)>,
    call: CallProgress,
}

enum TokenSource {
    /// Holds the permit of a concurrent sample.
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
    New(Box<UnstartedStream>),
    Open(Box<OpenStream>),
    /// The last token was returned; the response has not been read to its end.
    Finished(Box<OpenStream>),
    Failed,
}

impl StreamProgress {
    async fn next(self) -> Option<(Result<StreamedToken>, Self)> {
        let mut open = match self {
            Self::New(options) => match Box::pin(options.open()).await {
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
