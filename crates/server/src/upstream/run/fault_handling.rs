//! What follows a fault: another attempt, or the failure of requests.

use std::time::Duration;

use tinkex_wire::RequestId;
use tokio::time::Instant;

use super::{PendingRequest, RunTask};
use crate::log;
use crate::model_outcome::close_run;
use crate::operation::ModelOperation;
use crate::outcome::{Outcome, record_outcome};
use crate::store::FailureCategory;
use crate::upstream::fault::{FIRST_DELAY, Fault, MAX_DELAY, MAX_UNEXPECTED};

/// Faults without a success in between.
pub(super) struct Outage {
    started: Instant,
    /// Delay before the next attempt.
    delay: Duration,
}

impl PendingRequest {
    /// Returns whether the request creates the model. If it fails, the run cannot be used: later
    /// requests would train a new adapter instead of the loaded one.
    fn creates_model(&self) -> bool {
        matches!(
            &*self.operation,
            ModelOperation::Create | ModelOperation::Load { creates: true, .. }
        )
    }

    /// Returns whether the upstream may have executed a part of the request, which failed with a
    /// category. A pass that fails after its first micro-batch leaves gradients: later steps would
    /// apply them, and a restored model would not have them.
    fn may_be_partial(&self, category: FailureCategory, is_older: bool) -> bool {
        let is_server_failure = category == FailureCategory::Server;
        match &*self.operation {
            // An older server reports all failures as those of the user.
            ModelOperation::Relay { .. } => {
                self.accepted.is_some() && (is_server_failure || is_older)
            }
            ModelOperation::RelayCustomLoss { .. } => is_server_failure,
            _ => false,
        }
    }
}

impl RunTask {
    /// Waits before the next attempt, or fails requests.
    pub(super) async fn handle_fault(&mut self, fault: Fault) {
        let reason = fault.reason().to_owned();
        match fault {
            Fault::Failed(category, message) => {
                let is_partial = self
                    .pending
                    .front()
                    .is_some_and(|first| first.may_be_partial(category, self.upstream.is_older()));
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
                    let name = &self.upstream.name;
                    let message = format!(
                        "upstream {name} did not execute it in {MAX_UNEXPECTED} attempts: {reason}"
                    );
                    return self.fail_first(FailureCategory::Server, message);
                }
            }
            Fault::Lost(_) => self.forget_model(false).await,
            Fault::InDoubt(_) => self.forget_model(true).await,
            Fault::Unavailable(_) => {}
        }
        let limit = self.state.options.timeouts.upstream;
        let outage = self
            .outage
            .get_or_insert_with(|| Outage { started: Instant::now(), delay: FIRST_DELAY });
        let elapsed = outage.started.elapsed();
        let delay = outage.delay;
        outage.delay = (delay * 2).min(MAX_DELAY);
        if elapsed >= limit {
            let (name, seconds) = (&self.upstream.name, limit.as_secs());
            let message = format!("upstream {name} has not executed it for {seconds} s: {reason}");
            self.fail_all(FailureCategory::Server, &message);
            if self.handle.is_some() {
                // The upstream may have executed requests that have failed here.
                self.forget_model(true).await;
            }
            return;
        }
        tracing::warn!(
            target: log::REQUEST,
            model_id = %self.model,
            upstream = %self.upstream.name,
            retry_in_seconds = delay.as_secs_f64(),
            error = reason,
            "an upstream did not execute a request; it is tried again"
        );
        self.state.metrics.retries.add(1);
        let reason = format!("upstream {}: {reason}", self.upstream.name);
        self.upstream.queue().set_fault(&self.model, Some(reason));
        tokio::time::sleep(delay).await;
    }

    /// Fails the first request. The requests after it are executed.
    fn fail_first(&mut self, category: FailureCategory, message: String) {
        let failed = Outcome::failed(category, message);
        let creates = self.pending.front().is_some_and(PendingRequest::creates_model);
        self.finish_first(self.close_if(creates, failed));
    }

    /// Adds a record to a failed outcome that closes the run, if `creates` is true.
    fn close_if(&self, creates: bool, failed: Outcome) -> Outcome {
        let run = self.state.store().runs.get(&self.model).map(|entry| entry.row.clone());
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
        ids.extend(self.upstream.queue().take_waiting(&self.model));
        for (i, id) in ids.iter().enumerate() {
            let failed = self.close_if(creates && i == 0, Outcome::failed(category, message));
            record_outcome(&self.state, &mut self.state.store(), id, failed);
        }
        (self.outage, self.unexpected, self.failed_restores) = (None, 0, 0);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bytes::Bytes;

    use super::*;
    use crate::store::RequestKind;

    /// An older server reports a failure in the middle of a pass as one of the user.
    #[test]
    fn bug_gradients_of_a_pass_that_failed_were_kept() {
        let pass = |accepted: Option<&str>| PendingRequest {
            id: "r".into(),
            seq: 1,
            operation: Arc::new(ModelOperation::Relay {
                kind: RequestKind::ForwardBackward,
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
