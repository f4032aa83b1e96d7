//! Operations: validated requests in the form in which a backend executes them.

use std::sync::Arc;

use tinkex_autodiff::LossProgram;
use tinkex_backend::custom_loss::custom_loss;
use tinkex_backend::operation::{CommonOperation, ModelOperation, TrainingOperation};
use tinkex_backend::queue::{LateRequest, Queue, QueuedOperation, QueuedSample, RequestQueue};
use tinkex_backend::upstream::{RelayedSample, UpstreamHandle, UpstreamOperation};
use tinkex_engine::loss::{Loss, UnverifiedLosses};
use tinkex_engine::optim::{AdamParams, DimuonParams, StepParams};
use tinkex_engine::sample::SampleRequest as EngineRequest;
use tinkex_inference::TokenSink;
use tinkex_store::error::ServerError;
use tinkex_store::record::ModelRunRecord;
use tinkex_store::store::Store;
use tinkex_store::user::Account;
use tinkex_store::weights::WeightsLocation;
use tinkex_wire::{
    ForwardBackward, LossSetting, ModelId, OptimParams, PassMode, RequestId, SamplerId, TensorData,
};

use crate::backends::{Backends, RunBackend};
use crate::fault::engine_error;
use crate::models::BaseModels;
use crate::training_data::TrainingData;

/// An operation on a model of the engine. A weights location is the name of a folder under
/// `weights/`.
pub(crate) type EngineOperation = ModelOperation<EngineTraining, String>;

/// Queue of the engine.
pub(crate) type EngineQueue = Queue<EngineOperation, EngineSampling>;

/// A training request to a model of the engine.
pub(crate) enum EngineTraining {
    /// Runs training data through the model.
    Pass(Box<TrainingPass>),
    /// Applies the accumulated gradients.
    OptimStep(StepParams),
    /// Discards the accumulated gradients.
    DiscardGradient,
}

impl TrainingOperation for EngineTraining {
    fn name(&self) -> &'static str {
        match self {
            Self::Pass(pass) if pass.mode == PassMode::Forward => "forward",
            Self::Pass(_) => "forward_backward",
            Self::OptimStep(_) => "optim_step",
            Self::DiscardGradient => "discard_gradient",
        }
    }

    fn extra_bytes(&self) -> usize {
        match self {
            Self::Pass(pass) => pass.data.extra_bytes(),
            Self::OptimStep(_) | Self::DiscardGradient => 0,
        }
    }
}

/// A sampling request to the engine.
pub(crate) enum EngineSampling {
    /// Draws samples for the Tinker API.
    Sample(Box<TinkerSample>),
    /// Samples tokens for an inference request.
    Generate(Box<QueuedGeneration>),
}

impl EngineSampling {
    fn extra_bytes(&self) -> usize {
        match self {
            Self::Sample(sample) => sample.extra_bytes,
            Self::Generate(_) => 0,
        }
    }
}

/// A validated request, in its backend's type of operation.
pub(crate) enum Operation {
    /// Runs an operation on a model, in order of sequence numbers.
    Model { model: ModelId, seq: u64, operation: RunOperation },
    /// Draws samples, in any order.
    Sample(SampleOperation),
}

/// An operation on a model, for the backend of its run.
pub(crate) enum RunOperation {
    Engine(EngineOperation),
    Upstream(Arc<UpstreamHandle>, UpstreamOperation),
}

/// A sample, for the backend that has the weights.
pub(crate) enum SampleOperation {
    Engine(EngineSampling),
    Upstream(Arc<UpstreamHandle>, Box<RelayedSample>),
}

impl RunOperation {
    /// Converts an operation that has the same form for all backends to the type of `backend`.
    pub(crate) fn common(backend: RunBackend, operation: CommonOperation) -> Self {
        match backend {
            RunBackend::Engine => Self::Engine(operation.into()),
            RunBackend::Upstream(upstream) => Self::Upstream(upstream, operation.into()),
        }
    }
}

impl Operation {
    /// Returns the memory that the operation holds or will allocate beyond the request body, in
    /// bytes.
    pub(crate) fn extra_bytes(&self) -> usize {
        match self {
            Self::Model { operation: RunOperation::Engine(operation), .. } => {
                operation.extra_bytes()
            }
            Self::Model { operation: RunOperation::Upstream(_, operation), .. } => {
                operation.extra_bytes()
            }
            Self::Sample(SampleOperation::Engine(sampling)) => sampling.extra_bytes(),
            Self::Sample(SampleOperation::Upstream(..)) => 0,
        }
    }

