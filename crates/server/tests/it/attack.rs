//! Hostile clients: slow, malformed, oversized and forged requests.

use std::time::Duration;

use serde_json::json;
use tinkex_server::{Server, StartAction, StartError};

use crate::harness::{TestServer, options};
use crate::raw::Raw;

fn raw(test_server: &TestServer) -> Raw {
    Raw::new(&test_server.server.base_url())
}

/// Sends bytes and returns the status, or `None` if the connection was closed.
async fn status_of(test_server: &TestServer, bytes: &[u8]) -> Option<u16> {
    let mut raw = raw(test_server);
    raw.write(bytes).await;
    raw.read().await.map(|response| response.status)
}

async fn assert_healthy(test_server: &TestServer) {
    assert_eq!(test_server.http().get("/api/v1/healthz").await, (200, json!({"status": "ok"})));
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_clients_time_out() {
    let test_server =
        TestServer::with(|options| options.timeouts.client_io = Duration::from_millis(50)).await;
    // Incomplete headers, an incomplete body, incomplete chunks.
    assert_eq!(status_of(&test_server, b"GET /api/v1/healthz HTTP/1.1\r\nhost: 127").await, None);
    let head = "POST /api/v1/create_session HTTP/1.1\r\nhost: 127.0.0.1\r\n";
    let half = format!("{head}content-length: 100\r\n\r\n{{\"tags\"");
    assert_eq!(status_of(&test_server, half.as_bytes()).await, Some(408));
    for piece in ["5\r\n{\"tag", "ffffffffffffffff\r\n{}"] {
        let pieces = format!("{head}transfer-encoding: chunked\r\n\r\n{piece}");
        assert_eq!(status_of(&test_server, pieces.as_bytes()).await, Some(408));
    }
    assert_healthy(&test_server).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_headers_and_chunks_are_rejected() {
    let test_server = TestServer::with(|options| options.limits.body_bytes = 1 << 20).await;
    let long = format!("GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nx: {}\r\n\r\n", "y".repeat(200_000));
    assert_eq!(status_of(&test_server, long.as_bytes()).await, Some(431));
    let many = "x: y\r\n".repeat(500);
    let many = format!("GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n{many}\r\n");
    assert_eq!(status_of(&test_server, many.as_bytes()).await, Some(431));
    let head = "POST /api/v1/create_session HTTP/1.1\r\nhost: 127.0.0.1\r\n";
    for (rest, expected) in [
        ("transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n", 400),
        ("transfer-encoding: gzip\r\n\r\n{}", 400),
        ("content-length: 2\r\ncontent-length: 3\r\n\r\n{}", 400),
        ("content-length: -1\r\n\r\n{}", 400),
        ("content-length: 99999999999\r\n\r\n{}", 413),
    ] {
        assert_eq!(
            status_of(&test_server, format!("{head}{rest}").as_bytes()).await,
            Some(expected),
            "{rest}"
        );
    }
    let mut pieces = format!("{head}transfer-encoding: chunked\r\n\r\n").into_bytes();
    for _ in 0..20 {
        pieces.extend(format!("{:x}\r\n", 100_000).bytes().chain([b'x'; 100_000]).chain(*b"\r\n"));
    }
    assert_eq!(status_of(&test_server, &pieces).await, Some(413));
    assert_eq!(test_server.http().get("/api/v1/sessions").await.1, json!({"sessions": []}));
    assert_healthy(&test_server).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn path_traversal_is_rejected() {
    let test_server = TestServer::new().await;
    let mut raw = raw(&test_server);
    for path in [
        "/files/../lock",
        "/files/x/../../payloads",
        "/files/%2e%2e/%2e%2e/payloads",
        "/files//etc/passwd",
        "/files/x/%00",
        "/../payloads",
        "/api/v1/../../payloads",
        "/api/v1/training_runs/..%2f..%2fpayloads",
        "/api/v1/training_runs/../checkpoints",
    ] {
        let response = raw.call("GET", path, &[], b"").await.unwrap();
        assert_eq!(response.status, 404, "{path}: {}", String::from_utf8_lossy(&response.body));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn foreign_host_names_are_rejected_without_a_key() {
    let test_server = TestServer::new().await;
    let port = test_server.server.address().port();
    for (host, expected) in [
        (format!("127.0.0.1:{port}"), 200),
        (format!("localhost:{port}"), 200),
        ("[::1]".to_owned(), 200),
        (format!("rebound.example:{port}"), 403),
        ("127.0.0.1.example".to_owned(), 403),
        ("a b".to_owned(), 403),
    ] {
        let request = format!("GET /api/v1/sessions HTTP/1.1\r\nhost: {host}\r\n\r\n");
        assert_eq!(status_of(&test_server, request.as_bytes()).await, Some(expected), "{host}");
    }
    let test_server = TestServer::with(|options| *options = options.clone().api_key("tml-k")).await;
    let request = "GET /api/v1/sessions HTTP/1.1\r\nhost: my.example\r\nx-api-key: tml-k\r\n\r\n";
    assert_eq!(
        status_of(&test_server, request.as_bytes()).await,
        Some(200),
        "the key is sufficient"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn small_requests_cannot_allocate_much_memory() {
    let test_server = TestServer::with(|options| options.limits.body_bytes = 4 << 20).await;
    let http = test_server.http();
    let session = http.session().await;
    let sampler = http.sampler(&session).await;
    // Decompression bombs: 64 MiB of zeros in a few bytes, sent concurrently.
    let zeros = std::io::repeat(0);
    let mut bomb = Vec::new();
    let mut encoder = zstd::stream::write::Encoder::new(&mut bomb, 1).unwrap();
    std::io::copy(&mut std::io::Read::take(zeros, 64 << 20), &mut encoder).unwrap();
    encoder.finish().unwrap();
    let headers = [("content-encoding", "zstd")];
    let send = || http.send("POST", "/api/v1/forward_backward", &headers, bomb.clone());
    for (status, response) in futures_util::future::join_all((0..20).map(|_| send())).await {
        assert_eq!(status, 413, "{response}");
    }
    // A huge number of samples.
    let request = |samples: u64, tokens: u64| {
        json!({
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]}, "num_samples": samples,
            "sampling_params": {"max_tokens": tokens}, "sampling_session_id": sampler,
        })
    };
    for (samples, tokens) in [(u64::from(u32::MAX), 1), (1 << 20, 200), (20_000, 1)] {
        let (status, rejected) = http.post("/asample", request(samples, tokens)).await;
        assert_eq!(status, 400, "{rejected}");
        assert!(rejected["detail"].as_str().unwrap().contains("num_samples"), "{rejected}");
    }
    // Tables far larger than the request.
    let targets = json!({
        "data": [5], "dtype": "int64", "shape": [1, 1_u64 << 24],
        "sparse_crow_indices": [0, 1], "sparse_col_indices": [0],
    });
    for (field, value) in [
        ("topk_prompt_logprobs", json!(1 << 23)),
        ("prompt_alt_tokens_k", json!(1 << 23)),
        ("topk_sample_logprobs", json!(1 << 23)),
        ("target_prompt_logprobs", targets),
    ] {
        let mut request = request(1, 2);
        request["prompt"]["chunks"][0]["tokens"] = json!([5, 6]);
        request[field] = value;
        let (status, rejected) = http.post("/asample", request).await;
        assert_eq!(status, 400, "{rejected}");
        let detail = rejected["detail"].as_str().unwrap();
        assert!(detail.contains(field) && detail.contains("vocabulary"), "{rejected}");
    }
    // A large session record, which would be kept in memory.
    let (status, _) = http
        .post("/create_session", json!({"tags": ["x".repeat(2 << 20)], "sdk_version": "1"}))
        .await;
    assert_eq!(status, 413);
    // Deeply nested JSON.
    let deep = format!("{}1{}", "[".repeat(5_000), "]".repeat(5_000));
    let body =
        format!("{{\"tags\": [], \"sdk_version\": \"1\", \"user_metadata\": {{\"x\": {deep}}}}}");
    let (status, _) = http.send("POST", "/api/v1/create_session", &[], body.into_bytes()).await;
    assert_eq!(status, 422);
    assert_healthy(&test_server).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn thousands_of_sessions_have_distinct_ids() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let all = futures_util::future::join_all((0..2_000).map(|_| http.session())).await;
    let distinct: std::collections::HashSet<&String> = all.iter().collect();
    assert_eq!(distinct.len(), 2_000);
    assert_eq!(http.metrics().await["sessions"], 2_000);
    let (_, page) = http.get("/api/v1/sessions?limit=1000&offset=1500").await;
    assert_eq!(page["sessions"].as_array().unwrap().len(), 500);
}

#[tokio::test(flavor = "multi_thread")]
async fn start_errors_name_their_cause() {
    let test_server = TestServer::new().await;
    let data = tempfile::tempdir().unwrap();
    let in_use = options(data.path()).address(test_server.server.address());
    let error = Server::start(in_use).await.unwrap_err();
    assert!(matches!(error, StartError::Io { action: StartAction::Listen, .. }), "{error}");
    assert!(error.to_string().contains(&test_server.server.address().to_string()), "{error}");
    // The failed start has released the data folder.
    Server::start(options(data.path())).await.unwrap().stop().await;

    let file = data.path().join("file");
    std::fs::write(&file, "x").unwrap();
    let error = Server::start(options(&file)).await.unwrap_err();
    assert!(matches!(error, StartError::Io { action: StartAction::Create, .. }), "{error}");

    let other = tempfile::tempdir().unwrap();
    std::fs::write(other.path().join("metadata.sqlite"), "another program's file").unwrap();
    let error = Server::start(options(other.path())).await.unwrap_err().to_string();
    assert!(error.contains("metadata.sqlite: file is not a database"), "{error}");
}

/// Sends SIGTERM in the middle of a long sampling request.
#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread")]
async fn a_long_request_does_not_delay_the_shutdown() {
    use crate::harness::Http;
    use crate::process::Process;

    let data = tempfile::tempdir().unwrap();
    let process = Process::start(data.path());
    let http = Http::new(&process.url);
    let session = http.session().await;
    let sampler = http.sampler(&session).await;
    let request = |seq: u64, samples: u64| {
        json!({
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]}, "num_samples": samples,
            "seq_id": seq, "sampling_params": {"max_tokens": 200, "seed": 3, "stop": []},
            "sampling_session_id": sampler,
        })
    };
    let (_, short) = http.post("/asample", request(0, 1)).await;
    let tokens = http.sampled(&short).await;
    let (_, long) = http.post("/asample", request(1, 500)).await;
    assert!(process.terminate().success());
    let process = Process::start(data.path());
    let http = Http::new(&process.url);
    let (status, poll) =
        http.post("/retrieve_future", json!({"request_id": long["request_id"]})).await;
    assert_eq!(status, 200, "the request is restored: {poll}");
    let (_, again) = http.post("/asample", request(2, 1)).await;
    assert_eq!(http.sampled(&again).await, tokens);
}
