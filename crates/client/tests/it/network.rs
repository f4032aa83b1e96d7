//! Settings of the network: certificate authorities, proxy and idle connections; services that wrap
//! it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{Request, Response};
use tinkex::rest::ListSessions;
use tinkex::{
    CallOptions, Env, ErrorKind, HttpFailure, HttpService, Lane, Network, NetworkBuilder,
    ServiceClient, ServiceClientBuilder,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use crate::raw_server::{LocalTls, RawServer, json_response};

const SESSIONS: &[u8] = br#"{"sessions": ["s"]}"#;

fn network() -> NetworkBuilder {
    Network::builder().env(Env::empty())
}

fn client(url: &str) -> ServiceClientBuilder {
    let options = CallOptions::without_retries();
    let builder = ServiceClient::builder().env(Env::empty()).api_key("tml-x").without_telemetry();
    builder.base_url(url.to_owned()).options(options)
}

async fn list(service: &ServiceClient) -> tinkex::Result<usize> {
    Ok(service.rest().list_sessions(&ListSessions::default()).await?.sessions.len())
}

#[tokio::test]
async fn a_server_with_a_certificate_of_a_given_authority_is_trusted() {
    let LocalTls { acceptor, certificate } = LocalTls::new();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("https://localhost:{}", listener.local_addr().unwrap().port());
    #[expect(clippy::disallowed_methods, reason = "a test server")]
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let Ok(mut stream) = acceptor.accept(stream).await else { continue };
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                let Ok(byte) = stream.read_u8().await else { break };
                head.push(byte);
            }
            let response = String::from_utf8(json_response(SESSIONS)).unwrap();
            let response = response.replacen("\r\n", "\r\nconnection: close\r\n", 1);
            let _ = stream.write_all(response.as_bytes()).await;
            let _ = stream.shutdown().await;
        }
    });
    let trusted = network().ca_certificates(certificate).build().unwrap();
    assert_eq!(list(&client(&url).network(trusted).build().unwrap()).await.unwrap(), 1);
    let default = client(&url).network(network().build().unwrap()).build().unwrap();
    assert_eq!(list(&default).await.unwrap_err().kind(), ErrorKind::Certificate);
}

#[tokio::test]
async fn requests_go_through_the_proxy_unless_it_is_disabled() {
    let proxy = RawServer::new(|request| {
        assert!(request.head.contains(" http://api.test/api/v1/"), "{}", request.head);
        assert!(request.head.contains("proxy-authorization: basic "), "{}", request.head);
        json_response(SESSIONS)
    });
    let proxy = proxy.start().await;
    let address = proxy.url.strip_prefix("http://").unwrap();
    let with_password = format!("http://user:hush@{address}");
    let service = client("http://api.test");
    let proxied = network().proxy(&*with_password).build().unwrap();
    assert!(!format!("{proxied:?}").contains("hush"));
    assert_eq!(list(&service.clone().network(proxied).build().unwrap()).await.unwrap(), 1);

    let server = RawServer::new(|_| json_response(SESSIONS)).start().await;
    let env = Env::from_pairs([("HTTP_PROXY", &*with_password)]);
    let direct = Network::builder().env(env).without_proxy().build().unwrap();
    assert_eq!(list(&client(&server.url).network(direct).build().unwrap()).await.unwrap(), 1);
}

/// Bug: the API key of a local server was sent to the proxy, in plain text.
#[tokio::test]
async fn requests_to_loopback_addresses_bypass_the_proxies_of_the_environment() {
    let proxy = RawServer::new(|request| panic!("the proxy received {}", request.head));
    let proxy = proxy.start().await;
    let server = RawServer::new(|_| json_response(SESSIONS)).start().await;
    let port = server.url.rsplit_once(':').unwrap().1;
    for no_proxy in ["", "example.com", "*"] {
        let variables = ["HTTP_PROXY", "http_proxy", "ALL_PROXY"].map(|name| (name, &*proxy.url));
        let env = Env::from_pairs(variables.into_iter().chain([("NO_PROXY", no_proxy)]));
        for host in ["127.0.0.1", "localhost", "LOCALHOST", "[::ffff:127.0.0.1]"] {
            let url = format!("http://{host}:{port}");
            let direct = Network::builder().env(env.clone()).build().unwrap();
            let service = client(&url).network(direct).build().unwrap();
            assert_eq!(list(&service).await.unwrap(), 1, "{url}");
        }
    }
    assert_eq!(proxy.connections.load(Ordering::Relaxed), 0);
    // Other hosts are reached through the proxy.
    let proxy = RawServer::new(|_| json_response(SESSIONS)).start().await;
    let env = Env::from_pairs([("HTTP_PROXY", &*proxy.url)]);
    let proxied = Network::builder().env(env).build().unwrap();
    let service = client("http://api.test").network(proxied).build().unwrap();
    assert_eq!(list(&service).await.unwrap(), 1);
}

#[tokio::test]
async fn clients_of_one_network_share_the_idle_connections_that_it_keeps() {
    for (kept, expected) in [(0, 4), (1, 1)] {
        let server = RawServer::new(|_| json_response(SESSIONS)).start().await;
        let network = network().max_idle_connections(kept).build().unwrap();
        for _ in 0..4 {
            let service = client(&server.url).network(network.clone()).build().unwrap();
            // One request on one lane.
            assert!(service.rest().get_api_key().await.is_err());
        }
        assert_eq!(server.connections.load(Ordering::Relaxed), expected, "{kept}");
    }
}

/// Bug: the cause was only in the source of the error.
#[tokio::test]
async fn the_message_of_a_failed_connection_ends_with_its_cause() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let error = list(&client(&url).build().unwrap()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Connect);
    let message = error.to_string();
    assert!(
        message.ends_with(&format!("connection to {url} failed: Connection refused")),
        "{message}"
    );

    let failing = client("http://api.test").http(|_: Request<Bytes>| async {
        Err(HttpFailure::connect("failed to lookup address information"))
    });
    let error = list(&failing.build().unwrap()).await.unwrap_err();
    let cause = "connection to http://api.test failed: failed to lookup address information";
    assert!(error.to_string().ends_with(cause), "{error}");
}

/// Counts the requests that it passes on.
struct Counting(Network, Arc<AtomicUsize>);

impl HttpService for Counting {
    fn send(
        &self,
        lane: Lane,
        request: Request<Bytes>,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>> {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.send(lane, request, timeout)
    }
}

#[tokio::test]
async fn a_service_of_the_program_can_wrap_the_network() {
    let server = RawServer::new(|_| json_response(SESSIONS)).start().await;
    let count = Arc::new(AtomicUsize::new(0));
    let counting = Counting(network().build().unwrap(), Arc::clone(&count));
    let service = client(&server.url).http(counting).build().unwrap();
    assert_eq!(list(&service).await.unwrap(), 1);
    let config = 2;
    assert_eq!(count.load(Ordering::Relaxed), config + 1);
}
