//! Retention: removal of old checkpoints and runs.

use std::time::Duration;

use serde_json::{Value, json};

use crate::harness::{Http, TestServer};

/// Waits until the checkpoints of a run have these names.
async fn wait_for_names(http: &Http, model: &str, expected: &[&str]) {
    loop {
        let (status, list) = http.get(&format!("/api/v1/training_runs/{model}/checkpoints")).await;
        assert_eq!(status, 200, "{list}");
        let rows = list["checkpoints"].as_array().unwrap();
        let mut names: Vec<&str> = rows
            .iter()
            .filter_map(|row| row["checkpoint_id"].as_str()?.split('/').nth(1))
            .collect();
        names.sort_unstable();
        assert!(expected.iter().all(|name| names.contains(name)), "{names:?}");
        if names.len() == expected.len() {
            return;
        }
        tokio::task::yield_now().await;
    }
}

async fn put(http: &Http, path: &str, body: &Value) {
    let (status, response) = http.send("PUT", path, &[], body.to_string().into_bytes()).await;
    assert_eq!(status, 200, "{response}");
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_newest_checkpoints_of_a_run_are_kept() {
    let test_server = TestServer::with(|options| {
        options.keep_checkpoints = Some(2);
        // The first interval is reached after the checkpoints are saved and changed.
        options.timeouts.expiry_interval = Duration::from_secs(3_600);
    })
    .await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    for (n, name) in (1..).zip(["published", "ttl", "a", "b", "c", "d"]) {
        http.save(&model, n, name).await;
    }
    let of = |name: &str| format!("/api/v1/training_runs/{model}/checkpoints/weights/{name}");
    let publish = format!("{}/publish", of("published"));
    assert_eq!(http.send("POST", &publish, &[], Vec::new()).await.0, 200);
    put(&http, &format!("{}/ttl", of("ttl")), &json!({"ttl_seconds": 86_400})).await;
    // A start removes expired objects.
    let TestServer { server, data } = test_server;
    server.stop().await;
    let mut options = crate::harness::options(data.path());
    options.keep_checkpoints = Some(2);
    let server = tinkex_server::Server::start(options).await.unwrap();
    let http = Http::new(&server.base_url());
    wait_for_names(&http, &model, &["c", "d", "published", "ttl"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unused_runs_are_deleted_unless_a_checkpoint_is_published() {
    let test_server = TestServer::with(|options| {
        options.run_ttl = Some(Duration::ZERO);
        options.timeouts.expiry_interval = Duration::from_millis(1);
    })
    .await;
    let http = test_server.http();
    let open = http.session().await;
    let open_run = http.model(&open).await;
    let mut runs = Vec::new();
    for name in ["private", "public"] {
        let session = http.session().await;
        let model = http.model(&session).await;
        http.save(&model, 1, name).await;
        runs.push((session, model));
    }
    let publish = format!("/api/v1/training_runs/{}/checkpoints/weights/public/publish", runs[1].1);
    assert_eq!(http.send("POST", &publish, &[], Vec::new()).await.0, 200);
    for (session, _) in runs.iter().rev() {
        let finish = json!({"reason": {"type": "success"}, "detail": null});
        let (status, body) = http.post(&format!("/sessions/{session}/finish"), finish).await;
        assert_eq!(status, 200, "{body}");
    }
    // The run without a published checkpoint is deleted; the others have been examined too.
    while http.get(&format!("/api/v1/training_runs/{}", runs[0].1)).await.0 != 404 {
        tokio::task::yield_now().await;
    }
    for model in [&runs[1].1, &open_run] {
        assert_eq!(http.get(&format!("/api/v1/training_runs/{model}")).await.0, 200, "{model}");
    }
}
