//! [`ModelHandle`]: sends requests to one model on an upstream.

use bytes::Bytes;
use tinkex::{AdamParams, Hint, LoraConfig};
use tinkex_backend::upstream::{RelayedKind, legacy_seed};
use tinkex_store::error::ServerError;
use tinkex_store::record::{FailureCategory, LoraSettings, ModelRunRecord, RemoteModel};
use tinkex_wire::codec::json;
use tinkex_wire::{
    CreateModel, ForwardBackward, LoadWeights, OptimStep, SaveWeights, SaveWeightsForSampler, Seq,
    SubmitRequest, UnloadModel,
};
use tinkex_wire::{ForwardBackwardOutput, ModelId, RequestId};

use super::Upstream;
use super::fault::Fault;
use super::upstream_session::UpstreamSession;

/// Distance from the next sequence number to a number that is certainly unused. The distance
/// exceeds the number of requests that can have been sent to a model without being stored as
/// accepted, including the requests that a restore repeats.
const UNUSED_NUMBERS: u64 = 1_000_000;

/// A model on an upstream. Each model has its own session on the upstream.
pub(super) struct ModelHandle {
    pub(super) session: UpstreamSession,
    pub(super) id: ModelId,
    /// Sequence number of the next request.
    pub(super) next_seq: u64,
    /// Whether a pass was accepted after the last optimizer step.
    pub(super) gradients_pending: bool,
}

impl ModelHandle {
    /// Creates a model with the initial weights that the seed of `lora` determines.
    pub(super) async fn create(
        upstream: &Upstream,
        base_model: &str,
        lora: &LoraSettings,
        optimizer: &tinkex::OptimizerConfig,
    ) -> Result<Self, Fault> {
        upstream.require_reached()?;
        let _slot = upstream.clear_slot(base_model, lora).await?;
        Self::create_in_any_slot(upstream, base_model, lora, optimizer).await
    }

    /// Creates a model that is only sampled from. The model may take a slot with gradients of an
    /// earlier model, because no optimizer step will apply them.
    pub(super) async fn create_for_sampling(
        upstream: &Upstream,
        base_model: &str,
        lora: &LoraSettings,
    ) -> Result<Self, Fault> {
        upstream.require_reached()?;
        let _slot = upstream.slots.lock().await;
        let optimizer = tinkex::OptimizerConfig::default();
        Self::create_in_any_slot(upstream, base_model, lora, &optimizer).await
    }

    /// Creates a model like [`create`](Self::create), in a slot that may have gradients of an
    /// earlier model.
    pub(super) async fn create_in_any_slot(
        upstream: &Upstream,
        base_model: &str,
        lora: &LoraSettings,
        optimizer: &tinkex::OptimizerConfig,
    ) -> Result<Self, Fault> {
        let session = UpstreamSession::open(&upstream.service).await?;
        if upstream.is_legacy() {
            // SkyRL ends a session some time after its last heartbeat, but never ends a session
            // without a heartbeat. Without this heartbeat, the model would keep its slot forever if
            // this process were killed before the first periodic heartbeat.
            session.check().await?;
        }
        let seed = if upstream.is_legacy() { legacy_seed(lora.seed) } else { lora.seed };
        let lora = LoraConfig::with_rank(lora.rank)
            .seed(Some(seed))
            .train_unembed(lora.train_unembed)
            .train_mlp(lora.train_mlp)
            .train_attn(lora.train_attn);
        let request = CreateModel::new(session.id().clone(), 0, base_model)
            .lora_config(Some(lora))
            .optimizer_config(optimizer.clone());
        // If it is not known whether the upstream created the model, finish the session, which
        // removes the model.
        let created = async {
            let accepted = session.submit(&request).await?;
            result::<CreateModel>(&session, &accepted.request_id).await
        };
        match created.await {
            Ok(created) => {
                Ok(Self { session, id: created.model_id, next_seq: 1, gradients_pending: false })
            }
            Err(fault) => {
                session.finish().await;
                Err(match fault {
                    Fault::InDoubt(reason) => Fault::Unavailable(reason),
                    other => other,
                })
            }
        }
    }

