//! Samples on an upstream. They change nothing, so a sample is drawn again if it is not known
//! whether the upstream has drawn it; its seed makes the result the same.

use std::collections::HashMap;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tinkex::{SampleResponse, SamplingClient, StopReason, UpstreamSession};
use tinkex_engine::sample::{
    PromptScores, SampledToken, StopReason as EngineStopReason, TokenObserver as _,
};
use tinkex_wire::{RequestId, SampleRequest};
use tokio::sync::OnceCell;
use tokio::time::Instant;

use super::Upstream;
use super::fault::Fault;
use super::remote_model::ModelHandle;
use crate::backend::RemoteWeights;
use crate::error::ServerError;
use crate::inference::TokenSink;
use crate::log;
use crate::operation::RelayedSample;
use crate::outcome::{Outcome, record_outcome};
use crate::store::{FailureCategory, LoraSettings, Record, RunRecord, UsageKey, UsageMeter};
use crate::task::TaskHandle;

/// Maximum number of samples in flight per upstream.
pub(super) const MAX_IN_FLIGHT: u32 = 2_000;
/// Number of models for sampling that are kept on an upstream with an older protocol, which has few
/// slots for models. More are loaded only while more are sampled from at the same time.
const MAX_SAMPLING_MODELS: usize = 4;
/// Number of sampling clients of checkpoints that are kept for an upstream with the current
/// protocol. Each has a session of its own.
const MAX_SAMPLING_CLIENTS: usize = 64;
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
    /// Has other owners while it is in use.
    sampler: Arc<OnceCell<WeightsSampler>>,
    last_used: Instant,
}

/// A client that samples from fixed weights.
pub(super) struct WeightsSampler {
    client: SamplingClient,
    /// Path of the weights that are sampled on the upstream.
    pub(super) path: Option<String>,
    session: UpstreamSession,
    /// The model that holds the weights, on an upstream with an older protocol.
    model: Option<ModelHandle>,
    /// When the last successful check of the session began.
    checked: tokio::sync::Mutex<Option<Instant>>,
}

impl WeightsSampler {
    fn new(
        client: SamplingClient,
        session: UpstreamSession,
        path: Option<String>,
        model: Option<ModelHandle>,
    ) -> Self {
        Self { client, path, session, model, checked: Default::default() }
    }

    async fn draw(&self, request: SampleRequest) -> Result<SampleResponse, Fault> {
        let response = self.client.relay(request).send().await.map_err(Fault::from);
        if matches!(response, Ok(_) | Err(Fault::Failed(..))) {
            self.check_session().await?;
        }
        response
    }

    /// Checks, after a response, that it was one to this session; see
    /// [`confirm`](super::remote_model::confirm). Samples that end at the same time share a check.
    async fn check_session(&self) -> Result<(), Fault> {
        if self.session.has_current_protocol() {
            return Ok(());
        }
        let received = Instant::now();
        let mut checked = self.checked.lock().await;
        if checked.is_none_or(|start| start < received) {
            let start = Instant::now();
            self.session.check().await?;
            *checked = Some(start);
        }
        Ok(())
    }
}

