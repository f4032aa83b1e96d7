//! Admission of model creation, training passes and optimizer steps.

use std::sync::Arc;

use bytes::Bytes;
use parking_lot::MutexGuard;
use tinkex_backend::operation::CommonOperation;
use tinkex_store::error::ServerError;
use tinkex_store::store::{
    AdmittedRequest, LoraSettings, MetadataRecord, ModelRunRecord, Record, RequestKind,
    RequestRecord, SequenceScope, SharedWith, Store,
};
use tinkex_store::user::Principal;
use tinkex_wire::codec::json;
use tinkex_wire::{
    ApiRequest as _, CreateModel, DiscardGradient, ForwardBackward, ModelId, OptimParams,
    OptimStep, OptimizerConfig, Seq,
};

use super::{
    Admission, CREATION_SEQ, NextStep, Submission, digest, reject_seq_on_error, relay, require_run,
    submit,
};
use crate::backends::RunBackend;
use crate::operation::{
    EngineOperation, EngineTraining, Operation, PassObjective, RunOperation, TrainingPass,
    step_params,
};

/// Maximum LoRA rank. The hidden size of the base model is a further limit.
const MAX_RANK: usize = 256;

/// Maximum size of the configuration of an optimizer in bytes. The records of a run and of its
/// checkpoints contain it, and stay in memory.
const MAX_OPTIMIZER_BYTES: usize = 4_096;

/// Admits the creation of a model.
pub(crate) fn create_model(
    admission: &Arc<Admission>,
    principal: &Principal,
    body: Bytes,
) -> Result<AdmittedRequest, ServerError> {
    let request: CreateModel = json::decode(&body)?;
    request.validate()?;
    let base = admission.base_model(&request.base_model)?;
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
    let store = admission.store_of(principal);
    store.open_session(&request.session_id)?;
    let store = store.into_inner();
    let upstream = relay::assign(admission, &store, &base, &request.optimizer_config)?;
    let model = ModelId::in_session(&request.session_id, request.model_seq_id);
    let seed = lora.seed.unwrap_or_else(|| random_seed(admission));
    let metadata = MetadataRecord::new(&model, request.user_metadata.as_ref());
    let row = ModelRunRecord {
        id: model.clone(),
        owner: store.account(&request.session_id).owner,
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
        metadata_bytes: metadata.bytes(),
        name: MetadataRecord::run_name(request.user_metadata.as_ref()),
        created_at: store.clock.now(),
        closed: None,
        snapshot: None,
        last_seq: None,
        project_id: None,
        upstream,
        dropped_pass: None,
        shared_with: SharedWith::default(),
    };
    let backend = admission.backends.of_run(&row)?;
    let operation = RunOperation::common(backend, CommonOperation::Create);
    let submission = Submission {
        kind: RequestKind::CreateModel,
        session: request.session_id,
        scope: SequenceScope::Model(model.clone()),
        seq: Some(CREATION_SEQ),
        digest: digest::of_bytes(&body),
        seed,
        samples: 0,
        tokens: 0,
        body,
        records: vec![Record::Run(row), Record::Metadata(metadata)],
        next: NextStep::Enqueue(Operation::Model { model, seq: CREATION_SEQ, operation }),
    };
    submit(admission, store, submission)
}

/// Admits a forward or forward-backward pass.
pub(crate) fn forward_backward(
    admission: &Arc<Admission>,
    principal: &Principal,
    body: Bytes,
) -> Result<AdmittedRequest, ServerError> {
    let request = ForwardBackward::from_proto(&body)?;
    let digest = digest::of_pass(&request);
    let model = request.model_id.clone();
    let seq = request.seq_id.map(Seq::get);
    let admit = || {
        let run = require_run(&admission.store_of(principal), &request.model_id)?;
        // Not checked again when a stored pass is restored: it must be executed as it was admitted.
        admission.ignored_inputs.check(&run.session, &request)?;
        let operation = pass_operation(admission, &run, &request, &body)?;
        let kind = RequestKind::ForwardBackward;
        let counts = request.data.iter().map(|datum| datum.model_input().token_count());
        let tokens: usize = counts.map(Option::unwrap_or_default).sum();
        let tokens = u64::try_from(tokens).unwrap_or(u64::MAX);
        ModelRequest { kind, seq, digest, tokens, body, operation }.submit(
            admission,
            admission.store(),
            &run,
        )
    };
    reject_seq_on_error(admission, principal, &model, seq, admit())
}

