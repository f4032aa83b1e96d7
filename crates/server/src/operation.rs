//! Operations: validated requests in the form in which the worker executes them.

use std::sync::Arc;

use bytes::Bytes;
use tinkex_autodiff::LossProgram;
use tinkex_engine::loss::{Loss, UnverifiedLosses};
use tinkex_engine::optim::{AdamParams, DimuonParams, StepParams};
use tinkex_engine::sample::SampleRequest as EngineRequest;
use tinkex_wire::{
    CheckpointKind, ForwardBackward, LossConfig, LossFn, LossId, LossSetting, Metadata, ModelId,
    OptimParams, PassMode, RequestId, SampleRequest, SamplerId, SessionId, TensorData, TinkerPath,
};

use crate::error::ServerError;
use crate::inference::TokenSink;
use crate::models::BaseModels;
use crate::store::{FailureCategory, RequestKind, RunRecord, Store, loss_prefix};
use crate::training_data::TrainingData;

/// An admitted request that waits for its backend.
pub(crate) struct QueuedRequest {
    pub(crate) id: RequestId,
    /// Memory that the request holds, in bytes.
    pub(crate) bytes: usize,
    /// Number of starts after earlier restarts, for a request that was restored after a restart;
    /// `None` for a request that was admitted since.
    pub(crate) starts: Option<u32>,
    pub(crate) operation: Operation,
}

impl QueuedRequest {
    pub(crate) fn new(id: RequestId, bytes: usize, operation: Operation) -> Self {
        Self { id, bytes, starts: None, operation }
    }

    /// Returns whether the process has died while it executed the request after a restart.
    pub(crate) fn is_suspect(&self) -> bool {
        self.starts.is_some_and(|starts| starts > 0)
    }
}

/// Work of a backend for one request.
pub(crate) enum Operation {
    /// Runs an operation on a model, in order of sequence numbers.
    Model { model: ModelId, seq: u64, operation: ModelOperation },
    /// Draws samples, in any order.
    Sample(Box<QueuedSample>),
    /// Samples tokens for an inference request, in any order.
    Generate(Box<QueuedGeneration>),
    /// Sends a sampling or inference request on to an upstream, in any order.
    Relay(Box<RelayedSample>),
}

impl Operation {
    /// Memory that the operation holds or will allocate beyond the request body, in bytes.
    pub(crate) fn extra_bytes(&self) -> usize {
        match self {
            Self::Model { operation: ModelOperation::Pass(pass), .. } => pass.data.extra_bytes(),
            Self::Model { operation: ModelOperation::Relay { body, .. }, .. } => body.len(),
            Self::Model { .. } | Self::Generate(_) | Self::Relay(_) => 0,
            Self::Sample(sample) => sample.extra_bytes,
        }
    }
}

/// An operation on a model.
pub(crate) enum ModelOperation {
    /// Creates the model.
    Create,
    /// Runs training data through the model.
    Pass(Box<TrainingPass>),
    /// Applies the accumulated gradients.
    OptimStep(StepParams),
    /// Sends a training pass or an optimizer step on to the upstream of the model.
    Relay { kind: RequestKind, body: Bytes },
    /// Computes a custom loss in this process, from log-probabilities of the upstream of the model,
    /// and accumulates its gradient there.
    RelayCustomLoss { body: Bytes, loss: Arc<LossProgram> },
    /// Saves a checkpoint.
    Save(Box<CheckpointSave>),
    /// Saves weights for a new sampling session that has no checkpoint path.
    SaveForSampler(SamplerId),
    /// Loads a checkpoint into the model. `creates` is true if this creates the model.
    Load { folder: String, path: TinkerPath, optimizer: bool, creates: bool },
    /// Fails with this message when its sequence number is due. Used for stored requests that
    /// cannot be decoded or validated after a restart.
    Fail(FailureCategory, String),
}

impl ModelOperation {
    /// Returns the operation's name for log events.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Fail(..) => "request",
            Self::Create => "create_model",
            Self::Pass(pass) if pass.mode == PassMode::Forward => "forward",
            Self::OptimStep(_) | Self::Relay { kind: RequestKind::OptimStep, .. } => "optim_step",
            Self::Pass(_) | Self::Relay { .. } | Self::RelayCustomLoss { .. } => "forward_backward",
            Self::Save(_) => "save",
            Self::SaveForSampler(_) => "save_for_sampler",
            Self::Load { .. } => "load",
        }
    }
}

/// A forward or forward-backward pass.
pub(crate) struct TrainingPass {
    pub(crate) data: TrainingData,
    pub(crate) mode: PassMode,
}

/// Loss that a pass computes.
pub(crate) enum PassObjective {
    Loss(Loss),
    Graph(Arc<LossProgram>),
}

/// A checkpoint to save.
#[derive(Clone)]
pub(crate) struct CheckpointSave {
    pub(crate) path: TinkerPath,
    pub(crate) overwrite: bool,
    pub(crate) ttl_seconds: Option<u64>,
    pub(crate) user_metadata: Option<Metadata>,
}

