//! A call's way to the server and back: encode once, sign, send, check, decode.
//!
//! Whether it is sent again is [`retry`]'s decision, how it gets there is [`http`]'s.

mod auth;
mod billing;
pub(crate) mod delay;
pub(crate) mod header;
pub(crate) mod http;
pub(crate) mod pause;
mod pauses;
mod pool;
pub(crate) mod retry;
mod rule;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use ::http::header::{ACCEPT, CONTENT_ENCODING, CONTENT_TYPE, LOCATION, USER_AGENT};
use ::http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response};
use bytes::Bytes;
use futures_util::future::BoxFuture;
use tinkex_wire::codec::compress;
use tinkex_wire::{AuthTokenRequest, BodyCodec, Call, Reply, Route, Secret, header as wire_header};
use url::Url;

use crate::config::{BaseUrl, Credential};
use crate::error::{Error, ErrorKind, Result};
use crate::task::Task;
use crate::telemetry::Journal;

pub use auth::Identity;
use auth::Token;
use billing::Billing;
pub(crate) use billing::PAUSE as BILLING_PAUSE;
use http::HttpService;
use pause::Hold;
use retry::{Failed, RetryPolicy, Sending};
use rule::{Rule, Signer};

const MOST_REDIRECTS: usize = 10;
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
    journal: OnceLock<Arc<Journal>>,
    closed: AtomicBool,
}

/// A credential that is exchanged for tokens.
struct Exchange {
    credential: Credential,
    token: Token,
}

/// What goes with one call besides its request.
#[derive(Default)]
pub(crate) struct Extras {
    /// Further headers.
    pub(crate) headers: HeaderMap,
    /// The same idempotency key for every attempt of every round.
    pub(crate) idempotency_key: Option<String>,
    /// Whether the body is compressed.
    pub(crate) compress: bool,
    /// Whether it is sent at most once, even where it usually persists.
    pub(crate) once: bool,
    /// What holds it back together with others.
    pub(crate) hold: Option<Hold>,
}

/// A call, encoded: what every attempt of it sends.
struct Outgoing {
    method: Method,
    url: Url,
    body: Bytes,
    headers: HeaderMap,
    rule: Rule,
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
            journal: OnceLock::new(),
            closed: AtomicBool::new(false),
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
    pub(crate) fn write_into(&self, journal: Arc<Journal>) {
        let _ = self.journal.set(journal);
    }

    /// Where failures are written down, if anywhere.
    pub(crate) fn journal(&self) -> Option<&Journal> {
        self.journal.get().map(|journal| &**journal)
    }

    /// From now on nothing is sent but last words.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    fn check_open(&self, route: Route) -> Result<()> {
        let last_words = matches!(route, Route::FinishSession | Route::Telemetry);
        if self.closed.load(Ordering::Acquire) && !last_words {
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
    pub(crate) async fn call<C: Call>(&self, call: &C, extras: &Extras) -> Result<C::Reply> {
        let reply = self.send(call, extras).await?;
        C::Reply::from_body(reply.body()).map_err(|why| Error::from(why).during(what::<C>()))
    }

    /// Makes a call and leaves the reply as it is. This is the one loop that sends bytes again.
    pub(crate) async fn send<C: Call>(&self, call: &C, extras: &Extras) -> Result<Response<Bytes>> {
        let outgoing = self.encode(call, extras).await.map_err(|e| e.during(what::<C>()))?;
        let (hold, key) = (extras.hold.clone(), extras.idempotency_key.clone());
        let mut sending = Sending::new(outgoing.rule, hold, key);
        loop {
            sending.held().await;
            self.check_open(C::ROUTE).map_err(|error| error.during(what::<C>()))?;
            match self.attempt(&outgoing, &sending).await {
                Ok(reply) => return Ok(reply),
                Err(failed) => sending
                    .failed(failed, &self.billing, self.journal())
                    .await
                    .map_err(|error| error.during(what::<C>()))?,
            }
        }
    }

    async fn encode<C: Call>(&self, call: &C, extras: &Extras) -> Result<Outgoing> {
        let url = self.base.join(&call.target()?);
        let url = Url::parse(&url)
            .map_err(|why| Error::new(ErrorKind::InvalidInput, format!("{url:?}: {why}")))?;
        let method = match C::ROUTE.method() {
            tinkex_wire::Method::Get => Method::GET,
            tinkex_wire::Method::Post => Method::POST,
            tinkex_wire::Method::Put => Method::PUT,
            tinkex_wire::Method::Delete => Method::DELETE,
        };
        let body = call.body()?;
        let mut bytes = body.bytes();
        let policy = if extras.once { RetryPolicy::disabled() } else { self.policy };
        let rule = policy.apply(Rule::of(C::ROUTE));
        let mut headers = HeaderMap::new();
        headers.insert(ACCEPT, HeaderValue::from_static(tinkex_wire::JSON));
        if method != Method::GET {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static(body.content_type()));
        }
        header::put(&mut headers, header::READ_TIMEOUT, &rule.timeout.as_secs().to_string());
        debug_assert!(C::ROUTE.body() != BodyCodec::Empty || bytes.is_empty());
        if extras.compress {
            bytes = compressed(bytes).await?;
            headers.insert(CONTENT_ENCODING, HeaderValue::from_static(compress::ZSTD));
        }
        // The caller's own headers win over ours, and those of this call over both.
        headers.extend(self.headers.clone());
        headers.extend(extras.headers.clone());
        Ok(Outgoing { method, url, body: bytes, headers, rule })
    }

