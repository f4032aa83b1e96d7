//! Admission of sampling requests.

use std::sync::Arc;

use bytes::Bytes;
use tinkex_engine::decode::{DecodingParams, StopConditions};
use tinkex_engine::sample::{PromptScoring, SampleRequest as EngineRequest};
use tinkex_engine::tokenizer::Vocabulary;
use tinkex_fairness::FairnessKey;
use tinkex_store::error::ServerError;
use tinkex_store::store::{
    AdmittedRequest, RequestKind, RequestRecord, SamplerRecord, SequenceScope, Store,
};
use tinkex_store::user::Principal;
use tinkex_wire::codec::json;
use tinkex_wire::{ApiRequest as _, SampleRequest, Seq, StopCondition, TensorData};

use super::training::random_seed;
use super::{Admission, NextStep, Submission, digest, find_original, relay, submit};
use crate::fault::engine_error;
use crate::models::BaseModel;
use crate::operation::{EngineSampling, Operation, SampleOperation, TinkerSample};
use crate::training_data::unsupported_chunk;

/// Maximum number of samples of one request.
const MAX_SAMPLES: usize = 16_384;
/// Maximum number of tokens of all samples of one request.
const MAX_TOKENS: usize = 1 << 24;
/// Maximum total size of the stop strings of one request, in bytes. Their automaton needs about
/// thirty times as much memory.
const MAX_STOP_BYTES: usize = 64 << 10;
/// Maximum number of elements of all tables of prompt log-probabilities of one request.
const MAX_PROMPT_ELEMENTS: usize = 1 << 24;
/// Maximum number of elements of all tables of sample log-probabilities of one request.
const MAX_SAMPLE_ELEMENTS: usize = 1 << 25;

/// Admits a sampling request.
pub(crate) fn sample(
    admission: &Arc<Admission>,
    principal: &Principal,
    body: Bytes,
) -> Result<AdmittedRequest, ServerError> {
    let request: SampleRequest = json::decode(&body)?;
    request.validate()?;
    let Some(sampler) = request.sampling_session_id.clone() else {
        return Err(ServerError::invalid(
            "sampling_session_id: required; create a sampling session first",
        ));
    };
    let digest = digest::of_bytes(&body);
    let seq = request.seq_id.map(Seq::get);
    let store = admission.store_of(principal);
    // Look the sampling session up first: a retry is found by its id alone.
    store.sampler(&sampler)?;
    let scope = SequenceScope::Sampler(sampler.clone());
    // A retry of a request that was accepted before the sampling session ended gets the same id.
    let accepted = |store: &Store, error: ServerError| -> Result<AdmittedRequest, ServerError> {
        let original = seq.map(|seq| find_original(store, &scope, seq, &digest));
        original.transpose()?.flatten().ok_or(error)
    };
    let row = match store.open_sampler(&sampler) {
        Ok(row) => row.clone(),
        Err(error) => return accepted(store.all(), error),
    };
    store.open_session(&row.session)?;
    drop(store);
    let samples = request.num_samples;
    let seed = request.sampling_params.seed.unwrap_or_else(|| random_seed(admission));
    let operation = prepare(admission, &row, request, seed)?;
    let submission = Submission {
        kind: RequestKind::Sample,
        session: row.session,
        scope: scope.clone(),
        seq,
        digest: digest.clone(),
        seed,
        samples,
        tokens: 0,
        body,
        records: Vec::new(),
        next: NextStep::Enqueue(operation),
    };
    let mut store = admission.store();
    // Check again: the sampling session may have been closed while the request was validated, and
    // its weights may be released.
    if let Err(error) = store.open_sampler(&sampler) {
        return accepted(&store, error);
    }
    store.touch_sampler(&sampler);
    submit(admission, store, submission)
}

