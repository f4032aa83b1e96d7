//! History of finished requests, which the dashboard shows: metrics of training requests, and a log
//! of samples.

mod allowance;
mod blob;
mod names;
mod options;
mod recorder;

use std::sync::Arc;
use std::time::Duration;

use tinkex_wire::{ModelId, SessionId};

pub use self::blob::{
    floats_from_blob, floats_to_blob, sequence_hash, tokens_from_blob, tokens_to_blob,
    top_from_blob, values_from_blob, values_to_blob,
};
pub use self::names::{folder_prefix, logged_folder};
pub use self::options::HistoryOptions;
pub use self::recorder::HistoryRecorder;
use crate::record::{Record, UnixMicros};
use crate::user::UserId;

/// A change to the stored history.
#[derive(Debug)]
pub enum HistoryRecord {
    Request(RequestHistory),
    Sample(Box<SampleHistory>),
    /// Removes the oldest rows.
    Cutoff(HistoryCutoff),
}

impl HistoryRecord {
    /// Returns the record that commits the change.
    #[must_use]
    pub fn into_record(self) -> Record {
        Record::History(Arc::new(self))
    }
}

/// Data about the execution of a model's request, which the worker collects.
#[derive(Debug, Default)]
pub struct OperationHistory {
    /// Name of the operation, such as `forward_backward`.
    pub kind: &'static str,
    pub computed: Duration,
    /// Number of tokens trained on.
    pub tokens: u64,
    pub metrics: Vec<(String, f64)>,
    /// Hash and advantage of each sequence of the batch that has an advantage.
    pub advantages: Vec<(i64, f32)>,
}

/// A finished request of a model. Durations are in microseconds.
#[derive(Debug)]
pub struct RequestHistory {
    pub run: ModelId,
    pub seq: u64,
    pub finished_at: UnixMicros,
    pub queued: i64,
    pub operation: OperationHistory,
    pub error: Option<String>,
}

/// A finished sampling request. Durations are in microseconds.
#[derive(Debug)]
pub struct SampleHistory {
    pub finished_at: UnixMicros,
    pub queued: i64,
    pub computed: i64,
    pub weights: LoggedWeights,
    /// User who sampled.
    pub owner: UserId,
    pub session: SessionId,
    pub source: SampleSource,
    pub prompt_tokens: usize,
    /// `None` if the tokens are not recorded.
    pub prompt: Option<Vec<u32>>,
    pub completions: Vec<CompletionHistory>,
    pub error: Option<String>,
}

/// Weights of a sampling request, as the history stores them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoggedWeights {
    pub base_model: String,
    /// Name of the adapter; see [`logged_folder`]. `None` for the base model.
    pub folder: Option<String>,
}

/// API of a sampling request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SampleSource {
    Tinker,
    Inference,
}

impl SampleSource {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Tinker => "tinker",
            Self::Inference => "inference",
        }
    }
}

/// A completion of a sampling request.
#[derive(Debug)]
pub struct CompletionHistory {
    pub tokens: Vec<u32>,
    pub logprobs: Vec<f32>,
    /// Number of most probable tokens per position, and these tokens position by position.
    pub top: Option<(usize, Vec<(u32, f32)>)>,
    pub stop: &'static str,
    /// Hash of prompt and completion.
    pub sequence_hash: i64,
}

/// Ids of the oldest rows to keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HistoryCutoff {
    pub points: i64,
    pub samples: i64,
}
