//! [`RlReport`]: the report of a step.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use tinkex_runs::{MetricsLine, SampleLine, metric};
use tinkex_wire::{StopReason, TinkerPath};

/// Report of a step.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct RlReport {
    /// Number of finished steps. Step 0 is the evaluation of the starting weights.
    pub step: u64,
    /// Number of passes over the prompts.
    pub epoch: f64,
    /// Mean reward of all completions of the batch.
    pub reward: f64,
    /// Standard deviation of the rewards.
    pub reward_std: f64,
    /// Loss, as the mean over the sampled tokens that were trained on. `None` if the batch was
    /// skipped, because all its groups have constant rewards.
    pub loss: Option<f64>,
    /// Kullback–Leibler divergence of the trained policy from the policy that sampled, estimated
    /// per token before the update. `None` if the batch was skipped, or was sampled at another
    /// temperature than 1.
    pub kl: Option<f64>,
    /// Kullback–Leibler divergence of the sampling policy from the starting weights, estimated per
    /// token. `None` without a KL penalty.
    pub kl_reference: Option<f64>,
    /// Entropy of the sampling policy, estimated per token, in nats.
    pub entropy: f64,
    /// Number of steps between the weights that sampled the batch and the weights that it trains.
    pub policy_age: u64,
    /// Number of groups.
    pub groups: usize,
    /// Number of groups that were skipped, because all their rewards are equal.
    pub skipped_groups: usize,
    /// Number of sampled tokens.
    pub tokens: usize,
    /// Sampled tokens per second since the run was started or resumed.
    pub tokens_per_second: f64,
    /// Mean length of a completion in tokens.
    pub completion_tokens: f64,
    /// Fraction of the completions that reached the token limit.
    pub truncated: f64,
    /// Learning rate.
    pub learning_rate: f64,
    /// Durations of the parts of the step.
    pub time: StepTimes,
    /// Means of the metrics of the rewards.
    pub metrics: BTreeMap<String, f64>,
    /// Mean reward of the evaluation prompts after this step, if they were evaluated.
    pub eval_reward: Option<f64>,
    /// Checkpoint that was saved after this step.
    pub checkpoint: Option<TinkerPath>,
    /// Completions of the step.
    pub rollouts: Arc<[Rollout]>,
}

/// Durations of the parts of a step, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct StepTimes {
    /// Time from the start of the batch to its last completion.
    pub sampling: f64,
    /// Time from the last completion to the last reward. Rewards that are computed while other
    /// completions are sampled do not count.
    pub reward: f64,
    /// Time of the pass, the optimizer step and the transfer of the weights to the sampler.
    pub training: f64,
}

/// Completion with its reward.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Rollout {
    /// Number of the step that the completion was sampled for, from 1.
    pub step: u64,
    /// Number of the group in the batch, from 0.
    pub group: usize,
    /// Text of the prompt.
    pub prompt: String,
    /// Text of the completion. For an episode with several turns, the text of all turns, including
    /// the replies of the environment.
    pub completion: String,
    /// Reward.
    pub reward: f64,
    /// Advantage before the KL penalty. `None` if the group was skipped.
    pub advantage: Option<f64>,
    /// Metrics of the reward.
    pub metrics: BTreeMap<String, f64>,
    /// Number of sampled tokens.
    pub tokens: usize,
    /// Reason why the last completion ended.
    pub stop_reason: StopReason,
    /// Number of training steps of the weights that sampled the completion.
    pub policy_step: u64,
}

impl RlReport {
    /// Returns the lines of `metrics.jsonl`: one for the step, unless this is the evaluation of the
    /// starting weights, and one for the evaluation, if there was one.
    #[must_use]
    pub fn metrics_lines(&self) -> Vec<MetricsLine> {
        let mut lines = Vec::new();
        if self.step > 0 {
            lines.push(self.step_line());
        }
        let evaluation = |reward| MetricsLine::new(self.step).with(metric::EVAL_REWARD, reward);
        lines.extend(self.eval_reward.map(evaluation));
        lines
    }

    fn step_line(&self) -> MetricsLine {
        #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
        let count = |number: usize| number as f64;
        #[expect(clippy::cast_precision_loss, reason = "a number of steps")]
        let policy_age = self.policy_age as f64;
        MetricsLine::new(self.step)
            .with(metric::EPOCH, self.epoch)
            .with_optional(metric::LOSS, self.loss)
            .with(metric::LEARNING_RATE, self.learning_rate)
            .with(metric::TOKENS, count(self.tokens))
            .with(metric::TOKENS_PER_SECOND, self.tokens_per_second)
            .with(metric::REWARD, self.reward)
            .with(metric::REWARD_STD, self.reward_std)
            .with_optional(metric::KL, self.kl)
            .with_optional(metric::KL_REFERENCE, self.kl_reference)
            .with(metric::ENTROPY, self.entropy)
            .with(metric::POLICY_AGE, policy_age)
            .with(metric::GROUPS, count(self.groups))
            .with(metric::SKIPPED_GROUPS, count(self.skipped_groups))
            .with(metric::COMPLETION_TOKENS, self.completion_tokens)
            .with(metric::TRUNCATED, self.truncated)
            .with(metric::SAMPLING_SECONDS, self.time.sampling)
            .with(metric::REWARD_SECONDS, self.time.reward)
            .with(metric::TRAINING_SECONDS, self.time.training)
            .with_all(metric::REWARD_PREFIX, self.metrics.clone())
    }
}

impl From<&Rollout> for SampleLine {
    fn from(rollout: &Rollout) -> Self {
        let mut line = Self::new(rollout.step, &*rollout.prompt, &*rollout.completion);
        line.tokens = rollout.tokens as u64;
        line.stop_reason = rollout.stop_reason;
        line.group = Some(rollout.group as u64);
        line.reward = Some(rollout.reward);
        line.advantage = rollout.advantage;
        line.metrics.clone_from(&rollout.metrics);
        line.policy_step = Some(rollout.policy_step);
        line
    }
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
    fn a_report_is_one_line_of_text_and_one_of_metrics() {
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
        let [line] = &report.metrics_lines()[..] else { panic!("a step has one line") };
        assert_eq!((line.step, line.get(metric::LOSS)), (3, Some(-0.01)));
        let start = RlReport { eval_reward: Some(0.5), ..RlReport::default() };
        assert_eq!(start.metrics_lines(), [MetricsLine::new(0).with(metric::EVAL_REWARD, 0.5)]);
    }
}
