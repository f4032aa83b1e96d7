//! Sampling: all requests of a base model run in one batch.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use tinkex_engine::decode::NO_LOGPROB;
use tinkex_engine::sample::{
    ModelWeights, SampleOutput, SampleRequestId, StopReason as EngineStopReason, TopK,
};
use tinkex_wire::{
    PromptAltTokens, RequestId, SampleResponse, SampledSequence, SamplerId, StopReason, TensorData,
    TensorValues, TopkLogprobs,
};

use super::Worker;
use super::train::folder_size;
use crate::log;
use crate::operation::{Operation, QueuedRequest, QueuedSample};
use crate::outcome::{Outcome, record_outcome};
use crate::store::{
    FailureCategory, ResultKind, SamplerRecord, UsageKey, UsageMeter, current_hour,
};

/// Maximum number of adapters that are cached for sampling.
const MAX_CACHED_WEIGHTS: usize = 64;

/// Base model and the engine's id of a sample.
type SampleKey = (String, SampleRequestId);

/// Samples being drawn, and the weights loaded for them.
#[derive(Default)]
pub(super) struct RunningSamples {
    by_key: HashMap<SampleKey, ActiveSample>,
    /// Keys of the samples in `by_key`, by request.
    keys: HashMap<RequestId, SampleKey>,
    weights: HashMap<SamplerId, CachedWeights>,
    /// Number of uses of weights so far; orders them by their last use.
    uses: u64,
}

/// A request whose samples are being drawn.
struct ActiveSample {
    id: RequestId,
    sampler: SamplerRecord,
    prompt_tokens: usize,
    targets: Option<TensorData>,
    start: Instant,
    /// Memory that the request counts for in the queue, in bytes.
    bytes: usize,
}

/// Weights of a sampling session in memory.
struct CachedWeights {
    base_model: String,
    weights: ModelWeights,
    /// Approximate memory in bytes.
    bytes: usize,
    /// Value of [`RunningSamples::uses`] at the last use.
    last_used: u64,
}

impl RunningSamples {
    /// Caches weights and evicts the least recently used ones beyond `limit` bytes.
    fn insert_weights(&mut self, id: &SamplerId, mut cached: CachedWeights, limit: usize) {
        self.uses += 1;
        cached.last_used = self.uses;
        self.weights.insert(id.clone(), cached);
        let bytes = |all: &HashMap<_, CachedWeights>| {
            all.values().map(|cached| cached.bytes).sum::<usize>()
        };
        while self.weights.len() > MAX_CACHED_WEIGHTS || bytes(&self.weights) > limit {
            let others = self.weights.iter().filter(|(other, _)| *other != id);
            let oldest = others.min_by_key(|(_, cached)| cached.last_used);
            let Some(oldest) = oldest.map(|(id, _)| id.clone()) else { break };
            self.weights.remove(&oldest);
        }
    }

    /// Drops the weights of sampling sessions for which `keep` returns false.
    fn retain_weights(&mut self, keep: impl Fn(&SamplerId) -> bool) {
        self.weights.retain(|id, _| keep(id));
    }

    /// Drops the weights of a base model.
    pub(super) fn drop_weights_of(&mut self, base_model: &str) {
        self.weights.retain(|_, cached| cached.base_model != base_model);
    }

    fn weights(&mut self, id: &SamplerId) -> Option<ModelWeights> {
        self.uses += 1;
        let cached = self.weights.get_mut(id)?;
        cached.last_used = self.uses;
        Some(cached.weights.clone())
    }
}

impl Worker {
    /// Adds a sampling request to the batch of its base model.
    pub(super) fn begin_sample(&mut self, request: QueuedRequest) {
        let QueuedRequest { id, bytes, operation } = request;
        let Operation::Sample(sample) = operation else { return };
        let sampler = sample.sampler.clone();
        if let Err(failed) = self.try_begin(&id, bytes, *sample) {
            if let ResultKind::Failed { error, .. } = &failed.result {
                tracing::info!(
                    target: log::REQUEST,
                    operation = "sample",
                    request_id = %id,
                    sampling_session_id = %sampler,
                    error,
                    "request failed"
                );
            }
            self.state.queue.sample_finished(bytes);
            record_outcome(&self.state, &mut self.state.store(), &id, failed);
        }
    }

    fn try_begin(
        &mut self,
        id: &RequestId,
        bytes: usize,
        sample: QueuedSample,
    ) -> Result<(), Outcome> {
        let row = self.state.store().samplers.get(&sample.sampler).map(|entry| entry.row.clone());
        let Some(row) = row else {
            let message = format!("sampling session {} no longer exists", sample.sampler);
            return Err(Outcome::failed(FailureCategory::User, message));
        };
        let Some(base) = self.state.models.get(&row.base_model).cloned() else {
            let message = self.state.models.unavailable_message(&row.base_model);
            return Err(Outcome::failed(FailureCategory::User, message));
        };
        let weights = match self.samples.weights(&row.id) {
            Some(weights) => weights,
            None => self.load_weights(&row)?,
        };
        let prompt_tokens = sample.request.prompt.len();
        let engine_id = self.engines.get(&base)?.sampler.add(&weights, sample.request)?;
        self.state.metrics.loaded_models.set(self.engines.count());
        let key = (row.base_model.clone(), engine_id);
        let active = ActiveSample {
            id: id.clone(),
            sampler: row,
            prompt_tokens,
            targets: sample.targets,
            start: Instant::now(),
            bytes,
        };
        self.samples.keys.insert(id.clone(), key.clone());
        self.samples.by_key.insert(key, active);
        Ok(())
    }

