//! What a request and its continuations have come to so far.

use std::ops::Range;
use std::sync::Arc;

use super::request::{
    PromptScores, SampleOutput, SampleRequest, SampledCompletion, SamplingWeights, StopReason, TopK,
};
use crate::decode::{NO_LOGPROB, SampleRng, StopMatcher, TokenSampler, log_normalizer, logprob};
use crate::kernel::Isa;
use crate::model::{log_probability, log_sum_exp};
use crate::tokenizer::Vocabulary;
use crate::{Error, Result};

/// Consecutive positions of a prompt.
#[derive(Clone, Copy, Debug)]
pub(super) struct PromptRows {
    pub(super) first: usize,
    pub(super) count: usize,
}

/// A request on its way.
#[derive(Debug)]
pub(super) struct ActiveRequest {
    pub(super) weights: SamplingWeights,
    pub(super) asked: SampleRequest,
    pub(super) hits: usize,
    limit: usize,
    scores: PromptScores,
    alternatives: SampleRng,
    sampler: TokenSampler,
    samples: Vec<Option<SampledCompletion>>,
    error: Option<Error>,
}

impl ActiveRequest {
    pub(super) fn new(weights: SamplingWeights, asked: SampleRequest, limit: usize) -> Self {
        let len = asked.prompt.len();
        let scoring = &asked.scoring;
        let table = |k: usize, rows: usize| {
            (k > 0).then(|| TopK {
                k,
                tokens: vec![0; rows * k],
                logprobs: vec![NO_LOGPROB; rows * k],
            })
        };
        Self {
            scores: PromptScores {
                logprobs: scoring.logprobs.then(|| vec![f32::NAN; len]),
                top_k: table(scoring.top_k, len),
                targets: scoring.targets.as_ref().map(|targets| vec![0.0; targets.len()]),
                alternatives: table(scoring.alternatives, len - 1),
            },
            alternatives: SampleRng::alternatives(asked.seed, 0),
            sampler: TokenSampler::default(),
            samples: vec![None; asked.samples],
            hits: 0,
            error: None,
            weights,
            asked,
            limit,
        }
    }

    /// The first position whose row anyone asked about; the prompt's last row is always needed.
    fn first_wanted(&self) -> usize {
        let last = self.asked.prompt.len() - 1;
        let scoring = &self.asked.scoring;
        if scoring.alternatives > 0 {
            return 0;
        }
        let mut first = last;
        if scoring.logprobs || scoring.top_k > 0 {
            first = scoring.last.map_or(0, |count| last - count);
        }
        if let Some(targets) = &scoring.targets {
            let each = targets.len() / last;
            let used = targets.iter().position(|id| *id >= 0).map_or(last, |at| at / each);
            first = first.min(used);
        }
        first
    }

    /// How many tokens may come from the cache: rows that someone wants must be computed.
    pub(super) fn reusable(&self) -> usize {
        self.first_wanted()
    }

    /// Which of these rows are about a later token of the prompt that someone asked about.
    pub(super) fn wanted(&self, rows: PromptRows) -> Range<usize> {
        let last = self.asked.prompt.len() - 1;
        let scoring = &self.asked.scoring;
        if !scoring.logprobs
            && scoring.top_k == 0
            && scoring.targets.is_none()
            && scoring.alternatives == 0
        {
            return 0..0;
        }
        let start = self.first_wanted().max(rows.first);
        start..(rows.first + rows.count).min(last).max(start)
    }

    /// Takes in the logits of position `row`, which are about token `row + 1`.
    pub(super) fn score(&mut self, isa: Isa, row: usize, logits: &[f32]) {
        let mass = log_sum_exp(isa, logits);
        let at = |token: usize| log_probability(logits[token], mass);
        let scoring = &self.asked.scoring;
        let next = row + 1;
        let last = self.asked.prompt.len() - 1;
        let shown = scoring.last.is_none_or(|count| row >= last - count);
        if shown && let Some(logprobs) = &mut self.scores.logprobs {
            logprobs[next] = at(self.asked.prompt[next] as usize);
        }
        if shown && let Some(table) = &mut self.scores.top_k {
            fill(table, next, self.sampler.top(logits, scoring.top_k), |logit| {
                log_probability(logit, mass)
            });
        }
        if let (Some(targets), Some(found)) = (&scoring.targets, &mut self.scores.targets) {
            let each = targets.len() / last;
            for k in row * each..(row + 1) * each {
                if let Ok(token) = usize::try_from(targets[k]) {
                    found[k] = at(token);
                }
            }
        }
        if let Some(table) = &mut self.scores.alternatives {
            let draw = crate::decode::DecodingParams {
                temperature: self.asked.decoding.temperature,
                ..crate::decode::DecodingParams::default()
            };
            let bent = mass_at(isa, logits, draw.temperature, mass);
            for k in row * table.k..(row + 1) * table.k {
                let uniform = self.alternatives.uniform();
                match self.sampler.sample(logits, &draw, bent, uniform) {
                    Ok(token) => {
                        table.tokens[k] = token;
                        table.logprobs[k] = at(token as usize);
                    }
                    Err(error) => return self.error = Some(error),
                }
            }
        }
        if mass.is_nan() {
            self.error = Some(not_a_number(row));
        }
    }

