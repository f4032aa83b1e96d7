//! [`ChangeEvents`]: the stream of changes, as server-sent events.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use serde::Serialize;
use serde_json::json;
use tinkex_store::executor::Executor;
use tokio::sync::mpsc;
use tokio::time::sleep;

use crate::access::StreamPermit;
use crate::source::{ChangeCursor, DashboardSource};

/// Time for which changes are collected before they are sent.
const COLLECT_TIME: Duration = Duration::from_millis(150);
/// Interval at which the stream sends the metrics of the server, and changes without a
/// notification, such as a run that becomes idle.
const INTERVAL: Duration = Duration::from_secs(2);
/// Interval at which the stream reads a source that does not notify of changes.
const READ_INTERVAL: Duration = Duration::from_millis(500);
/// Maximum number of events that wait for a slow reader. Beyond it, the stream collects changes
/// until the reader continues.
const BUFFER: usize = 4;

/// Events for one page. Dropping the value ends the task that produces the events.
#[derive(Debug)]
pub struct ChangeEvents(mpsc::Receiver<Bytes>);

impl ChangeEvents {
    /// Returns the next events in the format `text/event-stream`; `None` after the last event.
    pub fn poll_events(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        self.0.poll_recv(context)
    }
}

/// Starts to produce events. The first event has the changes since the cursor; without a cursor,
/// the stream starts now.
pub(crate) fn start(
    source: Arc<dyn DashboardSource>,
    executor: &Executor,
    cursor: Option<ChangeCursor>,
    permit: StreamPermit,
) -> ChangeEvents {
    let (sender, receiver) = mpsc::channel(BUFFER);
    let jobs = executor.clone();
    drop(executor.spawn("events", produce(source, jobs, cursor, permit, sender)));
    ChangeEvents(receiver)
}

async fn produce(
    source: Arc<dyn DashboardSource>,
    executor: Executor,
    cursor: Option<ChangeCursor>,
    mut permit: StreamPermit,
    sender: mpsc::Sender<Bytes>,
) {
    let mut changed = source.subscribe();
    let is_new = cursor.is_none();
    let mut cursor = cursor.unwrap_or_default();
    let mut first = true;
    while permit.is_valid() {
        let job_source = Arc::clone(&source);
        let mut job_cursor = cursor.clone();
        let job = move || {
            let changes = job_source.changes(&mut job_cursor);
            (changes, job_source.server().ok(), job_cursor)
        };
        let Ok((changes, figures, next)) = executor.run_job(job).await else { return };
        cursor = next;
        let id = cursor.event_id();
        let mut events = String::new();
        if first && is_new {
            // The page has already read everything that existed before the stream started.
            events += &event(&id, "start", &json!({}));
        } else if let Ok(Some(changes)) = changes {
            events += &event(&id, "changes", &changes);
        }
        first = false;
        if let Some(figures) = figures {
            events += &event(&id, "server", &figures);
        }
        if !events.is_empty() && sender.send(events.into()).await.is_err() {
            return;
        }
        let waited = async {
            match &mut changed {
                Some(changed) => tokio::select! {
                    notified = changed.changed() => match notified {
                        Ok(()) => sleep(COLLECT_TIME).await,
                        Err(_) => sleep(INTERVAL).await,
                    },
                    () = sleep(INTERVAL) => {}
                },
                None => sleep(READ_INTERVAL).await,
            }
        };
        tokio::select! {
            () = waited => {}
            () = sender.closed() => return,
            () = until_invalid(&mut permit) => return,
        }
    }
}

/// Waits until the stream must end.
async fn until_invalid(permit: &mut StreamPermit) {
    while permit.is_valid() {
        permit.changed().await;
    }
}

/// Formats an event. JSON on one line contains no line break, which would end the data.
fn event(id: &str, name: &str, data: &impl Serialize) -> String {
    // Serialization does not fail: documents consist of numbers, texts and maps with text keys.
    let data = serde_json::to_string(data).unwrap_or_default();
    format!("id: {id}\nevent: {name}\ndata: {data}\n\n")
}
