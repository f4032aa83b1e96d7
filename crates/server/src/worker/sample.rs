//! Sampling. All requests of a base model run in one batch: samples of the Tinker API, whose
//! results are durable, and generations, whose tokens are delivered while they are sampled.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use tinkex_backend::outcome::{Outcome, OutcomeHistory};
use tinkex_backend::queue::{QueuedSample, fairness_key};
use tinkex_engine::sample::{ModelWeights, SampleOutput, SampleRequest, SampleRequestId};
use tinkex_inference::{TokenCounts, TokenSink};
use tinkex_store::clock::micros;
use tinkex_store::error::ServerError;
use tinkex_store::history::{LoggedWeights, SampleHistory, SampleSource};
use tinkex_store::log;
use tinkex_store::store::{FailureCategory, Record, ResultKind, Store, UsageKey, UsageMeter};
use tinkex_store::user::Account;
use tinkex_store::weights::WeightsLocation;
use tinkex_wire::{RequestId, SamplerId, TensorData};
use tokio::time::Instant;

use super::Worker;
use super::sample_response::response;
use super::train::folder_size;
use super::weights_cache::WeightsCache;
use crate::fault::engine_failure;
use crate::history::completions_of;
use crate::inference::{SampledTokens, inference_error};
use crate::operation::{EngineSampling, EngineWeights, QueuedGeneration, TinkerSample};

/// Base model and the engine's id of a sample.
type SampleKey = (String, SampleRequestId);

/// Samples being drawn, and the weights loaded for them.
#[derive(Default)]
pub(super) struct RunningSamples {
    by_key: HashMap<SampleKey, ActiveSample>,
    /// Keys of the samples in `by_key`, by request.
    keys: HashMap<RequestId, SampleKey>,
    pub(super) weights: WeightsCache,
}

/// A request whose samples are being drawn.
struct ActiveSample {
    info: SampleInfo,
    recipient: Recipient,
    prompt_tokens: usize,
    start: Instant,
    /// Bytes with which the request counts towards the queue limits.
    bytes: usize,
    /// Prompt for the history; empty if the tokens are not recorded, `None` if the request is not
    /// recorded.
    recorded: Option<Vec<u32>>,
}

/// Identifies a request in log events and usage counters.
#[derive(Clone)]
struct SampleInfo {
    id: RequestId,
    weights: EngineWeights,
    /// Sampling session of a Tinker sample.
    sampler: Option<SamplerId>,
    account: Account,
}

/// Recipient of the tokens of a sample.
enum Recipient {
    /// The future of a Tinker sample, with the requested targets.
    Future(Option<TensorData>),
    Generation(TokenSink),
}

impl Worker {
    /// Adds a sampling request to the batch of its base model.
    pub(super) fn begin_sample(&mut self, request: QueuedSample<EngineSampling>) {
        let QueuedSample { id, bytes, sample, .. } = request;
        match sample {
            EngineSampling::Sample(sample) => self.begin_tinker_sample(id, bytes, *sample),
            EngineSampling::Generate(generation) => self.begin_generation(id, bytes, *generation),
        }
    }

    fn begin_tinker_sample(&mut self, id: RequestId, bytes: usize, sample: TinkerSample) {
        let found = {
            let store = self.context.store();
            let entry = store.samplers.get(&sample.sampler);
            entry.map(|entry| (entry.row.clone(), store.account(&entry.row.session)))
        };
        let Some((row, account)) = found else {
            let message = format!("sampling session {} no longer exists", sample.sampler);
            tracing::info!(
                target: log::REQUEST,
                operation = "sample",
                request_id = %id,
                sampling_session_id = %sample.sampler,
                error = message,
                "request failed"
            );
            self.context.queue().sample_finished(bytes);
            let failed = Outcome::failed(FailureCategory::User, message);
            return self.context.backend.outcomes.record_locking(&id, failed);
        };
        // The weights are local: admission sends samples from weights on an upstream to the
        // upstream.
        let folder = row.weights.and_then(WeightsLocation::into_local);
        let weights = EngineWeights { base_model: row.base_model, folder };
        let info = SampleInfo { id, weights, sampler: Some(row.id), account };
        self.begin(info, Recipient::Future(sample.targets), sample.request, bytes);
    }

