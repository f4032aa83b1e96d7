//! Records of the history.

use std::time::Duration;

use tinkex_engine::sample::{SampleOutput, StopReason};
use tinkex_wire::{ModelId, SessionId};

use super::sequence_hash;
use crate::operation::WeightsKey;
use crate::record::UnixMicros;

/// A change of the history.
#[derive(Debug)]
pub(crate) enum HistoryRecord {
    Request(RequestHistory),
    Sample(Box<SampleHistory>),
    /// Removes the oldest rows.
    Cutoff(HistoryCutoff),
}

/// What the worker knows about the execution of a request of a model.
#[derive(Debug, Default)]
pub(crate) struct OperationHistory {
    /// Name of the operation, such as `forward_backward`.
    pub(crate) kind: &'static str,
    pub(crate) computed: Duration,
    /// Number of tokens trained on.
    pub(crate) tokens: u64,
    pub(crate) metrics: Vec<(String, f64)>,
    /// Hashes of the sequences of the batch that have an advantage, with the advantage.
    pub(crate) advantages: Vec<(i64, f32)>,
}

/// A finished request of a model. Durations are in microseconds.
#[derive(Debug)]
pub(crate) struct RequestHistory {
    pub(crate) run: ModelId,
    pub(crate) seq: u64,
    pub(crate) finished_at: UnixMicros,
    pub(crate) queued: i64,
    pub(crate) operation: OperationHistory,
    pub(crate) error: Option<String>,
}

/// A finished sampling request. Durations are in microseconds.
#[derive(Debug)]
pub(crate) struct SampleHistory {
    pub(crate) finished_at: UnixMicros,
    pub(crate) queued: i64,
    pub(crate) computed: i64,
    pub(crate) weights: WeightsKey,
    pub(crate) session: SessionId,
    pub(crate) source: SampleSource,
    pub(crate) prompt_tokens: usize,
    /// `None` if the tokens are not recorded.
    pub(crate) prompt: Option<Vec<u32>>,
    pub(crate) completions: Vec<CompletionHistory>,
    pub(crate) error: Option<String>,
}

/// API of a sampling request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SampleSource {
    Tinker,
    Inference,
}

impl SampleSource {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Tinker => "tinker",
            Self::Inference => "inference",
        }
    }
}

/// A completion of a sampling request.
#[derive(Debug)]
pub(crate) struct CompletionHistory {
    pub(crate) tokens: Vec<u32>,
    pub(crate) logprobs: Vec<f32>,
    /// Number of most probable tokens per position, and these tokens position by position.
    pub(crate) top: Option<(usize, Vec<(u32, f32)>)>,
    pub(crate) stop: &'static str,
    /// Hash of prompt and completion.
    pub(crate) sequence_hash: i64,
}

impl CompletionHistory {
    /// Copies the completions of an output for a prompt.
    pub(crate) fn of(prompt: &[u32], output: &SampleOutput) -> Vec<Self> {
        let completions = output.samples.iter();
        completions
            .map(|sample| Self {
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
}

/// Ids of the oldest rows to keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HistoryCutoff {
    pub(crate) points: i64,
    pub(crate) samples: i64,
}
