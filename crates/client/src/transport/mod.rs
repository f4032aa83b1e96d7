//! A call's way to the server and back: encode once, sign, send, check, decode.
//!
//! Whether it is sent again is [`retry`]'s decision, how it gets there is [`http`]'s.

mod auth;
pub(crate) mod backoff;
mod backoff_registry;
mod billing;
pub(crate) mod delay;
pub(crate) mod header;
pub(crate) mod http;
mod instrument;
pub(crate) mod network;
mod pool;
pub(crate) mod redirect;
mod request_policy;
pub(crate) mod retry;

use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use ::http::header::{ACCEPT, CONTENT_ENCODING, CONTENT_TYPE, USER_AGENT};
use ::http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, Uri};
use bytes::Bytes;
use futures_util::future::BoxFuture;
use tinkex_wire::codec::compress;
use tinkex_wire::{
    ApiRequest, ApiResponse, AuthTokenRequest, BodyCodec, Route, Secret, header as wire_header,
};
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::Instrument as _;
use url::Url;

use crate::config::{BaseUrl, Credential};
use crate::error::{Error, ErrorKind, Result};
use crate::targets;
use crate::task::Task;
use crate::telemetry::EventQueue;

pub use auth::Identity;
use auth::Token;
use backoff::RequestBackoff;
use billing::Billing;
pub(crate) use billing::PAUSE as BILLING_PAUSE;
use http::HttpService;
use instrument::RequestEvents;
use request_policy::{RequestPolicy, Signer};
use retry::{Failed, RetryPolicy, Sending};

/// How many headers a call and its attempts add at most.
const OWN_HEADERS: usize = 7;
const LONGEST_BILLING_PAUSE: Duration = Duration::from_secs(3600);

/// The way to one server with one credential.
pub(crate) struct Transport {
    this: Weak<Self>,
    http: Arc<dyn HttpService>,
    base: BaseUrl,
    credential: Credential,
    exchange: OnceLock<Exchange>,
    headers: HeaderMap,
    policy: RetryPolicy,
    billing: Billing,
    refresh: OnceLock<Task>,
    events: OnceLock<Arc<EventQueue>>,
    closed: watch::Sender<bool>,
}

/// A credential that is exchanged for tokens.
struct Exchange {
    credential: Credential,
    token: Token,
}

/// What goes with one call besides its request.
#[derive(Default)]
pub(crate) struct RequestOptions {
    /// Further headers.
    pub(crate) headers: HeaderMap,
    /// The same idempotency key for every attempt of every round.
    pub(crate) idempotency_key: Option<String>,
    /// Whether the body is compressed.
    pub(crate) compress: bool,
    /// Whether it is sent at most once, even where it usually persists.
    pub(crate) single_attempt: bool,
    /// What holds it back together with others.
    pub(crate) backoff: Option<RequestBackoff>,
    /// Since when somebody waits for it, if not since it is sent.
    pub(crate) since: Option<Instant>,
}

/// A call, encoded: what every attempt of it sends.
struct Outgoing {
    method: Method,
    uri: Uri,
    body: Bytes,
    content_type: &'static str,
    rule: RequestPolicy,
}

