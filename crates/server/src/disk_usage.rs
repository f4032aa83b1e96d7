//! Sizes of the files in the data folder, by kind, user and run.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

use tinkex_store::disk::{DATABASE, WEIGHTS};
use tinkex_store::error::ServerError;
use tinkex_store::store::Store;
use tinkex_store::weights::WeightsLocation;
use tinkex_wire::ModelId;
use tinkex_wire::rest::{DiskUsage, KindUsage, RunUsage, UserUsage};

use crate::state::ServerState;

/// Kind of a folder of weights, and the run that it belongs to.
#[derive(Clone)]
struct FolderUse {
    kind: &'static str,
    run: Option<ModelId>,
}

/// Size and number of folders or files.
#[derive(Clone, Copy, Default)]
struct Total {
    count: u64,
    bytes: u64,
}

impl Total {
    fn add(&mut self, bytes: u64) {
        self.count += 1;
        self.bytes += bytes;
    }
}

/// Measures the data folder. The files are listed in a job.
pub(crate) async fn measure(state: &Arc<ServerState>) -> Result<DiskUsage, ServerError> {
    let uses = folder_uses(&state.store());
    let data_dir = state.options.data_dir.clone();
    let listed = state.executor.run_job(move || list(&data_dir)).await?;
    let listed = listed.map_err(|error| ServerError::read_failed(&error))?;
    Ok(summarize(&state.store(), &uses, &listed))
}

/// Returns the uses of all folders of weights that records refer to. A folder that several
/// checkpoints share belongs to the first of them.
fn folder_uses(store: &Store) -> HashMap<String, FolderUse> {
    let mut uses = HashMap::new();
    let mut add = |weights: &WeightsLocation, kind, run: Option<ModelId>| {
        if let Some(folder) = weights.local() {
            uses.entry(folder.to_owned()).or_insert(FolderUse { kind, run });
        }
    };
    for entry in store.checkpoints.values() {
        add(&entry.row.weights, "checkpoints", Some(entry.row.path.run().clone()));
    }
    for entry in store.runs.values() {
        if let Some(snapshot) = &entry.row.snapshot {
            add(&snapshot.weights, "snapshots", Some(entry.row.id.clone()));
        }
    }
    for entry in store.samplers.values() {
        if let Some(weights) = entry.row.needed_weights() {
            add(weights, "samplers", entry.row.run.clone());
        }
    }
    uses
}

/// Sizes of the entries of a data folder, by name, and of its folders of weights.
struct Listing {
    entries: Vec<(String, u64)>,
    weights: Vec<(String, u64)>,
}

fn list(data_dir: &Path) -> std::io::Result<Listing> {
    let sizes = |folder: &Path| -> std::io::Result<Vec<(String, u64)>> {
        let mut sizes = Vec::new();
        for entry in std::fs::read_dir(folder)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            sizes.push((name, size(&entry.path())));
        }
        Ok(sizes)
    };
    let weights = sizes(&data_dir.join(WEIGHTS))?;
    let mut entries = sizes(data_dir)?;
    entries.retain(|(name, _)| name != WEIGHTS);
    Ok(Listing { entries, weights })
}

/// Returns the size of a file, or of all files in a folder. A file that is deleted meanwhile has no
/// size.
pub(crate) fn size(path: &Path) -> u64 {
    let Ok(metadata) = std::fs::symlink_metadata(path) else { return 0 };
    if !metadata.is_dir() {
        return metadata.len();
    }
    let Ok(entries) = std::fs::read_dir(path) else { return 0 };
    entries.flatten().map(|entry| size(&entry.path())).sum()
}

fn summarize(store: &Store, uses: &HashMap<String, FolderUse>, listed: &Listing) -> DiskUsage {
    let mut kinds: BTreeMap<&str, Total> = BTreeMap::new();
    let mut runs: HashMap<ModelId, Total> = HashMap::new();
    for (folder, bytes) in &listed.weights {
        match uses.get(folder) {
            Some(FolderUse { kind, run }) => {
                kinds.entry(kind).or_default().add(*bytes);
                if let Some(run) = run {
                    runs.entry(run.clone()).or_default().add(*bytes);
                }
            }
            None => kinds.entry("unreferenced").or_default().add(*bytes),
        }
    }
    for (name, bytes) in &listed.entries {
        let kind = match name {
            name if name.starts_with(DATABASE) => "database",
            name if name.starts_with("payloads") => "payloads",
            _ => "other",
        };
        kinds.entry(kind).or_default().add(*bytes);
    }
    let records = store.records.used();
    let mut users: BTreeMap<String, UserUsage> = records
        .iter()
        .map(|(user, used)| (user.to_string(), UserUsage::new(user.as_str(), used.bytes)))
        .collect();
    let mut run_usage = Vec::new();
    for entry in store.runs.values() {
        let row = &entry.row;
        let Total { count, bytes } = runs.get(&row.id).copied().unwrap_or_default();
        let mut usage = RunUsage::new(row.id.as_str(), row.name.clone(), row.owner.as_str());
        usage.folders = count;
        usage.bytes = bytes;
        run_usage.push(usage);
        let owner = row.owner.to_string();
        let user = users.entry(owner).or_insert_with(|| UserUsage::new(row.owner.as_str(), 0));
        user.runs += 1;
        user.bytes += bytes;
    }
    let kinds =
        kinds.into_iter().map(|(kind, total)| KindUsage::new(kind, total.count, total.bytes));
    DiskUsage::new(kinds.collect(), users.into_values().collect(), run_usage)
}
