//! The HTTP interface of the client.
//!
//! [`HttpService`] sends one request and returns its response or an [`HttpFailure`]. The default
//! implementation is [`Network`](network::Network), whose connections `pool` owns,
//! [`network_builder`] configures and the clients of a process share ([`shared_network`]); programs
//! implement their own, which [`custom`] wraps. [`upload`] is a file in the body of a request.

pub mod custom;
pub mod network;
pub mod network_builder;
mod pool;
pub mod shared_network;
pub mod upload;

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::stream::{self, BoxStream, Stream, StreamExt};
use http::{Request, Response};

use crate::error::{Error, ErrorKind};
use crate::hint::Hint;
use crate::instrument::StreamEvents;

use upload::UploadFile;

/// Sends HTTP requests.
///
/// An implementation sends each request exactly once and does not follow redirects. The client
/// retries and follows redirects itself, because it must not send a credential to another server.
///
/// Implemented for `Arc<T>`, so that a program can keep the service that it passes to
/// `ServiceClientBuilder::http`, and for closures that return
/// the future of a response:
///
/// ```
/// use tinkex::{ServiceClient, bytes::Bytes, http::{Request, Response}};
///
/// let service = ServiceClient::builder()
///     .api_key("tml-example")
///     .http(|_: Request<Bytes>| async { Ok(Response::new(Bytes::from_static(b"{}"))) })
///     .build()?;
/// # Ok::<_, tinkex::Error>(())
/// ```
pub trait HttpService: Send + Sync + 'static {
    /// Sends `request` and waits at most `timeout` for the complete response.
    fn send(
        &self,
        lane: Lane,
        request: Request<Bytes>,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>>;

    /// Sends `request` with the content of `file` after the bytes of its body, for bodies that are
    /// too large for memory. Otherwise like [`send`](Self::send).
    ///
    /// The default implementation reads the file into memory.
    fn send_upload(
        &self,
        lane: Lane,
        request: Request<Bytes>,
        file: UploadFile,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>> {
        Box::pin(async move {
            let request = file.append_to(request).await?;
            self.send(lane, request, timeout).await
        })
    }

    /// Sends `request` and returns the response with a streaming body, for bodies that are too
    /// large for memory. `timeout` is the longest time without new data.
    ///
    /// The default implementation waits for the complete response.
    fn send_streaming(
        &self,
        lane: Lane,
        request: Request<Bytes>,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<ResponseBody>, HttpFailure>> {
        let response = self.send(lane, request, timeout);
        Box::pin(async move { Ok(response.await?.map(ResponseBody::from)) })
    }
}

impl<T: HttpService + ?Sized> HttpService for Arc<T> {
    fn send(
        &self,
        lane: Lane,
        request: Request<Bytes>,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>> {
        (**self).send(lane, request, timeout)
    }

    fn send_upload(
        &self,
        lane: Lane,
        request: Request<Bytes>,
        file: UploadFile,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>> {
        (**self).send_upload(lane, request, file, timeout)
    }

    fn send_streaming(
        &self,
        lane: Lane,
        request: Request<Bytes>,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<ResponseBody>, HttpFailure>> {
        (**self).send_streaming(lane, request, timeout)
    }
}

impl<F, R> HttpService for F
where
    F: Fn(Request<Bytes>) -> R + Send + Sync + 'static,
    R: Future<Output = Result<Response<Bytes>, HttpFailure>> + Send + 'static,
{
    fn send(
        &self,
        _: Lane,
        request: Request<Bytes>,
        _: Duration,
    ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>> {
        Box::pin(self(request))
    }
}

/// Body of a response: a [`Stream`] of its parts, in the order in which they arrive.
///
/// ```
/// use futures_util::TryStreamExt;
/// use tinkex::{HttpFailure, ResponseBody, bytes::Bytes};
///
/// # async fn run() -> Result<(), HttpFailure> {
/// let body = ResponseBody::from(Bytes::from_static(b"text"));
/// let parts: Vec<Bytes> = body.try_collect().await?;
/// assert_eq!(parts.concat(), b"text");
/// # Ok(()) }
/// # futures_util::FutureExt::now_or_never(run()).unwrap().unwrap();
/// ```
pub struct ResponseBody {
    parts: BoxStream<'static, Result<Bytes, HttpFailure>>,
    /// Records the end of the body.
    events: Option<Box<StreamEvents>>,
}

impl ResponseBody {
    /// Creates a body from a stream of parts. An error ends the body.
    pub fn new(parts: impl Stream<Item = Result<Bytes, HttpFailure>> + Send + 'static) -> Self {
        Self { parts: parts.boxed(), events: None }
    }

    /// Records the end of the body in `events`.
    pub(crate) fn instrumented(self, events: StreamEvents) -> Self {
        Self { events: Some(Box::new(events)), ..self }
    }

    /// Returns the next part, or `None` at the end.
    pub async fn next(&mut self) -> Option<Result<Bytes, HttpFailure>> {
        StreamExt::next(self).await
    }

    /// Records the response as complete before its end, because everything that the caller needs has
    /// arrived.
    #[doc(hidden)]
    pub fn set_complete(&mut self) {
        if let Some(events) = &mut self.events {
            events.complete();
        }
    }
}

impl Stream for ResponseBody {
    type Item = Result<Bytes, HttpFailure>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Self { parts, events } = &mut *self;
        let part = ready!(parts.poll_next_unpin(context));
        if let Some(events) = events {
            match &part {
                Some(Ok(_)) => {}
                Some(Err(failure)) => events.fail(failure),
                None => events.complete(),
            }
        }
        Poll::Ready(part)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.parts.size_hint()
    }
}

impl From<Bytes> for ResponseBody {
    fn from(body: Bytes) -> Self {
        Self::new(stream::iter((!body.is_empty()).then_some(Ok(body))))
    }
}

impl fmt::Debug for ResponseBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseBody").finish_non_exhaustive()
    }
}

/// Traffic class of a request.
///
/// Each class has its own connections, so that a long poll never delays an upload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Lane {
    /// Requests for the configuration that the server provides to clients, sent once per
    /// connection.
    Config,
    /// Exchange of a credential for tokens.
    Auth,
    /// Sessions: creation, heartbeats, joining.
    Session,
    /// Training requests and the REST API.
    Train,
    /// Sampling requests.
    Sample,
    /// Polls for the result of one request.
    Poll,
    /// Polls for the results of all requests of a sampling session.
    PollMany,
    /// Telemetry.
    Telemetry,
    /// Files of a model hub.
    Hub,
    /// Checkpoint files.
    File,
}

impl Lane {
    pub(crate) const ALL: [Self; 10] = [
        Self::Config,
        Self::Auth,
        Self::Session,
        Self::Train,
        Self::Sample,
        Self::Poll,
        Self::PollMany,
        Self::Telemetry,
        Self::Hub,
        Self::File,
    ];

    /// Returns the name used in logs and metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Config => "config",
            Self::Auth => "auth",
            Self::Session => "session",
            Self::Train => "train",
            Self::Sample => "sample",
            Self::Poll => "poll",
            Self::PollMany => "poll_many",
            Self::Telemetry => "telemetry",
            Self::Hub => "hub",
            Self::File => "file",
        }
    }

    /// Returns the lane with this [name](Self::as_str).
    ///
    /// ```
    /// use tinkex::Lane;
    ///
    /// assert_eq!(Lane::from_name("poll_many"), Some(Lane::PollMany));
    /// assert_eq!(Lane::from_name("other"), None);
    /// ```
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|lane| lane.as_str() == name)
    }

    /// Returns whether requests of this lane poll for results.
    #[must_use]
    pub const fn is_poll(self) -> bool {
        matches!(self, Self::Poll | Self::PollMany)
    }

    /// Returns whether several requests of this lane use one HTTP client, and with HTTP/2 one
    /// connection.
    pub(crate) const fn is_shared(self) -> bool {
        self.requests_per_client() > 1
    }

    /// Returns the maximum number of concurrent requests per HTTP client. Large uploads get a
    /// client each, so that they do not share the bandwidth of a connection. The limit of 50 for
    /// other lanes is below the number of concurrent streams that servers usually allow per HTTP/2
    /// connection.
    pub(crate) const fn requests_per_client(self) -> usize {
        match self {
            Self::Config | Self::Auth | Self::Train | Self::Hub | Self::File => 1,
            Self::Session | Self::Sample | Self::Poll | Self::PollMany | Self::Telemetry => 50,
        }
    }
}

