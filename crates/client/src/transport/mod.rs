//! Sends requests to the API server: encodes once, authenticates, retries, follows redirects and
//! decodes the response.
//!
//! [`retry_decision`] decides whether and when a failed request is sent again, [`retry`] carries
//! the decision out, and [`http`] is the interface to the network.

mod auth;
pub(crate) mod backoff;
pub(crate) mod backoff_registry;
mod billing;
pub(crate) mod call_progress;
mod credential_command;
pub(crate) mod custom_http;
pub(crate) mod delay;
pub(crate) mod failed_attempt;
pub(crate) mod header;
pub(crate) mod http;
mod instrument;
mod last_response;
pub(crate) mod network;
mod pool;
mod receive;
pub(crate) mod redirect;
mod request_policy;
mod retry;
mod retry_decision;
pub(crate) mod retry_log;
pub(crate) mod retry_policy;
pub(crate) mod sent_flag;
pub(crate) mod stats;
mod token;
#[cfg(feature = "opentelemetry")]
mod trace_context;
mod upload;

use std::io;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use ::http::header::{ACCEPT, CONTENT_ENCODING, CONTENT_TYPE};
use ::http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, Uri};
use bytes::Bytes;
use tinkex_wire::codec::compress;
use tinkex_wire::{
    ApiRequest, ApiResponse, AuthTokenRequest, BodyCodec, Route, Secret, header as wire_header,
};
use tokio::sync::watch;
use tracing::Instrument as _;
use url::Url;

use crate::background::{BackgroundTask, BackgroundTasks};
use crate::clock::WallClock;
use crate::config::{BaseUrl, Credential};
use crate::error::{Error, ErrorKind, Result};
use crate::hint::Hint;
use crate::targets;
use crate::task;
use crate::telemetry::EventQueue;

pub use auth::Identity;
use backoff::RequestBackoff;
use billing::BillingState;
pub(crate) use billing::DELAY as BILLING_DELAY;
use call_progress::CallProgress;
use failed_attempt::FailedAttempt;
use http::{HttpFailure, HttpFailureKind, HttpService, ResponseBody};
use instrument::RequestEvents;
use last_response::LastResponse;
use receive::{PartialBody, Receive, StreamedBody, WholeBody};
use redirect::RedirectChain;
use request_policy::{RequestCredential, RequestPolicy};
use retry::{RetryShared, RetryState};
use retry_log::RetryLog;
use retry_policy::RetryPolicy;
use sent_flag::SentFlag;
use stats::RequestStats;
use token::{Exchange, TokenCache};
pub use upload::UploadFile;

/// Maximum number of headers that the transport adds to a request.
const OWN_HEADERS: usize = 9;
const DEFAULT_MAX_BILLING_WAIT: Duration = Duration::from_secs(3600);

/// Sends requests to one server with one credential.
pub(crate) struct Transport {
    /// Used by the task that renews tokens, which must not keep the transport alive.
    this: Weak<Self>,
    http: Arc<dyn HttpService>,
    base_url: BaseUrl,
    credential: Credential,
    /// Set if the server exchanges credentials for tokens.
    exchange: OnceLock<TokenExchange>,
    headers: HeaderMap,
    retry: RetryPolicy,
    retry_log: RetryLog,
    stats: Arc<RequestStats>,
    billing: BillingState,
    /// Whether the server has responded to any request.
    responded: AtomicBool,
    background: BackgroundTasks,
    refresh_task: OnceLock<Arc<BackgroundTask>>,
    events: OnceLock<Arc<EventQueue>>,
    closed: watch::Sender<bool>,
    last_response: LastResponse,
}

/// A credential that is exchanged for short-lived tokens.
struct TokenExchange {
    credential: Credential,
    token: TokenCache,
}

