//! Events, their limits and their way to the server.

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
use crate::config::{ApiKey, Credential};
use crate::fixture;
use crate::transport::http::{HttpFailure, HttpService, Lane};
use crate::transport::retry::RetryPolicy;

fn session() -> SessionId {
    SessionId::from("s")
}

fn event(name: &str) -> (Severity, EventKind) {
    let event_name = name.to_owned();
    (Severity::Info, EventKind::GenericEvent { event_name, event_data: JsonObject::new() })
}

fn case(id: &str) -> Vec<Value> {
    let cases = fixture::cases("telemetry_events.json");
    cases.into_iter().filter(|case| case["id"] == id).collect()
}

/// An error of the program around one of ours.
#[derive(Debug)]
struct Around(Error);

impl std::fmt::Display for Around {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("wrapped")
    }
}

impl std::error::Error for Around {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.0)
    }
}

#[test]
fn events_have_the_shape_of_the_reference() {
    let events = EventQueue::new(TelemetryScope::Session(&session()));
    let data = [("k".to_owned(), json!(1))].into_iter().collect();
    events.note("my.event", Severity::Warning, data);
    events.failure(&std::io::Error::other("boom"));
    events.fatal(&Around(Error::from_response(404, b"", None)));
    let failed = RequestFailed { error: "rf".to_owned(), category: ErrorCategory::User };
    events.fatal(&Error::from_failed_request(failed));
    let batch = serde_json::to_value(events.batch().unwrap()).unwrap();
    let mut seen = batch["events"].as_array().unwrap().clone();
    let mut ids = Vec::new();
    for event in &mut seen {
        let fields = event.as_object_mut().unwrap();
        ids.push(fields.remove("event_id").unwrap());
        assert!(fields.remove("timestamp").unwrap().as_str().unwrap().contains('T'));
        if let Some(duration) = fields.get_mut("duration") {
            *duration = json!("<H:MM:SS.ffffff>");
        }
    }
    ids.dedup();
    assert_eq!(ids.len(), seen.len());
    let mut expected = case("events")[0]["events"].as_array().unwrap().clone();
    // The names of error types are our own.
    expected[2]["error_type"] = json!("Error");
    expected[3]["event_data"]["error_type"] = json!("Error");
    expected[5]["event_data"]["error_type"] = json!("WorkFailed");
    assert_eq!(seen, expected, "one end, at the first fatal failure");
    assert_eq!(batch["session_id"], "s");
    assert_eq!(
        batch["process_uuid"],
        serde_json::to_value(events.batch()).unwrap()["process_uuid"]
    );
}

#[test]
fn a_mistake_counts_as_one_wherever_in_the_causes_it_is() {
    let mut seen = 0;
    for case in fixture::cases("retry_classification.json") {
        let name = case["error"].as_str().unwrap();
        let Some(status) = name.strip_prefix("generic error caused by status ") else { continue };
        let error = Around(Error::from_response(status.parse().unwrap(), b"", None));
        let (severity, _) = describe(&error);
        assert_eq!(json!(severity == Severity::Warning), case["is_user_error"], "{case}");
        seen += 1;
    }
    assert_eq!(seen, 3);
}

