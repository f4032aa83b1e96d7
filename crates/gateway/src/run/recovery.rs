//! Recovery of a model: creates it again from its last checkpoint on the upstream.

use std::sync::Arc;

use bytes::Bytes;
use tinkex_backend::custom_loss::custom_loss;
use tinkex_backend::upstream::RelayedKind;
use tinkex_store::log;
use tinkex_store::record::{
    ChangeRecord, FailureCategory, ModelRunRecord, Record, RequestKind, UpstreamRun,
};
use tinkex_store::store::Store;
use tinkex_wire::{ForwardBackward, ModelId, OptimStep};
use tokio::time::Instant;

use super::RunTask;
use super::execute::custom_loss_pass;
use crate::Upstream;
use crate::fault::{Fault, MAX_UNEXPECTED};
use crate::remote_model::{self, ModelHandle, pass_result, result, unreadable};
use crate::remote_weights::remote_path;

impl RunTask {
    /// Makes sure that the upstream has the model. If the stored model has accepted the first
    /// pending request, continues to use that model, so that the result of the request can be
    /// fetched. Otherwise creates the model again.
    pub(super) async fn ensure_model(&mut self, run: &ModelRunRecord) -> Result<(), Fault> {
        if self.handle.is_some() {
            return Ok(());
        }
        if let Some(model) = run.upstream.as_ref().and_then(|upstream| upstream.model.as_ref()) {
            let handle = ModelHandle::adopt(&self.upstream, model).await?;
            if self.pending.front().is_some_and(|first| first.accepted.is_some()) {
                self.handle = Some(handle);
                self.is_adopted = true;
                return Ok(());
            }
            handle.replace(&self.upstream).await;
        }
        self.forget_accepted();
        let restored = self.restore(run).await;
        self.handle = Some(restored.map_err(|fault| self.restore_fault(fault))?);
        self.is_adopted = false;
        self.failed_restores = 0;
        self.store_model();
        Ok(())
    }

    /// Creates the model from its last checkpoint, and repeats the requests that changed it since.
    async fn restore(&mut self, run: &ModelRunRecord) -> Result<ModelHandle, Fault> {
        let start = Instant::now();
        let (reader, changes) = {
            let store = self.context.store.lock();
            let changes = store.runs.get(&run.id).map(|entry| entry.changes.clone());
            (store.reader(), changes.unwrap_or_default())
        };
        let requests = changes.len();
        let mut handle = remote_model::create(&self.upstream, run).await?;
        // Store the model without accepted requests: if this process is killed, the next process
        // does not continue with the incomplete model, but removes it and its gradients.
        self.store_remote(Some(handle.record()));
        let repeated = async {
            if let Some(snapshot) = &run.snapshot {
                handle.load(remote_path(&snapshot.weights)?, true).await?;
            }
            let mut steps = 0;
            for ChangeRecord { kind, body } in changes.into_values() {
                let reader = reader.clone();
                let body = self.context.executor.run_job(move || reader.payload(body)).await;
                let body = body
                    .map_err(|error| Fault::Unavailable(error.to_string()))?
                    .map_err(|error| Fault::Unavailable(error.to_string()))?;
                self.repeat(run, &mut handle, kind, &body).await?;
                steps += u32::from(kind == RequestKind::OptimStep);
            }
            Ok::<u32, Fault>(steps)
        };
        match repeated.await {
            Ok(steps) => self.steps = steps,
            Err(fault) => {
                // A pass may have been accepted although its submission failed.
                handle.replace(&self.upstream).await;
                self.store_remote(None);
                return Err(fault);
            }
        }
        if requests > 0 || run.snapshot.is_some() {
            tracing::info!(
                target: log::MODEL,
                model_id = %run.id,
                upstream = %self.upstream.handle.name,
                requests,
                seconds = start.elapsed().as_secs_f64(),
                "created the model on the upstream again and repeated its requests since the last \
                 checkpoint"
            );
        }
        Ok(handle)
    }

