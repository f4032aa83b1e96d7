//! Sends requests to the API server: encodes once, authenticates, retries, follows redirects and
//! decodes the response.
//!
//! [`encode`] builds the request, [`attempt`] sends it once, [`retry_decision`] decides whether and
//! when a failed request is sent again, [`retry`] carries the decision out, and [`http`] is the
//! interface to the network.

mod attempt;
mod auth;
pub(crate) mod backoff;
pub(crate) mod backoff_registry;
mod billing;
pub(crate) mod call_progress;
mod credential_command;
pub(crate) mod custom_http;
pub(crate) mod delay;
mod encode;
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

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use ::http::{HeaderMap, Response};
use bytes::Bytes;
use tinkex_wire::{ApiRequest, ApiResponse, AuthTokenRequest, Route, Secret};
use tokio::sync::watch;
use tracing::Instrument as _;

use crate::background::{BackgroundTask, BackgroundTasks};
use crate::clock::WallClock;
use crate::config::{BaseUrl, Credential};
use crate::error::{Error, Result};
use crate::targets;
use crate::task;
use crate::telemetry::EventQueue;

pub use auth::Identity;
use backoff::RequestBackoff;
use billing::BillingState;
pub(crate) use billing::DELAY as BILLING_DELAY;
use call_progress::CallProgress;
use http::{HttpService, ResponseBody};
use last_response::LastResponse;
use receive::{PartialBody, Receive, StreamedBody, WholeBody};
use request_policy::RequestPolicy;
use retry::{RetryShared, RetryState};
use retry_log::RetryLog;
use retry_policy::RetryPolicy;
use sent_flag::SentFlag;
use stats::RequestStats;
use token::{Exchange, TokenCache};
pub use upload::UploadFile;

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

/// Decodes a successful response.
fn decode<R: ApiRequest>(response: &Response<Bytes>) -> Result<R::Response> {
    R::Response::from_body(response.body())
        .map_err(|error| Error::from_body(error, response.body()).during(operation::<R>()))
}

/// Returns the operation named in errors: method and path template.
fn operation<R: ApiRequest>() -> String {
    R::ROUTE.to_string()
}
