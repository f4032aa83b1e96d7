//! [`Retention`]: removes old checkpoints and runs that the operator does not want to keep.

use std::collections::HashMap;
use std::time::Duration;

use tinkex_store::clock::micros;
use tinkex_store::log;
use tinkex_store::store::{CheckpointRecord, ModelRunRecord, Record, Store, Tracked, UnixMicros};
use tinkex_store::weights::WeightsLocation;
use tinkex_wire::{CheckpointKind, ModelId, TinkerPath};

use crate::options::ServerOptions;

/// Rules for the removal of checkpoints and runs. Never removes a published checkpoint, a checkpoint
/// with a time to live (set by a user, or by the server for an autosave), or a run that has one of
/// them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Retention {
    /// Value of [`ServerOptions::keep_checkpoints`].
    keep_checkpoints: Option<usize>,
    /// Value of [`ServerOptions::run_ttl`].
    run_ttl: Option<Duration>,
}

impl Retention {
    pub(crate) fn new(options: &ServerOptions) -> Self {
        Self { keep_checkpoints: options.keep_checkpoints, run_ttl: options.run_ttl }
    }

    /// Removes the records of old checkpoints and runs. Returns the weights that they referred to.
    /// The files are removed with the other unreferenced folders.
    pub(crate) fn apply(self, store: &mut Store, now: UnixMicros) -> Vec<WeightsLocation> {
        let mut weights = Vec::new();
        let mut bytes = 0;
        let runs = self.old_runs(store, now);
        for id in &runs {
            // As a deletion by a user: with the results and payloads of the run's requests.
            let snapshot = store.runs.get(id).and_then(|entry| entry.row.snapshot.as_ref());
            weights.extend(snapshot.map(|snapshot| snapshot.weights.clone()));
            for row in store.checkpoints_of(id) {
                weights.push(row.weights.clone());
                bytes += row.size_bytes;
            }
            let run = store.runs.get(id).map(|entry| &entry.row);
            let requests = run.map(|run| store.finished_requests_of(run)).unwrap_or_default();
            store.put_required(Record::RunDeleted { id: id.clone() });
            store.remove_results(requests);
        }
        let checkpoints = self.old_checkpoints(store);
        for path in &checkpoints {
            if let Some(entry) = store.checkpoints.get(path) {
                weights.push(entry.row.weights.clone());
                bytes += entry.row.size_bytes;
            }
            store.put_required(Record::CheckpointDeleted { path: path.clone(), at: now });
        }
        if !runs.is_empty() || !checkpoints.is_empty() {
            tracing::info!(
                target: log::STORAGE,
                runs = runs.len(),
                checkpoints = checkpoints.len(),
                bytes,
                "removed old runs and checkpoints"
            );
        }
        weights
    }

    /// Returns the runs that were not used for their time to live, and whose sessions have ended.
    fn old_runs(self, store: &Store, now: UnixMicros) -> Vec<ModelId> {
        let Some(ttl) = self.run_ttl else { return Vec::new() };
        let oldest = now.saturating_sub(micros(ttl));
        let is_old = |entry: &&Tracked<ModelRunRecord>| {
            let session = store.sessions.get(&entry.row.session);
            let is_open = session.is_some_and(|session| session.row.end.is_none());
            let is_kept = || store.checkpoints_of(&entry.row.id).into_iter().any(is_protected);
            entry.last_used <= oldest && !is_open && !is_kept()
        };
        let mut ids: Vec<ModelId> =
            store.runs.values().filter(is_old).map(|entry| entry.row.id.clone()).collect();
        // Sort, so that the upstreams get the requests in the same order in every run of a
        // simulation.
        ids.sort();
        ids
    }

    /// Returns the checkpoints of each run and kind except the newest ones. Copies, imports and
    /// autosaves were not saved by a training program and do not count.
    fn old_checkpoints(self, store: &Store) -> Vec<TinkerPath> {
        let Some(keep) = self.keep_checkpoints else { return Vec::new() };
        let mut groups: HashMap<(&ModelId, CheckpointKind), Vec<&CheckpointRecord>> =
            HashMap::new();
        for row in store.checkpoints.values().map(|entry| &entry.row) {
            if row.request.is_some() && !is_protected(row) {
                groups.entry((row.path.run(), row.path.kind())).or_default().push(row);
            }
        }
        let mut old = Vec::new();
        for mut rows in groups.into_values() {
            rows.sort_by_key(|row| std::cmp::Reverse((row.created_at, row.seq)));
            old.extend(rows.into_iter().skip(keep).map(|row| row.path.clone()));
        }
        old.sort();
        old
    }
}

/// Returns whether a user has published a checkpoint or set its time to live.
fn is_protected(row: &CheckpointRecord) -> bool {
    row.public || row.expires_at.is_some()
}