/// Validates a pass and converts it to an operation of the run's backend. Does not hold the store's
/// lock during validation, because the pass may have millions of tokens.
fn pass_operation(
    admission: &Admission,
    run: &ModelRunRecord,
    request: &ForwardBackward,
    body: &Bytes,
) -> Result<RunOperation, ServerError> {
    let objective = PassObjective::resolve(&admission.store(), run, request)?;
    match admission.backends.of_run(run)? {
        RunBackend::Engine => {
            let pass = TrainingPass::new(&admission.models, run, objective, request)?;
            let training = EngineTraining::Pass(Box::new(pass));
            Ok(RunOperation::Engine(EngineOperation::Train(training)))
        }
        RunBackend::Upstream(upstream) => {
            let pass = relay::pass(admission, &upstream, run, request, &objective, body)?;
            Ok(RunOperation::Upstream(upstream, pass))
        }
    }
}

/// Validates a stored training pass. Returns the step that enqueues the pass again.
pub(super) fn restore_pass(
    admission: &Admission,
    row: &RequestRecord,
    body: &Bytes,
) -> Result<NextStep, ServerError> {
    let request = ForwardBackward::from_proto(body)?;
    let run = restored_run(admission, &request.model_id)?;
    let operation = pass_operation(admission, &run, &request, body)?;
    enqueue_restored(row, |_| Ok(operation))
}

/// Returns the run of a stored request.
fn restored_run(admission: &Admission, model: &ModelId) -> Result<ModelRunRecord, ServerError> {
    let run = admission.store().runs.get(model).map(|entry| entry.row.clone());
    run.ok_or_else(|| ServerError::not_found(format!("model {model} no longer exists")))
}

/// Admits an optimizer step.
pub(crate) fn optim_step(
    admission: &Arc<Admission>,
    principal: &Principal,
    body: Bytes,
) -> Result<AdmittedRequest, ServerError> {
    let request: OptimStep = json::decode(&body)?;
    let model = request.model_id.clone();
    let seq = request.seq_id.map(Seq::get);
    let admitted = submit_step(admission, principal, &request, body);
    reject_seq_on_error(admission, principal, &model, seq, admitted)
}

fn submit_step(
    admission: &Arc<Admission>,
    principal: &Principal,
    request: &OptimStep,
    body: Bytes,
) -> Result<AdmittedRequest, ServerError> {
    request.validate()?;
    let store = admission.store_of(principal);
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
        tokens: 0,
        operation: step_operation(admission, &run, request, &body)?,
        body,
    };
    model_request.submit(admission, store.into_inner(), &run)
}

/// Converts an optimizer step to an operation of the run's backend.
fn step_operation(
    admission: &Admission,
    run: &ModelRunRecord,
    request: &OptimStep,
    body: &Bytes,
) -> Result<RunOperation, ServerError> {
    match admission.backends.of_run(run)? {
        RunBackend::Engine => {
            let training = EngineTraining::OptimStep(step_params(&request.params)?);
            Ok(RunOperation::Engine(EngineOperation::Train(training)))
        }
        RunBackend::Upstream(upstream) => {
            let step = relay::step(&upstream, request, body)?;
            Ok(RunOperation::Upstream(upstream, step))
        }
    }
}

/// Decodes a stored optimizer step. Returns the [`NextStep`] that enqueues the optimizer step
/// again.
pub(super) fn restore_step(
    admission: &Admission,
    row: &RequestRecord,
    body: &Bytes,
) -> Result<NextStep, ServerError> {
    let request: OptimStep = json::decode(body)?;
    let run = restored_run(admission, &request.model_id)?;
    let operation = step_operation(admission, &run, &request, body)?;
    enqueue_restored(row, |_| Ok(operation))
}

