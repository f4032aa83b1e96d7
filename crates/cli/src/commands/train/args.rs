//! Arguments of `tinkex train`.

use std::path::PathBuf;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use tinkex_runs::Schedule;

use crate::args::{positive, whole_number};
use crate::commands::training::args::{ResumeArgs, RunArgs, number};

use super::settings::{LearnFrom, TrainMethod};

/// Arguments of `tinkex train`.
#[derive(Debug, Args)]
#[command(after_help = "\
FILE is JSON Lines or a JSON array, plain or compressed with gzip or Zstandard; - is standard input.
All examples of a file have the same format, out of these:
  {\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}, {\"role\": \"assistant\", \"content\": \"Hello!\"}]}
  {\"prompt\": \"The capital of France is\", \"completion\": \" Paris.\"}
  {\"text\": \"All of this text is learned.\"}
  {\"instruction\": \"Translate to French\", \"input\": \"cheese\", \"output\": \"fromage\"}       Alpaca
  {\"conversations\": [{\"from\": \"human\", \"value\": \"Hi\"}, {\"from\": \"gpt\", \"value\": \"Hello!\"}]}  ShareGPT
With --method dpo, each line is a prompt with a chosen and a rejected completion:
  {\"prompt\": \"The capital of France is\", \"chosen\": \" Paris.\", \"rejected\": \" Rome.\"}

The run folder contains run.json (state for --resume), metrics.jsonl (one line per step) and plot.svg.
Ctrl-C saves a checkpoint and stops; a second Ctrl-C stops immediately.

Examples:
  tinkex train examples.jsonl --local                   fine-tune the built-in model on this machine
  tinkex train examples.jsonl --local --dry-run         show the plan, and the time from a measured step
  zcat *.jsonl.gz | tinkex train - --local              train on standard input
  tinkex train examples.jsonl --model Qwen/Qwen3-8B --epochs 2 --eval-split 0.1
  tinkex train examples.jsonl --local --plot loss.png   plot the loss to a PNG file
  tinkex train examples.jsonl --local --sample-prompts prompts.jsonl   show answers during training
  tinkex train examples.jsonl --local --log-to tensorboard   write an event file for TensorBoard
  tinkex train pairs.jsonl --local --method dpo         learn from preference pairs
  tinkex train more.jsonl --from examples --local       start from the weights of the run examples
  tinkex train --resume examples --local                resume an interrupted run
  tinkex train --resume examples --steps 300 --local    extend a finished run to 300 steps")]
#[command(mut_arg("resume", |argument| {
    argument
        .conflicts_with_all(FIXED_ARGS)
        .help("Resume a run with its original options; with --steps or --epochs, extend it")
}))]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    pub(super) run: RunArgs,
    #[command(flatten)]
    pub(super) examples: ExampleArgs,
    #[command(flatten)]
    pub(super) length: LengthArgs,
    #[command(flatten)]
    pub(super) resume: ResumeArgs,
    /// Show what the run would do without starting it; on this machine, measure a step
    #[arg(long, help_heading = "Run")]
    pub(super) dry_run: bool,
    /// Price of a million training tokens in USD, for the cost that --dry-run shows
    #[arg(
        long,
        value_name = "USD",
        value_parser = price,
        requires = "dry_run",
        help_heading = "Run"
    )]
    pub(super) price: Option<f64>,
}

/// Arguments of [`ExampleArgs`], which a resumed run cannot change.
const FIXED_ARGS: [&str; 12] = [
    "method",
    "beta",
    "with_optimizer",
    "schedule",
    "warmup",
    "batch_size",
    "max_tokens",
    "refuse_long",
    "learn",
    "eval_split",
    "sample_prompts",
    "sample_every",
];

/// Length of a run. A resumed run can change it.
#[derive(Clone, Copy, Debug, Args)]
pub(super) struct LengthArgs {
    /// Number of passes over the data; with --resume, the new total [default: 3]
    #[arg(
        long,
        value_name = "N",
        value_parser = epochs,
        conflicts_with = "steps",
        help_heading = "Optimization"
    )]
    epochs: Option<f64>,
    /// Total number of steps; with --resume, the new total
    #[arg(
        long,
        value_name = "N",
        value_parser = positive::<u64>,
        help_heading = "Optimization"
    )]
    steps: Option<u64>,
}

impl LengthArgs {
    /// Returns whether the command line sets the length.
    pub(super) fn is_set(self) -> bool {
        self.epochs.is_some() || self.steps.is_some()
    }

