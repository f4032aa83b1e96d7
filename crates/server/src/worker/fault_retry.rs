//! Executes a model's request again after a transient fault.
//!
//! The server has acknowledged the request, and later requests depend on its effect: an optimizer
//! step without the pass before it would silently train something else. The model's queue therefore
//! stops until the request has an outcome; other models continue. If the fault lasts too long, the
//! request fails together with the requests that were queued behind it.

use std::collections::HashMap;
use std::time::Duration;

use tinkex_wire::ModelId;
use tokio::time::Instant;

use super::Worker;
use crate::log;
use crate::operation::QueuedRequest;
use crate::outcome::{Outcome, record_outcome};
use crate::store::{FailureCategory, ResultKind};

/// Delay before the second attempt. Later delays are twice the previous one.
const FIRST_DELAY: Duration = Duration::from_millis(50);
/// Maximum delay between two attempts.
const MAX_DELAY: Duration = Duration::from_secs(5);

/// Models whose first request is executed again after a fault. The others wait behind it, so there
/// is at most one such request for each model.
#[derive(Default)]
pub(super) struct FaultRetries(HashMap<ModelId, FaultHistory>);

/// Faults that the request has met.
struct FaultHistory {
    /// Running time at the first fault: the time for which the process was stopped does not count.
    first: Duration,
    delay: Duration,
}

impl FaultRetries {
    /// Returns the delay before the next attempt of the model's request, which failed at the
    /// running time `now`; `None` if its faults have lasted for `limit`.
    fn next_delay(&mut self, model: &ModelId, now: Duration, limit: Duration) -> Option<Duration> {
        let history = self.0.entry(model.clone());
        let history = history.or_insert(FaultHistory { first: now, delay: FIRST_DELAY });
        let elapsed = now.saturating_sub(history.first);
        let remaining = limit.checked_sub(elapsed).filter(|remaining| !remaining.is_zero())?;
        // The last attempt is at the limit.
        let delay = history.delay.min(remaining);
        history.delay = (history.delay * 2).min(MAX_DELAY);
        Some(delay)
    }

    /// Forgets the faults of a model whose request has an outcome, or that was unloaded. Returns
    /// whether the request met a fault.
    pub(super) fn forget(&mut self, model: &ModelId) -> bool {
        self.0.remove(model).is_some()
    }
}

impl Worker {
    /// Returns a request that met a fault to the queue of its model, where it is executed again
    /// after a delay. Returns false if its faults have lasted for too long, or if its session has
    /// ended.
    pub(super) fn retry_later(
        &mut self,
        model: &ModelId,
        request: QueuedRequest,
        outcome: &Outcome,
    ) -> bool {
        // Hold the lock until the request is queued: the end of a session removes its models from
        // the queue with the same lock, and nothing would remove a model that is added afterwards.
        let mut store = self.state.store();
        let session = store.runs.get(model).map(|run| run.row.session.clone());
        if session.is_none_or(|session| store.open_session(&session).is_none()) {
            return false;
        }
        let limit = self.state.options.timeouts.fault_retry;
        let now = self.state.clock.running();
        let Some(delay) = self.fault_retries.next_delay(model, now, limit) else {
            return false;
        };
        let error = message(outcome);
        tracing::warn!(
            target: log::REQUEST,
            request_id = %request.id,
            retry_in_seconds = delay.as_secs_f64(),
            error,
            "a request met a transient fault and will be executed again"
        );
        self.state.metrics.retries.add(1);
        // Do not count another start: the process has not died.
        let request = QueuedRequest { starts: None, ..request };
        self.state.engine_queue().put_back(request, Instant::now() + delay, error.to_owned());
        true
    }

    /// Fails the requests that were queued behind request `seq` of a model, which failed because of
    /// a fault: their clients sent them before they could know.
    pub(super) fn fail_successors(&mut self, model: &ModelId, seq: u64, error: &str) {
        let message = format!("request seq_id {seq}, which this one follows, failed: {error}");
        for id in self.state.engine_queue().take_waiting(model) {
            let failed = Outcome::failed(FailureCategory::Server, message.clone());
            record_outcome(&self.state, &mut self.state.store(), &id, failed);
        }
    }
}

/// Returns the message of a failed outcome.
pub(super) fn message(outcome: &Outcome) -> &str {
    match &outcome.result {
        ResultKind::Failed { error, .. } => error,
        ResultKind::Json | ResultKind::Proto => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_grow_until_the_limit() {
        let mut retries = FaultRetries::default();
        let (model, limit) = ("m".into(), Duration::from_secs(20));
        let (mut delays, mut now) = (Vec::new(), Duration::from_secs(100));
        while let Some(delay) = retries.next_delay(&model, now, limit) {
            delays.push(delay.as_secs_f64());
            now += delay;
        }
        assert_eq!(delays[..4], [0.05, 0.1, 0.2, 0.4]);
        assert!(delays.iter().all(|delay| *delay <= 5.0));
        assert_eq!(now, Duration::from_secs(120), "the last attempt is at the limit");
        assert!(retries.forget(&model) && !retries.forget(&model));
        assert_eq!(retries.next_delay(&model, now, limit), Some(FIRST_DELAY));
        assert_eq!(retries.next_delay(&"n".into(), now, Duration::ZERO), None);
    }
}
