//! [`RunTask`]: executes the requests of one model on an upstream.
//!
//! The task sends requests in order, each at most once per model, and has up to [`MAX_IN_FLIGHT`]
//! requests in flight. The task stores the ids of accepted requests, so that the next process can
//! fetch their results. If the upstream loses the model, or if it is not known whether the upstream
//! accepted a request, the task creates the model again from the run's last checkpoint on the
//! upstream, and repeats the requests since that checkpoint ([`recovery`]). The task then sends the
//! requests in flight to the new model. The old model is never used again, so no step is applied
//! twice to the weights of the run.

mod execute;
mod fault_handling;
mod outcome;
mod recovery;
mod recovery_checkpoint;

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::Arc;

use tinkex_backend::context::BackendContext;
use tinkex_backend::model_outcome::open_run;
use tinkex_backend::operation::ModelOperation;
use tinkex_backend::outcome::Outcome;
use tinkex_backend::queue::QueuedOperation;
use tinkex_backend::upstream::{
    CustomLossTraining, RelayedKind, RelayedTraining, UpstreamOperation, UpstreamTraining,
};
use tinkex_store::record::{
    AcceptedRequest, FailureCategory, ModelRunRecord, Record, RemoteModel, ResultKind, UpstreamRun,
};
use tinkex_store::weights::RemoteWeights;
use tinkex_wire::{ModelId, OptimStep, RequestId};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use self::fault_handling::Outage;
use self::outcome::{pass_outcome, replaced_weights, step_outcome};
use super::Upstream;
use super::fault::Fault;
use super::remote_model::{ModelHandle, pass_result, result};

/// Maximum number of requests of a model that the upstream has accepted and not finished.
const MAX_IN_FLIGHT: usize = 4;

/// Executes the requests of one model on an upstream.
pub(super) struct RunTask {
    upstream: Arc<Upstream>,
    context: BackendContext,
    model: ModelId,
    /// Notified when the queue has requests for the model.
    wake: Arc<Notify>,
    /// Becomes true when the server stops.
    stop: watch::Receiver<bool>,
    /// The model on the upstream; `None` until this process has created or adopted it.
    handle: Option<ModelHandle>,
    /// Requests without an outcome, in order.
    pending: VecDeque<PendingRequest>,
    /// Optimizer steps since the last checkpoint.
    steps: u32,
    /// Whether an earlier process created the model of `handle`. That process may have sent
    /// requests that are not stored as accepted.
    is_adopted: bool,
    /// Current outage: set by a fault, and reset when a request gets an outcome.
    outage: Option<Outage>,
    /// Number of [unexpected](Fault::Unexpected) responses since the last request got an outcome.
    unexpected: u32,
    /// Number of unexpected responses to attempts to create the model again, since the last
    /// success.
    failed_restores: u32,
    /// Time at which the request that is now first in `pending` became the first.
    first_since: Instant,
}

/// A request that was taken from the queue.
struct PendingRequest {
    id: RequestId,
    seq: u64,
    operation: PendingOperation,
    /// Id of the request on the upstream; `None` until the upstream has accepted the request.
    accepted: Option<RequestId>,
}

impl PendingRequest {
    /// Returns the request if it is forwarded unchanged; `None` for other operations.
    fn relayed(&self) -> Option<&RelayedTraining> {
        match &self.operation {
            PendingOperation::Relay(relayed) => Some(relayed),
            PendingOperation::Alone(_) => None,
        }
    }

    fn is_relay(&self) -> bool {
        self.relayed().is_some()
    }

    fn is_optim_step(&self) -> bool {
        self.relayed().is_some_and(|relayed| relayed.kind == RelayedKind::OptimStep)
    }
}

/// An operation, classified by how the task executes it.
enum PendingOperation {
    /// A request that is forwarded unchanged and may be sent before the results of earlier requests
    /// are known.
    Relay(RelayedTraining),
    /// An operation that is executed while no other request of the model is in flight.
    Alone(Arc<AloneOperation>),
}

/// An operation that is executed while no other request of the model is in flight.
type AloneOperation = ModelOperation<CustomLossTraining, RemoteWeights>;

impl PendingOperation {
    fn name(&self) -> &'static str {
        match self {
            Self::Relay(relayed) => relayed.name(),
            Self::Alone(operation) => operation.name(),
        }
    }
}

impl From<UpstreamOperation> for PendingOperation {
    fn from(operation: UpstreamOperation) -> Self {
        Self::Alone(Arc::new(match operation {
            ModelOperation::Train(UpstreamTraining::Relay(relayed)) => return Self::Relay(relayed),
            ModelOperation::Train(UpstreamTraining::CustomLoss(pass)) => {
                ModelOperation::Train(pass)
            }
            ModelOperation::Create => ModelOperation::Create,
            ModelOperation::Save(save) => ModelOperation::Save(save),
            ModelOperation::SaveForSampler(sampler) => ModelOperation::SaveForSampler(sampler),
            ModelOperation::Load(load) => ModelOperation::Load(load),
            ModelOperation::Fail(category, message) => ModelOperation::Fail(category, message),
        }))
    }
}

