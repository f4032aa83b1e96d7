//! Tests of event contents, queue limits and flushing.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use ::http::{HeaderMap, Request, Response};
use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use serde_json::{Value, json};
use tinkex_wire::{ErrorCategory, RequestFailed, SessionId};
use tokio::time::sleep;

use super::*;
use crate::call_options::CallOptions;
use crate::config::{ApiKey, Credential};
use crate::fixture;
use crate::http::{HttpFailure, HttpService, Lane};

fn session() -> SessionId {
    SessionId::from("s")
}

fn event(name: &str) -> (Severity, EventKind) {
    let event_name = name.to_owned();
    (Severity::Info, EventKind::GenericEvent { event_name, event_data: JsonObject::new() })
}

/// Returns the recorded cases with this id.
fn case(id: &str) -> Vec<Value> {
    let cases = fixture::cases("telemetry_events.json");
    cases.into_iter().filter(|case| case["id"] == id).collect()
}

/// An application error with a client error as its source.
#[derive(Debug)]
struct AppError(Error);

impl std::fmt::Display for AppError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("wrapped")
    }
}

impl std::error::Error for AppError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.0)
    }
}

#[test]
fn events_have_the_fields_that_the_python_sdk_sends() {
    let events = EventQueue::new(TelemetryScope::Session(&session()));
    let data = [("k".to_owned(), json!(1))].into_iter().collect();
    events.generic("my.event", Severity::Warning, data);
    events.failure(&std::io::Error::other("boom"));
    events.fatal(&AppError(Error::from_response(404, b"", None)));
    let failed = RequestFailed::new("rf", ErrorCategory::User);
    events.fatal(&Error::from_failed_request(failed));
    let batch = serde_json::to_value(events.batch().unwrap()).unwrap();
    let mut recorded = batch["events"].as_array().unwrap().clone();
    let mut ids = Vec::new();
    for event in &mut recorded {
        let fields = event.as_object_mut().unwrap();
        ids.push(fields.remove("event_id").unwrap());
        assert!(fields.remove("timestamp").unwrap().as_str().unwrap().contains('T'));
        if let Some(duration) = fields.get_mut("duration") {
            *duration = json!("<H:MM:SS.ffffff>");
        }
    }
    ids.dedup();
    assert_eq!(ids.len(), recorded.len());
    let mut expected = case("events")[0]["events"].as_array().unwrap().clone();
    // Error type names differ from those of the Python SDK.
    expected[2]["error_type"] = json!("Error");
    expected[3]["event_data"]["error_type"] = json!("Error");
    expected[5]["event_data"]["error_type"] = json!("WorkFailed");
    assert_eq!(recorded, expected, "the first fatal failure records the end of the session");
    assert_eq!(batch["session_id"], "s");
    assert_eq!(
        batch["process_uuid"],
        serde_json::to_value(events.batch()).unwrap()["process_uuid"]
    );
}

#[test]
fn a_user_error_anywhere_in_the_source_chain_counts() {
    let mut checked = 0;
    for case in fixture::cases("retry_classification.json") {
        let name = case["error"].as_str().unwrap();
        let Some(status) = name.strip_prefix("generic error caused by status ") else { continue };
        let error = AppError(Error::from_response(status.parse().unwrap(), b"", None));
        let (severity, _) = describe(&error);
        assert_eq!(json!(severity == Severity::Warning), case["is_user_error"], "{case}");
        checked += 1;
    }
    assert_eq!(checked, 3);
}

#[test]
fn a_client_without_a_session_records_neither_start_nor_end() {
    let case = &case("sessionless")[0];
    let events = EventQueue::new(TelemetryScope::NoSession);
    assert_eq!(json!(events.len()), case["initial_events"]);
    events.fatal(&std::io::Error::other("boom"));
    events.end();
    let batch = serde_json::to_value(events.batch().unwrap()).unwrap();
    let prefix = case["session_id_prefix"].as_str().unwrap();
    assert!(batch["session_id"].as_str().unwrap().starts_with(prefix));
    let kinds: Vec<_> =
        batch["events"].as_array().unwrap().iter().map(|event| &event["event"]).collect();
    assert_eq!(json!(kinds), case["fatal_event_types"]);
}

#[test]
fn a_full_queue_rejects_events_all_or_none() {
    let case = &case("queue_cap")[0];
    let events = EventQueue::new(TelemetryScope::Session(&session()));
    assert_eq!(json!(events.len()), case["start"]);
    let sizes = case["push_sizes"].as_array().unwrap();
    let accepted: Vec<bool> = sizes
        .iter()
        .map(|size| {
            let new = (0..size.as_u64().unwrap()).map(|_| event("e"));
            events.append(new.map(|(severity, kind)| events.event(severity, kind)).collect())
        })
        .collect();
    assert_eq!(json!(accepted), case["accepted"]);
    assert_eq!(json!(events.len()), case["final_len"]);
}

