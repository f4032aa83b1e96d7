//! [`RunTask`]: drives a model on an upstream.
//!
//! Requests are sent in order, each at most once, and up to [`MAX_IN_FLIGHT`] ahead of their
//! results. What the upstream has accepted is stored, so that the next process fetches those results.
//! If the upstream loses the model, or it is not known whether it accepted a request, the model is
//! created again: from the run's last checkpoint on the upstream, with the requests since. The
//! requests in flight are then sent to the new model. A step is therefore never applied twice to the
//! weights that count.

use std::collections::VecDeque;
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
use tokio::sync::Notify;
use tokio::time::Instant;

use super::Upstream;
use super::fault::Fault;
use super::remote_model::{self, ModelHandle, unreadable};
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
    RunRecord, SamplerRecord, SnapshotRecord, UpstreamRun, UsageMeter,
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
    /// The model on the upstream, once this process knows it.
    handle: Option<ModelHandle>,
    /// Requests without an outcome, in order.
    pending: VecDeque<PendingRequest>,
    /// Optimizer steps since the last checkpoint.
    steps: u32,
    /// Whether `handle` is a model of an earlier process, which may have sent it requests that are
    /// not stored as accepted.
    is_adopted: bool,
    /// Faults since the last success.
    outage: Option<Outage>,
}

/// A request that was taken from the queue.
struct PendingRequest {
    request: QueuedRequest,
    seq: u64,
    /// Id on the upstream, if it has accepted the request.
    accepted: Option<RequestId>,
}

/// Time without success.
struct Outage {
    started: Instant,
    delay: Duration,
}

impl PendingRequest {
    fn operation(&self) -> Option<&ModelOperation> {
        match &self.request.operation {
            Operation::Model { operation, .. } => Some(operation),
            _ => None,
        }
    }

