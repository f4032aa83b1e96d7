//! [`Store`]: in-memory copy of the durable state, protected by one mutex.
//!
//! Every change is queued for the disk while the lock is held, so the order of writes is the order
//! of changes in memory; replay after a restart depends on it. No method blocks: work that must
//! wait for durability runs as a callback on the disk's writer thread.

mod checkpoint;
mod needed;
mod replay;
mod request;
mod undo;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tinkex_autodiff::LossProgram;
use tinkex_wire::{LossId, ModelId, RequestId, SamplerId, SessionId, TinkerPath};

use crate::clock::Clock;
use crate::disk::{Disk, PayloadReader, WriteCallback};
use crate::log;
pub(crate) use crate::record::*;

pub(crate) use self::needed::NeededBackend;
pub(crate) use self::replay::UnfinishedRequest;
pub(crate) use self::request::{CompletionFeed, RequestEntry, RequestPhase, WriteStatus};

/// The server's state: durable records and the indexes over them.
pub(crate) struct Store {
    pub(crate) clock: Clock,
    pub(crate) disk: Disk,
    pub(crate) sessions: HashMap<SessionId, SessionEntry>,
    pub(crate) runs: HashMap<ModelId, Tracked<RunRecord>>,
    pub(crate) samplers: HashMap<SamplerId, Tracked<SamplerRecord>>,
    pub(crate) checkpoints: BTreeMap<TinkerPath, Tracked<CheckpointRecord>>,
    /// Checkpoints that were deleted recently, with the times: a repeated deletion succeeds.
    pub(crate) deleted_checkpoints: HashMap<TinkerPath, UnixMicros>,
    pub(crate) requests: HashMap<RequestId, RequestEntry>,
    /// Requests by scope and sequence number.
    pub(crate) sequences: HashMap<SequenceScope, BTreeMap<u64, RequestId>>,
    /// Custom losses of the open sessions.
    pub(crate) losses: HashMap<LossId, Arc<LossProgram>>,
    /// Unacknowledged completions, by sampling session and clone.
    pub(crate) feeds: HashMap<(SamplerId, u64), CompletionFeed>,
    pub(crate) usage: BTreeMap<UsageKey, u64>,
    /// Names of folders that are being written and that no record refers to yet.
    pub(crate) unfinished_folders: HashSet<String>,
    /// [Running time](Clock::running) at the end of the replay. A session that was used later has a
    /// client.
    pub(crate) replayed_at: Duration,
    /// Size of the results in memory, in bytes.
    pub(crate) result_bytes: usize,
    /// Limit on `result_bytes`.
    pub(crate) result_limit: usize,
}

/// A session and when its client was heard from.
#[derive(Clone, Debug)]
pub(crate) struct SessionEntry {
    pub(crate) row: SessionRecord,
    /// [Running time](Clock::running) of the last request or heartbeat.
    pub(crate) last_used: Duration,
}

/// A record and the in-memory data about it.
#[derive(Clone, Debug)]
pub(crate) struct Tracked<T> {
    pub(crate) row: T,
    /// Time of the last request that used the object.
    pub(crate) last_used: UnixMicros,
    /// For a run: the requests that modified it after its snapshot, by sequence number.
    pub(crate) changes: BTreeMap<u64, ChangeRecord>,
}

impl<T> Tracked<T> {
    fn new(row: T, last_used: UnixMicros) -> Self {
        Self { row, last_used, changes: BTreeMap::new() }
    }
}

fn ignore_result() -> WriteCallback {
    Box::new(|_| {})
}

impl Store {
    /// Applies records and queues them for writing in one transaction. If the write fails,
    /// `on_written` must revert them: see [`prepare_undo`](Self::prepare_undo).
    pub(crate) fn put(&mut self, records: Vec<Record>, on_written: WriteCallback) {
        self.disk.append(records.clone(), None, on_written);
        self.apply_all(records);
    }

    /// Applies a record without waiting for its write. For changes that are repeated later if the
    /// write fails.
    pub(crate) fn put_unconfirmed(&mut self, record: Record) {
        self.put(vec![record], ignore_result());
    }

    /// Applies a record of a completed operation, such as a saved snapshot or a removal. The write is
    /// retried until it succeeds.
    pub(crate) fn put_required(&mut self, record: Record) {
        self.disk.append_required(vec![record.clone()], None, ignore_result());
        self.apply(record);
    }

