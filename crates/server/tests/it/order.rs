//! Sequence numbers: order, gaps, retries, and conflicting requests.

use std::time::Duration;

use serde_json::json;
use tinkex_wire::{Datum, ForwardBackward, LossFn, Seq};

use crate::harness::{Http, TestServer, step};

async fn pass(http: &Http, model: &str, seq: u64, tokens: [u32; 2]) -> (u16, serde_json::Value) {
    let data = vec![Datum::completion(tokens, [9]).unwrap()];
    let request = ForwardBackward::new(model, data, LossFn::CrossEntropy).seq_id(Seq::new(seq));
    let body = request.to_proto().unwrap().to_vec();
    http.send(
        "POST",
        "/api/v1/forward_backward",
        &[("content-type", "application/x-protobuf")],
        body,
    )
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_run_in_order_of_sequence_numbers() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    let (status, second) = http.post("/optim_step", step(&model, 2, 0.1)).await;
    assert_eq!(status, 200);
    assert_eq!(pass(&http, &model, 1, [3, 4]).await.0, 200);
    let norm = http.result(&second).await["metrics"]["unclipped_grad_l2:mean"].as_f64().unwrap();
    assert!(norm > 0.0, "the step ran after the pass");
    // A retry gets the same request id; another request is rejected.
    assert_eq!(http.post("/optim_step", step(&model, 2, 0.1)).await, (200, second));
    let (status, rejected) = http.post("/optim_step", step(&model, 2, 0.2)).await;
    assert_eq!(status, 400, "{rejected}");
    assert!(rejected["detail"].as_str().unwrap().contains("seq_id 2"), "{rejected}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gap_is_skipped_after_the_timeout_and_its_number_is_then_rejected() {
    let test_server =
        TestServer::with(|options| options.timeouts.sequence_gap = Duration::from_millis(50)).await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    let (_, third) = http.post("/optim_step", step(&model, 3, 0.1)).await;
    assert!(http.result(&third).await["metrics"].is_object());
    let (status, rejected) = http.post("/optim_step", step(&model, 1, 0.1)).await;
    assert_eq!(status, 400);
    assert!(rejected["detail"].as_str().unwrap().contains("too late"), "{rejected}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_rejects_requests_with_429() {
    let test_server = TestServer::with(|options| {
        options.limits.queued_requests = 2;
        options.timeouts.sequence_gap = Duration::from_secs(60);
    })
    .await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    // Number 1 is missing, so these stay queued.
    for seq in [2, 3] {
        assert_eq!(http.post("/optim_step", step(&model, seq, 0.1)).await.0, 200);
    }
    let (status, rejected) = http.post("/optim_step", step(&model, 4, 0.1)).await;
    assert_eq!(status, 429, "{rejected}");
}

#[tokio::test(flavor = "multi_thread")]
async fn samples_count_towards_the_queue_limit_until_they_are_finished() {
    let test_server = TestServer::with(|options| options.limits.queued_requests = 2).await;
    let http = test_server.http();
    let sampler = http.sampler(&http.session().await).await;
    let request = |seq: u64| {
        json!({
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]}, "num_samples": 1_000,
            "seq_id": seq, "sampling_params": {"max_tokens": 200, "stop": []},
            "sampling_session_id": sampler,
        })
    };
    let mut futures = Vec::new();
    for seq in 0..2 {
        let (status, future) = http.post("/asample", request(seq)).await;
        assert_eq!(status, 200, "{future}");
        futures.push(future);
    }
    let (status, rejected) = http.post("/asample", request(2)).await;
    assert_eq!(status, 429, "{rejected}");
    for future in &futures {
        let cancel = json!({"request_id": future["request_id"]});
        assert_eq!(http.post("/cancel_future", cancel).await.0, 200);
        http.result(future).await;
    }
    assert_eq!(http.post("/asample", request(2)).await.0, 200, "the queue has space again");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sequence_number_above_the_maximum_is_rejected() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    for seq in [1 << 31, u64::MAX] {
        let save = json!({"model_id": model, "seq_id": seq, "type": "save_weights"});
        for (path, request) in [("/optim_step", step(&model, seq, 0.1)), ("/save_weights", save)] {
            let (status, rejected) = http.post(path, request).await;
            assert_eq!(status, 400, "{rejected}");
            assert!(rejected["detail"].as_str().unwrap().contains("seq_id"), "{rejected}");
        }
    }
    let (_, first) = http.post("/optim_step", step(&model, 1, 0.1)).await;
    assert!(http.result(&first).await["metrics"].is_object());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rejected_request_leaves_no_gap() {
    let test_server =
        TestServer::with(|options| options.timeouts.sequence_gap = Duration::from_secs(36_000))
            .await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    let sampler = http.sampler(&session).await;
    let path = format!("tinker://{model}/weights/none");
    let load = json!({
        "model_id": model, "seq_id": 1, "path": path, "optimizer": false, "type": "load_weights",
    });
    assert_eq!(http.post("/load_weights", load).await.0, 404);
    let number = sampler.rsplit(':').next().unwrap().parse::<u32>().unwrap();
    let save = json!({
        "model_id": model, "seq_id": 2, "sampling_session_seq_id": number,
        "type": "save_weights_for_sampler",
    });
    let (status, rejected) = http.post("/save_weights_for_sampler", save).await;
    assert_eq!(status, 400, "{rejected}");
    let (_, third) = http.post("/optim_step", step(&model, 3, 0.1)).await;
    assert!(http.result(&third).await["metrics"].is_object());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_session_expires_and_its_queued_requests_fail() {
    let test_server = TestServer::with(|options| {
        options.timeouts.session_expiry = Duration::from_millis(200);
        options.timeouts.expiry_interval = Duration::from_millis(5);
    })
    .await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    // Number 1 is missing, so this stays queued until the session expires.
    let (_, waiting) = http.post("/optim_step", step(&model, 2, 0.1)).await;
    let result = http.result(&waiting).await;
    assert!(result["error"].as_str().unwrap().contains("session expired"), "{result}");
    assert_eq!(http.post("/session_heartbeat", json!({"session_id": session})).await.0, 410);
    assert_eq!(http.post("/session_heartbeat", json!({"session_id": "other"})).await.0, 404);
    assert_eq!(http.post("/optim_step", step(&model, 3, 0.1)).await.0, 403);
    let search = json!({"session_id": session, "statuses": [{"type": "cancelled"}]});
    let (_, found) = http.post("/sessions/search", search).await;
    assert_eq!(found["sessions"][0]["status"]["type"], "cancelled", "{found}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_finished_session_rejects_requests_and_its_usage_is_counted() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    let (_, future) = pass(&http, &model, 1, [3, 4]).await;
    let (_, next) = http.post("/optim_step", step(&model, 2, 0.1)).await;
    http.result(&next).await;
    let finish = json!({"reason": {"type": "success"}, "detail": null});
    let path = format!("/sessions/{session}/finish");
    assert_eq!(http.post(&path, finish.clone()).await.0, 200);
    assert_eq!(http.post(&path, finish).await.0, 200, "finishing twice is accepted");
    assert_eq!(http.post("/session_heartbeat", json!({"session_id": session})).await.0, 410);
    let poll = json!({"request_id": future["request_id"]});
    assert_eq!(http.post("/retrieve_future", poll).await.0, 200, "results remain available");
    let hour = 3_600;
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let from = now / hour * hour - hour;
    let to = now / hour * hour + 2 * hour;
    let (_, usage) = http
        .get(&format!("/api/v1/billing/usage/events?starting_on={from}&ending_before={to}"))
        .await;
    assert_eq!(
        usage["data"][0]["event_info"],
        json!({"type": "training", "token_count": 2}),
        "{usage}"
    );
    assert_eq!(http.get("/metrics").await.0, 200);
}