/// Records the sizes of received batches, after a list of scripted failures.
#[derive(Clone, Default)]
struct TelemetryServer {
    batches: Arc<Mutex<Vec<usize>>>,
    /// Statuses to respond with first, last one first; 0 is a lost connection.
    failures: Arc<Mutex<Vec<u16>>>,
}

impl HttpService for TelemetryServer {
    fn send(
        &self,
        lane: Lane,
        request: Request<Bytes>,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>> {
        assert_eq!((lane, timeout), (Lane::Telemetry, Duration::from_secs(5)));
        if let Some(status) = self.failures.lock().unwrap().pop() {
            let response = Response::builder().status(status).body(Bytes::from_static(b"no"));
            let failed =
                if status == 0 { Err(HttpFailure::connect("x")) } else { Ok(response.unwrap()) };
            return futures_util::future::ready(failed).boxed();
        }
        let body: Value = serde_json::from_slice(request.body()).unwrap();
        self.batches.lock().unwrap().push(body["events"].as_array().unwrap().len());
        let response = Response::new(Bytes::from_static(b"{\"status\":\"accepted\"}"));
        futures_util::future::ready(Ok(response)).boxed()
    }
}

impl TelemetryServer {
    fn transport(&self) -> Arc<Transport> {
        let key = Credential::Key(ApiKey::new("tml-x").unwrap());
        let base = "http://telemetry.test".parse().unwrap();
        let policy = CallOptions::without_retries();
        Transport::new(Arc::new(self.clone()), base, key, HeaderMap::new(), policy, Arc::default())
    }

    fn received(&self) -> Vec<usize> {
        self.batches.lock().unwrap().clone()
    }
}

#[tokio::test(start_paused = true)]
async fn events_are_sent_in_the_batches_of_the_python_sdk() {
    for case in case("flush") {
        let server = TelemetryServer::default();
        let events = EventQueue::new(TelemetryScope::NoSession);
        for _ in 0..case["queued"].as_u64().unwrap() {
            events.record([event("e")]);
        }
        flush::send_all(&events, &server.transport()).await;
        assert_eq!(json!(server.received()), case["batches"]);
    }
}

/// Covers R-TEL.
#[tokio::test(start_paused = true)]
async fn events_are_sent_every_ten_seconds_and_at_once_on_failure_and_on_close() {
    let server = TelemetryServer::default();
    let reporter = Reporter::start(&server.transport(), TelemetryScope::Session(&session()));
    sleep(Duration::from_secs(9)).await;
    assert!(server.received().is_empty());
    sleep(Duration::from_secs(2)).await;
    assert_eq!(server.received(), [1], "the start of the session");
    reporter.events().failure(&std::io::Error::other("boom"));
    sleep(Duration::from_millis(1)).await;
    assert_eq!(server.received(), [1, 1], "failures are sent at once");
    reporter.events().record([event("e")]);
    reporter.close().await;
    assert_eq!(server.received(), [1, 1, 2], "the event and the end of the session");
    reporter.close().await;
    drop(reporter);
    sleep(Duration::from_secs(60)).await;
    assert_eq!(server.received().len(), 3, "the end is recorded once");
}

#[tokio::test(start_paused = true)]
async fn remaining_events_are_sent_in_the_background_on_drop() {
    let server = TelemetryServer::default();
    drop(Reporter::start(&server.transport(), TelemetryScope::Session(&session())));
    sleep(Duration::from_millis(1)).await;
    assert_eq!(server.received(), [2], "start and end");
}

/// Covers X9.
#[tokio::test(start_paused = true)]
async fn the_flush_task_survives_server_failures() {
    let server = TelemetryServer::default();
    *server.failures.lock().unwrap() = vec![500, 0, 400, 404, 0, 500];
    let reporter = Reporter::start(&server.transport(), TelemetryScope::Session(&session()));
    reporter.drain().await;
    assert!(server.received().is_empty(), "the batch is dropped after three attempts");
    reporter.events().record([event("e")]);
    reporter.drain().await;
    assert!(server.failures.lock().unwrap().is_empty());
    reporter.events().record([event("e")]);
    reporter.drain().await;
    assert_eq!(server.received(), [1]);
}

#[test]
fn a_queue_started_without_a_session_is_assigned_to_the_first_one() {
    let events = EventQueue::new(TelemetryScope::NoSession);
    events.failure(&std::io::Error::other("boom"));
    events.begin_session(TelemetryScope::Session(&session()));
    events.begin_session(TelemetryScope::Session(&SessionId::from("other")));
    let batch = serde_json::to_value(events.batch().unwrap()).unwrap();
    assert_eq!(batch["session_id"], "s");
    assert_eq!(events.len(), 2, "the failure and one start");
}
