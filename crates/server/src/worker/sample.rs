//! Samples: in, together, and out.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use tinkex_engine::decode::NO_LOGPROB;
use tinkex_engine::sample::{
    SampleOutput, SampleRequestId as Ticket, SamplingWeights, StopReason as Reason, TopK,
};
use tinkex_wire::{
    PromptAltTokens, RequestId, SampleResponse, SampledSequence, SamplerId, StopReason, TensorData,
    TensorValues, TopkLogprobs,
};

use super::Worker;
use super::train::size_of;
use crate::settle::{Settled, settle};
use crate::store::{Fault, Sampler, Use, What, now};
use crate::work::{Job, Sample, Work};

/// Adapters that are kept ready to sample from.
const MOST_WEIGHTS: usize = 64;

/// Samples under way, and the weights they need.
#[derive(Default)]
pub(super) struct Running {
    samples: HashMap<(String, Ticket), One>,
    tickets: HashMap<RequestId, (String, Ticket)>,
    weights: HashMap<SamplerId, Ready>,
    clock: u64,
}

/// A sample under way.
struct One {
    id: RequestId,
    sampler: Sampler,
    prompt: usize,
    targets: Option<TensorData>,
    start: Instant,
    /// Bytes that it counts for in the queue.
    bytes: usize,
}

/// Weights in memory.
struct Ready {
    base: String,
    weights: SamplingWeights,
    /// About what they take.
    bytes: usize,
    used: u64,
}

impl Running {
    /// Keeps weights of `bytes` ready, and no more than `most` bytes of all of them: those that were
    /// not used for longest go.
    fn remember(&mut self, id: &SamplerId, mut ready: Ready, most: usize) {
        self.clock += 1;
        ready.used = self.clock;
        self.weights.insert(id.clone(), ready);
        let bytes = |all: &HashMap<_, Ready>| all.values().map(|ready| ready.bytes).sum::<usize>();
        while self.weights.len() > MOST_WEIGHTS || bytes(&self.weights) > most {
            let others = self.weights.iter().filter(|(other, _)| *other != id);
            let oldest = others.min_by_key(|(_, ready)| ready.used).map(|(id, _)| id.clone());
            let Some(oldest) = oldest else { break };
            self.weights.remove(&oldest);
        }
    }

    /// Keeps the weights of these sampling sessions alone.
    fn retain_weights(&mut self, known: impl Fn(&SamplerId) -> bool) {
        self.weights.retain(|id, _| known(id));
    }

    pub(super) fn forget_weights_of(&mut self, base: &str) {
        self.weights.retain(|_, ready| ready.base != base);
    }

    fn weights(&mut self, id: &SamplerId) -> Option<SamplingWeights> {
        self.clock += 1;
        let ready = self.weights.get_mut(id)?;
        ready.used = self.clock;
        Some(ready.weights.clone())
    }
}

impl Worker {
    /// Takes a sample in.
    pub(super) fn begin(&mut self, job: Job) {
        let Job { id, bytes, work } = job;
        let Work::Sample(sample) = work else { return };
        if let Err(failed) = self.try_begin(&id, bytes, *sample) {
            self.shared.queue.sampled(bytes);
            settle(&self.shared, &mut self.shared.store(), &id, failed);
        }
    }

    fn try_begin(&mut self, id: &RequestId, bytes: usize, sample: Sample) -> Result<(), Settled> {
        let row = self.shared.store().samplers.get(&sample.sampler).map(|kept| kept.row.clone());
        let Some(row) = row else {
            return Err(Settled::failed(Fault::User, format!("{} is gone", sample.sampler)));
        };
        let Some(base) = self.shared.models.get(&row.base_model).cloned() else {
            return Err(Settled::failed(Fault::User, self.shared.models.missing(&row.base_model)));
        };
        let weights = match self.running.weights(&row.id) {
            Some(weights) => weights,
            None => self.load_weights(&row)?,
        };
        let prompt = sample.request.prompt.len();
        let ticket = self.engines.get(&base)?.sampler.add(&weights, sample.request)?;
        self.shared.metrics.loaded.set(self.engines.count());
        let key = (row.base_model.clone(), ticket);
        let targets = sample.targets;
        let start = Instant::now();
        let one = One { id: id.clone(), sampler: row, prompt, targets, start, bytes };
        self.running.tickets.insert(id.clone(), key.clone());
        self.running.samples.insert(key, one);
        Ok(())
    }

