//! Passes that the server accepted and failed to execute.
//!
//! A pass that fails because of its own input follows the rule of the protocol: later requests run,
//! and the next optimizer step is applied without the pass. A pass that the server itself has
//! dropped, because of a fault or because the pass killed the process, must not have this effect:
//! its run is marked, and the requests of the run fail up to and including the next optimizer step.
//! That step would have reset the gradients, so they are discarded. A request that replaces or
//! discards the gradients clears the mark too.

use tinkex_backend::operation::ModelOperation;
use tinkex_backend::outcome::Outcome;
use tinkex_backend::queue::QueuedOperation;
use tinkex_store::log;
use tinkex_store::store::{FailureCategory, ModelRunRecord, Record, RequestKind, ResultKind};
use tinkex_wire::{ModelId, PassMode};

use super::Worker;
use crate::operation::{EngineOperation, EngineTraining};

/// Fails if the server has dropped a pass of the run whose gradients are missing.
pub(super) fn check_not_dropped(run: &ModelRunRecord) -> Result<(), Outcome> {
    match &run.dropped_pass {
        None => Ok(()),
        Some(reason) => Err(Outcome::failed(
            FailureCategory::Server,
            format!("not executed, because the gradients of an earlier pass are missing: {reason}"),
        )),
    }
}

impl Worker {
    /// Returns whether a request adds to the gradients of its model.
    pub(super) fn accumulates_gradients(&self, request: &QueuedOperation<EngineOperation>) -> bool {
        match &request.operation {
            ModelOperation::Train(EngineTraining::Pass(pass)) => {
                pass.mode == PassMode::ForwardBackward && !pass.data.is_empty()
            }
            // The pass may be unreadable, so its mode is not known.
            ModelOperation::Fail(..) => {
                let store = self.context.store();
                let kind = store.requests.get(&request.id).map(|entry| entry.row.kind);
                kind == Some(RequestKind::ForwardBackward)
            }
            _ => false,
        }
    }

    /// Returns the outcome of a pass that accumulates gradients. Marks the run if the server has
    /// dropped the pass.
    pub(super) fn check_pass(&self, model: &ModelId, seq: u64, outcome: Outcome) -> Outcome {
        let ResultKind::Failed { error, category } = &outcome.result else { return outcome };
        self.context.metrics.failed_passes.add(1);
        if *category != FailureCategory::Server {
            tracing::warn!(
                target: log::REQUEST,
                seq_id = seq,
                error,
                "a pass failed because of its input; the next optimizer step is applied without it"
            );
            return outcome;
        }
        tracing::error!(
            target: log::REQUEST,
            seq_id = seq,
            error,
            "the server dropped a pass; the requests of the model fail up to the next optimizer step"
        );
        let reason = format!("request seq_id {seq}: {error}");
        let mark = self.changed_run(model, |run| {
            run.dropped_pass.get_or_insert(reason);
        });
        mark.into_iter().fold(outcome, Outcome::with_record)
    }

    /// Fails an optimizer step after a dropped pass. Discards the gradients, as the step would have
    /// done. A model that is not in memory discards them when it is restored.
    pub(super) fn fail_step(&mut self, run: &ModelRunRecord, failed: Outcome) -> Outcome {
        if let Some(model) = self.models.get_mut(&run.id) {
            model.trainer.discard_gradient();
            model.gradients_pending = false;
        }
        self.end_mark(&run.id, failed.with_model_changed())
    }

    /// Adds the record that clears the mark of a run to an outcome.
    pub(super) fn end_mark(&self, model: &ModelId, outcome: Outcome) -> Outcome {
        let record = self.changed_run(model, |run| run.dropped_pass = None);
        record.into_iter().fold(outcome, Outcome::with_record)
    }

    /// Returns the current record of a run with a change; `None` if the run no longer exists or its
    /// session has ended.
    fn changed_run(
        &self,
        model: &ModelId,
        change: impl FnOnce(&mut ModelRunRecord),
    ) -> Option<Record> {
        let mut store = self.context.store();
        let mut run = store.runs.get(model)?.row.clone();
        store.open_session(&run.session)?;
        change(&mut run);
        Some(Record::Run(run))
    }
}