/// Admits a request to discard the gradient of a model.
pub(crate) fn discard_gradient(
    admission: &Arc<Admission>,
    principal: &Principal,
    body: Bytes,
) -> Result<AdmittedRequest, ServerError> {
    let request: DiscardGradient = json::decode(&body)?;
    let model = request.model_id.clone();
    let seq = request.seq_id.map(Seq::get);
    let admit = || {
        let store = admission.store_of(principal);
        let run = require_run(&store, &request.model_id)?;
        let store = store.into_inner();
        let operation = discard_operation(admission, &run)?;
        let kind = RequestKind::DiscardGradient;
        let digest = digest::of_bytes(&body);
        let tokens = 0;
        ModelRequest { kind, seq, digest, tokens, body, operation }.submit(admission, store, &run)
    };
    let admitted = admit();
    reject_seq_on_error(admission, principal, &model, seq, admitted)
}

/// Returns the operation that discards the gradient of a run.
///
/// # Errors
/// If the model is on an upstream: the protocol has no request for it.
fn discard_operation(
    admission: &Admission,
    run: &ModelRunRecord,
) -> Result<RunOperation, ServerError> {
    match admission.backends.of_run(run)? {
        RunBackend::Engine => {
            let training = EngineTraining::DiscardGradient;
            Ok(RunOperation::Engine(EngineOperation::Train(training)))
        }
        RunBackend::Upstream(upstream) => Err(ServerError::invalid(format!(
            "upstream {} cannot discard the gradient of a model; create a new model from the last \
             checkpoint instead",
            upstream.name
        ))),
    }
}

/// Returns the [`NextStep`] that enqueues a stored request to discard a gradient again.
pub(super) fn restore_discard(
    admission: &Admission,
    row: &RequestRecord,
) -> Result<NextStep, ServerError> {
    enqueue_restored(row, |model| discard_operation(admission, &restored_run(admission, model)?))
}

/// A validated request of an existing model.
pub(super) struct ModelRequest {
    pub(super) kind: RequestKind,
    /// Sequence number; `None` assigns the next free number.
    pub(super) seq: Option<u64>,
    pub(super) digest: String,
    /// Number of tokens of a training pass; 0 for other kinds of requests.
    pub(super) tokens: u64,
    pub(super) body: Bytes,
    pub(super) operation: RunOperation,
}

impl ModelRequest {
    pub(super) fn submit(
        self,
        admission: &Arc<Admission>,
        store: MutexGuard<'_, Store>,
        run: &ModelRunRecord,
    ) -> Result<AdmittedRequest, ServerError> {
        let Self { kind, seq, digest, tokens, body, operation } = self;
        let scope = SequenceScope::Model(run.id.clone());
        let seq = seq.unwrap_or_else(|| super::next_seq(admission, &store, &scope));
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
            tokens,
            body,
            records: Vec::new(),
            next: NextStep::Enqueue(Operation::Model { model: run.id.clone(), seq, operation }),
        };
        submit(admission, store, submission)
    }
}

/// Returns the step that enqueues a stored request of a model again.
pub(super) fn enqueue_restored(
    row: &RequestRecord,
    operation: impl FnOnce(&ModelId) -> Result<RunOperation, ServerError>,
) -> Result<NextStep, ServerError> {
    match &row.scope {
        SequenceScope::Model(model) => Ok(NextStep::Enqueue(Operation::Model {
            model: model.clone(),
            seq: row.seq,
            operation: operation(model)?,
        })),
        SequenceScope::Sampler(_) | SequenceScope::CustomLosses(_) => {
            Err(ServerError::Internal("the stored request does not refer to a model".to_owned()))
        }
    }
}

/// Checks that the server has the optimizer.
pub(super) fn validate_optimizer(config: &OptimizerConfig) -> Result<(), ServerError> {
    let size = serde_json::to_string(config).map_or(usize::MAX, |json| json.len());
    if size > MAX_OPTIMIZER_BYTES {
        return Err(ServerError::invalid(format!(
            "optimizer_config: {size} bytes, the limit is {MAX_OPTIMIZER_BYTES}"
        )));
    }
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

/// Returns a random 64-bit seed from the server's random source.
pub(crate) fn random_seed(admission: &Admission) -> u64 {
    let (high, low) = admission.context.random.uuid().as_u64_pair();
    // A version 4 UUID has fixed bits in both halves. The rotation combines the fixed bits of each
    // half with random bits of the other half.
    high ^ low.rotate_left(32)
}
