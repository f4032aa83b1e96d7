//! [`RunSettings`]: the settings of a run, which `run.json` stores.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tinkex_wire::{AdamParams, SamplingParams, TinkerPath};

/// Settings of a run: everything that determines what it computes, and when it evaluates and saves.
///
/// The settings describe the run, not the command line that started it. A resumed run may change
/// the number of steps, and the settings that do not affect the weights;
/// [`fixed_differences`](Self::fixed_differences) checks the others.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RunSettings {
    /// Training method and its own settings.
    #[serde(flatten)]
    pub method: MethodSettings,
    /// Name of the base model on the server.
    pub base_model: String,
    /// Checkpoint that the run starts from; absent if it starts from a new adapter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<StartCheckpoint>,
    /// Tokenizer, if it is not the tokenizer of the base model: a name on the hub, or a folder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<String>,
    /// LoRA rank.
    pub rank: u32,
    /// Seed of the order of the data, of the samples and of the initial weights.
    pub seed: u64,
    /// Total number of steps.
    pub steps: u64,
    /// Optimizer. Its learning rate is the peak of the schedule.
    pub optimizer: AdamParams,
    /// Learning-rate schedule after the warm-up.
    pub schedule: Schedule,
    /// Number of steps over which the learning rate rises to its peak.
    pub warmup_steps: u64,
    /// Training data.
    pub data: DataSettings,
    /// Evaluation during the run; absent if nothing is evaluated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evaluation: Option<EvaluationSettings>,
    /// Checkpoints.
    pub checkpoints: CheckpointSettings,
    /// Completions that are sampled for a person to read; absent if none are sampled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub samples: Option<SampleSettings>,
    /// Format of an additional file with the metrics; absent if no such file is written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub event_log: Option<EventLogFormat>,
    /// Path of the plot, if it is not in the run folder. A resumed run can change it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plot: Option<PathBuf>,
}

impl RunSettings {
    /// Creates the settings of a run with rank 16, 100 steps, a constant learning rate of 1e-4, no
    /// evaluation, and a checkpoint only at the end.
    #[must_use]
    pub fn new(base_model: impl Into<String>, method: MethodSettings) -> Self {
        Self {
            method,
            base_model: base_model.into(),
            start: None,
            tokenizer: None,
            rank: 16,
            seed: 0,
            steps: 100,
            optimizer: AdamParams::default(),
            schedule: Schedule::Constant,
            warmup_steps: 0,
            data: DataSettings::default(),
            evaluation: None,
            checkpoints: CheckpointSettings::default(),
            samples: None,
            event_log: None,
            plot: None,
        }
    }

    /// Returns the names of the settings that differ from `other` and that a resumed run must not
    /// change. The number of steps may change, and so may settings that do not affect the weights,
    /// such as the intervals of evaluations and checkpoints.
    #[must_use]
    pub fn fixed_differences(&self, other: &Self) -> Vec<&'static str> {
        let mut differences = vec![
            ("base_model", self.base_model != other.base_model),
            ("start", self.start != other.start),
            ("rank", self.rank != other.rank),
            ("seed", self.seed != other.seed),
            ("optimizer", self.optimizer != other.optimizer),
            ("schedule", self.schedule != other.schedule),
            ("warmup_steps", self.warmup_steps != other.warmup_steps),
            ("data", self.data != other.data),
        ];
        differences.extend(self.method.differences(&other.method));
        differences.into_iter().filter(|(_, differs)| *differs).map(|(name, _)| name).collect()
    }
}

/// Checkpoint that a run starts from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartCheckpoint {
    /// Path of the training checkpoint.
    pub checkpoint: TinkerPath,
    /// Whether the run starts with the optimizer state of the checkpoint too.
    pub with_optimizer: bool,
}

/// Learning-rate schedule after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Schedule {
    /// Keeps the learning rate constant.
    Constant,
    /// Decreases the learning rate linearly to 0.
    Linear,
    /// Decreases the learning rate to 0 along a cosine.
    Cosine,
}

impl Schedule {
    /// All schedules.
    pub const ALL: [Self; 3] = [Self::Constant, Self::Linear, Self::Cosine];

    /// Returns the name in lower case.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Constant => "constant",
            Self::Linear => "linear",
            Self::Cosine => "cosine",
        }
    }
}

impl FromStr for Schedule {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|schedule| schedule.as_str() == name);
        found.ok_or_else(|| "expected constant, linear or cosine".to_owned())
    }
}

/// Training data of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataSettings {
    /// Absolute paths of the training files. Empty if a program passed the data.
    #[serde(default)]
    pub files: Vec<PathBuf>,
    /// Checksum of the training data at the start of the run.
    pub digest: String,
}