    /// Who writes continuation `sample`.
    pub(super) fn writer(&self, sample: usize) -> Box<CompletionWriter> {
        let number = u32::try_from(sample).unwrap_or(u32::MAX);
        Box::new(CompletionWriter {
            sample,
            limit: self.limit,
            rng: SampleRng::sample(self.asked.seed, number),
            sampler: TokenSampler::default(),
            matcher: self.asked.stop.matcher(),
            vocabulary: self.asked.vocabulary.clone(),
            reason: None,
            out: SampledCompletion {
                tokens: Vec::new(),
                logprobs: Vec::new(),
                reason: StopReason::Length,
                top_k: (self.asked.top_k > 0)
                    .then(|| TopK { k: self.asked.top_k, ..TopK::default() }),
            },
        })
    }

    pub(super) fn put(&mut self, sample: usize, sampled: SampledCompletion) {
        self.samples[sample] = Some(sampled);
    }

    pub(super) fn fail(&mut self, error: Error) {
        self.error = Some(error);
    }

    pub(super) fn failed(&self) -> bool {
        self.error.is_some()
    }

    /// Whether nothing is left to do for it.
    pub(super) fn is_done(&self) -> bool {
        self.failed() || self.samples.iter().all(Option::is_some)
    }

    pub(super) fn into_answer(self) -> Result<SampleOutput> {
        match self.error {
            Some(error) => Err(error),
            None => Ok(SampleOutput {
                samples: self.samples.into_iter().flatten().collect(),
                prompt: self.scores,
                cache_hits: self.hits,
            }),
        }
    }
}

/// Writes one continuation.
#[derive(Debug)]
pub(super) struct CompletionWriter {
    sample: usize,
    limit: usize,
    rng: SampleRng,
    sampler: TokenSampler,
    matcher: StopMatcher,
    vocabulary: Option<Arc<Vocabulary>>,
    reason: Option<StopReason>,
    out: SampledCompletion,
}

impl CompletionWriter {
    /// Draws the next token.
    pub(super) fn write(&mut self, isa: Isa, asked: &SampleRequest, logits: &[f32]) -> Result<u32> {
        let draw = &asked.decoding;
        // At temperature 1 these are the bits that training gets.
        let plain = log_sum_exp(isa, logits);
        if plain.is_nan() {
            return Err(not_a_number(self.out.tokens.len()));
        }
        let bent = mass_at(isa, logits, draw.temperature, plain);
        let token = self.sampler.sample(logits, draw, bent, self.rng.uniform())?;
        let (mass, temperature) =
            if asked.raw_logprobs { (plain, 1.0) } else { (bent, draw.temperature) };
        let report = |logit: f32| {
            if temperature == 1.0 || temperature == 0.0 {
                log_probability(logit, mass)
            } else {
                logprob(logit, temperature, mass)
            }
        };
        self.out.tokens.push(token);
        self.out.logprobs.push(report(logits[token as usize]));
        if let Some(table) = &mut self.out.top_k {
            let row = self.out.tokens.len() - 1;
            table.tokens.resize((row + 1) * table.k, 0);
            table.logprobs.resize((row + 1) * table.k, NO_LOGPROB);
            fill(table, row, self.sampler.top(logits, asked.top_k), report);
        }
        let bytes = self.vocabulary.as_ref().map_or(&[][..], |vocabulary| vocabulary.bytes(token));
        if self.matcher.push(token, bytes) {
            self.reason = Some(StopReason::Stop);
        } else if self.out.tokens.len() == self.limit {
            self.reason = Some(StopReason::Length);
        }
        Ok(token)
    }

    pub(super) fn sample(&self) -> usize {
        self.sample
    }

    pub(super) fn is_done(&self) -> bool {
        self.reason.is_some()
    }

    pub(super) fn finish(mut self: Box<Self>) -> SampledCompletion {
        self.out.reason = self.reason.unwrap_or(StopReason::Length);
        self.out
    }
}

fn fill(table: &mut TopK, row: usize, best: &[(f32, u32)], report: impl Fn(f32) -> f32) {
    for (i, (logit, token)) in best.iter().enumerate() {
        table.tokens[row * table.k + i] = *token;
        table.logprobs[row * table.k + i] = report(*logit);
    }
}

/// `log Σ exp(logit / temperature)`; `plain` is the one at temperature 1.
fn mass_at(_: Isa, logits: &[f32], temperature: f64, plain: f64) -> f64 {
    if temperature == 1.0 || temperature == 0.0 {
        plain
    } else {
        log_normalizer(logits, temperature)
    }
}

fn not_a_number(index: usize) -> Error {
    Error::NonFiniteResult {
        what: "the logits".to_owned(),
        index,
        value: f64::NAN,
        hint: "the weights no longer compute numbers; load an earlier checkpoint",
    }
}
