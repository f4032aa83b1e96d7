//! [`RunTask`]: drives a model on an upstream.
//!
//! Requests are sent in order, each at most once per model, and up to [`MAX_IN_FLIGHT`] before
//! their results. The ids of accepted requests are stored, so that the next process fetches their
//! results. If the upstream loses the model, or it is not known whether it accepted a request, the
//! model is created again from the run's last checkpoint on the upstream, and the requests since
//! are repeated. The requests in flight are then sent to the new model. The old model is never used
//! again, so no step is applied twice to the weights of the run.

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tinkex::CustomLossPass;
use tinkex::loss::CustomLoss;
use tinkex_autodiff::LossProgram;
use tinkex_wire::{
    CheckpointKind, ForwardBackward, ForwardBackwardOutput, ModelCreated, ModelId, OptimStep,
    OptimStepOutput, PassMode, RequestId, SamplerId, SamplerWeightsSaved, TinkerPath,
    WeightsLoaded,
};
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

use super::Upstream;
use super::fault::Fault;
use super::remote_model::{self, ModelHandle, pass_result, result, unreadable};
use crate::backend::RemoteWeights;
use crate::history::OperationHistory;
use crate::log;
use crate::model_outcome::{
    already_saved, checkpoint_record, close_run, open_run, saved_outcome, usage_key,
};
use crate::operation::{CheckpointSave, ModelOperation, Operation, PassObjective, QueuedRequest};
use crate::outcome::{Outcome, OutcomeHistory, record_outcome};
use crate::state::ServerState;
use crate::store::{
    AcceptedRequest, ChangeRecord, FailureCategory, Record, RemoteModel, RequestKind, ResultKind,
    RunRecord, SamplerRecord, SnapshotRecord, Store, UpstreamRun, UsageMeter,
};

/// Maximum number of requests of a model that the upstream has accepted and not finished.
const MAX_IN_FLIGHT: usize = 4;
/// Delay before the second attempt after a fault. Later delays are twice the previous one.
const FIRST_DELAY: Duration = Duration::from_millis(200);
/// Maximum delay between two attempts.
const MAX_DELAY: Duration = Duration::from_secs(10);

/// Drives one model on an upstream.
pub(super) struct RunTask {
    upstream: Arc<Upstream>,
    state: Arc<ServerState>,
    model: ModelId,
    /// Notified when the queue has requests for the model.
    wake: Arc<Notify>,
    /// The model on the upstream; `None` until this process has created or adopted it.
    handle: Option<ModelHandle>,
    /// Requests without an outcome, in order.
    pending: VecDeque<PendingRequest>,
    /// Optimizer steps since the last checkpoint.
    steps: u32,
    /// Whether `handle` is a model of an earlier process, which may have sent it requests that are
    /// not stored as accepted.
    is_adopted: bool,
    /// Set after a fault, until a request has an outcome.
    outage: Option<Outage>,
}

/// A request that was taken from the queue.
struct PendingRequest {
    id: RequestId,
    seq: u64,
    operation: Arc<ModelOperation>,
    /// Id on the upstream, if it has accepted the request.
    accepted: Option<RequestId>,
}

/// Faults without a success in between.
struct Outage {
    started: Instant,
    /// Delay before the next attempt.
    delay: Duration,
}

impl PendingRequest {
    /// Returns whether the request is sent on as it is.
    fn is_relay(&self) -> bool {
        matches!(&*self.operation, ModelOperation::Relay { .. })
    }

    fn is_optim_step(&self) -> bool {
        matches!(&*self.operation, ModelOperation::Relay { kind: RequestKind::OptimStep, .. })
    }
}

impl Drop for RunTask {
    /// Fails the requests in flight if the session of the model has ended, which aborts the task,
    /// or if the task panics. If the server stops, they have no outcome and are executed after the
    /// next start.
    fn drop(&mut self) {
        for pending in std::mem::take(&mut self.pending) {
            let failed = match open_run(&self.state, &self.model) {
                Err(failed) => failed,
                Ok(_) if std::thread::panicking() => Outcome::failed(
                    FailureCategory::Server,
                    "internal error: the task of the model panicked",
                ),
                Ok(_) => return,
            };
            record_outcome(&self.state, &mut self.state.store(), &pending.id, failed);
        }
    }
}

