//! Models, passes over data, and steps.

use std::sync::Arc;

use bytes::Bytes;
use tinkex_engine::optim::StepParams;
use tinkex_wire::codec::json;
use tinkex_wire::{
    ApiRequest as _, CreateModel, ForwardBackward, ModelId, OptimStep, OptimizerConfig, RequestId,
    Seq,
};

use super::{Intake, Next, digest, or_refuse, run, session, submit};
use crate::error::ApiError;
use crate::models::BaseModel;
use crate::state::Shared;
use crate::store::{Fact, Kind, Line, Lora, Request, Run, Store, now};
use crate::work::{Objective, Op, Pass, Work, step_params};

/// A new model.
pub(crate) fn create_model(shared: &Arc<Shared>, body: Bytes) -> Result<RequestId, ApiError> {
    let call: CreateModel = json::decode(&body)?;
    call.validate()?;
    let base = base_model(shared, &call.base_model)?;
    let Some(lora) = call.lora_config else {
        return Err(ApiError::bad("lora_config: this server trains adapters only; give a rank"));
    };
    let most = base.config.hidden_size.min(256);
    let rank = lora.rank;
    if !rank.is_power_of_two() || usize::try_from(rank).map_or(true, |rank| rank > most) {
        return Err(ApiError::bad(format!(
            "lora_config.rank: {rank} is not a power of two of at most {most}, the max LoRA rank of {}",
            base.name
        )));
    }
    check_optimizer(&call.optimizer_config)?;
    let mut store = shared.store();
    session(&mut store, &call.session_id)?;
    let model = ModelId::in_session(&call.session_id, call.model_seq_id);
    let seed = lora.seed.unwrap_or_else(random);
    let row = Run {
        id: model.clone(),
        session: call.session_id.clone(),
        number: call.model_seq_id,
        base_model: call.base_model,
        lora: Lora {
            rank,
            seed,
            train_unembed: lora.train_unembed,
            train_mlp: lora.train_mlp,
            train_attn: lora.train_attn,
        },
        optimizer: call.optimizer_config,
        user_metadata: call.user_metadata,
        created_at: now(),
        closed: None,
        snapshot: None,
        last_seq: None,
        project_id: None,
    };
    let intake = Intake {
        kind: Kind::CreateModel,
        session: call.session_id,
        line: Line::Model(model.clone()),
        seq: Some(0),
        digest: digest::of_bytes(&body),
        seed,
        samples: 0,
        body,
        facts: vec![Fact::Run(row)],
        next: Next::Work(Work::Train { model, seq: 0, op: Op::Create }),
    };
    submit(shared, store, intake)
}

pub(super) fn again_create(row: &Request) -> Result<Next, ApiError> {
    train(row, Op::Create)
}

/// A pass over data.
pub(crate) fn forward_backward(shared: &Arc<Shared>, body: Bytes) -> Result<RequestId, ApiError> {
    let call = ForwardBackward::from_proto(&body)?;
    let digest = digest::of_pass(&call);
    let (model, seq) = (call.model_id.clone(), call.seq_id.map(Seq::get));
    let take = || {
        let run = run(&mut shared.store(), &call.model_id)?;
        let objective = Objective::of(&shared.store(), &run, &call)?;
        // Not under the lock: there may be much to look at.
        let op = Op::Pass(Box::new(Pass::new(&shared.models, &run, objective, &call)?));
        numbered(shared, shared.store(), Kind::ForwardBackward, &run, seq, digest, body, op)
    };
    or_refuse(shared, &model, seq, take())
}

pub(super) fn again_pass(shared: &Shared, row: &Request, body: &Bytes) -> Result<Next, ApiError> {
    let call = ForwardBackward::from_proto(body)?;
    let store = shared.store();
    let run = store.runs.get(&call.model_id);
    let run = &run.ok_or_else(|| ApiError::not_found("its model is gone"))?.row;
    let objective = Objective::of(&store, run, &call)?;
    train(row, Op::Pass(Box::new(Pass::new(&shared.models, run, objective, &call)?)))
}

