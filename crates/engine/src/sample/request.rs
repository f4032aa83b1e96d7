//! What is asked of a sampler, and what it answers.

use std::sync::Arc;

use crate::decode::{DecodingParams, StopConditions};
use crate::file::ModelConfig;
use crate::lora::PackedLora;
use crate::tokenizer::Vocabulary;
use crate::train::check_tokens;
use crate::{Error, Result};

/// Names a request from [`Sampler::add`](super::Sampler::add) to its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SampleRequestId(pub(super) u64);

/// SamplingWeights to sample from: the base model, or an adapter as it was when this was made.
///
/// Cheap to clone. What is trained later changes nothing here.
#[derive(Clone, Debug)]
pub struct SamplingWeights {
    id: u64,
    lora: Option<Arc<PackedLora>>,
}

impl SamplingWeights {
    /// `id` must tell different weights apart: the cache is keyed by it.
    pub(crate) fn new(id: u64, lora: Option<Arc<PackedLora>>) -> Self {
        Self { id, lora }
    }

    pub(super) fn id(&self) -> u64 {
        self.id
    }

    pub(super) fn lora(&self) -> Option<&PackedLora> {
        self.lora.as_deref()
    }
}

/// What to write, and what to say about the prompt.
#[derive(Clone, Debug)]
pub struct SampleRequest {
    /// What the model reads first; not empty.
    pub prompt: Vec<u32>,
    /// How many continuations, each with random numbers of its own.
    pub samples: usize,
    /// How many tokens at most; `None` fills the context.
    pub max_tokens: Option<usize>,
    /// How tokens are drawn.
    pub decoding: DecodingParams,
    /// The same seed, prompt, settings and weights give the same tokens.
    pub seed: u64,
    /// What ends a continuation.
    pub stop: StopConditions,
    /// The bytes of tokens; needed only if a stop is a text.
    pub vocabulary: Option<Arc<Vocabulary>>,
    /// Report log-probabilities as the model gives them, not as the temperature bends them.
    pub raw_logprobs: bool,
    /// How many of the likeliest tokens to report for every written token.
    pub top_k: usize,
    /// What to say about the prompt.
    pub scoring: PromptScoring,
}

/// What to say about a prompt. Its log-probabilities know no temperature.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PromptScoring {
    /// The log-probability of every token of the prompt.
    pub logprobs: bool,
    /// Only for the last so many tokens.
    pub last: Option<usize>,
    /// How many of the likeliest tokens to report for every position.
    pub top_k: usize,
    /// Tokens to score: as many for every position but the first, -1 for none.
    pub targets: Option<Vec<i64>>,
    /// How many alternatives to draw for every position but the first.
    pub alternatives: usize,
}

/// What came of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleOutput {
    /// The continuations, in order.
    pub samples: Vec<SampledCompletion>,
    /// What was asked about the prompt.
    pub prompt: PromptScores,
    /// Tokens of the prompt that did not have to be computed.
    pub cache_hits: usize,
}

/// One continuation.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledCompletion {
    /// Its tokens, the one that stopped it included.
    pub tokens: Vec<u32>,
    /// The log-probability of each.
    pub logprobs: Vec<f32>,
    /// Why it ended.
    pub reason: StopReason,
    /// The likeliest tokens at each place, if asked for.
    pub top_k: Option<TopK>,
}

/// Why a continuation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// At one of the stops.
    Stop,
    /// It was long enough.
    Length,
}

/// The `k` likeliest tokens of consecutive positions, best first. A place that has none holds
/// token 0 and -99999.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TopK {
    /// How many for each position.
    pub k: usize,
    /// Position by position.
    pub tokens: Vec<u32>,
    /// Of the same tokens.
    pub logprobs: Vec<f32>,
}

/// What was found out about a prompt.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PromptScores {
    /// One for each token; NaN for the first and for those not asked about.
    pub logprobs: Option<Vec<f32>>,
    /// One row for each token.
    pub top_k: Option<TopK>,
    /// Aligned with the targets that were given; 0 for those not asked about.
    pub targets: Option<Vec<f32>>,
    /// Tokens and their log-probabilities: one row for each token but the first.
    pub alternatives: Option<TopK>,
}

