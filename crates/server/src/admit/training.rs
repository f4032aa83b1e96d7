//! Admission of model creation, training passes and optimizer steps.

use std::sync::{Arc, MutexGuard};

use bytes::Bytes;
use tinkex_wire::codec::json;
use tinkex_wire::{
    ApiRequest as _, CreateModel, ForwardBackward, ModelId, OptimParams, OptimStep,
    OptimizerConfig, RequestId, Seq,
};

use super::{
    CREATION_SEQ, NextStep, Submission, digest, reject_seq_on_error, relay, require_run,
    require_session, submit,
};
use crate::error::ServerError;
use crate::operation::{ModelOperation, Operation, PassObjective, TrainingPass, step_params};
use crate::state::ServerState;
use crate::store::{
    LoraSettings, Record, RequestKind, RequestRecord, RunRecord, SequenceScope, Store,
};

/// Maximum LoRA rank. The hidden size of the base model is a further limit.
const MAX_RANK: usize = 256;

/// Admits the creation of a model.
pub(crate) fn create_model(
    state: &Arc<ServerState>,
    body: Bytes,
) -> Result<RequestId, ServerError> {
    let request: CreateModel = json::decode(&body)?;
    request.validate()?;
    let base = state.base_model(&request.base_model)?;
    let Some(lora) = request.lora_config else {
        return Err(ServerError::invalid(
            "lora_config: required; this server trains LoRA adapters only",
        ));
    };
    let hidden_size = base.config().map_or(MAX_RANK, |config| config.hidden_size);
    let max = hidden_size.min(MAX_RANK);
    let rank = lora.rank;
    if !rank.is_power_of_two() || usize::try_from(rank).map_or(true, |rank| rank > max) {
        return Err(ServerError::invalid(format!(
            "lora_config.rank: {rank} is not a power of two of at most {max}, the max LoRA rank of \
             {}",
            base.name
        )));
    }
    validate_optimizer(&request.optimizer_config)?;
    let store = state.store();
    require_session(&store, &request.session_id)?;
    let upstream = relay::assign(state, &store, &base, &request.optimizer_config)?;
    let model = ModelId::in_session(&request.session_id, request.model_seq_id);
    let seed = lora.seed.unwrap_or_else(|| random_seed(state));
    let row = RunRecord {
        id: model.clone(),
        session: request.session_id.clone(),
        number: request.model_seq_id,
        base_model: request.base_model,
        lora: LoraSettings {
            rank,
            seed,
            train_unembed: lora.train_unembed,
            train_mlp: lora.train_mlp,
            train_attn: lora.train_attn,
        },
        optimizer: request.optimizer_config,
        user_metadata: request.user_metadata,
        created_at: store.clock.now(),
        closed: None,
        snapshot: None,
        last_seq: None,
        project_id: None,
        upstream,
    };
    let operation = ModelOperation::Create;
    let submission = Submission {
        kind: RequestKind::CreateModel,
        session: request.session_id,
        scope: SequenceScope::Model(model.clone()),
        seq: Some(CREATION_SEQ),
        digest: digest::of_bytes(&body),
        seed,
        samples: 0,
        body,
        records: vec![Record::Run(row)],
        next: NextStep::Enqueue(Operation::Model { model, seq: CREATION_SEQ, operation }),
    };
    submit(state, store, submission)
}

/// Admits a forward or forward-backward pass.
pub(crate) fn forward_backward(
    state: &Arc<ServerState>,
    body: Bytes,
) -> Result<RequestId, ServerError> {
    let request = ForwardBackward::from_proto(&body)?;
    let digest = digest::of_pass(&request);
    let (model, seq) = (request.model_id.clone(), request.seq_id.map(Seq::get));
    let admit = || {
        let run = require_run(&state.store(), &request.model_id)?;
        let operation = pass_operation(state, &run, &request, &body)?;
        let kind = RequestKind::ForwardBackward;
        ModelRequest { kind, seq, digest, body, operation }.submit(state, state.store(), &run)
    };
    reject_seq_on_error(state, &model, seq, admit())
}

/// Validates a pass and converts it to the form of the run's backend. Does not hold the store's lock
/// while it validates: there may be millions of tokens.
fn pass_operation(
    state: &ServerState,
    run: &RunRecord,
    request: &ForwardBackward,
    body: &Bytes,
) -> Result<ModelOperation, ServerError> {
    let objective = PassObjective::resolve(&state.store(), run, request)?;
    if let Some(operation) = relay::pass(state, run, request, &objective, body)? {
        return Ok(operation);
    }
    let pass = TrainingPass::new(&state.models, run, objective, request)?;
    Ok(ModelOperation::Pass(Box::new(pass)))
}

/// Validates a stored training pass. Returns the step that enqueues it again.
pub(super) fn restore_pass(
    state: &ServerState,
    row: &RequestRecord,
    body: &Bytes,
) -> Result<NextStep, ServerError> {
    let request = ForwardBackward::from_proto(body)?;
    let run = restored_run(state, &request.model_id)?;
    enqueue_restored(row, pass_operation(state, &run, &request, body)?)
}

