//! [`QueueLog`]: logs why pending work is not being executed, and calls the caller's queue-state
//! callback.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tinkex_wire::{QueueState, QueueStatus};
use tokio::time::Instant;

use crate::error::panic_message;
use crate::targets;

/// Minimum time between two warnings of a client.
const WARNING_INTERVAL: Duration = Duration::from_secs(60);

/// Kind of pending work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum QueuedWork {
    /// Requests of a model.
    Training,
    /// Creation of a model.
    ModelCreation,
    /// Registration of a custom loss.
    LossCreation,
    /// Samples of a sampling client.
    Sampling,
}

impl fmt::Display for QueuedWork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Training => "training",
            Self::ModelCreation => "model creation",
            Self::LossCreation => "loss creation",
            Self::Sampling => "sampling",
        })
    }
}

/// Change of the state of pending work in the server's queue; see
/// `ServiceClientBuilder::on_queue_state`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueueStateChange {
    /// Kind of pending work.
    pub work: QueuedWork,
    /// Id of the model or of the sampling session. For [`ModelCreation`](QueuedWork::ModelCreation)
    /// and [`LossCreation`](QueuedWork::LossCreation), the name of the model or loss.
    pub id: String,
    /// New state; `None` if the server reports no state or a state that this version does not know.
    pub state: Option<QueueState>,
    /// Reason for the state, if the server reports one.
    pub reason: Option<String>,
}

/// Callback of the caller for changes of the queue state.
#[derive(Clone)]
pub struct QueueObserver(Arc<dyn Fn(&QueueStateChange) + Send + Sync>);

impl QueueObserver {
    /// Creates an observer that calls `callback` for each change.
    pub fn new(callback: impl Fn(&QueueStateChange) + Send + Sync + 'static) -> Self {
        Self(Arc::new(callback))
    }

    /// Calls the callback. A panic of the callback is logged, and does not fail the call that waits
    /// for the work.
    fn notify(&self, change: &QueueStateChange) {
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| (self.0)(change))) {
            tracing::error!(panic = panic_message(&*payload), "queue-state callback panicked");
        }
    }
}

impl fmt::Debug for QueueObserver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("QueueObserver")
    }
}

/// Logs changes of the queue state of one client's work.
#[derive(Debug)]
pub struct QueueLog {
    work: QueuedWork,
    id: String,
    last_warning: Mutex<Option<Instant>>,
    /// State that the server reported last.
    state: Mutex<QueueStatus>,
    observer: Option<QueueObserver>,
}

impl QueueLog {
    /// Creates the log of `work` for the model, sampling session or loss `id`.
    pub fn new(work: QueuedWork, id: impl Into<String>, observer: Option<QueueObserver>) -> Self {
        let last_warning = Mutex::new(None);
        let state = Mutex::default();
        Self { work, id: id.into(), last_warning, state, observer }
    }

    /// Logs the queue state of a poll response if it changed, and warns while work is paused, at
    /// most once a minute.
    pub(crate) fn update(&self, pending: &QueueStatus) {
        if self.set_state(pending) {
            let state = pending.queue_state.map_or("", QueueState::as_str);
            let reason = pending.queue_state_reason.as_deref();
            let work = self.work;
            let id = self.id.as_str();
            tracing::info!(target: targets::QUEUE, ?work, id, state, reason, "queue.state_change");
            if let Some(observer) = &self.observer {
                observer.notify(&QueueStateChange {
                    work: self.work,
                    id: self.id.clone(),
                    state: pending.queue_state,
                    reason: pending.queue_state_reason.clone(),
                });
            }
        }
        if let Some(warning) = self.warning(pending, Instant::now()) {
            tracing::warn!("{warning}");
        }
    }

    /// Stores the state and returns whether it changed.
    fn set_state(&self, pending: &QueueStatus) -> bool {
        let mut state = self.state.lock();
        if *state == *pending {
            return false;
        }
        state.clone_from(pending);
        true
    }

    /// Returns the warning for a paused state, unless a warning was returned less than a minute
    /// ago. The texts equal the warnings of the Python SDK.
    fn warning(&self, pending: &QueueStatus, now: Instant) -> Option<String> {
        let state = pending.queue_state.filter(|state| *state != QueueState::Active)?;
        let mut last = self.last_warning.lock();
        if last.is_some_and(|last| now - last < WARNING_INTERVAL) {
            return None;
        }
        *last = Some(now);
        let reason = pending.queue_state_reason.as_deref().unwrap_or(match state {
            QueueState::PausedRateLimit => match self.work {
                QueuedWork::Sampling => "concurrent sampler weights limit hit",
                QueuedWork::Training | QueuedWork::ModelCreation | QueuedWork::LossCreation => {
                    "concurrent training clients rate limit hit"
                }
            },
            QueueState::PausedCapacity => {
                "Tinker backend is running short on capacity, please wait"
            }
            _ => "unknown",
        });
        let id = &self.id;
        Some(match self.work {
            QueuedWork::Training => format!("Training for {id} is paused. Reason: {reason}."),
            QueuedWork::ModelCreation => {
                format!("Model creation for {id} is paused. Reason: {reason}.")
            }
            QueuedWork::LossCreation => {
                format!("Creating the loss {id:?} is paused. Reason: {reason}.")
            }
            QueuedWork::Sampling => {
                format!("Sampling is paused for sampler {id}. Reason: {reason}")
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fixture;

    /// Covers AUD.6.
    #[test]
    fn warnings_match_the_python_sdk() {
        for case in fixture::cases("queue_state_log.json") {
            let work = match case["client"].as_str().unwrap() {
                "training" => QueuedWork::Training,
                "sampling" => QueuedWork::Sampling,
                other if other.contains("creat") => QueuedWork::ModelCreation,
                other => panic!("{other}"),
            };
            let zero = Instant::now();
            let first = case["calls"][0][0].as_f64().unwrap();
            let expected = case["logged"].as_array().unwrap();
            let id = expected.iter().find_map(|line| {
                let (_, rest) = line.as_str()?.split_once(" for ")?;
                let rest = rest.strip_prefix("sampler ").unwrap_or(rest);
                let end = rest.find(" is ").or(rest.find(". Reason"))?;
                Some(rest[..end].to_owned())
            });
            let log = QueueLog::new(work, id.unwrap(), None);
            for (call, expected) in case["calls"].as_array().unwrap().iter().zip(expected) {
                let at = zero + Duration::from_secs_f64(call[0].as_f64().unwrap() - first);
                let reason = call[2].as_str().filter(|reason| !reason.is_empty());
                let mut pending = QueueStatus::default();
                pending.queue_state = QueueState::from_name(call[1].as_str().unwrap());
                pending.queue_state_reason = reason.map(str::to_owned);
                assert_eq!(&json!(log.warning(&pending, at)), expected, "{call}");
            }
        }
    }
}
