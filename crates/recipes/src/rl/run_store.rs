//! [`RunStore`]: the progress of a run, in memory and in its run folder.

use std::borrow::Cow;
use std::path::PathBuf;

use tinkex::{Error, ErrorKind, Result};
use tinkex_runs::{
    MetricsLine, RunError, RunFolder, RunProgress, RunRecord, RunSettings, SampleLine, StepLog,
};

use super::report::RlReport;

/// Where a run stores its progress.
pub(super) enum FolderChoice {
    /// Folder to create, or to resume from.
    Path(PathBuf),
    /// Folder that the caller has created or opened.
    Opened(Box<RunFolder>),
}

/// Progress of a run, and the run folder, if the run has one.
pub(super) struct RunStore {
    folder: Option<RunFolder>,
    logs: Option<RunLogs>,
    pub(super) progress: RunProgress,
}

/// Open log files of a run, to which each step appends.
struct RunLogs {
    metrics: StepLog,
    samples: StepLog,
}

impl RunLogs {
    /// Opens the files of a run that continues after `step` steps.
    fn open(folder: &RunFolder, step: u64) -> std::result::Result<Self, RunError> {
        let metrics = folder.metrics(step, |_| ())?;
        let samples = folder.samples(step)?;
        Ok(Self { metrics, samples })
    }
}

impl RunStore {
    /// Opens the folder, if the run has one.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the folder cannot be read, or if it contains a run with other
    /// settings.
    pub(super) async fn open(choice: Option<FolderChoice>, settings: RunSettings) -> Result<Self> {
        let folder = match choice {
            None => None,
            Some(FolderChoice::Path(path)) => Some(
                blocking(move || open_or_create(path, settings))
                    .await?
                    .map_err(|error| run_error(&error))?,
            ),
            Some(FolderChoice::Opened(folder)) => Some(*folder),
        };
        let progress = folder.as_ref().map(|folder| folder.record.progress.clone());
        Ok(Self { folder, logs: None, progress: progress.unwrap_or_default() })
    }

    /// Replaces `run.json`. The first call creates the folder of a new run and opens the logs.
    pub(super) async fn store(&mut self) -> Result<()> {
        let Some(mut folder) = self.folder.take() else { return Ok(()) };
        folder.record.progress.clone_from(&self.progress);
        let step = self.progress.step();
        let logs = self.logs.take();
        let (folder, logs) = blocking(move || -> std::result::Result<_, RunError> {
            folder.store()?;
            let logs = match logs {
                Some(logs) => logs,
                None => RunLogs::open(&folder, step)?,
            };
            Ok((folder, logs))
        })
        .await?
        .map_err(|error| run_error(&error))?;
        self.folder = Some(folder);
        self.logs = Some(logs);
        Ok(())
    }

    /// Appends the metrics and completions of a report to their files. Call this method before
    /// [`store`](Self::store) records the step as finished: when the run resumes, the lines of
    /// steps that are not recorded are removed.
    pub(super) async fn log(&mut self, report: &RlReport) -> Result<()> {
        let Some(folder) = &self.folder else { return Ok(()) };
        let Some(mut logs) = self.logs.take() else { return Ok(()) };
        let lines: Vec<MetricsLine> = report.metrics_lines();
        let samples: Vec<SampleLine> = report.rollouts.iter().map(Into::into).collect();
        let (logs, written) = blocking(move || {
            let written = samples
                .iter()
                .try_for_each(|sample| logs.samples.append(sample))
                .and_then(|()| lines.iter().try_for_each(|line| logs.metrics.append(line)));
            (logs, written)
        })
        .await?;
        self.logs = Some(logs);
        written.map_err(|error| {
            let message = format!("cannot write the logs in {}: {error}", folder.path().display());
            Error::new(ErrorKind::Io, message)
        })
    }
}

/// Resumes the run in the folder, or prepares the folder of a new run.
fn open_or_create(
    path: PathBuf,
    settings: RunSettings,
) -> std::result::Result<RunFolder, RunError> {
    if !RunFolder::contains_run(&path) {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        return RunFolder::new(path, RunRecord::new(name, settings));
    }
    let mut folder = RunFolder::open(&path)?;
    let changed = folder.record.settings.fixed_differences(&settings);
    if !changed.is_empty() {
        return Err(RunError::OtherSettings { folder: path, changed });
    }
    folder.record.change_steps(settings.steps)?;
    Ok(folder)
}

fn run_error(error: &RunError) -> Error {
    let kind = match error {
        RunError::Io { .. } => ErrorKind::Io,
        _ => ErrorKind::InvalidInput,
    };
    let hint = error.hint();
    let error = Error::new(kind, error.to_string());
    match hint {
        // Drop the other hints: they mention options of the command line, which a program does not
        // have.
        Some(Cow::Borrowed(hint)) => error.with_hint(hint),
        Some(Cow::Owned(_)) | None => error,
    }
}

/// Runs file operations outside of the async threads.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    let joined = tokio::task::spawn_blocking(work).await;
    joined.map_err(|error| Error::new(ErrorKind::Panicked, error.to_string()))
}
