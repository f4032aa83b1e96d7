//! [`QueueLog`]: logs why pending work is not being executed.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tinkex_wire::{QueueState, QueueStatus};
use tokio::time::Instant;

use crate::targets;

/// Minimum time between two warnings of a client.
const WARNING_INTERVAL: Duration = Duration::from_secs(60);

/// Kind of pending work.
#[derive(Clone, Copy, Debug)]
pub(crate) enum QueuedWork {
    Training,
    ModelCreation,
    LossCreation,
    Sampling,
}

/// Logs changes of the queue state of one client's work.
#[derive(Debug)]
pub(crate) struct QueueLog {
    work: QueuedWork,
    id: String,
    last_warning: Mutex<Option<Instant>>,
    /// State that the server reported last.
    state: Mutex<QueueStatus>,
}

impl QueueLog {
    pub(crate) fn new(work: QueuedWork, id: impl Into<String>) -> Self {
        Self { work, id: id.into(), last_warning: Mutex::new(None), state: Mutex::default() }
    }

    /// Logs the queue state of a poll response if it changed, and warns while work is paused, at
    /// most once a minute.
    pub(crate) fn update(&self, pending: &QueueStatus) {
        if self.set_state(pending) {
            let state = pending.queue_state.map_or("", QueueState::as_str);
            let reason = pending.queue_state_reason.as_deref();
            let (work, id) = (self.work, self.id.as_str());
            tracing::info!(target: targets::QUEUE, ?work, id, state, reason, "queue.state_change");
        }
        if let Some(warning) = self.warning(pending, Instant::now()) {
            tracing::warn!("{warning}");
        }
    }

    /// Stores the state and returns whether it changed.
    fn set_state(&self, pending: &QueueStatus) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if *state == *pending {
            return false;
        }
        state.clone_from(pending);
        true
    }

    /// Returns the warning for a paused state, unless one was returned less than a minute ago. The
    /// texts are those of the Python SDK.
    fn warning(&self, pending: &QueueStatus, now: Instant) -> Option<String> {
        let state = pending.queue_state.filter(|state| *state != QueueState::Active)?;
        let mut last = self.last_warning.lock().unwrap_or_else(PoisonError::into_inner);
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
            let log = QueueLog::new(work, id.unwrap());
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
