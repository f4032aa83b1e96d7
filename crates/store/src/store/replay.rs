//! Rebuilds the in-memory state from stored rows, and applies records to it.

use std::io;
use std::path::Path;
use std::sync::Arc;

use tinkex_wire::{ModelId, SessionId};
use tokio::sync::Notify;

use super::{
    AUDIT_ENTRIES, DELETION_RETENTION, ModelRunRecord, Record, RequestEntry, RequestPhase,
    RequestRecord, SamplerEntry, SequenceScope, SessionEntry, Store, Tracked, UnixMicros,
    loss_prefix,
};
use crate::clock::{Clock, SystemClocks};
use crate::disk::{Disk, StoredChange, StoredRequest, StoredRows, StoredRun};
use crate::executor::Executor;

/// An admitted request without a result.
#[derive(Clone)]
pub struct UnfinishedRequest {
    pub row: Arc<RequestRecord>,
    /// How often earlier server processes restored the request and started to execute it. Each of
    /// these processes died before the request had a result.
    pub starts: u32,
}

impl Store {
    /// Opens the data folder `folder` and restores its state. `result_limit` is the maximum size
    /// of the results in memory, in bytes.
    pub fn open(
        folder: &Path,
        result_limit: usize,
        executor: &Executor,
        system: Arc<dyn SystemClocks>,
    ) -> io::Result<Self> {
        let (disk, rows) = Disk::open(folder, executor)?;
        let clock = Clock::resume(system, rows.clock.as_ref(), rows.newest_time());
        let mut store = Self {
            clock,
            disk,
            hidden_paths: Default::default(),
            sessions: Default::default(),
            runs: Default::default(),
            samplers: Default::default(),
            checkpoints: Default::default(),
            deleted_checkpoints: Default::default(),
            requests: Default::default(),
            sequences: Default::default(),
            losses: Default::default(),
            feeds: Default::default(),
            usage: Default::default(),
            records: Default::default(),
            keys: Default::default(),
            limits: Default::default(),
            audit: Default::default(),
            unfinished: Default::default(),
            unfinished_folders: Default::default(),
            replayed_at: Default::default(),
            result_bytes: 0,
            result_limit,
        };
        store.replay(rows);
        store.replayed_at = store.clock.running();
        store.save_clock();
        Ok(store)
    }

    /// Fills the empty state from stored rows.
    fn replay(&mut self, rows: StoredRows) {
        let StoredRows {
            sessions,
            runs,
            changes,
            samplers,
            checkpoints,
            deleted_checkpoints,
            requests,
            usage,
            keys,
            users,
            audit,
            clock: _,
        } = rows;
        self.usage = usage;
        self.apply_all(keys.into_iter().map(Record::Key).collect());
        self.apply_all(users.into_iter().map(Record::User).collect());
        self.audit = audit.into();
        self.deleted_checkpoints = deleted_checkpoints.into_iter().collect();
        for StoredRun { row, last_used } in runs {
            self.runs.insert(row.id.clone(), Tracked::new(row, last_used));
        }
        for StoredChange { run, seq, change } in changes {
            if let Some(run) = self.runs.get_mut(&run) {
                run.changes.insert(seq, change);
            }
        }
        self.apply_all(samplers.into_iter().map(Record::Sampler).collect());
        self.apply_all(checkpoints.into_iter().map(Record::Checkpoint).collect());
        // Apply sessions last: an ended session removes its sampling sessions and snapshots.
        self.apply_all(sessions.into_iter().map(Record::Session).collect());
        let mut finished = Vec::new();
        for StoredRequest { row, starts, result } in requests {
            let id = row.id.clone();
            finished.extend(result.map(|result| (id.clone(), result)));
            self.apply(Record::Request(Arc::new(row)));
            if let Some(entry) = self.requests.get_mut(&id) {
                entry.starts = starts;
            }
        }
        // Add the results to their feeds in the order in which they were persisted.
        finished.sort_by_key(|(_, result)| result.number);
        for (id, result) in finished {
            self.set_result(&id, result, None);
        }
    }

    /// Marks all requests without a result as queued and returns them in order of admission.
    pub fn requeue_unfinished(&mut self) -> Vec<UnfinishedRequest> {
        let mut unfinished = Vec::new();
        for entry in self.requests.values_mut() {
            if entry.finished_at().is_none() {
                entry.phase = RequestPhase::Queued;
                let row = Arc::clone(&entry.row);
                let starts = entry.starts;
                unfinished.push(UnfinishedRequest { row, starts });
            }
        }
        unfinished.sort_by_key(|request| request.row.number);
        unfinished
    }