/// Validates a stored sampling request. Returns the step that enqueues the request again.
pub(super) fn restore(
    admission: &Admission,
    row: &RequestRecord,
    body: &Bytes,
) -> Result<NextStep, ServerError> {
    let request: SampleRequest = json::decode(body)?;
    let SequenceScope::Sampler(sampler) = &row.scope else {
        return Err(ServerError::Internal(
            "the stored request does not refer to a sampling session".to_owned(),
        ));
    };
    let sampler_row = admission.store().samplers.get(sampler).map(|entry| entry.row.clone());
    let sampler_row = sampler_row.ok_or_else(|| {
        ServerError::not_found(format!("sampling session {sampler} no longer exists"))
    })?;
    Ok(NextStep::Enqueue(prepare(admission, &sampler_row, request, row.seed)?))
}

/// Validates a request of a sampling session and converts it to an operation of the backend that
/// has the weights.
fn prepare(
    admission: &Admission,
    sampler: &SamplerRecord,
    request: SampleRequest,
    seed: u64,
) -> Result<Operation, ServerError> {
    if let Some(weights) = relay::weights(admission, &sampler.base_model, sampler.weights.as_ref())?
    {
        let account = admission.store().account(&sampler.session);
        return relay::sample(admission, weights, account, request, seed, None);
    }
    let base = admission.base_model(&sampler.base_model)?;
    let stop = stop_conditions(&base, request.sampling_params.stop.clone())?;
    let EngineSample { request: engine_request, extra_bytes } =
        engine_sample(admission, &base, &request, stop, seed)?;
    let sample = EngineSampling::Sample(Box::new(TinkerSample {
        sampler: sampler.id.clone(),
        request: engine_request,
        targets: request.target_prompt_logprobs,
        extra_bytes,
    }));
    Ok(Operation::Sample(SampleOperation::Engine(sample)))
}

/// A validated sampling request in the engine's form.
pub(crate) struct EngineSample {
    pub(crate) request: EngineRequest,
    /// Memory of the requested tables about the prompt and of the stop conditions, in bytes.
    pub(crate) extra_bytes: usize,
}

/// Stop conditions, with the vocabulary that is needed to match stop strings, if there are any.
pub(crate) type StopRule = (StopConditions, Option<Arc<Vocabulary>>);

/// Validates a request against the model and the server's limits, and converts it to the engine's
/// form. `stop` replaces the stop condition of the request.
pub(crate) fn engine_sample(
    admission: &Admission,
    base: &BaseModel,
    request: &SampleRequest,
    (stop, vocabulary): StopRule,
    seed: u64,
) -> Result<EngineSample, ServerError> {
    let Some(prompt) = request.prompt.to_tokens() else {
        return Err(unsupported_chunk("prompt", &request.prompt));
    };
    let prompt = prompt.to_vec();
    let params = &request.sampling_params;
    if params.max_tokens.is_none() && base.known_context().is_none() {
        return Err(ServerError::invalid(format!(
            "sampling_params.max_tokens: required, because the context length of {} is not known",
            base.name
        )));
    }
    check_context(base, prompt.len(), request)?;
    if request.num_samples == 0 {
        return Err(ServerError::invalid("num_samples: expected at least 1, got 0"));
    }
    let max_tokens = params.max_tokens.map_or(base.context(), to_usize);
    let samples = to_usize(request.num_samples);
    if samples > MAX_SAMPLES || samples.saturating_mul(max_tokens) > MAX_TOKENS {
        return Err(ServerError::invalid(format!(
            "num_samples: {samples} samples of up to {max_tokens} tokens; the limits are \
             {MAX_SAMPLES} samples and {MAX_TOKENS} tokens per request"
        )));
    }
    let vocab = base.vocab_size();
    check_tokens("prompt", &prompt, vocab)?;
    let decoding = DecodingParams {
        temperature: params.temperature,
        top_k: params.top_k.map_or(-1, i64::from),
        top_p: params.top_p,
    };
    decoding.check().map_err(engine_error)?;
    let elements = check_tables(request, prompt.len(), samples * max_tokens, vocab)?;
    let targets = match &request.target_prompt_logprobs {
        Some(targets) => Some(dense_targets(targets, prompt.len())?),
        None => None,
    };
    let scoring = PromptScoring {
        logprobs: request.prompt_logprobs == Some(true),
        last: request.prompt_logprobs_last_n.map(to_usize),
        top_k: to_usize(request.topk_prompt_logprobs),
        targets,
        alternatives: to_usize(request.prompt_alt_tokens_k),
    };
    let engine_request = EngineRequest {
        prompt,
        samples,
        max_tokens: params.max_tokens.map(to_usize),
        decoding,
        seed,
        stop,
        vocabulary,
        raw_logprobs: admission.raw_logprobs,
        top_k: to_usize(request.topk_sample_logprobs),
        scoring,
        // The worker sets the key when it starts the sample.
        fairness: FairnessKey::default(),
    };
    // Each element is a token and a log-probability, or a target and its log-probability.
    let table_bytes = elements * (size_of::<i64>() + size_of::<f32>());
    let extra_bytes = table_bytes + engine_request.stop.memory_bytes();
    Ok(EngineSample { request: engine_request, extra_bytes })
}

