//! Telemetry: sends failures, and the start and end of sessions, to the server in batches.
//!
//! All parts of the client record events in the [`EventQueue`]; `flush` sends them. Events
//! contain no credential: they consist of numbers and of errors, and errors contain no credential.

mod event_queue;
mod flush;

#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::json;
use tinkex_wire::{EventKind, JsonObject, Severity};
use tokio::time::timeout;

use crate::Transport;
use crate::background::BackgroundTask;
use crate::error::{Error, ErrorKind};
use crate::task;

pub use event_queue::{EventQueue, TelemetryScope};

/// Longest time that closing a client waits for the remaining events to be sent.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);

/// Event queue, and the task that sends its events. After a drop the remaining events are sent in
/// the background.
pub struct Reporter {
    events: Arc<EventQueue>,
    transport: Arc<Transport>,
    task: Mutex<Option<Arc<BackgroundTask>>>,
}

impl fmt::Debug for Reporter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reporter").field("events", &self.events).finish_non_exhaustive()
    }
}

impl Reporter {
    /// Starts the task that sends the events of `transport` and of the clients that use it.
    pub fn start(transport: &Arc<Transport>, scope: TelemetryScope<'_>) -> Self {
        let events = Arc::new(EventQueue::new(scope));
        transport.record_failures_in(Arc::clone(&events));
        let queue = Arc::clone(&events);
        let sender = Arc::clone(transport);
        let flush = move || flush::run(Arc::clone(&queue), Arc::clone(&sender));
        let task = transport.background().start(flush);
        Self { events, transport: Arc::clone(transport), task: Mutex::new(Some(task)) }
    }

    /// Returns the queue of events.
    pub fn events(&self) -> &EventQueue {
        &self.events
    }

    /// Records the end of the session, sends the remaining events and stops. Idempotent.
    pub async fn close(&self) {
        self.events.end();
        self.drain().await;
        drop(self.stop());
    }

    /// Waits until all events recorded so far have been sent, at most 30 seconds.
    pub async fn drain(&self) {
        self.transport.background().ensure_running();
        if timeout(DRAIN_TIMEOUT, self.events.drained()).await.is_err() {
            tracing::debug!("telemetry was not sent in time");
        }
    }

    fn stop(&self) -> Option<Arc<BackgroundTask>> {
        self.task.lock().take()
    }
}

impl Drop for Reporter {
    fn drop(&mut self) {
        if self.stop().is_none() {
            return;
        }
        self.events.end();
        let events = Arc::clone(&self.events);
        let transport = Arc::clone(&self.transport);
        task::try_spawn_detached(async move {
            let _ = timeout(DRAIN_TIMEOUT, flush::send_all(&events, &transport)).await;
        });
    }
}

impl EventQueue {
    /// Records a failed call. If a user error is anywhere in the source chain, the failure is
    /// recorded as a user error.
    pub fn failure(&self, error: &(dyn std::error::Error + 'static)) {
        self.record([describe(error)]);
        self.flush_now();
    }

    /// Records a failure that ends the program, and the end of the session.
    pub fn fatal(&self, error: &(dyn std::error::Error + 'static)) {
        match self.take_end_event() {
            Some(end) => self.record([describe(error), (Severity::Info, end)]),
            None => self.record([describe(error)]),
        };
        self.flush_now();
    }

    /// Records a named event. Returns whether it was recorded.
    pub fn generic(&self, name: &str, severity: Severity, data: JsonObject) -> bool {
        let kind = EventKind::GenericEvent { event_name: name.to_owned(), event_data: data };
        self.record([(severity, kind)])
    }

    /// Records a failed attempt of a request that may be retried.
    pub fn attempt(&self, name: &str, error: &Error, details: JsonObject) {
        let retryable = error.is_retryable();
        let user = error.is_user_error();
        let mut data = JsonObject::new();
        data.insert("exception".to_owned(), json!(safe_message(error)));
        data.insert("exception_type".to_owned(), json!(kind_name(error)));
        data.insert("status_code".to_owned(), json!(error.status()));
        data.insert("is_retryable".to_owned(), json!(retryable));
        data.insert("is_user_error".to_owned(), json!(user));
        data.extend(details);
        let severity = if retryable || user { Severity::Warning } else { Severity::Error };
        self.generic(name, severity, data);
    }
}

/// Returns the event for an error: a user error if the source chain contains a user error, else an
/// unhandled exception.
fn describe(error: &(dyn std::error::Error + 'static)) -> (Severity, EventKind) {
    let type_name = |error: &(dyn std::error::Error + 'static)| {
        error.downcast_ref::<Error>().map_or_else(|| "Error".to_owned(), kind_name)
    };
    let mut causes = std::iter::successors(Some(error), |error| error.source());
    let user_error = causes
        .find_map(|cause| cause.downcast_ref::<Error>().filter(|cause| cause.is_user_error()));
    let Some(user_error) = user_error else {
        let error_type = type_name(error);
        let error_message = message(error);
        let kind = EventKind::UnhandledException { error_message, error_type, traceback: None };
        return (Severity::Error, kind);
    };
    let mut data = JsonObject::new();
    data.insert("error_type".to_owned(), json!(type_name(error)));
    data.insert("message".to_owned(), json!(message(error)));
    if let Some(status) = user_error.status() {
        data.insert("status_code".to_owned(), json!(status));
    }
    let event_name = "user_error".to_owned();
    (Severity::Warning, EventKind::GenericEvent { event_name, event_data: data })
}

/// Returns the message of any error, without the output of a credential command.
fn message(error: &(dyn std::error::Error + 'static)) -> String {
    error.downcast_ref::<Error>().map_or_else(|| error.to_string(), safe_message)
}

/// Returns the message of an error of this crate, without the output of a credential command.
pub fn safe_message(error: &Error) -> String {
    if error.kind() == ErrorKind::Auth && error.status().is_none() {
        return "no usable credential".to_owned();
    }
    error.to_string()
}

fn kind_name(error: &Error) -> String {
    format!("{:?}", error.kind())
}
