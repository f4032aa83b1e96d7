//! [`RlState`]: what a run needs to resume, stored in its resume file.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tinkex_wire::TinkerPath;

use crate::error::{Error, ErrorKind, Result};

use super::super::checkpoints::SavedCheckpoint;

/// Version of the file format.
const VERSION: u32 = 1;

/// Contents of a resume file.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct RlState {
    version: u32,
    /// Settings that determine what the run computes.
    pub(super) settings: Value,
    /// Id of the training run on the server. Every resumption creates a new one.
    pub(super) run_id: Option<String>,
    /// Number of finished steps.
    pub(super) step: u64,
    /// Checkpoints, oldest first. The run resumes from the last one.
    pub(super) saved: Vec<SavedCheckpoint>,
    /// Sampler checkpoint of the last stop or of the end.
    pub(super) sampler: Option<TinkerPath>,
    pub(super) finished: bool,
}

/// Resume file of a run, or only its contents if the run has none.
pub(super) struct ResumeFile {
    path: Option<PathBuf>,
    pub(super) state: RlState,
}

impl ResumeFile {
    /// Reads the file, if it exists.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the file is malformed, or if it belongs to a run with other
    /// settings.
    pub(super) async fn open(path: Option<PathBuf>, settings: Value) -> Result<Self> {
        let new = RlState { version: VERSION, settings, ..RlState::default() };
        let Some(path) = path else { return Ok(Self { path: None, state: new }) };
        let read = {
            let path = path.clone();
            blocking(move || std::fs::read(path)).await?
        };
        let state = match read {
            Ok(bytes) => parse(&path, &bytes, new)?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => new,
            Err(error) => return Err(file_error("read", &path, &error)),
        };
        Ok(Self { path: Some(path), state })
    }

    /// Returns whether the run has a file.
    pub(super) fn exists(&self) -> bool {
        self.path.is_some()
    }

    /// Replaces the file atomically.
    pub(super) async fn store(&self) -> Result<()> {
        let Some(path) = self.path.clone() else { return Ok(()) };
        let text = serde_json::to_vec_pretty(&self.state).unwrap_or_default();
        let written = {
            let path = path.clone();
            blocking(move || tinkex_files::write(&path, text)).await?
        };
        written.map_err(|error| file_error("write", &path, &error))
    }
}

fn parse(path: &Path, bytes: &[u8], new: RlState) -> Result<RlState> {
    let invalid = |reason: String| {
        let message = format!("cannot resume from {}: {reason}", path.display());
        Error::new(ErrorKind::InvalidInput, message)
    };
    let old: RlState = serde_json::from_slice(bytes).map_err(|error| invalid(error.to_string()))?;
    if old.version != VERSION {
        return Err(invalid(format!("unsupported format version {}", old.version)));
    }
    let changed: Vec<String> = differences(&old.settings, &new.settings);
    if !changed.is_empty() {
        let hint = "Use the settings of the run, or another resume file for a new run.";
        return Err(
            invalid(format!("the run had other settings: {}", changed.join(", "))).with_hint(hint)
        );
    }
    Ok(RlState { settings: new.settings, ..old })
}

/// Returns the names of the fields that differ.
fn differences(old: &Value, new: &Value) -> Vec<String> {
    let (Some(old), Some(new)) = (old.as_object(), new.as_object()) else {
        return vec!["settings".to_owned()];
    };
    let names = new.keys().chain(old.keys().filter(|name| !new.contains_key(*name)));
    names.filter(|name| old.get(*name) != new.get(*name)).cloned().collect()
}

fn file_error(action: &str, path: &Path, error: &std::io::Error) -> Error {
    let message = format!("cannot {action} resume file {}: {error}", path.display());
    Error::new(ErrorKind::Config, message)
}

/// Runs file operations outside of the async threads.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    let joined = tokio::task::spawn_blocking(work).await;
    joined.map_err(|error| Error::new(ErrorKind::Panicked, error.to_string()))
}