impl RunTask {
    pub(super) fn new(upstream: Arc<Upstream>, model: ModelId, wake: Arc<Notify>) -> Self {
        let state = Arc::clone(&upstream.state);
        let (handle, pending, outage) = (None, VecDeque::new(), None);
        Self { upstream, state, model, wake, handle, pending, steps: 0, is_adopted: false, outage }
    }

    /// Executes requests until the task is aborted.
    pub(super) async fn run(mut self) {
        loop {
            self.take_requests();
            let Some(first) = self.pending.front() else {
                self.wake.notified().await;
                continue;
            };
            let result = if first.is_relay() {
                self.advance().await
            } else {
                self.execute_first().await.map(Some)
            };
            match result {
                Ok(Some(outcome)) => self.finish_first(outcome),
                Ok(None) => {}
                Err(fault) => self.handle_fault(fault).await,
            }
            self.checkpoint_if_due().await;
        }
    }

    /// Takes requests that may be sent before the results of those in flight are known.
    ///
    /// A pass waits for the pass before it: upstreams may compute both in one batch, whose result
    /// depends on their timing, and a repetition must compute the same bits. An optimizer step
    /// between them separates the two. All other requests wait until nothing is in flight.
    fn take_requests(&mut self) {
        while self.pending.len() < MAX_IN_FLIGHT && !self.checkpoint_is_next() {
            let (is_first, after_step) = match self.pending.back() {
                None => (true, false),
                Some(last) => (false, last.is_optim_step()),
            };
            let only_relays = self.pending.iter().all(PendingRequest::is_relay);
            let accept = |operation: &ModelOperation| match operation {
                ModelOperation::Relay { kind: RequestKind::OptimStep, .. } => only_relays,
                ModelOperation::Relay { .. } => is_first || (after_step && only_relays),
                _ => is_first,
            };
            let Some(request) = self.upstream.queue().take_next(&self.model, accept) else {
                return;
            };
            let QueuedRequest { id, operation: Operation::Model { seq, operation, .. }, .. } =
                request
            else {
                continue;
            };
            let (operation, accepted) = (Arc::new(operation), self.accepted_before(seq));
            self.pending.push_back(PendingRequest { id, seq, operation, accepted });
        }
    }

    /// Returns the id on the upstream of a request that an earlier process sent.
    fn accepted_before(&self, seq: u64) -> Option<RequestId> {
        let store = self.state.store();
        let upstream = store.runs.get(&self.model)?.row.upstream.clone()?;
        let accepted = upstream.model?.accepted;
        accepted.into_iter().find(|accepted| accepted.seq == seq).map(|accepted| accepted.id)
    }

    /// Sends the pending requests and waits for the result of the first. Returns its outcome, or
    /// `None` if there is another request to send before.
    async fn advance(&mut self) -> Result<Option<Outcome>, Fault> {
        let run = match open_run(&self.state, &self.model) {
            Ok(run) => run,
            Err(failed) => return Ok(Some(failed)),
        };
        self.ensure_model(&run).await?;
        self.send_pending().await?;
        let (Some(handle), Some(first)) = (&self.handle, self.pending.front()) else {
            return Ok(None);
        };
        let ModelOperation::Relay { kind, body } = &*first.operation else { return Ok(None) };
        let Some(id) = first.accepted.clone() else { return Ok(None) };
        let (kind, body) = (*kind, body.clone());
        let (state, session) = (Arc::clone(&self.state), handle.session.clone());
        let mut outcome = pin!(async {
            Ok::<_, Fault>(match kind {
                RequestKind::OptimStep => step_outcome(&result::<OptimStep>(&session, &id).await?),
                _ => pass_outcome(&state, &run, &body, &pass_result(&session, &id).await?),
            })
        });
        loop {
            tokio::select! {
                outcome = &mut outcome => return outcome.map(Some),
                // Continue the poll unless there is something to send: a poll that starts again
                // each time would never notice that the upstream does not respond.
                () = self.wake.notified() => {
                    let known = self.pending.len();
                    self.take_requests();
                    if self.pending.len() > known {
                        return Ok(None);
                    }
                }
            }
        }
    }