/// Returns the run of a stored request.
fn restored_run(state: &ServerState, model: &ModelId) -> Result<RunRecord, ServerError> {
    let run = state.store().runs.get(model).map(|entry| entry.row.clone());
    run.ok_or_else(|| ServerError::not_found(format!("model {model} no longer exists")))
}

/// Admits an optimizer step.
pub(crate) fn optim_step(state: &Arc<ServerState>, body: Bytes) -> Result<RequestId, ServerError> {
    let request: OptimStep = json::decode(&body)?;
    let (model, seq) = (request.model_id.clone(), request.seq_id.map(Seq::get));
    reject_seq_on_error(state, &model, seq, submit_step(state, &request, body))
}

fn submit_step(
    state: &Arc<ServerState>,
    request: &OptimStep,
    body: Bytes,
) -> Result<RequestId, ServerError> {
    request.validate()?;
    let store = state.store();
    let run = require_run(&store, &request.model_id)?;
    let optimizer = match &request.params {
        OptimParams::Dimuon(_) => "dimuon",
        _ => "adamw",
    };
    if optimizer != run.optimizer.kind {
        return Err(ServerError::invalid(format!(
            "optim_params: {optimizer} parameters for a model that was created with {}",
            run.optimizer.kind
        )));
    }
    let model_request = ModelRequest {
        kind: RequestKind::OptimStep,
        seq: request.seq_id.map(Seq::get),
        digest: digest::of_bytes(&body),
        operation: step_operation(state, &run, request, &body)?,
        body,
    };
    model_request.submit(state, store, &run)
}

/// Converts an optimizer step to the form of the run's backend.
fn step_operation(
    state: &ServerState,
    run: &RunRecord,
    request: &OptimStep,
    body: &Bytes,
) -> Result<ModelOperation, ServerError> {
    match relay::step(state, run, request, body)? {
        Some(operation) => Ok(operation),
        None => Ok(ModelOperation::OptimStep(step_params(&request.params)?)),
    }
}

/// Decodes a stored optimizer step. Returns the step that enqueues it again.
pub(super) fn restore_step(
    state: &ServerState,
    row: &RequestRecord,
    body: &Bytes,
) -> Result<NextStep, ServerError> {
    let request: OptimStep = json::decode(body)?;
    let run = restored_run(state, &request.model_id)?;
    enqueue_restored(row, step_operation(state, &run, &request, body)?)
}

/// A validated request of an existing model.
pub(super) struct ModelRequest {
    pub(super) kind: RequestKind,
    /// Sequence number; `None` assigns the next free one.
    pub(super) seq: Option<u64>,
    pub(super) digest: String,
    pub(super) body: Bytes,
    pub(super) operation: ModelOperation,
}

impl ModelRequest {
    pub(super) fn submit(
        self,
        state: &Arc<ServerState>,
        store: MutexGuard<'_, Store>,
        run: &RunRecord,
    ) -> Result<RequestId, ServerError> {
        let Self { kind, seq, digest, body, operation } = self;
        let scope = SequenceScope::Model(run.id.clone());
        let seq = seq.unwrap_or_else(|| super::next_seq(state, &store, &scope));
        if seq == CREATION_SEQ {
            return Err(ServerError::invalid(
                "seq_id: 0 is reserved for the creation of the model; start at 1",
            ));
        }
        let submission = Submission {
            kind,
            session: run.session.clone(),
            scope,
            seq: Some(seq),
            digest,
            seed: 0,
            samples: 0,
            body,
            records: Vec::new(),
            next: NextStep::Enqueue(Operation::Model { model: run.id.clone(), seq, operation }),
        };
        submit(state, store, submission)
    }
}

/// Returns the step that enqueues a stored request of a model again.
pub(super) fn enqueue_restored(
    row: &RequestRecord,
    operation: ModelOperation,
) -> Result<NextStep, ServerError> {
    match &row.scope {
        SequenceScope::Model(model) => Ok(NextStep::Enqueue(Operation::Model {
            model: model.clone(),
            seq: row.seq,
            operation,
        })),
        SequenceScope::Sampler(_) | SequenceScope::CustomLosses(_) => {
            Err(ServerError::Internal("the stored request does not refer to a model".to_owned()))
        }
    }
}

pub(super) fn validate_optimizer(config: &OptimizerConfig) -> Result<(), ServerError> {
    let version = config.settings.get("version");
    match &*config.kind {
        "adamw" => Ok(()),
        "dimuon" if version.is_none_or(|version| *version == 1) => Ok(()),
        "dimuon" => Err(ServerError::invalid(
            "optimizer_config.version: unsupported version; this server supports dimuon version 1",
        )),
        other => Err(ServerError::invalid(format!(
            "optimizer_config.type: unknown optimizer {other:?}; expected adamw or dimuon"
        ))),
    }
}

/// Returns a random seed.
pub(crate) fn random_seed(state: &ServerState) -> u64 {
    let (high, low) = state.random.uuid().as_u64_pair();
    // A version 4 UUID has fixed bits in both halves; the rotation aligns them with random ones.
    high ^ low.rotate_left(32)
}
