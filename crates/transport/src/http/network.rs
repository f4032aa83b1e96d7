//! [`Network`]: the default [`HttpService`], on reqwest.

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::stream::{self, Stream};
use http::{Request, Response};

use crate::config::Env;
use crate::error::{Error, ErrorKind};

use super::network_builder::{ConnectionSettings, NetworkBuilder};
use super::pool::{Lease, Pool};
use super::upload::UploadFile;
use super::{HttpFailure, HttpFailureKind, HttpService, Lane, ResponseBody, any_cause};

/// The default [`HttpService`]: sends requests over the network, with separate connections for each
/// [`Lane`].
///
/// [`builder`](Self::builder) sets certificate authorities, the proxy, timeouts and the number of
/// unused connections; pass the result to `ServiceClientBuilder::network`. Clones share their
/// connections.
///
/// A service of your own can wrap it, for example to record requests or to add a header, and is
/// passed to `ServiceClientBuilder::http`:
///
/// ```
/// use std::time::Duration;
/// use futures_util::future::BoxFuture;
/// use tinkex::bytes::Bytes;
/// use tinkex::http::{HeaderValue, Request, Response};
/// use tinkex::{Env, HttpFailure, HttpService, Lane, Network, ResponseBody, ServiceClient};
///
/// /// Names the team that pays for a request.
/// struct WithTeam(Network);
///
/// impl WithTeam {
///     fn mark(mut request: Request<Bytes>) -> Request<Bytes> {
///         request.headers_mut().insert("x-team", HeaderValue::from_static("research"));
///         request
///     }
/// }
///
/// impl HttpService for WithTeam {
///     fn send(
///         &self,
///         lane: Lane,
///         request: Request<Bytes>,
///         timeout: Duration,
///     ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>> {
///         self.0.send(lane, Self::mark(request), timeout)
///     }
///
///     // Without this method, responses would not be streamed.
///     fn send_streaming(
///         &self,
///         lane: Lane,
///         request: Request<Bytes>,
///         timeout: Duration,
///     ) -> BoxFuture<'_, Result<Response<ResponseBody>, HttpFailure>> {
///         self.0.send_streaming(lane, Self::mark(request), timeout)
///     }
/// }
///
/// let network = Network::new(&Env::from_process())?;
/// let service = ServiceClient::builder().api_key("tml-example").http(WithTeam(network)).build()?;
/// # Ok::<_, tinkex::Error>(())
/// ```
// The client only knows that a server supports HTTP/2 once a connection exists, so requests that
// start at the same time would open one connection each. After the first HTTP/2 response, new
// clients of shared lanes offer HTTP/2 alone and therefore open a single connection.
#[derive(Clone)]
pub struct Network {
    pools: Arc<[(Lane, Pool<PooledClient>)]>,
    /// Whether the API server has responded with HTTP/2.
    speaks_http2: Arc<AtomicBool>,
}

/// HTTP client and the protocol that it offers.
#[derive(Clone)]
struct PooledClient {
    client: reqwest::Client,
    protocol: Protocol,
}

/// Interval of TCP keep-alive probes.
const TCP_KEEP_ALIVE: Duration = Duration::from_secs(30);
/// Lowest upload rate, in bytes per second, at which a request does not time out. The timeout of a
/// request is extended by the time that its body takes at this rate.
const SLOWEST_UPLOAD_BYTES_PER_SECOND: u64 = 64 * 1024;
/// Maximum size of a response in memory, in bytes after decompression. Results are smaller. Without
/// a limit, a few megabytes of compressed data could fill the memory.
const MAX_RESPONSE: usize = 2 << 30;

impl fmt::Debug for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Network").field("speaks_http2", &self.speaks_http2).finish_non_exhaustive()
    }
}

impl Network {
    /// Creates a network with default settings and the proxies that `env` sets: `HTTP_PROXY`,
    /// `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY`. The variables are read only here.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] if the URL of a proxy is invalid.
    pub fn new(env: &Env) -> Result<Self, Error> {
        Self::builder().env(env.clone()).build()
    }

    /// Returns a builder.
    pub fn builder() -> NetworkBuilder {
        NetworkBuilder::default()
    }

    pub(super) fn with_settings(settings: ConnectionSettings) -> Result<Self, Error> {
        let settings = Arc::new(settings);
        let speaks_http2 = Arc::new(AtomicBool::new(false));
        // Build one client now, so that an invalid setting fails here and not at the first request.
        client(&settings, Protocol::Any)?;
        let pool = |lane: Lane| {
            let settings = Arc::clone(&settings);
            let speaks_http2 = Arc::clone(&speaks_http2);
            let make = move || {
                let http2 = lane.is_shared() && speaks_http2.load(Ordering::Relaxed);
                let protocol = if http2 { Protocol::Http2 } else { Protocol::Any };
                let client = client(&settings, protocol);
                let client = client.expect("a client with these settings was built before");
                PooledClient { client, protocol }
            };
            let pool = Pool::new(lane.requests_per_client(), Box::new(make));
            (lane, pool.max_requests(lane.max_connections()))
        };
        Ok(Self { pools: Lane::ALL.map(pool).into(), speaks_http2 })
    }