/// Checks that the prompt and `max_tokens` sampled tokens fit into the model's context window;
/// without `max_tokens`, the prompt and one sampled token must fit.
///
/// A request for scores of the prompt may fill the whole window with the prompt: every request must
/// sample at least one token, but the model does not read the last sampled token.
fn check_context(
    base: &BaseModel,
    prompt: usize,
    request: &SampleRequest,
) -> Result<(), ServerError> {
    if prompt == 0 {
        return Err(ServerError::invalid("prompt: expected at least one token"));
    }
    let context = base.context();
    let completion = match request.sampling_params.max_tokens {
        Some(0) => return Err(ServerError::invalid("max_tokens: expected at least 1, got 0")),
        Some(tokens) => to_usize(tokens),
        None => 1,
    };
    let scored = request.prompt_logprobs == Some(true)
        || request.topk_prompt_logprobs > 0
        || request.prompt_alt_tokens_k > 0
        || request.target_prompt_logprobs.is_some();
    let fills_context = scored && prompt == context && completion == 1;
    if prompt.saturating_add(completion) > context && !fills_context {
        return Err(ServerError::ContextLength(format!(
            "Prompt length plus max_tokens exceeds the model's context window: \
             {prompt} + {completion} > {context}"
        )));
    }
    Ok(())
}

/// Checks that all tokens of a field are in the vocabulary.
pub(crate) fn check_tokens(field: &str, tokens: &[u32], vocab: usize) -> Result<(), ServerError> {
    let Some(at) = tokens.iter().position(|token| *token as usize >= vocab) else { return Ok(()) };
    // Report the id as the client sent it: ids are signed in the protocol.
    let token = tokens[at].cast_signed();
    Err(ServerError::invalid(format!(
        "{field}[{at}]: token {token} is outside of the model's vocabulary of {vocab} tokens"
    )))
}

fn to_usize(n: u32) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

/// Checks the sizes of the requested tables, because even a short request can ask for tables of any
/// size. `tokens` is the maximum number of sampled tokens. Returns the number of elements of the
/// tables about the prompt.
fn check_tables(
    request: &SampleRequest,
    prompt: usize,
    tokens: usize,
    vocab: usize,
) -> Result<usize, ServerError> {
    let targets = request.target_prompt_logprobs.as_ref();
    let target_width = targets.and_then(|targets| targets.shape().dims().get(1).copied());
    let widths = [
        ("topk_prompt_logprobs", to_usize(request.topk_prompt_logprobs)),
        ("prompt_alt_tokens_k", to_usize(request.prompt_alt_tokens_k)),
        ("target_prompt_logprobs", target_width.unwrap_or(0)),
        ("topk_sample_logprobs", to_usize(request.topk_sample_logprobs)),
    ];
    if let Some((field, width)) = widths.iter().find(|(_, width)| *width > vocab) {
        return Err(ServerError::invalid(format!(
            "{field}: {width} exceeds the model's vocabulary of {vocab} tokens"
        )));
    }
    let [(_, top), (_, alternatives), (_, targets), (_, sampled)] = widths;
    let elements = prompt.saturating_mul(top + alternatives + targets);
    if elements > MAX_PROMPT_ELEMENTS {
        return Err(ServerError::invalid(format!(
            "topk_prompt_logprobs, prompt_alt_tokens_k, target_prompt_logprobs: {top} + \
             {alternatives} + {targets} values for each of {prompt} tokens, the limit is \
             {MAX_PROMPT_ELEMENTS} values in total"
        )));
    }
    if tokens.saturating_mul(sampled) > MAX_SAMPLE_ELEMENTS {
        return Err(ServerError::invalid(format!(
            "topk_sample_logprobs: {sampled} values for each of up to {tokens} tokens, the limit \
             is {MAX_SAMPLE_ELEMENTS} values in total"
        )));
    }
    Ok(elements)
}