    fn load_weights(&mut self, row: &Sampler) -> Result<SamplingWeights, Settled> {
        let engine = self.engine(&row.base_model)?;
        let (weights, bytes) = match &row.folder {
            Some(folder) => {
                let folder = self.shared.folders.join(folder);
                (engine.load_weights(&folder)?, size_of(&folder)?)
            }
            None => (engine.base_weights(), 0),
        };
        self.remember(&row.id, &row.base_model, weights.clone(), bytes);
        Ok(weights)
    }

    /// Keeps weights ready to sample from.
    pub(super) fn remember(
        &mut self,
        id: &SamplerId,
        base: &str,
        weights: SamplingWeights,
        bytes: u64,
    ) {
        self.forget_weights();
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let ready = Ready { base: base.to_owned(), weights, bytes, used: 0 };
        self.running.remember(id, ready, self.shared.options.limits.sampler_weight_bytes);
    }

    /// Forgets the weights of sampling sessions that are over.
    pub(super) fn forget_weights(&mut self) {
        let store = self.shared.store();
        self.running.retain_weights(|id| store.samplers.contains_key(id));
    }

    /// A sample is under way no more.
    fn end_sample(&mut self, key: &(String, Ticket)) -> Option<One> {
        let one = self.running.samples.remove(key)?;
        self.running.tickets.remove(&one.id);
        self.shared.queue.sampled(one.bytes);
        Some(one)
    }

    /// Stops a sample that nobody waits for. Anything else runs on: a model must not miss a step.
    pub(super) fn cancel(&mut self, id: &RequestId) {
        let Some(key) = self.running.tickets.get(id).cloned() else { return };
        self.end_sample(&key);
        if let Some(loaded) = self.engines.loaded(&key.0) {
            loaded.sampler.cancel(key.1);
        }
        settle(&self.shared, &mut self.shared.store(), id, Settled::cancelled());
    }

    /// Computes one batch of every model that samples, and answers what is finished.
    pub(super) fn step(&mut self) {
        let mut finished = Vec::new();
        let mut broken = Vec::new();
        for (name, loaded) in self.engines.busy() {
            loaded.used = Instant::now();
            match catch_unwind(AssertUnwindSafe(|| loaded.sampler.step())) {
                Ok(answers) => {
                    finished.extend(answers.into_iter().map(|(t, a)| ((name.clone(), t), a)));
                }
                Err(_) => broken.push(name.clone()),
            }
        }
        for name in broken {
            self.fail_all(&name);
        }
        let mut settled = Vec::with_capacity(finished.len());
        for (key, answer) in finished {
            let Some(one) = self.end_sample(&key) else { continue };
            let outcome = match answer {
                Ok(answer) => self.finish(&one, answer),
                Err(error) => error.into(),
            };
            settled.push((one.id, outcome));
        }
        if settled.is_empty() {
            return;
        }
        let mut store = self.shared.store();
        for (id, outcome) in settled {
            settle(&self.shared, &mut store, &id, outcome);
        }
    }

    /// The sampler of a model made a mistake: what it was doing is lost, the model is loaded anew.
    fn fail_all(&mut self, name: &str) {
        self.engines.drop_model(name);
        self.running.forget_weights_of(name);
        let lost: Vec<_> =
            self.running.samples.keys().filter(|key| key.0 == name).cloned().collect();
        for key in lost {
            let Some(one) = self.end_sample(&key) else { continue };
            let failed = Settled::failed(Fault::Server, "the server made a mistake while sampling");
            settle(&self.shared, &mut self.shared.store(), &one.id, failed);
        }
    }