    fn pool(&self, lane: Lane) -> &Pool<PooledClient> {
        let pool = self.pools.iter().find(|(name, _)| *name == lane);
        &pool.expect("every lane has a pool").1
    }

    /// Returns a client for one request. Without HTTP/2 each request occupies a connection, so this
    /// method waits while the lane has its maximum number of requests.
    async fn lease(&self, lane: Lane) -> Lease<PooledClient> {
        let pool = self.pool(lane);
        if self.speaks_http2.load(Ordering::Relaxed) {
            return pool.lease();
        }
        pool.lease_permitted().await
    }

    /// Sends a request with a body of `bytes` bytes and waits for the complete response.
    async fn send_body(
        &self,
        lane: Lane,
        request: Request<impl Into<reqwest::Body>>,
        bytes: u64,
        timeout: Duration,
    ) -> Result<Response<Bytes>, HttpFailure> {
        let pool = self.pool(lane);
        let mut request = reqwest::Request::try_from(request).map_err(classify)?;
        let upload_time = Duration::from_secs(bytes / SLOWEST_UPLOAD_BYTES_PER_SECOND);
        *request.timeout_mut() = Some(timeout + upload_time);
        let secure = request.url().scheme() == "https";
        let lease = self.lease(lane).await;
        let sent = lease.client().client.execute(request).await;
        if sent.is_err() && lease.client().protocol == Protocol::Http2 {
            // Offer both protocols again: the server at this address may have been replaced by one
            // without HTTP/2.
            self.speaks_http2.store(false, Ordering::Relaxed);
            pool.renew(&lease);
        }
        let mut response = sent.map_err(classify)?;
        // Only responses of the API server show that it supports HTTP/2. Requests on shared lanes
        // and the configuration request always go to that server; other lanes may use other
        // servers.
        if secure
            && (lane == Lane::Config || lane.is_shared())
            && response.version() == http::Version::HTTP_2
        {
            self.speaks_http2.store(true, Ordering::Relaxed);
        }
        let head = take_head(&mut response);
        let body = collect_body(response, MAX_RESPONSE).await?;
        pool.check_response(&lease, head.map(|()| body))
    }
}