    fn is_relay_of(&self, wanted: RequestKind) -> bool {
        matches!(self.operation(), Some(ModelOperation::Relay { kind, .. }) if *kind == wanted)
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
            let result = match first.operation() {
                Some(ModelOperation::Relay { .. }) => self.advance().await,
                _ => self.execute_alone().await.map(Some),
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
                Some(last) => (false, last.is_relay_of(RequestKind::OptimStep)),
            };
            let only_relays = self
                .pending
                .iter()
                .all(|pending| matches!(pending.operation(), Some(ModelOperation::Relay { .. })));
            let accept = |operation: &ModelOperation| match operation {
                ModelOperation::Relay { kind: RequestKind::OptimStep, .. } => only_relays,
                ModelOperation::Relay { .. } => is_first || (after_step && only_relays),
                _ => is_first,
            };
            let Some(request) = self.upstream.queue().take_next(&self.model, accept) else {
                return;
            };
            let Operation::Model { seq, .. } = &request.operation else { continue };
            let seq = *seq;
            let accepted = self.accepted_before(seq);
            self.pending.push_back(PendingRequest { request, seq, accepted });
        }
    }

    /// Returns the id on the upstream of a request that an earlier process sent.
    fn accepted_before(&self, seq: u64) -> Option<RequestId> {
        let store = self.state.store();
        let upstream = store.runs.get(&self.model)?.row.upstream.clone()?;
        let accepted = upstream.model?.accepted;
        accepted.into_iter().find(|accepted| accepted.seq == seq).map(|accepted| accepted.id)
    }

    /// Sends the pending requests and waits for the result of the first, or for a new request.
    /// Returns the outcome of the first.
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
        let Some(Operation::Model { operation: ModelOperation::Relay { kind, body }, .. }) =
            Some(&first.request.operation)
        else {
            return Ok(None);
        };
        let (kind, body) = (*kind, body.clone());
        let Some(id) = first.accepted.clone() else { return Ok(None) };
        let session = handle.session.clone();
        let result = async {
            match kind {
                RequestKind::OptimStep => {
                    let output = session.result::<OptimStep>(&id).await?;
                    Ok(step_outcome(&output))
                }
                _ => Ok(self.pass_outcome(&run, &body, &session.pass_result(&id).await?)),
            }
        };
        tokio::select! {
            outcome = result => outcome.map(Some),
            () = self.wake.notified() => Ok(None),
        }
    }

    /// Sends the pending requests that the upstream has not accepted, in order.
    async fn send_pending(&mut self) -> Result<(), Fault> {
        for i in 0..self.pending.len() {
            if self.pending[i].accepted.is_some() {
                continue;
            }
            let Operation::Model { operation: ModelOperation::Relay { kind, body }, .. } =
                &self.pending[i].request.operation
            else {
                return Ok(());
            };
            let (kind, body) = (*kind, body.clone());
            self.check_not_adopted()?;
            let Some(handle) = &mut self.handle else { return Ok(()) };
            let id = handle.submit(kind, &body).await?;
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

    /// Makes sure that the upstream has the model: continues with the stored one, or creates it
    /// again.
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

    /// Removes a model that is created again.
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
                handle.unload(&self.upstream).await;
                return Err(fault);
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
            RequestKind::OptimStep => drop(handle.session.result::<OptimStep>(&id).await?),
            _ => drop(handle.session.pass_result(&id).await?),
        }
        Ok(())
    }

    /// Executes the first request, which is the only one.
    async fn execute_alone(&mut self) -> Result<Outcome, Fault> {
        let run = match open_run(&self.state, &self.model) {
            Ok(run) => run,
            Err(failed) => return Ok(failed),
        };
        let Some(PendingRequest { request, seq, .. }) = self.pending.pop_front() else {
            return Err(Fault::Unavailable("there is no request".to_owned()));
        };
        let result = match &request.operation {
            Operation::Model { operation, .. } => {
                self.execute(&run, &request.id, seq, operation).await
            }
            _ => Err(Fault::Failed(FailureCategory::Server, "not a request of a model".to_owned())),
        };
        self.pending.push_front(PendingRequest { request, seq, accepted: None });
        result
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
                Ok(self.pass_outcome(run, body, &output))
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
            handle.load(remote_path(folder)?, optimizer).await?;
            // The checkpoint may be deleted before the model is created again.
            let saved = handle.save(self.recovery_name()).await?;
            Ok((handle, saved))
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

    fn pass_outcome(
        &self,
        run: &RunRecord,
        body: &Bytes,
        output: &ForwardBackwardOutput,
    ) -> Outcome {
        let pass = ForwardBackward::from_proto(body).ok();
        let tokens: usize = pass.as_ref().map_or(0, |pass| {
            pass.data.iter().map(|datum| datum.model_input().token_count().unwrap_or(0)).sum()
        });
        let tokens = u64::try_from(tokens).unwrap_or(u64::MAX);
        self.state.metrics.trained_tokens.add(tokens);
        let usage = vec![(usage_key(&self.state.clock, run, UsageMeter::Training), tokens)];
        let kind = match pass.as_ref().map(|pass| pass.mode) {
            Some(PassMode::Forward) => "forward",
            _ => "forward_backward",
        };
        let metrics = output.metrics.iter().map(|(name, value)| (name.clone(), *value));
        let metrics = metrics.collect();
        let history = OperationHistory { kind, tokens, metrics, ..Default::default() };
        let outcome = Outcome::proto(output.to_proto()).with_usage(usage);
        let outcome = outcome.with_history(OutcomeHistory::Operation(history));
        let changed = pass
            .is_some_and(|pass| pass.mode == PassMode::ForwardBackward && !pass.data.is_empty());
        if changed { outcome.with_model_changed() } else { outcome }
    }

    /// Records the outcome of the first request.
    fn finish_first(&mut self, outcome: Outcome) {
        self.outage = None;
        let Some(first) = self.pending.pop_front() else { return };
        let failed = matches!(outcome.result, ResultKind::Failed { .. });
        if first.is_relay_of(RequestKind::OptimStep) && !failed {
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
        record_outcome(&self.state, &mut store, &first.request.id, outcome);
        drop(store);
        self.upstream.queue().set_fault(&self.model, None);
    }

    /// Returns whether a checkpoint must be saved before further requests are sent.
    fn checkpoint_is_next(&self) -> bool {
        let in_flight = self.pending.iter();
        let steps = in_flight.filter(|pending| pending.is_relay_of(RequestKind::OptimStep)).count();
        let steps = self.steps.saturating_add(u32::try_from(steps).unwrap_or(u32::MAX));
        let after_step =
            self.pending.back().is_none_or(|last| last.is_relay_of(RequestKind::OptimStep));
        steps >= self.state.options.checkpoint_every && after_step && !self.has_gradients()
    }

    fn has_gradients(&self) -> bool {
        self.handle.as_ref().is_none_or(|handle| handle.gradients_pending)
    }

    /// Saves the state of the model on the upstream if it is due and nothing is in flight. Removes
    /// the previous checkpoint.
    async fn checkpoint_if_due(&mut self) {
        if !self.pending.is_empty() || !self.checkpoint_is_next() || self.is_adopted {
            return;
        }
        let (name, Some(handle)) = (self.recovery_name(), &mut self.handle) else { return };
        match handle.save(name).await {
            Ok(path) => {
                self.steps = 0;
                let folder = self.remote(path);
                let model = self.handle.as_ref().map(ModelHandle::record);
                let old = {
                    let mut store = self.state.store();
                    let Some(run) = store.runs.get(&self.model).map(|entry| entry.row.clone())
                    else {
                        return;
                    };
                    let Some(seq) = run.last_seq else { return };
                    let old = run.snapshot.clone();
                    let snapshot = Some(SnapshotRecord { seq, folder });
                    let run = self.with_model(RunRecord { snapshot, ..run }, model);
                    store.put_required(Record::Run(run));
                    old
                };
                if let Some(old) = old {
                    delete_weights(&self.upstream, &old.folder).await;
                }
            }
            Err(Fault::Failed(_, error)) => {
                self.steps = 0;
                tracing::warn!(
                    target: log::MODEL,
                    model_id = %self.model,
                    upstream = %self.upstream.name,
                    error,
                    "cannot save the state of a model on its upstream; more steps are repeated if \
                     the upstream loses the model"
                );
            }
            Err(fault) => self.handle_fault(fault).await,
        }
    }

    /// Waits before the next attempt, or fails the pending requests.
    async fn handle_fault(&mut self, fault: Fault) {
        if let Fault::Failed(category, message) = fault {
            // The upstream has executed the request, and nothing changed.
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
            return self.fail_all(&reason);
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
        let mut ids: Vec<RequestId> =
            pending.into_iter().map(|pending| pending.request.id).collect();
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
        let run = upstream.state.store().runs.get(&model).map(|entry| entry.row.clone());
        let Some(run) = run else { return };
        if let Some(remote) = run.upstream.as_ref().and_then(|run| run.model.as_ref())
            && let Ok(mut handle) = ModelHandle::adopt(&upstream, remote).await
        {
            handle.gradients_pending = true;
            handle.unload(&upstream).await;
        }
        if let Some(snapshot) = &run.snapshot {
            delete_weights(&upstream, &snapshot.folder).await;
        }
        let name = upstream.name.to_string();
        let remote = Some(UpstreamRun { name, model: None });
        let row = RunRecord { snapshot: None, upstream: remote, ..run };
        upstream.state.store().put_required(Record::Run(row));
    }
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
    let output = handle.session.pass_result(&id).await?;
    let computed = CustomLossPass::compute(loss, pass, output.clone()).await?;
    if mode == PassMode::Forward {
        return Ok(computed.output(output));
    }
    let id = handle.submit_pass(computed.backward().clone()).await?;
    let output = handle.session.pass_result(&id).await?;
    Ok(computed.output(output))
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
    folder.split_once('>').map(|(_, path)| path).ok_or_else(|| {
        let message = format!("the weights in {folder} are not on an upstream");
        Fault::Failed(FailureCategory::Server, message)
    })
}

/// Deletes a checkpoint of an upstream. A failure is only logged: the checkpoint wastes space.
pub(super) async fn delete_weights(upstream: &Upstream, folder: &str) {
    let Ok(RemoteWeights { path, .. }) = folder.parse() else { return };
    if let Err(error) = upstream.service.rest().delete_checkpoint(path.as_str()).await {
        tracing::debug!(
            target: log::STORAGE,
            upstream = %upstream.name,
            path,
            %error,
            "cannot delete a checkpoint of an upstream"
        );
    }
}
