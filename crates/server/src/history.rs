//! Converts results of the engine to records of the history.

use tinkex_engine::sample::{SampleOutput, StopReason};
use tinkex_store::history::{CompletionHistory, sequence_hash};

/// Copies the completions of an output for a prompt.
pub(crate) fn completions_of(prompt: &[u32], output: &SampleOutput) -> Vec<CompletionHistory> {
    let completions = output.samples.iter();
    completions
        .map(|sample| CompletionHistory {
            tokens: sample.tokens.clone(),
            logprobs: sample.logprobs.clone(),
            top: sample.top_k.as_ref().map(|top| {
                let tokens = top.tokens.iter().copied();
                (top.k, tokens.zip(top.logprobs.iter().copied()).collect())
            }),
            stop: match sample.reason {
                StopReason::Stop => "stop",
                StopReason::Length => "length",
            },
            sequence_hash: sequence_hash(prompt.iter().chain(&sample.tokens).copied()),
        })
        .collect()
}
