//! The one door to the network.
//!
//! [`HttpService`] is what the rest of the crate sees: a request goes in, a reply or a failure comes
//! out. Fakes and proxies come in here; the real one is [`Network`].

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::stream::{self, BoxStream, Stream, StreamExt as _};
use http::{Request, Response};

use crate::config::Env;
use crate::error::{Error, ErrorKind};

use super::pool::{Lease, Pool};

/// Sends requests. Redirects are not followed and nothing is sent twice: others decide that.
pub trait HttpService: Send + Sync + 'static {
    /// Sends one request and waits for the whole reply, at most for `timeout`.
    fn send(
        &self,
        lane: Lane,
        request: Request<Bytes>,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>>;

    /// Sends one request and hands the reply over as it comes, for what is too large to be held.
    /// Nothing may come for `timeout` at most.
    ///
    /// A service that does not say otherwise waits for the whole reply.
    fn send_streaming(
        &self,
        lane: Lane,
        request: Request<Bytes>,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<ResponseBody>, HttpFailure>> {
        let whole = self.send(lane, request, timeout);
        Box::pin(async move { Ok(whole.await?.map(ResponseBody::from)) })
    }
}

/// The body of a reply as it comes.
pub struct ResponseBody(BoxStream<'static, Result<Bytes, HttpFailure>>);

impl ResponseBody {
    /// These bytes, or a failure half-way.
    pub fn new(bytes: impl Stream<Item = Result<Bytes, HttpFailure>> + Send + 'static) -> Self {
        Self(bytes.boxed())
    }

    /// The next bytes; `None` at the end.
    pub async fn next(&mut self) -> Option<Result<Bytes, HttpFailure>> {
        self.0.next().await
    }
}

impl From<Bytes> for ResponseBody {
    fn from(whole: Bytes) -> Self {
        Self::new(stream::iter((!whole.is_empty()).then_some(Ok(whole))))
    }
}

impl fmt::Debug for ResponseBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseBody").finish_non_exhaustive()
    }
}

/// A class of traffic. Each has connections of its own, so that a long poll never stands in the way
/// of an upload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Lane {
    /// Settings, asked for once.
    Config,
    /// Tokens.
    Auth,
    /// Sessions: opening, keeping alive, joining.
    Session,
    /// Training requests, and looking things up.
    Train,
    /// Sampling requests.
    Sample,
    /// Waiting for one answer.
    Poll,
    /// Waiting for many answers.
    PollMany,
    /// How the client is doing.
    Telemetry,
    /// Files of a model hub.
    Hub,
    /// Files to download: weights and traces.
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

    /// Its name, for logs and metrics.
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

    /// Whether requests share connections.
    const fn is_shared(self) -> bool {
        self.requests_per_client() > 1
    }

    /// How many requests share one set of connections. An upload has its own; the others stay below
    /// what one HTTP/2 connection carries at once.
    pub(crate) const fn requests_per_client(self) -> usize {
        match self {
            Self::Config | Self::Auth | Self::Train | Self::Hub | Self::File => 1,
            Self::Session | Self::Sample | Self::Poll | Self::PollMany | Self::Telemetry => 50,
        }
    }
}

/// A request that got no answer.
#[derive(Debug)]
pub struct HttpFailure {
    kind: FailureKind,
    source: Box<dyn StdError + Send + Sync>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FailureKind {
    Timeout,
    Connect,
}

impl HttpFailure {
    /// The answer did not come in time.
    pub fn timeout(source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self { kind: FailureKind::Timeout, source: source.into() }
    }

