//! Instrumentation: tracing events and metrics.

use std::sync::{Arc, Mutex};

use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use serde_json::json;
use tinkex::rest::ListSessions;
use tinkex::testing::{FakeServer, Reply, Route};
use tinkex::{AdamParams, CallOptions, ErrorKind, Lane, QueueState, QueuedWork, SamplingParams};
use tokio::time::Duration;

use crate::event_log::EventLog;
use crate::numbered_server::NumberedServer;
use crate::scripted_server::ScriptedServer;

/// Covers T2.3.1, T2.3.2, P6C.5.
#[tokio::test(start_paused = true)]
async fn requests_retries_and_queue_states_are_recorded() {
    let lines = EventLog::default();
    let recorder = DebuggingRecorder::new();
    let _log = tracing::subscriber::set_default(lines.clone());
    let _numbers = metrics::set_default_local_recorder(&recorder);
    let server = NumberedServer::new(json!({}));
    let service = server.builder().api_key("tml-secret").build().unwrap();
    let model = service.create_lora_training_client("base").await.unwrap();
    server.lose_once("/optim_step");
    let paused = json!({"type": "try_again", "queue_state": "paused_rate_limit"});
    let active = json!({"type": "try_again", "queue_state": "active"});
    server.respond("r1", vec![paused.clone(), paused, active, json!({"metrics": {}})]);
    model.optim_step(AdamParams::default()).await.unwrap();

    let steps = lines.with(&["tinkex::http DEBUG", "path=\"/api/v1/optim_step\""]);
    assert_eq!(steps.len(), 2, "{steps:?}");
    assert!(steps[0].contains("request exception") && steps[0].contains("retry_count=0"));
    for field in [
        "request stop",
        "method=POST",
        "lane=\"train\"",
        "base_url=",
        "duration=",
        "status=200",
        "retry_count=1",
    ] {
        assert!(steps[1].contains(field), "{field}: {}", steps[1]);
    }
    let duration = steps[1].split(" duration=").nth(1).unwrap().split(' ').next().unwrap();
    assert!(duration.parse::<f64>().is_ok_and(f64::is_finite), "a number of seconds: {duration}");
    assert_eq!(lines.with(&["tinkex::http TRACE", "optim_step"]).len(), 2, "two starts");
    assert_eq!(lines.with(&["tinkex::retry", "retrying request"]).len(), 1);
    let changes = lines.with(&["tinkex::queue", "queue.state_change"]);
    assert_eq!(changes.len(), 2, "logged on change: {changes:?}");
    assert!(changes[0].contains("paused_rate_limit") && changes[1].contains("active"));
    assert_eq!(lines.with(&["WARN", "is paused"]).len(), 1);
    assert!(lines.with(&["tml-secret"]).is_empty(), "no event contains the key");

    let numbers: Vec<String> = recorder
        .snapshotter()
        .snapshot()
        .into_vec()
        .into_iter()
        .map(|(key, _, _, value)| {
            let labels: Vec<String> =
                key.key().labels().map(|l| format!("{}={}", l.key(), l.value())).collect();
            let value = match value {
                DebugValue::Counter(count) => count.to_string(),
                DebugValue::Histogram(values) => format!("{} values", values.len()),
                DebugValue::Gauge(value) => value.to_string(),
            };
            format!("{} {} {value}", key.key().name(), labels.join(" "))
        })
        .collect();
    for expected in [
        "tinkex_requests_total lane=train outcome=ok 2",
        "tinkex_requests_total lane=train outcome=lost 1",
        "tinkex_request_duration_seconds lane=train 3 values",
        "tinkex_retries_total reason=retry 1",
    ] {
        assert!(numbers.iter().any(|line| line == expected), "{expected}: {numbers:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_queue_state_callback_is_called_on_change_only_and_may_panic() {
    let server = NumberedServer::new(json!({}));
    let changes = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&changes);
    let builder = server.builder().on_queue_state(move |change| {
        seen.lock().unwrap().push(change.clone());
        assert_ne!(change.state, Some(QueueState::PausedCapacity), "scripted panic");
    });
    let service = builder.build().unwrap();
    let model = service.create_lora_training_client("base").await.unwrap();
    let state = |state: &str| json!({"type": "try_again", "queue_state": state});
    let mut capacity = state("paused_capacity");
    capacity["queue_state_reason"] = json!("maintenance");
    let responses =
        vec![capacity.clone(), capacity, state("active"), state("active"), json!({"metrics": {}})];
    server.respond("r1", responses);
    model.optim_step(AdamParams::default()).await.unwrap();
    let changes = changes.lock().unwrap().clone();
    let [paused, active] = &changes[..] else { panic!("{changes:?}") };
    assert_eq!(paused.work, QueuedWork::Training);
    assert_eq!(paused.id, model.model_id().to_string());
    assert_eq!(paused.state, Some(QueueState::PausedCapacity));
    assert_eq!(paused.reason.as_deref(), Some("maintenance"));
    assert_eq!((active.state, active.reason.as_deref()), (Some(QueueState::Active), None));
}

#[tokio::test(start_paused = true)]
async fn statistics_count_the_requests_of_all_clients_of_a_service_by_lane_and_outcome() {
    let server = NumberedServer::new(json!({}));
    let service = server.builder().build().unwrap();
    assert!(service.stats().lanes.is_empty());
    let sampler = service.create_sampling_client("base").await.unwrap();
    server.samples(vec![json!(503), json!("conn"), json!("ok"), json!(422)]);
    sampler.sample([1], SamplingParams::new().max_tokens(1)).await.unwrap();
    sampler.sample([1], SamplingParams::new().max_tokens(1)).await.unwrap_err();
    let stats = service.clone().stats();
    let samples = stats.lane(Lane::Sample).unwrap();
    assert_eq!((samples.ok, samples.refused, samples.failed, samples.lost), (1, 1, 1, 1));
    assert_eq!(samples.requests(), 4);
    assert!(samples.p50 <= samples.p90 && samples.p90 <= samples.p99);
    assert_eq!(stats.lane(Lane::Config).unwrap().ok, 1);
    assert!(stats.lane(Lane::Train).is_none());
}

/// Bug: the duration of a stream ended with its first byte, and its end had no event.
#[tokio::test(start_paused = true)]
async fn a_stream_is_recorded_when_it_ends() {
    let event = |token: u32, reason: &str| {
        format!(
            "data: {{\"choices\": [{{\"token_ids\": [{token}], \"finish_reason\": {reason}}}]}}\n\n"
        )
    };
    let completed = [event(5, "null"), event(6, "\"stop\"")];
    for (reply, read, outcome, end) in [
        (Reply::stream(completed.clone()).then_silence(), 2, "completed", "request stop"),
        (
            Reply::stream([event(5, "null")]).then_connection_lost(),
            2,
            "failed",
            "request exception",
        ),
        (Reply::stream([event(5, "null")]).then_silence(), 1, "dropped", "response dropped"),
    ] {
        let lines = EventLog::default();
        let _log = tracing::subscriber::set_default(lines.clone());
        let recorder = DebuggingRecorder::new();
        let _numbers = metrics::set_default_local_recorder(&recorder);
        let server = FakeServer::new().on(Route::Completions, reply);
        let service = server.builder().build().unwrap();
        let sampler = service.create_sampling_client("base").await.unwrap();
        let mut stream = sampler.sample_stream([1], SamplingParams::new().max_tokens(4));
        stream.next().await.unwrap().unwrap();
        let http = || lines.with(&["tinkex::http DEBUG", "/completions"]);
        assert_eq!(http().len(), 1, "{:?}", http());
        assert!(http()[0].contains("response start") && http()[0].contains("status=200"));
        assert!(service.stats().lane(Lane::Sample).is_none(), "the stream goes on");
        for _ in 1..read {
            let _ = stream.next().await.unwrap();
        }
        drop(stream);
        assert_eq!(http().len(), 2, "{:?}", http());
        assert!(http()[1].contains(end) && http()[1].contains("duration="), "{:?}", http());
        let ends = lines.with(&["tinkex::stream DEBUG", "sample stream ended"]);
        assert_eq!(ends.len(), 1, "{ends:?}");
        let tokens = format!("tokens={}", if outcome == "completed" { 2 } else { 1 });
        for field in [&*format!("outcome=\"{outcome}\""), &*tokens, "sampler_id=", "duration="] {
            assert!(ends[0].contains(field), "{field}: {ends:?}");
        }
        assert_eq!(ends[0].contains("error="), outcome == "failed");
        let samples = service.stats();
        let samples = samples.lane(Lane::Sample).unwrap();
        let count = |of| u64::from(outcome == of);
        assert_eq!(samples.ok, count("completed"));
        assert_eq!((samples.lost, samples.dropped), (count("failed"), count("dropped")));
        let durations =
            recorder.snapshotter().snapshot().into_vec().into_iter().filter(|(key, ..)| {
                let key = key.key();
                let lane = key.labels().any(|label| label.value() == "sample");
                lane && key.name() == "tinkex_request_duration_seconds"
            });
        assert_eq!(durations.count(), 1);
    }
}

/// Bug: the event was missing if the time limit of the policy ended the call (503), or if only the
/// user can resolve the failure (402, 409).
#[tokio::test(start_paused = true)]
async fn giving_up_is_recorded_for_every_reason() {
    let retry = CallOptions::new().give_up_after(Duration::from_millis(100));
    for status in [400, 402, 409, 503] {
        let lines = EventLog::default();
        let _log = tracing::subscriber::set_default(lines.clone());
        let fake = ScriptedServer::started().respond("GET /api/v1/sessions", status, json!({}));
        let client = fake.builder().options(retry).build().unwrap();
        client.rest().list_sessions(&ListSessions::default()).await.unwrap_err();
        assert_eq!(lines.with(&["tinkex::retry", "giving up"]).len(), 1, "{status}");
        fake.finish();
    }
}

/// Covers P6B.4, P6C.4.
#[tokio::test(start_paused = true)]
async fn permanent_failures_are_not_retried() {
    let server = NumberedServer::new(json!({}));
    // The default options retry every failure that may be temporary.
    let service = server.builder().build().unwrap();
    let sampler = service.create_sampling_client("base").await.unwrap();
    let model = service.create_lora_training_client("base").await.unwrap();
    let params = || SamplingParams::new().max_tokens(1);
    for status in [400, 401, 403, 404, 413, 422] {
        server.samples(vec![json!(status)]);
        let before = server.requests("/asample").len();
        let error = sampler.sample([1], params()).await.unwrap_err();
        assert_eq!((error.status(), error.attempts()), (Some(status), 1));
        assert!(error.is_user_error() && !error.is_retryable(), "{status}");
        assert_eq!(server.requests("/asample").len(), before + 1, "{status}");

        let before = server.requests("/optim_step").len();
        server.fail_times("/optim_step", json!(status), 1);
        let error = model.optim_step(AdamParams::default()).await.unwrap_err();
        assert_eq!((error.status(), error.attempts()), (Some(status), 1));
        assert_eq!(server.requests("/optim_step").len(), before + 1, "{status}");
    }
    // A request that the server executed, and that failed because of its content.
    let failed = json!({"error": "prompt is empty", "category": "user"});
    let number = server.requests("/asample").len();
    server.respond(&format!("q{number}"), vec![failed]);
    let error = sampler.sample([1], params()).await.unwrap_err();
    assert_eq!((error.kind(), error.attempts()), (ErrorKind::WorkFailed, 1));
    assert!(error.is_user_error() && !error.is_retryable());
    assert_eq!(server.requests("/asample").len(), number + 1);
}

/// Covers P6B.3.
#[tokio::test(start_paused = true)]
async fn disabled_retries_surface_failures_at_once() {
    let server = NumberedServer::new(json!({}));
    let service = server.builder().options(CallOptions::without_retries()).build().unwrap();
    let sampler = service.create_sampling_client("base").await.unwrap();
    for status in [500, 503, 400, 422] {
        server.samples(vec![json!(status)]);
        let before = server.requests("/asample").len();
        let params = SamplingParams::new().max_tokens(1);
        let error = sampler.sample([1], params).await.unwrap_err();
        assert_eq!((error.status(), error.attempts()), (Some(status), 1));
        assert_eq!(server.requests("/asample").len(), before + 1);
    }
}

/// Covers P6C.3.
#[tokio::test(start_paused = true)]
async fn a_5xx_is_retried_for_training_and_polling_but_not_for_samples_without_retries() {
    let server = NumberedServer::new(json!({}));
    let service = server.builder().build().unwrap();
    let once = CallOptions::without_retries();
    let sampler = service.create_sampling_client("base").await.unwrap().with_options(once);
    server.samples(vec![json!(503)]);
    let error = sampler.sample([1], SamplingParams::new()).await.unwrap_err();
    assert_eq!((error.status(), error.attempts()), (Some(503), 1));
    assert_eq!(server.requests("/asample").len(), 1);

    let model = service.create_lora_training_client("base").await.unwrap();
    server.fail_times("/optim_step", json!(503), 3);
    server.respond("r1", vec![json!(503), json!(500), json!({"metrics": {}})]);
    let polls = server.requests("/retrieve_future").len();
    model.optim_step(AdamParams::default()).await.unwrap();
    assert_eq!(server.requests("/optim_step").len(), 4);
    assert_eq!(server.requests("/retrieve_future").len(), polls + 3);
}

/// Covers T3.2.4.
#[tokio::test(start_paused = true)]
async fn a_paused_request_is_logged_and_polled_with_growing_delays() {
    let lines = EventLog::default();
    let _log = tracing::subscriber::set_default(lines.clone());
    let server = NumberedServer::new(json!({}));
    let service = server.polling_builder().build().unwrap();
    let model = service.create_lora_training_client("base").await.unwrap();
    let paused = json!({"type": "try_again", "queue_state": "paused_rate_limit"});
    let mut responses = vec![paused; 8];
    responses.push(json!({"metrics": {}}));
    server.respond("r1", responses);
    model.optim_step(AdamParams::default()).await.unwrap();
    let polls: Vec<_> = server
        .requests("/retrieve_future")
        .iter()
        .filter(|request| request.json()["request_id"] == "r1")
        .map(|request| request.at)
        .collect();
    assert_eq!(polls.len(), 9);
    for (i, pair) in polls.windows(2).enumerate() {
        let longest = Duration::from_millis(250 << i.min(5)).min(Duration::from_secs(5));
        let delay = pair[1] - pair[0];
        // The timer has a resolution of one millisecond.
        let slack = Duration::from_millis(1);
        assert!(delay >= longest / 2 && delay <= longest + slack, "poll {i}: {delay:?}");
    }
    let changes = lines.with(&["tinkex::queue", "queue.state_change", "paused_rate_limit"]);
    assert_eq!(changes.len(), 1, "{changes:?}");
    assert_eq!(lines.with(&["WARN", "is paused"]).len(), 1);
}