    /// Sends the pending requests that the upstream has not accepted, in order.
    ///
    /// # Errors
    /// Also those of the first request. A later one that the upstream rejects is sent again once it
    /// is the first, and fails then.
    async fn send_pending(&mut self) -> Result<(), Fault> {
        for i in 0..self.pending.len() {
            if self.pending[i].accepted.is_some() {
                continue;
            }
            let ModelOperation::Relay { kind, body } = &*self.pending[i].operation else {
                return Ok(());
            };
            let (kind, body) = (*kind, body.clone());
            self.check_not_adopted()?;
            let Some(handle) = &mut self.handle else { return Ok(()) };
            let id = match handle.submit(kind, &body).await {
                Ok(id) => id,
                Err(Fault::Failed(..)) if i > 0 => return Ok(()),
                Err(fault) => return Err(fault),
            };
            self.pending[i].accepted = Some(id);
            self.store_model();
        }
        Ok(())
    }

    /// Checks that a request may be sent to the model.
    ///
    /// # Errors
    /// [`Fault::InDoubt`] if an earlier process may have sent the same request.
    fn check_not_adopted(&self) -> Result<(), Fault> {
        match self.is_adopted {
            true => Err(Fault::InDoubt("this server was restarted".to_owned())),
            false => Ok(()),
        }
    }

    /// Stores the model and its accepted requests. Does not wait: if this is lost, the next process
    /// creates the model again.
    fn store_model(&self) {
        let Some(handle) = &self.handle else { return };
        let mut store = self.state.store();
        let Some(run) = store.runs.get(&self.model).map(|entry| entry.row.clone()) else { return };
        let model = RemoteModel { accepted: self.accepted(), ..handle.record() };
        store.put_unconfirmed(Record::Run(self.with_model(run, Some(model))));
    }

    /// Returns the pending requests that the upstream has accepted.
    fn accepted(&self) -> Vec<AcceptedRequest> {
        let accepted = |pending: &PendingRequest| {
            Some(AcceptedRequest { seq: pending.seq, id: pending.accepted.clone()? })
        };
        self.pending.iter().filter_map(accepted).collect()
    }

    fn with_model(&self, run: RunRecord, model: Option<RemoteModel>) -> RunRecord {
        let name = self.upstream.name.to_string();
        RunRecord { upstream: Some(UpstreamRun { name, model }), ..run }
    }