impl Transport {
    pub(crate) fn new(
        http: Arc<dyn HttpService>,
        base: BaseUrl,
        credential: Credential,
        headers: HeaderMap,
        policy: RetryPolicy,
    ) -> Arc<Self> {
        Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            http,
            base,
            credential,
            exchange: OnceLock::new(),
            headers,
            policy,
            billing: Billing::new(LONGEST_BILLING_PAUSE),
            refresh: OnceLock::new(),
            events: OnceLock::new(),
            closed: watch::channel(false).0,
        })
    }

    /// From now on, requests are signed with tokens that this credential is exchanged for.
    pub(crate) fn exchange_tokens(&self, credential: Credential) {
        let _ = self.exchange.set(Exchange { credential, token: Token::default() });
    }

    pub(crate) fn set_longest_billing_pause(&self, longest: Duration) {
        self.billing.set_longest(longest);
    }

    /// Failures are written down there from now on.
    pub(crate) fn write_into(&self, events: Arc<EventQueue>) {
        let _ = self.events.set(events);
    }

    /// Where failures are written down, if anywhere.
    pub(crate) fn events(&self) -> Option<&EventQueue> {
        self.events.get().map(|events| &**events)
    }

    /// From now on nothing is sent but last words.
    pub(crate) fn close(&self) {
        self.closed.send_replace(true);
    }

    /// Ends when this is closed.
    pub(crate) async fn until_closed(&self) {
        // It cannot fail: the sender is ours.
        let _ = self.closed.subscribe().wait_for(|closed| *closed).await;
    }

    fn check_open(&self, route: Route) -> Result<()> {
        // Last words may have to be signed anew.
        let last_words =
            matches!(route, Route::FinishSession | Route::Telemetry | Route::AuthToken);
        if *self.closed.borrow() && !last_words {
            return Err(Error::closed());
        }
        Ok(())
    }

    /// Whether to wait for a billing problem; every call of this transport shares one decision.
    pub(crate) fn pause_for_billing(&self) -> bool {
        self.billing.pause()
    }

    /// The credential that requests are signed with right now, and whether the server handed it out.
    pub(crate) async fn signature(&self) -> Result<(Secret, bool)> {
        Ok((self.token().await?, self.exchange.get().is_some()))
    }

    /// Makes a call and reads its reply.
    pub(crate) async fn send<C: ApiRequest>(
        &self,
        call: &C,
        options: &RequestOptions,
    ) -> Result<C::Response> {
        let reply = self.send_raw(call, options).await?;
        C::Response::from_body(reply.body()).map_err(|why| Error::from(why).during(what::<C>()))
    }

    /// Makes a call and leaves the reply as it is. This is the one loop that sends bytes again.
    pub(crate) async fn send_raw<C: ApiRequest>(
        &self,
        call: &C,
        options: &RequestOptions,
    ) -> Result<Response<Bytes>> {
        let span = tracing::debug_span!(target: targets::HTTP, "request", route = %C::ROUTE);
        self.send_with_retries(call, options).instrument(span).await
    }

    async fn send_with_retries<C: ApiRequest>(
        &self,
        call: &C,
        options: &RequestOptions,
    ) -> Result<Response<Bytes>> {
        let outgoing = self.encode(call, options).await.map_err(|e| e.during(what::<C>()))?;
        let (backoff, key) = (options.backoff.clone(), options.idempotency_key.clone());
        let mut sending = Sending::new(outgoing.rule, backoff, key).waited_for_since(options.since);
        loop {
            sending.held().await;
            self.check_open(C::ROUTE).map_err(|error| error.during(what::<C>()))?;
            match self.attempt(&outgoing, options, &sending).await {
                Ok(reply) => return Ok(reply),
                Err(failed) => sending
                    .failed(failed, &self.billing, self.events())
                    .await
                    .map_err(|error| error.during(what::<C>()))?,
            }
        }
    }

    async fn encode<C: ApiRequest>(&self, call: &C, options: &RequestOptions) -> Result<Outgoing> {
        let uri = uri(&self.base.join(&call.target()?))?;
        let method = match C::ROUTE.method() {
            tinkex_wire::Method::Get => Method::GET,
            tinkex_wire::Method::Post => Method::POST,
            tinkex_wire::Method::Put => Method::PUT,
            tinkex_wire::Method::Delete => Method::DELETE,
        };
        let body = call.body()?;
        let mut bytes = body.bytes();
        let policy = if options.single_attempt { RetryPolicy::disabled() } else { self.policy };
        let rule = policy.apply(RequestPolicy::of(C::ROUTE));
        debug_assert!(C::ROUTE.body() != BodyCodec::Empty || bytes.is_empty());
        if options.compress {
            bytes = Box::pin(compressed(bytes)).await?;
        }
        let content_type = body.content_type();
        Ok(Outgoing { method, uri, body: bytes, content_type, rule })
    }

    /// The headers of one attempt. They are put together each time: a copy kept for resends would
    /// cost every request more than the few resends that there are.
    fn headers(
        &self,
        outgoing: &Outgoing,
        options: &RequestOptions,
        sending: &Sending,
        signature: &Secret,
    ) -> Result<HeaderMap> {
        // Room for all at once: growing hashes every name anew.
        let room = self.headers.len() + options.headers.len() + OWN_HEADERS;
        let mut headers = HeaderMap::with_capacity(room);
        headers.insert(ACCEPT, HeaderValue::from_static(tinkex_wire::JSON));
        if outgoing.method != Method::GET {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static(outgoing.content_type));
        }
        let timeout = HeaderValue::from(outgoing.rule.timeout.as_secs());
        headers.insert(HeaderName::from_static(header::READ_TIMEOUT), timeout);
        if options.compress {
            headers.insert(CONTENT_ENCODING, HeaderValue::from_static(compress::ZSTD));
        }
        // The caller's own headers win over ours, and those of this call over both.
        for (name, value) in self.headers.iter().chain(&options.headers) {
            headers.insert(name.clone(), value.clone());
        }
        header::put_secret(&mut headers, wire_header::API_KEY, signature)?;
        let sent_before = HeaderValue::from(sending.sent_before());
        headers.insert(HeaderName::from_static(header::RETRY_COUNT), sent_before);
        if outgoing.method != Method::GET {
            header::put(&mut headers, wire_header::IDEMPOTENCY_KEY, sending.idempotency_key());
        }
        Ok(headers)
    }

    /// Sends once, and follows redirects.
    async fn attempt(
        &self,
        outgoing: &Outgoing,
        options: &RequestOptions,
        sending: &Sending,
    ) -> std::result::Result<Response<Bytes>, Failed> {
        // A credential that cannot be had is not a connection that was lost: no resend helps.
        let signature = match outgoing.rule.signed_by {
            Signer::Credential => self.credential.fetch().await,
            Signer::Exchange => self.exchange_credential().fetch().await,
            Signer::Token => self.token().await,
        };
        let signature = signature.map_err(Failed::for_good)?;
        let headers = || self.headers(outgoing, options, sending, &signature);
        let (mut method, mut uri) = (outgoing.method.clone(), outgoing.uri.clone());
        let mut body = outgoing.body.clone();
        let (mut without_body, mut elsewhere) = (false, false);
        for _ in 0..=redirect::MAX_REDIRECTS {
            let mut request = Request::new(body.clone());
            *request.method_mut() = method.clone();
            *request.uri_mut() = uri.clone();
            let mut headers = headers()?;
            if without_body {
                headers.remove(CONTENT_TYPE);
                headers.remove(CONTENT_ENCODING);
            }
            *request.headers_mut() = if elsewhere { harmless(&headers) } else { headers };
            let (lane, retries) = (outgoing.rule.lane, sending.sent_before());
            let events = RequestEvents::start(&method, &uri, lane, self.base.as_str(), retries);
            let sent = self.http.send(lane, request, outgoing.rule.timeout).await;
            events.stop(&sent);
            let reply = sent.map_err(Error::from)?;
            let Some(next) = redirect_url(&uri, &reply) else { return check(reply) };
            let keeps_method = matches!(reply.status().as_u16(), 307 | 308);
            if !keeps_method && method != Method::GET {
                (method, body, without_body) = (Method::GET, Bytes::new(), true);
            }
            // What is secret is for our server alone, and so is everything we cannot judge: a body
            // may hold a token, and is somebody's data in any case.
            if next.origin() != self.base.origin() {
                if method != Method::GET {
                    let why = "the server redirects a request with data to another server";
                    return Err(Failed::for_good(Error::new(ErrorKind::Rejected, why)));
                }
                elsewhere = true;
            }
            // Not repeated in the error: where it leads may need no credential.
            uri = next.as_str().parse().map_err(|_| {
                let why = "the server redirects to an address that makes no sense";
                Failed::for_good(Error::new(ErrorKind::Rejected, why))
            })?;
        }
        Err(Error::new(ErrorKind::Rejected, "the server redirects without end").into())
    }

    fn exchange_credential(&self) -> &Credential {
        self.exchange.get().map_or(&self.credential, |exchange| &exchange.credential)
    }

    async fn token(&self) -> Result<Secret> {
        match self.exchange.get() {
            None => self.credential.fetch().await,
            Some(exchange) => exchange.token.get(|| self.exchange_now()).await,
        }
    }

    /// Boxed: a call is signed, signing may make a call, and that one is signed without one.
    fn exchange_now(&self) -> BoxFuture<'_, Result<Secret>> {
        Box::pin(async {
            let token = self.send(&AuthTokenRequest {}, &RequestOptions::default()).await?.jwt;
            let first = || Task::spawn(refresh(Weak::clone(&self.this), token.clone()));
            self.refresh.get_or_init(first);
            Ok(token)
        })
    }
}