#[test]
fn a_client_without_a_session_has_neither_start_nor_end() {
    let case = &case("sessionless")[0];
    let events = EventQueue::new(TelemetryScope::NoSession);
    assert_eq!(json!(events.waiting()), case["initial_events"]);
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
fn too_many_events_are_refused_all_at_once() {
    let case = &case("queue_cap")[0];
    let events = EventQueue::new(TelemetryScope::Session(&session()));
    assert_eq!(json!(events.waiting()), case["start"]);
    let sizes = case["push_sizes"].as_array().unwrap();
    let taken: Vec<bool> = sizes
        .iter()
        .map(|size| {
            let new = (0..size.as_u64().unwrap()).map(|_| event("e"));
            events.append(new.map(|(severity, kind)| events.event(severity, kind)).collect())
        })
        .collect();
    assert_eq!(json!(taken), case["accepted"]);
    assert_eq!(json!(events.waiting()), case["final_len"]);
}

/// Takes batches, or fails in every way there is.
#[derive(Clone, Default)]
struct Server {
    batches: Arc<Mutex<Vec<usize>>>,
    /// Answers before it takes anything.
    failures: Arc<Mutex<Vec<u16>>>,
}

impl HttpService for Server {
    fn send(
        &self,
        lane: Lane,
        request: Request<Bytes>,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>> {
        assert_eq!((lane, timeout), (Lane::Telemetry, Duration::from_secs(5)));
        if let Some(status) = self.failures.lock().unwrap().pop() {
            let reply = Response::builder().status(status).body(Bytes::from_static(b"no"));
            let failed =
                if status == 0 { Err(HttpFailure::connect("x")) } else { Ok(reply.unwrap()) };
            return futures_util::future::ready(failed).boxed();
        }
        let body: Value = serde_json::from_slice(request.body()).unwrap();
        self.batches.lock().unwrap().push(body["events"].as_array().unwrap().len());
        let reply = Response::new(Bytes::from_static(b"{\"status\":\"accepted\"}"));
        futures_util::future::ready(Ok(reply)).boxed()
    }
}

impl Server {
    fn transport(&self) -> Arc<Transport> {
        let key = Credential::Key(ApiKey::new("tml-x").unwrap());
        let base = "http://telemetry.test".parse().unwrap();
        let policy = RetryPolicy::default().with_max_resends(0);
        Transport::new(Arc::new(self.clone()), base, key, HeaderMap::new(), policy)
    }

    fn seen(&self) -> Vec<usize> {
        self.batches.lock().unwrap().clone()
    }
}

#[tokio::test(start_paused = true)]
async fn events_leave_in_batches_as_in_the_reference() {
    for case in case("flush") {
        let (server, events) = (Server::default(), EventQueue::new(TelemetryScope::NoSession));
        for _ in 0..case["queued"].as_u64().unwrap() {
            events.write([event("e")]);
        }
        flush::send_all(&events, &server.transport()).await;
        assert_eq!(json!(server.seen()), case["batches"]);
    }
}

/// Covers R-TEL.
#[tokio::test(start_paused = true)]
async fn events_leave_every_ten_seconds_or_in_a_hurry_and_at_the_end() {
    let server = Server::default();
    let reporter = Reporter::start(&server.transport(), TelemetryScope::Session(&session()));
    sleep(Duration::from_secs(9)).await;
    assert!(server.seen().is_empty());
    sleep(Duration::from_secs(2)).await;
    assert_eq!(server.seen(), [1], "the start of the session");
    reporter.events().failure(&std::io::Error::other("boom"));
    sleep(Duration::from_millis(1)).await;
    assert_eq!(server.seen(), [1, 1], "failures do not wait");
    reporter.events().write([event("e")]);
    reporter.close().await;
    assert_eq!(server.seen(), [1, 1, 2], "the event and the end");
    reporter.close().await;
    drop(reporter);
    sleep(Duration::from_secs(60)).await;
    assert_eq!(server.seen().len(), 3, "one end is enough");
}

#[tokio::test(start_paused = true)]
async fn what_is_left_when_a_client_is_dropped_leaves_in_the_background() {
    let server = Server::default();
    drop(Reporter::start(&server.transport(), TelemetryScope::Session(&session())));
    sleep(Duration::from_millis(1)).await;
    assert_eq!(server.seen(), [2], "start and end");
}

/// Covers X9.
#[tokio::test(start_paused = true)]
async fn the_task_survives_whatever_the_server_does() {
    let server = Server::default();
    *server.failures.lock().unwrap() = vec![500, 0, 400, 404, 0, 500];
    let reporter = Reporter::start(&server.transport(), TelemetryScope::Session(&session()));
    reporter.drain().await;
    assert!(server.seen().is_empty(), "the batch was given up, and nobody waits for it");
    reporter.events().write([event("e")]);
    reporter.drain().await;
    assert!(server.failures.lock().unwrap().is_empty());
    reporter.events().write([event("e")]);
    reporter.drain().await;
    assert_eq!(server.seen(), [1]);
}