    /// Makes sure that the upstream has the model. Continues with the stored one to fetch the
    /// results of accepted requests; otherwise creates it again.
    async fn ensure_model(&mut self, run: &RunRecord) -> Result<(), Fault> {
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
            self.replace(handle).await;
        }
        self.handle = Some(self.restore(run).await?);
        self.is_adopted = false;
        self.store_model();
        Ok(())
    }

    /// Unloads a model that another one replaces. It may have gradients of passes that are not
    /// known to be accepted.
    async fn replace(&self, mut handle: ModelHandle) {
        handle.gradients_pending = true;
        handle.unload(&self.upstream).await;
    }

    /// Creates the model from its last checkpoint, and repeats the requests that changed it since.
    async fn restore(&mut self, run: &RunRecord) -> Result<ModelHandle, Fault> {
        let start = Instant::now();
        let (reader, changes) = {
            let store = self.state.store();
            let changes = store.runs.get(&run.id).map(|entry| entry.changes.clone());
            (store.reader(), changes.unwrap_or_default())
        };
        let requests = changes.len();
        let mut handle = remote_model::create(&self.upstream, run).await?;
        let repeated = async {
            if let Some(snapshot) = &run.snapshot {
                handle.load(remote_path(&snapshot.folder)?, true).await?;
            }
            let mut steps = 0;
            for ChangeRecord { kind, body } in changes.into_values() {
                let reader = reader.clone();
                let body = self.state.executor.run_job(move || reader.payload(body)).await;
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
                self.replace(handle).await;
                return Err(match fault {
                    Fault::Failed(category, message) => {
                        let message = format!(
                            "cannot create the model again from its last checkpoint and the \
                             requests since: {message}"
                        );
                        Fault::Failed(category, message)
                    }
                    other => other,
                });
            }
        }
        if requests > 0 || run.snapshot.is_some() {
            tracing::info!(
                target: log::MODEL,
                model_id = %run.id,
                upstream = %self.upstream.name,
                requests,
                seconds = start.elapsed().as_secs_f64(),
                "created the model on the upstream again and repeated its requests since the last \
                 checkpoint"
            );
        }
        Ok(handle)
    }

    /// Repeats a finished request.
    async fn repeat(
        &self,
        run: &RunRecord,
        handle: &mut ModelHandle,
        kind: RequestKind,
        body: &Bytes,
    ) -> Result<(), Fault> {
        if kind == RequestKind::ForwardBackward {
            let request = ForwardBackward::from_proto(body).map_err(unreadable)?;
            let objective = PassObjective::resolve(&self.state.store(), run, &request);
            if let PassObjective::Graph(loss) = objective.map_err(unreadable)? {
                return custom_loss_pass(handle, request, &loss).await.map(drop);
            }
        }
        let id = handle.submit(kind, body).await?;
        match kind {
            RequestKind::OptimStep => drop(result::<OptimStep>(&handle.session, &id).await?),
            _ => drop(pass_result(&handle.session, &id).await?),
        }
        Ok(())
    }

    /// Executes the first request, which is not a relay and therefore the only one.
    async fn execute_first(&mut self) -> Result<Outcome, Fault> {
        let run = match open_run(&self.state, &self.model) {
            Ok(run) => run,
            Err(failed) => return Ok(failed),
        };
        let Some(PendingRequest { id, seq, operation, .. }) = self.pending.front() else {
            return Err(Fault::Unavailable("there is no request".to_owned()));
        };
        let (id, seq, operation) = (id.clone(), *seq, Arc::clone(operation));
        self.execute(&run, &id, seq, &operation).await
    }

    async fn execute(
        &mut self,
        run: &RunRecord,
        id: &RequestId,
        seq: u64,
        operation: &ModelOperation,
    ) -> Result<Outcome, Fault> {
        match operation {
            ModelOperation::Create => {
                self.drop_stored_model(run).await;
                let created = remote_model::create(&self.upstream, run).await;
                match created {
                    Ok(handle) => (self.handle, self.is_adopted) = (Some(handle), false),
                    Err(Fault::Failed(category, message)) => {
                        return Ok(close_run(run, Outcome::failed(category, message)));
                    }
                    Err(fault) => return Err(fault),
                }
                self.store_model();
                Ok(Outcome::json(&ModelCreated::new(run.id.clone())))
            }
            ModelOperation::Load { folder, path, optimizer, creates } => {
                self.load(run, seq, folder, path, *optimizer, *creates).await
            }
            ModelOperation::Save(save) => self.save(run, id, seq, save).await,
            ModelOperation::SaveForSampler(sampler) => self.save_for_sampler(run, sampler).await,
            ModelOperation::RelayCustomLoss { body, loss } => {
                self.ensure_model(run).await?;
                self.check_not_adopted()?;
                let pass = ForwardBackward::from_proto(body).map_err(unreadable)?;
                let Some(handle) = &mut self.handle else {
                    return Err(Fault::Unavailable("the model is not available".to_owned()));
                };
                let output = custom_loss_pass(handle, pass, loss).await?;
                self.store_model();
                Ok(pass_outcome(&self.state, run, body, &output))
            }
            ModelOperation::Fail(category, message) => {
                let failed = Outcome::failed(*category, message);
                Ok(if seq == 0 { close_run(run, failed) } else { failed })
            }
            ModelOperation::Relay { .. }
            | ModelOperation::Pass(_)
            | ModelOperation::OptimStep(_) => Ok(Outcome::failed(
                FailureCategory::Server,
                "internal error: the request is one of the engine",
            )),
        }
    }

    /// Removes a model that an earlier attempt created.
    async fn drop_stored_model(&mut self, run: &RunRecord) {
        if let Some(handle) = self.handle.take() {
            self.replace(handle).await;
        } else if let Some(model) = run.upstream.as_ref().and_then(|run| run.model.as_ref())
            && let Ok(handle) = ModelHandle::adopt(&self.upstream, model).await
        {
            self.replace(handle).await;
        }
    }

    async fn load(
        &mut self,
        run: &RunRecord,
        seq: u64,
        folder: &str,
        path: &TinkerPath,
        optimizer: bool,
        creates: bool,
    ) -> Result<Outcome, Fault> {
        self.drop_stored_model(run).await;
        let loaded = async {
            let mut handle = remote_model::create(&self.upstream, run).await?;
            let saved = async {
                handle.load(remote_path(folder)?, optimizer).await?;
                // The checkpoint may be deleted before the model is created again.
                handle.save(self.recovery_name()).await
            };
            match saved.await {
                Ok(saved) => Ok((handle, saved)),
                Err(fault) => {
                    handle.unload(&self.upstream).await;
                    Err(fault)
                }
            }
        };
        let (handle, saved) = match loaded.await {
            Ok(loaded) => loaded,
            Err(Fault::Failed(category, message)) if creates => {
                return Ok(close_run(run, Outcome::failed(category, message)));
            }
            Err(fault) => return Err(fault),
        };
        let model = handle.record();
        (self.handle, self.is_adopted) = (Some(handle), false);
        self.steps = 0;
        let snapshot = Some(SnapshotRecord { seq, folder: self.remote(saved) });
        let row = self.with_model(RunRecord { snapshot, ..run.clone() }, Some(model));
        let (path, id) = (Some(path.to_string()), Some(run.id.clone()));
        let outcome = Outcome::json(&WeightsLoaded::default().path(path).model_id(id));
        Ok(outcome.with_record(Record::Run(row)))
    }

    async fn save(
        &mut self,
        run: &RunRecord,
        id: &RequestId,
        seq: u64,
        save: &CheckpointSave,
    ) -> Result<Outcome, Fault> {
        match already_saved(&self.state, id, save) {
            Ok(None) => {}
            Ok(Some(outcome)) | Err(outcome) => return Ok(outcome),
        }
        let folder = self.save_weights(run, save.path.kind()).await?;
        let clock = &self.state.clock;
        let row = checkpoint_record(clock, run, seq, save.clone(), folder, 0);
        let row = crate::store::CheckpointRecord { request: Some(id.clone()), ..row };
        let usage = vec![(usage_key(clock, run, UsageMeter::Checkpoints), 1)];
        let outcome = saved_outcome(&save.path, 0).with_usage(usage);
        Ok(outcome.with_record(Record::Checkpoint(row)))
    }

    async fn save_for_sampler(
        &mut self,
        run: &RunRecord,
        sampler: &SamplerId,
    ) -> Result<Outcome, Fault> {
        let folder = self.save_weights(run, CheckpointKind::Sampler).await?;
        let record = Record::Sampler(SamplerRecord {
            id: sampler.clone(),
            session: run.session.clone(),
            base_model: run.base_model.clone(),
            model_path: None,
            folder: Some(folder),
            clients: 1,
        });
        Ok(Outcome::json(&SamplerWeightsSaved::ephemeral(sampler.clone())).with_record(record))
    }

    /// Saves the weights on the upstream. Returns where they are, as records store it.
    async fn save_weights(
        &mut self,
        run: &RunRecord,
        kind: CheckpointKind,
    ) -> Result<String, Fault> {
        self.ensure_model(run).await?;
        self.check_not_adopted()?;
        let name = format!("tinkex-{}", &self.state.random.id()[..12]);
        let is_older = self.upstream.is_older();
        let Some(handle) = &mut self.handle else {
            return Err(Fault::Unavailable("the model is not available".to_owned()));
        };
        // An older server samples a checkpoint with the model that it belongs to, and may change
        // that model: other models are sampled instead, which load a training checkpoint.
        let path = match kind {
            CheckpointKind::Sampler if !is_older => handle.save_for_sampler(name).await?,
            _ => handle.save(name).await?,
        };
        self.store_model();
        Ok(self.remote(path))
    }

    fn remote(&self, path: String) -> String {
        RemoteWeights { upstream: self.upstream.name.to_string(), path }.to_string()
    }

    fn recovery_name(&self) -> String {
        format!("tinkex-recovery-{}", &self.state.random.id()[..12])
    }

    /// Records the outcome of the first request.
    fn finish_first(&mut self, outcome: Outcome) {
        self.outage = None;
        let Some(first) = self.pending.pop_front() else { return };
        let failed = matches!(outcome.result, ResultKind::Failed { .. });
        if first.is_optim_step() && !failed {
            self.steps += 1;
        }
        let mut store = self.state.store();
        let has_run = outcome.records.iter().any(|record| matches!(record, Record::Run(_)));
        let run = store.runs.get(&self.model).map(|entry| entry.row.clone());
        let outcome = match (run, &self.handle) {
            // The result and the accepted requests that remain are stored together.
            (Some(run), Some(handle)) if !has_run => {
                let model = RemoteModel { accepted: self.accepted(), ..handle.record() };
                outcome.with_record(Record::Run(self.with_model(run, Some(model))))
            }
            _ => outcome,
        };
        let replaced = replaced_weights(&store, &outcome.records);
        record_outcome(&self.state, &mut store, &first.id, outcome);
        drop(store);
        replaced.into_iter().for_each(|folder| self.state.backends.discard(folder));
        self.upstream.queue().set_fault(&self.model, None);
    }

    /// Returns whether a checkpoint must be saved before further requests are sent. An adopted
    /// model is not saved: it is replaced at its next request.
    fn checkpoint_is_next(&self) -> bool {
        let steps = self.pending.iter().filter(|pending| pending.is_optim_step()).count();
        let steps = self.steps.saturating_add(u32::try_from(steps).unwrap_or(u32::MAX));
        let after_step = self.pending.back().is_none_or(PendingRequest::is_optim_step);
        let is_due = steps >= self.state.options.checkpoint_every.max(1);
        is_due && after_step && !self.is_adopted && !self.has_gradients()
    }

    /// Returns whether the model has gradients that no step has applied, which a checkpoint would
    /// not contain; true if the model is not known.
    fn has_gradients(&self) -> bool {
        self.handle.as_ref().is_none_or(|handle| handle.gradients_pending)
    }

    /// Saves the state of the model on the upstream if it is due and nothing is in flight. Removes
    /// the previous checkpoint once the new one is durable.
    async fn checkpoint_if_due(&mut self) {
        if !self.pending.is_empty() || !self.checkpoint_is_next() {
            return;
        }
        let (name, Some(handle)) = (self.recovery_name(), &mut self.handle) else { return };
        match handle.save(name).await {
            Ok(path) => {
                self.steps = 0;
                let folder = self.remote(path);
                let model = self.handle.as_ref().map(ModelHandle::record);
                let mut store = self.state.store();
                let Some(run) = store.runs.get(&self.model).map(|entry| entry.row.clone()) else {
                    return;
                };
                let Some(seq) = run.last_seq else { return };
                let old = run.snapshot.clone();
                let snapshot = Some(SnapshotRecord { seq, folder });
                let run = self.with_model(RunRecord { snapshot, ..run }, model);
                store.put_required(Record::Run(run));
                drop(store);
                if let Some(old) = old {
                    self.state.backends.discard(old.folder);
                }
            }
            Err(Fault::Lost(_)) => self.forget_model(false).await,
            Err(Fault::InDoubt(_)) => self.forget_model(true).await,
            Err(fault) => {
                // Further requests must not wait for the checkpoint: only a request makes this task
                // run again. If the upstream does not respond now, try again after the next step.
                self.steps = match fault {
                    Fault::Unavailable(_) => self.state.options.checkpoint_every.saturating_sub(1),
                    _ => 0,
                };
                tracing::warn!(
                    target: log::MODEL,
                    model_id = %self.model,
                    upstream = %self.upstream.name,
                    error = fault.reason(),
                    "cannot save the state of a model on its upstream; more steps are repeated if \
                     the upstream loses the model"
                );
            }
        }
    }

    /// Waits before the next attempt, or fails the pending requests.
    async fn handle_fault(&mut self, fault: Fault) {
        if let Fault::Failed(category, message) = fault {
            // The request would fail again.
            return self.finish_first(Outcome::failed(category, message));
        }
        if matches!(fault, Fault::Lost(_) | Fault::InDoubt(_)) {
            self.forget_model(matches!(fault, Fault::InDoubt(_))).await;
        }
        let limit = self.state.options.timeouts.upstream;
        let outage = self
            .outage
            .get_or_insert_with(|| Outage { started: Instant::now(), delay: FIRST_DELAY });
        let elapsed = outage.started.elapsed();
        let delay = outage.delay;
        outage.delay = (delay * 2).min(MAX_DELAY);
        let reason = fault.reason().to_owned();
        if elapsed >= limit {
            self.fail_all(&reason);
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

    /// Forgets the model on the upstream, so that it is created again. The requests in flight are
    /// sent to the new model.
    async fn forget_model(&mut self, unload: bool) {
        for pending in &mut self.pending {
            pending.accepted = None;
        }
        if let Some(handle) = self.handle.take() {
            if unload {
                self.replace(handle).await;
            } else {
                handle.session.leave().await;
            }
        }
        let mut store = self.state.store();
        if let Some(run) = store.runs.get(&self.model).map(|entry| entry.row.clone()) {
            store.put_required(Record::Run(self.with_model(run, None)));
        }
    }

    /// Fails all requests of the model that are in flight or queued.
    fn fail_all(&mut self, reason: &str) {
        let name = &self.upstream.name;
        let seconds = self.state.options.timeouts.upstream.as_secs();
        let message = format!("upstream {name} has not executed it for {seconds} s: {reason}");
        let pending = std::mem::take(&mut self.pending);
        let mut ids: Vec<RequestId> = pending.into_iter().map(|pending| pending.id).collect();
        ids.extend(self.upstream.queue().take_waiting(&self.model));
        let mut store = self.state.store();
        for id in ids {
            let failed = Outcome::failed(FailureCategory::Server, message.clone());
            record_outcome(&self.state, &mut store, &id, failed);
        }
        self.outage = None;
    }

    /// Removes the model and the recovery checkpoint of a run whose session has ended.
    pub(super) async fn clean_up(upstream: Arc<Upstream>, model: ModelId) {
        let stored = |store: &Store| store.runs.get(&model).map(|entry| entry.row.clone());
        let Some(run) = stored(&upstream.state.store()) else { return };
        if let Some(remote) = run.upstream.as_ref().and_then(|run| run.model.as_ref())
            && let Ok(mut handle) = ModelHandle::adopt(&upstream, remote).await
        {
            handle.gradients_pending = true;
            handle.unload(&upstream).await;
        }
        let mut store = upstream.state.store();
        // Read it again: the task of the model may have stored an outcome before it was aborted.
        let Some(run) = stored(&store) else { return };
        let snapshot = run.snapshot.clone();
        let remote = Some(UpstreamRun { name: upstream.name.to_string(), model: None });
        store.put_required(Record::Run(RunRecord { snapshot: None, upstream: remote, ..run }));
        drop(store);
        if let Some(snapshot) = snapshot {
            upstream.state.backends.discard(snapshot.folder);
        }
    }
}

/// Returns the weights that records replace: of an overwritten checkpoint or of a snapshot.
fn replaced_weights(store: &Store, records: &[Record]) -> Vec<String> {
    let replaced = |record: &Record| match record {
        Record::Checkpoint(row) => {
            let old = store.checkpoint(&row.path)?.row.folder.clone();
            (old != row.folder).then_some(old)
        }
        Record::Run(row) => {
            let old = store.runs.get(&row.id)?.row.snapshot.as_ref()?.folder.clone();
            let new = row.snapshot.as_ref().map(|snapshot| &snapshot.folder);
            (new != Some(&old)).then_some(old)
        }
        _ => None,
    };
    records.iter().filter_map(replaced).collect()
}

/// Computes a custom loss and accumulates its gradient on the upstream. Returns the output of the
/// pass.
async fn custom_loss_pass(
    handle: &mut ModelHandle,
    pass: ForwardBackward,
    loss: &Arc<LossProgram>,
) -> Result<ForwardBackwardOutput, Fault> {
    let mode = pass.mode;
    let loss = CustomLoss::from_graph("custom", loss.inputs().to_vec(), loss.graph().clone())?;
    let id = handle.submit_pass(CustomLossPass::forward(&pass)?).await?;
    let output = pass_result(&handle.session, &id).await?;
    let computed = CustomLossPass::compute(loss, pass, output.clone()).await?;
    if mode == PassMode::Forward {
        return Ok(computed.output(output));
    }
    let id = handle.submit_pass(computed.backward().clone()).await?;
    // The gradient must not be accumulated on this model again.
    let output = pass_result(&handle.session, &id).await.map_err(Fault::into_doubt)?;
    Ok(computed.output(output))
}

/// Returns the outcome of the training pass `body`, and counts its tokens.
fn pass_outcome(
    state: &ServerState,
    run: &RunRecord,
    body: &Bytes,
    output: &ForwardBackwardOutput,
) -> Outcome {
    let pass = ForwardBackward::from_proto(body).ok();
    let tokens: usize = pass.as_ref().map_or(0, |pass| {
        pass.data.iter().map(|datum| datum.model_input().token_count().unwrap_or(0)).sum()
    });
    let tokens = u64::try_from(tokens).unwrap_or(u64::MAX);
    state.metrics.trained_tokens.add(tokens);
    let usage = vec![(usage_key(&state.clock, run, UsageMeter::Training), tokens)];
    let kind = match pass.as_ref().map(|pass| pass.mode) {
        Some(PassMode::Forward) => "forward",
        _ => "forward_backward",
    };
    let metrics = output.metrics.iter().map(|(name, value)| (name.clone(), *value)).collect();
    let history = OperationHistory { kind, tokens, metrics, ..Default::default() };
    let outcome = Outcome::proto(output.to_proto()).with_usage(usage);
    let outcome = outcome.with_history(OutcomeHistory::Operation(history));
    let changed =
        pass.is_some_and(|pass| pass.mode == PassMode::ForwardBackward && !pass.data.is_empty());
    if changed { outcome.with_model_changed() } else { outcome }
}

fn step_outcome(output: &OptimStepOutput) -> Outcome {
    let metrics = output.metrics.iter().flatten().map(|(name, value)| (name.clone(), *value));
    let metrics = metrics.collect();
    let history = OperationHistory { kind: "optim_step", metrics, ..Default::default() };
    let outcome = Outcome::json(output).with_model_changed();
    outcome.with_history(OutcomeHistory::Operation(history))
}

/// Returns the path on the upstream of weights, given as records store them.
fn remote_path(folder: &str) -> Result<&str, Fault> {
    RemoteWeights::path_in(folder).ok_or_else(|| {
        let message = format!("the weights in {folder} are not on an upstream");
        Fault::Failed(FailureCategory::Server, message)
    })
}

/// Deletes weights of an upstream if no record refers to them. A failure is only logged: the
/// weights waste space.
pub(super) async fn delete_unreferenced(upstream: &Upstream, folder: &str) {
    let Some(path) = RemoteWeights::path_in(folder) else { return };
    let (sender, written) = oneshot::channel();
    let state = &upstream.state;
    state.store().disk.barrier(Box::new(move |written| drop(sender.send(written))));
    // Wait until the current records are durable: after a crash, earlier records would refer to the
    // deleted weights.
    let is_durable = matches!(written.await, Ok(Ok(())));
    if !is_durable || state.store().folders().contains(folder) {
        return;
    }
    if let Err(error) = upstream.service.rest().delete_checkpoint(path).await {
        tracing::debug!(
            target: log::STORAGE,
            upstream = %upstream.name,
            path,
            %error,
            "cannot delete a checkpoint of an upstream"
        );
    }
}