/// Exchanges tokens ahead of need, for as long as the transport lives.
async fn refresh(transport: Weak<Transport>, token: Secret) {
    const AFTER_FAILURE: Duration = Duration::from_secs(60);
    // A token that does not last, or a clock that is ahead, must not ask for others without end.
    const SHORTEST: Duration = Duration::from_secs(60);
    let in_time = |token: &_| auth::refresh_in(token, crate::clock::unix_now()).max(SHORTEST);
    let mut wait = in_time(&token);
    loop {
        tokio::time::sleep(wait).await;
        let Some(transport) = transport.upgrade() else { return };
        if *transport.closed.borrow() {
            return;
        }
        let Some(exchange) = transport.exchange.get() else { return };
        wait = match exchange.token.renew(|| transport.exchange_now()).await {
            Ok(new) => in_time(&new),
            Err(error) => {
                tracing::debug!(%error, "no new token yet");
                AFTER_FAILURE
            }
        };
    }
}

/// Compressing takes milliseconds, which others on this thread should not wait for.
async fn compressed(body: Bytes) -> Result<Bytes> {
    let failed = |why: String| Error::new(ErrorKind::InvalidInput, why);
    let work = tokio::task::spawn_blocking(move || compress::compress(&body));
    Ok(work.await.map_err(|why| failed(why.to_string()))??)
}

