//! `SampleResponse`, encoded by servers and decoded by clients.

use bytes::Bytes;

use crate::logprobs::{Logprobs, TopkLogprobs};
use crate::sampled::{PromptAltTokens, SampleResponse, SampledSequence, StopReason};
use crate::slice::SharedSlice;
use crate::tokens::Tokens;
use crate::{DecodeError, DecodeErrorKind};

use super::read::{Fields, Names, count, f32s, u32s};
use super::tensor;
use super::write::{
    bytes_size, nonempty_array_size, nonempty_size, number_size, put_header, put_nonempty_array,
    put_number,
};

const RESPONSE: Names = &[
    "sequences",
    "prompt_logprobs",
    "topk_prompt_logprobs",
    "prompt_cache_hit_tokens",
    "target_prompt_logprobs",
    "prompt_alt_tokens",
];
const SEQUENCE: Names = &["stop_reason", "tokens", "logprobs", "topk_sampled_logprobs"];
const TOPK: Names = &["token_ids", "logprobs", "k", "length"];
const ALT_TOKENS: Names = &["tokens", "logprobs"];

pub(crate) fn encode(response: &SampleResponse) -> Bytes {
    let size = response_size(response);
    let mut out = Vec::with_capacity(size);
    write_response(&mut out, response);
    debug_assert_eq!(out.len(), size, "the computed size differs from the encoded size");
    out.into()
}

fn response_size(response: &SampleResponse) -> usize {
    response.sequences.iter().map(|sequence| bytes_size(sequence_size(sequence))).sum::<usize>()
        + logprobs_size(response.prompt_logprobs.as_ref())
        + response.topk_prompt_logprobs.as_ref().map_or(0, |topk| bytes_size(topk_size(topk)))
        + number_size(cache_hits(response))
        + response.target_prompt_logprobs.as_ref().map_or(0, |t| bytes_size(tensor::size(t)))
        + response.prompt_alt_tokens.as_ref().map_or(0, |alt| bytes_size(alt_tokens_size(alt)))
}

fn write_response(out: &mut Vec<u8>, response: &SampleResponse) {
    for sequence in &response.sequences {
        put_header(out, 1, sequence_size(sequence));
        write_sequence(out, sequence);
    }
    put_logprobs(out, 2, response.prompt_logprobs.as_ref());
    if let Some(topk) = &response.topk_prompt_logprobs {
        put_header(out, 3, topk_size(topk));
        write_topk(out, topk);
    }
    put_number(out, 4, cache_hits(response));
    if let Some(targets) = &response.target_prompt_logprobs {
        put_header(out, 5, tensor::size(targets));
        tensor::write(out, targets);
    }
    if let Some(alt) = &response.prompt_alt_tokens {
        put_header(out, 6, alt_tokens_size(alt));
        for (field, data) in [(1, &alt.tokens), (2, &alt.logprobs)] {
            put_header(out, field, tensor::size(data));
            tensor::write(out, data);
        }
    }
}

/// Returns the number of cache hits, limited to the 31 bits of the field.
fn cache_hits(response: &SampleResponse) -> u64 {
    response.prompt_cache_hit_tokens.min(i32::MAX.unsigned_abs()).into()
}

fn alt_tokens_size(alt: &PromptAltTokens) -> usize {
    bytes_size(tensor::size(&alt.tokens)) + bytes_size(tensor::size(&alt.logprobs))
}

fn stop_number(reason: StopReason) -> u64 {
    match reason {
        StopReason::Stop => 0,
        StopReason::Length => 1,
        // A number without a meaning, which decodes as unknown again.
        StopReason::Unknown => i32::MAX.unsigned_abs().into(),
    }
}

fn sequence_size(sequence: &SampledSequence) -> usize {
    number_size(stop_number(sequence.stop_reason))
        + nonempty_array_size::<u32>(&sequence.tokens)
        + logprobs_size(sequence.logprobs.as_ref())
        + sequence.topk_logprobs.as_ref().map_or(0, |topk| bytes_size(topk_size(topk)))
}

fn write_sequence(out: &mut Vec<u8>, sequence: &SampledSequence) {
    put_number(out, 1, stop_number(sequence.stop_reason));
    put_nonempty_array::<u32>(out, 2, &sequence.tokens);
    put_logprobs(out, 3, sequence.logprobs.as_ref());
    if let Some(topk) = &sequence.topk_logprobs {
        put_header(out, 4, topk_size(topk));
        write_topk(out, topk);
    }
}

fn topk_size(topk: &TopkLogprobs) -> usize {
    let array = nonempty_size(topk.k() * topk.len() * size_of::<u32>());
    2 * array + number_size(topk.k() as u64) + number_size(topk.len() as u64)
}

