//! [`RlRunState`]: the settings of a run, stored as `run.json` in the run folder.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::commands::train::data;
use crate::commands::train::state::SettingChange;
use crate::error::{CommandError, Exit};
use crate::reference::RunName;

use super::args::RlRunArgs;

/// Version of the file format.
const VERSION: u32 = 1;

/// Settings of a run. The progress is in `resume.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct RlRunState {
    version: u32,
    method: RunMethod,
    /// Name of the run; `None` if an older version started it.
    #[serde(default)]
    pub(super) name: Option<String>,
    pub(super) settings: RlRunArgs,
    /// Base model.
    pub(super) model: String,
    /// Checksums of the prompts and of the evaluation prompts at the start of the run.
    digest: String,
    eval_digest: Option<String>,
    /// Settings that a resumption changed, oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) changes: Vec<SettingChange>,
}

/// Training method of a run folder.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum RunMethod {
    Rl,
}

impl RlRunState {
    /// Creates the state of a new run, with checksums of its files.
    pub(super) fn new(
        name: &RunName,
        settings: RlRunArgs,
        model: String,
    ) -> Result<Self, CommandError> {
        Ok(Self {
            version: VERSION,
            name: Some(name.to_string()),
            changes: Vec::new(),
            method: RunMethod::Rl,
            digest: data::digest(&settings.files)?,
            eval_digest: settings
                .eval_file
                .as_ref()
                .map(|file| data::digest(&[file]))
                .transpose()?,
            settings,
            model,
        })
    }

    /// Checks that the files have not changed since the run started.
    pub(super) fn check_files(&self) -> Result<(), CommandError> {
        data::check_unchanged(&self.settings.files, &self.digest)?;
        match (&self.settings.eval_file, &self.eval_digest) {
            (Some(file), Some(digest)) => data::check_unchanged(&[file], digest),
            _ => Ok(()),
        }
    }

    /// Reads the state of the run in a folder.
    pub(super) fn load(folder: &Path) -> Result<Self, CommandError> {
        let path = folder.join("run.json");
        let shown = path.display();
        let bytes = std::fs::read(&path).map_err(|error| {
            CommandError::new(Exit::NotFound, format!("cannot read {shown}: {error}"))
                .hint("Pass the run folder that `tinkex rl` created; it contains run.json.")
        })?;
        let state: Self = serde_json::from_slice(&bytes).map_err(|error| {
            CommandError::new(Exit::Failed, format!("cannot parse {shown}: {error}"))
                .hint("Resume a run of `tinkex train` with `tinkex train --resume`.")
        })?;
        if state.version != VERSION {
            let message =
                format!("cannot read {shown}: unsupported format version {}", state.version);
            return Err(CommandError::new(Exit::Failed, message)
                .hint("Resume the run with the version of tinkex that started it."));
        }
        Ok(state)
    }

    /// Returns the number of steps after which the run was saved, according to `resume.json`.
    pub(super) fn finished_steps(folder: &Path) -> u64 {
        let bytes = std::fs::read(folder.join("resume.json")).unwrap_or_default();
        let progress: serde_json::Value = serde_json::from_slice(&bytes).unwrap_or_default();
        progress["step"].as_u64().unwrap_or(0)
    }

    /// Replaces the file in the run folder atomically.
    pub(super) fn store(&self, folder: &Path) -> Result<(), CommandError> {
        let path = folder.join("run.json");
        let text = serde_json::to_vec_pretty(self).unwrap_or_default();
        let written = tinkex_files::AtomicWrite::new(&path).single_writer().write(text);
        written.map_err(|error| CommandError::file("write", path.display(), &error))
    }
}
