//! Limits of one call: retry events, first contact, timeouts, and failures of the server itself.

use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, join_all};
use http::Request;
use serde_json::json;
use tinkex::loss::CustomLoss;
use tinkex::{
    AdamParams, CallOptions, CopyCheckpoint, Env, Error, ErrorKind, Hint, SamplingParams,
    ServiceClient,
};
use tokio::time::{Instant, sleep};

use crate::event_log::EventLog;
use crate::numbered_server::NumberedServer;

fn params() -> SamplingParams {
    SamplingParams::new()
}

/// Creates a client of a server at `address` that does not run.
fn refused(address: &str) -> (NumberedServer, ServiceClient) {
    let server = NumberedServer::new(json!({}));
    server.fail("", json!("refused"));
    let builder = server.builder().without_telemetry().base_url(address);
    (server, builder.build().unwrap())
}

/// Bug: a call to a local server that did not run was retried for five minutes without a message,
/// and its error did not contain the address.
#[tokio::test(start_paused = true)]
async fn a_local_server_that_is_not_started_is_reported_soon() {
    for address in ["http://127.0.0.1:9", "http://localhost:9", "http://[::1]:9"] {
        let lines = EventLog::default();
        let _log = tracing::subscriber::set_default(lines.clone());
        let (server, service) = refused(address);
        let start = Instant::now();
        let error = service.server_capabilities().await.unwrap_err();
        assert!(start.elapsed() <= Duration::from_secs(2), "{:?}", start.elapsed());
        assert_eq!(error.kind(), ErrorKind::Connect);
        assert_eq!(error.hint(), Some(Hint::StartServer));
        assert!(error.to_string().contains(address), "{error}");
        assert!(error.attempts() > 1 && error.attempts() <= 5, "{error}");
        let warnings = lines.with(&["tinkex::retry WARN", "retrying request", address]);
        assert_eq!(warnings.len(), 1, "{warnings:?}");

        // Once the server has responded, a restart is waited for.
        server.recover();
        service.server_capabilities().await.unwrap();
        server.fail("", json!("refused"));
        let start = Instant::now();
        service.server_capabilities().await.unwrap_err();
        assert!(start.elapsed() >= Duration::from_secs(300), "{:?}", start.elapsed());
    }
    // An address of another machine may be unreachable for other reasons.
    let start = Instant::now();
    refused("http://10.0.0.1:9").1.server_capabilities().await.unwrap_err();
    assert!(start.elapsed() >= Duration::from_secs(300));
}

/// Bug, continued: the polls of all pending requests log one warning per outage.
#[tokio::test(start_paused = true)]
async fn an_outage_is_logged_once_for_all_polls() {
    let lines = EventLog::default();
    let _log = tracing::subscriber::set_default(lines.clone());
    let server = NumberedServer::new(json!({}));
    let model = server.model().await;
    let mut steps = Vec::new();
    for seq in 1..=20 {
        let mut responses = vec![json!("conn"); 6];
        responses.push(json!({"metrics": {}}));
        server.respond(&format!("r{seq}"), responses);
        steps.push(model.optim_step(AdamParams::default()));
    }
    for step in join_all(steps).await {
        step.unwrap();
    }
    let warnings = lines.with(&["tinkex::outage WARN"]);
    let ends = lines.with(&["tinkex::outage INFO", "succeed again"]);
    assert_eq!((warnings.len(), ends.len()), (1, 1), "{warnings:?} {ends:?}");
    assert!(warnings[0].contains("base_url=\"http://server.test"), "{warnings:?}");
}

/// Bug: a limit of 0 was accepted.
#[tokio::test(start_paused = true)]
async fn a_limit_of_zero_concurrent_samples_is_rejected() {
    let server = NumberedServer::new(json!({}));
    let error = server.builder().max_concurrent_samples(0).build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("max_concurrent_samples"), "{error}");
    let error = server.sampler().await.with_max_concurrent_samples(0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
}