    fn finish(&self, one: &One, answer: SampleOutput) -> Settled {
        let sampled: usize = answer.samples.iter().map(|sample| sample.tokens.len()).sum();
        let seconds = one.start.elapsed().as_secs_f64();
        #[expect(clippy::cast_precision_loss, reason = "for people")]
        let speed = sampled as f64 / seconds.max(1e-9);
        crate::log::job(format_args!(
            "sample {} {} + {sampled} tokens in {seconds:.3} s ({speed:.0} tokens/s)",
            one.sampler.id, one.prompt
        ));
        let wide = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
        self.shared.metrics.prompt_tokens.add(wide(one.prompt));
        self.shared.metrics.sampled_tokens.add(wide(sampled));
        let hits = answer.cache_hits.min(one.prompt);
        let hour = now().div_euclid(3_600_000_000);
        let used = [
            (What::Prefill, one.prompt - hits),
            (What::CachedPrefill, hits),
            (What::Sampled, sampled),
        ]
        .into_iter()
        .filter(|(_, n)| *n > 0)
        .map(|(what, n)| {
            let (session, base_model) =
                (one.sampler.session.clone(), one.sampler.base_model.clone());
            (Use { hour, session, base_model, what }, wide(n))
        })
        .collect();
        Settled::proto(response(one, answer).to_proto()).used(used)
    }
}

fn response(one: &One, answer: SampleOutput) -> SampleResponse {
    let sequences = answer
        .samples
        .into_iter()
        .map(|sample| SampledSequence {
            stop_reason: match sample.reason {
                Reason::Stop => StopReason::Stop,
                Reason::Length => StopReason::Length,
            },
            tokens: sample.tokens.into(),
            logprobs: Some(sample.logprobs.into()),
            topk_logprobs: sample.top_k.as_ref().map(topk),
            sequence_id: None,
        })
        .collect();
    let scores = answer.prompt;
    SampleResponse {
        sequences,
        prompt_logprobs: scores.logprobs.map(Into::into),
        topk_prompt_logprobs: scores.top_k.as_ref().map(topk),
        prompt_cache_hit_tokens: u32::try_from(answer.cache_hits).unwrap_or(u32::MAX),
        target_prompt_logprobs: scores
            .targets
            .zip(one.targets.as_ref())
            .and_then(|(s, t)| like(s, t)),
        prompt_alt_tokens: scores.alternatives.and_then(|table| alternatives(&table)),
    }
}

fn topk(table: &TopK) -> TopkLogprobs {
    let rows = table.tokens.chunks(table.k.max(1)).zip(table.logprobs.chunks(table.k.max(1)));
    TopkLogprobs::from_rows(rows.map(|(tokens, logprobs)| {
        let pairs = tokens.iter().copied().zip(logprobs.iter().copied());
        let known: Vec<(u32, f32)> = pairs.filter(|pair| *pair != (0, NO_LOGPROB)).collect();
        (!known.is_empty()).then_some(known)
    }))
}

fn alternatives(table: &TopK) -> Option<PromptAltTokens> {
    let shape = [table.tokens.len() / table.k.max(1), table.k];
    let tokens: Vec<i64> = table.tokens.iter().map(|token| i64::from(*token)).collect();
    Some(PromptAltTokens {
        tokens: TensorData::new(TensorValues::Int64(tokens.into()), shape).ok()?,
        logprobs: TensorData::new(TensorValues::Float32(table.logprobs.clone().into()), shape)
            .ok()?,
    })
}

/// The scores in the form that the targets were given in.
fn like(scores: Vec<f32>, targets: &TensorData) -> Option<TensorData> {
    let &[rows, width] = targets.shape().dims() else { return None };
    let (Some(starts), Some(columns)) = (targets.row_starts(), targets.columns()) else {
        return TensorData::new(TensorValues::Float32(scores.into()), [rows, width]).ok();
    };
    let mut listed = Vec::with_capacity(columns.len());
    for (row, bounds) in starts.windows(2).enumerate() {
        let (from, to) = (usize::try_from(bounds[0]).ok()?, usize::try_from(bounds[1]).ok()?);
        for column in &columns[from..to] {
            listed.push(*scores.get(row * width + usize::try_from(*column).ok()?)?);
        }
    }
    TensorData::sparse(listed, starts.to_vec(), columns.to_vec(), [rows, width]).ok()
}
