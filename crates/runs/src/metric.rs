//! Names of the metrics in `metrics.jsonl`. `docs/run-folder.md` describes them.

/// Number of passes over the training data.
pub const EPOCH: &str = "epoch";
/// Mean loss, in nats: per learned token for SFT, per pair for DPO, per sampled token for RL.
pub const LOSS: &str = "loss";
/// Learning rate of the step.
pub const LEARNING_RATE: &str = "learning_rate";
/// Number of tokens in the batch; for RL, the number of sampled tokens.
pub const TOKENS: &str = "tokens";
/// Mean number of tokens per second since the run was started or resumed.
pub const TOKENS_PER_SECOND: &str = "tokens_per_second";

/// Mean reward of the completions of the batch.
pub const REWARD: &str = "reward";
/// Standard deviation of the rewards.
pub const REWARD_STD: &str = "reward_std";
/// Divergence of the trained policy from the policy that sampled, per token, in nats.
pub const KL: &str = "kl";
/// Divergence of the sampling policy from the starting weights, per token, in nats.
pub const KL_REFERENCE: &str = "kl_reference";
/// Entropy of the sampling policy, per token, in nats.
pub const ENTROPY: &str = "entropy";
/// Number of steps between the weights that sampled the batch and the weights that it trains.
pub const POLICY_AGE: &str = "policy_age";
/// Number of groups of completions.
pub const GROUPS: &str = "groups";
/// Number of groups that were skipped because all of their rewards are equal.
pub const SKIPPED_GROUPS: &str = "skipped_groups";
/// Mean length of a completion in tokens.
pub const COMPLETION_TOKENS: &str = "completion_tokens";
/// Fraction of the completions that reached the token limit.
pub const TRUNCATED: &str = "truncated";
/// Seconds from the start of the batch to its last completion.
pub const SAMPLING_SECONDS: &str = "sampling_seconds";
/// Seconds from the last completion to the last reward.
pub const REWARD_SECONDS: &str = "reward_seconds";
/// Seconds of the pass, the optimizer step and the transfer of the weights to the sampler.
pub const TRAINING_SECONDS: &str = "training_seconds";
/// Prefix of the names of the metrics that a reward function returns.
pub const REWARD_PREFIX: &str = "reward/";

/// Prefix of the names of evaluation metrics.
pub const EVAL_PREFIX: &str = "eval_";
/// Mean loss of the evaluation data.
pub const EVAL_LOSS: &str = "eval_loss";
/// Mean reward of the evaluation prompts at temperature 0.
pub const EVAL_REWARD: &str = "eval_reward";