    /// There was no connection, or it broke.
    pub fn connect(source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self { kind: FailureKind::Connect, source: source.into() }
    }
}

impl From<HttpFailure> for Error {
    fn from(failure: HttpFailure) -> Self {
        let kind = match failure.kind {
            FailureKind::Timeout => ErrorKind::Timeout,
            FailureKind::Connect => ErrorKind::Connect,
        };
        Self::of_transport(kind, failure.source)
    }
}

/// The network, by reqwest.
///
/// Whether the server speaks HTTP/2 shows only when a connection is there, so requests that start
/// together would each open one of their own. The first reply settles it: from then on clients whose
/// connection is shared begin with one, and open no other.
pub(crate) struct Network {
    pools: Vec<(Lane, Pool<Connected>)>,
    speaks_http2: Arc<AtomicBool>,
}

/// A client, and what it offers to speak.
#[derive(Clone)]
struct Connected {
    client: reqwest::Client,
    protocol: Protocol,
}

const CONNECT: Duration = Duration::from_secs(5);
const KEEP_ALIVE: Duration = Duration::from_secs(30);
const IDLE: Duration = Duration::from_secs(90);
/// What an upload may take on top of its timeout: a slow line is not a dead one.
const SLOWEST_UPLOAD_BYTES_PER_SECOND: usize = 64 * 1024;

impl Network {
    /// Proxies come from these variables, read now and never again.
    pub(crate) fn new(env: &Env) -> Result<Self, Error> {
        let (tls, proxies) = (tls()?, proxies(env)?);
        let speaks_http2 = Arc::new(AtomicBool::new(false));
        // Made once here so that a mistake shows now and not at the first request.
        client(tls.clone(), &proxies, Protocol::Any)?;
        let pool = |lane: Lane| {
            let (tls, proxies) = (tls.clone(), proxies.clone());
            let speaks_http2 = Arc::clone(&speaks_http2);
            let make = move || {
                let known = lane.is_shared() && speaks_http2.load(Ordering::Relaxed);
                let protocol = if known { Protocol::Http2 } else { Protocol::Any };
                let client = client(tls.clone(), &proxies, protocol);
                Connected { client: client.expect("the same settings worked before"), protocol }
            };
            (lane, Pool::new(lane.requests_per_client(), Box::new(make)))
        };
        Ok(Self { pools: Lane::ALL.map(pool).into(), speaks_http2 })
    }