    /// Queues records that are applied only once they are durable. `on_written` receives the
    /// records and returns the callback that applies them.
    pub(crate) fn write_then_apply(
        &mut self,
        records: Vec<Record>,
        on_written: impl FnOnce(Vec<Record>) -> WriteCallback,
    ) {
        self.disk.append(records.clone(), None, on_written(records));
    }

    pub(crate) fn apply_all(&mut self, records: Vec<Record>) {
        records.into_iter().for_each(|record| self.apply(record));
    }

    /// Returns a reader of stored payloads.
    pub(crate) fn reader(&self) -> PayloadReader {
        self.disk.reader()
    }

    /// Returns a session if it exists and is open.
    pub(crate) fn open_session(&mut self, id: &SessionId) -> Option<&mut SessionEntry> {
        self.sessions.get_mut(id).filter(|session| session.row.end.is_none())
    }

    /// Resets the expiry timer of a session.
    pub(crate) fn touch(&mut self, id: &SessionId) {
        if let Some(session) = self.sessions.get_mut(id) {
            session.last_used = self.clock.running();
        }
    }

    /// Queues the current time for writing, from which the next start continues. Without it, the
    /// next start would take the wall clock for the time, even if it was set meanwhile.
    pub(crate) fn save_clock(&mut self) {
        let clock = self.clock.record();
        self.put_unconfirmed(Record::Clock(clock));
    }

    /// Returns the sessions that ended at or before `time` and that no run or request refers to.
    pub(crate) fn removable_sessions(&self, time: UnixMicros) -> Vec<SessionId> {
        let mut used: HashSet<&SessionId> = HashSet::new();
        used.extend(self.runs.values().map(|entry| &entry.row.session));
        used.extend(self.requests.values().map(|entry| &entry.row.session));
        let sessions = self.sessions.values().map(|entry| &entry.row);
        let ended = sessions.filter(|row| row.ended_at.is_some_and(|at| at <= time));
        ended.map(|row| &row.id).filter(|id| !used.contains(id)).cloned().collect()
    }

    /// Returns the names of all folders under `weights/` that are in use.
    pub(crate) fn folders(&self) -> HashSet<String> {
        let checkpoints = self.checkpoints.values().map(|entry| entry.row.folder.clone());
        let samplers = self.samplers.values().filter_map(|entry| entry.row.folder.clone());
        let snapshots = self
            .runs
            .values()
            .filter_map(|entry| Some(entry.row.snapshot.as_ref()?.folder.clone()));
        // A load reads the folder that its checkpoint had at admission, even if the checkpoint is
        // deleted or overwritten meanwhile.
        let unfinished = self.requests.values().filter(|entry| entry.finished_at().is_none());
        let loads = unfinished.filter_map(|entry| entry.row.source_folder.clone());
        checkpoints
            .chain(samplers)
            .chain(loads)
            .chain(snapshots)
            .chain(self.unfinished_folders.iter().cloned())
            .collect()
    }

    /// Returns whether a client trains a run: its session is open, and the client has sent something
    /// since the start of the server or waits for a result.
    pub(crate) fn is_in_use(&self, run: &RunRecord) -> bool {
        let Some(session) = self.sessions.get(&run.session) else { return false };
        let scope = SequenceScope::Model(run.id.clone());
        let waits = || {
            let requests = self.sequences.get(&scope).into_iter().flat_map(BTreeMap::values);
            let entries = requests.filter_map(|id| self.requests.get(id));
            entries.into_iter().any(|entry| entry.finished_at().is_none())
        };
        session.row.end.is_none() && (session.last_used > self.replayed_at || waits())
    }

    /// Queues a compaction of the payload file if it has at least `min_bytes` bytes.
    pub(crate) fn compact_payloads(&mut self, min_bytes: u64) {
        self.disk.compact(
            min_bytes,
            Box::new(|compacted| {
                if let Err(error) = compacted {
                    tracing::warn!(target: log::STORAGE, %error, "payload file was not compacted");
                }
            }),
        );
    }

    /// Returns the runs of a session.
    pub(crate) fn runs_of<'a>(&'a self, id: &'a SessionId) -> impl Iterator<Item = &'a RunRecord> {
        self.runs.values().map(|entry| &entry.row).filter(move |run| run.session == *id)
    }
}

#[cfg(test)]
mod tests;