    /// Removes a model that an earlier process, or an earlier attempt, created.
    pub(super) async fn remove(upstream: &Upstream, model: &RemoteModel) {
        match Self::adopt(upstream, model).await {
            Ok(handle) => handle.replace(upstream).await,
            Err(_) => upstream.slots.set_dirty(),
        }
    }

    /// Unloads a model that another model replaces. Clears its gradients even if no pass is known
    /// to be accepted, because the model may have gradients of passes whose acceptance is unknown.
    pub(super) async fn replace(mut self, upstream: &Upstream) {
        self.gradients_pending = true;
        self.unload(upstream).await;
    }

    /// Continues with a model that an earlier process created.
    pub(super) async fn adopt(upstream: &Upstream, model: &RemoteModel) -> Result<Self, Fault> {
        upstream.require_reached()?;
        let session = UpstreamSession::adopt(&upstream.service, model.session.clone()).await?;
        session.check().await?;
        Ok(Self {
            session,
            id: model.id.clone(),
            next_seq: model.next_seq,
            gradients_pending: false,
        })
    }

    /// Returns the sequence number for the next request. Increment `next_seq` only once the
    /// upstream has accepted the request: servers of the current protocol wait for missing numbers.
    fn seq(&self) -> Seq {
        Seq::new(self.next_seq)
    }

    /// Sends a request and waits for its result. Increments the next sequence number once the
    /// upstream has accepted the request.
    async fn execute<S: SubmitRequest>(&mut self, request: &S) -> Result<S::Output, Fault> {
        let accepted = self.session.submit(request).await?;
        self.next_seq += 1;
        result::<S>(&self.session, &accepted.request_id).await
    }

    /// Sends a stored training pass or optimizer step. Returns the id of the request on the
    /// upstream.
    pub(super) async fn submit(
        &mut self,
        kind: RelayedKind,
        body: &Bytes,
    ) -> Result<RequestId, Fault> {
        match kind {
            RelayedKind::OptimStep => {
                let mut step: OptimStep = json::decode(body).map_err(unreadable)?;
                step.model_id = self.id.clone();
                step.seq_id = Some(self.seq());
                let accepted = self.session.submit(&step).await?;
                self.next_seq += 1;
                self.gradients_pending = false;
                Ok(accepted.request_id)
            }
            RelayedKind::Pass => {
                let pass = ForwardBackward::from_proto(body).map_err(unreadable)?;
                self.submit_pass(pass).await
            }
        }
    }

    /// Sends a training pass. Returns the id of the request on the upstream.
    pub(super) async fn submit_pass(
        &mut self,
        mut pass: ForwardBackward,
    ) -> Result<RequestId, Fault> {
        pass.model_id = self.id.clone();
        pass.seq_id = Some(self.seq());
        let accepted = self.session.submit_pass(&pass).await?;
        self.next_seq += 1;
        self.gradients_pending = true;
        Ok(accepted.request_id)
    }

    /// Loads the checkpoint with the path `path` on the upstream, including the optimizer state if
    /// `optimizer` is true. Must be the first request to the model.
    pub(super) async fn load(&mut self, path: &str, optimizer: bool) -> Result<(), Fault> {
        let seq = self.seq();
        let request = LoadWeights::into_model(self.id.clone(), seq, path).optimizer(optimizer);
        self.execute(&request).await.map(drop)
    }

    /// Saves weights and optimizer state under a new name. Returns the path on the upstream.
    pub(super) async fn save(&mut self, name: String) -> Result<String, Fault> {
        let seq = self.seq();
        let saved = self.execute(&SaveWeights::new(self.id.clone(), seq, name)).await?;
        Ok(saved.path)
    }

    /// Saves weights for sampling under a new name. Returns the path on the upstream.
    pub(super) async fn save_for_sampler(&mut self, name: String) -> Result<String, Fault> {
        let seq = self.seq();
        let request = SaveWeightsForSampler::named(self.id.clone(), seq, name);
        let path = self.execute(&request).await?.path.unwrap_or_default();
        // Legacy servers omit the segment `sampler_weights` of the path.
        let segments = path.strip_prefix("tinker://").and_then(|rest| rest.split_once('/'));
        Ok(match segments {
            Some((run, name)) if !name.contains('/') => {
                format!("tinker://{run}/sampler_weights/{name}")
            }
            _ => path,
        })
    }

