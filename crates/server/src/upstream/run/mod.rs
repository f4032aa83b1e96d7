//! [`RunTask`]: drives a model on an upstream.
//!
//! Requests are sent in order, each at most once per model, and up to [`MAX_IN_FLIGHT`] before
//! their results. The ids of accepted requests are stored, so that the next process fetches their
//! results. If the upstream loses the model, or it is not known whether it accepted a request, the
//! model is created again from the run's last checkpoint on the upstream, and the requests since
//! are repeated ([`recovery`]). The requests in flight are then sent to the new model. The old model
//! is never used again, so no step is applied twice to the weights of the run.

mod execute;
mod fault_handling;
mod outcome;
mod recovery;
mod recovery_checkpoint;

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::Arc;

use tinkex_wire::{ModelId, OptimStep, RequestId};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use self::fault_handling::Outage;
use self::outcome::{pass_outcome, replaced_weights, step_outcome};
use super::Upstream;
use super::fault::Fault;
use super::remote_model::{ModelHandle, pass_result, result};
use crate::model_outcome::open_run;
use crate::operation::{ModelOperation, Operation, QueuedRequest};
use crate::outcome::{Outcome, record_outcome};
use crate::state::ServerState;
use crate::store::{
    AcceptedRequest, FailureCategory, Record, RemoteModel, RequestKind, ResultKind, RunRecord,
    UpstreamRun,
};

/// Maximum number of requests of a model that the upstream has accepted and not finished.
const MAX_IN_FLIGHT: usize = 4;

/// Drives one model on an upstream.
pub(super) struct RunTask {
    upstream: Arc<Upstream>,
    state: Arc<ServerState>,
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
    /// Whether `handle` is a model of an earlier process, which may have sent it requests that are
    /// not stored as accepted.
    is_adopted: bool,
    /// Set after a fault, until a request has an outcome.
    outage: Option<Outage>,
    /// Number of [unexpected](Fault::Unexpected) responses since a request had an outcome.
    unexpected: u32,
    /// Number of unexpected responses while the model was created again, since it last succeeded.
    failed_restores: u32,
    /// When the first pending request became the first.
    first_since: Instant,
}

/// A request that was taken from the queue.
struct PendingRequest {
    id: RequestId,
    seq: u64,
    operation: Arc<ModelOperation>,
    /// Id on the upstream, if it has accepted the request.
    accepted: Option<RequestId>,
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
        if !self.pending.is_empty() {
            // A pass that was being sent may arrive after the gradients of the model are cleared.
            self.upstream.slots.set_dirty();
        }
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
    pub(super) fn new(
        upstream: Arc<Upstream>,
        model: ModelId,
        wake: Arc<Notify>,
        stop: watch::Receiver<bool>,
    ) -> Self {
        Self {
            state: Arc::clone(&upstream.state),
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
        // Interrupts whatever is in progress: the next process continues as after a crash.
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
        while self.pending.len() < self.max_in_flight() && !self.checkpoint_is_next() {
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
            if self.pending.is_empty() {
                self.first_since = Instant::now();
            }
            self.pending.push_back(PendingRequest { id, seq, operation, accepted });
        }
    }

    /// Returns the maximum number of requests in flight. After an unexpected response it is 1, so
    /// that a further one is caused by the first request.
    fn max_in_flight(&self) -> usize {
        if self.unexpected > 0 { 1 } else { MAX_IN_FLIGHT }
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
                RequestKind::OptimStep => {
                    step_outcome(&body, &result::<OptimStep>(&session, &id).await?)
                }
                _ => pass_outcome(&state, &run, &body, &pass_result(&session, &id).await?),
            })
        });
        loop {
            tokio::select! {
                biased;
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
        for i in 0..self.pending.len().min(self.max_in_flight()) {
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
        self.store_remote(Some(RemoteModel { accepted: self.accepted(), ..handle.record() }));
    }

    /// Stores which model on the upstream is that of the run. Does not wait.
    fn store_remote(&self, model: Option<RemoteModel>) {
        let mut store = self.state.store();
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

    fn with_model(&self, run: RunRecord, model: Option<RemoteModel>) -> RunRecord {
        let name = self.upstream.name.to_string();
        RunRecord { upstream: Some(UpstreamRun { name, model }), ..run }
    }

    /// Records the outcome of the first request.
    fn finish_first(&mut self, outcome: Outcome) {
        (self.outage, self.unexpected) = (None, 0);
        let Some(first) = self.pending.pop_front() else { return };
        let computed = std::mem::replace(&mut self.first_since, Instant::now()).elapsed();
        let outcome =
            outcome.with_operation_history(&self.state.history, first.operation.name(), computed);
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
}
