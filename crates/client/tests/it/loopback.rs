//! The network stack over loopback, against misbehaving servers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tinkex::rest::ListSessions;
use tinkex::{AdamParams, Env, ErrorKind, Hint, RetryPolicy, ServiceClient, ServiceClientBuilder};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};

/// How the server handles requests other than those for its configuration.
#[derive(Clone, Copy)]
pub(crate) enum ServerBehavior {
    Respond,
    /// Closes the connection in the middle of the response body.
    CloseMidBody,
    /// Closes the connection instead of responding.
    CloseAtOnce,
    /// Sends bytes that are not HTTP.
    Garbage,
    /// Compresses the response body.
    Zstd,
    /// Sends a body that cannot be decompressed.
    BrokenZstd,
}

/// Starts a server on a free port. Returns its URL and the number of accepted connections.
pub(crate) async fn serve(behavior: ServerBehavior) -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let connections = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&connections);
    let accept = async move {
        while let Ok((stream, _)) = listener.accept().await {
            counter.fetch_add(1, Ordering::Relaxed);
            #[expect(clippy::disallowed_methods, reason = "a test server")]
            tokio::spawn(serve_connection(stream, behavior));
        }
    };
    #[expect(clippy::disallowed_methods, reason = "a test server")]
    tokio::spawn(accept);
    (address, connections)
}

async fn serve_connection(mut stream: TcpStream, behavior: ServerBehavior) {
    while let Some(head) = read_request(&mut stream).await {
        let response: Vec<u8> = if head.contains("/client/") {
            response(b"{}", "")
        } else {
            match behavior {
                ServerBehavior::Respond => response(br#"{"sessions":["s"]}"#, ""),
                ServerBehavior::Zstd => {
                    let body = tinkex::wire::codec::compress::compress(br#"{"sessions":["z"]}"#);
                    response(&body.unwrap(), "content-encoding: zstd\r\n")
                }
                ServerBehavior::BrokenZstd => {
                    response(b"not compressed", "content-encoding: zstd\r\n")
                }
                ServerBehavior::CloseMidBody => {
                    b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{\"sess".to_vec()
                }
                ServerBehavior::CloseAtOnce => return,
                ServerBehavior::Garbage => b"not an HTTP response\r\n\r\n".to_vec(),
            }
        };
        if stream.write_all(&response).await.is_err()
            || matches!(behavior, ServerBehavior::CloseMidBody if !head.contains("/client/"))
        {
            return;
        }
    }
}

/// Starts a server that trains, and that closes the connection in the middle of its response to
/// the second poll: the first one for the result of an optimizer step. Returns its URL and the
/// number of polls.
async fn serve_training() -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let polls = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&polls);
    let accept = async move {
        while let Ok((stream, _)) = listener.accept().await {
            #[expect(clippy::disallowed_methods, reason = "a test server")]
            tokio::spawn(train_on_connection(stream, Arc::clone(&counter)));
        }
    };
    #[expect(clippy::disallowed_methods, reason = "a test server")]
    tokio::spawn(accept);
    (address, polls)
}

async fn train_on_connection(mut stream: TcpStream, polls: Arc<AtomicUsize>) {
    while let Some(head) = read_request(&mut stream).await {
        let path = head.split(' ').nth(1).unwrap().trim_start_matches("/api/v1/");
        let body: &[u8] = match path {
            "create_session" => br#"{"session_id":"s"}"#,
            "create_model" => br#"{"request_id":"created"}"#,
            "optim_step" => br#"{"request_id":"step"}"#,
            "retrieve_future" => match polls.fetch_add(1, Ordering::Relaxed) {
                0 => br#"{"type":"create_model","model_id":"m"}"#,
                1 => {
                    let cut = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{\"metr";
                    let _ = stream.write_all(cut).await;
                    return;
                }
                _ => br#"{"metrics":{"grad_norm":0.5}}"#,
            },
            _ => b"{}",
        };
        if stream.write_all(&response(body, "")).await.is_err() {
            return;
        }
    }
}

fn response(body: &[u8], headers: &str) -> Vec<u8> {
    let length = body.len();
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n{headers}content-length: {length}\r\n\r\n"
    );
    [head.as_bytes(), body].concat()
}

/// Reads a request and returns its head in lower case.
async fn read_request(stream: &mut TcpStream) -> Option<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.ok()?);
    }
    let head = String::from_utf8(head).unwrap().to_ascii_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let mut body = vec![0; length.map_or(0, |length| length.trim().parse().unwrap())];
    stream.read_exact(&mut body).await.ok()?;
    Some(head)
}

