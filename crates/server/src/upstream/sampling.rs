//! Samples on an upstream. They change nothing, so a sample whose fate is not known is drawn again;
//! its seed makes the result the same.

use std::collections::HashMap;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tinkex::{SampleResponse, SamplingClient, StopReason, UpstreamSession};
use tinkex_engine::sample::{
    PromptScores, SampledToken, StopReason as EngineStopReason, TokenObserver as _,
};
use tinkex_wire::RequestId;
use tokio::sync::OnceCell;
use tokio::time::Instant;

use super::Upstream;
use super::fault::Fault;
use super::remote_model::ModelHandle;
use crate::error::ServerError;
use crate::inference::TokenSink;
use crate::log;
use crate::operation::RelayedSample;
use crate::outcome::{Outcome, record_outcome};
use crate::store::{FailureCategory, LoraSettings, Record, UsageKey, UsageMeter};
use crate::task::TaskHandle;

/// Maximum number of samples in flight per upstream.
pub(super) const MAX_IN_FLIGHT: u32 = 2_000;
/// Maximum number of models for sampling on an upstream with an older protocol, which has few
/// places for models.
const MAX_SAMPLING_MODELS: usize = 4;
/// Delay before the second attempt after a fault. Later delays are twice the previous one.
const FIRST_DELAY: Duration = Duration::from_millis(200);
/// Maximum delay between two attempts.
const MAX_DELAY: Duration = Duration::from_secs(10);

/// Base model, and path of the weights on the upstream.
pub(super) type SamplerKey = (String, Option<String>);

/// Sampling clients of an upstream, and the running samples.
#[derive(Default)]
pub(super) struct Samplers {
    clients: Mutex<HashMap<SamplerKey, CachedSampler>>,
    running: Mutex<HashMap<RequestId, RunningSample>>,
}

struct CachedSampler {
    sampler: Arc<OnceCell<Sampler>>,
    last_used: Instant,
}

/// A client that samples from fixed weights.
pub(super) struct Sampler {
    client: SamplingClient,
    /// Path of the weights that are sampled on the upstream.
    pub(super) path: Option<String>,
    /// Keeps the session alive.
    _session: UpstreamSession,
    /// The model that holds the weights, on an upstream with an older protocol.
    model: Mutex<Option<ModelHandle>>,
}

/// A sample that has no outcome yet. Whoever removes it from the table records its outcome.
struct RunningSample {
    task: Option<TaskHandle>,
    bytes: usize,
    sink: Option<TokenSink>,
}

impl Samplers {
    fn running(&self) -> MutexGuard<'_, HashMap<RequestId, RunningSample>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn clients(&self) -> MutexGuard<'_, HashMap<SamplerKey, CachedSampler>> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the task of a sample.
    pub(super) fn start(
        &self,
        upstream: &Arc<Upstream>,
        id: &RequestId,
        (bytes, sink): (usize, Option<TokenSink>),
        task: impl Future<Output = ()> + Send + 'static,
    ) {
        self.running().insert(id.clone(), RunningSample { task: None, bytes, sink });
        let task = upstream.state.executor.spawn("upstream sample", task);
        // The task may have ended already.
        if let Some(running) = self.running().get_mut(id) {
            running.task = Some(task);
        }
    }

    /// Cancels a sample; has no effect if it has ended.
    pub(super) fn cancel(&self, upstream: &Upstream, id: &RequestId) {
        let Some(running) = self.running().remove(id) else { return };
        if let Some(task) = &running.task {
            task.abort();
        }
        upstream.queue().sample_finished(running.bytes);
        if running.sink.is_none() {
            let state = &upstream.state;
            record_outcome(state, &mut state.store(), id, Outcome::cancelled());
        }
    }

    /// Forgets a client whose weights the upstream has lost.
    fn forget(&self, key: &SamplerKey) {
        self.clients().remove(key);
    }
}