impl Lane {
    /// Returns the maximum number of concurrent requests of this lane in one `Network` to servers
    /// without HTTP/2, where each request occupies a connection; `None` if unlimited. The limits
    /// together are below the 4,096 connections that a local server accepts, so that many sampling
    /// clients of one process do not fill the server. One sampling client needs 400 connections to
    /// submit and 2,000 to poll.
    pub(crate) const fn max_connections(self) -> Option<usize> {
        match self {
            Self::Sample => Some(1_024),
            Self::Poll => Some(2_560),
            _ => None,
        }
    }
}

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// Error of an [`HttpService`]: a request without a usable response.
///
/// ```
/// use tinkex::{HttpFailure, HttpFailureKind};
///
/// let failure = HttpFailure::timeout("no response within 30 s");
/// assert_eq!(failure.kind(), HttpFailureKind::Timeout);
/// assert_eq!(failure.to_string(), "request timed out");
/// ```
#[derive(Debug)]
pub struct HttpFailure {
    kind: HttpFailureKind,
    source: Box<dyn StdError + Send + Sync>,
}

/// Classification of an [`HttpFailure`]. Only `Timeout` and `Connect` are retried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HttpFailureKind {
    /// The response did not arrive in time.
    Timeout,
    /// No connection could be made, or it was interrupted.
    Connect,
    /// The server's TLS certificate was rejected.
    Certificate,
    /// The server does not use the protocol of the URL: an `https` URL but a server without TLS, or
    /// an `http` URL but a server that expects TLS.
    WrongProtocol,
    /// The response arrived, but its body could not be decompressed or is too large.
    Decode,
    /// The request could not be built, for example because its URL is invalid, and was not sent.
    InvalidRequest,
    /// The service panicked. The client creates this failure itself.
    Panicked,
}