    /// Sends once, and follows redirects.
    async fn attempt(
        &self,
        outgoing: &Outgoing,
        sending: &Sending,
    ) -> std::result::Result<Response<Bytes>, Failed> {
        // A credential that cannot be had is not a connection that was lost: no resend helps.
        let signature = match outgoing.rule.signed_by {
            Signer::Credential => self.credential.fetch().await,
            Signer::Exchange => self.exchange_credential().fetch().await,
            Signer::Token => self.token().await,
        };
        let signature = signature.map_err(Failed::for_good)?;
        let mut headers = outgoing.headers.clone();
        header::put_secret(&mut headers, wire_header::API_KEY, &signature)?;
        header::put(&mut headers, header::RETRY_COUNT, &sending.sent_before().to_string());
        if outgoing.method != Method::GET {
            header::put(&mut headers, wire_header::IDEMPOTENCY_KEY, sending.idempotency_key());
        }

        let (mut method, mut url) = (outgoing.method.clone(), outgoing.url.clone());
        let mut body = outgoing.body.clone();
        for _ in 0..=MOST_REDIRECTS {
            let mut request = Request::new(body.clone());
            *request.method_mut() = method.clone();
            *request.uri_mut() = url.as_str().parse().map_err(|why: ::http::uri::InvalidUri| {
                Error::new(ErrorKind::InvalidInput, why.to_string())
            })?;
            *request.headers_mut() = headers.clone();
            let sent = self.http.send(outgoing.rule.lane, request, outgoing.rule.timeout).await;
            let reply = sent.map_err(Error::from)?;
            let Some(next) = redirect(&url, &reply) else { return check(reply) };
            let keeps_method = matches!(reply.status().as_u16(), 307 | 308);
            if !keeps_method && method != Method::GET {
                (method, body) = (Method::GET, Bytes::new());
                headers.remove(CONTENT_TYPE);
                headers.remove(CONTENT_ENCODING);
            }
            // What is secret is for our server alone, and so is everything we cannot judge: a body
            // may hold a token, and is somebody's data in any case.
            if next.origin() != self.base.origin() {
                if method != Method::GET {
                    let why = "the server redirects a request with data to another server";
                    return Err(Failed::for_good(Error::new(ErrorKind::Rejected, why)));
                }
                headers = harmless(&headers);
            }
            url = next;
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
            let token = self.call(&AuthTokenRequest {}, &Extras::default()).await?.jwt;
            let first = || Task::spawn(refresh(Weak::clone(&self.this), token.clone()));
            self.refresh.get_or_init(first);
            Ok(token)
        })
    }
}

/// Exchanges tokens ahead of need, for as long as the transport lives.
async fn refresh(transport: Weak<Transport>, mut token: Secret) {
    const AFTER_FAILURE: Duration = Duration::from_secs(60);
    let mut wait = auth::refresh_in(&token, crate::clock::unix_now());
    loop {
        tokio::time::sleep(wait).await;
        let Some(transport) = transport.upgrade() else { return };
        let Some(exchange) = transport.exchange.get() else { return };
        wait = match exchange.token.renew(|| transport.exchange_now()).await {
            Ok(new) => {
                token = new;
                auth::refresh_in(&token, crate::clock::unix_now())
            }
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
fn what<C: Call>() -> String {
    C::ROUTE.to_string()
}

/// Where a reply sends us, if it does.
fn redirect(from: &Url, reply: &Response<Bytes>) -> Option<Url> {
    let status = reply.status();
    if !matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308) {
        return None;
    }
    from.join(reply.headers().get(LOCATION)?.to_str().ok()?).ok()
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
