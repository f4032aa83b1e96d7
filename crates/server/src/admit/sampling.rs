//! Samples.

use std::sync::Arc;

use bytes::Bytes;
use tinkex_engine::decode::{DecodingParams, StopConditions};
use tinkex_engine::sample::{PromptScoring, SampleRequest as Asked};
use tinkex_wire::codec::json;
use tinkex_wire::{
    ApiRequest as _, InputChunk, RequestId, SampleRequest, Seq, StopCondition, TensorData,
};

use super::training::{base_model, random};
use super::{Intake, Next, digest, session, submit};
use crate::error::ApiError;
use crate::models::BaseModel;
use crate::state::Shared;
use crate::store::{Kind, Line, Request};
use crate::work::{Sample, Work};

/// Samples of one request, and tokens of all of them.
const MOST_SAMPLES: usize = 16_384;
const MOST_TOKENS: usize = 1 << 24;
/// Cells of all tables about the prompt, and of those about the samples.
const MOST_CELLS: usize = 1 << 24;
const MOST_TOP_CELLS: usize = 1 << 25;

/// Takes a sample in.
pub(crate) fn sample(shared: &Arc<Shared>, body: Bytes) -> Result<RequestId, ApiError> {
    let call: SampleRequest = json::decode(&body)?;
    call.validate()?;
    let Some(sampler) = call.sampling_session_id.clone() else {
        return Err(ApiError::bad(
            "sampling_session_id: create a sampling session first; this server samples from nothing else",
        ));
    };
    let mut store = shared.store();
    let known = store.samplers.get(&sampler).map(|kept| kept.row.clone());
    let Some(row) = known else {
        return Err(ApiError::not_found(format!("there is no sampling session {sampler}")));
    };
    session(&mut store, &row.session)?;
    drop(store);
    let base = base_model(shared, &row.base_model)?;
    let digest = digest::of_bytes(&body);
    let (samples, seq) = (call.num_samples, call.seq_id.map(Seq::get));
    let seed = call.sampling_params.seed.unwrap_or_else(random);
    let sample = prepare(shared, base, call, seed)?;
    let intake = Intake {
        kind: Kind::Sample,
        session: row.session,
        line: Line::Sampler(sampler),
        seq,
        digest,
        seed,
        samples,
        body,
        facts: Vec::new(),
        next: Next::Work(Work::Sample(Box::new(sample))),
    };
    submit(shared, shared.store(), intake)
}

pub(super) fn again(shared: &Shared, row: &Request, body: &Bytes) -> Result<Next, ApiError> {
    let call: SampleRequest = json::decode(body)?;
    let Line::Sampler(sampler) = &row.line else {
        return Err(ApiError::bad("it is not a sample"));
    };
    let known = shared.store().samplers.get(sampler).map(|kept| kept.row.base_model.clone());
    let base = known.ok_or_else(|| ApiError::not_found("its sampling session is gone"))?;
    let sample = prepare(shared, base_model(shared, &base)?, call, row.seed)?;
    Ok(Next::Work(Work::Sample(Box::new(sample))))
}

fn prepare(
    shared: &Shared,
    base: &BaseModel,
    call: SampleRequest,
    seed: u64,
) -> Result<Sample, ApiError> {
    let Some(sampler) = call.sampling_session_id.clone() else {
        return Err(ApiError::bad("sampling_session_id: is missing"));
    };
    let strange = call.prompt.chunks.iter().find(|c| !matches!(c, InputChunk::EncodedText { .. }));
    if let Some(chunk) = strange {
        return Err(ApiError::bad(format!(
            "prompt: chunk type {} is not supported by this server",
            chunk.kind()
        )));
    }
    let prompt = call.prompt.to_tokens().unwrap_or_default().to_vec();
    let params = &call.sampling_params;
    check_context(base, prompt.len(), params.max_tokens)?;
    if call.num_samples == 0 {
        return Err(ApiError::bad("num_samples: 0, expected at least 1"));
    }
    let longest = params.max_tokens.map_or(base.config.max_positions, |n| n as usize);
    let (samples, most) = (call.num_samples as usize, MOST_TOKENS);
    if samples > MOST_SAMPLES || samples.saturating_mul(longest) > most {
        return Err(ApiError::bad(format!(
            "num_samples: {samples} of up to {longest} tokens; one request may ask for \
             {MOST_SAMPLES} samples and {most} tokens at most"
        )));
    }
    let vocab = base.config.vocab_size;
    if let Some(at) = prompt.iter().position(|token| *token as usize >= vocab) {
        let token = prompt[at];
        return Err(ApiError::bad(format!(
            "prompt[{at}] is token {token}, but the model has {vocab} tokens"
        )));
    }
    let (stop, vocabulary) = stop(base, params.stop.clone())?;
    let draw = DecodingParams {
        temperature: params.temperature,
        top_k: params.top_k.map_or(-1, i64::from),
        top_p: params.top_p,
    };
    draw.check()?;
    let count = |n: u32| usize::try_from(n).unwrap_or(usize::MAX);
    let cells = check_tables(&call, prompt.len(), samples * longest, vocab)?;
    let targets = match &call.target_prompt_logprobs {
        Some(targets) => Some(dense_targets(targets, prompt.len())?),
        None => None,
    };
    let scoring = PromptScoring {
        logprobs: call.prompt_logprobs == Some(true),
        last: call.prompt_logprobs_last_n.map(count),
        top_k: count(call.topk_prompt_logprobs),
        targets,
        alternatives: count(call.prompt_alt_tokens_k),
    };
    let request = Asked {
        prompt,
        samples: count(call.num_samples),
        max_tokens: params.max_tokens.map(count),
        decoding: draw,
        seed,
        stop,
        vocabulary,
        raw_logprobs: shared.options.raw_logprobs,
        top_k: count(call.topk_sample_logprobs),
        scoring,
    };
    // A token and a number, or a target and its number, in each.
    let spread = cells * (size_of::<i64>() + size_of::<f32>());
    Ok(Sample { sampler, request, targets: call.target_prompt_logprobs, spread })
}

