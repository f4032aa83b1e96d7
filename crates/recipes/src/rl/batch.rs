//! Training data of a batch: advantages, and the KL penalty.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::future::try_join_all;
use tinkex::{BatchOutput, Error, ErrorKind, Result, SamplingClient};
use tinkex_runs::Advantage;
use tinkex_wire::{Datum, StopReason, Tokens};

use super::advantage::{estimate, mean_and_std};
use super::report::{RlReport, Rollout, StepTimes};
use super::sample::{EpisodeResult, SampledBatch};

/// Training data of a batch, and the part of its report that is known before training.
pub(super) struct PreparedBatch {
    pub(super) data: Vec<Datum>,
    pub(super) report: RlReport,
    /// For each datum: the position and the log-probability under the sampling policy of each
    /// sampled token.
    sampled: Vec<Vec<(usize, f32)>>,
}

/// Penalty for the KL divergence from the starting weights.
#[derive(Clone)]
pub(super) struct KlPenalty {
    pub(super) reference: SamplingClient,
    pub(super) coefficient: f64,
}

/// Episode that is trained on.
struct TrainedEpisode<'a> {
    prompt: &'a Tokens,
    episode: &'a EpisodeResult,
    /// Advantage of each token after the prompt.
    advantages: Vec<f64>,
}

impl PreparedBatch {
    pub(super) async fn new(
        batch: &SampledBatch,
        advantage: Advantage,
        penalty: Option<&KlPenalty>,
    ) -> Result<Self> {
        let mut rollouts = Vec::new();
        let mut trained = Vec::new();
        let mut report = RlReport {
            step: batch.step + 1,
            policy_age: batch.step - batch.policy_step,
            groups: batch.groups.len(),
            time: StepTimes {
                sampling: batch.sampling_seconds,
                reward: batch.reward_seconds,
                training: 0.0,
            },
            ..RlReport::default()
        };
        let mut rewards = Vec::new();
        let mut nats = 0.0;
        let mut truncated = 0;
        for (index, group) in batch.groups.iter().enumerate() {
            let group_rewards: Vec<f64> =
                group.episodes.iter().map(|episode| episode.reward.value).collect();
            let advantages = estimate(advantage, &group_rewards);
            report.skipped_groups += usize::from(advantages.is_none());
            for (number, episode) in group.episodes.iter().enumerate() {
                let advantage = advantages.as_ref().map(|advantages| advantages[number]);
                let tokens = episode.sampled_tokens();
                report.tokens += tokens;
                nats -= episode.logprobs.iter().map(|logprob| f64::from(*logprob)).sum::<f64>();
                truncated += usize::from(episode.stop_reason == StopReason::Length);
                rollouts.push(Rollout {
                    step: batch.step + 1,
                    group: index,
                    prompt: group.prompt.text.clone(),
                    completion: episode.text.clone(),
                    reward: episode.reward.value,
                    advantage,
                    metrics: episode.reward.metrics.clone(),
                    tokens,
                    stop_reason: episode.stop_reason,
                    policy_step: batch.policy_step,
                });
                if let Some(advantage) = advantage.filter(|_| tokens > 0) {
                    let of_token = |sampled: &bool| if *sampled { advantage } else { 0.0 };
                    let advantages = episode.sampled.iter().map(of_token).collect();
                    trained.push(TrainedEpisode {
                        prompt: &group.prompt.tokens,
                        episode,
                        advantages,
                    });
                }
            }
            rewards.extend(group_rewards);
        }
        (report.reward, report.reward_std) = mean_and_std(&rewards);
        let count = to_f64(rewards.len().max(1));
        report.entropy = nats / to_f64(report.tokens.max(1));
        report.completion_tokens = to_f64(report.tokens) / count;
        report.truncated = to_f64(truncated) / count;
        report.metrics = mean_metrics(&rollouts);
        report.rollouts = rollouts.into();
        if let Some(penalty) = penalty.filter(|_| !trained.is_empty()) {
            report.kl_reference = Some(penalty.apply(&mut trained).await?);
        }
        // Skip episodes whose advantages are all 0: they have no gradient.
        trained.retain(|one| one.advantages.iter().any(|advantage| *advantage != 0.0));
        let data = trained.iter().map(TrainedEpisode::datum).collect::<Result<_>>()?;
        Ok(Self { data, sampled: trained.iter().map(TrainedEpisode::targets).collect(), report })
    }

    /// Completes the report with the output of the pass.
    pub(super) fn report(self, output: Option<&BatchOutput>) -> RlReport {
        let mut report = self.report;
        let Some(output) = output else { return report };
        let count: usize = self.sampled.iter().map(Vec::len).sum();
        let count = to_f64(count.max(1));
        report.loss = output.loss().map(|loss| loss / count);
        let mut kl = 0.0;
        for (output, sampled) in output.outputs.iter().zip(&self.sampled) {
            let Some(trained) = output.f32("logprobs") else { return report };
            for (position, logprob) in sampled {
                let Some(trained) = trained.get(*position) else { return report };
                let difference = f64::from(*trained) - f64::from(*logprob);
                // Estimator r − 1 − ln r with r = p / q and samples from q: it is unbiased and
                // never negative.
                kl += difference.exp() - 1.0 - difference;
            }
        }
        report.kl = Some(kl / count);
        report
    }
}

