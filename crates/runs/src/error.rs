//! [`RunError`]: why a run folder cannot be used.

use std::borrow::Cow;
use std::io;
use std::path::PathBuf;

use crate::record::FORMAT_VERSION;
use crate::settings::RunMethod;

/// Error of an operation on a run folder.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// The folder has no `run.json`.
    #[error("{} contains no run: run.json is missing", folder.display())]
    Missing {
        /// Run folder.
        folder: PathBuf,
    },
    /// The folder already has a `run.json`.
    #[error("{} already contains a run", folder.display())]
    Exists {
        /// Run folder.
        folder: PathBuf,
    },
    /// Another process has locked the folder.
    #[error("the run in {} is already in progress", folder.display())]
    InUse {
        /// Run folder.
        folder: PathBuf,
    },
    /// `run.json` is damaged, or another program wrote it.
    #[error("cannot read {}: {source}", file.display())]
    Malformed {
        /// Path of `run.json`.
        file: PathBuf,
        /// Position and cause.
        source: serde_json::Error,
    },
    /// The folder has a version of the format that this program does not read.
    #[error(
        "cannot read the run in {}: it has version {found} of the run format, and this program \
         reads version {FORMAT_VERSION}",
        folder.display()
    )]
    Version {
        /// Run folder.
        folder: PathBuf,
        /// Version of the folder.
        found: u64,
    },
    /// The settings of a resumed run differ from the stored settings in a way that is not allowed.
    #[error(
        "cannot resume the run in {}: it has other settings: {}",
        folder.display(),
        changed.join(", ")
    )]
    OtherSettings {
        /// Run folder.
        folder: PathBuf,
        /// Names of the settings that differ.
        changed: Vec<&'static str>,
    },
    /// The run to resume has a training method that this command does not support.
    #[error("cannot resume the run in {}: its method is {method}", folder.display())]
    OtherMethod {
        /// Run folder.
        folder: PathBuf,
        /// Method of the run.
        method: RunMethod,
    },
    /// The run to resume has already finished the requested total number of steps.
    #[error("cannot resume the run with {steps} steps: it has finished {finished}")]
    TooFewSteps {
        /// Requested total number of steps.
        steps: u64,
        /// Number of finished steps.
        finished: u64,
    },
    /// A file operation failed.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// Operation that failed, such as `write`.
        action: &'static str,
        /// File or folder.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
}

impl RunError {
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>, source: io::Error) -> Self {
        Self::Io { action, path: path.into(), source }
    }

    /// Returns what to do about the error, as a sentence.
    #[must_use]
    pub fn hint(&self) -> Option<Cow<'static, str>> {
        Some(match self {
            Self::Missing { .. } => {
                "Pass the folder that `tinkex train` or `tinkex rl` created.".into()
            }
            Self::Exists { folder } => format!(
                "Resume the run with --resume {}, or choose another folder.",
                folder.display()
            )
            .into(),
            Self::InUse { .. } => "Wait for the other command, or stop it.".into(),
            Self::Malformed { .. } => {
                "Restore run.json from a backup, or start a new run from the \
                                       last checkpoint of this run."
                    .into()
            }
            Self::Version { found, .. } if *found > u64::from(FORMAT_VERSION) => {
                "Use the version of tinkex that wrote the run, or a newer one.".into()
            }
            Self::Version { .. } => "Start a new run in another folder.".into(),
            Self::OtherSettings { .. } => {
                "Use the settings of the run, or another folder for a new run.".into()
            }
            Self::OtherMethod { folder, method } => {
                format!("Resume the run with `{} --resume {}`.", method.command(), folder.display())
                    .into()
            }
            Self::TooFewSteps { finished, .. } => {
                format!("Pass --steps with a number above {finished}.").into()
            }
            Self::Io { .. } => return None,
        })
    }
}