/// Converts the stop condition of a request. The model's end-of-sequence tokens also stop a sample,
/// except if the stop condition is an empty list.
pub(crate) fn stop_conditions(
    base: &BaseModel,
    stop: Option<StopCondition>,
) -> Result<StopRule, ServerError> {
    let eos = base.eos().iter().copied();
    let texts = match stop {
        None => return Ok((StopConditions::new(eos, [""; 0]).map_err(engine_error)?, None)),
        Some(StopCondition::Tokens(tokens)) if tokens.is_empty() => {
            return Ok((StopConditions::default(), None));
        }
        Some(StopCondition::Tokens(tokens)) => {
            check_tokens("sampling_params.stop", &tokens, base.vocab_size())?;
            return Ok((
                StopConditions::new(eos.chain(tokens), [""; 0]).map_err(engine_error)?,
                None,
            ));
        }
        Some(StopCondition::Texts(texts)) if texts.is_empty() => {
            return Ok((StopConditions::default(), None));
        }
        Some(StopCondition::Texts(texts)) => texts,
        Some(StopCondition::Text(text)) => vec![text],
        Some(_) => {
            return Err(ServerError::invalid(
                "sampling_params.stop: must be a string, a list of strings, or a list of token ids",
            ));
        }
    };
    stop_at("sampling_params.stop", base, eos, &texts)
}

/// Creates stop conditions from `tokens` and from `texts`, of which there must be at least one.
/// `field` is the name of the request field for error messages.
///
/// # Errors
/// If the strings are too long, or the tokenizer of the model cannot be read.
pub(crate) fn stop_at(
    field: &str,
    base: &BaseModel,
    tokens: impl IntoIterator<Item = u32>,
    texts: &[String],
) -> Result<StopRule, ServerError> {
    let bytes: usize = texts.iter().map(String::len).sum();
    if bytes > MAX_STOP_BYTES {
        return Err(ServerError::invalid(format!(
            "{field}: {bytes} bytes, the limit is {MAX_STOP_BYTES} bytes in all strings"
        )));
    }
    let vocabulary = base.vocabulary().map_err(|error| {
        ServerError::invalid(format!(
            "{field}: cannot read the tokenizer that stop strings need: {error}; use stop token ids"
        ))
    })?;
    Ok((StopConditions::new(tokens, texts).map_err(engine_error)?, Some(vocabulary)))
}

/// Converts the targets to a dense matrix, with −1 for elements without a target.
fn dense_targets(targets: &TensorData, prompt: usize) -> Result<Vec<i64>, ServerError> {
    let invalid =
        |message: String| ServerError::invalid(format!("target_prompt_logprobs: {message}"));
    let (&[rows, width], Some(values)) = (targets.shape().dims(), targets.as_i64()) else {
        return Err(invalid("expected an int64 matrix".to_owned()));
    };
    if rows + 1 != prompt {
        return Err(invalid(format!(
            "expected {} rows for a prompt of {prompt} tokens, got {rows}",
            prompt - 1
        )));
    }
    let (Some(starts), Some(columns)) = (targets.row_starts(), targets.columns()) else {
        return Ok(values.to_vec());
    };
    let mut dense = vec![-1; rows * width];
    for (row, bounds) in starts.windows(2).enumerate() {
        let from = usize::try_from(bounds[0]).unwrap_or(0);
        let to = usize::try_from(bounds[1]).unwrap_or(0);
        for (value, column) in values[from..to].iter().zip(&columns[from..to]) {
            dense[row * width + usize::try_from(*column).unwrap_or(0)] = *value;
        }
    }
    Ok(dense)
}
