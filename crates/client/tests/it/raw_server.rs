//! [`RawServer`]: a TCP server that writes the bytes of its responses as scripted.
//!
//! It exists beside [`FakeServer`](tinkex::testing::FakeServer), which replaces the network, for
//! tests of the network itself: broken bodies, closed connections and the reuse of connections.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};

/// Server end of TLS connections to `localhost`, with a certificate that only its own authority
/// vouches for.
pub(crate) struct LocalTls {
    pub(crate) acceptor: TlsAcceptor,
    /// The certificate in PEM format.
    pub(crate) certificate: String,
}

impl LocalTls {
    pub(crate) fn new() -> Self {
        let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(made.signing_key.serialize_der()));
        let provider = Arc::new(tokio_rustls::rustls::crypto::ring::default_provider());
        let tls = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![made.cert.der().clone()], key)
            .unwrap();
        Self { acceptor: TlsAcceptor::from(Arc::new(tls)), certificate: made.cert.pem() }
    }
}

/// Closes the connection instead of responding.
pub(crate) const CLOSES_AT_ONCE: &[u8] = b"";
/// Closes the connection in the middle of the response body.
pub(crate) const CLOSES_MID_BODY: &[u8] =
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n{\"metr";

/// Returns the response to a request.
type Respond = dyn Fn(&RawRequest) -> Vec<u8> + Send + Sync;

/// Request that the server received.
pub(crate) struct RawRequest {
    /// Request line and headers in lower case, with their line ends.
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl RawRequest {
    /// Returns the path, without the `/api/v1/` of the API.
    pub(crate) fn path(&self) -> &str {
        self.head.split(' ').nth(1).unwrap().trim_start_matches("/api/v1/")
    }
}

/// Server that has not been started.
pub(crate) struct RawServer(Arc<Respond>);

/// Server that listens on loopback until the runtime ends.
pub(crate) struct RunningServer {
    pub(crate) url: String,
    /// Number of connections that it has accepted.
    pub(crate) connections: Arc<AtomicUsize>,
    /// Has a permit for each connection that was closed.
    pub(crate) closed: Arc<Semaphore>,
}

impl RawServer {
    pub(crate) fn new(respond: impl Fn(&RawRequest) -> Vec<u8> + Send + Sync + 'static) -> Self {
        Self(Arc::new(respond))
    }

    /// Starts the server on a free port.
    pub(crate) async fn start(self) -> RunningServer {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let connections = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&connections);
        let closed = Arc::new(Semaphore::new(0));
        let closing = Arc::clone(&closed);
        let accept = async move {
            while let Ok((stream, _)) = listener.accept().await {
                counter.fetch_add(1, Ordering::Relaxed);
                let respond = Arc::clone(&self.0);
                let closing = Arc::clone(&closing);
                #[expect(clippy::disallowed_methods, reason = "a test server")]
                tokio::spawn(async move {
                    serve(stream, respond).await;
                    closing.add_permits(1);
                });
            }
        };
        #[expect(clippy::disallowed_methods, reason = "a test server")]
        tokio::spawn(accept);
        RunningServer { url, connections, closed }
    }
}

/// Returns a successful response with a JSON body.
pub(crate) fn json_response(body: &[u8]) -> Vec<u8> {
    response(body, "")
}

/// Returns a successful response with additional headers, each with its line end.
pub(crate) fn response(body: &[u8], headers: &str) -> Vec<u8> {
    let start = "HTTP/1.1 200 OK\r\ncontent-type: application/json";
    let length = body.len();
    let head = format!("{start}\r\n{headers}content-length: {length}\r\n\r\n");
    [head.as_bytes(), body].concat()
}

async fn serve(mut stream: TcpStream, respond: Arc<Respond>) {
    while let Some(request) = read_request(&mut stream).await {
        let response = respond(&request);
        let closes = [CLOSES_AT_ONCE, CLOSES_MID_BODY].contains(&&*response);
        if stream.write_all(&response).await.is_err() || closes {
            return;
        }
    }
}

/// Reads a request, or returns `None` at the end of the connection.
async fn read_request(stream: &mut TcpStream) -> Option<RawRequest> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.ok()?);
    }
    let head = String::from_utf8(head).unwrap().to_ascii_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let mut body = vec![0; length.map_or(0, |length| length.trim().parse().unwrap())];
    stream.read_exact(&mut body).await.ok()?;
    Some(RawRequest { head, body })
}
