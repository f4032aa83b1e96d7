//! Requests to and outputs of a [`Sampler`](super::Sampler).

use std::sync::Arc;

use crate::decode::{DecodingParams, StopConditions};
use crate::lora::PackedLora;
use crate::tokenizer::Vocabulary;
use crate::train::check_tokens;
use crate::{Error, Result};
use tinkex_fairness::FairnessKey;
use tinkex_weights::ModelConfig;

/// Identifies a request of a [`Sampler`](super::Sampler).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SampleRequestId(pub(super) u64);

/// Weights to sample from: the base model, or a snapshot of an adapter.
///
/// Cheap to clone. Later training does not change a snapshot.
#[derive(Clone, Debug)]
pub struct ModelWeights {
    id: u64,
    lora: Option<Arc<PackedLora>>,
}

impl ModelWeights {
    /// Creates weights. `id` must be unique among different weights, because it is part of the
    /// cache key.
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

/// A sampling request: the completions to generate and the scores of the prompt to compute.
#[derive(Clone, Debug)]
pub struct SampleRequest {
    /// Prompt tokens; not empty.
    pub prompt: Vec<u32>,
    /// Number of completions, 1 to 65,536. Each completion has its own random numbers.
    pub samples: usize,
    /// Maximum number of tokens per completion, at least 1; `None` means the rest of the model's
    /// context, or of the KV cache if it is smaller.
    pub max_tokens: Option<usize>,
    /// Temperature, top-k and top-p.
    pub decoding: DecodingParams,
    /// Seed of the random numbers. Equal seeds, prompts, parameters and weights give equal tokens.
    pub seed: u64,
    /// Tokens and strings that end a completion.
    pub stop: StopConditions,
    /// Bytes of the tokens; required if `stop` contains a string.
    pub vocabulary: Option<Arc<Vocabulary>>,
    /// Whether to report log-probabilities at temperature 1 instead of `decoding.temperature`.
    pub raw_logprobs: bool,
    /// Number of most probable tokens to report per sampled token; 0 for none.
    pub top_k: usize,
    /// Scores of the prompt to compute.
    pub scoring: PromptScoring,
    /// User and session of the request. Users get equal shares of the sampler, and the sessions of
    /// a user divide the user's share equally. Has no influence on the output.
    pub fairness: FairnessKey,
}

/// Scores of a prompt to compute. Log-probabilities are always at temperature 1.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PromptScoring {
    /// Whether to report the log-probability of every prompt token except the first.
    pub logprobs: bool,
    /// Restricts `logprobs` and `top_k` to this number of tokens at the end of the prompt.
    pub last: Option<usize>,
    /// Number of most probable tokens to report per prompt token; 0 for none.
    pub top_k: usize,
    /// Tokens whose log-probability to report: the same number for every position except the first,
    /// row by row, with -1 for no token.
    pub targets: Option<Vec<i64>>,
    /// Number of alternative tokens to sample per position except the first, at the temperature of
    /// [`SampleRequest::decoding`] without top-k and top-p; 0 for none.
    pub alternatives: usize,
}

impl PromptScoring {
    /// Returns whether any scores are requested.
    fn is_requested(&self) -> bool {
        self.logprobs || self.top_k > 0 || self.targets.is_some() || self.alternatives > 0
    }
}

/// Output of a sampling request.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleOutput {
    /// Completions, in the order of their indices.
    pub samples: Vec<SampledCompletion>,
    /// Requested scores of the prompt.
    pub prompt: PromptScores,
    /// Number of prompt tokens that were found in the KV cache.
    pub cache_hits: usize,
}

/// One completion.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledCompletion {
    /// Sampled tokens, including the stop token or the token that completed a stop string.
    pub tokens: Vec<u32>,
    /// Log-probability of each token.
    pub logprobs: Vec<f32>,
    /// Reason why the completion ended.
    pub reason: StopReason,
    /// Most probable tokens at each position, if requested.
    pub top_k: Option<TopK>,
}

/// Reason why a completion ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// A stop token or stop string occurred.
    Stop,
    /// The completion reached its maximum length.
    Length,
}

