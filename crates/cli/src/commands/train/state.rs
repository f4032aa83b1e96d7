//! [`RunState`]: what a run is and how far it came, in its folder.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tinkex::{TooLong, TrainOn};
use tinkex_files::{AtomicWrite, FileLock, LockError};

use crate::error::{CommandError, Exit};

use super::data;
use super::plan::{Schedule, TrainPlan};

/// What a run is and how far it came.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RunState {
    /// The form of this file.
    version: u32,
    pub(crate) settings: RunConfig,
    /// The training file as it was at the start.
    digest: String,
    /// The same of the file to evaluate on, if there is one.
    #[serde(default)]
    eval_digest: Option<String>,
    /// The training run on the server; a new one after every interruption.
    pub(crate) run_id: Option<String>,
    /// Checkpoints to go on from, oldest first.
    pub(crate) saved: Vec<SavedCheckpoint>,
    /// Where to sample from it, once it is finished or was stopped.
    pub(crate) sampler: Option<String>,
    /// Where the loss is drawn, if not in the run's folder.
    #[serde(default)]
    pub(crate) plot: Option<PathBuf>,
    pub(crate) finished: bool,
}

/// A checkpoint to go on from.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SavedCheckpoint {
    pub(crate) step: u64,
    pub(crate) path: String,
}

/// Everything that decides what a run computes. It stays as it is to the end.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RunConfig {
    pub(crate) file: PathBuf,
    pub(crate) eval_file: Option<PathBuf>,
    pub(crate) eval_split: f64,
    pub(crate) model: String,
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
    pub(crate) keep: usize,
}

/// Which turns of a conversation are learned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LearnFrom {
    /// Everything that the assistant says
    All,
    /// What it says last
    Last,
    /// Everything, in one example for each turn
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

    pub(crate) fn most(&self) -> Option<(usize, TooLong)> {
        let too_long = if self.refuse_long { TooLong::Reject } else { TooLong::Truncate };
        self.max_tokens.map(|most| (most, too_long))
    }
}

const VERSION: u32 = 1;

impl RunState {
    /// A run that begins with its files as they are now.
    pub(crate) fn new(settings: RunConfig) -> Result<Self, CommandError> {
        Ok(Self {
            version: VERSION,
            digest: data::digest(&settings.file)?,
            eval_digest: settings.eval_file.as_deref().map(data::digest).transpose()?,
            settings,
            run_id: None,
            saved: Vec::new(),
            sampler: None,
            plot: None,
            finished: false,
        })
    }

    /// The files must be as they were when the run began.
    pub(crate) fn check_files(&self) -> Result<(), CommandError> {
        let train = (Some(&self.settings.file), Some(&self.digest));
        let eval = (self.settings.eval_file.as_ref(), self.eval_digest.as_ref());
        for (file, digest) in [train, eval] {
            let (Some(file), Some(digest)) = (file, digest) else { continue };
            if data::digest(file)? != *digest {
                let why = format!("{} has changed since the run began", file.display());
                let hint = "put it back as it was, or start a new run with the new file";
                return Err(CommandError::usage(why).hint(hint));
            }
        }
        Ok(())
    }

    fn path(folder: &Path) -> PathBuf {
        folder.join("run.json")
    }

    /// The run in a folder.
    pub(crate) fn load(folder: &Path) -> Result<Self, CommandError> {
        let path = Self::path(folder);
        let shown = path.display();
        let bytes = std::fs::read(&path).map_err(|why| {
            CommandError::new(Exit::NotFound, format!("{shown} cannot be read: {why}"))
                .hint("give the folder that tinkex train made, the one with a run.json in it")
        })?;
        let state: Self = serde_json::from_slice(&bytes).map_err(|why| {
            CommandError::new(Exit::Failed, format!("{shown} cannot be understood: {why}"))
        })?;
        if state.version != VERSION {
            let why = format!("{shown} was written by another version of this program");
            return Err(CommandError::new(Exit::Failed, why));
        }
        Ok(state)
    }

    /// Writes it down, all or nothing.
    pub(crate) fn store(&self, folder: &Path) -> Result<(), CommandError> {
        let path = Self::path(folder);
        let text = serde_json::to_vec_pretty(self).unwrap_or_default();
        let written = AtomicWrite::new(&path).single_writer().write(text);
        written.map_err(|why| CommandError::file("written", &path.display().to_string(), &why))
    }

    /// The step to go on from.
    pub(crate) fn step(&self) -> u64 {
        self.saved.last().map_or(0, |saved| saved.step)
    }
}

/// Keeps others from the run in a folder, for as long as the file is open.
pub(crate) fn lock(folder: &Path) -> Result<FileLock, CommandError> {
    let path = folder.join("lock");
    match FileLock::acquire(&path) {
        Ok(lock) => Ok(lock),
        Err(LockError::InUse) => {
            let why = format!("the run in {} is under way already", folder.display());
            Err(CommandError::new(Exit::Failed, why)
                .hint("wait for the other tinkex train, or stop it"))
        }
        Err(error) => Err(CommandError::file("locked", &path.display().to_string(), &error.into())),
    }
}

/// Makes a folder, unless it is there.
pub(crate) fn make_folder(folder: &Path) -> Result<(), CommandError> {
    let made = std::fs::create_dir_all(folder);
    made.map_err(|why| CommandError::file("created", &folder.display().to_string(), &why))
}

/// A folder for a new run: the one that was named, or the first free one beside the others.
pub(crate) fn new_folder(
    here: &Path,
    named: Option<PathBuf>,
    file: &Path,
) -> Result<PathBuf, CommandError> {
    if let Some(folder) = named {
        if RunState::path(&folder).exists() {
            let why = format!("{} holds a run already", folder.display());
            let hint = format!("go on with it (--resume {}), or name another", folder.display());
            return Err(CommandError::usage(why).hint(hint));
        }
        make_folder(&folder)?;
        return Ok(folder);
    }
    let stem = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    for number in 1_u32.. {
        let folder = match number {
            1 => here.join(format!("{stem}-run")),
            _ => here.join(format!("{stem}-run-{number}")),
        };
        if folder.exists() {
            continue;
        }
        make_folder(&folder)?;
        return Ok(folder);
    }
    Err(CommandError::usage("there is no free name for the run's folder")
        .hint("name one: --dir DIR"))
}