    fn begin_generation(&mut self, id: RequestId, bytes: usize, generation: QueuedGeneration) {
        let QueuedGeneration { weights, account, request, sink } = generation;
        if sink.has_ended() {
            return self.context.queue().sample_finished(bytes);
        }
        if self.is_deleted(&weights) {
            self.context.queue().sample_finished(bytes);
            self.context.backend.metrics.count_request(false);
            let message = "the checkpoint was deleted before its weights were loaded";
            tracing::info!(
                target: log::REQUEST,
                operation = "generate",
                request_id = %id,
                session_id = %account.session,
                error = message,
                "request failed"
            );
            return sink.finish(Err(inference_error(ServerError::not_found(message))));
        }
        let info = SampleInfo { id, weights, sampler: None, account };
        self.begin(info, Recipient::Generation(sink), request, bytes);
    }

    /// Returns whether weights can no longer be loaded because their checkpoint was deleted.
    fn is_deleted(&mut self, key: &EngineWeights) -> bool {
        let Some(folder) = &key.folder else { return false };
        self.samples.weights.get(key).is_none() && !self.context.weights_dir.join(folder).exists()
    }

    fn begin(
        &mut self,
        info: SampleInfo,
        recipient: Recipient,
        mut request: SampleRequest,
        bytes: usize,
    ) {
        request.fairness = fairness_key(&info.account);
        let prompt_tokens = request.prompt.len();
        let recorded = self.recorded_prompt(&request);
        let added = self.add_to_batch(&info.weights, &recipient, request);
        let start = Instant::now();
        let sample = ActiveSample { info, recipient, prompt_tokens, start, bytes, recorded };
        match added {
            Ok(engine_id) => {
                let key = (sample.info.weights.base_model.clone(), engine_id);
                self.samples.keys.insert(sample.info.id.clone(), key.clone());
                self.samples.by_key.insert(key, sample);
            }
            Err(failed) => {
                self.context.queue().sample_finished(bytes);
                self.deliver(&mut self.context.store(), sample, Err(failed));
            }
        }
    }

    fn add_to_batch(
        &mut self,
        key: &EngineWeights,
        recipient: &Recipient,
        request: SampleRequest,
    ) -> Result<SampleRequestId, Outcome> {
        let weights = match self.samples.weights.get(key) {
            Some(weights) => weights,
            None => self.load_weights(key)?,
        };
        let sampler = &mut self.loaded_model(&key.base_model)?.sampler;
        let added = match recipient {
            Recipient::Future(_) => sampler.add(&weights, request),
            Recipient::Generation(sink) => {
                sampler.add_observed(&weights, request, Box::new(SampledTokens(sink.clone())))
            }
        };
        self.context.metrics.loaded_models.set(self.engines.count());
        added.map_err(engine_failure)
    }

    fn load_weights(&mut self, key: &EngineWeights) -> Result<ModelWeights, Outcome> {
        let engine = self.engine(&key.base_model)?;
        let (weights, bytes) = match &key.folder {
            Some(folder) => {
                let folder = self.context.verified_folder(folder)?;
                let weights = engine.load_weights(&folder).map_err(engine_failure)?;
                (weights, folder_size(&folder)?)
            }
            None => (engine.base_weights(), 0),
        };
        self.cache_weights(key, weights.clone(), bytes);
        Ok(weights)
    }

    /// Caches weights of `bytes` bytes for sampling.
    pub(super) fn cache_weights(&mut self, key: &EngineWeights, weights: ModelWeights, bytes: u64) {
        self.drop_removed_weights();
        let limit = self.context.limits.sampler_weight_bytes;
        self.samples.weights.insert(key, weights, bytes, limit);
    }

    /// Drops the weights whose folder no longer exists.
    pub(super) fn drop_removed_weights(&mut self) {
        self.samples.weights.drop_removed(&self.context.weights_dir);
    }

    /// Removes a sample from the running samples and from the queue's count.
    fn end_sample(&mut self, key: &SampleKey) -> Option<ActiveSample> {
        let sample = self.samples.by_key.remove(key)?;
        self.samples.keys.remove(&sample.info.id);
        self.context.queue().sample_finished(sample.bytes);
        Some(sample)
    }

