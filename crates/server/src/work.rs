//! Work: what requests become once they are admitted.

use std::sync::Arc;

use tinkex_autodiff::LossProgram;
use tinkex_engine::loss::{Loss, UnverifiedLosses};
use tinkex_engine::optim::{AdamParams, DimuonParams, StepParams};
use tinkex_engine::sample::SampleRequest;
use tinkex_wire::{
    ForwardBackward, LossConfig, LossFn, LossId, LossSetting, Metadata, ModelId, OptimParams,
    PassMode, RequestId, SamplerId, TensorData, TinkerPath,
};

use crate::batch::Batch;
use crate::error::ApiError;
use crate::models::Models;
use crate::store::{Fault, Run, Store};

/// A request in line.
pub(crate) struct Job {
    pub(crate) id: RequestId,
    /// Bytes that it holds.
    pub(crate) bytes: usize,
    pub(crate) work: Work,
}

/// What is to be done.
pub(crate) enum Work {
    /// Something with a model, at its place in line.
    Train { model: ModelId, seq: u64, op: Op },
    /// A sample.
    Sample(Box<Sample>),
}

impl Work {
    /// Bytes that it takes, or will, beyond those of its request.
    pub(crate) fn spread(&self) -> usize {
        match self {
            Self::Train { op: Op::Pass(pass), .. } => pass.batch.spread(),
            Self::Train { .. } => 0,
            Self::Sample(sample) => sample.spread,
        }
    }
}

/// Something to do with a model.
pub(crate) enum Op {
    /// Make it.
    Create,
    /// Run data through it.
    Pass(Box<Pass>),
    /// Take a step.
    Step(StepParams),
    /// Write it down under an address, until then.
    Save(Box<Save>),
    /// Write it down for one sampling session.
    SaveFor(SamplerId),
    /// Take over what was written down.
    Load { folder: String, path: TinkerPath, optimizer: bool, creates: bool },
    /// Say why not, when it is its turn: it came back from disk and cannot be carried out.
    Fail(Fault, String),
}

/// Data to be run through a model.
pub(crate) struct Pass {
    pub(crate) batch: Batch,
    pub(crate) mode: PassMode,
}

/// What data is run for.
pub(crate) enum Objective {
    Loss(Loss),
    Graph(Arc<LossProgram>),
}

/// A checkpoint to be made.
pub(crate) struct Save {
    pub(crate) path: TinkerPath,
    pub(crate) overwrite: bool,
    pub(crate) ttl_seconds: Option<u64>,
    pub(crate) user_metadata: Option<Metadata>,
}

/// A sample to be drawn.
pub(crate) struct Sample {
    pub(crate) sampler: SamplerId,
    pub(crate) request: SampleRequest,
    /// The targets as they were given, for the form of the answer.
    pub(crate) targets: Option<TensorData>,
    /// Bytes of the tables that it fills.
    pub(crate) spread: usize,
}

impl Objective {
    /// What a pass is run for.
    pub(crate) fn of(store: &Store, run: &Run, call: &ForwardBackward) -> Result<Self, ApiError> {
        let config = &call.loss_fn_config;
        if call.loss_fn == LossFn::Custom {
            let Some(id) = config.text(LossConfig::LOSS_ID) else {
                return Err(ApiError::bad("loss_fn_config.loss_id: custom needs the id of a loss"));
            };
            let own = id.starts_with(&format!("{}:loss:", run.session));
            let graph = store.losses.get(&LossId::from(id)).filter(|_| own);
            let graph = graph.ok_or_else(|| {
                ApiError::bad(format!("loss_fn_config.loss_id: this session has no loss {id:?}"))
            })?;
            return Ok(Self::Graph(Arc::clone(graph)));
        }
        let mut settings = Vec::new();
        for (name, setting) in config.iter() {
            match setting {
                LossSetting::Number(number) => settings.push((name, *number)),
                LossSetting::Text(_) => {
                    let why = format!("loss_fn_config.{name}: a number was expected");
                    return Err(ApiError::bad(why));
                }
            }
        }
        Ok(Self::Loss(Loss::parse(call.loss_fn.as_str(), &settings, UnverifiedLosses::Reject)?))
    }
}

impl Pass {
    /// The engine's form of a pass.
    pub(crate) fn new(
        models: &Models,
        run: &Run,
        objective: Objective,
        call: &ForwardBackward,
    ) -> Result<Self, ApiError> {
        for (i, datum) in call.data.iter().enumerate() {
            let chunks = &datum.model_input().chunks;
            let strange = chunks.iter().find(|chunk| chunk.kind() != "encoded_text");
            if let Some(chunk) = strange {
                return Err(ApiError::bad(format!(
                    "data[{i}].model_input: chunk type {} is not supported by this server",
                    chunk.kind()
                )));
            }
        }
        let base = models.get(&run.base_model);
        let base = base.ok_or_else(|| ApiError::not_found(models.missing(&run.base_model)))?;
        Ok(Self { batch: Batch::new(&call.data, objective, &base.config)?, mode: call.mode })
    }
}

/// The engine's form of a step's numbers.
pub(crate) fn step_params(params: &OptimParams) -> Result<StepParams, ApiError> {
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
        _ => return Err(ApiError::bad("optim_params: this server has adamw and dimuon")),
    })
}
