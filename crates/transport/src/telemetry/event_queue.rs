//! [`EventQueue`]: telemetry events that are waiting to be sent.

use std::collections::VecDeque;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tinkex_wire::{
    EventKind, SessionId, Severity, TelemetryBatch, TelemetryEvent, Timestamp, format_duration,
};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout};
use uuid::Uuid;

use crate::request::header;

/// Maximum number of unsent events; further events are dropped.
pub(super) const MAX_EVENTS: usize = 10_000;

/// Bounded queue of telemetry events. Recording an event never blocks and never fails a request.
#[derive(Debug)]
pub struct EventQueue {
    /// Session id that is sent with events that were recorded without a session.
    sessionless_id: String,
    session: OnceLock<QueueSession>,
    next_index: AtomicU64,
    ended: AtomicBool,
    events: Mutex<VecDeque<TelemetryEvent>>,
    /// Number of events recorded since the start.
    recorded: AtomicU64,
    /// Number of events sent or dropped since the start.
    removed: watch::Sender<u64>,
    flush_now: Notify,
}

/// Session that the events of a queue belong to.
#[derive(Debug)]
struct QueueSession {
    id: String,
    started: Instant,
    /// Whether this client created the session. Only then does it record the start and end of the
    /// session.
    owned: bool,
}

/// Session that telemetry events belong to.
#[derive(Clone, Copy, Debug)]
pub enum TelemetryScope<'a> {
    /// A session that this client created.
    Session(&'a SessionId),
    /// A session that another process created.
    RestoredSession(&'a SessionId),
    /// No session.
    NoSession,
}

impl EventQueue {
    /// Creates an empty queue.
    #[must_use]
    pub fn new(scope: TelemetryScope<'_>) -> Self {
        let events = Self {
            sessionless_id: format!("sessionless-{}", Uuid::new_v4()),
            session: OnceLock::new(),
            next_index: AtomicU64::new(0),
            ended: AtomicBool::new(false),
            events: Mutex::default(),
            recorded: AtomicU64::new(0),
            removed: watch::channel(0).0,
            flush_now: Notify::new(),
        };
        events.begin_session(scope);
        events
    }

    /// Assigns all unsent and future events to a session, and records the start of the session if
    /// this client created it. Later calls have no effect.
    pub fn begin_session(&self, scope: TelemetryScope<'_>) {
        let (id, owned) = match scope {
            TelemetryScope::Session(id) => (id, true),
            TelemetryScope::RestoredSession(id) => (id, false),
            TelemetryScope::NoSession => return,
        };
        let session = QueueSession { id: id.to_string(), started: Instant::now(), owned };
        if self.session.set(session).is_ok() && owned {
            self.record([(Severity::Info, EventKind::SessionStart)]);
        }
    }

    /// Records all of `events`, or none if the queue has no capacity for them. Returns whether they
    /// were recorded.
    pub fn record<const N: usize>(&self, events: [(Severity, EventKind); N]) -> bool {
        self.append(events.into_iter().map(|(severity, kind)| self.event(severity, kind)).collect())
    }

    pub(super) fn append(&self, new: Vec<TelemetryEvent>) -> bool {
        let mut events = self.lock();
        if events.len() + new.len() > MAX_EVENTS {
            drop(events);
            tracing::warn!(dropped = new.len(), "telemetry queue is full; events are dropped");
            return false;
        }
        self.recorded.fetch_add(new.len() as u64, Ordering::AcqRel);
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

    /// Returns the event for the end of the session, once, if this client created the session.
    pub(super) fn take_end_event(&self) -> Option<EventKind> {
        let session = self.session.get().filter(|session| session.owned)?;
        let first = !self.ended.swap(true, Ordering::AcqRel);
        let duration = || format_duration(session.started.elapsed());
        first.then(|| EventKind::SessionEnd { duration: duration() })
    }

    /// Records the end of the session, once, if this client created the session.
    pub(super) fn end(&self) {
        if let Some(end) = self.take_end_event() {
            self.record([(Severity::Info, end)]);
        }
    }

    /// Makes the sender flush the queue without waiting for its interval.
    pub(crate) fn flush_now(&self) {
        self.flush_now.notify_one();
    }

    /// Waits until [`flush_now`](Self::flush_now) is called, at most `interval`.
    pub(super) async fn wait_for_flush(&self, interval: Duration) {
        let _ = timeout(interval, self.flush_now.notified()).await;
    }

    /// Waits until all events recorded so far have been sent or dropped.
    pub(crate) async fn drained(&self) {
        let recorded = self.recorded.load(Ordering::Acquire);
        self.flush_now();
        let _ = self.removed.subscribe().wait_for(|removed| *removed >= recorded).await;
    }

    /// Returns the next events to send. The events stay in the queue until `EventQueue::remove`
    /// is called.
    pub fn batch(&self) -> Option<TelemetryBatch> {
        let events: Vec<_> = self.lock().iter().take(TelemetryBatch::MAX_EVENTS).cloned().collect();
        let session_id = self.session.get().map_or(&self.sessionless_id, |session| &session.id);
        (!events.is_empty())
            .then(|| TelemetryBatch::new(events, header::os(), session_id.clone(), process_id()))
    }

    /// Removes the oldest `count` events, which were sent or are dropped after failed attempts.
    pub(super) fn remove(&self, count: usize) {
        let mut events = self.lock();
        // At shutdown the flush task and the final flush may both remove events.
        let count = count.min(events.len());
        events.drain(..count);
        drop(events);
        self.removed.send_modify(|removed| *removed += count as u64);
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<TelemetryEvent>> {
        self.events.lock()
    }
}

/// Returns an id that is unique to this process. A forked process gets another id.
fn process_id() -> String {
    static ID: Mutex<Option<(u32, Uuid)>> = Mutex::new(None);
    let mut id = ID.lock();
    let process = std::process::id();
    let (_, uuid) = match *id {
        Some(known) if known.0 == process => known,
        _ => *id.insert((process, Uuid::new_v4())),
    };
    uuid.to_string()
}