/// Options of one request.
#[derive(Default)]
pub(crate) struct RequestOptions {
    /// Additional headers. They replace default headers of the same name.
    pub(crate) headers: HeaderMap,
    /// Idempotency key of all attempts. Without it, each round of retries has its own.
    pub(crate) idempotency_key: Option<String>,
    /// Whether to compress the body.
    pub(crate) compress: bool,
    /// Whether to send the request at most once, regardless of the retry policy.
    pub(crate) single_attempt: bool,
    /// Backoff that the request shares with others.
    pub(crate) backoff: Option<RequestBackoff>,
    /// Retry policy of the call; the transport's if `None`.
    pub(crate) retry: Option<RetryPolicy>,
    /// Set while the server may have read the request.
    pub(crate) sent: Option<SentFlag>,
}

/// The encoded request that all attempts send.
struct EncodedRequest {
    method: Method,
    uri: Uri,
    body: EncodedBody,
    content_type: &'static str,
    policy: RequestPolicy,
}

/// The body that all attempts send. The file is boxed, so that the type is as small as `Bytes`.
#[derive(Clone)]
enum EncodedBody {
    Bytes(Bytes),
    /// Bytes, then the content of a file.
    WithFile(Box<(Bytes, UploadFile)>),
}

impl Transport {
    pub(crate) fn new(
        http: Arc<dyn HttpService>,
        base_url: BaseUrl,
        credential: Credential,
        headers: HeaderMap,
        retry: RetryPolicy,
        stats: Arc<RequestStats>,
    ) -> Arc<Self> {
        Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            http,
            retry_log: RetryLog::new(&base_url),
            base_url,
            credential,
            exchange: OnceLock::new(),
            headers,
            retry,
            stats,
            responded: AtomicBool::new(false),
            billing: BillingState::new(DEFAULT_MAX_BILLING_WAIT),
            background: BackgroundTasks::default(),
            refresh_task: OnceLock::new(),
            events: OnceLock::new(),
            closed: watch::channel(false).0,
            last_response: LastResponse::new(),
        })
    }

    /// Exchanges `credential` for tokens, and authenticates further requests with them. `clock`
    /// determines when a token must be renewed.
    pub(crate) fn exchange_tokens(&self, credential: Credential, clock: WallClock) {
        let token = TokenCache::new(clock);
        let _ = self.exchange.set(TokenExchange { credential, token });
    }

    /// Returns the tasks that outlive a call.
    pub(crate) fn background(&self) -> &BackgroundTasks {
        &self.background
    }

    /// Sets how long requests that failed with 402 wait for the billing problem to be resolved.
    pub(crate) fn set_max_billing_wait(&self, max_wait: Duration) {
        self.billing.set_max_wait(max_wait);
    }

    /// Records failed attempts in `events` from now on.
    pub(crate) fn record_failures_in(&self, events: Arc<EventQueue>) {
        let _ = self.events.set(events);
    }

    /// Returns the queue that failed attempts are recorded in, if any.
    pub(crate) fn events(&self) -> Option<&EventQueue> {
        self.events.get().map(|events| &**events)
    }

    /// Rejects all further requests, except those that closing a client needs.
    pub(crate) fn close(&self) {
        self.closed.send_replace(true);
    }

    /// Returns whether the transport is closed.
    pub(crate) fn is_closed(&self) -> bool {
        *self.closed.borrow()
    }

    /// Returns the time since the server's last response, or since the transport was created.
    pub(crate) fn silence(&self) -> Duration {
        self.last_response.elapsed()
    }

    /// Waits until the transport is closed.
    pub(crate) async fn until_closed(&self) {
        // Cannot fail: `self` owns the sender.
        let _ = self.closed.subscribe().wait_for(|closed| *closed).await;
    }

    fn check_open(&self, route: Route) -> Result<()> {
        // The final requests may need a new token.
        let allowed = matches!(route, Route::FinishSession | Route::Telemetry | Route::AuthToken);
        if self.is_closed() && !allowed {
            return Err(Error::closed());
        }
        Ok(())
    }

    /// Returns the log of retries.
    pub(crate) fn retry_log(&self) -> &RetryLog {
        &self.retry_log
    }

    /// Returns whether a request that failed with 402 should wait and be retried. All
    /// requests of the transport share the state of the billing problem.
    pub(crate) fn wait_for_billing(&self) -> bool {
        self.billing.should_wait()
    }

    /// Returns the secret that requests are authenticated with, and whether the server issued it in
    /// exchange for the credential.
    pub(crate) async fn credential(&self) -> Result<(Secret, bool)> {
        Ok((self.token().await?, self.exchange.get().is_some()))
    }

    /// Sends a request and decodes its response.
    ///
    /// # Errors
    /// If the request is invalid, all attempts failed, or the response cannot be decoded. Outside a
    /// tokio runtime nothing is sent.
    pub(crate) async fn send<R: ApiRequest>(
        &self,
        request: &R,
        options: &RequestOptions,
    ) -> Result<R::Response> {
        let response = self.send_raw(request, options).await?;
        decode::<R>(&response)
    }

    /// Sends a request and returns its undecoded response.
    pub(crate) async fn send_raw<R: ApiRequest>(
        &self,
        request: &R,
        options: &RequestOptions,
    ) -> Result<Response<Bytes>> {
        let mut call = CallProgress::new();
        let response = self.send_raw_in_call(request, options, &mut call).await;
        self.retry_log.ended(&call, RequestPolicy::for_route(R::ROUTE).lane, &response);
        response
    }

    /// Sends a request that is part of a call with several requests, and decodes its response. The
    /// caller logs the end of the call.
    pub(crate) async fn send_in_call<R: ApiRequest>(
        &self,
        request: &R,
        options: &RequestOptions,
        call: &mut CallProgress,
    ) -> Result<R::Response> {
        let response = self.send_raw_in_call(request, options, call).await?;
        decode::<R>(&response)
    }

    /// Sends a request that is part of a call with several requests, and returns its undecoded
    /// response. The caller logs the end of the call.
    pub(crate) async fn send_raw_in_call<R: ApiRequest>(
        &self,
        request: &R,
        options: &RequestOptions,
        call: &mut CallProgress,
    ) -> Result<Response<Bytes>> {
        let span = tracing::debug_span!(target: targets::HTTP, "request", route = %R::ROUTE);
        let sent = self.send_with_retries(request, options, call, WholeBody).instrument(span).await;
        sent.map_err(|error| error.during(operation::<R>()))
    }

    /// Sends a request that is part of a call with several requests, and returns its response once
    /// the first part of the body has arrived. `idle_timeout` is the longest time without new data.
    ///
    /// Retries end with the first part: failures after it are errors of the body. The caller logs
    /// the end of the call.
    pub(crate) async fn send_streaming_in_call<R: ApiRequest>(
        &self,
        request: &R,
        options: &RequestOptions,
        idle_timeout: Duration,
        call: &mut CallProgress,
    ) -> Result<Response<ResponseBody>> {
        let span = tracing::debug_span!(target: targets::HTTP, "request", route = %R::ROUTE);
        let streamed = StreamedBody { idle_timeout };
        let sent = self.send_with_retries(request, options, call, streamed).instrument(span).await;
        let response = sent.map_err(|error| error.during(operation::<R>()))?;
        Ok(response.map(PartialBody::into_stream))
    }

    /// Sends the same bytes until an attempt succeeds or [`RetryState::wait_or_give_up`]
    /// returns an error. This loop makes all retries of requests to the API server.
    async fn send_with_retries<R: ApiRequest, B: Receive>(
        &self,
        request: &R,
        options: &RequestOptions,
        call: &mut CallProgress,
        receive: B,
    ) -> Result<Response<B::Body>> {
        task::require_runtime()?;
        self.background.ensure_running();
        let mut encoded = self.encode(request, options).await?;
        encoded.policy.timeout = receive.timeout(encoded.policy.timeout);
        let (backoff, key) = (options.backoff.clone(), options.idempotency_key.clone());
        let mut state = RetryState::new(encoded.policy, backoff, key, call);
        loop {
            state.before_attempt().await?;
            self.check_open(R::ROUTE)?;
            match self.attempt(&encoded, options, &state, receive).await {
                Ok(response) => return Ok(response),
                Err(failed) => {
                    let (billing, log) = (&self.billing, &self.retry_log);
                    let shared = RetryShared { billing, log, events: self.events() };
                    state.wait_or_give_up(failed, &shared).await?;
                }
            }
        }
    }

    async fn encode<R: ApiRequest>(
        &self,
        request: &R,
        options: &RequestOptions,
    ) -> Result<EncodedRequest> {
        let uri = parse_uri(&self.base_url.join(&request.target()?))?;
        let method = match R::ROUTE.method() {
            tinkex_wire::Method::Get => Method::GET,
            tinkex_wire::Method::Post => Method::POST,
            tinkex_wire::Method::Put => Method::PUT,
            tinkex_wire::Method::Delete => Method::DELETE,
        };
        let body = request.body()?;
        let mut bytes = body.bytes();
        let retry = match options.single_attempt {
            true => RetryPolicy::disabled(),
            false => options.retry.unwrap_or(self.retry),
        };
        let policy = retry.apply(RequestPolicy::for_route(R::ROUTE));
        debug_assert!(R::ROUTE.body() != BodyCodec::Empty || bytes.is_empty());
        if options.compress {
            bytes = Box::pin(compress_off_thread(bytes)).await?;
        }
        let content_type = body.content_type();
        let body = match request.body_file() {
            None => EncodedBody::Bytes(bytes),
            Some(path) => {
                let failed = |error: io::Error| {
                    let message = format!("cannot read {}: {error}", path.display());
                    Error::new(ErrorKind::InvalidInput, message)
                };
                let file = UploadFile::new(path.to_owned()).map_err(failed)?;
                EncodedBody::WithFile(Box::new((bytes, file)))
            }
        };
        Ok(EncodedRequest { method, uri, body, content_type, policy })
    }

    /// Returns the headers of one attempt. They are built for each attempt: keeping a copy for
    /// retries would cost every request more than the rare retry does.
    fn headers(
        &self,
        encoded: &EncodedRequest,
        options: &RequestOptions,
        state: &RetryState<'_>,
        secret: &Secret,
    ) -> Result<HeaderMap> {
        // With the final capacity: growing the map rehashes all names.
        let capacity = self.headers.len() + options.headers.len() + OWN_HEADERS;
        let mut headers = HeaderMap::with_capacity(capacity);
        headers.insert(ACCEPT, HeaderValue::from_static(tinkex_wire::JSON));
        if encoded.method != Method::GET {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static(encoded.content_type));
        }
        let timeout = HeaderValue::from(encoded.policy.timeout.as_secs());
        headers.insert(HeaderName::from_static(header::READ_TIMEOUT), timeout);
        if options.compress {
            headers.insert(CONTENT_ENCODING, HeaderValue::from_static(compress::ZSTD));
        }
        // Headers set on the builder replace the defaults, and those of this request replace both.
        for (name, value) in self.headers.iter().chain(&options.headers) {
            headers.insert(name.clone(), value.clone());
        }
        header::put_secret(&mut headers, wire_header::API_KEY, secret)?;
        let retry_count = HeaderValue::from(state.retry_count());
        headers.insert(HeaderName::from_static(header::RETRY_COUNT), retry_count);
        if encoded.method != Method::GET {
            header::put(&mut headers, wire_header::IDEMPOTENCY_KEY, state.idempotency_key());
        }
        #[cfg(feature = "opentelemetry")]
        trace_context::inject(&mut headers);
        Ok(headers)
    }

    /// Authenticates and sends the request. If the server rejects a token (401) that it issued for
    /// the credential, replaces the token and sends the request once more.
    async fn attempt<B: Receive>(
        &self,
        encoded: &EncodedRequest,
        options: &RequestOptions,
        state: &RetryState<'_>,
        receive: B,
    ) -> std::result::Result<Response<B::Body>, FailedAttempt> {
        let mut token_replaced = false;
        loop {
            let (secret, tokens) = match encoded.policy.credential {
                RequestCredential::Credential => (self.credential.fetch().await, None),
                RequestCredential::ExchangedCredential => {
                    (self.exchange_credential().fetch().await, None)
                }
                RequestCredential::Token => (self.token().await, self.token_cache()),
            };
            // Not retried, even if the cause is a lost connection: fetching a token has its own
            // retries.
            let secret = secret.map_err(FailedAttempt::permanent)?;
            let sent = self.send_with_secret(encoded, options, state, &secret, receive).await;
            match (&sent, tokens) {
                (Err(failed), Some(tokens))
                    if failed.error.status() == Some(401) && !token_replaced =>
                {
                    tracing::debug!(
                        "server rejected the token (401); exchanging the credential again"
                    );
                    tokens.reject(&secret);
                    token_replaced = true;
                }
                _ => return sent,
            }
        }
    }

    /// Sends the request once and follows redirects.
    async fn send_with_secret<B: Receive>(
        &self,
        encoded: &EncodedRequest,
        options: &RequestOptions,
        state: &RetryState<'_>,
        secret: &Secret,
        receive: B,
    ) -> std::result::Result<Response<B::Body>, FailedAttempt> {
        let (mut method, mut uri) = (encoded.method.clone(), encoded.uri.clone());
        let mut body = encoded.body.clone();
        let (mut body_dropped, mut other_origin) = (false, false);
        let mut redirects = RedirectChain::default();
        loop {
            let (bytes, file) = match body.clone() {
                EncodedBody::Bytes(bytes) => (bytes, None),
                EncodedBody::WithFile(parts) => (parts.0, Some(parts.1)),
            };
            let mut request = Request::new(bytes);
            *request.method_mut() = method.clone();
            *request.uri_mut() = uri.clone();
            let mut headers = self.headers(encoded, options, state, secret)?;
            if body_dropped {
                headers.remove(CONTENT_TYPE);
                headers.remove(CONTENT_ENCODING);
            }
            *request.headers_mut() =
                if other_origin { redirect::public_headers(&headers) } else { headers };
            let (lane, retry_count) = (encoded.policy.lane, state.retry_count());
            let base_url = self.base_url.as_str();
            let events = RequestEvents::start(&method, &uri, lane, base_url, retry_count);
            let sent_before = options.sent.as_ref().is_some_and(SentFlag::set);
            let timeout = encoded.policy.timeout;
            let sent = receive.send(&*self.http, lane, request, file, timeout).await;
            if let Some(flag) = &options.sent
                && !sent_before
                && is_unread(&sent)
            {
                flag.reset();
            }
            events.stop(&sent, &self.stats);
            let response = sent.map_err(|failure| self.no_response(failure, &uri))?;
            self.responded.store(true, Ordering::Relaxed);
            self.last_response.record();
            let next = redirects.next(&uri, &response).map_err(FailedAttempt::permanent)?;
            let Some(next) = next else { return check_status::<B>(response) };
            if !redirect::keeps_method(response.status()) && method != Method::GET {
                let empty = EncodedBody::Bytes(Bytes::new());
                (method, body, body_dropped) = (Method::GET, empty, true);
            }
            // Send secrets and user data to the API server only. A body may contain either.
            if next.origin() != self.base_url.origin() {
                if method != Method::GET {
                    let refused =
                        redirect::refused(&format!("a {method} request to another server"));
                    return Err(FailedAttempt::permanent(refused));
                }
                other_origin = true;
            }
            let invalid = |_| FailedAttempt::permanent(redirect::refused("to an invalid URL"));
            uri = next.as_str().parse().map_err(invalid)?;
        }
    }

    /// Converts the failure of a request to `uri` that received no response. If the connection
    /// failed, the error names the server's address.
    fn no_response(&self, failure: HttpFailure, uri: &Uri) -> FailedAttempt {
        let refused = failure.is_connection_refused() && is_loopback(uri);
        let mut error = Error::from(failure);
        if error.kind() == ErrorKind::Connect {
            error = error.with_message(format!("connection to {} failed", origin(uri)));
        }
        if refused {
            error = error.with_hint(Hint::StartServer);
        }
        let mut failed = FailedAttempt::from(error);
        failed.server_not_started = refused && !self.responded.load(Ordering::Relaxed);
        failed
    }

    fn exchange_credential(&self) -> &Credential {
        self.exchange.get().map_or(&self.credential, |exchange| &exchange.credential)
    }

    /// Returns the tokens that the credential is exchanged for, on servers that require it.
    fn token_cache(&self) -> Option<&TokenCache> {
        self.exchange.get().map(|exchange| &exchange.token)
    }

    async fn token(&self) -> Result<Secret> {
        let Some(tokens) = self.token_cache() else { return self.credential.fetch().await };
        let token = tokens.get(|| self.exchange_token()).await?;
        let this = &self.this;
        self.refresh_task.get_or_init(|| {
            let this = Weak::clone(this);
            self.background.start(move || token::keep_fresh(Weak::clone(&this)))
        });
        Ok(token)
    }

    /// Exchanges the credential for a token.
    ///
    /// Boxed, because the recursion needs a fixed size: sending a request may need a token, and
    /// fetching the token sends a request, which needs none.
    fn exchange_token(&self) -> Exchange {
        let transport = self.this.upgrade();
        Box::pin(async {
            let transport = transport.ok_or_else(Error::closed)?;
            Ok(transport.send(&AuthTokenRequest {}, &RequestOptions::default()).await?.jwt)
        })
    }
}

