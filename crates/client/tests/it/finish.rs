//! The end of a program: queued work is completed or dropped, and the result is reported.

use std::time::Duration;

use serde_json::{Value, json};
use tinkex::{AdamParams, Datum, ErrorKind, LossFn, ServiceClient, TrainingClient};
use tokio::time::{Instant, sleep, timeout};

use crate::event_log::EventLog;
use crate::numbered_server::{ACCEPTING, NumberedServer};

async fn client(server: &NumberedServer) -> (ServiceClient, TrainingClient) {
    let service = server.builder().build().unwrap();
    let model = service.create_lora_training_client("base").await.unwrap();
    (service, model)
}

fn queue_step(model: &TrainingClient) {
    let data = vec![Datum::completion([1, 2], [3]).unwrap()];
    model.step(data, LossFn::CrossEntropy, AdamParams::default()).detach();
}

/// Returns the reported ends of the session.
fn ends(server: &NumberedServer) -> Vec<Value> {
    server.requests("/finish").iter().map(|request| request.json()).collect()
}

fn success() -> Value {
    json!({"reason": {"type": "success"}, "detail": null})
}

/// Bug: `close(Success)` dropped queued work and returned `Ok`.
#[tokio::test(start_paused = true)]
async fn finish_completes_queued_work_of_all_models() {
    let server = NumberedServer::new(json!({}));
    let (service, model) = client(&server).await;
    let other = service.create_lora_training_client("base").await.unwrap();
    for _ in 0..3 {
        queue_step(&model);
    }
    other.optim_step(AdamParams::default()).detach();
    // Queued work of dropped clients is completed too.
    drop((model, other));
    service.finish().await;
    assert_eq!(server.requests("/forward_backward").len(), 3);
    assert_eq!(server.requests("/optim_step").len(), 4);
    assert_eq!(ends(&server), [success()]);
    let finished = server.requests("/finish")[0].at;
    let results = server.requests("/retrieve_future");
    assert!(results.iter().all(|poll| poll.at <= finished), "the session ends after its work");
    let received = server.requests("").len();
    sleep(Duration::from_secs(600)).await;
    assert_eq!(server.requests("").len(), received, "no heartbeat, no refresh, no telemetry");
}

#[tokio::test(start_paused = true)]
async fn finish_reports_the_error_of_the_program() {
    /// Error without `std::error::Error`, like `anyhow::Error`.
    #[derive(Debug)]
    struct Plain;
    impl std::fmt::Display for Plain {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("out of data")
        }
    }
    let reported =
        async |finish: &dyn Fn(&ServiceClient) -> futures_util::future::BoxFuture<'_, ()>| {
            let server = NumberedServer::new(json!({}));
            let (service, _model) = client(&server).await;
            finish(&service).await;
            let mut events = server
                .requests("/telemetry")
                .into_iter()
                .flat_map(|request| request.json()["events"].as_array().unwrap().clone());
            let event = events.find(|event| event["event"] == "UNHANDLED_EXCEPTION").unwrap();
            assert_eq!(event["error_message"], "out of data");
            let [end] = ends(&server).try_into().unwrap();
            end
        };
    let errored = json!({"reason": {"type": "errored"}, "detail": "out of data"});
    let plain = reported(&|service| Box::pin(service.finish_with_error(&Plain))).await;
    assert_eq!(plain, errored);
    let boxed = reported(&|service| {
        let error: Box<dyn std::error::Error> = "out of data".into();
        Box::pin(service.finish_with_error(&error))
    });
    assert_eq!(boxed.await, errored);
}

#[tokio::test(start_paused = true)]
async fn finish_does_not_fail_if_the_server_refuses_or_is_gone() {
    let lines = EventLog::default();
    let _log = tracing::subscriber::set_default(lines.clone());
    let server = NumberedServer::new(json!({}));
    let (service, model) = client(&server).await;
    // Five calls that the server never answers: their retries would take five times as long.
    for _ in 0..5 {
        queue_step(&model);
    }
    server.go_away();
    let start = Instant::now();
    service.finish().await;
    let seconds = start.elapsed().as_secs();
    assert!((300..=360).contains(&seconds), "finish took {seconds} s");
    assert_eq!(lines.timed(&["WARN", "the server does not respond"]).len(), 1);
    assert_eq!(lines.timed(&["WARN", "cannot report the end of the session"]).len(), 1);
    let error = service.server_capabilities().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed);
}

#[tokio::test(start_paused = true)]
async fn finish_continues_when_its_future_is_dropped_and_a_second_call_waits_for_it() {
    let server = NumberedServer::new(json!({}));
    let (service, model) = client(&server).await;
    queue_step(&model);
    timeout(Duration::ZERO, service.finish()).await.unwrap_err();
    let start = Instant::now();
    service.finish_with_error(&"later").await;
    assert_eq!(start.elapsed(), 2 * ACCEPTING, "the pass and the optimizer step");
    assert_eq!(ends(&server), [success()]);
}

#[tokio::test(start_paused = true)]
async fn abort_drops_queued_work_at_once() {
    let server = NumberedServer::new(json!({}));
    let (service, model) = client(&server).await;
    server.respond("r1", vec![json!("hang")]);
    let stuck = model.optim_step(AdamParams::default());
    let queued: Vec<_> = (0..3).map(|_| model.optim_step(AdamParams::default())).collect();
    sleep(ACCEPTING / 2).await;
    let start = Instant::now();
    service.abort().await;
    for call in queued.into_iter().chain([stuck]) {
        assert_eq!(call.await.unwrap_err().kind(), ErrorKind::Closed);
    }
    assert_eq!(start.elapsed(), Duration::ZERO);
    assert_eq!(server.requests("/optim_step").len(), 1);
    assert_eq!(ends(&server), [json!({"reason": {"type": "interrupted"}, "detail": null})]);
}

#[tokio::test(start_paused = true)]
async fn abort_gives_up_after_five_seconds_and_interrupts_finish() {
    let server = NumberedServer::new(json!({}));
    let (service, model) = client(&server).await;
    server.respond("r1", vec![json!("hang")]);
    model.optim_step(AdamParams::default()).detach();
    timeout(Duration::from_secs(60), service.finish()).await.unwrap_err();
    assert!(ends(&server).is_empty(), "finish waits for the result");
    server.go_away();
    let start = Instant::now();
    service.abort().await;
    assert_eq!(start.elapsed().as_secs(), 5);
    model.flush().await;
    assert_eq!(start.elapsed().as_secs(), 5, "nothing is queued any more");
}

#[tokio::test(start_paused = true)]
async fn flush_waits_for_results_and_errors_of_one_model() {
    let server = NumberedServer::new(json!({}));
    let (_service, model) = client(&server).await;
    model.flush().await;
    server.reject(2);
    for _ in 0..3 {
        model.optim_step(AdamParams::default()).detach();
    }
    let start = Instant::now();
    model.flush().await;
    assert_eq!(start.elapsed(), 3 * ACCEPTING);
    assert_eq!(server.log().len(), 6, "all three were sent");
    model.optim_step(AdamParams::default()).await.unwrap();
}