/// Draws a sample and delivers its result.
pub(super) async fn run(upstream: Arc<Upstream>, id: RequestId, sample: RelayedSample) {
    let start = Instant::now();
    let result = upstream.sample(&sample).await;
    let Some(running) = upstream.samplers.running().remove(&id) else { return };
    upstream.queue().sample_finished(running.bytes);
    match &result {
        Ok(response) => {
            let tokens: usize = response.sequences.iter().map(|s| s.tokens.len()).sum();
            tracing::info!(
                target: log::REQUEST,
                operation = "sample",
                request_id = %id,
                session_id = %sample.session,
                upstream = %upstream.name,
                tokens,
                seconds = start.elapsed().as_secs_f64(),
                "request finished"
            );
        }
        Err(fault) => tracing::info!(
            target: log::REQUEST,
            operation = "sample",
            request_id = %id,
            session_id = %sample.session,
            upstream = %upstream.name,
            error = fault.reason(),
            "request failed"
        ),
    }
    let usage = match &result {
        Ok(response) => upstream.count_tokens(&sample, response),
        Err(_) => Vec::new(),
    };
    let state = &upstream.state;
    let outcome = match result {
        Ok(response) => Ok(response),
        Err(Fault::Failed(category, message)) => Err(Outcome::failed(category, message)),
        Err(fault) => {
            let seconds = state.options.timeouts.upstream.as_secs();
            let reason = fault.reason();
            let message =
                format!("upstream {} has not sampled for {seconds} s: {reason}", upstream.name);
            Err(Outcome::failed(FailureCategory::Server, message))
        }
    };
    match running.sink {
        None => {
            let outcome = outcome
                .map(|response| Outcome::proto(response.to_proto()).with_usage(usage))
                .unwrap_or_else(|failed| failed);
            record_outcome(state, &mut state.store(), &id, outcome);
        }
        Some(mut sink) => {
            state.metrics.count_request(outcome.is_ok());
            if !usage.is_empty() {
                state.store().put_unconfirmed(Record::Usage(usage));
            }
            let end = outcome.map(|response| deliver(&mut sink, &response));
            sink.finish(end.map_err(|failed| match failed.into_error() {
                ServerError::Internal(message) => ServerError::Unavailable(message),
                other => other,
            }));
        }
    }
}

/// Hands all tokens of a response to an inference request.
fn deliver(sink: &mut TokenSink, response: &SampleResponse) {
    let logprobs = response.prompt_logprobs.as_ref();
    let logprobs =
        logprobs.map(|all| all.iter().map(|logprob| logprob.unwrap_or(f32::NAN)).collect());
    let scores = PromptScores { logprobs, ..PromptScores::default() };
    let cached = usize::try_from(response.prompt_cache_hit_tokens).unwrap_or(0);
    sink.prompt(&scores, cached);
    for (completion, sequence) in response.sequences.iter().enumerate() {
        for (i, token) in sequence.tokens.iter().enumerate() {
            let logprob = sequence.logprobs.as_ref().and_then(|logprobs| logprobs.get(i));
            let is_last = i + 1 == sequence.tokens.len();
            let reason = match sequence.stop_reason {
                StopReason::Length => EngineStopReason::Length,
                _ => EngineStopReason::Stop,
            };
            sink.token(SampledToken {
                completion,
                token: *token,
                logprob: logprob.unwrap_or(f32::NAN),
                top_tokens: &[],
                top_logprobs: &[],
                stop: is_last.then_some(reason),
            });
        }
    }
}

impl Upstream {
    /// Draws a sample; waits while the upstream does not respond.
    async fn sample(&self, sample: &RelayedSample) -> Result<SampleResponse, Fault> {
        let limit = self.state.options.timeouts.upstream;
        let (start, mut delay) = (Instant::now(), FIRST_DELAY);
        let key = (sample.base_model.clone(), sample.path.clone());
        loop {
            let attempt = async {
                let sampler = self.sampler(&key).await?;
                let Some(sampler) = sampler.get() else {
                    return Err(Fault::Unavailable("the weights are not loaded".to_owned()));
                };
                Ok(sampler.client.relay(sample.request.clone()).send().await?)
            };
            let fault = match attempt.await {
                Ok(response) => return Ok(response),
                Err(fault @ Fault::Failed(..)) => return Err(fault),
                Err(fault) => fault,
            };
            if matches!(fault, Fault::Lost(_)) {
                self.samplers.forget(&key);
            }
            if start.elapsed() >= limit {
                return Err(fault);
            }
            self.state.metrics.retries.add(1);
            tokio::time::sleep(delay).await;
            delay = (delay * 2).min(MAX_DELAY);
        }
    }

    /// Returns the client for weights, creating it on first use.
    pub(super) async fn sampler(&self, key: &SamplerKey) -> Result<Arc<OnceCell<Sampler>>, Fault> {
        let cell = {
            let mut clients = self.samplers.clients();
            let cached = clients.entry(key.clone()).or_insert_with(|| CachedSampler {
                sampler: Arc::default(),
                last_used: Instant::now(),
            });
            cached.last_used = Instant::now();
            Arc::clone(&cached.sampler)
        };
        cell.get_or_try_init(|| self.create_sampler(key)).await?;
        self.evict_samplers(key).await;
        Ok(cell)
    }