impl Drop for RunTask {
    /// Fails the requests in flight if the session of the model has ended, which aborts the task,
    /// or if the task panics. If the server stops, the requests get no outcome and are executed
    /// after the next start.
    fn drop(&mut self) {
        if !self.pending.is_empty() {
            // A pass that was being sent may arrive after the gradients of the model are cleared.
            self.upstream.slots.set_dirty();
        }
        for pending in std::mem::take(&mut self.pending) {
            let failed = match open_run(&self.context.store, &self.model) {
                Err(failed) => failed,
                Ok(_) if std::thread::panicking() => Outcome::failed(
                    FailureCategory::Server,
                    "internal error: the task of the model panicked",
                ),
                Ok(_) => return,
            };
            self.context.outcomes.record_locking(&pending.id, failed);
        }
    }
}

impl RunTask {
    pub(super) fn new(
        upstream: Arc<Upstream>,
        model: ModelId,
        wake: Arc<Notify>,
        stop: watch::Receiver<bool>,
    ) -> Self {
        Self {
            context: upstream.context.clone(),
            upstream,
            model,
            wake,
            stop,
            handle: None,
            pending: VecDeque::new(),
            steps: 0,
            is_adopted: false,
            outage: None,
            unexpected: 0,
            failed_restores: 0,
            first_since: Instant::now(),
        }
    }

    /// Executes requests until the server stops or the task is aborted. Returns whether the state
    /// of the model was saved because the server stops.
    pub(super) async fn run(mut self) -> bool {
        let mut stop = self.stop.clone();
        // Stopping interrupts the request in progress: the next process continues as after a crash.
        let stopped = async move { stop.wait_for(|stop| *stop).await.map(drop) };
        tokio::select! {
            biased;
            _ = stopped => self.save_before_stop().await,
            () = self.execute_requests() => false,
        }
    }

    async fn execute_requests(&mut self) {
        loop {
            self.take_requests();
            let Some(first) = self.pending.front() else {
                self.wake.notified().await;
                continue;
            };
            let result = match &first.operation {
                PendingOperation::Relay(_) => self.advance().await,
                PendingOperation::Alone(operation) => {
                    let operation = Arc::clone(operation);
                    let id = first.id.clone();
                    let seq = first.seq;
                    self.execute_alone(&id, seq, &operation).await.map(Some)
                }
            };
            match result {
                Ok(Some(outcome)) => self.finish_first(outcome),
                Ok(None) => {}
                Err(fault) => self.handle_fault(fault).await,
            }
            self.checkpoint_if_due().await;
        }
    }

    /// Takes requests from the queue that may be sent before the results of the requests in flight
    /// are known.
    ///
    /// A pass waits for the result of the pass before it, unless an optimizer step is between the
    /// two. Otherwise an upstream may compute both passes in one batch, depending on their timing,
    /// and a repetition would not compute the same bits. An optimizer step may follow any pass or
    /// step. All other requests wait until no request is in flight.
    fn take_requests(&mut self) {
        while self.pending.len() < self.max_in_flight() && !self.checkpoint_is_next() {
            let is_first = self.pending.is_empty();
            let after_step = self.pending.back().is_some_and(PendingRequest::is_optim_step);
            let only_relays = self.pending.iter().all(PendingRequest::is_relay);
            let accept = |operation: &UpstreamOperation| match operation {
                ModelOperation::Train(UpstreamTraining::Relay(relayed)) => match relayed.kind {
                    RelayedKind::OptimStep => only_relays,
                    RelayedKind::Pass => is_first || (after_step && only_relays),
                },
                _ => is_first,
            };
            let Some(request) = self.upstream.handle.queue.take_next(&self.model, accept) else {
                return;
            };
            let QueuedOperation { id, seq, operation, .. } = request;
            let operation = PendingOperation::from(operation);
            let accepted = self.accepted_before(seq);
            if self.pending.is_empty() {
                self.first_since = Instant::now();
            }
            self.pending.push_back(PendingRequest { id, seq, operation, accepted });
        }
    }

    /// Returns the maximum number of requests in flight. After an unexpected response the maximum
    /// is 1, so that the first request is the cause of a further unexpected response.
    fn max_in_flight(&self) -> usize {
        if self.unexpected > 0 { 1 } else { MAX_IN_FLIGHT }
    }

    /// Returns the id on the upstream of the request with the sequence number `seq`, if an earlier
    /// process sent the request and the upstream accepted it.
    fn accepted_before(&self, seq: u64) -> Option<RequestId> {
        let store = self.context.store.lock();
        let upstream = store.runs.get(&self.model)?.row.upstream.clone()?;
        let accepted = upstream.model?.accepted;
        accepted.into_iter().find(|accepted| accepted.seq == seq).map(|accepted| accepted.id)
    }