    fn pool(&self, lane: Lane) -> &Pool<Connected> {
        let found = self.pools.iter().find(|(of, _)| *of == lane);
        &found.expect("every lane has a pool").1
    }
}

impl HttpService for Network {
    fn send(
        &self,
        lane: Lane,
        request: Request<Bytes>,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>> {
        Box::pin(async move {
            let pool = self.pool(lane);
            let upload = request.body().len() / SLOWEST_UPLOAD_BYTES_PER_SECOND;
            let mut request = reqwest::Request::try_from(request).map_err(failure)?;
            *request.timeout_mut() = Some(timeout + Duration::from_secs(upload as u64));
            let secure = request.url().scheme() == "https";
            let lease = pool.lease();
            let sent = lease.client().client.execute(request).await;
            if sent.is_err() && lease.client().protocol == Protocol::Http2 {
                // Perhaps another server answers now, which does not speak it: offer both again.
                self.speaks_http2.store(false, Ordering::Relaxed);
                pool.renew(&lease);
            }
            let mut reply = sent.map_err(failure)?;
            // Shared lanes speak to our own server alone, and so does the first call of all.
            if secure
                && (lane == Lane::Config || lane.is_shared())
                && reply.version() == http::Version::HTTP_2
            {
                self.speaks_http2.store(true, Ordering::Relaxed);
            }
            let head = head(&mut reply);
            let body = reply.bytes().await.map_err(failure)?;
            pool.settle(&lease, head.map(|()| body))
        })
    }

    fn send_streaming(
        &self,
        lane: Lane,
        request: Request<Bytes>,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<ResponseBody>, HttpFailure>> {
        Box::pin(async move {
            let request = reqwest::Request::try_from(request).map_err(failure)?;
            let lease = self.pool(lane).lease();
            let sent = tokio::time::timeout(timeout, lease.client().client.execute(request)).await;
            let mut reply = sent.map_err(HttpFailure::timeout)?.map_err(failure)?;
            let head = head(&mut reply);
            Ok(head.map(|()| ResponseBody::new(incoming(reply, lease, timeout))))
        })
    }
}

/// Status and headers of a reply, taken out of it.
fn head(reply: &mut reqwest::Response) -> Response<()> {
    let mut head = Response::new(());
    *head.status_mut() = reply.status();
    *head.headers_mut() = std::mem::take(reply.headers_mut());
    head
}

/// Hands a reply over as it comes. The connection is taken until the end of it.
fn incoming(
    reply: reqwest::Response,
    lease: Lease<Connected>,
    timeout: Duration,
) -> impl Stream<Item = Result<Bytes, HttpFailure>> {
    stream::unfold(Some((reply, lease)), move |state| async move {
        let (mut reply, lease) = state?;
        match tokio::time::timeout(timeout, reply.chunk()).await {
            Ok(Ok(bytes)) => bytes.map(|bytes| (Ok(bytes), Some((reply, lease)))),
            Ok(Err(why)) => Some((Err(failure(why)), None)),
            Err(late) => Some((Err(HttpFailure::timeout(late)), None)),
        }
    })
}

/// Without the address: it may hold a query that is nobody's business.
fn failure(error: reqwest::Error) -> HttpFailure {
    let error = error.without_url();
    if error.is_timeout() { HttpFailure::timeout(error) } else { HttpFailure::connect(error) }
}

/// What a client offers to speak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Protocol {
    Any,
    Http2,
}

/// The proxies that the usual variables name, in either case.
fn proxies(env: &Env) -> Result<Vec<reqwest::Proxy>, Error> {
    let get = |name: &str| env.get(name).or_else(|| env.get(&name.to_ascii_lowercase()));
    let except = || reqwest::NoProxy::from_string(get("NO_PROXY").unwrap_or_default());
    type Make = fn(&str) -> reqwest::Result<reqwest::Proxy>;
    let kinds: [(&str, Make); 3] = [
        ("HTTP_PROXY", |url| reqwest::Proxy::http(url)),
        ("HTTPS_PROXY", |url| reqwest::Proxy::https(url)),
        ("ALL_PROXY", |url| reqwest::Proxy::all(url)),
    ];
    let named = kinds.into_iter().filter_map(|(name, make)| Some((name, make, get(name)?)));
    named
        .map(|(name, make, url)| {
            // Without the address: it may hold a password.
            let wrong = |_| Error::new(ErrorKind::Config, format!("{name} is not an address"));
            Ok(make(url).map_err(wrong)?.no_proxy(except()))
        })
        .collect()
}

fn client(
    mut tls: rustls::ClientConfig,
    proxies: &[reqwest::Proxy],
    protocol: Protocol,
) -> Result<reqwest::Client, Error> {
    // What the system says about proxies is not asked: the variables were read once, elsewhere.
    let builder = reqwest::Client::builder().no_proxy();
    let mut builder = proxies.iter().cloned().fold(builder, reqwest::ClientBuilder::proxy);
    if protocol == Protocol::Http2 {
        tls.alpn_protocols = vec![b"h2".to_vec()];
        builder = builder.http2_prior_knowledge();
    }
    builder
        .tls_backend_preconfigured(tls)
        .redirect(reqwest::redirect::Policy::none())
        // Without the limit it never resends either, but keeps a copy of every request.
        .retry(reqwest::retry::never().max_retries_per_request(0))
        .connect_timeout(CONNECT)
        .tcp_keepalive(KEEP_ALIVE)
        .pool_idle_timeout(IDLE)
        .build()
        .map_err(|why| Error::new(ErrorKind::Config, "no HTTP client").with_source(why))
}

fn tls() -> Result<rustls::ClientConfig, Error> {
    use rustls_platform_verifier::BuilderVerifierExt;

    let wrong = |why: rustls::Error| Error::new(ErrorKind::Config, "no TLS").with_source(why);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(BuilderVerifierExt::with_platform_verifier)
        .map_err(wrong)?
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proxies_come_from_the_variables_that_were_given_and_keep_their_secrets() {
        let of = |pairs: &[(&str, &str)]| proxies(&Env::from_pairs(pairs.iter().copied()));
        assert!(of(&[("NO_PROXY", "localhost")]).unwrap().is_empty());
        let two = of(&[("https_proxy", "http://a:1"), ("ALL_PROXY", "http://b:2")]).unwrap();
        assert_eq!(two.len(), 2);
        let error = of(&[("HTTP_PROXY", "http://user:hush@:x")]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("HTTP_PROXY") && !format!("{error:?}").contains("hush"));
    }
}
