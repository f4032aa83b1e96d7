//! Admission of requests that an upstream executes.
//!
//! The upstream validates the content of a request when it executes the request. This module
//! rejects requests that the upstream is known not to support, before they are queued.

use std::sync::Arc;

use bytes::Bytes;
use tinkex_backend::upstream::{
    CustomLossTraining, RelayedKind, RelayedSample, RelayedTraining, ResponseSink, UpstreamHandle,
    UpstreamOperation, UpstreamTraining, legacy_seed,
};
use tinkex_engine::decode::StopConditions;
use tinkex_store::error::ServerError;
use tinkex_store::store::{ModelRunRecord, Store, UpstreamRun};
use tinkex_store::user::Account;
use tinkex_store::weights::WeightsLocation;
use tinkex_wire::{
    ForwardBackward, OptimParams, OptimStep, OptimizerConfig, SampleRequest, TensorData, loss_input,
};

use super::Admission;
use super::sampling::{EngineSample, engine_sample};
use crate::models::{BaseModel, ModelSource};
use crate::operation::{Operation, PassObjective, SampleOperation};

/// Weights on an upstream to sample from.
pub(crate) struct UpstreamWeights {
    upstream: Arc<UpstreamHandle>,
    base: Arc<BaseModel>,
    /// Path on the upstream; `None` for the base model.
    path: Option<String>,
}

/// Assigns a new run of a base model to an upstream. Returns `None` if the engine has the model.
///
/// # Errors
/// If no upstream serves the model, or the upstream does not support the optimizer.
pub(super) fn assign(
    admission: &Admission,
    store: &Store,
    base: &BaseModel,
    optimizer: &OptimizerConfig,
) -> Result<Option<UpstreamRun>, ServerError> {
    let ModelSource::Upstream(model) = &base.source else { return Ok(None) };
    let upstream = admission.backends.choose(store, &model.upstreams).ok_or_else(|| {
        ServerError::not_found(format!("no upstream serves base model {:?}", base.name))
    })?;
    if upstream.status().is_legacy() && optimizer.kind != "adamw" {
        return Err(ServerError::invalid(format!(
            "optimizer_config: upstream {} has no optimizer except adamw",
            upstream.name
        )));
    }
    Ok(Some(UpstreamRun { name: upstream.name.to_string(), model: None }))
}

/// Returns the operation for a training pass of a run on an upstream.
///
/// # Errors
/// If the upstream is known not to compute the loss or to accept the input, or a token is outside
/// of the vocabulary.
pub(super) fn pass(
    admission: &Admission,
    upstream: &UpstreamHandle,
    run: &ModelRunRecord,
    request: &ForwardBackward,
    objective: &PassObjective,
    body: &Bytes,
) -> Result<UpstreamOperation, ServerError> {
    let name = &upstream.name;
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
    if let Some(base) = admission.models.get(&run.base_model) {
        check_vocabulary(request, base.vocab_size())?;
    }
    let body = body.clone();
    Ok(UpstreamOperation::Train(match objective {
        PassObjective::Graph(loss) => {
            UpstreamTraining::CustomLoss(CustomLossTraining { body, loss: Arc::clone(loss) })
        }
        PassObjective::Loss(_) => {
            UpstreamTraining::Relay(RelayedTraining { kind: RelayedKind::Pass, body })
        }
    }))
}

/// Checks that the tokens of a pass are in the vocabulary: SkyRL computes NaN for other tokens.
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

/// Returns the operation for an optimizer step of a run on an upstream.
///
/// # Errors
/// If the upstream does not support the optimizer.
pub(super) fn step(
    upstream: &UpstreamHandle,
    request: &OptimStep,
    body: &Bytes,
) -> Result<UpstreamOperation, ServerError> {
    if upstream.status().is_legacy() && !matches!(request.params, OptimParams::Adam(_)) {
        return Err(ServerError::invalid(format!(
            "optim_params: upstream {} has no optimizer except adamw",
            upstream.name
        )));
    }
    let relayed = RelayedTraining { kind: RelayedKind::OptimStep, body: body.clone() };
    Ok(UpstreamOperation::Train(UpstreamTraining::Relay(relayed)))
}

/// Returns the weights of `adapter`, or of the base model if `adapter` is `None`, if these weights
/// are on an upstream. Returns `None` if the engine has the weights.
///
/// # Errors
/// If the base model does not exist, or the upstream is no longer configured.
pub(crate) fn weights(
    admission: &Admission,
    base_model: &str,
    adapter: Option<&WeightsLocation>,
) -> Result<Option<UpstreamWeights>, ServerError> {
    if let Some(adapter) = adapter {
        let Some(remote) = adapter.remote() else { return Ok(None) };
        let upstream = admission.backends.require_upstream(&remote.upstream)?;
        let base = admission.base_model(base_model)?;
        return Ok(Some(UpstreamWeights { upstream, base, path: Some(remote.path.clone()) }));
    }
    let base = admission.base_model(base_model)?;
    let ModelSource::Upstream(model) = &base.source else { return Ok(None) };
    // Any upstream that has the base model can sample from it. Always choose the first upstream
    // that responds: its prefix cache may contain the prompt.
    let handles = || model.upstreams.iter().filter_map(|name| admission.backends.upstream(name));
    let responding = handles().find(|upstream| upstream.status().down.is_none());
    let upstream = responding.or_else(|| handles().next()).cloned();
    let upstream = upstream.ok_or_else(|| {
        ServerError::not_found(format!("no upstream serves base model {base_model:?}"))
    })?;
    Ok(Some(UpstreamWeights { upstream, base, path: None }))
}

/// Validates a sampling request and returns the operation that sends it to an upstream. `sink`
/// receives the tokens of an inference request.
pub(crate) fn sample(
    admission: &Admission,
    weights: UpstreamWeights,
    account: Account,
    mut request: SampleRequest,
    seed: u64,
    sink: Option<Arc<dyn ResponseSink>>,
) -> Result<Operation, ServerError> {
    let UpstreamWeights { upstream, base, path } = weights;
    // Apply the same checks as for the engine, and discard the converted request. The upstream
    // evaluates the stop conditions.
    let EngineSample { .. } =
        engine_sample(admission, &base, &request, (StopConditions::default(), None), seed)?;
    let is_legacy = upstream.status().is_legacy();
    if is_legacy {
        let unsupported = [
            ("topk_prompt_logprobs", request.topk_prompt_logprobs > 0),
            ("topk_sample_logprobs", request.topk_sample_logprobs > 0),
            ("target_prompt_logprobs", request.target_prompt_logprobs.is_some()),
            ("prompt_alt_tokens_k", request.prompt_alt_tokens_k > 0),
        ];
        if let Some((field, _)) = unsupported.iter().find(|(_, used)| *used) {
            return Err(ServerError::invalid(format!(
                "{field}: upstream {} cannot compute this field",
                upstream.name
            )));
        }
        if request.sampling_params.max_tokens.is_none() {
            let prompt = request.prompt.to_tokens().map_or(0, |prompt| prompt.len());
            let rest = base.context().saturating_sub(prompt).max(1);
            request.sampling_params.max_tokens = Some(u32::try_from(rest).unwrap_or(u32::MAX));
        }
    }
    request.sampling_params.seed = Some(if is_legacy { legacy_seed(seed) } else { seed });
    let base_model = base.name.clone();
    let sample = Box::new(RelayedSample { base_model, path, account, request, sink });
    Ok(Operation::Sample(SampleOperation::Upstream(upstream, sample)))
}