impl TrainedEpisode<'_> {
    fn datum(&self) -> Result<Datum> {
        #[expect(clippy::cast_possible_truncation, reason = "the server computes in f32")]
        let advantages: Vec<f32> = self.advantages.iter().map(|value| *value as f32).collect();
        let tokens = self.episode.tokens.clone();
        let logprobs = self.episode.logprobs.clone();
        Ok(Datum::rollout(self.prompt, tokens, logprobs, advantages)?)
    }

    /// Returns the position in the targets and the log-probability of each sampled token.
    fn targets(&self) -> Vec<(usize, f32)> {
        // The targets are all tokens but the first.
        let first = self.prompt.len() - 1;
        let tokens = self.episode.sampled.iter().zip(&self.episode.logprobs).enumerate();
        tokens
            .filter(|(_, (sampled, _))| **sampled)
            .map(|(index, (_, logprob))| (first + index, *logprob))
            .collect()
    }
}

impl KlPenalty {
    /// Adds the penalty to the advantages and returns the mean divergence per token.
    ///
    /// The divergence of a token is ln q − ln p₀, where q is the sampling policy and p₀ the policy
    /// with the starting weights. The mean divergence of the batch is subtracted, so that the
    /// penalty does not change the mean of the advantages.
    async fn apply(&self, trained: &mut [TrainedEpisode<'_>]) -> Result<f64> {
        let reference = trained.iter().map(|one| {
            let tokens = [&one.prompt[..], &one.episode.tokens].concat();
            self.reference.compute_logprobs(Tokens::from(tokens))
        });
        let reference = try_join_all(reference).await?;
        let mut differences = Vec::with_capacity(trained.len());
        let mut sum = 0.0;
        let mut count = 0_usize;
        for (one, reference) in trained.iter().zip(&reference) {
            let reference = reference.as_slice().get(one.prompt.len()..).unwrap_or_default();
            if reference.len() != one.episode.tokens.len() {
                let message = "cannot compute the KL penalty: server returned log-probabilities of \
                               another number of tokens";
                return Err(Error::new(ErrorKind::Decode, message));
            }
            let tokens = one.episode.logprobs.iter().zip(reference).zip(&one.episode.sampled);
            let of_token = |((logprob, reference), sampled): ((&f32, &f32), &bool)| {
                sampled.then(|| f64::from(*logprob) - f64::from(*reference))
            };
            let of_episode: Vec<Option<f64>> = tokens.map(of_token).collect();
            sum += of_episode.iter().flatten().sum::<f64>();
            count += of_episode.iter().flatten().count();
            differences.push(of_episode);
        }
        let mean = sum / to_f64(count.max(1));
        for (one, differences) in trained.iter_mut().zip(differences) {
            for (advantage, difference) in one.advantages.iter_mut().zip(differences) {
                if let Some(difference) = difference {
                    *advantage += self.coefficient * (mean - difference);
                }
            }
        }
        Ok(mean)
    }
}

/// Returns the mean of each metric over the completions that have it.
fn mean_metrics(rollouts: &[Rollout]) -> BTreeMap<String, f64> {
    let mut sums: BTreeMap<String, (f64, usize)> = BTreeMap::new();
    for (name, value) in rollouts.iter().flat_map(|rollout| &rollout.metrics) {
        let entry = sums.entry(name.clone()).or_default();
        *entry = (entry.0 + value, entry.1 + 1);
    }
    sums.into_iter().map(|(name, (sum, count))| (name, sum / to_f64(count))).collect()
}

/// Returns the mean reward of a batch.
pub(super) fn mean_reward(groups: &[super::sample::SampledGroup]) -> f64 {
    let episodes = groups.iter().flat_map(|group| &group.episodes);
    let rewards: Vec<f64> = episodes.map(|episode| episode.reward.value).collect();
    mean_and_std(&rewards).0
}

#[expect(clippy::cast_precision_loss, reason = "counts of tokens and completions")]
fn to_f64(count: usize) -> f64 {
    count as f64
}

/// Returns the prompts of a step. Every epoch uses all prompts in a new order.
pub(super) fn prompts_of_step<T>(
    prompts: &[Arc<T>],
    groups: usize,
    seed: u64,
    step: u64,
) -> Vec<Arc<T>> {
    let count = prompts.len() as u64;
    let first = step * groups as u64;
    let mut order: (Option<u64>, Vec<usize>) = (None, Vec::new());
    let choose = |at: u64| {
        let epoch = at / count;
        if order.0 != Some(epoch) {
            order = (Some(epoch), crate::plan::shuffled(prompts.len(), seed, epoch));
        }
        let position = usize::try_from(at % count).unwrap_or(0);
        Arc::clone(&prompts[order.1[position]])
    };
    (first..first + groups as u64).map(choose).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_are_drawn_in_shuffled_epochs() {
        let prompts: Vec<Arc<u32>> = (0..5).map(Arc::new).collect();
        let mut drawn: Vec<u32> =
            (0..5).flat_map(|step| prompts_of_step(&prompts, 3, 1, step)).map(|one| *one).collect();
        for epoch in drawn.chunks_mut(5) {
            epoch.sort_unstable();
            assert_eq!(epoch, [0, 1, 2, 3, 4]);
        }
    }
}
