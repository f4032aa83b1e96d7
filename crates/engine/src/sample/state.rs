//! Progress of a sampling request and of its completions.

use std::ops::Range;
use std::sync::Arc;

use tinkex_fairness::ShareId;

use super::observer::{SampledToken, TokenObserver};
use super::request::{
    ModelWeights, PromptScores, SampleOutput, SampleRequest, SampledCompletion, StopReason, TopK,
};
use crate::decode::{
    DecodingParams, NO_LOGPROB, SampleRng, StopMatcher, TokenSampler, log_normalizer, logprob,
};
use crate::kernel::Isa;
use crate::model::{log_probability, log_sum_exp};
use crate::tokenizer::Vocabulary;
use crate::{Error, Result};

/// A range of prompt positions.
#[derive(Clone, Copy, Debug)]
pub(super) struct PromptRows {
    pub(super) first: usize,
    pub(super) count: usize,
}

/// A request that is waiting or being computed.
#[derive(Debug)]
pub(super) struct ActiveRequest {
    pub(super) weights: ModelWeights,
    /// Share of the request's user and session.
    pub(super) share: ShareId,
    /// The request, without its prompt.
    pub(super) spec: SampleRequest,
    /// The prompt, which the sequences of all completions share.
    pub(super) prompt: Arc<[u32]>,
    /// Number of prompt tokens that were found in the KV cache.
    pub(super) cached_tokens: usize,
    /// Maximum number of tokens per completion.
    limit: usize,
    scores: PromptScores,
    /// Random numbers of the alternative tokens.
    alternatives_rng: SampleRng,
    /// Finished completions, by index.
    samples: Vec<Option<SampledCompletion>>,
    observer: Option<Box<dyn TokenObserver>>,
    error: Option<Error>,
}

