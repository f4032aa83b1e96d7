//! [`RlReport`]: the report of a step.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tinkex_wire::{StopReason, TinkerPath};

/// Report of a step.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RlReport {
    /// Number of finished steps. Step 0 is the evaluation of the starting weights.
    pub step: u64,
    /// Mean reward of all completions.
    pub reward: f64,
    /// Standard deviation of the rewards.
    pub reward_std: f64,
    /// Loss, as the mean over the sampled tokens that were trained on. `None` if the batch was
    /// skipped, because all its groups have constant rewards.
    pub loss: Option<f64>,
    /// Kullback–Leibler divergence of the trained policy from the policy that sampled, estimated
    /// per token before the update. `None` if the batch was skipped.
    pub kl: Option<f64>,
    /// Kullback–Leibler divergence of the sampling policy from the starting weights, estimated per
    /// token. `None` without a KL penalty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kl_reference: Option<f64>,
    /// Entropy of the sampling policy, estimated per token, in nats.
    pub entropy: f64,
    /// Number of steps between the weights that sampled the batch and those that it trains.
    pub policy_age: u64,
    /// Number of groups.
    pub groups: usize,
    /// Number of groups that were skipped, because all their rewards are equal.
    pub skipped_groups: usize,
    /// Number of sampled tokens.
    pub tokens: usize,
    /// Mean length of a completion in tokens.
    pub completion_tokens: f64,
    /// Fraction of the completions that reached the token limit.
    pub truncated: f64,
    /// Learning rate.
    pub learning_rate: f64,
    /// Durations of the parts of the step.
    pub time: StepTimes,
    /// Means of the metrics of the rewards.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metrics: BTreeMap<String, f64>,
    /// Mean reward of the evaluation prompts after this step, if they were evaluated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval_reward: Option<f64>,
    /// Checkpoint that was saved after this step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<TinkerPath>,
    /// Completions of the step.
    #[serde(skip)]
    pub rollouts: Arc<[Rollout]>,
}

/// Durations of the parts of a step, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct StepTimes {
    /// From the start of the batch to its last completion.
    pub sampling: f64,
    /// From the last completion to the last reward. Rewards that are computed while other
    /// completions are sampled take no time of their own.
    pub reward: f64,
    /// Pass, optimizer step and the transfer of the weights to the sampler.
    pub training: f64,
}

/// Completion with its reward.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Rollout {
    /// Number of the step that it was sampled for, from 1.
    pub step: u64,
    /// Number of the group in the batch.
    pub group: usize,
    /// Text of the prompt.
    pub prompt: String,
    /// Text of the completion; of several turns, with the replies of the environment.
    pub completion: String,
    /// Reward.
    pub reward: f64,
    /// Advantage before the KL penalty. `None` if the group was skipped.
    pub advantage: Option<f64>,
    /// Metrics of the reward.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub metrics: BTreeMap<String, f64>,
    /// Number of sampled tokens.
    pub tokens: usize,
    /// Reason why the last completion ended.
    pub stop_reason: StopReason,
    /// Number of steps of the weights that sampled it.
    pub policy_step: u64,
}

/// Formats the report as one line.
impl fmt::Display for RlReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.step == 0 {
            return write!(f, "step 0  held-out reward {:.3}", self.reward);
        }
        write!(f, "step {}  reward {:.3} ± {:.3}", self.step, self.reward, self.reward_std)?;
        match (self.loss, self.kl) {
            (Some(loss), Some(kl)) => write!(f, "  loss {loss:.4}  kl {kl:.4}")?,
            _ => write!(f, "  skipped")?,
        }
        write!(f, "  entropy {:.2}", self.entropy)?;
        if self.policy_age > 0 {
            write!(f, "  age {}", self.policy_age)?;
        }
        if self.skipped_groups > 0 {
            write!(f, "  {} of {} groups constant", self.skipped_groups, self.groups)?;
        }
        let StepTimes { sampling, reward, training } = self.time;
        write!(
            f,
            "  {} tokens  {:.1} s ({sampling:.1} sampling, {reward:.1} reward, {training:.1} \
             training)",
            self.tokens,
            sampling + reward + training,
        )?;
        if let Some(reward) = self.eval_reward {
            write!(f, "  held-out reward {reward:.3}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_one_line_and_survives_json() {
        let report = RlReport {
            step: 3,
            reward: 0.5,
            loss: Some(-0.01),
            kl: Some(0.002),
            policy_age: 1,
            groups: 4,
            skipped_groups: 2,
            tokens: 120,
            ..RlReport::default()
        };
        assert_eq!(
            report.to_string(),
            "step 3  reward 0.500 ± 0.000  loss -0.0100  kl 0.0020  entropy 0.00  age 1  2 of 4 \
             groups constant  120 tokens  0.0 s (0.0 sampling, 0.0 reward, 0.0 training)"
        );
        let json = serde_json::to_string(&report).unwrap();
        let read: RlReport = serde_json::from_str(&json).unwrap();
        assert_eq!((read.step, read.loss), (3, Some(-0.01)));
    }
}
