//! [`Transport`]: sends requests to the API server. The transport encodes each request once,
//! authenticates and retries it, follows redirects and decodes the response.

use std::fmt;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use ::http::{HeaderMap, Response};
use bytes::Bytes;
use tinkex_wire::{ApiRequest, ApiResponse, AuthTokenRequest, Route, Secret};
use tokio::sync::watch;
use tracing::Instrument as _;

use crate::auth::Identity;
use crate::auth::token::{self, Exchange, TokenCache};
use crate::background::{BackgroundTask, BackgroundTasks};
use crate::call_options::CallOptions;
use crate::clock::WallClock;
use crate::config::{BaseUrl, Credential};
use crate::error::{Error, Result};
use crate::http::{HttpService, ResponseBody};
use crate::instrument::last_response::LastResponse;
use crate::instrument::stats::RequestStats;
use crate::request::encode::RequestParts;
use crate::request::receive::{PartialBody, Receive, StreamedBody, WholeBody};
use crate::request::sent_flag::SentFlag;
use crate::retry::billing::BillingState;
use crate::retry::call_progress::CallProgress;
use crate::retry::log::RetryLog;
use crate::retry::request_policy::RequestPolicy;
use crate::retry::shared_backoff::RequestBackoff;
use crate::retry::{RetryShared, RetryState};
use crate::targets;
use crate::task;
use crate::telemetry::EventQueue;

/// Maximum time that requests wait until a billing problem is settled, unless the server's
/// configuration sets another maximum.
const DEFAULT_MAX_BILLING_WAIT: Duration = Duration::from_secs(3600);

/// Sends requests to one server with one credential.
pub struct Transport {
    /// Weak reference for the task that renews tokens, which must not keep the transport alive.
    this: Weak<Self>,
    pub(crate) http: Arc<dyn HttpService>,
    pub(crate) base_url: BaseUrl,
    pub(crate) credential: Credential,
    /// Set if the server exchanges credentials for tokens.
    exchange: OnceLock<TokenExchange>,
    pub(crate) headers: HeaderMap,
    pub(crate) options: CallOptions,
    retry_log: RetryLog,
    pub(crate) stats: Arc<RequestStats>,
    billing: BillingState,
    /// Whether the server has responded to any request.
    pub(crate) responded: AtomicBool,
    background: BackgroundTasks,
    refresh_task: OnceLock<Arc<BackgroundTask>>,
    events: OnceLock<Arc<EventQueue>>,
    closed: watch::Sender<bool>,
    pub(crate) last_response: LastResponse,
}

/// A credential that is exchanged for short-lived tokens.
struct TokenExchange {
    credential: Credential,
    token: TokenCache,
}

/// Options of one request.
#[derive(Debug, Default)]
pub struct RequestOptions {
    /// Additional headers. They replace default headers of the same name.
    pub headers: HeaderMap,
    /// Idempotency key of all attempts. If `None`, the transport creates a key for each round of
    /// retries.
    pub idempotency_key: Option<String>,
    /// Whether to compress the body.
    pub compress: bool,
    /// Whether to send the request at most once, regardless of the options of the call.
    pub single_attempt: bool,
    /// Backoff after a 429 that the request shares with other requests.
    pub backoff: Option<RequestBackoff>,
    /// Options of the call; if `None`, the options of the transport apply.
    pub call: Option<CallOptions>,
    /// Flag that the transport sets before it sends the request, and resets if the server has
    /// certainly not read the request.
    pub sent: Option<SentFlag>,
}

impl fmt::Debug for Transport {
    /// Omits the credential and the headers.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transport").field("base_url", &self.base_url).finish_non_exhaustive()
    }
}