impl ActiveRequest {
    pub(super) fn new(
        weights: ModelWeights,
        share: ShareId,
        mut spec: SampleRequest,
        limit: usize,
        observer: Option<Box<dyn TokenObserver>>,
    ) -> Self {
        let prompt: Arc<[u32]> = std::mem::take(&mut spec.prompt).into();
        let len = prompt.len();
        let scoring = &spec.scoring;
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
            alternatives_rng: SampleRng::alternatives(spec.seed, 0),
            samples: vec![None; spec.samples],
            cached_tokens: 0,
            observer,
            error: None,
            weights,
            share,
            spec,
            prompt,
            limit,
        }
    }

    /// Returns the first prompt row whose logits are needed. Rows before it may come from the
    /// cache. The last row is always needed.
    pub(super) fn first_scored_row(&self) -> usize {
        let last = self.prompt.len() - 1;
        let scoring = &self.spec.scoring;
        if scoring.alternatives > 0 {
            return 0;
        }
        let mut first = last;
        if scoring.logprobs || scoring.top_k > 0 {
            first = scoring.last.map_or(0, |count| last - count);
        }
        if let Some(targets) = &scoring.targets {
            let per_row = targets.len() / last;
            let used = targets.iter().position(|id| *id >= 0).map_or(last, |at| at / per_row);
            first = first.min(used);
        }
        first
    }

    /// Returns the part of these rows that must be scored.
    pub(super) fn scored(&self, rows: PromptRows) -> Range<usize> {
        let last = self.prompt.len() - 1;
        let scoring = &self.spec.scoring;
        if !scoring.logprobs
            && scoring.top_k == 0
            && scoring.targets.is_none()
            && scoring.alternatives == 0
        {
            return 0..0;
        }
        let start = self.first_scored_row().max(rows.first);
        start..(rows.first + rows.count).min(last).max(start)
    }

    /// Records the scores of the logits of row `row`, which predict token `row + 1`.
    pub(super) fn score(
        &mut self,
        isa: Isa,
        sampler: &mut TokenSampler,
        row: usize,
        logits: &[f32],
    ) {
        let normalizer = log_sum_exp(isa, logits);
        let logprob_of = |token: usize| log_probability(logits[token], normalizer);
        let scoring = &self.spec.scoring;
        let next = row + 1;
        let last = self.prompt.len() - 1;
        let requested = scoring.last.is_none_or(|count| row >= last - count);
        if requested && let Some(logprobs) = &mut self.scores.logprobs {
            logprobs[next] = logprob_of(self.prompt[next] as usize);
        }
        if requested && let Some(table) = &mut self.scores.top_k {
            fill(table, next, sampler.top(logits, scoring.top_k), |logit| {
                log_probability(logit, normalizer)
            });
        }
        if let Some(targets) = &scoring.targets
            && let Some(logprobs) = &mut self.scores.targets
        {
            let per_row = targets.len() / last;
            for k in row * per_row..(row + 1) * per_row {
                if let Ok(token) = usize::try_from(targets[k]) {
                    logprobs[k] = logprob_of(token);
                }
            }
        }
        if let Some(table) = &mut self.scores.alternatives {
            // A preempted prompt is scored again from row 0 and must draw the same random numbers.
            if row == 0 {
                self.alternatives_rng = SampleRng::alternatives(self.spec.seed, 0);
            }
            let params = DecodingParams {
                temperature: self.spec.decoding.temperature,
                ..DecodingParams::default()
            };
            let scaled = normalizer_at(logits, params.temperature, normalizer);
            for k in row * table.k..(row + 1) * table.k {
                let uniform = self.alternatives_rng.uniform();
                match sampler.sample(logits, &params, scaled, uniform) {
                    Ok(token) => {
                        table.tokens[k] = token;
                        table.logprobs[k] = logprob_of(token as usize);
                    }
                    Err(error) => return self.error = Some(error),
                }
            }
        }
        if normalizer.is_nan() {
            self.error = Some(non_finite_logits(row));
        }
    }

    /// Creates the writer of the completion with index `sample`.
    pub(super) fn writer(&self, sample: usize) -> Box<CompletionWriter> {
        let number = u32::try_from(sample).unwrap_or(u32::MAX);
        Box::new(CompletionWriter {
            sample,
            limit: self.limit,
            rng: SampleRng::sample(self.spec.seed, number),
            matcher: self.spec.stop.matcher(),
            vocabulary: self.spec.vocabulary.clone(),
            reason: None,
            out: SampledCompletion {
                tokens: Vec::new(),
                logprobs: Vec::new(),
                reason: StopReason::Length,
                top_k: (self.spec.top_k > 0)
                    .then(|| TopK { k: self.spec.top_k, ..TopK::default() }),
            },
        })
    }

    /// Passes the scores of the prompt to the observer.
    pub(super) fn observe_prompt(&mut self) {
        if let Some(observer) = &mut self.observer {
            observer.prompt(&self.scores, self.cached_tokens);
        }
    }

    /// Passes the last token of a completion to the observer.
    pub(super) fn observe_token(&mut self, writer: &CompletionWriter) {
        if let Some(observer) = &mut self.observer
            && let Some(sampled) = writer.last_token()
        {
            observer.token(sampled);
        }
    }

    /// Stores the finished completion with index `sample`.
    pub(super) fn complete(&mut self, sample: usize, sampled: SampledCompletion) {
        self.samples[sample] = Some(sampled);
    }

    pub(super) fn fail(&mut self, error: Error) {
        self.error = Some(error);
    }

    pub(super) fn failed(&self) -> bool {
        self.error.is_some()
    }

    /// Returns whether all completions are finished or the request has failed.
    pub(super) fn is_done(&self) -> bool {
        self.failed() || self.samples.iter().all(Option::is_some)
    }

    pub(super) fn into_output(self) -> Result<SampleOutput> {
        match self.error {
            Some(Error::NonFiniteResult { what, index, value, .. }) => {
                let hint = match self.weights.lora() {
                    Some(_) => "the weights are too large; load an earlier checkpoint",
                    None => "the weights of the base model are too large; check its files",
                };
                Err(Error::NonFiniteResult { what, index, value, hint })
            }
            Some(error) => Err(error),
            None => Ok(SampleOutput {
                samples: self.samples.into_iter().flatten().collect(),
                prompt: self.scores,
                cache_hits: self.cached_tokens,
            }),
        }
    }
}