    /// Sends the pending requests and waits for the result of the first. Returns the outcome of the
    /// first request, or `None` if the queue has another request to send before the result arrives.
    async fn advance(&mut self) -> Result<Option<Outcome>, Fault> {
        let run = match open_run(&self.context.store, &self.model) {
            Ok(run) => run,
            Err(failed) => return Ok(Some(failed)),
        };
        self.ensure_model(&run).await?;
        self.send_pending().await?;
        let (Some(handle), Some(first)) = (&self.handle, self.pending.front()) else {
            return Ok(None);
        };
        let Some(RelayedTraining { kind, body }) = first.relayed().cloned() else {
            return Ok(None);
        };
        let Some(id) = first.accepted.clone() else { return Ok(None) };
        let context = self.context.clone();
        let session = handle.session.clone();
        let mut outcome = pin!(async {
            Ok::<_, Fault>(match kind {
                RelayedKind::OptimStep => {
                    step_outcome(&body, &result::<OptimStep>(&session, &id).await?)
                }
                RelayedKind::Pass => {
                    pass_outcome(&context, &run, &body, &pass_result(&session, &id).await?)
                }
            })
        });
        loop {
            tokio::select! {
                biased;
                outcome = &mut outcome => return outcome.map(Some),
                // Continue the poll unless there is a request to send: a poll that restarts at each
                // notification would never notice that the upstream does not respond.
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
    /// Returns the fault of the first request. A later request that the upstream rejects is sent
    /// again once it is the first, and fails then.
    async fn send_pending(&mut self) -> Result<(), Fault> {
        for i in 0..self.pending.len().min(self.max_in_flight()) {
            if self.pending[i].accepted.is_some() {
                continue;
            }
            let Some(RelayedTraining { kind, body }) = self.pending[i].relayed().cloned() else {
                return Ok(());
            };
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
        if self.is_adopted {
            return Err(Fault::InDoubt("this server was restarted".to_owned()));
        }
        Ok(())
    }

    /// Stores the model and its accepted requests. Does not wait until the record is durable: if
    /// the record is lost, the next process creates the model again.
    fn store_model(&self) {
        let Some(handle) = &self.handle else { return };
        self.store_remote(Some(RemoteModel { accepted: self.accepted(), ..handle.record() }));
    }

    /// Stores `model` as the model of the run on the upstream. Does not wait until the record is
    /// durable.
    fn store_remote(&self, model: Option<RemoteModel>) {
        let mut store = self.context.store.lock();
        let Some(run) = store.runs.get(&self.model).map(|entry| entry.row.clone()) else { return };
        store.put_unconfirmed(Record::Run(self.with_model(run, model)));
    }

    /// Returns the pending requests that the upstream has accepted.
    fn accepted(&self) -> Vec<AcceptedRequest> {
        let accepted = |pending: &PendingRequest| {
            Some(AcceptedRequest { seq: pending.seq, id: pending.accepted.clone()? })
        };
        self.pending.iter().filter_map(accepted).collect()
    }

    fn with_model(&self, run: ModelRunRecord, model: Option<RemoteModel>) -> ModelRunRecord {
        let name = self.upstream.handle.name.to_string();
        ModelRunRecord { upstream: Some(UpstreamRun { name, model }), ..run }
    }

    /// Records the outcome of the first request.
    fn finish_first(&mut self, outcome: Outcome) {
        self.outage = None;
        self.unexpected = 0;
        let Some(first) = self.pending.pop_front() else { return };
        let computed = std::mem::replace(&mut self.first_since, Instant::now()).elapsed();
        let outcome = outcome.with_operation_history(first.operation.name(), computed);
        let failed = matches!(outcome.result, ResultKind::Failed { .. });
        if first.is_optim_step() && !failed {
            self.steps += 1;
        }
        let mut store = self.context.store.lock();
        let has_run = outcome.records.iter().any(|record| matches!(record, Record::Run(_)));
        let run = store.runs.get(&self.model).map(|entry| entry.row.clone());
        let outcome = match (run, &self.handle) {
            // Store the outcome and the remaining accepted requests in one transaction: a request
            // that is no longer in the list and has no outcome would be executed again.
            (Some(run), Some(handle)) if !has_run => {
                let model = RemoteModel { accepted: self.accepted(), ..handle.record() };
                outcome.with_record(Record::Run(self.with_model(run, Some(model))))
            }
            _ => outcome,
        };
        let replaced = replaced_weights(&store, &outcome.records);
        self.context.outcomes.record(&mut store, &first.id, outcome);
        drop(store);
        replaced.into_iter().for_each(|weights| self.upstream.handle.discard(weights));
        self.upstream.handle.queue.set_fault(&self.model, None);
    }
}
