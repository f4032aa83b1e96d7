//! Arguments that runs of all methods have.

use std::path::{Path, PathBuf};

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, ValueEnum};
use clap_complete::ArgValueCandidates;
use tinkex::CheckpointKind;
use tinkex::ServiceClient;
use tinkex_runs::{EventLogFormat, RunFolder};

use crate::args::{positive, whole_number};
use crate::commands::plot;
use crate::context::CommandContext;
use crate::error::CommandError;
use crate::id_cache;
use crate::reference::{self, CheckpointReference, RunName, choose_name};

/// Arguments that determine a run of any method.
#[derive(Clone, Debug, Args)]
pub(crate) struct RunArgs {
    /// Training data: JSON Lines or a JSON array, also compressed; - is standard input
    #[arg(value_name = "FILE", required_unless_present = "resume")]
    pub(crate) files: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Peak learning rate [default: depends on the model]
    #[arg(
        long,
        visible_alias = "lr",
        value_name = "RATE",
        value_parser = learning_rate,
        help_heading = "Optimization"
    )]
    pub(crate) learning_rate: Option<f64>,
    /// Seed of the order of the data, the samples and the initial weights
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        value_parser = whole_number::<u64>,
        help_heading = "Optimization"
    )]
    pub(crate) seed: u64,
    /// Evaluate on this file
    #[arg(long, value_name = "FILE", help_heading = "Evaluation and checkpoints")]
    pub(crate) eval_file: Option<PathBuf>,
    /// Evaluation interval; 0 evaluates only before and after [default: one tenth of the run]
    #[arg(
        long,
        value_name = "STEPS",
        value_parser = whole_number::<u64>,
        help_heading = "Evaluation and checkpoints"
    )]
    pub(crate) eval_every: Option<u64>,
    /// Checkpoint interval; 0 disables [default: one tenth of the run]
    #[arg(
        long,
        value_name = "STEPS",
        value_parser = whole_number::<u64>,
        help_heading = "Evaluation and checkpoints"
    )]
    pub(crate) save_every: Option<u64>,
    /// Number of checkpoints to keep
    #[arg(
        long,
        value_name = "N",
        default_value_t = 2,
        value_parser = positive::<usize>,
        help_heading = "Evaluation and checkpoints"
    )]
    pub(crate) keep: usize,
    /// Also log the metrics for another program: tensorboard
    #[arg(
        long,
        value_enum,
        value_name = "PROGRAM",
        hide_possible_values = true,
        help_heading = "Run"
    )]
    pub(crate) log_to: Option<LogTarget>,
    #[command(flatten)]
    pub(crate) folder: RunFolderArgs,
}

/// Arguments of [`RunArgs`], which a resumed run cannot change. They are listed one by one, not as a
/// group, so that an error names only the ones that were given.
pub(crate) const FIXED_ARGS: [&str; 14] = [
    "files",
    "model",
    "from",
    "tokenizer",
    "rank",
    "learning_rate",
    "seed",
    "eval_file",
    "eval_every",
    "save_every",
    "keep",
    "log_to",
    "name",
    "dir",
];

/// Run to resume, and the plot, which a resumed run can change.
#[derive(Clone, Debug, Args)]
pub(crate) struct ResumeArgs {
    /// Resume a run with its original options; with --steps, extend it
    #[arg(
        long,
        value_name = "RUN",
        conflicts_with_all = FIXED_ARGS,
        help_heading = "Run",
        add = ArgValueCandidates::new(reference::run_candidates)
    )]
    pub(crate) resume: Option<String>,
    /// Plot of the run, as .svg or .png [default: plot.svg in the run folder]
    #[arg(long, value_name = "FILE", value_parser = plot::parse_file, help_heading = "Run")]
    pub(crate) plot: Option<PathBuf>,
}

/// Program that the metrics of a run are logged for, besides `metrics.jsonl`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogTarget {
    /// Event file of TensorBoard, which other programs import as well
    Tensorboard,
}

impl From<LogTarget> for EventLogFormat {
    fn from(target: LogTarget) -> Self {
        match target {
            LogTarget::Tensorboard => Self::Tensorboard,
        }
    }
}

/// Returns a hint for a conflict of `--resume` with an argument that the run cannot change.
pub(crate) fn usage_hint(error: &clap::Error) -> Option<String> {
    if error.kind() != ErrorKind::ArgumentConflict {
        return None;
    }
    let arguments = |kind| match error.get(kind) {
        Some(ContextValue::String(one)) => vec![one.clone()],
        Some(ContextValue::Strings(all)) => all.clone(),
        _ => Vec::new(),
    };
    let both = [arguments(ContextKind::InvalidArg), arguments(ContextKind::PriorArg)].concat();
    let (resume, others): (Vec<_>, Vec<_>) =
        both.into_iter().partition(|argument| argument.starts_with("--resume"));
    (!resume.is_empty()).then(|| {
        format!(
            "Omit {} to resume the run with its original options, or omit --resume to start a new \
             run.",
            others.join(" and ")
        )
    })
}