    /// Converts the fault of an attempt to create the model again to a fault of the first pending
    /// request.
    fn restore_fault(&mut self, fault: Fault) -> Fault {
        let (category, reason) = match fault {
            Fault::Failed(category, reason) => (category, reason),
            Fault::Unexpected(reason) => {
                self.failed_restores += 1;
                if self.failed_restores < MAX_UNEXPECTED {
                    return Fault::Unavailable(reason);
                }
                (FailureCategory::Server, reason)
            }
            other => return other,
        };
        let message = format!(
            "cannot create the model again from its last checkpoint and the requests since: \
             {reason}"
        );
        Fault::Unrestorable(category, message)
    }

    /// Sends a finished request to the restored model and waits until the upstream has executed it.
    async fn repeat(
        &self,
        run: &ModelRunRecord,
        handle: &mut ModelHandle,
        kind: RequestKind,
        body: &Bytes,
    ) -> Result<(), Fault> {
        if kind == RequestKind::ForwardBackward {
            let request = ForwardBackward::from_proto(body).map_err(unreadable)?;
            let loss = custom_loss(&self.context.store.lock(), run, &request);
            if let Some(loss) = loss.map_err(unreadable)? {
                return custom_loss_pass(handle, request, &loss).await.map(drop);
            }
        }
        // Only passes and optimizer steps change a model.
        let kind = match kind {
            RequestKind::OptimStep => RelayedKind::OptimStep,
            _ => RelayedKind::Pass,
        };
        let id = handle.submit(kind, body).await?;
        match kind {
            RelayedKind::OptimStep => drop(result::<OptimStep>(&handle.session, &id).await?),
            RelayedKind::Pass => drop(pass_result(&handle.session, &id).await?),
        }
        Ok(())
    }

    /// Removes the model of the run from the upstream, if an earlier attempt or an earlier process
    /// created it.
    pub(super) async fn drop_stored_model(&mut self, run: &ModelRunRecord) {
        if let Some(handle) = self.handle.take() {
            handle.replace(&self.upstream).await;
        } else if let Some(model) = run.upstream.as_ref().and_then(|run| run.model.as_ref()) {
            ModelHandle::remove(&self.upstream, model).await;
        }
    }

    /// Clears the ids of accepted requests: a new model has not accepted any request.
    fn forget_accepted(&mut self) {
        for pending in &mut self.pending {
            pending.accepted = None;
        }
    }

    /// Drops the model on the upstream, so that the next request creates it again. Unloads the
    /// model if `unload` is true. The requests in flight are sent to the new model.
    pub(super) async fn forget_model(&mut self, unload: bool) {
        self.forget_accepted();
        // A pass that is not known to be accepted may arrive after the gradients are cleared.
        self.upstream.slots.set_dirty();
        if let Some(handle) = self.handle.take() {
            if unload {
                handle.replace(&self.upstream).await;
            } else {
                handle.leave(&self.upstream).await;
            }
        }
        let mut store = self.context.store.lock();
        if let Some(run) = store.runs.get(&self.model).map(|entry| entry.row.clone()) {
            store.put_required(Record::Run(self.with_model(run, None)));
        }
    }

    /// Removes the model and the recovery checkpoint of a run whose session has ended.
    pub(crate) async fn clean_up(upstream: Arc<Upstream>, model: ModelId) {
        let stored = |store: &Store| store.runs.get(&model).map(|entry| entry.row.clone());
        let Some(run) = stored(&upstream.context.store.lock()) else { return };
        if let Some(remote) = run.upstream.as_ref().and_then(|run| run.model.as_ref()) {
            ModelHandle::remove(&upstream, remote).await;
        }
        let mut store = upstream.context.store.lock();
        // Read the run again: the task of the model may have stored an outcome before it was
        // aborted.
        let Some(run) = stored(&store) else { return };
        let snapshot = run.snapshot.clone();
        let remote = Some(UpstreamRun { name: upstream.handle.name.to_string(), model: None });
        store.put_required(Record::Run(ModelRunRecord { snapshot: None, upstream: remote, ..run }));
        drop(store);
        if let Some(snapshot) = snapshot {
            upstream.handle.discard(snapshot.weights);
        }
    }
}