/// Evaluation of a run: before the first step, at an interval, and after the last step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EvaluationSettings {
    /// Absolute path of the evaluation file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
    /// Checksum of the evaluation file at the start of the run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// Fraction of the training data that is held out, if there is no file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fraction: Option<f64>,
    /// Interval in steps; 0 evaluates only before the first and after the last step.
    pub every: u64,
}

/// Checkpoints of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointSettings {
    /// Interval in steps; 0 saves only at the end.
    pub every: u64,
    /// Number of checkpoints to keep, in addition to the checkpoint with the highest reward.
    pub keep: usize,
}

impl Default for CheckpointSettings {
    fn default() -> Self {
        Self { every: 0, keep: 2 }
    }
}

/// Completions that are sampled during a run for a person to read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SampleSettings {
    /// Absolute path of the file of prompts.
    pub prompts: PathBuf,
    /// Interval in steps.
    pub every: u64,
}

/// Format of an additional file with the metrics of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum EventLogFormat {
    /// Event file of TensorBoard, which other programs import as well.
    Tensorboard,
}

/// Training method.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RunMethod {
    /// Supervised fine-tuning.
    Sft,
    /// Direct preference optimization.
    Dpo,
    /// Reinforcement learning.
    Rl,
}

impl RunMethod {
    /// Returns the name in `run.json`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Sft => "sft",
            Self::Dpo => "dpo",
            Self::Rl => "rl",
        }
    }

    /// Returns the command that starts and resumes runs of this method.
    #[must_use]
    pub const fn command(self) -> &'static str {
        match self {
            Self::Sft | Self::Dpo => "tinkex train",
            Self::Rl => "tinkex rl",
        }
    }
}

impl fmt::Display for RunMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Training method with the settings that only this method has.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "method", rename_all = "snake_case")]
#[non_exhaustive]
pub enum MethodSettings {
    /// Supervised fine-tuning.
    Sft(SftSettings),
    /// Direct preference optimization.
    Dpo(DpoSettings),
    /// Reinforcement learning.
    Rl(RlSettings),
}

impl MethodSettings {
    /// Returns the method.
    #[must_use]
    pub const fn method(&self) -> RunMethod {
        match self {
            Self::Sft(_) => RunMethod::Sft,
            Self::Dpo(_) => RunMethod::Dpo,
            Self::Rl(_) => RunMethod::Rl,
        }
    }

    /// Compares the settings with `other`. Returns the name of each setting, and whether it
    /// differs.
    fn differences(&self, other: &Self) -> Vec<(&'static str, bool)> {
        match (self, other) {
            (Self::Sft(one), Self::Sft(two)) => vec![
                ("batch_size", one.batch_size != two.batch_size),
                ("max_tokens", one.max_tokens != two.max_tokens),
                ("long_examples", one.long_examples != two.long_examples),
                ("learned_messages", one.learned_messages != two.learned_messages),
            ],
            (Self::Dpo(one), Self::Dpo(two)) => vec![
                ("beta", one.beta != two.beta),
                ("batch_size", one.batch_size != two.batch_size),
                ("max_tokens", one.max_tokens != two.max_tokens),
                ("long_examples", one.long_examples != two.long_examples),
            ],
            (Self::Rl(one), Self::Rl(two)) => vec![
                ("reward", one.reward != two.reward),
                ("prompts_are_messages", one.prompts_are_messages != two.prompts_are_messages),
                ("group_size", one.group_size != two.group_size),
                ("groups_per_batch", one.groups_per_batch != two.groups_per_batch),
                ("loss", one.loss != two.loss),
                ("advantage", one.advantage != two.advantage),
                ("kl_coefficient", one.kl_coefficient != two.kl_coefficient),
                ("max_policy_age", one.max_policy_age != two.max_policy_age),
                ("sampling", one.sampling != two.sampling),
            ],
            _ => vec![("method", true)],
        }
    }
}

/// Settings of supervised fine-tuning.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SftSettings {
    /// Number of examples per step.
    pub batch_size: usize,
    /// Maximum length of an example in tokens; absent if the server reports no context length.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<usize>,
    /// Whether longer examples are truncated or rejected.
    pub long_examples: LongExamples,
    /// Assistant messages of a conversation to learn.
    pub learned_messages: LearnedMessages,
}

impl Default for SftSettings {
    fn default() -> Self {
        Self {
            batch_size: 16,
            max_tokens: None,
            long_examples: LongExamples::Truncate,
            learned_messages: LearnedMessages::All,
        }
    }
}