    /// Returns the total number of steps, for `per_epoch` steps in one pass over the data.
    pub(super) fn total_steps(self, per_epoch: u64) -> u64 {
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a count of steps"
        )]
        let of_epochs = (per_epoch as f64 * self.epochs.unwrap_or(3.0)).ceil() as u64;
        self.steps.unwrap_or(of_epochs).max(1)
    }
}

/// Arguments that determine a run on examples, besides the arguments that all runs have.
#[derive(Clone, Debug, Args)]
pub(super) struct ExampleArgs {
    /// Training method: sft (supervised), or dpo (preference pairs)
    #[arg(
        long,
        value_enum,
        default_value_t = TrainMethod::Sft,
        hide_possible_values = true,
        help_heading = "Optimization"
    )]
    pub(super) method: TrainMethod,
    /// Strength of the preferences: how close DPO stays to the starting weights [default: 0.1]
    #[arg(long, value_name = "BETA", value_parser = beta, help_heading = "Optimization")]
    pub(super) beta: Option<f64>,
    /// With --from, also load the optimizer state of the checkpoint
    #[arg(long, requires = "from", help_heading = "Model")]
    pub(super) with_optimizer: bool,
    /// Learning-rate schedule: constant, linear or cosine
    #[arg(
        long,
        value_name = "SCHEDULE",
        value_parser = PossibleValuesParser::new(Schedule::ALL.map(Schedule::as_str))
            .try_map(|name| name.parse::<Schedule>()),
        default_value = Schedule::Linear.as_str(),
        hide_possible_values = true,
        help_heading = "Optimization"
    )]
    pub(super) schedule: Schedule,
    /// Number of steps over which the learning rate rises to its peak
    #[arg(
        long,
        value_name = "STEPS",
        default_value_t = 0,
        value_parser = whole_number::<u64>,
        help_heading = "Optimization"
    )]
    pub(super) warmup: u64,
    /// Number of examples per step
    #[arg(
        short,
        long,
        value_name = "N",
        default_value_t = 16,
        value_parser = positive::<usize>,
        help_heading = "Optimization"
    )]
    pub(super) batch_size: usize,
    /// Maximum length of an example [default: the context length of the model]
    #[arg(long, value_name = "TOKENS", value_parser = positive::<usize>, help_heading = "Data")]
    pub(super) max_tokens: Option<usize>,
    /// Reject the file if an example is too long instead of truncating the example
    #[arg(long, help_heading = "Data")]
    pub(super) refuse_long: bool,
    /// Assistant messages to learn: all, last, or each in its own example
    #[arg(
        long,
        value_enum,
        value_name = "MESSAGES",
        default_value_t = LearnFrom::All,
        hide_possible_values = true,
        help_heading = "Data"
    )]
    pub(super) learn: LearnFrom,
    /// Hold out this fraction of the data for evaluation
    #[arg(
        long,
        value_name = "FRACTION",
        default_value_t = 0.0,
        value_parser = fraction,
        conflicts_with = "eval_file",
        help_heading = "Evaluation and checkpoints"
    )]
    pub(super) eval_split: f64,
    /// Answer the prompts of this file during training; JSON Lines as for `tinkex rl`
    #[arg(long, value_name = "FILE", help_heading = "Evaluation and checkpoints")]
    pub(super) sample_prompts: Option<PathBuf>,
    /// Interval of the answers [default: one tenth of the run]
    #[arg(
        long,
        value_name = "STEPS",
        value_parser = positive::<u64>,
        requires = "sample_prompts",
        help_heading = "Evaluation and checkpoints"
    )]
    pub(super) sample_every: Option<u64>,
}

fn beta(text: &str) -> Result<f64, String> {
    number(text, |beta| beta > 0.0 && beta <= 1e3, "a number above 0, such as 0.1")
}

fn price(text: &str) -> Result<f64, String> {
    number(text, |price| (0.0..1e9).contains(&price), "a price in USD, such as 0.4")
}

fn epochs(text: &str) -> Result<f64, String> {
    number(text, |epochs| epochs > 0.0 && epochs < 1e6, "a number above 0, such as 3 or 0.5")
}

fn fraction(text: &str) -> Result<f64, String> {
    number(
        text,
        |fraction| (0.0..1.0).contains(&fraction),
        "a fraction of at least 0 and below 1, such as 0.1",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resume_conflicts_with_every_argument_that_determines_a_run() {
        let command = ExampleArgs::augment_args(clap::Command::new("train"));
        let all: Vec<_> =
            command.get_arguments().map(|argument| argument.get_id().as_str()).collect();
        assert_eq!(all, FIXED_ARGS);
    }
}
