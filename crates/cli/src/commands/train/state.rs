//! [`RunState`]: configuration and progress of a run, stored as `run.json` in the run folder.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tinkex::recipes::{SavedCheckpoint, Schedule, TrainPlan};
use tinkex::{Timestamp, TooLong, TrainOn};
use tinkex_files::{AtomicWrite, FileLock, LockError};

use crate::error::{CommandError, Exit};
use crate::reference::RunName;

use super::data;
use super::source::one_or_many;

/// Configuration and progress of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RunState {
    /// Version of the file format.
    version: u32,
    /// Name of the run; `None` if an older version started it.
    #[serde(default)]
    pub(crate) name: Option<String>,
    pub(crate) settings: RunConfig,
    /// Settings that a resumption changed, oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) changes: Vec<SettingChange>,
    /// Checksum of the training files at the start of the run.
    digest: String,
    /// Checksum of the evaluation file, if there is one.
    #[serde(default)]
    eval_digest: Option<String>,
    /// Id of the training run on the server. Every resumption creates a new one.
    pub(crate) run_id: Option<String>,
    /// Checkpoints to resume from, oldest first.
    pub(crate) saved: Vec<SavedCheckpoint>,
    /// Path of the sampler checkpoint, once the run is finished or stopped.
    pub(crate) sampler: Option<String>,
    /// Path of the plot, if it is not in the run folder.
    #[serde(default)]
    pub(crate) plot: Option<PathBuf>,
    pub(crate) finished: bool,
}

/// Setting that a resumption changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SettingChange {
    /// Time of the resumption, in RFC 3339.
    time: String,
    /// Number of steps that were finished then.
    at_step: u64,
    setting: String,
    from: u64,
    to: u64,
}

impl SettingChange {
    /// Records that a resumption after `at_step` steps changed the total number of steps.
    pub(crate) fn of_steps(at_step: u64, from: u64, to: u64) -> Self {
        let (time, setting) = (Timestamp::now().to_string(), "steps".to_owned());
        Self { time, at_step, setting, from, to }
    }
}

/// Everything that determines what a run computes. A resumed run can change only the number of
/// steps.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RunConfig {
    #[serde(default)]
    pub(crate) method: TrainMethod,
    /// β of DPO.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) beta: Option<f64>,
    /// Training files.
    #[serde(rename = "file", with = "one_or_many")]
    pub(crate) files: Vec<PathBuf>,
    pub(crate) eval_file: Option<PathBuf>,
    pub(crate) eval_split: f64,
    pub(crate) model: String,
    /// Path of the checkpoint that the run starts from; `None` starts from a new adapter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) from: Option<String>,
    /// Whether the run starts with the optimizer state of that checkpoint too.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) with_optimizer: bool,
    pub(crate) tokenizer: Option<String>,
    pub(crate) rank: u32,
    pub(crate) learning_rate: f64,
    pub(crate) schedule: Schedule,
    pub(crate) warmup: u64,
    pub(crate) batch_size: usize,
    pub(crate) steps: u64,
    pub(crate) seed: u64,
    pub(crate) max_tokens: Option<usize>,
    pub(crate) refuse_long: bool,
    pub(crate) learn: LearnFrom,
    pub(crate) eval_every: u64,
    pub(crate) save_every: u64,
    /// Prompts that are answered during training.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) sample_prompts: Option<PathBuf>,
    /// Interval of the answers in steps.
    #[serde(default)]
    pub(crate) sample_every: u64,
    /// Program that the metrics are also logged for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) log_to: Option<LogTarget>,
    pub(crate) keep: usize,
}

/// Training method.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(crate) enum TrainMethod {
    /// Supervised fine-tuning
    #[default]
    Sft,
    /// Direct preference optimization
    Dpo,
}

/// Program that the metrics of a run are logged for, besides `metrics.jsonl`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LogTarget {
    /// Event file of TensorBoard, which other programs import as well
    Tensorboard,
}

/// Assistant messages of a conversation to learn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LearnFrom {
    /// All assistant messages
    All,
    /// The last assistant message
    Last,
    /// All assistant messages, each in its own example
    Each,
}

impl From<LearnFrom> for TrainOn {
    fn from(learn: LearnFrom) -> Self {
        match learn {
            LearnFrom::All => Self::AllAssistant,
            LearnFrom::Last => Self::LastAssistant,
            LearnFrom::Each => Self::EachAssistant,
        }
    }
}

impl RunConfig {
    pub(crate) fn plan(&self, examples: usize) -> TrainPlan {
        TrainPlan {
            examples,
            batch_size: self.batch_size,
            steps: self.steps,
            seed: self.seed,
            learning_rate: self.learning_rate,
            schedule: self.schedule,
            warmup: self.warmup,
        }
    }

    /// Returns the maximum length of an example in tokens, and what to do with longer ones.
    pub(crate) fn length_limit(&self) -> Option<(usize, TooLong)> {
        let too_long = if self.refuse_long { TooLong::Reject } else { TooLong::Truncate };
        self.max_tokens.map(|tokens| (tokens, too_long))
    }
}