fn client_builder(address: &str) -> ServiceClientBuilder {
    ServiceClient::builder()
        .env(Env::empty())
        .base_url(address)
        .api_key("tml-test")
        .retry(RetryPolicy::disabled())
}

fn client(address: &str) -> ServiceClient {
    client_builder(address).build().unwrap()
}

#[tokio::test]
async fn connections_are_reused() {
    let (address, connections) = serve(ServerBehavior::Respond).await;
    let rest = client(&address).rest();
    for _ in 0..5 {
        let found = rest.list_sessions(&ListSessions::default()).await.unwrap();
        assert_eq!(found.sessions[0], "s");
    }
    // One for each lane: configuration, session, REST.
    assert_eq!(connections.load(Ordering::Relaxed), 3);
}

#[tokio::test]
async fn compressed_responses_are_decoded() {
    let (address, _) = serve(ServerBehavior::Zstd).await;
    let found = client(&address).rest().list_sessions(&ListSessions::default()).await.unwrap();
    assert_eq!(found.sessions[0], "z");
}

#[tokio::test]
async fn broken_connections_are_reported_as_such() {
    for behavior in
        [ServerBehavior::CloseMidBody, ServerBehavior::CloseAtOnce, ServerBehavior::Garbage]
    {
        let (address, _) = serve(behavior).await;
        let error =
            client(&address).rest().list_sessions(&ListSessions::default()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Connect, "{error:?}");
        assert!(error.is_retryable());
        assert!(std::error::Error::source(&error).is_some(), "the cause is kept");
    }
}

/// Covers P4C.2.
#[tokio::test]
async fn without_retries_a_poll_response_that_is_cut_off_fails_its_call_only() {
    let (address, polls) = serve_training().await;
    let service = client(&address);
    let model = service.create_lora_training_client("base").create().await.unwrap();
    let error = model.optim_step(AdamParams::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Connect, "{error:?}");
    assert_eq!(error.request_id().unwrap(), &"step", "the result can be polled later");
    assert_eq!(polls.load(Ordering::Relaxed), 2);
    let next = model.optim_step(AdamParams::default()).await.unwrap();
    assert_eq!(next.metrics["grad_norm"].as_f64(), 0.5);
}

#[tokio::test]
async fn an_unreachable_server_is_reported_as_such() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let error = client(&address).rest().list_sessions(&ListSessions::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Connect);
}

/// A response that cannot be decompressed is not a lost connection: it is not retried.
#[tokio::test]
async fn an_undecodable_body_is_a_decoding_error_and_is_not_retried() {
    let (address, _) = serve(ServerBehavior::BrokenZstd).await;
    let service = client_builder(&address).retry(RetryPolicy::default()).build().unwrap();
    let error = service.rest().list_sessions(&ListSessions::default()).await.unwrap_err();
    assert_eq!((error.kind(), error.attempts()), (ErrorKind::Decode, 1), "{error:?}");
}

#[tokio::test]
async fn an_untrusted_certificate_is_reported_as_such_and_is_not_retried() {
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(made.signing_key.serialize_der()));
    let provider = Arc::new(tokio_rustls::rustls::crypto::ring::default_provider());
    let tls = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key)
        .unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("https://localhost:{}", listener.local_addr().unwrap().port());
    let acceptor = TlsAcceptor::from(Arc::new(tls));
    #[expect(clippy::disallowed_methods, reason = "a test server")]
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let _ = acceptor.accept(stream).await;
        }
    });
    let service = client_builder(&address).retry(RetryPolicy::default()).build().unwrap();
    let error = service.server_capabilities().await.unwrap_err();
    assert_eq!((error.kind(), error.attempts()), (ErrorKind::Certificate, 1), "{error:?}");
    assert_eq!(error.hint(), Some(Hint::CheckCertificate));
}