impl HttpFailure {
    /// Creates a failure. `source` must not contain a credential.
    pub fn new(kind: HttpFailureKind, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self { kind, source: source.into() }
    }

    /// Creates a failure of kind [`HttpFailureKind::Timeout`].
    pub fn timeout(source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self::new(HttpFailureKind::Timeout, source)
    }

    /// Creates a failure of kind [`HttpFailureKind::Connect`].
    pub fn connect(source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self::new(HttpFailureKind::Connect, source)
    }

    /// Returns the classification of the failure.
    #[must_use]
    pub fn kind(&self) -> HttpFailureKind {
        self.kind
    }

    /// Returns the innermost cause, such as "Connection refused", without the code of the operating
    /// system.
    pub(crate) fn root_cause(&self) -> String {
        let mut cause: &(dyn StdError + 'static) = &*self.source;
        while let Some(inner) = cause.source() {
            cause = inner;
        }
        let text = cause.to_string();
        text.split(" (os error").next().unwrap_or_default().to_owned()
    }

    /// Returns whether the name of the host cannot be resolved.
    pub(crate) fn is_unknown_host(&self) -> bool {
        // The resolver's error has no public type, so compare its text.
        any_cause(&*self.source, |cause| cause.to_string() == "dns error")
    }

    /// Returns whether no program listens at the address.
    pub(crate) fn is_connection_refused(&self) -> bool {
        any_cause(&*self.source, |cause| {
            let error = cause.downcast_ref::<io::Error>();
            error.is_some_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
        })
    }
}

/// Returns whether `test` holds for `error` or one of its causes.
pub(crate) fn any_cause(
    error: &(dyn StdError + 'static),
    test: fn(&(dyn StdError + 'static)) -> bool,
) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if test(error) {
            return true;
        }
        // `io::Error::source` returns the source of the wrapped error, so look at the wrapped error
        // too.
        let wrapped = error.downcast_ref().and_then(io::Error::get_ref);
        cause = wrapped.map(|inner| inner as _).or_else(|| error.source());
    }
    false
}

impl fmt::Display for HttpFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.kind {
            HttpFailureKind::Timeout => "request timed out",
            HttpFailureKind::Connect => "connection to the server failed",
            HttpFailureKind::Certificate => "server certificate was rejected",
            HttpFailureKind::WrongProtocol => "server does not speak the protocol of the URL",
            HttpFailureKind::Decode => "cannot decode the response body",
            HttpFailureKind::InvalidRequest => "cannot build the request",
            HttpFailureKind::Panicked => "HTTP service panicked",
        })
    }
}

