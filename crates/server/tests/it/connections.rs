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
