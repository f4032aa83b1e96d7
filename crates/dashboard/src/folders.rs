//! [`FolderSource`]: the documents of run folders.
//!
//! The crate `tinkex-runs` defines the format of a run folder. The source skips lines of
//! `metrics.jsonl` that `tinkex-runs` does not accept, and folders whose `run.json` it cannot read.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use parking_lot::{Mutex, MutexGuard};
use tinkex_runs::{METRICS_FILE, MetricsLine, RUN_FILE, RunFolder, RunRecord, metric};
use tinkex_wire::{JsonObject, TinkerPath};
use tokio::sync::watch;

use super::document::{
    ChangesDocument, CheckpointDocument, InfoDocument, MetricsDocument, RequestsDocument,
    RunDetails, RunDocument, RunListDocument, SampleListDocument, ServerDocument, SettingsDocument,
};
use super::{ChangeCursor, DashboardSource, DocumentResult, QueryParams};
use crate::error::ServerError;
use crate::history::{MetricsQuery, RunColumns};

/// Maximum number of bytes of `metrics.jsonl` that are read at once.
const MAX_READ: u64 = 64 << 20;
/// Time since the last step after which an unfinished run is idle.
const IDLE_AFTER: Duration = Duration::from_secs(60);
/// Maximum number of run folders.
const MAX_RUNS: usize = 10_000;
/// Metrics that can be the loss of a run, in order of preference.
const LOSSES: [&str; 3] = [metric::LOSS, metric::REWARD, metric::EVAL_LOSS];

/// Documents of run folders.
pub(crate) struct FolderSource {
    /// Run folders, and folders that contain run folders.
    roots: Vec<PathBuf>,
    runs: Mutex<HashMap<PathBuf, FolderRun>>,
}

/// The part of a run folder that was read so far.
#[derive(Default)]
struct FolderRun {
    columns: RunColumns,
    /// Number of bytes of complete lines that were read.
    offset: u64,
    /// Inode of the file that was read. A different inode means that another file has replaced it.
    file: u64,
    steps: u32,
    loss: Option<f64>,
    tokens: u64,
    tokens_per_second: Option<f64>,
    losses: Vec<f32>,
    modified: Option<SystemTime>,
}

impl FolderRun {
    /// Reads the lines that were appended since the last call.
    fn refresh(&mut self, folder: &Path) -> io::Result<()> {
        let mut file = File::open(folder.join(METRICS_FILE))?;
        let metadata = file.metadata()?;
        let identity = identity(&metadata);
        if metadata.len() < self.offset || identity != self.file {
            *self = Self { file: identity, ..Self::default() };
        }
        self.modified = metadata.modified().ok();
        file.seek(SeekFrom::Start(self.offset))?;
        let mut text = Vec::new();
        file.take(MAX_READ).read_to_end(&mut text)?;
        let complete = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        for line in text[..complete].split(|byte| *byte == b'\n') {
            self.add(line);
        }
        self.offset += complete as u64;
        Ok(())
    }

    fn add(&mut self, line: &[u8]) {
        let Ok(line) = serde_json::from_slice::<MetricsLine>(line) else { return };
        let Ok(step) = u32::try_from(line.step) else { return };
        self.columns.push(step, line.iter());
        self.steps = self.steps.max(step);
        if let Some(loss) = LOSSES.iter().find_map(|name| line.get(name)) {
            self.loss = Some(loss);
            #[expect(clippy::cast_possible_truncation, reason = "a chart of few points")]
            self.losses.push(loss as f32);
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a number of tokens; the conversion saturates"
        )]
        let tokens = line.get(metric::TOKENS).unwrap_or(0.0) as u64;
        self.tokens = self.tokens.saturating_add(tokens);
        self.tokens_per_second = line.get(metric::TOKENS_PER_SECOND).or(self.tokens_per_second);
    }

    /// Returns at most 64 losses at equal distances.
    fn downsampled_losses(&self) -> Vec<Option<f32>> {
        let stride = self.losses.len().div_ceil(64).max(1);
        let losses = self.losses.iter().step_by(stride);
        losses.map(|loss| Some(*loss).filter(|loss| loss.is_finite())).collect()
    }
}

#[cfg(unix)]
fn identity(metadata: &std::fs::Metadata) -> u64 {
    std::os::unix::fs::MetadataExt::ino(metadata)
}

#[cfg(not(unix))]
fn identity(_: &std::fs::Metadata) -> u64 {
    0
}

impl FolderSource {
    pub(crate) fn new(roots: Vec<PathBuf>) -> Self {
        Self { roots, runs: Mutex::default() }
    }

    /// Returns at most [`MAX_RUNS`] run folders.
    fn folders(&self) -> Vec<PathBuf> {
        let mut found = RunFolder::find_in(&self.roots);
        found.truncate(MAX_RUNS);
        found
    }

