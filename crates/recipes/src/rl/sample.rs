//! [`EpisodeSampler`]: samples the groups of a batch and computes the rewards of their completions.

use std::sync::Arc;

use futures_util::future::try_join_all;
use tinkex::{Error, ErrorKind, Result, SampleOptions, SamplingClient, Tokenizer};
use tinkex_wire::{SampledSequence, SamplingParams, StopReason, Tokens};
use tokio::time::Instant;

use super::prompt::RlPrompt;
use super::reward::{Completion, MakeEnvironment, Reward, RewardError, Turn};
use crate::plan::derive_seed;

/// Samples episodes with one sampling configuration and environment.
#[derive(Clone)]
pub(super) struct EpisodeSampler {
    pub(super) tokenizer: Tokenizer,
    pub(super) params: SamplingParams,
    pub(super) environment: MakeEnvironment,
}

/// Episodes of one prompt.
pub(super) struct SampledGroup {
    pub(super) prompt: Arc<RlPrompt>,
    pub(super) episodes: Vec<EpisodeResult>,
    /// Time at which the last completion arrived.
    sampled: Instant,
}

/// Finished episode.
pub(super) struct EpisodeResult {
    /// Tokens after the prompt, both of the model and of the environment.
    pub(super) tokens: Vec<u32>,
    /// Log-probability of each token under the policy that sampled it; 0 for tokens of the
    /// environment.
    pub(super) logprobs: Vec<f32>,
    /// Whether the model sampled the token.
    pub(super) sampled: Vec<bool>,
    pub(super) text: String,
    pub(super) stop_reason: StopReason,
    pub(super) reward: Reward,
}

impl EpisodeResult {
    /// Returns the number of tokens that the model sampled.
    pub(super) fn sampled_tokens(&self) -> usize {
        self.sampled.iter().filter(|sampled| **sampled).count()
    }
}

/// Batch whose rewards are known.
pub(super) struct SampledBatch {
    /// Step that the batch is sampled for, from 0.
    pub(super) step: u64,
    /// Number of training steps of the weights that sampled the batch.
    pub(super) policy_step: u64,
    pub(super) groups: Vec<SampledGroup>,
    /// Seconds from the start of the batch to the last completion. `reward_seconds` counts from
    /// there to the last reward.
    pub(super) sampling_seconds: f64,
    pub(super) reward_seconds: f64,
}

impl EpisodeSampler {
    /// Samples `group_size` episodes of each prompt. Seeds depend only on `seed` and the position
    /// in the batch.
    pub(super) async fn batch(
        &self,
        sampler: &SamplingClient,
        prompts: Vec<Arc<RlPrompt>>,
        group_size: u32,
        seed: u64,
    ) -> Result<(Vec<SampledGroup>, f64, f64)> {
        let start = Instant::now();
        let groups = prompts.into_iter().zip(0..).map(|(prompt, index)| {
            self.group(sampler, prompt, group_size, derive_seed(seed, &[index]))
        });
        let groups = try_join_all(groups).await?;
        let end = Instant::now();
        let sampled = groups.iter().map(|group| group.sampled).max().unwrap_or(end);
        let sampling = sampled.duration_since(start).as_secs_f64();
        Ok((groups, sampling, end.duration_since(sampled).as_secs_f64()))
    }

    async fn group(
        &self,
        sampler: &SamplingClient,
        prompt: Arc<RlPrompt>,
        size: u32,
        seed: u64,
    ) -> Result<SampledGroup> {
        let options = SampleOptions::new(self.params.clone().seed(seed)).num_samples(size);
        let response = sampler.sample(prompt.tokens.clone(), options).await?;
        let episodes = response.sequences.into_iter().zip(0..).map(|(first, number)| {
            self.episode(sampler, &prompt, first, derive_seed(seed, &[number]))
        });
        let episodes = try_join_all(episodes).await?;
        let sampled = episodes.iter().map(|(_, sampled)| *sampled).max();
        Ok(SampledGroup {
            episodes: episodes.into_iter().map(|(episode, _)| episode).collect(),
            sampled: sampled.unwrap_or_else(Instant::now),
            prompt,
        })
    }

    /// Runs an episode, starting with its first completion. Returns the episode and the time at
    /// which its last completion arrived.
    async fn episode(
        &self,
        sampler: &SamplingClient,
        prompt: &Arc<RlPrompt>,
        first: SampledSequence,
        seed: u64,
    ) -> Result<(EpisodeResult, Instant)> {
        let mut environment = (self.environment)(prompt);
        let mut episode = EpisodeResult {
            tokens: Vec::new(),
            logprobs: Vec::new(),
            sampled: Vec::new(),
            text: String::new(),
            stop_reason: first.stop_reason,
            reward: Reward::default(),
        };
        let mut sequence = first;
        let mut earlier_rewards = 0.0;
        for turn in 0.. {
            let sampled = Instant::now();
            let logprobs = sequence.logprobs.as_ref().map(|logprobs| logprobs.as_slice());
            let logprobs = logprobs.filter(|logprobs| logprobs.len() == sequence.tokens.len());
            let Some(logprobs) = logprobs else {
                let message = "cannot train on a completion: server returned no log-probabilities";
                return Err(Error::new(ErrorKind::Decode, message));
            };
            episode.tokens.extend_from_slice(&sequence.tokens);
            episode.logprobs.extend_from_slice(logprobs);
            episode.sampled.resize(episode.tokens.len(), true);
            episode.stop_reason = sequence.stop_reason;
            let text = self.tokenizer.decode_text(&sequence.tokens)?;
            episode.text += &text;
            let completion = Completion {
                prompt: Arc::clone(prompt),
                text,
                tokens: sequence.tokens,
                stop_reason: sequence.stop_reason,
                turn,
            };
            match environment.step(&completion).await.map_err(reward_failed)? {
                Turn::End(mut reward) => {
                    reward.value += earlier_rewards;
                    if !reward.value.is_finite() {
                        let reason = format!("the reward is {}", reward.value);
                        return Err(reward_failed(reason.into()));
                    }
                    episode.reward = reward;
                    return Ok((episode, sampled));
                }
                Turn::Reply { text, reward } => {
                    earlier_rewards += reward;
                    let reply = self.tokenizer.encode_piece(&text)?;
                    episode.tokens.extend_from_slice(&reply);
                    episode.logprobs.resize(episode.tokens.len(), 0.0);
                    episode.sampled.resize(episode.tokens.len(), false);
                    episode.text += &text;
                }
            }
            let context = [&prompt.tokens[..], &episode.tokens].concat();
            let params = self.params.clone().seed(derive_seed(seed, &[turn.into()]));
            let response = sampler.sample(Tokens::from(context), params).await?;
            let Some(next) = response.sequences.into_iter().next() else {
                let message = "cannot continue an episode: server returned no completion";
                return Err(Error::new(ErrorKind::Decode, message));
            };
            sequence = next;
        }
        unreachable_turn()
    }
}

/// Returns the error of a reward function.
fn reward_failed(error: RewardError) -> Error {
    let message = format!("cannot compute the reward of a completion: {error}");
    Error::new(ErrorKind::WorkFailed, message).with_boxed_source(error)
}

/// Returns the error of an episode with 2³² turns.
fn unreachable_turn<T>() -> Result<T> {
    Err(Error::new(ErrorKind::InvalidInput, "an episode has too many turns"))
}