impl CheckpointSave {
    /// Returns the message for a save whose name is taken.
    pub(crate) fn name_taken(&self) -> String {
        let advice = match self.path.kind() {
            CheckpointKind::Training => "set overwrite, choose another name, or delete it first",
            _ => "choose another name, or delete it first",
        };
        format!("checkpoint {} already exists; {advice}", self.path)
    }
}

/// Samples to draw.
pub(crate) struct QueuedSample {
    pub(crate) sampler: SamplerId,
    pub(crate) request: EngineRequest,
    /// The requested targets. Their layout, dense or sparse, is the layout of the result.
    pub(crate) targets: Option<TensorData>,
    /// Memory of the requested tables about the prompt, in bytes.
    pub(crate) extra_bytes: usize,
}

/// Weights to sample from: a base model, and the folder of an adapter under `weights/`, if any.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct WeightsKey {
    pub(crate) base_model: String,
    pub(crate) folder: Option<String>,
}

/// An inference request: its tokens are delivered while they are sampled, and neither the request
/// nor its result is stored.
pub(crate) struct QueuedGeneration {
    pub(crate) weights: WeightsKey,
    /// Session whose usage the tokens count for.
    pub(crate) session: SessionId,
    pub(crate) request: EngineRequest,
    pub(crate) sink: TokenSink,
}

/// A sampling or inference request that an upstream executes.
pub(crate) struct RelayedSample {
    /// Name of the upstream.
    pub(crate) upstream: Arc<str>,
    pub(crate) base_model: String,
    /// Path of the weights on the upstream; `None` samples from the base model.
    pub(crate) path: Option<String>,
    /// Session whose usage the tokens count for.
    pub(crate) session: SessionId,
    /// The request, with a seed.
    pub(crate) request: SampleRequest,
    /// Receives the tokens of an inference request; `None` for a sample of the Tinker API.
    pub(crate) sink: Option<TokenSink>,
}

impl PassObjective {
    /// Resolves the loss of a request, looking up custom losses of the run's session.
    pub(crate) fn resolve(
        store: &Store,
        run: &RunRecord,
        request: &ForwardBackward,
    ) -> Result<Self, ServerError> {
        let config = &request.loss_fn_config;
        if request.loss_fn == LossFn::Custom {
            let Some(id) = config.text(LossConfig::LOSS_ID) else {
                return Err(ServerError::invalid(
                    "loss_fn_config.loss_id: required for loss_fn custom",
                ));
            };
            let owned = id.starts_with(&loss_prefix(&run.session));
            let graph = store.losses.get(&LossId::from(id)).filter(|_| owned);
            let graph = graph.ok_or_else(|| {
                ServerError::invalid(format!(
                    "loss_fn_config.loss_id: session {} has no custom loss {id:?}",
                    run.session
                ))
            })?;
            return Ok(Self::Graph(Arc::clone(graph)));
        }
        let mut settings = Vec::new();
        for (name, setting) in config.iter() {
            match setting {
                LossSetting::Number(number) => settings.push((name, *number)),
                LossSetting::Text(_) => {
                    return Err(ServerError::invalid(format!(
                        "loss_fn_config.{name}: expected a number, got a string"
                    )));
                }
            }
        }
        Ok(Self::Loss(Loss::parse(request.loss_fn.as_str(), &settings, UnverifiedLosses::Reject)?))
    }
}

impl TrainingPass {
    /// Validates the data of a request against the run's base model.
    pub(crate) fn new(
        models: &BaseModels,
        run: &RunRecord,
        objective: PassObjective,
        request: &ForwardBackward,
    ) -> Result<Self, ServerError> {
        let base = models.require_engine(&run.base_model)?;
        let config = base
            .config()
            .ok_or_else(|| ServerError::Internal(format!("{} has no configuration", base.name)))?;
        let data = TrainingData::new(&request.data, objective, config)?;
        Ok(Self { data, mode: request.mode })
    }
}

/// Converts optimizer parameters to the engine's form.
pub(crate) fn step_params(params: &OptimParams) -> Result<StepParams, ServerError> {
    Ok(match params {
        OptimParams::Adam(adam) => StepParams::Adam(AdamParams {
            learning_rate: adam.learning_rate,
            beta1: adam.beta1,
            beta2: adam.beta2,
            eps: adam.eps,
            weight_decay: adam.weight_decay,
            grad_clip_norm: adam.grad_clip_norm,
        }),
        OptimParams::Dimuon(dimuon) => StepParams::Dimuon(DimuonParams {
            learning_rate: dimuon.learning_rate,
            beta1: dimuon.beta1,
            grad_clip_norm: dimuon.grad_clip_norm,
        }),
        _ => {
            return Err(ServerError::invalid(
                "optim_params: unsupported optimizer; this server supports adamw and dimuon",
            ));
        }
    })
}
