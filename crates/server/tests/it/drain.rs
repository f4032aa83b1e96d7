//! Drain: refusal of new work before a stop.

use std::time::Duration;

use serde_json::{Value, json};
use tinkex_server::Server;
use tinkex_wire::Route;

use crate::harness::{Http, MODEL, TestServer, client, options, step, train, training_client};
use crate::sse::{EventStream, completions_url};

async fn set_drain(http: &Http, method: &str) -> Value {
    let (status, body) = http.send(method, "/api/v1/server/drain", &[], Vec::new()).await;
    assert_eq!(status, 200, "{body}");
    body
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draining_server_refuses_new_work_and_finishes_the_rest() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    let (_, done) = http.post("/optim_step", step(&model, 1, 0.1)).await;
    http.result(&done).await;
    // Number 2 is missing, so this request stays queued.
    let (_, waiting) = http.post("/optim_step", step(&model, 3, 0.1)).await;

    let status = set_drain(&http, "POST").await;
    let expected =
        json!({"draining": true, "requests": 1, "inference_requests": 0, "may_stop": false});
    assert_eq!(status, expected);
    let work = [
        ("/create_session", json!({"tags": [], "user_metadata": {}, "sdk_version": "1"})),
        ("/optim_step", step(&model, 2, 0.1)),
        ("/create_sampling_session", json!({"session_id": session})),
    ];
    for (path, body) in &work {
        let (status, body) = http.post(path, body.clone()).await;
        assert_eq!(status, 503, "{path}: {body}");
        assert!(body["detail"].as_str().unwrap().contains("stop soon"), "{body}");
    }
    let chat = json!({"model": MODEL, "prompt": "a", "max_tokens": 1}).to_string();
    let (status, body) = http.send("POST", "/v1/completions", &[], chat.into_bytes()).await;
    assert_eq!(status, 503, "{body}");
    // Polls, heartbeats and lists work.
    assert!(http.result(&done).await["metrics"].is_object());
    assert_eq!(http.post("/session_heartbeat", json!({"session_id": session})).await.0, 200);
    assert_eq!(http.get("/api/v1/training_runs").await.0, 200);
    assert_eq!(http.get("/api/v1/healthz").await.1, json!({"status": "ok", "draining": true}));
    assert_eq!(http.metrics().await["draining"], 1);

    assert_eq!(set_drain(&http, "DELETE").await["draining"], false);
    assert_eq!(http.get("/api/v1/healthz").await.1, json!({"status": "ok"}));
    let (_, second) = http.post("/optim_step", step(&model, 2, 0.1)).await;
    assert!(http.result(&second).await["metrics"].is_object());
    assert!(http.result(&waiting).await["metrics"].is_object());
    assert_eq!(set_drain(&http, "POST").await["may_stop"], true);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_request_says_when_to_retry() {
    let test_server = TestServer::new().await;
    set_drain(&test_server.http(), "POST").await;
    let url = format!("{}{}", test_server.server.base_url(), Route::CreateSession.template());
    let response = crate::harness::http_client().post(url).body("{}").send().await.unwrap();
    assert_eq!(response.status(), 503);
    assert_eq!(response.headers()["retry-after"], "5");
    assert_eq!(response.headers()["retry-after-ms"], "5000");
}

/// A client retries through a drain and a restart, and gets the losses of an undisturbed run.
#[tokio::test(flavor = "multi_thread")]
async fn training_continues_after_a_rolling_restart_with_the_same_bits() {
    let undisturbed = TestServer::new().await;
    let expected = train(&training_client(&undisturbed.client()).await, 4).await;

    let TestServer { server, data } = TestServer::new().await;
    let address = server.address();
    let service = client(&server.base_url());
    let model = training_client(&service).await;
    let mut losses = train(&model, 2).await;
    set_drain(&Http::new(&server.base_url()), "POST").await;
    let restart = async {
        server.stop().await;
        Server::start(options(data.path()).address(address)).await.unwrap()
    };
    let (rest, server) = tokio::join!(train(&model, 2), restart);
    losses.extend(rest);
    assert_eq!(losses, expected);
    drop(server);
}

/// Inference requests are not durable, so that a stop would fail them.
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_lets_running_inference_requests_finish() {
    let test_server =
        TestServer::with(|options| options.timeouts.drain = Duration::from_secs(60)).await;
    let request = json!({
        "model": MODEL, "prompt": [5, 6, 7], "max_tokens": 48, "ignore_eos": true, "stream": true,
        "return_token_ids": true,
    });
    let url = completions_url(&test_server.server.base_url());
    let mut events = EventStream::post(&url, &request).await;
    let first = events.next().await;
    assert!(first.is_some());
    let read = async {
        while let Some(event) = events.next().await {
            assert!(event["error"].is_null(), "{event}");
        }
        events.is_done()
    };
    let (is_done, _) = tokio::join!(read, test_server.server.stop());
    assert!(is_done);
}
