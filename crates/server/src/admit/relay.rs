//! Admission of requests that an upstream executes.
//!
//! The upstream validates the content of a request when it executes it. Requests that it is known
//! not to support are rejected here, before they are queued.

use std::sync::Arc;

use bytes::Bytes;
use tinkex_engine::decode::StopConditions;
use tinkex_wire::{
    ForwardBackward, OptimParams, OptimStep, OptimizerConfig, SampleRequest, SessionId, TensorData,
    loss_input,
};

use super::sampling::{EngineSample, engine_sample};
use crate::backend::{Backend, RemoteWeights, UpstreamEntry, older_seed};
use crate::error::ServerError;
use crate::inference::TokenSink;
use crate::models::{BaseModel, ModelSource};
use crate::operation::{ModelOperation, Operation, PassObjective, RelayedSample};
use crate::state::ServerState;
use crate::store::{RequestKind, RunRecord, Store, UpstreamRun};

/// Weights on an upstream to sample from.
pub(crate) struct UpstreamWeights {
    pub(crate) upstream: Arc<str>,
    base: Arc<BaseModel>,
    /// Path on the upstream; `None` for the base model.
    path: Option<String>,
}

/// Assigns a new run of a base model to an upstream; `None` if the engine has the model.
///
/// # Errors
/// If no upstream serves the model, or the upstream does not have the optimizer.
pub(super) fn assign(
    state: &ServerState,
    store: &Store,
    base: &BaseModel,
    optimizer: &OptimizerConfig,
) -> Result<Option<UpstreamRun>, ServerError> {
    let ModelSource::Upstream(model) = &base.source else { return Ok(None) };
    let name = state.backends.choose(store, &model.upstreams).ok_or_else(|| {
        ServerError::not_found(format!("no upstream serves base model {:?}", base.name))
    })?;
    if require(state, &name)?.status().losses.is_some() && optimizer.kind != "adamw" {
        return Err(ServerError::invalid(format!(
            "optimizer_config: upstream {name} has no optimizer except adamw"
        )));
    }
    Ok(Some(UpstreamRun { name: name.to_string(), model: None }))
}

/// Returns an upstream that is configured.
pub(super) fn require<'a>(
    state: &'a ServerState,
    name: &str,
) -> Result<&'a UpstreamEntry, ServerError> {
    state.backends.upstream(name).ok_or_else(|| {
        ServerError::invalid(format!(
            "upstream {name:?} is not configured; start the server with --upstream {name}=URL"
        ))
    })
}

/// Returns the upstream of a run; `None` if its model is on the engine.
///
/// # Errors
/// If the upstream is not configured any more.
fn upstream_of<'a>(
    state: &'a ServerState,
    run: &RunRecord,
) -> Result<Option<(&'a UpstreamEntry, Arc<str>)>, ServerError> {
    match run.backend() {
        Backend::Engine => Ok(None),
        Backend::Upstream(name) => Ok(Some((require(state, &name)?, name))),
    }
}

/// Returns the operation for a training pass of a run on an upstream; `None` if the run is on the
/// engine.
///
/// # Errors
/// If the upstream cannot compute the pass.
pub(super) fn pass(
    state: &ServerState,
    run: &RunRecord,
    request: &ForwardBackward,
    objective: &PassObjective,
    body: &Bytes,
) -> Result<Option<ModelOperation>, ServerError> {
    let Some((upstream, name)) = upstream_of(state, run)? else { return Ok(None) };
    let losses = upstream.status().losses;
    if let Some(losses) = losses
        && matches!(objective, PassObjective::Loss(_))
        && !losses.contains(&request.loss_fn.as_str())
    {
        return Err(ServerError::invalid(format!(
            "loss_fn: upstream {name} does not compute {}; it computes {}",
            request.loss_fn.as_str(),
            losses.join(", ")
        )));
    }
    if losses.is_some()
        && request.data.iter().any(|datum| datum.model_input().to_tokens().is_none())
    {
        return Err(ServerError::invalid(format!(
            "model_input: upstream {name} accepts text tokens only, no images"
        )));
    }
    if let Some(base) = state.models.get(&run.base_model) {
        check_vocabulary(request, base.vocab_size())?;
    }
    let body = body.clone();
    Ok(Some(match objective {
        PassObjective::Graph(loss) => {
            ModelOperation::RelayCustomLoss { body, loss: Arc::clone(loss) }
        }
        PassObjective::Loss(_) => {
            ModelOperation::Relay { kind: RequestKind::ForwardBackward, body }
        }
    }))
}

