//! [`FolderSource`]: the documents of the run folders of `tinkex train`.
//!
//! A run folder has `run.json`, the settings and checkpoints, and `metrics.jsonl`, one line of
//! numbers per step. Other programs may write them: whatever is not understood is left out.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};
use tokio::sync::watch;

use super::{ChangeCursor, DashboardSource, DocumentResult, QueryParams};
use crate::error::ServerError;
use crate::history::{MetricsQuery, RunColumns};

/// Maximum size of `run.json` in bytes.
const MAX_STATE: u64 = 4 << 20;
/// Maximum number of bytes of `metrics.jsonl` that are read at once.
const MAX_READ: u64 = 64 << 20;
/// Time since the last step after which an unfinished run is idle.
const IDLE_AFTER: Duration = Duration::from_secs(60);
/// Maximum number of run folders.
const MAX_RUNS: usize = 10_000;
/// Metrics that can be the loss of a run, in order of preference.
const LOSSES: [&str; 3] = ["loss", "reward", "eval_loss"];

/// Documents of run folders.
pub(crate) struct FolderSource {
    /// Run folders, and folders that contain them.
    roots: Vec<PathBuf>,
    runs: Mutex<HashMap<PathBuf, FolderRun>>,
}

/// What was read of a run folder so far.
#[derive(Default)]
struct FolderRun {
    columns: RunColumns,
    /// Number of bytes of complete lines that were read.
    offset: u64,
    /// Identity of the file that was read; another one has replaced it if this differs.
    file: u64,
    steps: u32,
    loss: Option<f64>,
    tokens: f64,
    tokens_per_second: Option<f64>,
    losses: Vec<f32>,
    modified: Option<SystemTime>,
}

impl FolderRun {
    /// Reads the lines that were appended since the last call.
    fn refresh(&mut self, folder: &Path) -> io::Result<()> {
        let mut file = File::open(folder.join("metrics.jsonl"))?;
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
        let Ok(Value::Object(line)) = serde_json::from_slice(line) else { return };
        let step = line.get("step").and_then(Value::as_u64).and_then(|step| step.try_into().ok());
        let Some(step) = step else { return };
        let numbers = line.iter().filter(|(name, _)| *name != "step");
        let numbers = numbers.filter_map(|(name, value)| Some((name.as_str(), value.as_f64()?)));
        self.columns.push(step, numbers);
        self.steps = self.steps.max(step);
        let metric = |name: &str| line.get(name).and_then(Value::as_f64);
        if let Some(loss) = LOSSES.iter().find_map(|name| metric(name)) {
            self.loss = Some(loss);
            #[expect(clippy::cast_possible_truncation, reason = "a chart of few points")]
            self.losses.push(loss as f32);
        }
        self.tokens += metric("tokens").unwrap_or(0.0);
        self.tokens_per_second = metric("tokens_per_second").or(self.tokens_per_second);
    }

