//! How the client is doing, told to the server now and then.
//!
//! Anyone may write into a [`EventQueue`]; that never waits and never fails a call. [`flush`] sends it
//! in batches. No event holds a credential: they are made of errors, which hold none, and of
//! numbers.

mod event_queue;
mod flush;

#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::json;
use tinkex_wire::{EventKind, JsonObject, Severity};
use tokio::time::timeout;

use crate::error::{Error, ErrorKind};
use crate::task::{self, Task};
use crate::transport::Transport;

pub(crate) use event_queue::{EventQueue, TelemetryScope};

/// How long the end of a client waits for its last events to leave.
const LAST_WORDS: Duration = Duration::from_secs(30);

/// A events and the task that sends it. What is left when this is dropped is sent in the
/// background.
pub(crate) struct Reporter {
    events: Arc<EventQueue>,
    transport: Arc<Transport>,
    task: Mutex<Option<Task>>,
}

impl Reporter {
    /// Begins to report.
    pub(crate) fn start(transport: &Arc<Transport>, owner: TelemetryScope<'_>) -> Self {
        let events = Arc::new(EventQueue::new(owner));
        transport.write_into(Arc::clone(&events));
        let task = Task::spawn(flush::run(Arc::clone(&events), Arc::clone(transport)));
        Self { events, transport: Arc::clone(transport), task: Mutex::new(Some(task)) }
    }

    pub(crate) fn events(&self) -> &EventQueue {
        &self.events
    }

    /// Writes the last event, sends what there is, and stops. A second call finds nothing to do.
    pub(crate) async fn close(&self) {
        self.events.end();
        self.drain().await;
        drop(self.stop());
    }

    /// Waits until everything written so far has left, or for half a minute.
    pub(crate) async fn drain(&self) {
        if timeout(LAST_WORDS, self.events.drained()).await.is_err() {
            tracing::debug!("telemetry did not leave in time");
        }
    }

    fn stop(&self) -> Option<Task> {
        self.task.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Drop for Reporter {
    fn drop(&mut self) {
        if self.stop().is_none() {
            return;
        }
        self.events.end();
        let (events, transport) = (Arc::clone(&self.events), Arc::clone(&self.transport));
        task::detach_if_possible(async move {
            let _ = timeout(LAST_WORDS, flush::send_all(&events, &transport)).await;
        });
    }
}

impl EventQueue {
    /// A call of the user failed. Their own mistakes count as such, wherever in the chain of causes
    /// they show.
    pub(crate) fn failure(&self, error: &(dyn std::error::Error + 'static)) {
        self.write([describe(error)]);
        self.hurry();
    }

    /// The program cannot go on: the failure, and the end of the session with it.
    pub(crate) fn fatal(&self, error: &(dyn std::error::Error + 'static)) {
        match self.last_event() {
            Some(end) => self.write([describe(error), (Severity::Info, end)]),
            None => self.write([describe(error)]),
        };
        self.hurry();
    }

    /// Something with a name; one of few.
    pub(crate) fn note(&self, name: &str, severity: Severity, data: JsonObject) -> bool {
        let kind = EventKind::GenericEvent { event_name: name.to_owned(), event_data: data };
        self.write([(severity, kind)])
    }

    /// An attempt failed that may have been repeated.
    pub(crate) fn attempt(&self, name: &str, error: &Error, more: JsonObject) {
        let (retryable, user) = (error.is_retryable(), error.is_user_error());
        let mut data = JsonObject::new();
        data.insert("exception".to_owned(), json!(told(error)));
        data.insert("exception_type".to_owned(), json!(kind(error)));
        data.insert("status_code".to_owned(), json!(error.status()));
        data.insert("is_retryable".to_owned(), json!(retryable));
        data.insert("is_user_error".to_owned(), json!(user));
        data.extend(more);
        let severity = if retryable || user { Severity::Warning } else { Severity::Error };
        self.note(name, severity, data);
    }
}

/// An error as an event: the user's mistake, or something unexpected.
fn describe(error: &(dyn std::error::Error + 'static)) -> (Severity, EventKind) {
    let own = |error: &(dyn std::error::Error + 'static)| {
        error.downcast_ref::<Error>().map_or_else(|| "Error".to_owned(), kind)
    };
    let mut causes = std::iter::successors(Some(error), |error| error.source());
    let mistake = causes
        .find_map(|cause| cause.downcast_ref::<Error>().filter(|cause| is_users_mistake(cause)));
    let Some(mistake) = mistake else {
        let (error_type, error_message) = (own(error), text(error));
        let kind = EventKind::UnhandledException { error_message, error_type, traceback: None };
        return (Severity::Error, kind);
    };
    let mut data = JsonObject::new();
    data.insert("error_type".to_owned(), json!(own(error)));
    data.insert("message".to_owned(), json!(text(error)));
    if let Some(status) = mistake.status() {
        data.insert("status_code".to_owned(), json!(status));
    }
    let event_name = "user_error".to_owned();
    (Severity::Warning, EventKind::GenericEvent { event_name, event_data: data })
}

fn text(error: &(dyn std::error::Error + 'static)) -> String {
    error.downcast_ref::<Error>().map_or_else(|| error.to_string(), told)
}

/// What is told about an error. What a credential command printed is nobody else's business.
pub(crate) fn told(error: &Error) -> String {
    if error.kind() == ErrorKind::Auth && error.status().is_none() {
        return "there was no credential".to_owned();
    }
    error.to_string()
}

/// A request that was refused before it was sent is no failure of ours either.
fn is_users_mistake(error: &Error) -> bool {
    error.is_user_error() || error.kind() == ErrorKind::InvalidInput
}

fn kind(error: &Error) -> String {
    format!("{:?}", error.kind())
}