    fn runs(&self) -> MutexGuard<'_, HashMap<PathBuf, FolderRun>> {
        self.runs.lock()
    }

    /// Returns the folder of a run.
    fn find(&self, id: &str) -> Result<PathBuf, ServerError> {
        // Compare the id with the ids of the known folders: joining the id to a path could lead out
        // of the folders.
        let found = self.folders().into_iter().find(|folder| id_of(folder) == id);
        found.ok_or_else(|| ServerError::not_found(format!("run folder {id} does not exist")))
    }

    /// Reads the new lines of a folder, and calls `read` with all lines that were read so far.
    fn with_run<T>(&self, folder: &Path, read: impl FnOnce(&FolderRun) -> T) -> T {
        let mut runs = self.runs();
        let run = runs.entry(folder.to_owned()).or_default();
        // A run without metrics has not finished its first step.
        let _ = run.refresh(folder);
        read(run)
    }

    /// Returns the documents of all folders that can be read.
    fn documents(&self) -> Vec<RunDocument> {
        let readable = |folder: &PathBuf| {
            let record = RunFolder::read(folder).ok()?;
            Some(self.document(folder, &record))
        };
        self.folders().iter().filter_map(readable).collect()
    }

    fn document(&self, folder: &Path, record: &RunRecord) -> RunDocument {
        let settings = &record.settings;
        let created = record.created.unix_micros().div_euclid(1_000);
        let stored = std::fs::metadata(folder.join(RUN_FILE)).and_then(|file| file.modified()).ok();
        self.with_run(folder, |run| {
            let since_step = run.modified.and_then(|time| time.elapsed().ok());
            let status = if record.progress.finished {
                "ended"
            } else if since_step.is_some_and(|elapsed| elapsed < IDLE_AFTER) {
                "training"
            } else {
                "idle"
            };
            RunDocument {
                id: id_of(folder),
                name: folder.file_name().map(|name| name.to_string_lossy().into_owned()),
                base_model: Some(settings.base_model.clone()),
                rank: Some(settings.rank.into()),
                status,
                steps: run.steps,
                total_steps: Some(settings.steps),
                loss: run.loss,
                losses: run.downsampled_losses(),
                tokens: run.tokens,
                tokens_per_second: run.tokens_per_second,
                error: None,
                queued: 0,
                created: Some(created),
                last_used: Some(run.modified.or(stored).map_or(created, millis)),
                checkpoints: record.progress.checkpoints.len(),
                storage_bytes: None,
                session: None,
            }
        })
    }
}

/// Returns the id of a run: the path of its folder.
fn id_of(folder: &Path) -> String {
    folder.to_string_lossy().into_owned()
}

fn millis(time: SystemTime) -> i64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

/// Describes a checkpoint of a run folder. The folder stores neither the size nor the time of the
/// checkpoint.
fn checkpoint(step: u64, path: &TinkerPath) -> CheckpointDocument {
    CheckpointDocument {
        path: path.to_string(),
        name: path.name().to_owned(),
        kind: path.kind().segment().to_owned(),
        step: Some(step),
        seq: None,
        created: None,
        expires: None,
        size_bytes: None,
        public: false,
    }
}

impl DashboardSource for FolderSource {
    fn info(&self) -> DocumentResult<InfoDocument> {
        Ok(InfoDocument {
            kind: "folders",
            version: env!("CARGO_PKG_VERSION"),
            models: Vec::new(),
            folders: self.roots.iter().map(|root| id_of(root)).collect(),
            history: true,
            samples: false,
            views: vec!["runs"],
            cursor: None,
            time: None,
        })
    }

    fn runs(&self) -> DocumentResult<RunListDocument> {
        let mut runs = self.documents();
        runs.sort_by_key(|run| std::cmp::Reverse(run.created));
        Ok(RunListDocument { runs })
    }

    fn run(&self, id: &str) -> DocumentResult<RunDetails> {
        let folder = self.find(id)?;
        let record =
            RunFolder::read(&folder).map_err(|error| ServerError::not_found(error.to_string()))?;
        let base = self.document(&folder, &record);
        let progress = &record.progress;
        let mut metadata = JsonObject::new();
        metadata.insert("folder".to_owned(), id_of(&folder).into());
        if let Some(id) = &progress.run_id {
            metadata.insert("run_id".to_owned(), id.as_str().into());
        }
        let mut saved: Vec<CheckpointDocument> =
            progress.checkpoints.iter().map(|saved| checkpoint(saved.step, &saved.path)).collect();
        saved.extend(progress.sampler.as_ref().map(|path| checkpoint(progress.step(), path)));
        saved.reverse();
        Ok(RunDetails {
            base,
            settings: SettingsDocument::Folder(Box::new(record.settings)),
            metadata,
            session_metadata: JsonObject::new(),
            tags: Vec::new(),
            saved,
        })
    }

    fn metrics(&self, id: &str, query: &MetricsQuery) -> DocumentResult<MetricsDocument> {
        let folder = self.find(id)?;
        Ok(MetricsDocument::new(self.with_run(&folder, |run| run.columns.curves(query))))
    }

    fn requests(&self, _: &str) -> DocumentResult<RequestsDocument> {
        Err(ServerError::not_found("run folders have no requests"))
    }

    fn samples(&self, _: &QueryParams) -> DocumentResult<SampleListDocument> {
        Err(ServerError::not_found("run folders have no samples"))
    }

