//! [`EventQueue`]: events that wait to be sent.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tinkex_wire::{
    EventKind, SessionId, Severity, TelemetryBatch, TelemetryEvent, Timestamp, format_duration,
};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout};
use uuid::Uuid;

use crate::transport::header;

/// How many events may wait; more are refused.
pub(super) const MOST_EVENTS: usize = 10_000;

#[derive(Debug)]
pub(crate) struct EventQueue {
    session_id: String,
    /// Whether the start and the end of a session are events.
    has_session: bool,
    started: Instant,
    next_index: AtomicU64,
    ended: AtomicBool,
    events: Mutex<VecDeque<TelemetryEvent>>,
    /// How many events were written and how many have left, each since the start.
    written: AtomicU64,
    left: watch::Sender<u64>,
    hurry: Notify,
}

/// Whose events it is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TelemetryScope<'a> {
    /// A session that begins and ends with it.
    Session(&'a SessionId),
    /// Somebody in another's session.
    RestoredSession(&'a SessionId),
    /// A client without a session.
    NoSession,
}

impl EventQueue {
    /// An empty one, or one that begins with the start of a session.
    pub(crate) fn new(of: TelemetryScope<'_>) -> Self {
        let session_id = match of {
            TelemetryScope::Session(id) | TelemetryScope::RestoredSession(id) => id.to_string(),
            TelemetryScope::NoSession => format!("sessionless-{}", Uuid::new_v4()),
        };
        let events = Self {
            session_id,
            has_session: matches!(of, TelemetryScope::Session(_)),
            started: Instant::now(),
            next_index: AtomicU64::new(0),
            ended: AtomicBool::new(false),
            events: Mutex::default(),
            written: AtomicU64::new(0),
            left: watch::channel(0).0,
            hurry: Notify::new(),
        };
        if events.has_session {
            events.write([(Severity::Info, EventKind::SessionStart)]);
        }
        events
    }

    /// Writes these events, or none of them if they are too many.
    pub(crate) fn write<const N: usize>(&self, events: [(Severity, EventKind); N]) -> bool {
        self.append(events.into_iter().map(|(severity, kind)| self.event(severity, kind)).collect())
    }

    pub(super) fn append(&self, new: Vec<TelemetryEvent>) -> bool {
        let mut events = self.lock();
        if events.len() + new.len() > MOST_EVENTS {
            drop(events);
            tracing::warn!("too many telemetry events are waiting; {} are dropped", new.len());
            return false;
        }
        self.written.fetch_add(new.len() as u64, Ordering::AcqRel);
        events.extend(new);
        true
    }

    pub(super) fn event(&self, severity: Severity, kind: EventKind) -> TelemetryEvent {
        TelemetryEvent::new(
            Uuid::new_v4().to_string(),
            self.next_index.fetch_add(1, Ordering::Relaxed),
            severity,
            Timestamp::now(),
            kind,
        )
    }

    /// The end of the session, if there is one and nobody has said so yet.
    pub(super) fn last_event(&self) -> Option<EventKind> {
        let first = self.has_session && !self.ended.swap(true, Ordering::AcqRel);
        first.then(|| EventKind::SessionEnd { duration: format_duration(self.started.elapsed()) })
    }

    pub(super) fn end(&self) {
        if let Some(end) = self.last_event() {
            self.write([(Severity::Info, end)]);
        }
    }

    /// Sends what there is without waiting for the next round.
    pub(crate) fn hurry(&self) {
        self.hurry.notify_one();
    }

    /// Waits for somebody in a hurry, but not longer than that.
    pub(super) async fn next_round(&self, longest: Duration) {
        let _ = timeout(longest, self.hurry.notified()).await;
    }

    /// Waits until everything that is written now has left.
    pub(crate) async fn drained(&self) {
        let all = self.written.load(Ordering::Acquire);
        self.hurry();
        let _ = self.left.subscribe().wait_for(|left| *left >= all).await;
    }

    /// The next events to send. They stay until [`EventQueue::gone`].
    pub(crate) fn batch(&self) -> Option<TelemetryBatch> {
        let events: Vec<_> = self.lock().iter().take(TelemetryBatch::MAX_EVENTS).cloned().collect();
        (!events.is_empty()).then(|| {
            TelemetryBatch::new(events, header::os(), self.session_id.clone(), process_id())
        })
    }

    /// The oldest `count` events have left, or are given up.
    pub(super) fn gone(&self, count: usize) {
        let mut events = self.lock();
        // Another may have been at it when the client ended.
        let count = count.min(events.len());
        events.drain(..count);
        drop(events);
        self.left.send_modify(|left| *left += count as u64);
    }

    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<TelemetryEvent>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One id per process, and another after a fork.
fn process_id() -> String {
    static ID: Mutex<Option<(u32, Uuid)>> = Mutex::new(None);
    let mut id = ID.lock().unwrap_or_else(PoisonError::into_inner);
    let process = std::process::id();
    let (_, uuid) = match *id {
        Some(known) if known.0 == process => known,
        _ => *id.insert((process, Uuid::new_v4())),
    };
    uuid.to_string()
}