    /// Cancels a sample and releases its pages. Requests of models are not cancelled, because later
    /// requests depend on their effect.
    pub(super) fn cancel_sample(&mut self, id: &RequestId) {
        if self.cancel_suspect(id) {
            return;
        }
        let Some(key) = self.samples.keys.get(id).cloned() else { return };
        let model = self.engines.get_loaded(&key.0);
        let partial = model.and_then(|model| model.sampler.cancel(key.1));
        let Some(mut sample) = self.end_sample(&key) else { return };
        match &sample.recipient {
            Recipient::Future(_) => {
                self.context.backend.outcomes.record_locking(id, Outcome::cancelled());
            }
            Recipient::Generation(sink) => {
                let is_complete = sink.is_complete();
                self.context.backend.metrics.count_request(is_complete);
                let Some(counts) = sink.counts() else { return };
                if is_complete {
                    log_finished(&sample, counts.sampled);
                }
                let usage = self.count_tokens(&sample, counts);
                let mut history = partial.and_then(|partial| sample.take_history(&Ok(partial)));
                for completion in history.iter_mut().flat_map(|sample| &mut sample.completions) {
                    completion.stop = if is_complete { "stop" } else { "cancelled" };
                }
                let mut store = self.context.store();
                store.put_unconfirmed(Record::Usage(usage));
                self.context.backend.outcomes.record_generation(&mut store, history);
            }
        }
    }

    /// Cancels all generations when the server stops. Tokens that were already sampled count as
    /// usage.
    pub(super) fn cancel_generations(&mut self) {
        let samples = self.samples.by_key.values();
        let generations =
            samples.filter(|sample| matches!(sample.recipient, Recipient::Generation(_)));
        let mut ids: Vec<RequestId> = generations.map(|sample| sample.info.id.clone()).collect();
        // Sort the ids: the order of the records must not depend on the hash map.
        ids.sort();
        for id in ids {
            self.cancel_sample(&id);
        }
    }

    /// Computes one step of every base model that is sampling, and delivers finished samples.
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
        let ended: Vec<_> = finished
            .into_iter()
            .filter_map(|(key, output)| Some((self.end_sample(&key)?, output)))
            .collect();
        if ended.is_empty() {
            return;
        }
        let mut store = self.context.store();
        for (sample, output) in ended {
            self.deliver(&mut store, sample, output.map_err(engine_failure));
        }
    }

    /// Fails all samples of a base model whose sampler panicked, and unloads the model.
    fn fail_samples_of(&mut self, name: &str) {
        self.engines.unload(name);
        self.samples.weights.drop_base(name);
        let keys: Vec<SampleKey> =
            self.samples.by_key.keys().filter(|key| key.0 == name).cloned().collect();
        for key in keys {
            let Some(sample) = self.end_sample(&key) else { continue };
            let message = "internal error: sampling panicked";
            let failed = Outcome::failed(FailureCategory::Server, message);
            self.deliver(&mut self.context.store(), sample, Err(failed));
        }
    }

    /// Logs a finished sample, adds it to metrics and usage, and delivers its output or failure.
    fn deliver(
        &self,
        store: &mut Store,
        mut sample: ActiveSample,
        output: Result<SampleOutput, Outcome>,
    ) {
        let usage = match &output {
            Ok(output) => {
                let sampled = output.samples.iter().map(|sample| sample.tokens.len()).sum();
                log_finished(&sample, sampled);
                self.count_tokens(&sample, TokenCounts { cached: output.cache_hits, sampled })
            }
            Err(failed) => {
                log_failed(&sample, failed);
                Vec::new()
            }
        };
        let history = sample.take_history(&output);
        match sample.recipient {
            Recipient::Future(targets) => {
                let outcome = output
                    .map(|output| Outcome::proto(response(output, targets.as_ref()).to_proto()))
                    .map(|outcome| outcome.with_usage(usage));
                let mut outcome = outcome.unwrap_or_else(|failed| failed);
                outcome.history = history.map(OutcomeHistory::Sample).map(Box::new);
                self.context.backend.outcomes.record(store, &sample.info.id, outcome);
            }
            Recipient::Generation(sink) => {
                self.context.backend.metrics.count_request(output.is_ok());
                if !usage.is_empty() {
                    store.put_unconfirmed(Record::Usage(usage));
                }
                self.context.backend.outcomes.record_generation(store, history);
                let id = &sample.info.id;
                let failed =
                    |outcome: Outcome| outcome.hide_paths(&store.hidden_paths, id).into_error();
                let end = output.map(drop).map_err(failed);
                sink.finish(end.map_err(inference_error));
            }
        }
    }

    /// Returns the prompt to record for the history; empty if its tokens are not recorded, `None`
    /// if the request is not recorded.
    fn recorded_prompt(&self, request: &SampleRequest) -> Option<Vec<u32>> {
        let completion = request.max_tokens.unwrap_or(0).min(4_096);
        let tokens = request.prompt.len() + request.samples.saturating_mul(completion);
        let bytes = tokens.saturating_mul(8 + 8 * request.top_k);
        let with_tokens = self.context.backend.history.admit_sample(bytes)?;
        Some(if with_tokens { request.prompt.clone() } else { Vec::new() })
    }

    /// Adds the tokens of a sample to the metrics. Returns its usage.
    fn count_tokens(&self, sample: &ActiveSample, counts: TokenCounts) -> Vec<(UsageKey, u64)> {
        let to_u64 = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
        self.context.backend.metrics.prompt_tokens.add(to_u64(sample.prompt_tokens));
        self.context.backend.metrics.sampled_tokens.add(to_u64(counts.sampled));
        let cached = counts.cached.min(sample.prompt_tokens);
        let hour = self.context.clock().hour();
        [
            (UsageMeter::Prefill, sample.prompt_tokens - cached),
            (UsageMeter::CachedPrefill, cached),
            (UsageMeter::Sampled, counts.sampled),
        ]
        .into_iter()
        .filter(|(_, n)| *n > 0)
        .map(|(meter, n)| {
            let SampleInfo { account, weights, .. } = &sample.info;
            (UsageKey::new(hour, account, &weights.base_model, meter), to_u64(n))
        })
        .collect()
    }
}