/// Checks the tokens of a pass against the vocabulary: SkyRL computes NaN for others.
fn check_vocabulary(request: &ForwardBackward, vocab: usize) -> Result<(), ServerError> {
    for (at, datum) in request.data.iter().enumerate() {
        let inputs = datum.model_input().to_tokens();
        let inputs = inputs.iter().flat_map(|tokens| tokens.iter()).map(|token| i64::from(*token));
        let targets = datum.loss_input(loss_input::TARGET_TOKENS).and_then(TensorData::as_i64);
        let mut all = inputs.chain(targets.unwrap_or_default().iter().copied());
        let is_known = |token: i64| usize::try_from(token).is_ok_and(|token| token < vocab);
        if let Some(token) = all.find(|token| !is_known(*token)) {
            return Err(ServerError::invalid(format!(
                "data[{at}]: token {token} is outside of the vocabulary of {vocab} tokens"
            )));
        }
    }
    Ok(())
}

/// Returns the operation for an optimizer step of a run on an upstream; `None` if the run is on the
/// engine.
///
/// # Errors
/// If the upstream does not have the optimizer.
pub(super) fn step(
    state: &ServerState,
    run: &RunRecord,
    request: &OptimStep,
    body: &Bytes,
) -> Result<Option<ModelOperation>, ServerError> {
    let Some((upstream, name)) = upstream_of(state, run)? else { return Ok(None) };
    if upstream.status().losses.is_some() && !matches!(request.params, OptimParams::Adam(_)) {
        return Err(ServerError::invalid(format!(
            "optim_params: upstream {name} has no optimizer except adamw"
        )));
    }
    Ok(Some(ModelOperation::Relay { kind: RequestKind::OptimStep, body: body.clone() }))
}

/// Returns the weights of a base model or of an adapter in `folder` if they are on an upstream.
///
/// # Errors
/// If the base model does not exist, or the upstream is not configured any more.
pub(crate) fn weights(
    state: &ServerState,
    base_model: &str,
    folder: Option<&str>,
) -> Result<Option<UpstreamWeights>, ServerError> {
    if let Some(folder) = folder {
        let Ok(RemoteWeights { upstream, path }) = folder.parse() else { return Ok(None) };
        require(state, &upstream)?;
        let base = state.base_model(base_model)?;
        return Ok(Some(UpstreamWeights { upstream: upstream.into(), base, path: Some(path) }));
    }
    let base = state.base_model(base_model)?;
    let ModelSource::Upstream(model) = &base.source else { return Ok(None) };
    // Any upstream that has the base model can sample from it. Always the first that responds: its
    // prefix cache may contain the prompt.
    let responds = |name: &&Arc<str>| {
        state.backends.upstream(name).is_some_and(|entry| entry.status().down.is_none())
    };
    let upstream = model.upstreams.iter().find(responds).or(model.upstreams.first()).cloned();
    let upstream = upstream.ok_or_else(|| {
        ServerError::not_found(format!("no upstream serves base model {base_model:?}"))
    })?;
    Ok(Some(UpstreamWeights { upstream, base, path: None }))
}

/// Validates a sampling request and returns the operation that sends it to an upstream. `sink`
/// receives the tokens of an inference request.
pub(crate) fn sample(
    state: &ServerState,
    weights: UpstreamWeights,
    session: SessionId,
    mut request: SampleRequest,
    seed: u64,
    sink: Option<TokenSink>,
) -> Result<Operation, ServerError> {
    let UpstreamWeights { upstream, base, path } = weights;
    // The same checks as for the engine. The upstream evaluates the stop conditions.
    let EngineSample { .. } =
        engine_sample(state, &base, &request, (StopConditions::default(), None), seed)?;
    let entry = require(state, &upstream)?;
    let is_older = entry.status().losses.is_some();
    if is_older {
        let unsupported = [
            ("topk_prompt_logprobs", request.topk_prompt_logprobs > 0),
            ("topk_sample_logprobs", request.topk_sample_logprobs > 0),
            ("target_prompt_logprobs", request.target_prompt_logprobs.is_some()),
            ("prompt_alt_tokens_k", request.prompt_alt_tokens_k > 0),
        ];
        if let Some((field, _)) = unsupported.iter().find(|(_, used)| *used) {
            return Err(ServerError::invalid(format!(
                "{field}: upstream {upstream} cannot compute it"
            )));
        }
        if request.sampling_params.max_tokens.is_none() {
            let prompt = request.prompt.to_tokens().map_or(0, |prompt| prompt.len());
            let rest = base.context().saturating_sub(prompt).max(1);
            request.sampling_params.max_tokens = Some(u32::try_from(rest).unwrap_or(u32::MAX));
        }
    }
    request.sampling_params.seed = Some(if is_older { older_seed(seed) } else { seed });
    let base_model = base.name.clone();
    let sample = RelayedSample { upstream, base_model, path, session, request, sink };
    Ok(Operation::Relay(Box::new(sample)))
}