/// Samples the tokens of one completion.
#[derive(Debug)]
pub(super) struct CompletionWriter {
    /// Index of the completion in its request.
    sample: usize,
    /// Maximum number of tokens.
    limit: usize,
    rng: SampleRng,
    matcher: StopMatcher,
    vocabulary: Option<Arc<Vocabulary>>,
    /// Set when the completion is finished.
    reason: Option<StopReason>,
    out: SampledCompletion,
}

impl CompletionWriter {
    /// Samples the next token from its logits and records it. `sampler` has the buffers.
    pub(super) fn write(
        &mut self,
        isa: Isa,
        sampler: &mut TokenSampler,
        spec: &SampleRequest,
        logits: &[f32],
    ) -> Result<()> {
        let params = &spec.decoding;
        // Computed as in training, so that log-probabilities at temperature 1 have the same bits.
        let unscaled = log_sum_exp(isa, logits);
        if unscaled.is_nan() {
            return Err(non_finite_logits(self.out.tokens.len()));
        }
        let scaled = normalizer_at(logits, params.temperature, unscaled);
        let token = sampler.sample(logits, params, scaled, self.rng.uniform())?;
        let (normalizer, temperature) =
            if spec.raw_logprobs { (unscaled, 1.0) } else { (scaled, params.temperature) };
        let report = |logit: f32| {
            if temperature == 1.0 || temperature == 0.0 {
                log_probability(logit, normalizer)
            } else {
                logprob(logit, temperature, normalizer)
            }
        };
        self.out.tokens.push(token);
        self.out.logprobs.push(report(logits[token as usize]));
        if let Some(table) = &mut self.out.top_k {
            let row = self.out.tokens.len() - 1;
            table.tokens.resize((row + 1) * table.k, 0);
            table.logprobs.resize((row + 1) * table.k, NO_LOGPROB);
            fill(table, row, sampler.top(logits, spec.top_k), report);
        }
        let bytes = self.vocabulary.as_ref().map_or(&[][..], |vocabulary| vocabulary.bytes(token));
        if self.matcher.push(token, bytes) {
            self.reason = Some(StopReason::Stop);
        } else if self.out.tokens.len() == self.limit {
            self.reason = Some(StopReason::Length);
        }
        Ok(())
    }

    /// Returns the sampled tokens.
    pub(super) fn tokens(&self) -> &[u32] {
        &self.out.tokens
    }

    /// Returns the token that was sampled last.
    fn last_token(&self) -> Option<SampledToken<'_>> {
        let row = self.out.tokens.len().checked_sub(1)?;
        let (top_tokens, top_logprobs) = match &self.out.top_k {
            Some(table) => (&table.tokens[row * table.k..], &table.logprobs[row * table.k..]),
            None => (&[][..], &[][..]),
        };
        Some(SampledToken {
            completion: self.sample,
            token: self.out.tokens[row],
            logprob: self.out.logprobs[row],
            top_tokens,
            top_logprobs,
            stop: self.reason,
        })
    }

    pub(super) fn sample(&self) -> usize {
        self.sample
    }

    pub(super) fn is_done(&self) -> bool {
        self.reason.is_some()
    }

    /// Returns the completion. An unfinished completion has the stop reason `Length`.
    pub(super) fn finish(mut self: Box<Self>) -> SampledCompletion {
        self.out.reason = self.reason.unwrap_or(StopReason::Length);
        self.out
    }
}

/// Writes the most probable tokens of one row to a table.
fn fill(table: &mut TopK, row: usize, best: &[(f32, u32)], report: impl Fn(f32) -> f32) {
    for (i, (logit, token)) in best.iter().enumerate() {
        table.tokens[row * table.k + i] = *token;
        table.logprobs[row * table.k + i] = report(*logit);
    }
}

/// Returns `log Σ exp(logit / temperature)`, given the value at temperature 1.
fn normalizer_at(logits: &[f32], temperature: f64, unscaled: f64) -> f64 {
    if temperature == 1.0 || temperature == 0.0 {
        unscaled
    } else {
        log_normalizer(logits, temperature)
    }
}

/// Returns the error for logits of position `index` that contain NaN.
fn non_finite_logits(index: usize) -> Error {
    Error::NonFiniteResult {
        what: "a logit".to_owned(),
        index,
        value: f64::NAN,
        hint: "the weights of the model are too large",
    }
}