fn check_context(base: &BaseModel, prompt: usize, max_tokens: Option<u32>) -> Result<(), ApiError> {
    if prompt == 0 {
        return Err(ApiError::bad("prompt: it is empty"));
    }
    let most = base.config.max_positions;
    let more = match max_tokens {
        Some(0) => return Err(ApiError::bad("max_tokens: 0, expected at least 1")),
        Some(tokens) => usize::try_from(tokens).unwrap_or(usize::MAX),
        None => 1,
    };
    if prompt.saturating_add(more) > most {
        return Err(ApiError::bad(format!(
            "Prompt length plus max_tokens exceeds the model's context window: {prompt} + {more} > {most}"
        )));
    }
    Ok(())
}

/// Cells of the tables about the prompt, if they and those about `tokens` sampled ones may be made:
/// a few bytes ask for any number of them.
fn check_tables(
    call: &SampleRequest,
    prompt: usize,
    tokens: usize,
    vocab: usize,
) -> Result<usize, ApiError> {
    let count = |n: u32| usize::try_from(n).unwrap_or(usize::MAX);
    let width = call.target_prompt_logprobs.as_ref().and_then(|t| t.shape().dims().get(1).copied());
    let widths = [
        ("topk_prompt_logprobs", count(call.topk_prompt_logprobs)),
        ("prompt_alt_tokens_k", count(call.prompt_alt_tokens_k)),
        ("target_prompt_logprobs", width.unwrap_or(0)),
        ("topk_sample_logprobs", count(call.topk_sample_logprobs)),
    ];
    if let Some((field, width)) = widths.iter().find(|(_, width)| *width > vocab) {
        return Err(ApiError::bad(format!("{field}: {width}, but the model has {vocab} tokens")));
    }
    let [(_, top), (_, alternatives), (_, targets), (_, sampled)] = widths;
    let cells = prompt.saturating_mul(top + alternatives + targets);
    if cells > MOST_CELLS {
        return Err(ApiError::bad(format!(
            "topk_prompt_logprobs, prompt_alt_tokens_k, target_prompt_logprobs: {top} + \
             {alternatives} + {targets} for each of {prompt} tokens are more than {MOST_CELLS}"
        )));
    }
    if tokens.saturating_mul(sampled) > MOST_TOP_CELLS {
        return Err(ApiError::bad(format!(
            "topk_sample_logprobs: {sampled} for each of up to {tokens} tokens are more than \
             {MOST_TOP_CELLS}"
        )));
    }
    Ok(cells)
}

type Stops = (StopConditions, Option<Arc<tinkex_engine::tokenizer::Vocabulary>>);

/// Where to stop. The model's own ends stay, except where the caller wants none at all.
fn stop(base: &BaseModel, wanted: Option<StopCondition>) -> Result<Stops, ApiError> {
    let eos = base.config.eos.iter().copied();
    let texts = match wanted {
        None => return Ok((StopConditions::new(eos, [""; 0])?, None)),
        Some(StopCondition::Tokens(tokens)) if tokens.is_empty() => {
            return Ok((StopConditions::default(), None));
        }
        Some(StopCondition::Tokens(tokens)) => {
            return Ok((StopConditions::new(eos.chain(tokens), [""; 0])?, None));
        }
        Some(StopCondition::Texts(texts)) if texts.is_empty() => {
            return Ok((StopConditions::default(), None));
        }
        Some(StopCondition::Texts(texts)) => texts,
        Some(StopCondition::Text(text)) => vec![text],
    };
    let vocabulary = base.vocabulary().map_err(|why| {
        ApiError::bad(format!(
            "sampling_params.stop: a text needs the model's tokenizer, but {why}; give token ids"
        ))
    })?;
    Ok((StopConditions::new(eos, &texts)?, Some(vocabulary)))
}

/// Every cell, −1 where nothing was asked.
fn dense_targets(targets: &TensorData, prompt: usize) -> Result<Vec<i64>, ApiError> {
    let wrong = |why: String| ApiError::bad(format!("target_prompt_logprobs: {why}"));
    let (&[rows, width], Some(values)) = (targets.shape().dims(), targets.as_i64()) else {
        return Err(wrong("an int64 matrix was expected".to_owned()));
    };
    if rows + 1 != prompt {
        return Err(wrong(format!(
            "{rows} rows for a prompt of {prompt} tokens, expected {}",
            prompt - 1
        )));
    }
    let (Some(starts), Some(columns)) = (targets.row_starts(), targets.columns()) else {
        return Ok(values.to_vec());
    };
    let mut dense = vec![-1; rows * width];
    for (row, bounds) in starts.windows(2).enumerate() {
        let (from, to) =
            (usize::try_from(bounds[0]).unwrap_or(0), usize::try_from(bounds[1]).unwrap_or(0));
        for (value, column) in values[from..to].iter().zip(&columns[from..to]) {
            dense[row * width + usize::try_from(*column).unwrap_or(0)] = *value;
        }
    }
    Ok(dense)
}