/// Treatment of examples with too many tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LongExamples {
    /// Truncate the examples.
    Truncate,
    /// Reject the data: the run does not start.
    Reject,
}

/// Assistant messages of a conversation to learn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LearnedMessages {
    /// All assistant messages.
    All,
    /// The last assistant message.
    Last,
    /// All assistant messages, each in its own example.
    Each,
}

/// Settings of direct preference optimization.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DpoSettings {
    /// Coefficient β of the DPO loss. A larger β keeps the model closer to the reference.
    pub beta: f64,
    /// Number of pairs per step.
    pub batch_size: usize,
    /// Maximum length of a completion with its prompt in tokens; absent if the server reports no
    /// context length.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<usize>,
    /// Whether longer completions are truncated or rejected.
    pub long_examples: LongExamples,
}

impl Default for DpoSettings {
    fn default() -> Self {
        Self { beta: 0.1, batch_size: 16, max_tokens: None, long_examples: LongExamples::Truncate }
    }
}

/// Settings of reinforcement learning.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RlSettings {
    /// Reward of a completion.
    pub reward: RewardSettings,
    /// Whether the text of a prompt is sent as a message of the user instead of being continued.
    pub prompts_are_messages: bool,
    /// Number of completions per prompt.
    pub group_size: u32,
    /// Number of prompts per step.
    pub groups_per_batch: usize,
    /// Loss.
    pub loss: LossSettings,
    /// Estimator of the advantages.
    pub advantage: Advantage,
    /// Coefficient of the penalty for the KL divergence from the starting weights; 0 disables the
    /// penalty.
    pub kl_coefficient: f64,
    /// Maximum age of the weights that sample a batch, in steps. 0 samples every batch from the
    /// current weights.
    pub max_policy_age: u64,
    /// Sampling parameters of the completions.
    pub sampling: SamplingParams,
}

impl Default for RlSettings {
    fn default() -> Self {
        Self {
            reward: RewardSettings::Custom,
            prompts_are_messages: false,
            group_size: 8,
            groups_per_batch: 16,
            loss: LossSettings::new("importance_sampling"),
            advantage: Advantage::default(),
            kl_coefficient: 0.0,
            max_policy_age: 0,
            sampling: SamplingParams::new().max_tokens(256),
        }
    }
}

/// Reward of a completion.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[non_exhaustive]
pub enum RewardSettings {
    /// 1 if the completion equals the field `answer` of its prompt.
    Exact,
    /// 1 if the last number of the completion equals the field `answer`.
    Number,
    /// 1 if a pattern matches somewhere in the completion.
    Regex {
        /// Pattern; absent if every prompt has a field `pattern`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pattern: Option<String>,
    },
    /// From 0 to 1: higher the closer the length of the completion is to a number of characters.
    Length {
        /// Number of characters; absent if every prompt has a field `length`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        characters: Option<u32>,
    },
    /// Reward that an external program computes.
    Program {
        /// Shell command.
        command: String,
    },
    /// Reward that a Rust function of the training program computes.
    Custom,
}

/// Loss of reinforcement learning.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossSettings {
    /// Name of the loss function in requests, such as `ppo`, or `custom`.
    pub function: String,
    /// Options of the loss function that differ from their defaults.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub options: BTreeMap<String, LossOption>,
}

impl LossSettings {
    /// Creates the settings of a loss with its default options.
    #[must_use]
    pub fn new(function: impl Into<String>) -> Self {
        Self { function: function.into(), options: BTreeMap::new() }
    }
}

/// Option of a loss function.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum LossOption {
    /// A number.
    Number(f64),
    /// A text.
    Text(String),
}

/// Estimator of the advantages of a group of completions from their rewards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Advantage {
    /// Reward minus the mean of the group.
    #[default]
    GroupMean,
    /// Reward minus the mean of the group, divided by the standard deviation of the group, as in
    /// GRPO.
    GroupNormalized,
    /// Reward minus the mean of the other completions of the group (RLOO).
    LeaveOneOut,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resumed_run_may_change_its_length_and_intervals_only() {
        let old = RunSettings::new("m", MethodSettings::Rl(RlSettings::default()));
        let mut new = old.clone();
        new.steps = 7;
        new.checkpoints.every = 3;
        new.plot = Some("plot.png".into());
        assert!(old.fixed_differences(&new).is_empty());
        new.rank = 4;
        if let MethodSettings::Rl(rl) = &mut new.method {
            rl.group_size = 2;
        }
        assert_eq!(old.fixed_differences(&new), ["rank", "group_size"]);
        let sft = RunSettings::new("m", MethodSettings::Sft(SftSettings::default()));
        assert_eq!(old.fixed_differences(&sft), ["method"]);
    }
}