/// Compresses a body on a blocking thread: it takes milliseconds, too long for an async worker.
async fn compress_off_thread(body: Bytes) -> Result<Bytes> {
    let compressed = tokio::task::spawn_blocking(move || compress::compress(&body)).await;
    match compressed {
        Ok(compressed) => Ok(compressed?),
        Err(error) if error.is_panic() => Err(Error::panicked(&*error.into_panic())),
        Err(_) => Err(Error::runtime_ended()),
    }
}

/// Decodes a successful response.
fn decode<R: ApiRequest>(response: &Response<Bytes>) -> Result<R::Response> {
    R::Response::from_body(response.body())
        .map_err(|error| Error::from(error).during(operation::<R>()))
}

/// Returns whether the server has certainly not read the request of this attempt: nothing was sent,
/// or the server refused the client because of its credential, account or rate. After any other
/// failure, also a 5xx, it may have accepted the request.
fn is_unread<B>(sent: &std::result::Result<Response<B>, HttpFailure>) -> bool {
    match sent {
        Ok(response) => matches!(response.status().as_u16(), 401 | 402 | 403 | 429),
        Err(failure) => {
            failure.is_connection_refused() || failure.kind() == HttpFailureKind::InvalidRequest
        }
    }
}

/// Returns the scheme, host and port of a URI, without a user name and password.
fn origin(uri: &Uri) -> String {
    let scheme = uri.scheme_str().unwrap_or("http");
    let port = uri.port().map_or_else(String::new, |port| format!(":{port}"));
    format!("{scheme}://{}{port}", uri.host().unwrap_or_default())
}