impl HttpService for Network {
    fn send(
        &self,
        lane: Lane,
        request: Request<Bytes>,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>> {
        let bytes = request.body().len() as u64;
        Box::pin(self.send_body(lane, request, bytes, timeout))
    }

    fn send_upload(
        &self,
        lane: Lane,
        request: Request<Bytes>,
        file: UploadFile,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>> {
        Box::pin(async move {
            let (head, body) = request.into_parts();
            let body = file.stream(body).await?;
            let bytes = body.len();
            let request = Request::from_parts(head, reqwest::Body::wrap(body));
            self.send_body(lane, request, bytes, timeout).await
        })
    }

    fn send_streaming(
        &self,
        lane: Lane,
        request: Request<Bytes>,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<ResponseBody>, HttpFailure>> {
        Box::pin(async move {
            let request = reqwest::Request::try_from(request).map_err(classify)?;
            // No permit: a stream keeps its connection until the caller has read it, and streams that
            // are not read must not delay other requests.
            let lease = self.pool(lane).lease();
            let sent = tokio::time::timeout(timeout, lease.client().client.execute(request)).await;
            let mut response = sent.map_err(HttpFailure::timeout)?.map_err(classify)?;
            let head = take_head(&mut response);
            Ok(head.map(|()| ResponseBody::new(body_parts(response, lease, timeout))))
        })
    }
}

/// Moves the status and the headers out of a response, and leaves its body.
fn take_head(response: &mut reqwest::Response) -> Response<()> {
    let mut head = Response::new(());
    *head.status_mut() = response.status();
    *head.headers_mut() = std::mem::take(response.headers_mut());
    head
}

/// Receives a body of at most `limit` bytes.
async fn collect_body(mut response: reqwest::Response, limit: usize) -> Result<Bytes, HttpFailure> {
    let mut parts = Vec::new();
    let mut length = 0;
    while let Some(part) = response.chunk().await.map_err(classify)? {
        length += part.len();
        if length > limit {
            let message = format!("response body exceeds {limit} bytes");
            return Err(HttpFailure::new(HttpFailureKind::Decode, message));
        }
        parts.push(part);
    }
    // Most bodies arrive in one part. Return that part without a copy.
    Ok(if parts.len() == 1 { parts.swap_remove(0) } else { parts.concat().into() })
}

/// Streams the body of a response. The lease is held until the stream ends or is dropped.
fn body_parts(
    response: reqwest::Response,
    lease: Lease<PooledClient>,
    timeout: Duration,
) -> impl Stream<Item = Result<Bytes, HttpFailure>> {
    stream::unfold(Some((response, lease)), move |state| async move {
        let (mut response, lease) = state?;
        match tokio::time::timeout(timeout, response.chunk()).await {
            Ok(Ok(part)) => part.map(|part| (Ok(part), Some((response, lease)))),
            Ok(Err(error)) => Some((Err(classify(error)), None)),
            Err(elapsed) => Some((Err(HttpFailure::timeout(elapsed)), None)),
        }
    })
}

/// Converts an error of the HTTP library to a failure, and removes the URL, whose query may be
/// secret.
fn classify(error: reqwest::Error) -> HttpFailure {
    let error = error.without_url();
    let kind = if error.is_timeout() {
        HttpFailureKind::Timeout
    } else if error.is_builder() {
        HttpFailureKind::InvalidRequest
    } else if any_cause(&error, is_certificate_error) {
        HttpFailureKind::Certificate
    } else if any_cause(&error, is_protocol_mismatch) {
        HttpFailureKind::WrongProtocol
    } else if error.is_decode() && is_decompression_error(&error) {
        HttpFailureKind::Decode
    } else {
        HttpFailureKind::Connect
    };
    HttpFailure::new(kind, error)
}

fn is_certificate_error(error: &(dyn StdError + 'static)) -> bool {
    matches!(error.downcast_ref(), Some(rustls::Error::InvalidCertificate(_)))
}

/// Returns whether the server uses HTTP although the scheme of the URL is HTTPS, or the other way
/// round.
fn is_protocol_mismatch(error: &(dyn StdError + 'static)) -> bool {
    use rustls::{Error, InvalidMessage};
    match error.downcast_ref() {
        Some(Error::InvalidMessage(message)) => {
            matches!(message, InvalidMessage::InvalidContentType)
        }
        // The first bytes of a TLS alert, parsed as an HTTP response.
        _ => error.to_string() == "invalid HTTP version parsed",
    }
}

/// Returns whether decompressing the body failed, as opposed to receiving it. reqwest reports both
/// as decoding errors. The cause of a decompression error is an I/O error, the cause of a receive
/// error is an HTTP error.
fn is_decompression_error(error: &reqwest::Error) -> bool {
    let mut cause = error.source();
    while let Some(inner) = cause.and_then(|cause| cause.downcast_ref::<reqwest::Error>()) {
        cause = inner.source();
    }
    let io_error = cause.and_then(|cause| cause.downcast_ref::<io::Error>());
    io_error.is_some_and(|error| error.kind() != io::ErrorKind::UnexpectedEof)
}

/// Protocols that a client offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Protocol {
    Any,
    Http2,
}

fn client(settings: &ConnectionSettings, protocol: Protocol) -> Result<reqwest::Client, Error> {
    // Disable reqwest's own proxy detection: the proxies come from the settings, never from the
    // process environment.
    let builder = reqwest::Client::builder().no_proxy();
    let proxies = settings.proxies.iter().cloned();
    let mut builder = proxies.fold(builder, reqwest::ClientBuilder::proxy);
    let mut tls = settings.tls.clone();
    if protocol == Protocol::Http2 {
        tls.alpn_protocols = vec![b"h2".to_vec()];
        builder = builder.http2_prior_knowledge();
    }
    builder
        .tls_backend_preconfigured(tls)
        .redirect(reqwest::redirect::Policy::none())
        // `never` alone would still copy every request for a retry; a limit of 0 avoids the copy.
        .retry(reqwest::retry::never().max_retries_per_request(0))
        .connect_timeout(settings.connect_timeout)
        .tcp_keepalive(TCP_KEEP_ALIVE)
        .pool_idle_timeout(settings.idle_timeout)
        .pool_max_idle_per_host(settings.max_idle_connections)
        .build()
        .map_err(|error| {
            Error::new(ErrorKind::Config, "cannot create an HTTP client").with_source(error)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn response_bodies_are_limited() {
        let response = || reqwest::Response::from(Response::new("12345678"));
        assert_eq!(collect_body(response(), 8).await.unwrap(), "12345678");
        let failure = collect_body(response(), 7).await.unwrap_err();
        assert_eq!(failure.kind(), HttpFailureKind::Decode);
        let cause = failure.source().unwrap().to_string();
        assert_eq!(cause, "response body exceeds 7 bytes");
    }

    #[tokio::test]
    async fn a_request_that_cannot_be_built_is_not_a_lost_connection() {
        let network = Network::new(&Env::empty()).unwrap();
        let mut request = Request::new(Bytes::new());
        *request.uri_mut() = "/no/host".parse().unwrap();
        let sent = network.send(Lane::Train, request, Duration::from_secs(1)).await;
        assert_eq!(sent.unwrap_err().kind(), HttpFailureKind::InvalidRequest);
    }
}