impl Transport {
    /// Creates a transport for the server at `base_url`. Sends nothing.
    pub fn new(
        http: Arc<dyn HttpService>,
        base_url: BaseUrl,
        credential: Credential,
        headers: HeaderMap,
        options: CallOptions,
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
            options,
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

    /// Makes later requests authenticate with tokens, which the server issues in exchange for
    /// `credential`. `clock` determines when a token must be renewed. Sends nothing.
    pub fn exchange_tokens(&self, credential: Credential, clock: WallClock) {
        let token = TokenCache::new(clock);
        let _ = self.exchange.set(TokenExchange { credential, token });
    }

    /// Returns the background tasks of the transport, which continue after the call that started
    /// them.
    pub fn background(&self) -> &BackgroundTasks {
        &self.background
    }

    /// Sets how long requests that failed with 402 wait for the billing problem to be resolved.
    pub fn set_max_billing_wait(&self, max_wait: Duration) {
        self.billing.set_max_wait(max_wait);
    }

    /// Records failed attempts in `events` from now on.
    pub(crate) fn record_failures_in(&self, events: Arc<EventQueue>) {
        let _ = self.events.set(events);
    }

    /// Returns the queue of telemetry events in which failed attempts are recorded, if any.
    pub fn events(&self) -> Option<&EventQueue> {
        self.events.get().map(|events| &**events)
    }

    /// Rejects all later requests, except the requests that closing a client needs (see the routes
    /// in `check_open`).
    pub fn close(&self) {
        self.closed.send_replace(true);
    }

    /// Returns whether the transport is closed.
    pub fn is_closed(&self) -> bool {
        *self.closed.borrow()
    }

    /// Returns the time since the server's last response, or since the transport was created.
    pub fn silence(&self) -> Duration {
        self.last_response.elapsed()
    }

    /// Waits until the transport is closed.
    pub async fn until_closed(&self) {
        // Cannot fail: `self` owns the sender.
        let _ = self.closed.subscribe().wait_for(|closed| *closed).await;
    }

    /// Returns an error if the transport is closed and a request of `route` is not needed to close
    /// a client.
    fn check_open(&self, route: Route) -> Result<()> {
        // `AuthToken` is allowed because `FinishSession` and `Telemetry` may need a new token.
        let allowed = matches!(route, Route::FinishSession | Route::Telemetry | Route::AuthToken);
        if self.is_closed() && !allowed {
            return Err(Error::closed());
        }
        Ok(())
    }

    /// Returns the log of retries.
    pub fn retry_log(&self) -> &RetryLog {
        &self.retry_log
    }

    /// Returns whether a request that failed with 402 should wait and be retried. All requests of
    /// the transport share one billing state, which each call of this method updates.
    pub fn wait_for_billing(&self) -> bool {
        self.billing.should_wait()
    }

    /// Returns the user and organization for whom the token of the requests was issued; `None` if
    /// an API key authenticates the requests.
    ///
    /// # Errors
    /// If the credential cannot be fetched or exchanged for a token.
    pub async fn identity(&self) -> Result<Option<Identity>> {
        Ok(Identity::of(&self.token().await?, self.exchange.get().is_some()))
    }

    /// Sends a request and decodes its response.
    ///
    /// # Errors
    /// If the request is invalid, all attempts failed, or the response cannot be decoded. Outside a
    /// tokio runtime nothing is sent.
    pub async fn send<R: ApiRequest>(
        &self,
        request: &R,
        options: &RequestOptions,
    ) -> Result<R::Response> {
        let response = self.send_raw(request, options).await?;
        decode::<R>(&response)
    }

    /// Sends a request and returns its undecoded response.
    ///
    /// # Errors
    /// If the request is invalid, all attempts failed, or the caller is outside a tokio runtime.
    pub async fn send_raw<R: ApiRequest>(
        &self,
        request: &R,
        options: &RequestOptions,
    ) -> Result<Response<Bytes>> {
        self.send_parts(R::ROUTE, RequestParts::new(request), options).await
    }

    async fn send_parts(
        &self,
        route: Route,
        parts: Result<RequestParts>,
        options: &RequestOptions,
    ) -> Result<Response<Bytes>> {
        let mut call = CallProgress::new();
        let response = self.send_parts_in_call(route, parts, options, &mut call).await;
        self.retry_log.ended(&call, RequestPolicy::for_route(route).lane, &response);
        response
    }

    /// Sends a request that is part of a call with several requests, and decodes its response. The
    /// caller logs the end of the call.
    pub async fn send_in_call<R: ApiRequest>(
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
    pub async fn send_raw_in_call<R: ApiRequest>(
        &self,
        request: &R,
        options: &RequestOptions,
        call: &mut CallProgress,
    ) -> Result<Response<Bytes>> {
        self.send_parts_in_call(R::ROUTE, RequestParts::new(request), options, call).await
    }

    async fn send_parts_in_call(
        &self,
        route: Route,
        parts: Result<RequestParts>,
        options: &RequestOptions,
        call: &mut CallProgress,
    ) -> Result<Response<Bytes>> {
        let span = tracing::debug_span!(target: targets::HTTP, "request", %route);
        let sent = self.send_with_retries(parts, options, call, WholeBody).instrument(span).await;
        sent.map_err(|error| error.during(operation(route)))
    }

    /// Sends a request that is part of a call with several requests, and returns its response once
    /// the first part of the body has arrived. `idle_timeout` is the maximum time without new data.
    ///
    /// After the first part the request is not retried: the stream of the body reports later
    /// failures. The caller logs the end of the call.
    pub async fn send_streaming_in_call<R: ApiRequest>(
        &self,
        request: &R,
        options: &RequestOptions,
        idle_timeout: Duration,
        call: &mut CallProgress,
    ) -> Result<Response<ResponseBody>> {
        let span = tracing::debug_span!(target: targets::HTTP, "request", route = %R::ROUTE);
        let streamed = StreamedBody { idle_timeout };
        let parts = RequestParts::new(request);
        let sent = self.send_with_retries(parts, options, call, streamed).instrument(span).await;
        let response = sent.map_err(|error| error.during(operation(R::ROUTE)))?;
        Ok(response.map(PartialBody::into_stream))
    }

    /// Sends the same bytes until an attempt succeeds or [`RetryState::wait_or_give_up`] returns an
    /// error. All retries of requests to the API server happen in this loop.
    async fn send_with_retries<B: Receive>(
        &self,
        parts: Result<RequestParts>,
        options: &RequestOptions,
        call: &mut CallProgress,
        receive: B,
    ) -> Result<Response<B::Body>> {
        task::require_runtime()?;
        self.background.ensure_running();
        let parts = parts?;
        let route = parts.route;
        let mut encoded = self.encode(parts, options).await?;
        encoded.policy.timeout = receive.timeout(encoded.policy.timeout);
        let backoff = options.backoff.clone();
        let key = options.idempotency_key.clone();
        let mut state = RetryState::new(encoded.policy, backoff, key, call);
        loop {
            state.before_attempt().await?;
            self.check_open(route)?;
            match self.attempt(&encoded, options, &state, receive).await {
                Ok(response) => return Ok(response),
                Err(failed) => {
                    let billing = &self.billing;
                    let log = &self.retry_log;
                    let shared = RetryShared { billing, log, events: self.events() };
                    state.wait_or_give_up(failed, &shared).await?;
                }
            }
        }
    }

    /// Returns the credential that is exchanged for tokens, or the credential of the transport if
    /// the server does not require an exchange.
    pub(crate) fn exchange_credential(&self) -> &Credential {
        self.exchange.get().map_or(&self.credential, |exchange| &exchange.credential)
    }

    /// Returns the cache of the token that the server issued in exchange for the credential; `None`
    /// if the server does not require an exchange.
    pub(crate) fn token_cache(&self) -> Option<&TokenCache> {
        self.exchange.get().map(|exchange| &exchange.token)
    }

    /// Returns the secret that authenticates requests: the secret of the credential, or the token
    /// that the server issued in exchange for that secret.
    ///
    /// # Errors
    /// If the credential cannot be fetched or exchanged for a token.
    pub async fn token(&self) -> Result<Secret> {
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
    /// The future is boxed, because recursive futures need a fixed size: sending a request may need
    /// a token, and fetching the token sends a request (which needs no token).
    pub(crate) fn exchange_token(&self) -> Exchange {
        let transport = self.this.upgrade();
        Box::pin(async {
            let transport = transport.ok_or_else(Error::closed)?;
            Ok(transport.send(&AuthTokenRequest {}, &RequestOptions::default()).await?.jwt)
        })
    }
}

/// Decodes a successful response.
fn decode<R: ApiRequest>(response: &Response<Bytes>) -> Result<R::Response> {
    R::Response::from_body(response.body())
        .map_err(|error| Error::from_body(error, response.body()).during(operation(R::ROUTE)))
}

/// Returns the name of the operation for error messages: the method and the path template.
fn operation(route: Route) -> String {
    route.to_string()
}
