//! The limit of connections.

use std::time::Duration;

use tinkex::SamplingParams;

use crate::harness::{MODEL, TestServer};
use crate::raw::Raw;

/// Bug: idle connections kept other clients out until a timeout closed them.
#[tokio::test(flavor = "multi_thread")]
async fn idle_connections_are_closed_for_a_client_that_waits() {
    let test_server = TestServer::with(|options| {
        options.limits.connections = 2;
        // No timeout closes an idle connection during the test.
        options.timeouts.client_io = Duration::from_secs(3_600);
    })
    .await;
    let url = test_server.server.base_url();
    let mut clients: Vec<Raw> = (0..6).map(|_| Raw::new(&url)).collect();
    // In the second round, the connections of all clients but the last two were closed.
    for _ in 0..2 {
        for client in &mut clients {
            let response = client.call("GET", "/api/v1/healthz", &[], b"").await.unwrap();
            assert_eq!(response.status, 200);
        }
    }
}

/// A request in progress is not interrupted.
#[tokio::test(flavor = "multi_thread")]
async fn a_connection_with_a_request_stays_open() {
    let test_server = TestServer::with(|options| {
        options.limits.connections = 2;
        options.timeouts.client_io = Duration::from_secs(3_600);
    })
    .await;
    let url = test_server.server.base_url();
    let mut slow = Raw::new(&url);
    // The server has received the start of the request, and waits for its body.
    let body = r#"{"tags": [], "sdk_version": "0.36.0"}"#;
    let head = format!(
        "POST /api/v1/create_session HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    slow.write(head.as_bytes()).await;
    for _ in 0..4 {
        let mut other = Raw::new(&url);
        let response = other.call("GET", "/api/v1/healthz", &[], b"").await.unwrap();
        assert_eq!(response.status, 200);
    }
    slow.write(body.as_bytes()).await;
    assert_eq!(slow.read().await.unwrap().status, 200);
}

/// Bug: six clients took 40 s for samples that one client got in 5 s, because the unused connections
/// of each kept the others out.
#[tokio::test(flavor = "multi_thread")]
async fn several_clients_share_the_connections_of_a_small_server() {
    let test_server = TestServer::with(|options| {
        options.limits.connections = 24;
        options.timeouts.client_io = Duration::from_secs(3_600);
    })
    .await;
    let mut samples = Vec::new();
    for _ in 0..6 {
        let sampler = test_server.client().create_sampling_client(MODEL).await.unwrap();
        let params = SamplingParams::new().max_tokens(1);
        samples.extend((0..50).map(|n| sampler.sample([5, n], params.clone())));
    }
    for sample in samples {
        assert_eq!(sample.await.unwrap().sequences[0].tokens.len(), 1);
    }
}

/// Bug: `/ui/api/login` read its body without a deadline, and connections that sent one byte each
/// kept all other clients out for as long as they stayed.
#[tokio::test(flavor = "multi_thread")]
async fn connections_that_send_one_byte_do_not_keep_others_out() {
    let test_server = TestServer::with(|options| {
        options.api_key = Some("tml-secret".to_owned().into());
        options.limits.connections = 16;
        options.timeouts.authentication = Duration::ZERO;
        // No timeout closes a connection during the test.
        options.timeouts.client_io = Duration::from_secs(3_600);
    })
    .await;
    let url = test_server.server.base_url();
    let key = [("x-api-key".to_owned(), "tml-secret".to_owned())];
    let sessions =
        "GET /api/v1/sessions HTTP/1.1\r\nhost: localhost\r\nx-api-key: tml-secret\r\n\r\n";
    let mut honest = Raw::new(&url);
    honest.write(sessions.as_bytes()).await;
    assert_eq!(honest.read().await.unwrap().status, 200);
    let login = format!(
        "POST /ui/api/login HTTP/1.1\r\nhost: {0}\r\norigin: http://{0}\r\ncontent-length: 9\r\n\r\n{{",
        url.strip_prefix("http://").unwrap()
    );
    let mut attackers = Vec::new();
    for _ in 0..40 {
        for bytes in [b"G", login.as_bytes()] {
            let mut attacker = Raw::new(&url);
            attacker.write(bytes).await;
            attackers.push(attacker);
        }
        let mut other = Raw::new(&url);
        let response = other.call("GET", "/api/v1/sessions", &key, b"").await.unwrap();
        assert_eq!(response.status, 200);
    }
    // The connection that has authenticated was not closed.
    honest.write(sessions.as_bytes()).await;
    assert_eq!(honest.read().await.unwrap().status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_body_has_a_deadline() {
    let test_server = TestServer::with(|options| {
        options.api_key = Some("tml-secret".to_owned().into());
        options.timeouts.client_io = Duration::from_millis(50);
    })
    .await;
    let url = test_server.server.base_url();
    let host = url.strip_prefix("http://").unwrap();
    for (method, path) in [
        ("POST", "/ui/api/login"),
        ("POST", "/ui/api/download"),
        ("POST", "/api/v1/create_session"),
        ("POST", "/api/v1/asample"),
        ("POST", "/api/v1/forward_backward"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/messages"),
        ("PUT", "/api/v1/imports/import-1"),
    ] {
        let mut client = Raw::new(&url);
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: {host}\r\norigin: http://{host}\r\n\
             x-api-key: tml-secret\r\ncontent-length: 100\r\n\r\n{{"
        );
        client.write(head.as_bytes()).await;
        assert_eq!(client.read().await.unwrap().status, 408, "{path}");
    }
}