/// Model to train.
#[derive(Clone, Debug, Args)]
pub(crate) struct ModelArgs {
    /// Base model; with --local, also a model folder or GGUF file [default with --local: tinkex/tiny]
    #[arg(
        short,
        long,
        alias = "base-model",
        value_name = "NAME",
        help_heading = "Model",
        add = ArgValueCandidates::new(id_cache::models)
    )]
    pub(crate) model: Option<String>,
    /// Start from the weights of a checkpoint: tinker://RUN/weights/NAME, RUN/NAME or RUN
    #[arg(
        long,
        value_name = "CHECKPOINT",
        value_parser = training_checkpoint,
        conflicts_with_all = ["model", "rank"],
        help_heading = "Model",
        add = ArgValueCandidates::new(reference::checkpoint_candidates)
    )]
    pub(crate) from: Option<CheckpointReference>,
    /// Use another tokenizer: a model name on the hub, or a folder
    #[arg(long, value_name = "NAME", help_heading = "Model")]
    pub(crate) tokenizer: Option<String>,
    /// LoRA rank
    #[arg(
        long,
        value_name = "N",
        default_value_t = 16,
        value_parser = positive::<u32>,
        help_heading = "Model"
    )]
    pub(crate) rank: u32,
}

/// Parses a reference to a checkpoint that can be trained further.
fn training_checkpoint(text: &str) -> Result<CheckpointReference, String> {
    match text.parse()? {
        CheckpointReference::Path(path) if path.kind() != CheckpointKind::Training => {
            Err("expected a training checkpoint: tinker://RUN/weights/NAME".to_owned())
        }
        reference => Ok(reference),
    }
}

impl ModelArgs {
    /// If the model is a folder or file, starts the local server with it and replaces the path by the
    /// name of the model. Call it before the client is created.
    pub(crate) async fn serve_path(
        &mut self,
        context: &mut CommandContext<'_>,
    ) -> Result<(), CommandError> {
        if let Some(model) = &mut self.model
            && let Some(name) = context.serve_model(model).await?
        {
            *model = name;
        }
        Ok(())
    }
}

/// Name and folder of a new run.
#[derive(Clone, Debug, Args)]
pub(crate) struct RunFolderArgs {
    /// Name of the run [default: from FILE, made unique: animals, animals-2]
    #[arg(long, value_name = "NAME", help_heading = "Run")]
    pub(crate) name: Option<RunName>,
    /// Run folder [default: NAME-run]
    #[arg(long, value_name = "DIR", help_heading = "Run")]
    pub(crate) dir: Option<PathBuf>,
}

impl RunFolderArgs {
    /// Chooses the name and the folder of a new run on `file`. Creates nothing.
    pub(crate) async fn choose(
        &self,
        context: &CommandContext<'_>,
        service: &ServiceClient,
        file: &Path,
    ) -> Result<(RunName, PathBuf), CommandError> {
        let folder_of = |name: &RunName| match &self.dir {
            Some(folder) => context.environment.path(folder),
            None => context.environment.folder.join(format!("{name}-run")),
        };
        let is_taken = |name: &RunName| self.dir.is_none() && folder_of(name).exists();
        let default = RunName::of_file(file);
        let name = choose_name(context, service, self.name.as_ref(), &default, is_taken).await?;
        let folder = folder_of(&name);
        check_unused(&folder)?;
        Ok((name, folder))
    }
}

/// Checks that a folder contains no run yet.
pub(crate) fn check_unused(folder: &Path) -> Result<(), CommandError> {
    if !RunFolder::contains_run(folder) {
        return Ok(());
    }
    let shown = folder.display();
    let message = format!("{shown} already contains a run");
    let hint = format!("Resume it with --resume {shown}, or pass another --name or --dir.");
    Err(CommandError::usage(message).hint(hint))
}

pub(crate) fn number(
    text: &str,
    is_valid: impl Fn(f64) -> bool,
    expected: &str,
) -> Result<f64, String> {
    let parsed = text.parse().ok().filter(|number| is_valid(*number));
    parsed.ok_or_else(|| format!("expected {expected}"))
}

fn learning_rate(text: &str) -> Result<f64, String> {
    number(text, |rate| rate > 0.0 && rate < 1.0, "a number above 0 and below 1, such as 2e-4")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resume_conflicts_with_every_argument_that_determines_a_run() {
        let command = RunArgs::augment_args(clap::Command::new("train"));
        let all: Vec<_> =
            command.get_arguments().map(|argument| argument.get_id().as_str()).collect();
        assert_eq!(all, FIXED_ARGS);
    }
}