impl StdError for HttpFailure {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        Some(&*self.source)
    }
}

impl From<HttpFailure> for Error {
    fn from(failure: HttpFailure) -> Self {
        let (kind, hint) = match failure.kind {
            HttpFailureKind::Timeout => (ErrorKind::Timeout, None),
            HttpFailureKind::Connect => (ErrorKind::Connect, Some(Hint::CheckNetwork)),
            HttpFailureKind::Certificate => (ErrorKind::Certificate, Some(Hint::CheckCertificate)),
            HttpFailureKind::WrongProtocol => {
                let error = Self::new(ErrorKind::Connect, failure.to_string()).not_retryable();
                // Do not attach the source: it is an error of the HTTP or TLS parser, which does
                // not explain the cause.
                return error.with_hint(Hint::CheckScheme);
            }
            HttpFailureKind::Decode => (ErrorKind::Decode, Some(Hint::CheckServer)),
            HttpFailureKind::InvalidRequest => (ErrorKind::InvalidInput, None),
            HttpFailureKind::Panicked => {
                // Append the panic message: it explains the failure, and is often a failed
                // assertion of a test.
                return Self::new(ErrorKind::Panicked, format!("{failure}: {}", failure.source));
            }
        };
        let message = match failure.kind {
            // Append the cause: there are many, with different remedies.
            HttpFailureKind::Connect | HttpFailureKind::Certificate => {
                format!("{failure}: {}", failure.root_cause())
            }
            _ => failure.to_string(),
        };
        let mut error = Self::new(kind, message).with_boxed_source(failure.source);
        if let Some(hint) = hint {
            error = error.with_hint(hint);
        }
        error
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_protocol_is_not_retryable() {
        let error = Error::from(HttpFailure::new(HttpFailureKind::WrongProtocol, "scripted"));
        assert_eq!((error.kind(), error.is_retryable()), (ErrorKind::Connect, false));
        assert_eq!(error.hint(), Some(Hint::CheckScheme));
    }

    #[test]
    fn the_root_cause_has_no_code_of_the_operating_system() {
        let refused = io::Error::from_raw_os_error(111);
        let inner = HttpFailure::connect(refused);
        assert!(!inner.root_cause().contains("os error"), "{}", inner.root_cause());
        let outer = HttpFailure::connect(HttpFailure::connect("no route"));
        assert_eq!(outer.root_cause(), "no route");
    }

    #[test]
    fn only_timeouts_and_lost_connections_are_retryable() {
        for (kind, expected, retryable) in [
            (HttpFailureKind::Timeout, ErrorKind::Timeout, true),
            (HttpFailureKind::Connect, ErrorKind::Connect, true),
            (HttpFailureKind::Certificate, ErrorKind::Certificate, false),
            (HttpFailureKind::Decode, ErrorKind::Decode, false),
            (HttpFailureKind::InvalidRequest, ErrorKind::InvalidInput, false),
        ] {
            let failure = HttpFailure::new(kind, "scripted");
            assert_eq!(failure.source().unwrap().to_string(), "scripted");
            let error = Error::from(failure);
            assert_eq!((error.kind(), error.is_retryable()), (expected, retryable));
            assert_eq!(error.source().unwrap().to_string(), "scripted");
            let has_cause = matches!(kind, HttpFailureKind::Connect | HttpFailureKind::Certificate);
            assert_eq!(error.to_string().ends_with(": scripted"), has_cause, "{error}");
        }
    }
}