impl ActiveSample {
    /// Builds the history record of the sample. The caller sets the time at which the sample ended.
    fn take_history(
        &mut self,
        output: &Result<SampleOutput, Outcome>,
    ) -> Option<Box<SampleHistory>> {
        let prompt = self.recorded.take()?;
        let completions = match output {
            Ok(output) if !prompt.is_empty() => completions_of(&prompt, output),
            _ => Vec::new(),
        };
        Some(Box::new(SampleHistory {
            finished_at: 0,
            queued: 0,
            computed: micros(self.start.elapsed()),
            weights: LoggedWeights {
                base_model: self.info.weights.base_model.clone(),
                folder: self.info.weights.folder.clone(),
            },
            owner: self.info.account.owner.clone(),
            session: self.info.account.session.clone(),
            source: match self.recipient {
                Recipient::Future(_) => SampleSource::Tinker,
                Recipient::Generation(_) => SampleSource::Inference,
            },
            prompt_tokens: self.prompt_tokens,
            prompt: Some(prompt).filter(|prompt| !prompt.is_empty()),
            completions,
            error: output.as_ref().err().and_then(Outcome::error).map(str::to_owned),
        }))
    }

    /// Returns the operation's name for log events.
    fn operation(&self) -> &'static str {
        match self.recipient {
            Recipient::Future(_) => "sample",
            Recipient::Generation(_) => "generate",
        }
    }
}

/// Emits the event for a finished sample of `tokens` tokens.
fn log_finished(sample: &ActiveSample, tokens: usize) {
    let seconds = sample.start.elapsed().as_secs_f64();
    #[expect(clippy::cast_precision_loss, reason = "a rate in a log event")]
    let tokens_per_second = tokens as f64 / seconds.max(1e-9);
    tracing::info!(
        target: log::REQUEST,
        operation = sample.operation(),
        request_id = %sample.info.id,
        sampling_session_id = sample.info.sampler.as_ref().map(tracing::field::display),
        session_id = %sample.info.account.session,
        prompt_tokens = sample.prompt_tokens,
        tokens,
        seconds,
        tokens_per_second,
        "request finished"
    );
}

/// Emits the event for a sample that failed.
fn log_failed(sample: &ActiveSample, failed: &Outcome) {
    let error = match &failed.result {
        ResultKind::Failed { error, .. } => error,
        ResultKind::Json | ResultKind::Proto => return,
    };
    tracing::info!(
        target: log::REQUEST,
        operation = sample.operation(),
        request_id = %sample.info.id,
        sampling_session_id = sample.info.sampler.as_ref().map(tracing::field::display),
        session_id = %sample.info.account.session,
        seconds = sample.start.elapsed().as_secs_f64(),
        error,
        "request failed"
    );
}
