//! What can be typed after `train`.

use std::path::PathBuf;

use clap::Args;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use super::plan::Schedule;
use super::plot;
use super::state::LearnFrom;

/// What can be typed after `train`.
#[derive(Debug, Args)]
#[command(after_help = "\
A line of FILE is a conversation or a pair:
  {\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}, {\"role\": \"assistant\", \"content\": \"Hello!\"}]}
  {\"prompt\": \"The capital of France is\", \"completion\": \" Paris.\"}

The run has a folder: run.json (to go on from), metrics.jsonl (a line for each step), loss.svg.
Ctrl-C saves and stops; Ctrl-C twice just stops.

Examples:
  tinkex train talks.jsonl --local                     the built-in model, on this machine
  tinkex train talks.jsonl --dry-run --local           what it would do: examples, tokens, steps
  tinkex train talks.jsonl --model Qwen/Qwen3-8B --epochs 2 --eval-split 0.1
  tinkex train talks.jsonl --local --plot loss.png     the loss as pixels, where you want it
  tinkex train --resume talks-run --local              go on after an interruption")]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    pub(super) wanted: RunArgs,
    /// Go on with the run in this folder, which keeps its settings
    #[arg(long, value_name = "DIR", conflicts_with_all = KEPT)]
    pub(super) resume: Option<PathBuf>,
    /// Where the loss is drawn, as .svg or .png; without it loss.svg in the run's folder
    #[arg(long, value_name = "FILE", value_parser = plot::file)]
    pub(super) plot: Option<PathBuf>,
    /// TrainProgress the plan and do nothing
    #[arg(long)]
    pub(super) dry_run: bool,
}

/// What a run that is gone on with keeps. Each by its name, so that an error names only what was typed.
const KEPT: [&str; 20] = [
    "file",
    "model",
    "rank",
    "learning_rate",
    "schedule",
    "warmup",
    "batch_size",
    "epochs",
    "steps",
    "eval_file",
    "eval_split",
    "eval_every",
    "save_every",
    "keep",
    "max_tokens",
    "refuse_long",
    "learn",
    "seed",
    "tokenizer",
    "dir",
];

/// What to do where `--resume` meets something that the run keeps.
pub(crate) fn hint(said: &clap::Error) -> Option<String> {
    if said.kind() != ErrorKind::ArgumentConflict {
        return None;
    }
    let named = |kind| match said.get(kind) {
        Some(ContextValue::String(one)) => vec![one.clone()],
        Some(ContextValue::Strings(all)) => all.clone(),
        _ => Vec::new(),
    };
    let both = [named(ContextKind::InvalidArg), named(ContextKind::PriorArg)].concat();
    let (resume, kept): (Vec<_>, Vec<_>) =
        both.into_iter().partition(|arg| arg.starts_with("--resume"));
    (!resume.is_empty()).then(|| {
        format!(
            "a run keeps what it began with: leave {} out to go on with it, or --resume to start \
             a new one",
            kept.join(" and ")
        )
    })
}

/// What decides a run.
#[derive(Clone, Debug, Args)]
pub(super) struct RunArgs {
    /// Conversations, or prompts with completions; one on each line
    #[arg(value_name = "FILE.jsonl", required_unless_present = "resume")]
    pub(super) file: Option<PathBuf>,
    /// The base model; with --local the built-in one if left out
    #[arg(short, long, alias = "base-model", value_name = "NAME")]
    pub(super) model: Option<String>,
    /// The adapter's rank
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) rank: u32,
    /// How far a step goes; without it what suits the model
    #[arg(long, visible_alias = "lr", value_name = "RATE", value_parser = rate)]
    pub(super) learning_rate: Option<f64>,
    /// How the learning rate changes
    #[arg(long, value_enum, default_value_t = Schedule::Linear)]
    pub(super) schedule: Schedule,
    /// Steps over which the learning rate rises at first
    #[arg(long, value_name = "STEPS", default_value_t = 0)]
    pub(super) warmup: u64,
    /// Examples in a step
    #[arg(short, long, value_name = "N", default_value_t = 16, value_parser = count)]
    pub(super) batch_size: usize,
    /// How often every example is seen
    #[arg(long, value_name = "N", default_value_t = 3.0, value_parser = epochs, conflicts_with = "steps")]
    pub(super) epochs: f64,
    /// How many steps, however often that sees every example
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) steps: Option<u64>,
    /// A file to evaluate on, which is never trained on
    #[arg(long, value_name = "FILE", conflicts_with = "eval_split")]
    pub(super) eval_file: Option<PathBuf>,
    /// Hold this part of the file back to evaluate on, such as 0.1
    #[arg(long, value_name = "PART", default_value_t = 0.0, value_parser = part)]
    pub(super) eval_split: f64,
    /// Steps between evaluations; without it ten in all
    #[arg(long, value_name = "STEPS")]
    pub(super) eval_every: Option<u64>,
    /// Steps between checkpoints; without it ten in all, 0 for none
    #[arg(long, value_name = "STEPS")]
    pub(super) save_every: Option<u64>,
    /// How many checkpoints to go on from are kept
    #[arg(long, value_name = "K", default_value_t = 2, value_parser = count)]
    pub(super) keep: usize,
    /// The longest example, in tokens; without it what the model can take
    #[arg(long, value_name = "N", value_parser = count)]
    pub(super) max_tokens: Option<usize>,
    /// Refuse the file if an example is too long; otherwise its end is cut off
    #[arg(long)]
    pub(super) refuse_long: bool,
    /// Which turns of a conversation are learned
    #[arg(long, value_enum, default_value_t = LearnFrom::All)]
    pub(super) learn: LearnFrom,
    /// The order of examples and the adapter's start
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(super) seed: u64,
    /// A tokenizer in place of the model's own: a name on the hub, or a folder
    #[arg(long, value_name = "NAME")]
    pub(super) tokenizer: Option<String>,
    /// The run's folder; without it FILE-run
    #[arg(long, value_name = "DIR")]
    pub(super) dir: Option<PathBuf>,
}

fn count(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number) if number > 0 => Ok(number),
        _ => Err("give a whole number above 0".to_owned()),
    }
}

fn number(text: &str, fits: impl Fn(f64) -> bool, wanted: &str) -> Result<f64, String> {
    text.parse().ok().filter(|number| fits(*number)).ok_or_else(|| wanted.to_owned())
}

fn rate(text: &str) -> Result<f64, String> {
    number(text, |rate| rate > 0.0 && rate < 1.0, "give a number above 0 and below 1, such as 2e-4")
}

fn epochs(text: &str) -> Result<f64, String> {
    number(text, |epochs| epochs > 0.0 && epochs < 1e6, "give a number above 0, such as 3 or 0.5")
}

fn part(text: &str) -> Result<f64, String> {
    number(text, |part| (0.0..1.0).contains(&part), "give a part between 0 and 1, such as 0.1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_keeps_everything_that_decides_it() {
        let command = RunArgs::augment_args(clap::Command::new("train"));
        let all: Vec<_> = command.get_arguments().map(|arg| arg.get_id().as_str()).collect();
        assert_eq!(all, KEPT);
    }
}
