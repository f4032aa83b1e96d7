//! Conversion of a [`GenerationRequest`] to a sample of the engine or of an upstream.

use tinkex_engine::decode::StopConditions;
use tinkex_engine::sample::SampleRequest as EngineRequest;
use tinkex_inference::{GeneratedToken, GenerationRequest};
use tinkex_store::error::ServerError;
use tinkex_wire::{ApiRequest as _, SampleRequest, SamplingParams, StopCondition};

use crate::admit::{Admission, EngineSample, check_tokens, engine_sample, random_seed, stop_at};
use crate::fault::engine_error;
use crate::models::BaseModel;

/// Maximum number of stop strings. The worker checks every sampled token against all stop strings,
/// which delays the whole batch.
const MAX_STOP_STRINGS: usize = 256;
/// Approximate memory of a completion besides its tokens, in bytes: the states of the sampler, of
/// the decoder and of the parser.
const COMPLETION_BYTES: usize = 1 << 10;

/// A validated request and the memory that it may need.
pub(super) struct PreparedGeneration {
    pub(super) request: EngineRequest,
    /// Bytes of the prompt, of the requested tables about the prompt, and of all tokens of the
    /// completions, which the channel to the client may hold.
    pub(super) bytes: usize,
}

/// Converts a request to a sampling request of the Tinker API. Returns that request and its seed.
///
/// The upstream evaluates the stop conditions. Stop strings replace stop tokens, because a request
/// of the Tinker API has either stop strings or stop tokens.
pub(super) fn upstream_sample(
    admission: &Admission,
    request: GenerationRequest,
) -> Result<(SampleRequest, u64), ServerError> {
    let seed = request.seed.unwrap_or_else(|| random_seed(admission));
    let stop = match (request.stop_texts.is_empty(), request.stop_tokens.is_empty()) {
        (false, _) => Some(StopCondition::Texts(request.stop_texts.clone())),
        (true, false) => Some(StopCondition::Tokens(request.stop_tokens.clone())),
        (true, true) => None,
    };
    let mut sample = tinker_sample(request);
    sample.sampling_params.stop = stop;
    sample.validate()?;
    Ok((sample, seed))
}

/// Returns the sampling request of the Tinker API with the same parameters, but without stop
/// conditions and seed.
fn tinker_sample(request: GenerationRequest) -> SampleRequest {
    let mut params = SamplingParams::new().temperature(request.temperature).top_p(request.top_p);
    params.max_tokens = request.max_tokens;
    params.top_k = request.top_k;
    SampleRequest::new(request.prompt, params)
        .num_samples(request.completions)
        .topk_sample_logprobs(request.top_logprobs)
        .prompt_logprobs(Some(request.prompt_logprobs.is_some()))
        .topk_prompt_logprobs(request.prompt_logprobs.unwrap_or(0))
}

/// Validates a request against a model of the engine and the server's limits, by the same rules as
/// a sampling request of the Tinker API.
pub(super) fn prepare(
    admission: &Admission,
    base: &BaseModel,
    request: GenerationRequest,
) -> Result<PreparedGeneration, ServerError> {
    let stop_strings = request.stop_texts.len();
    if stop_strings > MAX_STOP_STRINGS {
        let message = format!("stop: {stop_strings} strings, the limit is {MAX_STOP_STRINGS}");
        return Err(ServerError::invalid(message));
    }
    let eos = base.eos().iter().copied().filter(|_| !request.ignore_eos);
    check_tokens("stop_token_ids", &request.stop_tokens, base.vocab_size())?;
    let tokens = eos.chain(request.stop_tokens.iter().copied());
    let stop = if request.stop_texts.is_empty() {
        (StopConditions::new(tokens, [""; 0]).map_err(engine_error)?, None)
    } else {
        stop_at("stop", base, tokens, &request.stop_texts)?
    };
    let prompt_tokens = request.prompt.len();
    let seed = request.seed.unwrap_or_else(|| random_seed(admission));
    let sample = tinker_sample(request);
    sample.validate()?;
    let EngineSample { request, extra_bytes } =
        engine_sample(admission, base, &sample, stop, seed)?;
    let context = base.context();
    let tokens = request.max_tokens.unwrap_or(context.saturating_sub(prompt_tokens));
    let token_bytes = size_of::<GeneratedToken>() + request.top_k * size_of::<(u32, f32)>();
    let completion_bytes = tokens.saturating_mul(token_bytes).saturating_add(COMPLETION_BYTES);
    let bytes = (prompt_tokens * size_of::<u32>())
        .saturating_add(extra_bytes)
        .saturating_add(request.samples.saturating_mul(completion_bytes));
    Ok(PreparedGeneration { request, bytes })
}