    /// Applies a record to the in-memory state.
    pub(super) fn apply(&mut self, record: Record) {
        let now = self.clock.now();
        match record {
            Record::Session(row) => {
                if row.end.is_some() {
                    self.release_session(&row.id);
                }
                let last_used = self.clock.running();
                self.sessions.insert(row.id.clone(), SessionEntry { row, last_used });
            }
            Record::SessionsRemoved { ids } => {
                for id in ids {
                    self.sessions.remove(&id);
                }
            }
            Record::Run(row) => self.apply_run(row),
            Record::RunDeleted { id } => {
                self.runs.remove(&id);
                self.checkpoints.retain(|path, _| *path.run() != id);
            }
            Record::Sampler(row) => {
                if let Some(weights) = &row.weights {
                    self.finish_weights(weights);
                }
                let last_used = self.clock.running();
                self.samplers.insert(row.id.clone(), SamplerEntry { row, last_used });
            }
            Record::Checkpoint(row) => {
                self.finish_weights(&row.weights);
                self.touch_run(row.path.run(), row.created_at);
                self.checkpoints.insert(row.path.clone(), Tracked::new(row, now));
            }
            Record::CheckpointDeleted { path, at } => {
                self.checkpoints.remove(&path);
                let oldest = at.saturating_sub(DELETION_RETENTION);
                self.deleted_checkpoints.retain(|_, deleted_at| *deleted_at >= oldest);
                self.deleted_checkpoints.insert(path, at);
            }
            Record::RequestsStarted { ids } => {
                for id in ids {
                    if let Some(entry) = self.requests.get_mut(&id) {
                        entry.starts += 1;
                    }
                }
            }
            Record::Request(row) => {
                if let SequenceScope::Model(id) = &row.scope {
                    self.touch_run(id, row.at);
                }
                let sequence = self.sequences.entry(row.scope.clone()).or_default();
                sequence.insert(row.seq, row.id.clone());
                let changed = Arc::new(Notify::new());
                let phase = RequestPhase::Writing { cancelled: false };
                let id = row.id.clone();
                let owner = self.account(&row.session).owner;
                let unfinished = self.unfinished.entry(owner.clone()).or_default();
                unfinished.add(&row);
                let write_failed = Arc::default();
                let entry = RequestEntry {
                    row,
                    owner,
                    starts: 0,
                    phase,
                    delivered: None,
                    changed,
                    write_failed,
                };
                self.requests.insert(id, entry);
            }
            Record::Result(result) => self.apply_result(&result),
            Record::Usage(amounts) => self.add_usage(&amounts),
            Record::UsageMerged { before } => self.merge_usage(before),
            Record::RequestsRemoved { ids } => self.drop_requests(&ids),
            Record::Key(key) => drop(self.keys.insert(key.id.clone(), key)),
            Record::KeyRemoved { id } => drop(self.keys.remove(&id)),
            Record::User(user) => drop(self.limits.insert(user.id, user.limits)),
            Record::Audit(entry) => {
                self.audit.push_back(entry);
                while self.audit.len() > AUDIT_ENTRIES {
                    self.audit.pop_front();
                }
            }
            Record::Metadata(_)
            | Record::MetadataCopied { .. }
            | Record::History(_)
            | Record::Clock(_) => {}
        }
    }

    fn touch_run(&mut self, id: &ModelId, at: UnixMicros) {
        if let Some(run) = self.runs.get_mut(id) {
            run.last_used = run.last_used.max(at);
        }
    }

    fn apply_run(&mut self, row: ModelRunRecord) {
        let mut changes = Default::default();
        let mut last_seq = None;
        let mut last_used = row.created_at;
        if let Some(previous) = self.runs.remove(&row.id) {
            changes = previous.changes;
            last_seq = previous.row.last_seq;
            last_used = previous.last_used;
        }
        if let Some(snapshot) = &row.snapshot {
            self.finish_weights(&snapshot.weights);
            changes = changes.split_off(&(snapshot.seq + 1));
        }
        let row = ModelRunRecord { last_seq: row.last_seq.max(last_seq), ..row };
        self.runs.insert(row.id.clone(), Tracked { row, last_used, changes });
    }

    /// Drops the objects that only this session could use: sampling sessions, snapshots, changes
    /// since the snapshots, and custom losses.
    fn release_session(&mut self, id: &SessionId) {
        self.samplers.retain(|_, sampler| sampler.row.session != *id);
        for run in self.runs.values_mut().filter(|run| run.row.session == *id) {
            run.changes.clear();
            // Keep the snapshot of a run on an upstream: it must be removed from the upstream
            // first.
            if run.row.upstream.is_none() {
                run.row.snapshot = None;
            }
        }
        let prefix = loss_prefix(id);
        self.losses.retain(|loss, _| !loss.as_str().starts_with(&prefix));
    }
}