    fn load_weights(&mut self, row: &SamplerRecord) -> Result<ModelWeights, Outcome> {
        let engine = self.engine(&row.base_model)?;
        let (weights, bytes) = match &row.folder {
            Some(folder) => {
                let folder = self.state.weights_dir.join(folder);
                (engine.load_weights(&folder)?, folder_size(&folder)?)
            }
            None => (engine.base_weights(), 0),
        };
        self.cache_weights(&row.id, &row.base_model, weights.clone(), bytes);
        Ok(weights)
    }

    /// Caches weights of `bytes` bytes for a sampling session.
    pub(super) fn cache_weights(
        &mut self,
        id: &SamplerId,
        base_model: &str,
        weights: ModelWeights,
        bytes: u64,
    ) {
        self.drop_ended_weights();
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let cached =
            CachedWeights { base_model: base_model.to_owned(), weights, bytes, last_used: 0 };
        self.samples.insert_weights(id, cached, self.state.options.limits.sampler_weight_bytes);
    }

    /// Drops the weights of sampling sessions that no longer exist.
    pub(super) fn drop_ended_weights(&mut self) {
        let store = self.state.store();
        self.samples.retain_weights(|id| store.samplers.contains_key(id));
    }

    /// Removes a sample from the running samples and from the queue's count.
    fn end_sample(&mut self, key: &SampleKey) -> Option<ActiveSample> {
        let sample = self.samples.by_key.remove(key)?;
        self.samples.keys.remove(&sample.id);
        self.state.queue.sample_finished(sample.bytes);
        Some(sample)
    }

    /// Cancels a sample. Requests of models are not cancelled, because later requests depend on
    /// their effect.
    pub(super) fn cancel_sample(&mut self, id: &RequestId) {
        let Some(key) = self.samples.keys.get(id).cloned() else { return };
        self.end_sample(&key);
        if let Some(model) = self.engines.get_loaded(&key.0) {
            model.sampler.cancel(key.1);
        }
        record_outcome(&self.state, &mut self.state.store(), id, Outcome::cancelled());
    }

    /// Computes one step of every base model that is sampling, and records finished requests.
    pub(super) fn step_samples(&mut self) {
        let mut finished = Vec::new();
        let mut panicked = Vec::new();
        for (name, model) in self.engines.sampling() {
            model.last_used = Instant::now();
            match catch_unwind(AssertUnwindSafe(|| model.sampler.step())) {
                Ok(outputs) => {
                    let outputs = outputs.into_iter();
                    finished.extend(outputs.map(|(id, output)| ((name.clone(), id), output)));
                }
                Err(_) => panicked.push(name.clone()),
            }
        }
        for name in panicked {
            self.fail_samples_of(&name);
        }
        let mut outcomes = Vec::with_capacity(finished.len());
        for (key, output) in finished {
            let Some(sample) = self.end_sample(&key) else { continue };
            let outcome = match output {
                Ok(output) => self.finish_sample(&sample, output),
                Err(error) => {
                    log_failure(&sample, &error);
                    error.into()
                }
            };
            outcomes.push((sample.id, outcome));
        }
        if outcomes.is_empty() {
            return;
        }
        let mut store = self.state.store();
        for (id, outcome) in outcomes {
            record_outcome(&self.state, &mut store, &id, outcome);
        }
    }

    /// Fails all samples of a base model whose sampler panicked, and unloads the model.
    fn fail_samples_of(&mut self, name: &str) {
        self.engines.unload(name);
        self.samples.drop_weights_of(name);
        let keys: Vec<SampleKey> =
            self.samples.by_key.keys().filter(|key| key.0 == name).cloned().collect();
        for key in keys {
            let Some(sample) = self.end_sample(&key) else { continue };
            let message = "internal error: sampling panicked";
            log_failure(&sample, &message);
            let failed = Outcome::failed(FailureCategory::Server, message);
            record_outcome(&self.state, &mut self.state.store(), &sample.id, failed);
        }
    }