    /// Removes the model from the upstream. Ignores failures: a model that remains is removed with
    /// its session, which gets no more heartbeats.
    pub(super) async fn unload(mut self, upstream: &Upstream) {
        if upstream.is_legacy() {
            if self.gradients_pending && self.clear_gradients().await.is_err() {
                upstream.slots.set_dirty();
            }
            // Hold the lock: if this slot were released after `clear_slot` cleared another slot and
            // before a model takes that slot, this slot could be the lowest free slot. The new
            // model would take it with its gradients.
            let _slots = upstream.slots.lock().await;
            if self.release_slot().await.is_err() {
                // A request that is not known to be accepted may arrive before the model expires.
                upstream.slots.set_dirty();
            }
        }
        self.session.finish().await;
    }

    /// Unloads the model, which releases its slot. The caller holds the lock of the slots.
    ///
    /// # Errors
    /// If the model may still be in its slot.
    pub(super) async fn release_slot(&self) -> Result<(), Fault> {
        let accepted = match self.session.submit(&UnloadModel::new(self.id.clone())).await {
            // A server without the endpoint has no slots.
            Err(failed) if failed.error.hint() == Some(Hint::CheckEndpoint) => return Ok(()),
            submitted => submitted?,
        };
        result::<UnloadModel>(&self.session, &accepted.request_id).await.map(drop)
    }

    /// Drops the handle of a model that the upstream has lost: the upstream was restarted, or has
    /// unloaded the model and kept its gradients in the slot.
    pub(super) async fn leave(self, upstream: &Upstream) {
        upstream.slots.set_dirty();
        self.session.leave().await;
    }

    /// Removes the accumulated gradients without changing the weights. SkyRL would leave the
    /// gradients to the next model in the same slot.
    pub(super) async fn clear_gradients(&mut self) -> Result<(), Fault> {
        // Skip numbers: requests that are not known to be accepted may have used the next numbers.
        // A legacy server does not wait for missing numbers.
        let seq = Seq::new(self.next_seq + UNUSED_NUMBERS);
        let mut step = OptimStep::new(self.id.clone(), AdamParams::with_learning_rate(0.0));
        step.seq_id = Some(seq);
        self.execute(&step).await.map(drop)
    }

    /// Returns the record with which the next process can continue to use the model. The list of
    /// accepted requests is empty; the caller adds the requests.
    pub(super) fn record(&self) -> RemoteModel {
        RemoteModel {
            session: self.session.id().clone(),
            id: self.id.clone(),
            next_seq: self.next_seq,
            accepted: Vec::new(),
        }
    }
}

/// Waits for the result of a request that the upstream has accepted.
pub(super) async fn result<S: SubmitRequest>(
    session: &UpstreamSession,
    id: &RequestId,
) -> Result<S::Output, Fault> {
    confirm(session, session.result::<S>(id).await).await
}

/// Waits for the result of a training pass that the upstream has accepted.
pub(super) async fn pass_result(
    session: &UpstreamSession,
    id: &RequestId,
) -> Result<ForwardBackwardOutput, Fault> {
    confirm(session, session.pass_result(id).await).await
}

/// Returns `result` if it belongs to a request of this session.
///
/// The request ids of a legacy server are numbers that start at 1 again if its database is lost.
/// The result may then belong to a request of another session with the same number. The new
/// database does not contain this session, so a check of the session detects this case.
pub(super) async fn confirm<T>(
    session: &UpstreamSession,
    result: tinkex::Result<T>,
) -> Result<T, Fault> {
    let result = result.map_err(Fault::from);
    let has_response = matches!(result, Ok(_) | Err(Fault::Failed(..)));
    if has_response && !session.has_current_protocol() {
        session.check().await?;
    }
    result
}

/// Returns the fault for a stored request that cannot be decoded.
pub(super) fn unreadable(error: impl Into<ServerError>) -> Fault {
    let message = format!("cannot read the stored request: {}", error.into());
    Fault::Failed(FailureCategory::Server, message)
}

/// Creates the model of a run on the upstream.
pub(super) async fn create(
    upstream: &Upstream,
    run: &ModelRunRecord,
) -> Result<ModelHandle, Fault> {
    ModelHandle::create(upstream, &run.base_model, &run.lora, &run.optimizer).await
}
