//! [`RunFolder`]: the folder of a run, with its record and a lock.

use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use tinkex_files::{AtomicWrite, FileLock, LockError};

use crate::error::RunError;
use crate::evaluation::EvaluationLine;
use crate::metrics::MetricsLine;
use crate::record::{FORMAT_VERSION, RunRecord};
use crate::step_log::StepLog;

/// Name of the file with the [record](RunRecord) of the run.
pub const RUN_FILE: &str = "run.json";
/// Name of the file with one [`MetricsLine`] per step and per evaluation.
pub const METRICS_FILE: &str = "metrics.jsonl";
/// Name of the file with one [`SampleLine`](crate::SampleLine) per sampled completion.
pub const SAMPLES_FILE: &str = "samples.jsonl";
/// Name of the file with one [`EvaluationLine`](crate::EvaluationLine) per evaluation of the run.
pub const EVALUATIONS_FILE: &str = "evaluations.jsonl";
/// Name of the file with the plot, unless the settings contain another path.
pub const PLOT_FILE: &str = "plot.svg";
/// Name of the file with the log-probabilities of the reference model of DPO.
pub const REFERENCE_FILE: &str = "reference.json";
/// Name of the lock file.
const LOCK_FILE: &str = "lock";

/// Folder of a run that this process writes. The folder is locked while the value exists: other
/// processes can read the files, but cannot resume the run.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    /// Lock of the folder; `None` until the folder of a new run is created.
    lock: Option<FileLock>,
    /// Files to copy into the folder of a new run: the name in the folder, and the path of the
    /// source.
    attachments: Vec<(String, PathBuf)>,
    /// Settings and progress of the run. [`store`](Self::store) writes them.
    pub record: RunRecord,
}

/// Field `version` of `run.json`; other fields are ignored.
#[derive(Deserialize)]
struct FormatVersion {
    version: u64,
}

impl RunFolder {
    /// Prepares the folder of a new run. The first call of [`store`](Self::store) creates the
    /// folder, so that a run that cannot start leaves no folder behind.
    ///
    /// # Errors
    /// [`RunError::Exists`] if the folder contains a run.
    pub fn new(path: impl Into<PathBuf>, record: RunRecord) -> Result<Self, RunError> {
        let path = path.into();
        if Self::contains_run(&path) {
            return Err(RunError::Exists { folder: path });
        }
        Ok(Self { path, lock: None, attachments: Vec::new(), record })
    }

    /// Locks the folder of an existing run and reads its record.
    ///
    /// # Errors
    /// [`RunError::InUse`] if another process has locked the folder; otherwise fails like
    /// [`read`](Self::read).
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, RunError> {
        let path = path.into();
        // Read before locking: locking creates a lock file, and a folder without a run must not get
        // one.
        Self::read(&path)?;
        let lock = lock(&path)?;
        // Read again: the previous holder of the lock may have changed the record.
        let record = Self::read(&path)?;
        Ok(Self { path, lock: Some(lock), attachments: Vec::new(), record })
    }