/// The `k` most probable tokens of consecutive positions, in descending order of probability. Empty
/// entries have token 0 and log-probability -99999.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TopK {
    /// Number of entries per position.
    pub k: usize,
    /// Tokens, position by position.
    pub tokens: Vec<u32>,
    /// Log-probabilities of the tokens.
    pub logprobs: Vec<f32>,
}

/// Scores of a prompt. Fields that were not requested are `None`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PromptScores {
    /// Log-probability of each token; NaN for the first token and for tokens that were not
    /// requested.
    pub logprobs: Option<Vec<f32>>,
    /// Most probable tokens, one row per prompt token.
    pub top_k: Option<TopK>,
    /// Log-probabilities of the requested targets; 0 where no token was requested.
    pub targets: Option<Vec<f32>>,
    /// Sampled alternatives with their log-probabilities, one row per prompt token except the
    /// first.
    pub alternatives: Option<TopK>,
}

/// Maximum number of completions per request.
const MAX_SAMPLES: usize = 1 << 16;
/// Maximum number of entries in a table of top tokens.
const MAX_TOP_ENTRIES: usize = 1 << 24;

impl SampleRequest {
    /// Creates a request for one completion of `prompt` of at most `max_tokens` tokens, at
    /// temperature 1, with seed 0 and without stop conditions or scores.
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
            fairness: FairnessKey::default(),
        }
    }

    /// Validates the request for a model. Returns the maximum number of tokens per completion.
    pub(super) fn check(&self, model: &ModelConfig) -> Result<usize> {
        let len = self.prompt.len();
        if len == 0 {
            return Err(Error::invalid("prompt", "must not be empty"));
        }
        check_tokens("prompt", &self.prompt, model.vocab_size)?;
        if !(1..=MAX_SAMPLES).contains(&self.samples) {
            let reason = format!("{}, expected 1 to {MAX_SAMPLES}", self.samples);
            return Err(Error::invalid("num_samples", reason));
        }
        let context = model.max_positions;
        let limit = match self.max_tokens {
            Some(0) => return Err(Error::invalid("max_tokens", "0, expected at least 1")),
            Some(limit) => limit,
            None if self.scoring.is_requested() && len == context => 1,
            None => context.saturating_sub(len),
        };
        // The model does not read the last sampled token, so a prompt that is only scored may fill
        // the context.
        let fills_context = self.scoring.is_requested() && len == context && limit == 1;
        if !fills_context && (limit == 0 || len.saturating_add(limit) > context) {
            let reason = format!(
                "Prompt length plus max_tokens exceeds the model's context window: \
                 {len} + {} > {context}",
                limit.max(1)
            );
            return Err(Error::invalid("max_tokens", reason));
        }
        self.decoding.check()?;
        if self.stop.reads_bytes() && self.vocabulary.is_none() {
            return Err(Error::invalid("stop", "a stop string requires the vocabulary"));
        }
        for (field, rows, k) in [
            ("topk_prompt_logprobs", len, self.scoring.top_k),
            ("topk_sample_logprobs", limit, self.top_k),
            ("prompt_alt_tokens_k", len, self.scoring.alternatives),
        ] {
            if k > model.vocab_size {
                let reason = format!("{k}, but the model has {} tokens", model.vocab_size);
                return Err(Error::invalid(field, reason));
            }
            if k > 0 && rows.saturating_mul(k) > MAX_TOP_ENTRIES {
                let reason = format!("{rows} × {k} entries exceed the limit of {MAX_TOP_ENTRIES}");
                return Err(Error::invalid(field, reason));
            }
        }
        if let Some(last) = self.scoring.last
            && !(self.scoring.logprobs && (1..len).contains(&last))
        {
            let reason = format!(
                "{last} with a prompt of {len} tokens, expected 1 to {} with prompt_logprobs",
                len - 1
            );
            return Err(Error::invalid("prompt_logprobs_last_n", reason));
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
                let reason = "all targets are -1, expected at least one token";
                return Err(Error::invalid("target_prompt_logprobs", reason));
            }
        }
        Ok(limit)
    }
}