/// A sample that has no outcome yet. The task that removes it from the table records its outcome.
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

    /// Forgets a client whose weights the upstream has lost, unless another sample has replaced it.
    fn forget(&self, key: &SamplerKey, lost: &Arc<OnceCell<WeightsSampler>>) {
        let mut clients = self.clients();
        if clients.get(key).is_some_and(|cached| Arc::ptr_eq(&cached.sampler, lost)) {
            clients.remove(key);
        }
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
            let fault = match self.try_sample(&key, &sample.request).await {
                Ok(response) => return Ok(response),
                Err(fault @ Fault::Failed(..)) => return Err(fault),
                Err(fault) => fault,
            };
            if start.elapsed() >= limit {
                return Err(fault);
            }
            self.state.metrics.retries.add(1);
            tokio::time::sleep(delay).await;
            delay = (delay * 2).min(MAX_DELAY);
        }
    }

    /// Draws a sample; makes one attempt.
    async fn try_sample(
        &self,
        key: &SamplerKey,
        request: &SampleRequest,
    ) -> Result<SampleResponse, Fault> {
        let cell = self.sampler(key).await?;
        let Some(sampler) = cell.get() else {
            return Err(Fault::Unavailable("the weights are not loaded".to_owned()));
        };
        let response = sampler.draw(request.clone()).await;
        if matches!(response, Err(Fault::Lost(_))) {
            self.samplers.forget(key, &cell);
        }
        response
    }

    /// Returns the client for weights, creating it on first use. It is not evicted while the caller
    /// has it.
    pub(super) async fn sampler(
        &self,
        key: &SamplerKey,
    ) -> Result<Arc<OnceCell<WeightsSampler>>, Fault> {
        let cell = {
            let mut clients = self.samplers.clients();
            let cached = clients.entry(key.clone()).or_insert_with(|| CachedSampler {
                sampler: Arc::default(),
                last_used: Instant::now(),
            });
            cached.last_used = Instant::now();
            Arc::clone(&cached.sampler)
        };
        // First, so that the new model finds a free slot.
        self.evict_samplers(key).await;
        cell.get_or_try_init(|| self.create_sampler(key)).await?;
        Ok(cell)
    }

    async fn create_sampler(&self, (base, path): &SamplerKey) -> Result<WeightsSampler, Fault> {
        self.require_reached()?;
        match path {
            Some(path) if self.is_older() => self.create_sampling_model(base, path).await,
            _ => {
                let session = UpstreamSession::open(&self.service).await?;
                let client = session.sampling_client(base, path.as_deref()).await?;
                Ok(WeightsSampler::new(client, session, path.clone(), None))
            }
        }
    }

    /// Creates a model that is only sampled, from a training checkpoint. An older server samples a
    /// checkpoint with the model that it belongs to: sampling would change a model in training, and
    /// needs that model to be in memory.
    async fn create_sampling_model(&self, base: &str, path: &str) -> Result<WeightsSampler, Fault> {
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
                Ok(WeightsSampler::new(client, model.session.clone(), Some(path), Some(model)))
            }
            Err(fault) => {
                model.unload(self).await;
                Err(fault)
            }
        }
    }

    /// Returns the LoRA settings of weights on this upstream.
    fn lora_of(&self, path: &str) -> Option<LoraSettings> {
        let weights = RemoteWeights { upstream: self.name.to_string(), path: path.to_owned() };
        let folder = weights.to_string();
        let store = self.state.store();
        let checkpoint = store.checkpoints.values().find(|entry| entry.row.folder == folder);
        if let Some(checkpoint) = checkpoint {
            return Some(checkpoint.row.lora);
        }
        // Weights that were saved for a sampling session only: those of a run of its session, if
        // possible of the one whose model the path names.
        let sampler =
            store.samplers.values().find(|entry| entry.row.folder.as_ref() == Some(&folder))?;
        let runs: Vec<&RunRecord> = store
            .runs_of(&sampler.row.session)
            .filter(|run| run.base_model == sampler.row.base_model)
            .collect();
        let saved_them = |run: &&&RunRecord| {
            let model = run.upstream.as_ref().and_then(|upstream| upstream.model.as_ref());
            model.is_some_and(|model| path.starts_with(&format!("tinker://{}/", model.id)))
        };
        let run = runs.iter().find(saved_them).or(runs.first())?;
        Some(run.lora)
    }

    /// Removes the idle clients of checkpoints that were not used for the longest time, with their
    /// models and sessions on the upstream, if there are too many. Keeps that of `key`.
    async fn evict_samplers(&self, key: &SamplerKey) {
        let limit = if self.is_older() { MAX_SAMPLING_MODELS } else { MAX_SAMPLING_CLIENTS };
        let evicted: Vec<Arc<OnceCell<WeightsSampler>>> = {
            let mut clients = self.samplers.clients();
            let is_other = |other: &SamplerKey| other.1.is_some() && other != key;
            let others = clients.keys().filter(|other| is_other(other)).count();
            let mut idle: Vec<(Instant, SamplerKey)> = clients
                .iter()
                .filter(|(other, cached)| {
                    is_other(other) && Arc::strong_count(&cached.sampler) == 1
                })
                .map(|(other, cached)| (cached.last_used, other.clone()))
                .collect();
            idle.sort();
            let oldest = idle.into_iter().take((others + 1).saturating_sub(limit));
            oldest.filter_map(|(_, key)| Some(clients.remove(&key)?.sampler)).collect()
        };
        for cell in evicted {
            let Some(sampler) = Arc::into_inner(cell).and_then(OnceCell::into_inner) else {
                continue;
            };
            match sampler.model {
                Some(model) => model.unload(self).await,
                None => sampler.session.finish().await,
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