    /// Logs a finished sample, adds it to the metrics, and returns its outcome.
    fn finish_sample(&self, sample: &ActiveSample, output: SampleOutput) -> Outcome {
        let sampled: usize = output.samples.iter().map(|sample| sample.tokens.len()).sum();
        let seconds = sample.start.elapsed().as_secs_f64();
        #[expect(clippy::cast_precision_loss, reason = "a rate in a log event")]
        let tokens_per_second = sampled as f64 / seconds.max(1e-9);
        tracing::info!(
            target: log::REQUEST,
            operation = "sample",
            request_id = %sample.id,
            sampling_session_id = %sample.sampler.id,
            session_id = %sample.sampler.session,
            prompt_tokens = sample.prompt_tokens,
            tokens = sampled,
            seconds,
            tokens_per_second,
            "request finished"
        );
        let to_u64 = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
        self.state.metrics.prompt_tokens.add(to_u64(sample.prompt_tokens));
        self.state.metrics.sampled_tokens.add(to_u64(sampled));
        let cached = output.cache_hits.min(sample.prompt_tokens);
        let hour = current_hour();
        let usage = [
            (UsageMeter::Prefill, sample.prompt_tokens - cached),
            (UsageMeter::CachedPrefill, cached),
            (UsageMeter::Sampled, sampled),
        ]
        .into_iter()
        .filter(|(_, n)| *n > 0)
        .map(|(meter, n)| {
            let (session, base_model) =
                (sample.sampler.session.clone(), sample.sampler.base_model.clone());
            (UsageKey { hour, session, base_model, meter }, to_u64(n))
        })
        .collect();
        Outcome::proto(response(sample, output).to_proto()).with_usage(usage)
    }
}

/// Emits the event for a sample that failed while it was being drawn.
fn log_failure(sample: &ActiveSample, error: &dyn std::fmt::Display) {
    tracing::info!(
        target: log::REQUEST,
        operation = "sample",
        request_id = %sample.id,
        sampling_session_id = %sample.sampler.id,
        session_id = %sample.sampler.session,
        seconds = sample.start.elapsed().as_secs_f64(),
        %error,
        "request failed"
    );
}

fn response(sample: &ActiveSample, output: SampleOutput) -> SampleResponse {
    let sequences = output
        .samples
        .into_iter()
        .map(|sample| {
            let stop_reason = match sample.reason {
                EngineStopReason::Stop => StopReason::Stop,
                EngineStopReason::Length => StopReason::Length,
            };
            let topk = sample.top_k.as_ref().map(topk_logprobs);
            SampledSequence::default()
                .stop_reason(stop_reason)
                .tokens(sample.tokens)
                .logprobs(Some(sample.logprobs.into()))
                .topk_logprobs(topk)
        })
        .collect();
    let scores = output.prompt;
    SampleResponse::default()
        .sequences(sequences)
        .prompt_logprobs(scores.logprobs.map(Into::into))
        .topk_prompt_logprobs(scores.top_k.as_ref().map(topk_logprobs))
        .prompt_cache_hit_tokens(u32::try_from(output.cache_hits).unwrap_or(u32::MAX))
        .target_prompt_logprobs(
            scores
                .targets
                .zip(sample.targets.as_ref())
                .and_then(|(scores, targets)| with_layout_of(scores, targets)),
        )
        .prompt_alt_tokens(scores.alternatives.and_then(|table| alternatives(&table)))
}

fn topk_logprobs(table: &TopK) -> TopkLogprobs {
    let rows = table.tokens.chunks(table.k.max(1)).zip(table.logprobs.chunks(table.k.max(1)));
    TopkLogprobs::from_rows(rows.map(|(tokens, logprobs)| {
        let pairs = tokens.iter().copied().zip(logprobs.iter().copied());
        // The engine fills empty entries with this pair.
        let known: Vec<(u32, f32)> = pairs.filter(|pair| *pair != (0, NO_LOGPROB)).collect();
        (!known.is_empty()).then_some(known)
    }))
}

fn alternatives(table: &TopK) -> Option<PromptAltTokens> {
    let shape = [table.tokens.len() / table.k.max(1), table.k];
    let tokens: Vec<i64> = table.tokens.iter().map(|token| i64::from(*token)).collect();
    let tokens = TensorData::new(TensorValues::Int64(tokens.into()), shape).ok()?;
    let logprobs =
        TensorData::new(TensorValues::Float32(table.logprobs.clone().into()), shape).ok()?;
    Some(PromptAltTokens::new(tokens, logprobs))
}

/// Returns dense scores in the layout of the requested targets, dense or sparse.
fn with_layout_of(scores: Vec<f32>, targets: &TensorData) -> Option<TensorData> {
    let &[rows, width] = targets.shape().dims() else { return None };
    let (Some(starts), Some(columns)) = (targets.row_starts(), targets.columns()) else {
        return TensorData::new(TensorValues::Float32(scores.into()), [rows, width]).ok();
    };
    let mut values = Vec::with_capacity(columns.len());
    for (row, bounds) in starts.windows(2).enumerate() {
        let (from, to) = (usize::try_from(bounds[0]).ok()?, usize::try_from(bounds[1]).ok()?);
        for column in &columns[from..to] {
            values.push(*scores.get(row * width + usize::try_from(*column).ok()?)?);
        }
    }
    TensorData::sparse(values, starts.to_vec(), columns.to_vec(), [rows, width]).ok()
}
