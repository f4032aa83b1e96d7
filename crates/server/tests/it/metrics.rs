//! `/metrics`.

use serde_json::json;

use crate::harness::{TestServer, create_model};

#[tokio::test(flavor = "multi_thread")]
async fn metrics_state_the_memory_limits() {
    let test_server = TestServer::with(|options| options.limits.training_bytes = 123 << 20).await;
    let metrics = test_server.http().metrics().await;
    assert_eq!(metrics["limit_bytes{memory=\"training\"}"], 123 << 20);
    assert_eq!(metrics["limit_bytes{memory=\"kv_cache\"}"], 64 << 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_contain_the_durations_of_requests() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let session = http.session().await;
    let (_, created) = http.post("/create_model", create_model(&session, 0)).await;
    http.result(&created).await;
    assert_eq!(http.get("/v1/models").await.0, 200);
    assert_eq!(http.get("/api/v1/healthz").await, (200, json!({"status": "ok"})));
    let metrics = http.metrics().await;
    assert_eq!(metrics["request_seconds_count{kind=\"create_model\"}"], 1);
    assert_eq!(metrics["request_seconds_bucket{kind=\"create_model\",le=\"+Inf\"}"], 1);
    assert_eq!(metrics["http_request_seconds_count{endpoint=\"inference\"}"], 1);
    assert!(metrics["http_request_seconds_count{endpoint=\"poll\"}"] >= 1);
    assert!(metrics["http_request_seconds_count{endpoint=\"api\"}"] >= 3);
}

/// An alert on a metric that does not exist never fires, and a panel stays empty.
#[tokio::test(flavor = "multi_thread")]
async fn the_alerts_and_panels_use_metrics_that_exist() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let session = http.session().await;
    let (_, created) = http.post("/create_model", create_model(&session, 0)).await;
    http.result(&created).await;
    let metrics = http.metrics().await;
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/operations/");
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    for (file, least) in [("prometheus-rules.yml", 5), ("grafana-dashboard.json", 15)] {
        let text = std::fs::read_to_string(format!("{folder}{file}")).unwrap();
        let used: Vec<&str> = text
            .split(|c: char| !is_name(c))
            .filter_map(|word| word.strip_prefix("tinkex_"))
            .collect();
        assert!(used.len() >= least, "{used:?}");
        for name in used {
            let exists = |metric: &String| metric.split('{').next() == Some(name);
            assert!(metrics.keys().any(exists), "{file}: tinkex_{name}");
        }
    }
    let dashboard = std::fs::read_to_string(format!("{folder}grafana-dashboard.json")).unwrap();
    let dashboard: serde_json::Value = serde_json::from_str(&dashboard).unwrap();
    assert!(dashboard["panels"].as_array().unwrap().len() > 10);
}
