//! Arguments of `tinkex rl`.

use std::time::Duration;

use clap::{Args, ValueEnum};
use tinkex::LossFn;
use tinkex_runs::{Advantage, LossOption, LossSettings};

use crate::args::{positive, timeout, whole_number};
use crate::commands::training::args::{ResumeArgs, RunArgs, number};

use super::rewards::RewardOption;

/// Arguments of `tinkex rl`.
#[derive(Debug, Args)]
#[command(after_help = "\
Each line of FILE is a prompt; all other fields are passed to the reward as metadata:
  {\"prompt\": \"2 + 2 =\", \"answer\": 4}
  {\"messages\": [{\"role\": \"user\", \"content\": \"What is 2 + 2?\"}], \"answer\": 4}

Rewards:
  exact             1 if the completion equals the field \"answer\"
  number            1 if the last number of the completion equals the field \"answer\"
  regex[:PATTERN]   1 if the pattern, or the field \"pattern\", matches
  length[:N]        up to 1, the closer the length is to N characters, or to the field \"length\"
  COMMAND           a program: reads lines {\"prompt\", \"completion\", \"metadata\"} and prints
                    {\"reward\": NUMBER, \"metrics\": {…}} for each

The run folder contains run.json (state for --resume), metrics.jsonl (one line per step),
samples.jsonl (one line per completion) and plot.svg.
Ctrl-C saves a checkpoint and stops; a second Ctrl-C stops immediately.

Examples:
  tinkex rl prompts.jsonl --local --reward 'regex:^[^a-z]+$' --chat   answer in capital letters
  tinkex rl prompts.jsonl --local --reward number --group-size 16
  tinkex rl prompts.jsonl --model Qwen/Qwen3-8B --reward 'python3 reward.py' --off-policy 1
  tinkex rl --resume prompts --local                                  resume an interrupted run")]
#[command(mut_arg("resume", |argument| argument.conflicts_with_all(FIXED_ARGS)))]
#[command(mut_arg("files", |argument| {
    argument.help("Prompts: JSON Lines or a JSON array, also compressed; - is standard input")
}))]
#[command(mut_arg("learning_rate", |argument| {
    argument.help("Learning rate [default: depends on the model]")
}))]
#[command(mut_arg("eval_file", |argument| {
    argument.help("Evaluate on the prompts of this file, at temperature 0")
}))]
#[command(mut_arg("eval_every", |argument| {
    argument.help("Evaluation interval; 0 evaluates only before and after [default: 10]")
}))]
#[command(mut_arg("save_every", |argument| {
    argument.help("Checkpoint interval; a crash loses the steps since the last checkpoint [default: 1]")
}))]
#[command(mut_arg("keep", |argument| {
    argument.help("Number of checkpoints to keep, besides the one with the highest reward")
}))]
pub(crate) struct RlArgs {
    #[command(flatten)]
    pub(super) policy: PolicyArgs,
    #[command(flatten)]
    pub(super) run: RunArgs,
    #[command(flatten)]
    pub(super) resume: ResumeArgs,
    /// Total number of steps; with --resume, the new total [default: 100]
    #[arg(
        long,
        value_name = "N",
        value_parser = positive::<u64>,
        help_heading = "Optimization"
    )]
    pub(super) steps: Option<u64>,
    /// Number of reward processes that run in parallel
    #[arg(
        long,
        value_name = "N",
        default_value_t = 4,
        value_parser = positive::<usize>,
        help_heading = "Reward"
    )]
    pub(super) reward_workers: usize,
    /// Time for the reward of one completion, such as 30s
    #[arg(
        long,
        value_name = "DURATION",
        default_value = "60s",
        value_parser = timeout,
        help_heading = "Reward"
    )]
    pub(super) reward_timeout: Duration,
}

/// Arguments of [`PolicyArgs`], which a resumed run cannot change.
const FIXED_ARGS: [&str; 12] = [
    "reward",
    "chat",
    "group_size",
    "groups_per_batch",
    "loss",
    "clip_low",
    "clip_high",
    "advantage",
    "kl_coef",
    "off_policy",
    "max_tokens",
    "temperature",
];

