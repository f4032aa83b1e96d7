//! Numbers: order, gaps, resends, and other bodies under the same one.

use std::time::Duration;

use serde_json::json;
use tinkex_wire::{Datum, ForwardBackward, LossFn, Seq};

use crate::harness::{Http, TestServer, step};

async fn pass(http: &Http, model: &str, seq: u64, tokens: [u32; 2]) -> (u16, serde_json::Value) {
    let data = vec![Datum::completion(tokens, [9]).unwrap()];
    let call = ForwardBackward {
        seq_id: Some(Seq::new(seq)),
        ..ForwardBackward::new(model, data, LossFn::CrossEntropy)
    };
    let body = call.to_proto().unwrap().to_vec();
    http.send(
        "POST",
        "/api/v1/forward_backward",
        &[("content-type", "application/x-protobuf")],
        body,
    )
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_run_in_order_however_they_arrive() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    let (status, second) = http.post("/optim_step", step(&model, 2, 0.1)).await;
    assert_eq!(status, 200);
    assert_eq!(pass(&http, &model, 1, [3, 4]).await.0, 200);
    let norm = http.answer(&second).await["metrics"]["unclipped_grad_l2:mean"].as_f64().unwrap();
    assert!(norm > 0.0, "the step came after the pass");
    // The same again is the same; another one is not.
    assert_eq!(http.post("/optim_step", step(&model, 2, 0.1)).await, (200, second));
    let (status, refused) = http.post("/optim_step", step(&model, 2, 0.2)).await;
    assert_eq!(status, 400, "{refused}");
    assert!(refused["detail"].as_str().unwrap().contains("seq_id 2"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gap_is_skipped_after_a_while_and_its_number_is_then_refused() {
    let test_server =
        TestServer::with(|options| options.timeouts.sequence_gap = Duration::from_millis(50)).await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    let (_, third) = http.post("/optim_step", step(&model, 3, 0.1)).await;
    assert!(http.answer(&third).await["metrics"].is_object());
    let (status, refused) = http.post("/optim_step", step(&model, 1, 0.1)).await;
    assert_eq!(status, 400);
    assert!(refused["detail"].as_str().unwrap().contains("too late"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_says_when_to_come_back() {
    let test_server = TestServer::with(|options| {
        options.limits.queued_requests = 2;
        options.timeouts.sequence_gap = Duration::from_secs(60);
    })
    .await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    // Number 1 never comes, so these stay in line.
    for seq in [2, 3] {
        assert_eq!(http.post("/optim_step", step(&model, seq, 0.1)).await.0, 200);
    }
    let (status, refused) = http.post("/optim_step", step(&model, 4, 0.1)).await;
    assert_eq!(status, 429, "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn samples_fill_the_queue_until_they_are_drawn() {
    let test_server = TestServer::with(|options| options.limits.queued_requests = 2).await;
    let http = test_server.http();
    let sampler = http.sampler(&http.session().await).await;
    let ask = |seq: u64| {
        json!({
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]}, "num_samples": 1_000,
            "seq_id": seq, "sampling_params": {"max_tokens": 200, "stop": []},
            "sampling_session_id": sampler,
        })
    };
    let mut tickets = Vec::new();
    for seq in 0..2 {
        let (status, ticket) = http.post("/asample", ask(seq)).await;
        assert_eq!(status, 200, "{ticket}");
        tickets.push(ticket);
    }
    let (status, refused) = http.post("/asample", ask(2)).await;
    assert_eq!(status, 429, "{refused}");
    for ticket in &tickets {
        let cancel = json!({"request_id": ticket["request_id"]});
        assert_eq!(http.post("/cancel_future", cancel).await.0, 200);
        http.answer(ticket).await;
    }
    assert_eq!(http.post("/asample", ask(2)).await.0, 200, "there is room again");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_number_beyond_all_numbers_is_refused() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    for seq in [1 << 31, u64::MAX] {
        let save = json!({"model_id": model, "seq_id": seq, "type": "save_weights"});
        for (path, call) in [("/optim_step", step(&model, seq, 0.1)), ("/save_weights", save)] {
            let (status, refused) = http.post(path, call).await;
            assert_eq!(status, 400, "{refused}");
            assert!(refused["detail"].as_str().unwrap().contains("seq_id"), "{refused}");
        }
    }
    let (_, first) = http.post("/optim_step", step(&model, 1, 0.1)).await;
    assert!(http.answer(&first).await["metrics"].is_object());
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_waits_for_what_was_refused() {
    let test_server =
        TestServer::with(|options| options.timeouts.sequence_gap = Duration::from_secs(36_000))
            .await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    let sampler = http.sampler(&session).await;
    let path = format!("tinker://{model}/weights/none");
    let load = json!({"model_id": model, "seq_id": 1, "path": path, "optimizer": false, "type": "load_weights"});
    assert_eq!(http.post("/load_weights", load).await.0, 404);
    let number = sampler.rsplit(':').next().unwrap().parse::<u32>().unwrap();
    let save = json!({
        "model_id": model, "seq_id": 2, "sampling_session_seq_id": number,
        "type": "save_weights_for_sampler",
    });
    let (status, refused) = http.post("/save_weights_for_sampler", save).await;
    assert_eq!(status, 400, "{refused}");
    let (_, third) = http.post("/optim_step", step(&model, 3, 0.1)).await;
    assert!(http.answer(&third).await["metrics"].is_object());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_says_nothing_ends_and_takes_its_requests_along() {
    let test_server = TestServer::with(|options| {
        options.timeouts.session_expiry = Duration::from_millis(200);
        options.timeouts.expiry_interval = Duration::from_millis(5);
    })
    .await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    // Number 1 never comes, so this stays in line until the session ends.
    let (_, waiting) = http.post("/optim_step", step(&model, 2, 0.1)).await;
    let answer = http.answer(&waiting).await;
    assert!(answer["error"].as_str().unwrap().contains("session expired"), "{answer}");
    assert_eq!(http.post("/session_heartbeat", json!({"session_id": session})).await.0, 410);
    assert_eq!(http.post("/session_heartbeat", json!({"session_id": "other"})).await.0, 404);
    assert_eq!(http.post("/optim_step", step(&model, 3, 0.1)).await.0, 403);
    let search = json!({"session_id": session, "statuses": [{"type": "cancelled"}]});
    let (_, found) = http.post("/sessions/search", search).await;
    assert_eq!(found["sessions"][0]["status"]["type"], "cancelled", "{found}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_finished_session_is_over_and_use_was_counted() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    let (_, ticket) = pass(&http, &model, 1, [3, 4]).await;
    let (_, next) = http.post("/optim_step", step(&model, 2, 0.1)).await;
    http.answer(&next).await;
    let finish = json!({"reason": {"type": "success"}, "detail": null});
    let path = format!("/sessions/{session}/finish");
    assert_eq!(http.post(&path, finish.clone()).await.0, 200);
    assert_eq!(http.post(&path, finish).await.0, 200, "the first end counts");
    assert_eq!(http.post("/session_heartbeat", json!({"session_id": session})).await.0, 410);
    let poll = json!({"request_id": ticket["request_id"]});
    assert_eq!(http.post("/retrieve_future", poll).await.0, 200, "answers stay");
    let hour = 3_600;
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let (from, to) = (now / hour * hour - hour, now / hour * hour + 2 * hour);
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
