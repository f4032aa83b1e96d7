//! [`GenerationRequest`]: the parameters of an inference request, independent of the API.

use tinkex_engine::decode::StopConditions;
use tinkex_engine::sample::SampleRequest as EngineRequest;
use tinkex_wire::{ApiRequest as _, SampleRequest, SamplingParams, StopCondition};

use super::token_buffer::GeneratedToken;
use crate::admit::{EngineSample, check_tokens, engine_sample, random_seed, stop_at};
use crate::error::ServerError;
use crate::models::BaseModel;
use crate::state::ServerState;

/// Maximum number of stop strings. The worker searches every sampled token for all of them, which
/// delays the whole batch.
const MAX_STOP_STRINGS: usize = 256;
/// Approximate memory of a completion besides its tokens, in bytes: the states of the sampler, of
/// the decoder and of the parser.
const COMPLETION_BYTES: usize = 1 << 10;

/// Parameters of an inference request. The tokens are those of a Tinker sample with the same
/// parameters.
#[derive(Clone, Debug)]
pub(crate) struct GenerationRequest {
    /// Prompt tokens; not empty.
    pub(crate) prompt: Vec<u32>,
    /// Number of completions (`n`), at least 1.
    pub(crate) completions: u32,
    /// Maximum number of tokens per completion, at least 1; `None` means the rest of the context,
    /// or of the KV cache if it is smaller.
    pub(crate) max_tokens: Option<u32>,
    /// Temperature; 0 selects the most probable token.
    pub(crate) temperature: f64,
    pub(crate) top_p: f64,
    /// Number of most probable tokens to sample from; `None` means all.
    pub(crate) top_k: Option<u32>,
    /// Seed of the random numbers; random if `None`.
    pub(crate) seed: Option<u64>,
    /// Strings that end a completion. The end-of-sequence tokens of the model end it too.
    pub(crate) stop_texts: Vec<String>,
    /// Further tokens that end a completion.
    pub(crate) stop_tokens: Vec<u32>,
    /// Whether completions continue after the end-of-sequence tokens of the model.
    pub(crate) ignore_eos: bool,
    /// Number of most probable tokens to report per sampled token; 0 for none.
    pub(crate) top_logprobs: u32,
    /// Number of most probable tokens to report per prompt token, with the log-probabilities of the
    /// prompt; `None` reports no scores of the prompt.
    pub(crate) prompt_logprobs: Option<u32>,
}

/// A validated request and the memory that it may need.
pub(super) struct PreparedGeneration {
    pub(super) request: EngineRequest,
    /// Bytes of the prompt, of its tables, of the completions and of all tokens that the buffer may
    /// hold.
    pub(super) bytes: usize,
}

impl GenerationRequest {
    /// Creates a request for one completion at temperature 1, limited by the context only.
    pub(crate) fn new(prompt: Vec<u32>) -> Self {
        Self {
            prompt,
            completions: 1,
            max_tokens: None,
            temperature: 1.0,
            top_p: 1.0,
            top_k: None,
            seed: None,
            stop_texts: Vec::new(),
            stop_tokens: Vec::new(),
            ignore_eos: false,
            top_logprobs: 0,
            prompt_logprobs: None,
        }
    }

    /// Converts the request to a sample of the Tinker API and the seed. An upstream evaluates the
    /// stop conditions: stop strings replace stop tokens, because the API has one or the other.
    pub(super) fn into_sample(
        self,
        state: &ServerState,
    ) -> Result<(SampleRequest, u64), ServerError> {
        let seed = self.seed.unwrap_or_else(|| random_seed(state));
        let stop = match (self.stop_texts.is_empty(), self.stop_tokens.is_empty()) {
            (false, _) => Some(StopCondition::Texts(self.stop_texts.clone())),
            (true, false) => Some(StopCondition::Tokens(self.stop_tokens.clone())),
            (true, true) => None,
        };
        let mut sample = self.sample();
        sample.sampling_params.stop = stop;
        sample.validate()?;
        Ok((sample, seed))
    }

    /// Returns the sample of the Tinker API with the same parameters, without stop conditions and
    /// seed.
    fn sample(self) -> SampleRequest {
        let mut params = SamplingParams::new().temperature(self.temperature).top_p(self.top_p);
        (params.max_tokens, params.top_k) = (self.max_tokens, self.top_k);
        SampleRequest::new(self.prompt, params)
            .num_samples(self.completions)
            .topk_sample_logprobs(self.top_logprobs)
            .prompt_logprobs(Some(self.prompt_logprobs.is_some()))
            .topk_prompt_logprobs(self.prompt_logprobs.unwrap_or(0))
    }

    /// Validates the request for a model and the server's limits, as a Tinker sample.
    pub(super) fn prepare(
        self,
        state: &ServerState,
        base: &BaseModel,
    ) -> Result<PreparedGeneration, ServerError> {
        let stop_strings = self.stop_texts.len();
        if stop_strings > MAX_STOP_STRINGS {
            let message = format!("stop: {stop_strings} strings, the limit is {MAX_STOP_STRINGS}");
            return Err(ServerError::invalid(message));
        }
        let eos = base.eos().iter().copied().filter(|_| !self.ignore_eos);
        check_tokens("stop_token_ids", &self.stop_tokens, base.vocab_size())?;
        let tokens = eos.chain(self.stop_tokens.iter().copied());
        let stop = match self.stop_texts.is_empty() {
            true => (StopConditions::new(tokens, [""; 0])?, None),
            false => stop_at("stop", base, tokens, &self.stop_texts)?,
        };
        let prompt_tokens = self.prompt.len();
        let seed = self.seed.unwrap_or_else(|| random_seed(state));
        let sample = self.sample();
        sample.validate()?;
        let EngineSample { request, extra_bytes } =
            engine_sample(state, base, &sample, stop, seed)?;
        let context = base.context();
        let tokens = request.max_tokens.unwrap_or(context.saturating_sub(prompt_tokens));
        let token_bytes = size_of::<GeneratedToken>() + request.top_k * size_of::<(u32, f32)>();
        let completion_bytes = tokens.saturating_mul(token_bytes).saturating_add(COMPLETION_BYTES);
        let bytes = (prompt_tokens * size_of::<u32>())
            .saturating_add(extra_bytes)
            .saturating_add(request.samples.saturating_mul(completion_bytes));
        Ok(PreparedGeneration { request, bytes })
    }
}