/// Arguments that determine a run with rewards, besides the arguments that all runs have.
#[derive(Clone, Debug, Args)]
pub(super) struct PolicyArgs {
    /// Reward: exact, number, regex[:PATTERN], length[:N], or a shell command
    #[arg(
        long,
        value_name = "REWARD",
        required_unless_present = "resume",
        help_heading = "Reward"
    )]
    pub(super) reward: Option<RewardOption>,
    /// Send the text of "prompt" as a chat message instead of continuing it
    #[arg(long, help_heading = "Data")]
    pub(super) chat: bool,
    /// Number of completions per prompt
    #[arg(
        long,
        value_name = "N",
        default_value_t = 8,
        value_parser = at_least_two,
        help_heading = "Optimization"
    )]
    pub(super) group_size: u32,
    /// Number of prompts per step
    #[arg(
        long,
        value_name = "N",
        default_value_t = 16,
        value_parser = positive::<usize>,
        help_heading = "Optimization"
    )]
    pub(super) groups_per_batch: usize,
    /// Loss: importance_sampling, ppo, cispo, or grpo (ppo with normalized advantages)
    #[arg(
        long,
        value_enum,
        default_value_t = RlLoss::ImportanceSampling,
        hide_possible_values = true,
        help_heading = "Optimization"
    )]
    pub(super) loss: RlLoss,
    /// Lower bound of the probability ratio for ppo, grpo and cispo [default: 0.8, cispo 0]
    #[arg(long, value_name = "RATIO", value_parser = ratio, help_heading = "Optimization")]
    pub(super) clip_low: Option<f64>,
    /// Upper bound of the probability ratio for ppo, grpo and cispo [default: 1.2, cispo 4]
    #[arg(long, value_name = "RATIO", value_parser = ratio, help_heading = "Optimization")]
    pub(super) clip_high: Option<f64>,
    /// Advantage: mean, normalized or leave_one_out [default: mean, for grpo normalized]
    #[arg(
        long,
        value_enum,
        value_name = "ESTIMATOR",
        hide_possible_values = true,
        help_heading = "Optimization"
    )]
    pub(super) advantage: Option<AdvantageOption>,
    /// Coefficient of the penalty for leaving the starting weights
    #[arg(
        long,
        value_name = "C",
        default_value_t = 0.0,
        value_parser = coefficient,
        help_heading = "Optimization"
    )]
    pub(super) kl_coef: f64,
    /// Maximum age, in steps, of the weights that sample a batch; above 0, sampling overlaps
    /// training
    #[arg(
        long,
        value_name = "STEPS",
        default_value_t = 0,
        value_parser = whole_number::<u64>,
        help_heading = "Optimization"
    )]
    pub(super) off_policy: u64,
    /// Maximum number of tokens per completion
    #[arg(
        long,
        value_name = "N",
        default_value_t = 256,
        value_parser = positive::<u32>,
        help_heading = "Sampling"
    )]
    pub(super) max_tokens: u32,
    /// Sampling temperature; other values than 1 bias the gradient and exclude --kl-coef
    #[arg(
        short,
        long,
        value_name = "T",
        default_value_t = 1.0,
        value_parser = temperature,
        help_heading = "Sampling"
    )]
    pub(super) temperature: f64,
}

/// Value of `--loss`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(super) enum RlLoss {
    /// Policy gradient with importance sampling
    ImportanceSampling,
    /// Clipped policy gradient
    Ppo,
    /// Policy gradient with clipped importance weights
    Cispo,
    /// Clipped policy gradient with normalized advantages
    Grpo,
}

/// Value of `--advantage`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(super) enum AdvantageOption {
    /// Reward minus the mean of the group
    Mean,
    /// Also divided by the standard deviation of the group
    Normalized,
    /// Reward minus the mean of the other completions
    LeaveOneOut,
}

impl PolicyArgs {
    /// Returns the loss with its options.
    pub(super) fn loss(&self) -> LossSettings {
        let function = match self.loss {
            RlLoss::ImportanceSampling => LossFn::ImportanceSampling,
            RlLoss::Ppo | RlLoss::Grpo => LossFn::Ppo,
            RlLoss::Cispo => LossFn::Cispo,
        };
        let mut loss = LossSettings::new(function.as_str());
        if self.loss != RlLoss::ImportanceSampling {
            let bounds =
                [("clip_low_threshold", self.clip_low), ("clip_high_threshold", self.clip_high)];
            for (name, bound) in bounds {
                let option = bound.map(|bound| (name.to_owned(), LossOption::Number(bound)));
                loss.options.extend(option);
            }
        }
        loss
    }

    /// Returns the estimator of the advantages.
    pub(super) fn advantage(&self) -> Advantage {
        match (self.advantage, self.loss) {
            (Some(AdvantageOption::Normalized), _) | (None, RlLoss::Grpo) => {
                Advantage::GroupNormalized
            }
            (Some(AdvantageOption::LeaveOneOut), _) => Advantage::LeaveOneOut,
            (Some(AdvantageOption::Mean) | None, _) => Advantage::GroupMean,
        }
    }
}

fn at_least_two(text: &str) -> Result<u32, String> {
    let parsed = text.parse().ok().filter(|number| (2..=1024).contains(number));
    parsed.ok_or_else(|| "expected a whole number from 2 to 1024".to_owned())
}

fn ratio(text: &str) -> Result<f64, String> {
    number(text, |ratio| (0.0..=1e6).contains(&ratio), "a ratio of at least 0, such as 0.8 or 1.2")
}

fn coefficient(text: &str) -> Result<f64, String> {
    number(text, |value| (0.0..=1e6).contains(&value), "a number of at least 0, such as 0.01")
}

fn temperature(text: &str) -> Result<f64, String> {
    number(text, |value| value > 0.0 && value <= 100.0, "a number above 0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resume_conflicts_with_every_argument_that_determines_a_run() {
        let command = PolicyArgs::augment_args(clap::Command::new("rl"));
        let all: Vec<_> =
            command.get_arguments().map(|argument| argument.get_id().as_str()).collect();
        assert_eq!(all, FIXED_ARGS);
    }
}
