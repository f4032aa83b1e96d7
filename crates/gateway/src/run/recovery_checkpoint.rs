//! Recovery checkpoints: the state of a model that is saved on its upstream every few steps, so
//! that few requests must be repeated if the upstream loses the model.

use tinkex_store::log;
use tinkex_store::record::{ModelRunRecord, Record, SnapshotRecord};

use super::{PendingRequest, RunTask};
use crate::fault::Fault;
use crate::remote_model::ModelHandle;

impl RunTask {
    /// Returns whether a checkpoint must be saved before further requests are sent. An adopted
    /// model is never saved, because the next request replaces the model.
    pub(super) fn checkpoint_is_next(&self) -> bool {
        let steps = self.pending.iter().filter(|pending| pending.is_optim_step()).count();
        let steps = self.steps.saturating_add(u32::try_from(steps).unwrap_or(u32::MAX));
        let after_step = self.pending.back().is_none_or(PendingRequest::is_optim_step);
        let is_due = steps >= self.upstream.settings.checkpoint_every.max(1);
        is_due && after_step && !self.is_adopted && !self.has_gradients()
    }

    /// Returns whether the model has gradients that no step has applied, which a checkpoint would
    /// not contain. Returns true if this process has no model on the upstream.
    fn has_gradients(&self) -> bool {
        self.handle.as_ref().is_none_or(|handle| handle.gradients_pending)
    }

    /// Saves the state of the model on the upstream if a checkpoint is due and no request is in
    /// flight.
    pub(super) async fn checkpoint_if_due(&mut self) {
        if !self.pending.is_empty() || !self.checkpoint_is_next() {
            return;
        }
        match self.save_recovery_checkpoint().await {
            Ok(()) => {}
            Err(Fault::Lost(_)) => self.forget_model(false).await,
            Err(Fault::InDoubt(_) | Fault::Unexpected(_)) => self.forget_model(true).await,
            Err(fault) => {
                // Further requests must not wait for the checkpoint: only a request makes this task
                // run again. If the upstream does not respond now, try again after the next step.
                self.steps = match fault {
                    Fault::Unavailable(_) => {
                        self.upstream.settings.checkpoint_every.saturating_sub(1)
                    }
                    _ => 0,
                };
                tracing::warn!(
                    target: log::MODEL,
                    model_id = %self.model,
                    upstream = %self.upstream.handle.name,
                    error = fault.reason(),
                    "cannot save the state of a model on its upstream; more steps are repeated if \
                     the upstream loses the model"
                );
            }
        }
    }

    /// Saves the state of the model on the upstream. Removes the previous checkpoint once the
    /// record of the new checkpoint is durable.
    async fn save_recovery_checkpoint(&mut self) -> Result<(), Fault> {
        let name = self.recovery_name();
        let Some(handle) = &mut self.handle else { return Ok(()) };
        let path = handle.save(name).await?;
        self.steps = 0;
        let weights = self.remote(path);
        let model = self.handle.as_ref().map(ModelHandle::record);
        let mut store = self.context.store.lock();
        let Some(run) = store.runs.get(&self.model).map(|entry| entry.row.clone()) else {
            return Ok(());
        };
        let Some(seq) = run.last_seq else { return Ok(()) };
        let old = run.snapshot.clone();
        let snapshot = Some(SnapshotRecord { seq, weights });
        let run = self.with_model(ModelRunRecord { snapshot, ..run }, model);
        store.put_required(Record::Run(run));
        drop(store);
        if let Some(old) = old {
            self.upstream.handle.discard(old.weights);
        }
        Ok(())
    }

    /// Saves the state of the model because the server stops, so that the next process repeats
    /// nothing. Returns whether the state was saved. A model with requests in flight is not saved:
    /// waiting for the results may take long, and the next process can fetch the results.
    pub(super) async fn save_before_stop(&mut self) -> bool {
        let is_idle = self.pending.is_empty() && !self.is_adopted && !self.has_gradients();
        if !is_idle || self.steps == 0 {
            return false;
        }
        let saved = self.save_recovery_checkpoint().await;
        if let Err(fault) = &saved {
            tracing::info!(
                target: log::MODEL,
                model_id = %self.model,
                upstream = %self.upstream.handle.name,
                error = fault.reason(),
                "the state of a model was not saved on its upstream; the next start repeats its \
                 last steps"
            );
        }
        saved.is_ok()
    }

    pub(super) fn recovery_name(&self) -> String {
        format!("tinkex-recovery-{}", &self.context.random.id()[..12])
    }
}