/// A step.
pub(crate) fn optim_step(shared: &Arc<Shared>, body: Bytes) -> Result<RequestId, ApiError> {
    let call: OptimStep = json::decode(&body)?;
    let (model, seq) = (call.model_id.clone(), call.seq_id.map(Seq::get));
    or_refuse(shared, &model, seq, take_step(shared, &call, body))
}

fn take_step(shared: &Arc<Shared>, call: &OptimStep, body: Bytes) -> Result<RequestId, ApiError> {
    call.validate()?;
    let mut store = shared.store();
    let run = run(&mut store, &call.model_id)?;
    let params = step_params(&call.params)?;
    let family = match params {
        StepParams::Dimuon(_) => "dimuon",
        _ => "adamw",
    };
    if family != run.optimizer.kind {
        return Err(ApiError::bad(format!(
            "optim_params: {family} parameters for a model that was created with {}",
            run.optimizer.kind
        )));
    }
    let digest = digest::of_bytes(&body);
    let seq = call.seq_id.map(Seq::get);
    numbered(shared, store, Kind::OptimStep, &run, seq, digest, body, Op::Step(params))
}

pub(super) fn again_step(row: &Request, body: &Bytes) -> Result<Next, ApiError> {
    let call: OptimStep = json::decode(body)?;
    train(row, Op::Step(step_params(&call.params)?))
}

/// Lines up a request of a model that exists.
#[expect(clippy::too_many_arguments, reason = "one caller's worth of a request")]
pub(super) fn numbered(
    shared: &Arc<Shared>,
    store: std::sync::MutexGuard<'_, Store>,
    kind: Kind,
    run: &Run,
    seq: Option<u64>,
    digest: String,
    body: Bytes,
    op: Op,
) -> Result<RequestId, ApiError> {
    let line = Line::Model(run.id.clone());
    let seq = seq.unwrap_or_else(|| super::next_number(shared, &store, &line));
    if seq == 0 {
        return Err(ApiError::bad("seq_id: 0 is the model's creation; requests count from 1"));
    }
    let next = Next::Work(Work::Train { model: run.id.clone(), seq, op });
    let session = run.session.clone();
    let seq = Some(seq);
    let facts = Vec::new();
    let intake =
        Intake { kind, session, line, seq, digest, seed: 0, samples: 0, body, facts, next };
    submit(shared, store, intake)
}

/// The work of a request that was in line when the server stopped.
pub(super) fn train(row: &Request, op: Op) -> Result<Next, ApiError> {
    match &row.line {
        Line::Model(model) => {
            Ok(Next::Work(Work::Train { model: model.clone(), seq: row.seq, op }))
        }
        Line::Sampler(_) | Line::Losses(_) => Err(ApiError::bad("it is not about a model")),
    }
}

pub(super) fn base_model<'a>(
    shared: &'a Shared,
    name: &str,
) -> Result<&'a Arc<BaseModel>, ApiError> {
    shared.models.get(name).ok_or_else(|| ApiError::not_found(shared.models.missing(name)))
}

pub(super) fn check_optimizer(config: &OptimizerConfig) -> Result<(), ApiError> {
    let version = config.settings.get("version");
    match &*config.kind {
        "adamw" => Ok(()),
        "dimuon" if version.is_none_or(|version| *version == 1) => Ok(()),
        "dimuon" => {
            Err(ApiError::bad("optimizer_config.version: only version 1 of dimuon is here"))
        }
        other => Err(ApiError::bad(format!(
            "optimizer_config.type: {other:?} is not one of adamw and dimuon"
        ))),
    }
}

/// A number from the system's randomness.
pub(super) fn random() -> u64 {
    let (high, low) = uuid::Uuid::new_v4().as_u64_pair();
    // Some bits of each half are not random; of their mixture all are.
    high ^ low.rotate_left(32)
}