/// Returns whether a URI names this machine.
fn is_loopback(uri: &Uri) -> bool {
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
    host == "localhost" || host.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

/// Returns the operation named in errors: method and path template.
fn operation<R: ApiRequest>() -> String {
    R::ROUTE.to_string()
}

/// Parses a URL. `Url` escapes characters that `Uri` rejects but is ten times slower, so it is only
/// used if `Uri` fails.
fn parse_uri(url: &str) -> Result<Uri> {
    let invalid = |error: String| {
        Error::new(ErrorKind::InvalidInput, format!("invalid request URL {url:?}: {error}"))
    };
    url.parse().or_else(|_| {
        let url = Url::parse(url).map_err(|error| invalid(error.to_string()))?;
        url.as_str().parse().map_err(|error: ::http::uri::InvalidUri| invalid(error.to_string()))
    })
}

/// Returns the response if it is successful (2xx).
fn check_status<B: Receive>(
    response: Response<B::Body>,
) -> std::result::Result<Response<B::Body>, FailedAttempt> {
    let (status, headers) = (response.status(), response.headers());
    header::log_deprecation(headers);
    if status.is_success() {
        return Ok(response);
    }
    let body = B::error_body(response.body());
    let mut failed = FailedAttempt::from_parts(status.as_u16(), headers, body);
    failed.permanent |= B::is_final(status.as_u16());
    Err(failed)
}