#[tokio::test(start_paused = true)]
async fn samples_that_wait_or_are_resubmitted_emit_retry_events() {
    for (reason, seconds, outcome, poll) in [
        ("backoff", "seconds=1.0", Some(json!(429)), None),
        ("billing", "seconds=1.0", Some(json!(402)), None),
        ("resubmit", "seconds=0.", None, Some(json!(410))),
    ] {
        let lines = EventLog::default();
        let _log = tracing::subscriber::set_default(lines.clone());
        let server = NumberedServer::new(json!({}));
        let sampler = server.sampler().await;
        let status = outcome.as_ref().or(poll.as_ref()).unwrap().to_string();
        server.samples(outcome.into_iter().collect());
        if let Some(poll) = poll {
            server.respond("q0", vec![poll]);
        }
        sampler.sample([1], params()).await.unwrap();
        let reason = format!("reason=\"{reason}\"");
        let status = format!("status={status}");
        let words = ["tinkex::retry WARN", "lane=\"sample\"", &reason, &status, "attempt=1"];
        let events = lines.with(&words);
        assert_eq!(events.len(), 1, "{reason}");
        assert!(events[0].contains(seconds) && events[0].contains("base_url="), "{events:?}");
        let ends = lines.with(&["tinkex::retry INFO", "succeeded after retries", "attempts=2"]);
        assert_eq!(ends.len(), 1, "{reason}");
    }
}

/// The first retry is logged as a warning, the others of the same outage at the debug level.
#[tokio::test(start_paused = true)]
async fn concurrent_samples_that_meet_one_outage_log_one_warning() {
    let lines = EventLog::default();
    let _log = tracing::subscriber::set_default(lines.clone());
    let server = NumberedServer::new(json!({}));
    let sampler = server.sampler().await;
    server.samples(vec![json!(503); 50]);
    for sample in join_all((0..50).map(|_| sampler.sample([1], params()))).await {
        sample.unwrap();
    }
    assert_eq!(lines.with(&["tinkex::retry WARN"]).len(), 1);
    assert_eq!(lines.with(&["tinkex::retry", "retrying request"]).len(), 50);
}

