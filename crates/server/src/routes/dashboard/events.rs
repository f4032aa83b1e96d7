//! The stream of changes.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use serde_json::Value;
use tokio::sync::{mpsc, watch};
use tokio::time::sleep;

use crate::dashboard::{ChangeCursor, DashboardSource};
use crate::inference::EventSource;
use crate::task::Executor;

/// Time for which changes are collected before they are sent.
const COLLECT: Duration = Duration::from_millis(150);
/// Interval at which figures are sent, and changes are looked for that nothing announces.
const INTERVAL: Duration = Duration::from_secs(2);
/// Interval for sources that announce nothing.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// Number of events that wait for a slow reader. Changes are collected meanwhile.
const BUFFER: usize = 4;

/// Events of one page. Dropping it ends the task that produces them.
pub(super) struct ChangeEvents(mpsc::Receiver<Bytes>);

impl EventSource for ChangeEvents {
    fn poll_events(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        self.0.poll_recv(context)
    }
}

/// Starts to produce events. With a cursor, the first event has what changed since; without one, the
/// stream starts now.
pub(super) fn start(
    source: Arc<dyn DashboardSource>,
    executor: &Executor,
    cursor: Option<ChangeCursor>,
    closed: watch::Receiver<bool>,
) -> ChangeEvents {
    let (sender, receiver) = mpsc::channel(BUFFER);
    let jobs = executor.clone();
    drop(executor.spawn("events", produce(source, jobs, cursor, closed, sender)));
    ChangeEvents(receiver)
}

async fn produce(
    source: Arc<dyn DashboardSource>,
    executor: Executor,
    cursor: Option<ChangeCursor>,
    mut closed: watch::Receiver<bool>,
    sender: mpsc::Sender<Bytes>,
) {
    let mut changed = source.subscribe();
    let is_new = cursor.is_none();
    let mut cursor = cursor.unwrap_or_default();
    let mut first = true;
    loop {
        let (job_source, mut job_cursor) = (Arc::clone(&source), cursor.clone());
        let job = move || {
            let changes = job_source.changes(&mut job_cursor);
            (changes, job_source.server().ok(), job_cursor)
        };
        let Ok((changes, figures, next)) = executor.run_job(job).await else { return };
        cursor = next;
        let id = cursor.event_id();
        let mut events = String::new();
        if first && is_new {
            // The page has read everything that existed before.
            events += &event(&id, "start", &Value::Object(serde_json::Map::default()));
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
                        Ok(()) => sleep(COLLECT).await,
                        Err(_) => sleep(INTERVAL).await,
                    },
                    () = sleep(INTERVAL) => {}
                },
                None => sleep(LOOK_INTERVAL).await,
            }
        };
        tokio::select! {
            () = waited => {}
            () = sender.closed() => return,
            _ = closed.wait_for(|closed| *closed) => return,
        }
    }
}

/// Formats an event. JSON on one line contains no line break, which would end the data.
fn event(id: &str, name: &str, data: &Value) -> String {
    format!("id: {id}\nevent: {name}\ndata: {data}\n\n")
}
