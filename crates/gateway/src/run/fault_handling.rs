//! Handling of faults: retries requests with a backoff, or fails them.

use tinkex_backend::model_outcome::close_run;
use tinkex_backend::operation::{CheckpointLoad, ModelOperation};
use tinkex_backend::outcome::Outcome;
use tinkex_backoff::Backoff;
use tinkex_store::log;
use tinkex_store::record::FailureCategory;
use tinkex_wire::RequestId;
use tokio::time::Instant;

use super::{PendingOperation, PendingRequest, RunTask};
use crate::fault::{BACKOFF, Fault, MAX_UNEXPECTED};

/// A sequence of faults without a success in between.
pub(super) struct Outage {
    started: Instant,
    /// Delays before the next attempts.
    backoff: Backoff,
}

impl PendingRequest {
    /// Returns whether the request creates the model. If such a request fails, the run cannot be
    /// used: later requests would train a new adapter instead of the loaded adapter.
    fn creates_model(&self) -> bool {
        let PendingOperation::Alone(operation) = &self.operation else { return false };
        matches!(
            &**operation,
            ModelOperation::Create | ModelOperation::Load(CheckpointLoad { creates: true, .. })
        )
    }

    /// Returns whether the upstream may have executed a part of the request, which failed with
    /// `category`. A pass that fails after its first micro-batch leaves gradients. Later steps
    /// would apply these gradients, but a restored model would not have them.
    fn may_be_partial(&self, category: FailureCategory, is_legacy: bool) -> bool {
        // A legacy server attributes all failures to the user.
        let may_have_started = category == FailureCategory::Server || is_legacy;
        may_have_started
            && match &self.operation {
                PendingOperation::Relay(_) => self.accepted.is_some(),
                PendingOperation::Alone(operation) => {
                    matches!(&**operation, ModelOperation::Train(_))
                }
            }
    }
}

impl RunTask {
    /// Handles a fault of the first pending request: waits before the next attempt, or fails
    /// requests. Drops the model on the upstream if its state is in doubt.
    pub(super) async fn handle_fault(&mut self, fault: Fault) {
        let reason = fault.reason().to_owned();
        match fault {
            Fault::Failed(category, message) => {
                let is_partial = self
                    .pending
                    .front()
                    .is_some_and(|first| first.may_be_partial(category, self.upstream.is_legacy()));
                self.fail_first(category, message);
                if is_partial {
                    self.forget_model(true).await;
                }
                return;
            }
            Fault::Unrestorable(category, message) => return self.fail_all(category, &message),
            Fault::Unexpected(reason) => {
                self.unexpected += 1;
                self.forget_model(true).await;
                if self.unexpected >= MAX_UNEXPECTED {
                    let name = &self.upstream.handle.name;
                    let message = format!(
                        "upstream {name} did not execute the request in {MAX_UNEXPECTED} attempts: \
                         {reason}"
                    );
                    return self.fail_first(FailureCategory::Server, message);
                }
            }
            Fault::Lost(_) => self.forget_model(false).await,
            Fault::InDoubt(_) => self.forget_model(true).await,
            Fault::Unavailable(_) => {}
        }
        let limit = self.upstream.settings.timeout;
        let outage =
            self.outage.get_or_insert_with(|| Outage { started: Instant::now(), backoff: BACKOFF });
        let elapsed = outage.started.elapsed();
        let delay = outage.backoff.next_delay();
        if elapsed >= limit {
            let name = &self.upstream.handle.name;
            let seconds = limit.as_secs();
            let message =
                format!("upstream {name} has not executed the request for {seconds} s: {reason}");
            self.fail_all(FailureCategory::Server, &message);
            if self.handle.is_some() {
                // The upstream may have executed requests that this server has recorded as failed.
                self.forget_model(true).await;
            }
            return;
        }
        tracing::warn!(
            target: log::REQUEST,
            model_id = %self.model,
            upstream = %self.upstream.handle.name,
            retry_in_seconds = delay.as_secs_f64(),
            error = reason,
            "an upstream did not execute a request; retrying"
        );
        self.context.metrics.retries.add(1);
        let reason = format!("upstream {}: {reason}", self.upstream.handle.name);
        self.upstream.handle.queue.set_fault(&self.model, Some(reason));
        tokio::time::sleep(delay).await;
    }

    /// Fails the first pending request. The later requests are still executed.
    fn fail_first(&mut self, category: FailureCategory, message: String) {
        let failed = Outcome::failed(category, message);
        let creates = self.pending.front().is_some_and(PendingRequest::creates_model);
        self.finish_first(self.close_if(creates, failed));
    }

    /// Returns the outcome `failed`. If `creates` is true, adds a record that closes the run.
    fn close_if(&self, creates: bool, failed: Outcome) -> Outcome {
        let run = self.context.store.lock().runs.get(&self.model).map(|entry| entry.row.clone());
        match run {
            Some(run) if creates => close_run(&run, failed),
            _ => failed,
        }
    }

    /// Fails all requests of the model that are in flight or queued.
    fn fail_all(&mut self, category: FailureCategory, message: &str) {
        let pending = std::mem::take(&mut self.pending);
        let creates = pending.front().is_some_and(PendingRequest::creates_model);
        let mut ids: Vec<RequestId> = pending.into_iter().map(|pending| pending.id).collect();
        ids.extend(self.upstream.handle.queue.take_waiting(&self.model));
        for (i, id) in ids.iter().enumerate() {
            let failed = self.close_if(creates && i == 0, Outcome::failed(category, message));
            self.context.outcomes.record_locking(id, failed);
        }
        self.outage = None;
        self.unexpected = 0;
        self.failed_restores = 0;
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use tinkex_backend::upstream::{RelayedKind, RelayedTraining};

    use super::*;

    /// A legacy server attributes a failure in the middle of a pass to the user.
    #[test]
    fn gradients_of_a_failed_pass_are_discarded() {
        let pass = |accepted: Option<&str>| PendingRequest {
            id: "r".into(),
            seq: 1,
            operation: PendingOperation::Relay(RelayedTraining {
                kind: RelayedKind::Pass,
                body: Bytes::new(),
            }),
            accepted: accepted.map(RequestId::from),
        };
        assert!(pass(Some("a")).may_be_partial(FailureCategory::User, true));
        assert!(pass(Some("a")).may_be_partial(FailureCategory::Server, false));
        assert!(!pass(Some("a")).may_be_partial(FailureCategory::User, false));
        assert!(!pass(None).may_be_partial(FailureCategory::User, true), "it was refused");
    }
}
