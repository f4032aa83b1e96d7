//! Executes a model's request again after a transient fault.
//!
//! The server has acknowledged the request, and later requests depend on its effect: an optimizer
//! step without the preceding pass would silently produce other weights. The model's queue
//! therefore stops until the request has an outcome; other models continue. If the fault lasts too
//! long, the request fails. After a pass, the requests up to the next optimizer step fail too (see
//! `dropped_pass`); after another request, all requests that are queued for the model fail.

use std::collections::HashMap;
use std::time::Duration;

use tinkex_backend::outcome::Outcome;
use tinkex_backend::queue::{QueuedOperation, is_suspect};
use tinkex_backoff::Backoff;
use tinkex_store::log;
use tinkex_store::store::{FailureCategory, ResultKind};
use tinkex_wire::ModelId;
use tokio::time::Instant;

use super::Worker;
use crate::operation::EngineOperation;

/// Delays between two attempts.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(50)).cap(Duration::from_secs(5));

/// Models whose first request is executed again after a fault. The other requests of the model wait
/// behind it, so each model has at most one such request.
#[derive(Default)]
pub(super) struct FaultRetries(HashMap<ModelId, FaultHistory>);

/// Faults that the request has met.
struct FaultHistory {
    /// Running time at the first fault: the time for which the process was stopped does not count.
    first: Duration,
    backoff: Backoff,
}

impl FaultRetries {
    /// Returns the delay before the next attempt of the model's request, which failed at the
    /// running time `now`; `None` if the faults have lasted for `limit`.
    fn next_delay(&mut self, model: &ModelId, now: Duration, limit: Duration) -> Option<Duration> {
        let history = self.0.entry(model.clone());
        let history = history.or_insert(FaultHistory { first: now, backoff: BACKOFF });
        let elapsed = now.saturating_sub(history.first);
        let remaining = limit.checked_sub(elapsed).filter(|remaining| !remaining.is_zero())?;
        // The last attempt is at the limit.
        Some(history.backoff.next_delay().min(remaining))
    }

    /// Removes the fault history of a model whose request has an outcome, or that was unloaded.
    /// Returns whether the request met a fault.
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
        request: QueuedOperation<EngineOperation>,
        outcome: &Outcome,
    ) -> bool {
        // Hold the lock until the request is queued: the end of a session removes its models from
        // the queue with the same lock, and nothing would remove a model that is added afterwards.
        let mut store = self.context.store();
        let session = store.runs.get(model).map(|run| run.row.session.clone());
        if session.is_none_or(|session| store.open_session(&session).is_none()) {
            return false;
        }
        let limit = self.context.timeouts.fault_retry;
        let now = self.context.clock().running();
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
        self.context.backend.metrics.retries.add(1);
        // The next attempt is not another start, because the process has not died. A suspect remains
        // one: its next attempt must be alone too.
        let starts = request.starts.filter(|_| is_suspect(request.starts));
        let request = QueuedOperation { starts, ..request };
        self.context.queue().put_back(request, Instant::now() + delay, error.to_owned());
        true
    }

    /// Fails the requests that were queued behind request `seq` of a model, which failed because of
    /// a fault: their clients sent them before they could know of the failure.
    pub(super) fn fail_successors(&mut self, model: &ModelId, seq: u64, error: &str) {
        let message = format!("request seq_id {seq}, which this one follows, failed: {error}");
        for id in self.context.queue().take_waiting(model) {
            let failed = Outcome::failed(FailureCategory::Server, message.clone());
            self.context.backend.outcomes.record_locking(&id, failed);
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
        let model = "m".into();
        let limit = Duration::from_secs(20);
        let mut delays = Vec::new();
        let mut now = Duration::from_secs(100);
        while let Some(delay) = retries.next_delay(&model, now, limit) {
            delays.push(delay.as_secs_f64());
            now += delay;
        }
        assert_eq!(delays[..4], [0.05, 0.1, 0.2, 0.4]);
        assert!(delays.iter().all(|delay| *delay <= 5.0));
        assert_eq!(now, Duration::from_secs(120), "the last attempt is at the limit");
        assert!(retries.forget(&model) && !retries.forget(&model));
        assert_eq!(retries.next_delay(&model, now, limit), Some(Duration::from_millis(50)));
        assert_eq!(retries.next_delay(&"n".into(), now, Duration::ZERO), None);
    }
}