fn write_topk(out: &mut Vec<u8>, topk: &TopkLogprobs) {
    let (token_ids, logprobs) = topk.to_cells();
    put_nonempty_array::<u32>(out, 1, &token_ids);
    put_nonempty_array::<f32>(out, 2, &logprobs);
    put_number(out, 3, topk.k() as u64);
    put_number(out, 4, topk.len() as u64);
}

/// Returns the size of a log-probability field. Empty and missing lists are both omitted.
fn logprobs_size(logprobs: Option<&Logprobs>) -> usize {
    logprobs.map_or(0, |logprobs| nonempty_array_size(logprobs.as_slice()))
}

fn put_logprobs(out: &mut Vec<u8>, field: u8, logprobs: Option<&Logprobs>) {
    put_nonempty_array(out, field, logprobs.map_or(&[], Logprobs::as_slice));
}

pub(crate) fn decode(body: &[u8]) -> Result<SampleResponse, DecodeError> {
    let [sequences] = count(body, RESPONSE, [1])?;
    let mut response =
        SampleResponse { sequences: Vec::with_capacity(sequences), ..Default::default() };
    let mut fields = Fields::new(body, RESPONSE);
    while let Some(field) = fields.next()? {
        match field.number {
            1 => {
                let at = response.sequences.len();
                let sequence = field.message(|m| decode_sequence(m).map_err(|e| e.at(at)))?;
                response.sequences.push(sequence);
            }
            2 => response.prompt_logprobs = field.message(decode_logprobs)?,
            3 => response.topk_prompt_logprobs = field.message(decode_topk)?,
            // Ignore an invalid count: it must not make the sample unusable.
            4 => response.prompt_cache_hit_tokens = field.count32().unwrap_or(0),
            5 => response.target_prompt_logprobs = Some(field.message(tensor::decode)?),
            6 => response.prompt_alt_tokens = Some(field.message(decode_alt_tokens)?),
            _ => {}
        }
    }
    response.normalized()
}

fn decode_sequence(message: &[u8]) -> Result<SampledSequence, DecodeError> {
    let mut sequence = SampledSequence::default();
    let mut fields = Fields::new(message, SEQUENCE);
    while let Some(field) = fields.next()? {
        match field.number {
            1 => {
                sequence.stop_reason = match field.varint()? {
                    0 => StopReason::Stop,
                    1 => StopReason::Length,
                    _ => StopReason::Unknown,
                };
            }
            2 => sequence.tokens = field.message(u32s)?.into(),
            3 => sequence.logprobs = field.message(decode_logprobs)?,
            4 => sequence.topk_logprobs = field.message(decode_topk)?,
            _ => {}
        }
    }
    Ok(sequence)
}

fn decode_logprobs(bytes: &[u8]) -> Result<Option<Logprobs>, DecodeError> {
    Ok(Some(f32s(bytes)?.into()))
}

fn decode_topk(message: &[u8]) -> Result<Option<TopkLogprobs>, DecodeError> {
    let mut token_ids = Tokens::default();
    let mut logprobs = SharedSlice::default();
    let mut k = 0_u32;
    let mut length = 0_u32;
    let mut fields = Fields::new(message, TOPK);
    while let Some(field) = fields.next()? {
        match field.number {
            1 => token_ids = field.message(u32s)?.into(),
            2 => logprobs = field.message(f32s)?,
            3 => k = field.uint32()?,
            4 => length = field.uint32()?,
            _ => {}
        }
    }
    if k == 0 || length == 0 {
        return Ok(None);
    }
    let cells = u64::from(k) * u64::from(length);
    for (name, len) in [(TOPK[0], token_ids.len()), (TOPK[1], logprobs.len())] {
        if len as u64 != cells {
            let detail = format!("{len} cells, expected {k} for each of {length} positions");
            return Err(DecodeError::new(DecodeErrorKind::Length, detail).within(name));
        }
    }
    Ok(Some(TopkLogprobs::from_cells(k, length, token_ids, logprobs)))
}

fn decode_alt_tokens(message: &[u8]) -> Result<PromptAltTokens, DecodeError> {
    let mut tokens = None;
    let mut logprobs = None;
    let mut fields = Fields::new(message, ALT_TOKENS);
    while let Some(field) = fields.next()? {
        match field.number {
            1 => tokens = Some(field.message(tensor::decode)?),
            2 => logprobs = Some(field.message(tensor::decode)?),
            _ => {}
        }
    }
    let missing = |name| DecodeError::new(DecodeErrorKind::Missing, "missing tensor").within(name);
    let tokens = tokens.ok_or_else(|| missing(ALT_TOKENS[0]))?;
    let logprobs = logprobs.ok_or_else(|| missing(ALT_TOKENS[1]))?;
    Ok(PromptAltTokens { tokens, logprobs })
}
