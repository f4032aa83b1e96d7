//! HTTP/2: requests do not queue behind the stream limit of one connection.

use std::convert::Infallible;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use futures_util::future::join_all;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tinkex::{SamplingParams, ServiceClient};
use tinkex_wire::PROTO;
use tokio::net::TcpListener;
use tokio::sync::Barrier;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};

/// Number of concurrent samples: three times the stream limit of one connection.
const SAMPLES: usize = 300;
/// Stream limit of one connection.
const STREAMS: u32 = 100;

struct Server {
    /// Released once all samples have been submitted.
    submitted: Barrier,
    polled: Barrier,
    connections: AtomicUsize,
}

async fn respond(server: Arc<Server>, request: Request<Incoming>) -> Response<Full<Bytes>> {
    assert_eq!(request.version(), http::Version::HTTP_2);
    let path = request.uri().path().trim_start_matches("/api/v1/").to_owned();
    let body = match path.as_str() {
        "create_session" => r#"{"session_id": "s"}"#,
        "create_sampling_session" => r#"{"sampling_session_id": "s:sample:0"}"#,
        "asample" => {
            server.submitted.wait().await;
            r#"{"request_id": "q"}"#
        }
        "retrieve_future" => {
            server.polled.wait().await;
            let one_token = Full::new(Bytes::from_static(b"\x0a\x06\x12\x04\x07\0\0\0"));
            return Response::builder().header("content-type", PROTO).body(one_token).unwrap();
        }
        "telemetry" => r#"{"status": "accepted"}"#,
        _ => "{}",
    };
    Response::new(Full::new(Bytes::from_static(body.as_bytes())))
}

/// The client runs in a process of its own, because it trusts the server's certificate through an
/// environment variable.
#[tokio::test(flavor = "multi_thread")]
#[expect(clippy::disallowed_methods, reason = "a test server")]
async fn hundreds_of_requests_are_in_flight_at_once() {
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let trusted = folder.path().join("trusted.pem");
    std::fs::write(&trusted, made.cert.pem()).unwrap();
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(made.signing_key.serialize_der()));
    let provider = Arc::new(tokio_rustls::rustls::crypto::ring::default_provider());
    let mut tls = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key)
        .unwrap();
    tls.alpn_protocols = vec![b"h2".to_vec()];

    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = Arc::new(Server {
        submitted: Barrier::new(SAMPLES),
        polled: Barrier::new(SAMPLES),
        connections: AtomicUsize::new(0),
    });
    let accepting = tokio::task::spawn(serve(listener, Arc::new(tls), Arc::clone(&server)));
    let client = tokio::task::spawn_blocking(move || {
        Command::new(std::env::current_exe().unwrap())
            .args(["http2::client_process", "--exact", "--ignored", "--nocapture"])
            .env("SSL_CERT_FILE", trusted)
            .env("TINKER_BASE_URL", format!("https://localhost:{port}"))
            .env("TINKER_API_KEY", "tml-http2")
            .output()
            .unwrap()
    });
    let output = client.await.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"));
    // Fifty requests per connection: six for samples, six for polls, and a few others.
    let connections = server.connections.load(Ordering::Relaxed);
    assert!((12..40).contains(&connections), "{connections} connections");
    accepting.abort();
}

#[expect(clippy::disallowed_methods, reason = "a test server")]
async fn serve(listener: TcpListener, tls: Arc<ServerConfig>, server: Arc<Server>) {
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        let tls = TlsAcceptor::from(Arc::clone(&tls));
        let server = Arc::clone(&server);
        tokio::spawn(async move {
            let Ok(stream) = tls.accept(stream).await else { return };
            server.connections.fetch_add(1, Ordering::Relaxed);
            let service = hyper::service::service_fn(move |request| {
                let server = Arc::clone(&server);
                async move { Ok::<_, Infallible>(respond(server, request).await) }
            });
            let _ = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                .max_concurrent_streams(STREAMS)
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "run by hundreds_of_requests_are_in_flight_at_once, in a process of its own"]
async fn client_process() {
    let service = ServiceClient::from_env().unwrap();
    let sampler = service.create_sampling_client("base").await.unwrap();
    let params = SamplingParams::new().max_tokens(1);
    let samples = (0..SAMPLES).map(|_| sampler.sample([1, 2], params.clone()));
    for response in join_all(samples).await {
        assert_eq!(response.unwrap().sequences[0].tokens[..], [7]);
    }
}