    /// Reads the record of a run without locking its folder.
    ///
    /// # Errors
    /// Fails if the folder contains no run, if `run.json` is malformed, or if it has a version of
    /// the format that this program does not read.
    pub fn read(path: &Path) -> Result<RunRecord, RunError> {
        let file = path.join(RUN_FILE);
        let bytes = std::fs::read(&file).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
                RunError::Missing { folder: path.to_owned() }
            }
            _ => RunError::io("read", &file, error),
        })?;
        // Parse the version first, without the other fields, which may differ in a newer version.
        let FormatVersion { version } = parse(&file, &bytes)?;
        if version != u64::from(FORMAT_VERSION) {
            return Err(RunError::Version { folder: path.to_owned(), found: version });
        }
        parse(&file, &bytes)
    }

    /// Returns whether a folder contains a run, of any version.
    #[must_use]
    pub fn contains_run(path: &Path) -> bool {
        path.join(RUN_FILE).is_file()
    }

    /// Returns the run folders in `roots`, sorted by path. A root that is a run folder is returned
    /// itself; of any other root, the run folders directly in it are returned. The runs may have
    /// any version of the format.
    #[must_use]
    pub fn find_in(roots: &[PathBuf]) -> Vec<PathBuf> {
        let mut found = Vec::new();
        for root in roots {
            if Self::contains_run(root) {
                found.push(root.clone());
                continue;
            }
            let entries = std::fs::read_dir(root).into_iter().flatten().flatten();
            let folders = entries.map(|entry| entry.path());
            found.extend(folders.filter(|folder| Self::contains_run(folder)));
        }
        found.sort();
        found.dedup();
        found
    }

    /// Returns the path of the folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Requests that the file `from` is copied into the folder of a new run under the name `name`.
    /// [`store`](Self::store) copies the file when it creates the folder, before it writes
    /// `run.json`.
    pub fn attach(&mut self, name: impl Into<String>, from: impl Into<PathBuf>) {
        self.attachments.push((name.into(), from.into()));
    }

    /// Replaces `run.json` durably. Creates and locks the folder of a new run first.
    ///
    /// # Errors
    /// Fails if the folder cannot be created or written.
    pub fn store(&mut self) -> Result<(), RunError> {
        if self.lock.is_none() {
            self.create()?;
        }
        let file = self.path.join(RUN_FILE);
        let mut text = serde_json::to_vec_pretty(&self.record)
            .map_err(|error| RunError::io("write", &file, error.into()))?;
        text.push(b'\n');
        let written = AtomicWrite::new(&file).single_writer().write(text);
        written.map_err(|error| RunError::io("write", &file, error))
    }

    fn create(&mut self) -> Result<(), RunError> {
        std::fs::create_dir_all(&self.path)
            .map_err(|error| RunError::io("create", &self.path, error))?;
        let lock = lock(&self.path)?;
        // Another process may have created the same folder since `new`.
        if Self::contains_run(&self.path) {
            return Err(RunError::Exists { folder: self.path.clone() });
        }
        for (name, from) in self.attachments.drain(..) {
            let file = self.path.join(name);
            let copy = |target: &mut dyn io::Write| {
                io::copy(&mut std::fs::File::open(&from)?, target).map(|_| ())
            };
            let written = AtomicWrite::new(&file).single_writer().write_with(copy);
            written.map_err(|error| RunError::io("write", &file, error))?;
        }
        self.lock = Some(lock);
        Ok(())
    }

    /// Appends a line to `evaluations.jsonl` of a run, which another process may be training.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub fn add_evaluation(path: &Path, line: &EvaluationLine) -> Result<(), RunError> {
        let file = path.join(EVALUATIONS_FILE);
        let mut text =
            serde_json::to_vec(line).map_err(|error| RunError::io("write", &file, error.into()))?;
        text.push(b'\n');
        let opened = OpenOptions::new().create(true).append(true).open(&file);
        // Append the line in one write, so that lines of several processes do not mix.
        let written = opened.and_then(|mut file| file.write_all(&text));
        written.map_err(|error| RunError::io("write", &file, error))
    }

    /// Opens `metrics.jsonl` of a run that continues after `step` steps. Lines of later steps are
    /// removed, because the run repeats these steps. Calls `keep` with each remaining line.
    ///
    /// # Errors
    /// Fails if the file cannot be opened.
    pub fn metrics(
        &self,
        step: u64,
        mut keep: impl FnMut(MetricsLine),
    ) -> Result<StepLog, RunError> {
        let file = self.path.join(METRICS_FILE);
        let keep = |line: &str| {
            if let Ok(line) = serde_json::from_str(line) {
                keep(line);
            }
        };
        StepLog::open(&file, step, keep).map_err(|error| RunError::io("open", &file, error))
    }

    /// Opens `samples.jsonl` of a run that continues after `step` steps. Lines of later steps are
    /// removed.
    ///
    /// # Errors
    /// Fails if the file cannot be opened.
    pub fn samples(&self, step: u64) -> Result<StepLog, RunError> {
        let file = self.path.join(SAMPLES_FILE);
        StepLog::open(&file, step, |_| ()).map_err(|error| RunError::io("open", &file, error))
    }
}

fn parse<T: DeserializeOwned>(file: &Path, bytes: &[u8]) -> Result<T, RunError> {
    serde_json::from_slice(bytes)
        .map_err(|source| RunError::Malformed { file: file.to_owned(), source })
}

fn lock(folder: &Path) -> Result<FileLock, RunError> {
    let file = folder.join(LOCK_FILE);
    FileLock::acquire(&file).map_err(|error| match error {
        LockError::InUse => RunError::InUse { folder: folder.to_owned() },
        error => RunError::io("lock", &file, error.into()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{MethodSettings, RunSettings, SftSettings};

    fn record() -> RunRecord {
        let method = MethodSettings::Sft(SftSettings::default());
        RunRecord::new("a", RunSettings::new("tiny", method))
    }

    #[test]
    fn a_new_folder_appears_with_the_first_store_and_is_locked() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("x/a-run");
        let source = parent.path().join("source");
        std::fs::write(&source, "lines\n").unwrap();
        let mut folder = RunFolder::new(&path, record()).unwrap();
        folder.attach("stdin.jsonl", &source);
        assert!(!path.exists());
        folder.store().unwrap();
        assert_eq!(std::fs::read_to_string(path.join("stdin.jsonl")).unwrap(), "lines\n");
        assert!(matches!(RunFolder::open(&path), Err(RunError::InUse { .. })));
        assert_eq!(RunFolder::read(&path).unwrap(), folder.record);
        drop(folder);
        assert_eq!(RunFolder::open(&path).unwrap().record.name, "a");
        assert!(matches!(RunFolder::new(&path, record()), Err(RunError::Exists { .. })));
    }

    #[test]
    fn damaged_missing_and_newer_records_are_refused() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path();
        assert!(matches!(RunFolder::open(path), Err(RunError::Missing { .. })));
        assert!(!path.join(LOCK_FILE).exists(), "a folder without a run was changed");
        let write = |text: &str| std::fs::write(path.join(RUN_FILE), text).unwrap();
        for damaged in ["", "{", "[]", "{}", r#"{"version": 1}"#, r#"{"version": "1"}"#] {
            write(damaged);
            assert!(matches!(RunFolder::read(path), Err(RunError::Malformed { .. })), "{damaged}");
        }
        write(r#"{"version": 2, "anything": "else"}"#);
        let error = RunFolder::open(path).unwrap_err();
        let message = error.to_string();
        assert!(message.contains("version 2") && message.contains("version 1"), "{message}");
        assert!(message.contains(&path.display().to_string()), "{message}");
        assert!(error.hint().unwrap().contains("newer"), "{error:?}");
    }
}
