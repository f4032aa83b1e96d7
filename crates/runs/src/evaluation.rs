//! [`EvaluationLine`]: result of an evaluation of a run.

use serde::{Deserialize, Serialize};
use tinkex_wire::{Timestamp, TinkerPath};

/// Line of `evaluations.jsonl`: result of one `tinkex eval` of a checkpoint of the run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvaluationLine {
    /// Time of the evaluation.
    pub time: Timestamp,
    /// Evaluated checkpoint.
    pub checkpoint: TinkerPath,
    /// Name of the file of examples.
    pub file: String,
    /// Number of examples.
    pub examples: u64,
    /// Number of tokens that the loss covers.
    pub tokens: u64,
    /// Mean loss per token, in nats.
    pub loss: f64,
    /// How answers were scored, such as `exact` or `judge`; absent if no answer was generated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scored_by: Option<String>,
    /// Number of generated answers.
    pub answers: u64,
    /// Mean score of the answers; absent without answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub score: Option<f64>,
}
