//! Converts the output of a sample to the API's form.

use tinkex_engine::decode::NO_LOGPROB;
use tinkex_engine::sample::{SampleOutput, StopReason as EngineStopReason, TopK};
use tinkex_wire::{
    PromptAltTokens, SampleResponse, SampledSequence, StopReason, TensorData, TensorValues,
    TopkLogprobs,
};

/// Converts the output of the engine. `targets` are the requested targets; the result has their
/// layout.
pub(crate) fn response(output: SampleOutput, targets: Option<&TensorData>) -> SampleResponse {
    let sequences = output
        .samples
        .into_iter()
        .map(|sample| {
            let stop_reason = match sample.reason {
                EngineStopReason::Stop => StopReason::Stop,
                EngineStopReason::Length => StopReason::Length,
            };
            let topk = sample.top_k.as_ref().map(topk_logprobs);
            SampledSequence::default()
                .stop_reason(stop_reason)
                .tokens(sample.tokens)
                .logprobs(Some(sample.logprobs.into()))
                .topk_logprobs(topk)
        })
        .collect();
    let scores = output.prompt;
    SampleResponse::default()
        .sequences(sequences)
        .prompt_logprobs(scores.logprobs.map(Into::into))
        .topk_prompt_logprobs(scores.top_k.as_ref().map(topk_logprobs))
        .prompt_cache_hit_tokens(u32::try_from(output.cache_hits).unwrap_or(u32::MAX))
        .target_prompt_logprobs(
            scores
                .targets
                .zip(targets)
                .and_then(|(scores, targets)| with_layout_of(scores, targets)),
        )
        .prompt_alt_tokens(scores.alternatives.and_then(|table| alternatives(&table)))
}

fn topk_logprobs(table: &TopK) -> TopkLogprobs {
    let rows = table.tokens.chunks(table.k.max(1)).zip(table.logprobs.chunks(table.k.max(1)));
    TopkLogprobs::from_rows(rows.map(|(tokens, logprobs)| {
        let pairs = tokens.iter().copied().zip(logprobs.iter().copied());
        // The engine fills empty entries with this pair.
        let known: Vec<(u32, f32)> = pairs.filter(|pair| *pair != (0, NO_LOGPROB)).collect();
        (!known.is_empty()).then_some(known)
    }))
}

fn alternatives(table: &TopK) -> Option<PromptAltTokens> {
    let shape = [table.tokens.len() / table.k.max(1), table.k];
    let tokens: Vec<i64> = table.tokens.iter().map(|token| i64::from(*token)).collect();
    let tokens = TensorData::new(TensorValues::Int64(tokens.into()), shape).ok()?;
    let logprobs =
        TensorData::new(TensorValues::Float32(table.logprobs.clone().into()), shape).ok()?;
    Some(PromptAltTokens::new(tokens, logprobs))
}

/// Returns dense scores in the layout of the requested targets, dense or sparse.
fn with_layout_of(scores: Vec<f32>, targets: &TensorData) -> Option<TensorData> {
    let &[rows, width] = targets.shape().dims() else { return None };
    let (Some(starts), Some(columns)) = (targets.row_starts(), targets.columns()) else {
        return TensorData::new(TensorValues::Float32(scores.into()), [rows, width]).ok();
    };
    let mut values = Vec::with_capacity(columns.len());
    for (row, bounds) in starts.windows(2).enumerate() {
        let from = usize::try_from(bounds[0]).ok()?;
        let to = usize::try_from(bounds[1]).ok()?;
        for column in &columns[from..to] {
            values.push(*scores.get(row * width + usize::try_from(*column).ok()?)?);
        }
    }
    TensorData::sparse(values, starts.to_vec(), columns.to_vec(), [rows, width]).ok()
}