const VERSION: u32 = 1;

impl RunState {
    /// Creates the state of a new run, with checksums of its files.
    pub(crate) fn new(name: &RunName, settings: RunConfig) -> Result<Self, CommandError> {
        Ok(Self {
            version: VERSION,
            name: Some(name.to_string()),
            changes: Vec::new(),
            digest: data::digest(&settings.files)?,
            eval_digest: settings
                .eval_file
                .as_ref()
                .map(|file| data::digest(&[file]))
                .transpose()?,
            settings,
            run_id: None,
            saved: Vec::new(),
            sampler: None,
            plot: None,
            finished: false,
        })
    }

    /// Checks that the files have not changed since the run started.
    pub(crate) fn check_files(&self) -> Result<(), CommandError> {
        data::check_unchanged(&self.settings.files, &self.digest)?;
        match (&self.settings.eval_file, &self.eval_digest) {
            (Some(file), Some(digest)) => data::check_unchanged(&[file], digest),
            _ => Ok(()),
        }
    }

    fn path(folder: &Path) -> PathBuf {
        folder.join("run.json")
    }

    /// Reads the state of the run in a folder.
    pub(crate) fn load(folder: &Path) -> Result<Self, CommandError> {
        let path = Self::path(folder);
        let shown = path.display();
        let bytes = std::fs::read(&path).map_err(|error| {
            CommandError::new(Exit::NotFound, format!("cannot read {shown}: {error}"))
                .hint("Pass the run folder that `tinkex train` created; it contains run.json.")
        })?;
        let state: Self = serde_json::from_slice(&bytes).map_err(|error| {
            CommandError::new(Exit::Failed, format!("cannot parse {shown}: {error}"))
                .hint("Resume a run of `tinkex rl` with `tinkex rl --resume`.")
        })?;
        if state.version != VERSION {
            let message =
                format!("cannot read {shown}: unsupported format version {}", state.version);
            return Err(CommandError::new(Exit::Failed, message)
                .hint("Resume the run with the version of tinkex that started it."));
        }
        Ok(state)
    }

    /// Replaces the file in the run folder atomically.
    pub(crate) fn store(&self, folder: &Path) -> Result<(), CommandError> {
        let path = Self::path(folder);
        let text = serde_json::to_vec_pretty(self).unwrap_or_default();
        let written = AtomicWrite::new(&path).single_writer().write(text);
        written.map_err(|error| CommandError::file("write", path.display(), &error))
    }

    /// Changes the total number of steps of a resumed run, and records the change.
    ///
    /// # Errors
    ///
    /// Returns a usage error if the run has already finished `steps` steps.
    pub(crate) fn change_steps(&mut self, steps: u64) -> Result<(), CommandError> {
        let (done, old) = (self.step(), self.settings.steps);
        if steps == old {
            return Ok(());
        }
        check_steps(steps, done)?;
        self.changes.push(SettingChange::of_steps(done, old, steps));
        self.settings.steps = steps;
        self.finished = false;
        Ok(())
    }

    /// Returns the step to resume from: that of the last checkpoint.
    pub(crate) fn step(&self) -> u64 {
        self.saved.last().map_or(0, |saved| saved.step)
    }
}

/// Checks that a resumed run which has finished `done` steps can be changed to `steps` steps.
pub(crate) fn check_steps(steps: u64, done: u64) -> Result<(), CommandError> {
    if steps > done {
        return Ok(());
    }
    let message = format!("cannot resume the run with {steps} steps: it has finished {done}");
    Err(CommandError::usage(message).hint(format!("Pass --steps with a number above {done}.")))
}

/// Locks a run folder against other processes until the lock is dropped.
pub(crate) fn lock(folder: &Path) -> Result<FileLock, CommandError> {
    let path = folder.join("lock");
    match FileLock::acquire(&path) {
        Ok(lock) => Ok(lock),
        Err(LockError::InUse) => {
            let message = format!("the run in {} is already in progress", folder.display());
            Err(CommandError::new(Exit::Failed, message)
                .hint("Wait for the other command, or stop it."))
        }
        Err(error) => Err(CommandError::file("lock", path.display(), &error.into())),
    }
}

/// Creates a folder and its parents, if they are missing.
pub(crate) fn create_folder(folder: &Path) -> Result<(), CommandError> {
    std::fs::create_dir_all(folder)
        .map_err(|error| CommandError::file("create", folder.display(), &error))
}

/// Checks that a folder contains no run yet.
pub(crate) fn check_unused(folder: &Path) -> Result<(), CommandError> {
    if !RunState::path(folder).exists() {
        return Ok(());
    }
    let shown = folder.display();
    let message = format!("{shown} already contains a run");
    let hint = format!("Resume it with --resume {shown}, or pass another --name or --dir.");
    Err(CommandError::usage(message).hint(hint))
}

/// Creates the folder of a new run.
///
/// # Errors
///
/// Returns a usage error if the folder already contains a run.
pub(crate) fn new_folder(folder: &Path) -> Result<(), CommandError> {
    check_unused(folder)?;
    create_folder(folder)
}
