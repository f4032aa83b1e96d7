//! [`SampleLine`]: a completion that was sampled during a run.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tinkex_wire::StopReason;

/// Line of `samples.jsonl`: a completion that was sampled during the run.
///
/// Completions that RL trains on have a group, a reward and the step of their policy. Completions
/// for a person to read (`tinkex train --sample-prompts`) have none of these fields.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SampleLine {
    /// For RL: number of the step that the completion was sampled for, from 1. For other methods:
    /// number of steps that were finished.
    pub step: u64,
    /// Text of the prompt, or of the last message of a conversation.
    pub prompt: String,
    /// Text of the completion. For an episode with several turns, the text of all turns, including
    /// the replies of the environment.
    pub completion: String,
    /// Number of sampled tokens.
    pub tokens: u64,
    /// Reason why the last completion ended.
    pub stop_reason: StopReason,
    /// Number of the group in the batch, from 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<u64>,
    /// Reward.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reward: Option<f64>,
    /// Advantage before the KL penalty. Absent if the group was skipped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advantage: Option<f64>,
    /// Metrics of the reward.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metrics: BTreeMap<String, f64>,
    /// Number of training steps of the weights that sampled the completion.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy_step: Option<u64>,
}

impl SampleLine {
    /// Creates a line for a completion.
    #[must_use]
    pub fn new(step: u64, prompt: impl Into<String>, completion: impl Into<String>) -> Self {
        Self { step, prompt: prompt.into(), completion: completion.into(), ..Self::default() }
    }
}