/// Continuations of one request: what is kept for each has to fit somewhere.
const MOST_SAMPLES: usize = 1 << 16;
/// TensorValues in one table of top tokens.
const MOST_TOP: usize = 1 << 24;

impl SampleRequest {
    /// One continuation of `prompt`, at most `max_tokens` long, drawn at temperature 1.
    #[must_use]
    pub fn new(prompt: Vec<u32>, max_tokens: usize) -> Self {
        Self {
            prompt,
            samples: 1,
            max_tokens: Some(max_tokens),
            decoding: DecodingParams::default(),
            seed: 0,
            stop: StopConditions::default(),
            vocabulary: None,
            raw_logprobs: false,
            top_k: 0,
            scoring: PromptScoring::default(),
        }
    }

    /// How many tokens a continuation has at most.
    pub(super) fn check(&self, model: &ModelConfig) -> Result<usize> {
        let len = self.prompt.len();
        if len == 0 {
            return Err(Error::invalid("prompt", "it is empty"));
        }
        check_tokens("prompt", &self.prompt, model.vocab_size)?;
        if !(1..=MOST_SAMPLES).contains(&self.samples) {
            let why = format!("{}, expected 1 to {MOST_SAMPLES}", self.samples);
            return Err(Error::invalid("num_samples", why));
        }
        let most = model.max_positions;
        let limit = match self.max_tokens {
            Some(0) => return Err(Error::invalid("max_tokens", "0, expected at least 1")),
            Some(limit) => limit,
            None => most.saturating_sub(len),
        };
        if limit == 0 || len.saturating_add(limit) > most {
            let why = format!(
                "Prompt length plus max_tokens exceeds the model's context window: \
                 {len} + {} > {most}",
                limit.max(1)
            );
            return Err(Error::invalid("max_tokens", why));
        }
        self.decoding.check()?;
        if self.stop.reads_bytes() && self.vocabulary.is_none() {
            return Err(Error::invalid("stop", "a text needs a vocabulary to be found in"));
        }
        for (field, rows, k) in [
            ("topk_prompt_logprobs", len, self.scoring.top_k),
            ("topk_sample_logprobs", limit, self.top_k),
            ("prompt_alt_tokens_k", len, self.scoring.alternatives),
        ] {
            if k > model.vocab_size {
                let why = format!("{k}, but the model has {} tokens", model.vocab_size);
                return Err(Error::invalid(field, why));
            }
            if k > 0 && rows.saturating_mul(k) > MOST_TOP {
                let why = format!("{rows} × {k} are more than {MOST_TOP}");
                return Err(Error::invalid(field, why));
            }
        }
        if let Some(last) = self.scoring.last
            && !(self.scoring.logprobs && (1..len).contains(&last))
        {
            let why = format!(
                "{last} with a prompt of {len}: expected prompt_logprobs and 1 to {}",
                len - 1
            );
            return Err(Error::invalid("prompt_logprobs_last_n", why));
        }
        if let Some(targets) = &self.scoring.targets {
            if len < 2 || targets.is_empty() || targets.len() % (len - 1) != 0 {
                return Err(Error::Length {
                    field: "target_prompt_logprobs".to_owned(),
                    expected: len - 1,
                    got: targets.len(),
                });
            }
            let vocab = i64::try_from(model.vocab_size).unwrap_or(i64::MAX);
            if let Some(index) = targets.iter().position(|id| !(-1..vocab).contains(id)) {
                return Err(Error::TokenOutOfRange {
                    field: "target_prompt_logprobs".to_owned(),
                    index,
                    token: targets[index],
                    vocab: model.vocab_size,
                });
            }
            if targets.iter().all(|id| *id == -1) {
                return Err(Error::invalid("target_prompt_logprobs", "no token is asked about"));
            }
        }
        Ok(limit)
    }
}
