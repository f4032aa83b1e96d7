//! Requests that met a fault that may pass are executed again.
//!
//! A request of a model was promised to its client, and later requests depend on its effect: an
//! optimizer step without the pass before it would silently train something else. The model's queue
//! therefore stops until the request has an outcome; other models continue. If the fault lasts too
//! long, the request fails together with the requests that were queued behind it.

use std::collections::HashMap;
use std::time::Duration;

use tinkex_wire::{ModelId, RequestId};
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

/// Requests that are executed again after a fault, by id.
#[derive(Default)]
pub(super) struct FaultRetries(HashMap<RequestId, FaultHistory>);

/// Faults that a request has met.
struct FaultHistory {
    /// Running time at the first fault: the time for which the process was stopped does not count.
    first: Duration,
    delay: Duration,
}

impl FaultRetries {
    /// Returns the delay before the next attempt of a request that failed at the running time `now`;
    /// `None` if its faults have lasted for `limit`.
    fn next_delay(&mut self, id: &RequestId, now: Duration, limit: Duration) -> Option<Duration> {
        let history = self.0.entry(id.clone());
        let history = history.or_insert(FaultHistory { first: now, delay: FIRST_DELAY });
        let elapsed = now.saturating_sub(history.first);
        let remaining = limit.checked_sub(elapsed).filter(|remaining| !remaining.is_zero())?;
        // The last attempt is at the limit.
        let delay = history.delay.min(remaining);
        history.delay = (history.delay * 2).min(MAX_DELAY);
        Some(delay)
    }

    /// Forgets a request that has an outcome. Returns whether it met a fault.
    pub(super) fn forget(&mut self, id: &RequestId) -> bool {
        self.0.remove(id).is_some()
    }
}

impl Worker {
    /// Returns a request that met a fault to the queue of its model, where it is executed again
    /// after a delay. Returns false if its faults have lasted for too long.
    pub(super) fn retry_later(&mut self, request: QueuedRequest, outcome: &Outcome) -> bool {
        let limit = self.state.options.timeouts.fault_retry;
        let now = self.state.clock.running();
        let Some(delay) = self.fault_retries.next_delay(&request.id, now, limit) else {
            return false;
        };
        let error = message(outcome);
        tracing::warn!(
            target: log::REQUEST,
            request_id = %request.id,
            retry_in_seconds = delay.as_secs_f64(),
            error,
            "a request met a fault and is executed again"
        );
        self.state.metrics.retries.add(1);
        // A start that was counted must not be counted again: the process has not died.
        let request = QueuedRequest { starts: None, ..request };
        self.state.queue.put_back(request, Instant::now() + delay, error.to_owned());
        true
    }

    /// Fails the requests that were queued behind request `seq` of a model, which failed because of
    /// a fault: their clients sent them before they could know.
    pub(super) fn fail_successors(&mut self, model: &ModelId, seq: u64, error: &str) {
        let message = format!("request seq_id {seq}, which this one follows, failed: {error}");
        for id in self.state.queue.take_waiting(model) {
            self.fault_retries.forget(&id);
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
        let (id, limit) = ("r".into(), Duration::from_secs(20));
        let (mut delays, mut now) = (Vec::new(), Duration::from_secs(100));
        while let Some(delay) = retries.next_delay(&id, now, limit) {
            delays.push(delay.as_secs_f64());
            now += delay;
        }
        assert_eq!(delays[..4], [0.05, 0.1, 0.2, 0.4]);
        assert!(delays.iter().all(|delay| *delay <= 5.0));
        assert_eq!(now, Duration::from_secs(120), "the last attempt is at the limit");
        assert!(retries.forget(&id) && !retries.forget(&id));
        assert_eq!(retries.next_delay(&id, now, limit), Some(FIRST_DELAY));
        assert_eq!(retries.next_delay(&"s".into(), now, Duration::ZERO), None);
    }
}