    /// Returns at most 64 losses at equal distances.
    fn spark(&self) -> Vec<f32> {
        let stride = self.losses.len().div_ceil(64).max(1);
        self.losses.iter().step_by(stride).copied().collect()
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

/// Reads `run.json`.
fn read_state(folder: &Path) -> Option<Value> {
    let mut text = Vec::new();
    File::open(folder.join("run.json")).ok()?.take(MAX_STATE).read_to_end(&mut text).ok()?;
    serde_json::from_slice(&text).ok().filter(Value::is_object)
}

impl FolderSource {
    pub(crate) fn new(roots: Vec<PathBuf>) -> Self {
        Self { roots, runs: Mutex::default() }
    }

    /// Returns the run folders: the roots that are, and those directly in the other roots.
    fn folders(&self) -> Vec<PathBuf> {
        let mut found = Vec::new();
        for root in &self.roots {
            if root.join("run.json").is_file() {
                found.push(root.clone());
                continue;
            }
            let entries = std::fs::read_dir(root).into_iter().flatten().flatten();
            found
                .extend(entries.map(|entry| entry.path()).filter(|f| f.join("run.json").is_file()));
        }
        found.sort();
        found.dedup();
        found.truncate(MAX_RUNS);
        found
    }

    fn runs(&self) -> MutexGuard<'_, HashMap<PathBuf, FolderRun>> {
        self.runs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the folder of a run.
    fn find(&self, id: &str) -> Result<PathBuf, ServerError> {
        // Compare with the ids of the known folders: joining the id could leave them.
        let found = self.folders().into_iter().find(|folder| id_of(folder) == id);
        found.ok_or_else(|| ServerError::not_found(format!("run folder {id} does not exist")))
    }

    /// Calls `read` with what was read of a folder.
    fn with_run<T>(&self, folder: &Path, read: impl FnOnce(&FolderRun) -> T) -> T {
        let mut runs = self.runs();
        let run = runs.entry(folder.to_owned()).or_default();
        // A run without metrics has not finished its first step.
        let _ = run.refresh(folder);
        read(run)
    }

    fn document(&self, folder: &Path) -> Value {
        let state = read_state(folder).unwrap_or_default();
        let settings = &state["settings"];
        let finished = state["finished"].as_bool() == Some(true);
        let created = std::fs::metadata(folder.join("run.json")).ok();
        let created = created.and_then(|file| file.created().or_else(|_| file.modified()).ok());
        self.with_run(folder, |run| {
            let recent = run.modified.and_then(|time| time.elapsed().ok());
            let recent = recent.is_some_and(|elapsed| elapsed < IDLE_AFTER);
            let status = if finished {
                "ended"
            } else if recent {
                "training"
            } else {
                "idle"
            };
            json!({
                "id": id_of(folder),
                "name": folder.file_name().map(|name| name.to_string_lossy()),
                "base_model": settings["model"],
                "rank": settings["rank"],
                "status": status,
                "steps": run.steps,
                "total_steps": settings["steps"],
                "loss": run.loss,
                "losses": run.spark(),
                "tokens": run.tokens,
                "tokens_per_second": run.tokens_per_second,
                "created": created.map(millis),
                "last_used": run.modified.or(created).map(millis),
                "checkpoints": state["saved"].as_array().map_or(0, Vec::len),
            })
        })
    }
}

/// Returns the id of a run: the path of its folder.
fn id_of(folder: &Path) -> String {
    folder.to_string_lossy().into_owned()
}

fn millis(time: SystemTime) -> u64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

impl DashboardSource for FolderSource {
    fn info(&self) -> DocumentResult {
        let roots = self.roots.iter().map(|root| id_of(root)).collect::<Vec<_>>();
        Ok(json!({
            "kind": "folders",
            "version": env!("CARGO_PKG_VERSION"),
            "folders": roots,
            "history": true,
            "samples": false,
            "views": ["runs"],
        }))
    }

    fn runs(&self) -> DocumentResult {
        let mut runs: Vec<Value> = self.folders().iter().map(|f| self.document(f)).collect();
        runs.sort_by_key(|run| std::cmp::Reverse(run["created"].as_u64()));
        Ok(json!({ "runs": runs }))
    }

    fn run(&self, id: &str) -> DocumentResult {
        let folder = self.find(id)?;
        let mut document = self.document(&folder);
        let state = read_state(&folder).unwrap_or_default();
        document["settings"] = state["settings"].clone();
        document["metadata"] = json!({ "folder": id_of(&folder), "run_id": state["run_id"] });
        let saved = state["saved"].as_array().into_iter().flatten();
        let saved = saved.filter_map(|saved| {
            let path = saved["path"].as_str()?;
            let name = path.rsplit('/').next().unwrap_or(path);
            Some(json!({ "path": path, "name": name, "kind": "weights", "step": saved["step"] }))
        });
        let mut saved: Vec<Value> = saved.collect();
        if let Some(path) = state["sampler"].as_str() {
            saved.push(json!({ "path": path, "name": "sampler", "kind": "sampler_weights" }));
        }
        saved.reverse();
        document["saved"] = saved.into();
        Ok(document)
    }

    fn metrics(&self, id: &str, query: &MetricsQuery) -> DocumentResult {
        let folder = self.find(id)?;
        let metrics = self.with_run(&folder, |run| run.columns.curves(query));
        Ok(json!({ "metrics": metrics }))
    }

    fn requests(&self, _: &str) -> DocumentResult {
        Err(ServerError::not_found("run folders have no requests"))
    }

    fn samples(&self, _: &QueryParams) -> DocumentResult {
        Err(ServerError::not_found("run folders have no samples"))
    }

    fn server(&self) -> DocumentResult {
        Err(ServerError::not_found("run folders have no server"))
    }

    fn changes(&self, cursor: &mut ChangeCursor) -> Result<Option<Value>, ServerError> {
        let mut changed = Vec::new();
        for folder in self.folders() {
            let document = self.document(&folder);
            // The step is part of the status, so that every new step is a change.
            let status = format!("{} {}", document["status"], document["steps"]);
            let known = cursor.statuses.insert(id_of(&folder), status.clone());
            if known.is_none_or(|known| known != status) {
                changed.push(document);
            }
        }
        cursor.point += 1;
        Ok((!changed.is_empty()).then(|| json!({ "runs": changed })))
    }

    fn subscribe(&self) -> Option<watch::Receiver<u64>> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn query() -> MetricsQuery {
        MetricsQuery { from: 0, to: u32::MAX, points: 100 }
    }

    fn append(folder: &Path, text: &str) {
        use std::io::Write as _;
        let path = folder.join("metrics.jsonl");
        let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
        file.unwrap().write_all(text.as_bytes()).unwrap();
    }

    #[test]
    fn a_growing_folder_is_followed() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("run-1");
        std::fs::create_dir(&folder).unwrap();
        let state = r#"{"settings":{"model":"tiny","rank":4,"steps":9},"finished":false,
                        "saved":[{"step":1,"path":"tinker://r/weights/1"}]}"#;
        std::fs::write(folder.join("run.json"), state).unwrap();
        let source = FolderSource::new(vec![root.path().to_owned()]);
        let mut cursor = ChangeCursor::default();
        let runs = |source: &FolderSource| source.runs_document();
        assert_eq!(runs(&source)[0]["steps"], 0);
        assert!(source.changes(&mut cursor).unwrap().is_some());
        assert!(source.changes(&mut cursor).unwrap().is_none());
        append(&folder, "{\"step\":1,\"loss\":2.5,\"tokens\":7}\n{\"step\":2,\"loss\":1.5}\n{\"st");
        assert!(source.changes(&mut cursor).unwrap().is_some());
        let id = id_of(&folder);
        let metrics = source.metrics(&id, &query()).unwrap();
        assert_eq!(metrics["metrics"]["loss"]["value"], json!([2.5, 1.5]));
        append(&folder, "ep\":3,\"eval_loss\":9}\nnot json\n[1]\n{\"step\":-1,\"loss\":1}\n");
        let metrics = source.metrics(&id, &query()).unwrap();
        assert_eq!(metrics["metrics"]["eval_loss"]["step"], json!([3]));
        assert_eq!(metrics["metrics"]["loss"]["step"], json!([1, 2]));
        let run = source.run(&id).unwrap();
        assert_eq!((&run["steps"], &run["saved"][0]["name"]), (&json!(3), &json!("1")));
        assert_eq!(run["settings"]["rank"], 4);
        // A resumed run replaces the file.
        tinkex_files::write(folder.join("metrics.jsonl"), "{\"step\":1,\"loss\":2.5}\n").unwrap();
        let metrics = source.metrics(&id, &query()).unwrap();
        assert_eq!(metrics["metrics"]["loss"]["step"], json!([1]));
    }

    #[test]
    fn only_known_folders_are_read() {
        let root = tempfile::tempdir().unwrap();
        let source = FolderSource::new(vec![root.path().to_owned()]);
        std::fs::write(root.path().join("metrics.jsonl"), "{\"step\":1}\n").unwrap();
        let outside = format!("{}/..", root.path().display());
        for id in [outside.as_str(), "", "/", &id_of(root.path())] {
            assert!(source.metrics(id, &query()).is_err(), "{id}");
        }
    }

    impl FolderSource {
        fn runs_document(&self) -> Value {
            DashboardSource::runs(self).unwrap()["runs"].clone()
        }
    }
}