    /// Returns the queue that [`enqueue`](Self::enqueue) uses.
    pub(crate) fn queue<'a>(&'a self, backends: &'a Backends) -> &'a dyn RequestQueue {
        match self {
            Self::Model { operation: RunOperation::Engine(_), .. }
            | Self::Sample(SampleOperation::Engine(_)) => backends.engine(),
            Self::Model { operation: RunOperation::Upstream(upstream, _), .. }
            | Self::Sample(SampleOperation::Upstream(upstream, _)) => &upstream.queue,
        }
    }

    /// Returns the weights that the operation loads.
    pub(crate) fn source(&self) -> Option<WeightsLocation> {
        match self {
            Self::Model {
                operation: RunOperation::Engine(EngineOperation::Load(load)), ..
            } => Some(WeightsLocation::Local(load.weights.clone())),
            Self::Model {
                operation: RunOperation::Upstream(_, UpstreamOperation::Load(load)),
                ..
            } => Some(WeightsLocation::Upstream(load.weights.clone())),
            Self::Model { .. } | Self::Sample(_) => None,
        }
    }

    /// Adds the request `id` of `bytes` bytes to the queue of its backend. `account` has its user
    /// and session. `starts` is the number of earlier starts; see [`QueuedOperation::starts`].
    ///
    /// # Errors
    /// If the model has already continued with a later sequence number.
    pub(crate) fn enqueue(
        self,
        backends: &Backends,
        id: RequestId,
        account: Account,
        bytes: usize,
        starts: Option<u32>,
    ) -> Result<(), LateRequest> {
        match self {
            Self::Model { model, seq, operation } => match operation {
                RunOperation::Engine(operation) => backends.engine().push(QueuedOperation {
                    id,
                    bytes,
                    starts,
                    account,
                    model,
                    seq,
                    operation,
                }),
                RunOperation::Upstream(upstream, operation) => upstream
                    .queue
                    .push(QueuedOperation { id, bytes, starts, account, model, seq, operation }),
            },
            Self::Sample(SampleOperation::Engine(sample)) => {
                backends.engine().push_sample(QueuedSample { id, bytes, starts, sample });
                Ok(())
            }
            Self::Sample(SampleOperation::Upstream(upstream, sample)) => {
                upstream.queue.push_sample(QueuedSample { id, bytes, starts, sample });
                Ok(())
            }
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

/// Samples to draw.
pub(crate) struct TinkerSample {
    pub(crate) sampler: SamplerId,
    pub(crate) request: EngineRequest,
    /// The requested targets. Their layout, dense or sparse, is the layout of the result.
    pub(crate) targets: Option<TensorData>,
    /// Memory of the requested tables about the prompt, in bytes.
    pub(crate) extra_bytes: usize,
}

/// An inference request: its tokens are delivered while they are sampled, and neither the request
/// nor its result is stored.
pub(crate) struct QueuedGeneration {
    pub(crate) weights: EngineWeights,
    /// Account to which the usage of tokens is charged.
    pub(crate) account: Account,
    pub(crate) request: EngineRequest,
    pub(crate) sink: TokenSink,
}

/// Weights of the engine to sample from: a base model, and the folder of an adapter under
/// `weights/`, if any.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct EngineWeights {
    pub(crate) base_model: String,
    pub(crate) folder: Option<String>,
}

impl PassObjective {
    /// Resolves the loss of a request, looking up custom losses of the run's session.
    pub(crate) fn resolve(
        store: &Store,
        run: &ModelRunRecord,
        request: &ForwardBackward,
    ) -> Result<Self, ServerError> {
        if let Some(program) = custom_loss(store, run, request)? {
            return Ok(Self::Graph(program));
        }
        let config = &request.loss_fn_config;
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
        let loss = Loss::parse(request.loss_fn.as_str(), &settings, UnverifiedLosses::Reject);
        Ok(Self::Loss(loss.map_err(engine_error)?))
    }
}

impl TrainingPass {
    /// Validates the data of a request against the run's base model.
    pub(crate) fn new(
        models: &BaseModels,
        run: &ModelRunRecord,
        objective: PassObjective,
        request: &ForwardBackward,
    ) -> Result<Self, ServerError> {
        let base = models.require_engine(&run.base_model)?;
        let data = TrainingData::new(&request.data, objective, &base.config)?;
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