/// What was tried, for errors.
fn what<C: ApiRequest>() -> String {
    C::ROUTE.to_string()
}

/// An address as requests carry it. Reading it as a `Url` costs ten times as much, so that is left
/// to those with characters that must be escaped first.
fn uri(address: &str) -> Result<Uri> {
    let wrong = |why: String| Error::new(ErrorKind::InvalidInput, format!("{address:?}: {why}"));
    address.parse().or_else(|_| {
        let url = Url::parse(address).map_err(|why| wrong(why.to_string()))?;
        url.as_str().parse().map_err(|why: ::http::uri::InvalidUri| wrong(why.to_string()))
    })
}

/// Returns the URL that a response redirects to, if it does.
fn redirect_url(from: &Uri, reply: &Response<Bytes>) -> Option<Url> {
    let location = redirect::location(reply)?;
    Url::parse(&from.to_string()).ok()?.join(location).ok()
}

fn harmless(headers: &HeaderMap) -> HeaderMap {
    let keep = |name: &HeaderName| name == ACCEPT || name == USER_AGENT;
    headers.iter().filter(|(name, _)| keep(name)).map(|(n, v)| (n.clone(), v.clone())).collect()
}

fn check(reply: Response<Bytes>) -> std::result::Result<Response<Bytes>, Failed> {
    header::note_deprecation(reply.headers());
    if reply.status().is_success() {
        return Ok(reply);
    }
    Err(Failed::of_reply(&reply))
}
