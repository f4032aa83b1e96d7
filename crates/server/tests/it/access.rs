//! Access control, and malformed requests on every route.

use serde_json::json;
use tinkex_server::{Server, StartError};
use tinkex_wire::{BodyCodec, Route};

use crate::harness::{TestServer, create_model, options};

#[tokio::test(flavor = "multi_thread")]
async fn a_public_address_needs_an_api_key() {
    let data = tempfile::tempdir().unwrap();
    let open = options(data.path()).address(([0, 0, 0, 0], 0).into());
    assert!(matches!(Server::start(open.clone()).await, Err(StartError::UnprotectedAddress(_))));
    let empty = Server::start(open.clone().api_key("")).await;
    assert!(matches!(empty, Err(StartError::EmptyApiKey)));
    assert!(Server::start(open.api_key("tml-secret")).await.is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_need_the_api_key() {
    let test_server =
        TestServer::with(|options| *options = options.clone().api_key("tml-secret")).await;
    let http = test_server.http();
    let path = "/api/v1/get_server_capabilities";
    for (key, status) in [("tml-secret", 200), ("tml-secre", 401), ("", 401), ("tml-secret2", 401)]
    {
        assert_eq!(http.send("GET", path, &[("x-api-key", key)], vec![]).await.0, status, "{key}");
    }
    assert_eq!(http.get("/api/v1/healthz").await, (200, json!({"status": "ok"})));
    assert_eq!(http.get("/metrics").await.0, 401);
}

#[tokio::test(flavor = "multi_thread")]
async fn web_pages_are_rejected_without_a_key() {
    let test_server = TestServer::new().await;
    let origin = [("origin", "https://example.com")];
    let response = test_server.http().send("GET", "/api/v1/sessions", &origin, vec![]).await;
    assert_eq!(response.0, 403);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_servers_cannot_share_a_data_directory() {
    let test_server = TestServer::new().await;
    let second = Server::start(options(test_server.data.path())).await;
    assert!(matches!(second, Err(StartError::DataDirInUse(_))));
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_bodies_are_rejected_with_a_detail_on_every_route() {
    let test_server = TestServer::with(|options| options.limits.body_bytes = 1 << 20).await;
    let http = test_server.http();
    let mut bodies: Vec<Vec<u8>> = vec![
        b"".to_vec(),
        b"{".to_vec(),
        b"[]".to_vec(),
        b"{}".to_vec(),
        b"\xFF\xFE".to_vec(),
        b"{\"model_id\":\"x\",\"seq_id\":1,\"path\":\"../x\",\"session_id\":7}".to_vec(),
        vec![b'['; 100_000],
    ];
    bodies.push(vec![b'x'; (1 << 20) + 1]);
    for route in Route::ALL.iter().chain(Route::EXTENSIONS) {
        let params = vec!["..%2F..%2Fetc"; route.template().matches('{').count()];
        let mut path = route.template().to_owned();
        for param in params {
            let start = path.find('{').unwrap();
            let end = path.find('}').unwrap();
            path.replace_range(start..=end, param);
        }
        for body in &bodies {
            for encoding in [None, Some("zstd"), Some("br")] {
                let headers: Vec<(&str, &str)> =
                    encoding.map(|encoding| ("content-encoding", encoding)).into_iter().collect();
                let (status, response) =
                    http.send(route.method().as_str(), &path, &headers, body.clone()).await;
                let accepted = (200..300).contains(&status)
                    && (route.body() == BodyCodec::Empty || body.starts_with(b"{"));
                let detail = &response["detail"];
                let has_detail = detail.is_string() || response["error"]["message"].is_string();
                let rejected = (400..500).contains(&status) && has_detail;
                assert!(accepted || rejected, "{route} {status} {response}");
            }
        }
    }
    let (_, sessions) = http.get("/api/v1/sessions").await;
    assert_eq!(sessions, json!({"sessions": []}), "no session was created");
    let (_, runs) = http.get("/api/v1/training_runs").await;
    assert_eq!(runs["cursor"]["total_count"], 0);
    let (status, response) = http.get("/v2/models").await;
    assert_eq!(status, 404);
    assert!(response["detail"].as_str().unwrap().contains("/api/v1"), "{response}");
    assert_eq!(http.get("/api/v1/asample").await.0, 405);
}

#[tokio::test(flavor = "multi_thread")]
async fn unsupported_routes_explain_why() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let (status, response) = http.get("/api/v1/sessions/x/trace_export").await;
    assert_eq!(status, 400);
    assert!(response["detail"].as_str().unwrap().contains("this server"), "{response}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sampling_client_cannot_acknowledge_other_requests() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let session = http.session().await;
    let (_, future) = http.post("/create_model", create_model(&session, 0)).await;
    http.result(&future).await;
    let request = json!({
        "target": {"sampling_session_id": http.sampler(&session).await, "cloned_sampler_id": 0},
        "retrieved_request_ids": [future["request_id"]], "timeout": 0.0,
    });
    let (status, response) = http.post("/retrieve_futures", request).await;
    assert_eq!(status, 200, "{response}");
    assert!(http.result(&future).await["model_id"].is_string(), "the result is still available");
}