    async fn create_sampler(&self, (base, path): &SamplerKey) -> Result<Sampler, Fault> {
        match path {
            Some(path) if self.is_older() => self.create_sampling_model(base, path).await,
            _ => {
                let session = UpstreamSession::open(&self.service).await?;
                let client = session.sampling_client(base, path.as_deref()).await?;
                let path = path.clone();
                Ok(Sampler { client, path, _session: session, model: Mutex::default() })
            }
        }
    }

    /// Creates a model that is only sampled, from a training checkpoint. An older server samples a
    /// checkpoint with the model that it belongs to: sampling would change a model in training, and
    /// needs that model to be in memory.
    async fn create_sampling_model(&self, base: &str, path: &str) -> Result<Sampler, Fault> {
        let lora = self.lora_of(path).ok_or_else(|| {
            let message = format!("no checkpoint of this server has the weights {path}");
            Fault::Failed(FailureCategory::User, message)
        })?;
        let optimizer = tinkex::OptimizerConfig::default();
        let mut model = ModelHandle::create(self, base, &lora, &optimizer).await?;
        let sampled = async {
            model.load(path, false).await?;
            let name = format!("tinkex-{}", &self.state.random.id()[..12]);
            let path = model.save_for_sampler(name).await?;
            let client = model.session.sampling_client(base, Some(&path)).await?;
            Ok::<_, Fault>((client, path))
        };
        match sampled.await {
            Ok((client, path)) => {
                let (session, path) = (model.session.clone(), Some(path));
                Ok(Sampler { client, path, _session: session, model: Mutex::new(Some(model)) })
            }
            Err(fault) => {
                model.unload(self).await;
                Err(fault)
            }
        }
    }

    /// Returns the LoRA settings of weights on this upstream.
    fn lora_of(&self, path: &str) -> Option<LoraSettings> {
        let folder = format!("{}>{path}", self.name);
        let store = self.state.store();
        let checkpoint = store.checkpoints.values().find(|entry| entry.row.folder == folder);
        if let Some(checkpoint) = checkpoint {
            return Some(checkpoint.row.lora);
        }
        // Weights that were saved for a sampling session only: those of a run of its session.
        let sampler =
            store.samplers.values().find(|entry| entry.row.folder.as_ref() == Some(&folder))?;
        let mut runs = store.runs_of(&sampler.row.session);
        let run = runs.find(|run| run.base_model == sampler.row.base_model)?;
        Some(run.lora)
    }

    /// Unloads the models for sampling that were not used for the longest time, on an upstream with
    /// few places for models. Keeps that of `key`.
    async fn evict_samplers(&self, key: &SamplerKey) {
        if !self.is_older() {
            return;
        }
        let evicted: Vec<Arc<OnceCell<Sampler>>> = {
            let mut clients = self.samplers.clients();
            let mut models: Vec<(Instant, SamplerKey)> = clients
                .iter()
                .filter(|(other, _)| other.1.is_some() && *other != key)
                .map(|(other, cached)| (cached.last_used, other.clone()))
                .collect();
            models.sort();
            let excess = (models.len() + 1).saturating_sub(MAX_SAMPLING_MODELS);
            let oldest = models.into_iter().take(excess);
            oldest.filter_map(|(_, key)| Some(clients.remove(&key)?.sampler)).collect()
        };
        for sampler in evicted {
            let model = sampler.get().and_then(|sampler| {
                sampler.model.lock().unwrap_or_else(PoisonError::into_inner).take()
            });
            if let Some(model) = model {
                model.unload(self).await;
            }
        }
    }

    /// Adds the tokens of a sample to the metrics. Returns its usage.
    fn count_tokens(
        &self,
        sample: &RelayedSample,
        response: &SampleResponse,
    ) -> Vec<(UsageKey, u64)> {
        let to_u64 = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
        let prompt = to_u64(sample.request.prompt.token_count().unwrap_or(0));
        let sampled = to_u64(response.sequences.iter().map(|s| s.tokens.len()).sum());
        self.state.metrics.prompt_tokens.add(prompt);
        self.state.metrics.sampled_tokens.add(sampled);
        let cached = u64::from(response.prompt_cache_hit_tokens).min(prompt);
        let key = |meter| UsageKey {
            hour: self.state.clock.hour(),
            session: sample.session.clone(),
            base_model: sample.base_model.clone(),
            meter,
        };
        [
            (UsageMeter::Prefill, prompt - cached),
            (UsageMeter::CachedPrefill, cached),
            (UsageMeter::Sampled, sampled),
        ]
        .into_iter()
        .filter(|(_, n)| *n > 0)
        .map(|(meter, n)| (key(meter), n))
        .collect()
    }
}