    fn server(&self) -> DocumentResult<ServerDocument> {
        Err(ServerError::not_found("run folders have no server"))
    }

    fn changes(&self, cursor: &mut ChangeCursor) -> DocumentResult<Option<ChangesDocument>> {
        let mut runs = Vec::new();
        let documents = self.documents();
        let ids: HashSet<String> = documents.iter().map(|document| document.id.clone()).collect();
        for document in documents {
            // The step is part of the status, so that every new step is a change.
            let status = format!("{} {}", document.status, document.steps);
            let known = cursor.statuses.insert(document.id.clone(), status.clone());
            if known.is_none_or(|known| known != status) {
                runs.push(document);
            }
        }
        let deleted = cursor.remove_deleted(|id| ids.contains(id));
        cursor.point += 1;
        let is_change = !runs.is_empty() || !deleted.is_empty();
        Ok(is_change.then_some(ChangesDocument { runs, deleted, last_sample: None }))
    }

    fn subscribe(&self) -> Option<watch::Receiver<u64>> {
        None
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tinkex_runs::{MethodSettings, RunSettings, SavedCheckpoint, SftSettings};

    use super::*;

    fn query() -> MetricsQuery {
        MetricsQuery { from: 0, to: u32::MAX, points: 100 }
    }

    fn append(folder: &Path, text: &str) {
        use std::io::Write as _;
        let path = folder.join(METRICS_FILE);
        let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
        file.unwrap().write_all(text.as_bytes()).unwrap();
    }

    #[test]
    fn a_growing_folder_is_followed() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("run-1");
        let mut settings = RunSettings::new("tiny", MethodSettings::Sft(SftSettings::default()));
        settings.rank = 4;
        let mut record = RunRecord::new("math", settings);
        let checkpoint = SavedCheckpoint::new(1, "tinker://r/weights/1".parse().unwrap());
        record.progress.checkpoints.push(checkpoint);
        RunFolder::new(&folder, record).unwrap().store().unwrap();
        let source = FolderSource::new(vec![root.path().to_owned()]);
        let mut cursor = ChangeCursor::default();
        let runs = |source: &FolderSource| source.runs_document();
        assert_eq!(runs(&source)[0]["steps"], 0);
        assert!(source.changes(&mut cursor).unwrap().is_some());
        assert!(source.changes(&mut cursor).unwrap().is_none());
        append(&folder, "{\"step\":1,\"loss\":2.5,\"tokens\":7}\n{\"step\":2,\"loss\":1.5}\n{\"st");
        assert!(source.changes(&mut cursor).unwrap().is_some());
        let id = id_of(&folder);
        let metrics = json!(source.metrics(&id, &query()).unwrap());
        assert_eq!(metrics["metrics"]["loss"]["value"], json!([2.5, 1.5]));
        append(&folder, "ep\":3,\"eval_loss\":9}\nnot json\n[1]\n{\"step\":-1,\"loss\":1}\n");
        let metrics = json!(source.metrics(&id, &query()).unwrap());
        assert_eq!(metrics["metrics"]["eval_loss"]["step"], json!([3]));
        assert_eq!(metrics["metrics"]["loss"]["step"], json!([1, 2]));
        let run = json!(source.run(&id).unwrap());
        assert_eq!((&run["steps"], &run["saved"][0]["name"]), (&json!(3), &json!("1")));
        assert_eq!(run["settings"]["rank"], 4);
        // A resumed run replaces the file.
        tinkex_files::write(folder.join(METRICS_FILE), "{\"step\":1,\"loss\":2.5}\n").unwrap();
        let metrics = json!(source.metrics(&id, &query()).unwrap());
        assert_eq!(metrics["metrics"]["loss"]["step"], json!([1]));
        // A folder that is removed is reported once.
        assert!(source.changes(&mut cursor).unwrap().is_some());
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(source.changes(&mut cursor).unwrap().unwrap().deleted, [id]);
        assert!(source.changes(&mut cursor).unwrap().is_none());
    }

    #[test]
    fn folders_of_a_newer_version_are_left_out_and_explained() {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join(RUN_FILE), r#"{"version": 2}"#).unwrap();
        let source = FolderSource::new(vec![root.path().to_owned()]);
        assert_eq!(source.runs_document(), json!([]));
        let error = source.run(&id_of(root.path())).unwrap_err();
        assert!(error.to_string().contains("version 2 of the run format"), "{error}");
    }

    #[test]
    fn only_known_folders_are_read() {
        let root = tempfile::tempdir().unwrap();
        let source = FolderSource::new(vec![root.path().to_owned()]);
        std::fs::write(root.path().join(METRICS_FILE), "{\"step\":1}\n").unwrap();
        let outside = format!("{}/..", root.path().display());
        for id in [outside.as_str(), "", "/", &id_of(root.path())] {
            assert!(source.metrics(id, &query()).is_err(), "{id}");
        }
    }

    impl FolderSource {
        fn runs_document(&self) -> Value {
            json!(DashboardSource::runs(self).unwrap().runs)
        }
    }
}