#[tokio::test(start_paused = true)]
async fn a_training_future_that_times_out_says_that_the_request_continues() {
    let server = NumberedServer::new(json!({}));
    let model = server.model().await;
    let limit = Duration::from_secs(10);
    for seq in 1..=2 {
        server.respond(&format!("r{seq}"), vec![json!("conn"), json!({"metrics": {}})]);
    }
    server.delay("/retrieve_future", Duration::from_secs(30));
    let hurried = model.with_options(CallOptions::new().timeout(limit));
    for step in [
        model.optim_step(AdamParams::default()).timeout(limit),
        hurried.optim_step(AdamParams::default()),
    ] {
        let error = step.await.unwrap_err();
        assert_eq!((error.kind(), error.is_retryable()), (ErrorKind::Timeout, false));
        assert!(error.to_string().contains("continues on the server"), "{error}");
    }
    let polls = server.requests("/retrieve_future").len();
    sleep(Duration::from_secs(120)).await;
    assert!(server.requests("/retrieve_future").len() > polls, "the client keeps polling");
    model.optim_step(AdamParams::default()).timeout(limit * 10).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_sample_that_times_out_is_cancelled_and_names_the_last_failure() {
    let limit = Duration::from_secs(10);
    let server = NumberedServer::new(json!({}));
    server.dynamic_config(json!({"sample_cancel_enabled": true}));
    let sampler = server.sampler().await.with_options(CallOptions::new().timeout(limit));
    server.respond("q0", vec![json!("hang")]);
    let start = Instant::now();
    let error = sampler.sample([1], params()).await.unwrap_err();
    assert_eq!((error.kind(), start.elapsed()), (ErrorKind::Timeout, limit));
    sleep(Duration::from_secs(1)).await;
    assert_eq!(server.requests("/cancel_future").len(), 1);

    server.samples(vec![json!([503, {"detail": "oops"}]); 100]);
    let start = Instant::now();
    let error = sampler.sample([1], params()).await.unwrap_err();
    assert_eq!((error.kind(), start.elapsed()), (ErrorKind::Timeout, limit));
    assert!(error.to_string().contains("oops"), "{error}");
    assert_eq!(error.elapsed(), limit);
    assert!(error.attempts() > 1, "{error:?}");
}

/// Bug: a submission that failed for five minutes logged the end of its call, although the sample
/// was resubmitted.
#[tokio::test(start_paused = true)]
async fn a_resubmitted_sample_does_not_log_that_it_gave_up() {
    let lines = EventLog::default();
    let _log = tracing::subscriber::set_default(lines.clone());
    let server = NumberedServer::new(json!({}));
    let sampler = server.sampler().await;
    server.samples(vec![json!(503); 100]);
    sampler.sample([1], params()).await.unwrap();
    assert!(lines.with(&["reason=\"resubmit\""]).len() > 1);
    assert_eq!(lines.with(&["giving up"]).len(), 0);
    assert_eq!(lines.with(&["tinkex::retry INFO", "succeeded after retries"]).len(), 1);
}

/// Bug: each failed poll logged that its call gave up, although polling continued.
#[tokio::test(start_paused = true)]
async fn a_call_that_is_still_polled_does_not_log_that_it_gave_up() {
    let lines = EventLog::default();
    let _log = tracing::subscriber::set_default(lines.clone());
    let server = NumberedServer::new(json!({"sample_use_retrieve_futures": true}));
    let service = server.builder().build().unwrap();
    let sampler = service.create_sampling_client("base").await.unwrap();
    server.fail_times("/retrieve_futures", json!(503), 2);
    sampler.sample([1], params()).await.unwrap();
    assert!(server.requests("/retrieve_futures").len() > 2, "failed polls are repeated");

    let model = service.create_lora_training_client("base").await.unwrap();
    server.respond("r1", vec![json!(408), json!(503), json!({"metrics": {}})]);
    model.optim_step(AdamParams::default()).await.unwrap();
    assert_eq!(lines.with(&["giving up"]), Vec::<String>::new());

    server.respond("r2", vec![json!(408), json!(503), json!(422)]);
    model.optim_step(AdamParams::default()).await.unwrap_err();
    let ends = lines.with(&["tinkex::retry", "giving up"]);
    let [end] = &ends[..] else { panic!("{ends:?}") };
    assert!(end.contains("lane=\"poll\"") && end.contains("attempts=1"), "{end}");
}

/// Bug: the warning about a failure of category `server` was not followed by the end of the call.
#[tokio::test(start_paused = true)]
async fn a_training_call_that_is_polled_again_logs_its_end() {
    let lines = EventLog::default();
    let _log = tracing::subscriber::set_default(lines.clone());
    let server = NumberedServer::new(json!({}));
    let model = server.model().await;
    let failed = json!({"error": "node lost", "category": "server"});
    server.respond("r1", vec![failed, json!({"metrics": {}})]);
    model.optim_step(AdamParams::default()).await.unwrap();
    assert_eq!(lines.with(&["tinkex::retry WARN", "reason=\"poll\""]).len(), 1);
    let ends = lines.with(&["tinkex::retry INFO", "succeeded after retries", "attempts=1"]);
    assert_eq!(ends.len(), 1);
}

/// Bug: a sample whose first retry was logged ended without an event.
#[tokio::test(start_paused = true)]
async fn a_sample_that_a_time_limit_ends_logs_its_end() {
    let limit = Duration::from_secs(100);
    for options in [CallOptions::new().progress_timeout(limit), CallOptions::new().timeout(limit)] {
        let lines = EventLog::default();
        let _log = tracing::subscriber::set_default(lines.clone());
        let server = NumberedServer::new(json!({}));
        let sampler = server.sampler().await.with_options(options);
        server.samples(vec![json!(503); 1000]);
        let error = sampler.sample([1], params()).await.unwrap_err();
        let ends = lines.with(&["tinkex::retry INFO", "giving up", "lane=\"sample\""]);
        let [end] = &ends[..] else { panic!("{ends:?}") };
        assert!(end.contains(&format!("attempts={} elapsed=100", error.attempts())), "{end}");
    }
}

/// The last failure is the cause of a sample that the progress timeout ends.
#[tokio::test(start_paused = true)]
async fn the_progress_timeout_keeps_the_last_failure() {
    let server = NumberedServer::new(json!({}));
    let limit = Duration::from_secs(100);
    let impatient = CallOptions::new().progress_timeout(limit);
    let sampler = server.sampler().await.with_options(impatient);
    server.samples(vec![json!(503); 1000]);
    let error = sampler.sample([1], params()).await.unwrap_err();
    assert_eq!((error.kind(), error.status()), (ErrorKind::Server, Some(503)));
    assert_eq!(error.elapsed(), limit);
    assert_eq!(error.attempts() as usize, server.requests("/asample").len());
    server.samples(Vec::new());
    server.respond("q1", vec![json!("hang")]);
    let error = sampler.sample([1], params()).await.unwrap_err();
    assert_eq!((error.kind(), error.status()), (ErrorKind::Timeout, None));
}

/// Unlike in the Python SDK, the result is polled again, or the sample is resubmitted (N-13).
///
/// Covers T3.2.3.
#[tokio::test(start_paused = true)]
async fn a_failure_of_category_server_is_retried() {
    let server = NumberedServer::new(json!({}));
    let failed = json!({"error": "node lost", "category": "server"});
    let service = server.builder().build().unwrap();
    let sampler = service.create_sampling_client("base").await.unwrap();
    for seq in 0..2 {
        server.respond(&format!("q{seq}"), vec![failed.clone()]);
    }
    sampler.sample([1], params()).await.unwrap();
    assert_eq!(server.requests("/asample").len(), 3, "resubmitted twice");

    let model = service.create_lora_training_client("base").await.unwrap();
    server.respond("r1", vec![failed.clone(), failed.clone(), json!({"metrics": {}})]);
    model.optim_step(AdamParams::default()).await.unwrap();

    let once = CallOptions::without_retries();
    server.respond("r2", vec![failed.clone(), json!({"metrics": {}})]);
    let error = model.with_options(once).optim_step(AdamParams::default()).await.unwrap_err();
    assert_eq!((error.kind(), error.attempts()), (ErrorKind::WorkFailed, 1));
    server.respond("q3", vec![failed]);
    let sampler = sampler.with_options(once);
    assert_eq!(sampler.sample([1], params()).await.unwrap_err().kind(), ErrorKind::WorkFailed);
    let single = server.sampler().await.with_options(CallOptions::new().max_resubmissions(0));
    server.respond("q0", vec![json!(410)]);
    let error = single.sample([1], params()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Expired, "the sample was resubmitted");
}

#[tokio::test(start_paused = true)]
async fn the_timeout_of_a_call_limits_every_call() {
    let silent = |_: Request<Bytes>| std::future::pending();
    let builder = ServiceClient::builder().env(Env::empty()).without_telemetry();
    let service = builder.base_url("http://server.test").api_key("tml-x").http(silent);
    let limit = Duration::from_secs(5);
    let service = service.build().unwrap().with_options(CallOptions::new().timeout(limit));
    let rest = service.rest();
    let copy = CopyCheckpoint::new("tinker://run/weights/a").into_project("p");
    let loss = CustomLoss::trace("sum", |trace| trace.input("logprobs", 1).sum()).unwrap();
    let start = Instant::now();
    let calls: Vec<(&str, BoxFuture<'_, Error>)> = vec![
        ("copy_weights", rest.copy_weights(copy).map(Result::unwrap_err).boxed()),
        ("get_api_key", rest.get_api_key().map(Result::unwrap_err).boxed()),
        ("delete_api_key", rest.delete_api_key().map(Result::unwrap_err).boxed()),
        ("whoami", service.whoami().map(Result::unwrap_err).boxed()),
        ("create_custom_loss", service.create_custom_loss(&loss).map(Result::unwrap_err).boxed()),
        ("server_capabilities", service.server_capabilities().map(Result::unwrap_err).boxed()),
        ("sampling", service.create_sampling_client("base").map(Result::unwrap_err).boxed()),
        ("training", service.create_lora_training_client("base").map(Result::unwrap_err).boxed()),
    ];
    // All calls have started, and end at the same time.
    for (name, call) in calls {
        let error = call.await;
        assert_eq!((error.kind(), start.elapsed()), (ErrorKind::Timeout, limit), "{name}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_sampling_client_has_the_options_of_its_training_client() {
    let server = NumberedServer::new(json!({}));
    let service = server.builder().build().unwrap();
    let model = service.create_lora_training_client("base").await.unwrap();
    let model = model.with_options(CallOptions::without_retries());
    server.respond("r1", vec![json!({"path": null, "sampling_session_id": "s:sample:9"})]);
    let sampler = model.save_weights_and_get_sampling_client().await.unwrap();
    server.samples(vec![json!({"status": 500})]);
    let error = sampler.sample([1], params()).await.unwrap_err();
    assert_eq!((error.status(), error.attempts()), (Some(500), 1));
}
