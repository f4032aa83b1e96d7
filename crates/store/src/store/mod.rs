//! [`Store`]: in-memory copy of the durable state, protected by one mutex.
//!
//! Every change is queued for the disk while the lock is held, so the order of writes is the order
//! of changes in memory. The replay after a restart depends on this order. No method blocks: work
//! that must wait for durability runs as a callback on the disk's writer thread.

mod budget;
mod checkpoint;
mod needed;
mod replay;
mod request;
mod undo;
mod user_limits;
mod user_store;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use tinkex_autodiff::LossProgram;
use tinkex_wire::rest::UserLimits;
use tinkex_wire::{LossId, ModelId, RequestId, SamplerId, SessionId, TinkerPath};

use crate::clock::Clock;
use crate::disk::{Disk, PayloadReader, WriteCallback};
use crate::error::ServerError;
use crate::hidden_paths::HiddenPaths;
use crate::log;
pub use crate::record::*;
use crate::user::{Account, KeyId, KeyRecord, UserId};
use crate::weights::WeightsLocation;

pub use self::budget::{RecordBudget, RecordUsage, cost_of_records, cost_of_request};
pub use self::needed::NeededBackend;
pub use self::replay::UnfinishedRequest;
pub use self::request::{AdmittedRequest, CompletionFeed, RequestEntry, RequestPhase, WriteStatus};
pub use self::user_limits::{CurrentUse, UnfinishedRequests};
pub use self::user_store::{AuditEvent, UserStore};

/// The server's state: durable records and the indexes over them.
pub struct Store {
    pub clock: Clock,
    pub disk: Disk,
    /// Paths that messages for clients do not contain. The server sets them after the start.
    pub hidden_paths: Arc<HiddenPaths>,
    pub sessions: HashMap<SessionId, SessionEntry>,
    pub runs: HashMap<ModelId, Tracked<ModelRunRecord>>,
    pub samplers: HashMap<SamplerId, SamplerEntry>,
    pub checkpoints: BTreeMap<TinkerPath, Tracked<CheckpointRecord>>,
    /// Checkpoints that were deleted recently, with the times of their deletions. A repeated
    /// deletion of one of them succeeds.
    pub deleted_checkpoints: HashMap<TinkerPath, UnixMicros>,
    pub requests: HashMap<RequestId, RequestEntry>,
    /// Requests by scope and sequence number.
    pub sequences: HashMap<SequenceScope, BTreeMap<u64, RequestId>>,
    /// Custom losses of the open sessions.
    pub losses: HashMap<LossId, Arc<LossProgram>>,
    /// Unacknowledged completions, by sampling session and clone.
    pub feeds: HashMap<(SamplerId, u64), CompletionFeed>,
    pub usage: BTreeMap<UsageKey, u64>,
    pub records: RecordBudget,
    /// API keys, besides the key that the server was started with.
    pub keys: BTreeMap<KeyId, KeyRecord>,
    pub limits: BTreeMap<UserId, UserLimits>,
    /// Newest entries of the audit log, oldest first; at most [`AUDIT_ENTRIES`].
    pub audit: VecDeque<AuditRecord>,
    /// Requests without an outcome, by user.
    pub unfinished: HashMap<UserId, UnfinishedRequests>,
    /// Names of folders that are being written and that no record refers to yet.
    pub unfinished_folders: HashSet<String>,
    /// [Running time](Clock::running) at the end of the replay. A session that was used later has a
    /// client that is still running.
    pub replayed_at: Duration,
    /// Size of the results in memory, in bytes.
    pub result_bytes: usize,
    /// Limit on `result_bytes`.
    pub result_limit: usize,
}

/// A session and the time of its client's last request.
#[derive(Clone, Debug)]
pub struct SessionEntry {
    pub row: SessionRecord,
    /// [Running time](Clock::running) of the last request or heartbeat.
    pub last_used: Duration,
}

/// A sampling session and the time of its last use.
#[derive(Clone, Debug)]
pub struct SamplerEntry {
    pub row: SamplerRecord,
    /// [Running time](Clock::running) of the creation, of the last request, or of the start of the
    /// server, whichever is latest.
    pub last_used: Duration,
}

/// A record and the in-memory data about it.
#[derive(Clone, Debug)]
pub struct Tracked<T> {
    pub row: T,
    /// Time of the last request that used the object.
    pub last_used: UnixMicros,
    /// For a run: the requests that modified it after its snapshot, by sequence number.
    pub changes: BTreeMap<u64, ChangeRecord>,
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
    pub fn put(&mut self, records: Vec<Record>, on_written: WriteCallback) {
        self.disk.append(records.clone(), None, on_written);
        self.apply_all(records);
    }

    /// Applies a record without waiting for its write. For changes that the server repeats later if
    /// the write fails.
    pub fn put_unconfirmed(&mut self, record: Record) {
        self.put(vec![record], ignore_result());
    }

    /// Applies a record of a completed operation, such as a saved snapshot or a removal. The write
    /// is retried until it succeeds.
    pub fn put_required(&mut self, record: Record) {
        self.disk.append_required(vec![record.clone()], None, ignore_result());
        self.apply(record);
    }

    /// Queues records that are applied only once they are durable. `on_written` receives the
    /// records and returns the callback that applies them.
    pub fn write_then_apply(
        &mut self,
        records: Vec<Record>,
        on_written: impl FnOnce(Vec<Record>) -> WriteCallback,
    ) {
        self.disk.append(records.clone(), None, on_written(records));
    }

    pub fn apply_all(&mut self, records: Vec<Record>) {
        records.into_iter().for_each(|record| self.apply(record));
    }

    /// Returns a reader of stored payloads.
    pub fn reader(&self) -> PayloadReader {
        self.disk.reader()
    }

    /// Returns a session if it exists and is open.
    pub fn open_session(&mut self, id: &SessionId) -> Option<&mut SessionEntry> {
        self.sessions.get_mut(id).filter(|session| session.row.end.is_none())
    }

    /// Returns the account to which the requests of a session are charged.
    pub fn account(&self, session: &SessionId) -> Account {
        let owner = self.sessions.get(session).map(|entry| entry.row.owner.clone());
        Account { owner: owner.unwrap_or_default(), session: session.clone() }
    }

    /// Resets the expiry timer of a session.
    pub fn touch(&mut self, id: &SessionId) {
        if let Some(session) = self.sessions.get_mut(id) {
            session.last_used = self.clock.running();
        }
    }

    /// Resets the idle timer of a sampling session.
    pub fn touch_sampler(&mut self, id: &SamplerId) {
        if let Some(sampler) = self.samplers.get_mut(id) {
            sampler.last_used = self.clock.running();
        }
    }

    /// Returns a sampling session that can be sampled from.
    ///
    /// # Errors
    /// If the sampling session does not exist or has ended.
    pub fn open_sampler(&self, id: &SamplerId) -> Result<&SamplerRecord, ServerError> {
        let row = &self.samplers.get(id).ok_or_else(|| ServerError::no_sampling_session(id))?.row;
        let reason = match row.end {
            None => return Ok(row),
            Some(SamplerEnd::Closed) => "its client closed it",
            Some(SamplerEnd::Unused) => {
                "its weights have no name, and it was not used for a long time"
            }
        };
        let advice = if row.run.is_some() {
            "save the weights again, or save them under a name to keep them"
        } else {
            "create another sampling session"
        };
        Err(ServerError::invalid(format!("sampling session {id} has ended: {reason}; {advice}")))
    }

    /// Returns the sampling sessions that have a request without an outcome.
    pub fn busy_samplers(&self) -> HashSet<SamplerId> {
        let unfinished = self.requests.values().filter(|entry| entry.finished_at().is_none());
        let sampler = |entry: &RequestEntry| match &entry.row.scope {
            SequenceScope::Sampler(id) => Some(id.clone()),
            SequenceScope::Model(_) | SequenceScope::CustomLosses(_) => None,
        };
        unfinished.filter_map(sampler).collect()
    }

    /// Queues the current time for writing, from which the next start continues. Without a stored
    /// time, the next start would use the wall clock, even if the wall clock was set in between.
    pub fn save_clock(&mut self) {
        let clock = self.clock.record();
        self.put_unconfirmed(Record::Clock(clock));
    }

    /// Returns the sessions that ended at or before `time` and that no run or request refers to.
    pub fn removable_sessions(&self, time: UnixMicros) -> Vec<SessionId> {
        let mut used: HashSet<&SessionId> = HashSet::new();
        used.extend(self.runs.values().map(|entry| &entry.row.session));
        used.extend(self.requests.values().map(|entry| &entry.row.session));
        let sessions = self.sessions.values().map(|entry| &entry.row);
        let ended = sessions.filter(|row| row.ended_at.is_some_and(|at| at <= time));
        ended.map(|row| &row.id).filter(|id| !used.contains(id)).cloned().collect()
    }

    /// Returns all weights that are in use.
    pub fn weights_in_use(&self) -> HashSet<WeightsLocation> {
        let checkpoints = self.checkpoints.values().map(|entry| entry.row.weights.clone());
        let samplers =
            self.samplers.values().filter_map(|entry| entry.row.needed_weights().cloned());
        let snapshots = self
            .runs
            .values()
            .filter_map(|entry| Some(entry.row.snapshot.as_ref()?.weights.clone()));
        // A load reads the weights that its checkpoint had at admission, even if the checkpoint is
        // deleted or overwritten before the load is executed.
        let unfinished = self.requests.values().filter(|entry| entry.finished_at().is_none());
        let loads = unfinished.filter_map(|entry| entry.row.source.clone());
        let unfinished = self.unfinished_folders.iter().cloned().map(WeightsLocation::Local);
        checkpoints.chain(samplers).chain(loads).chain(snapshots).chain(unfinished).collect()
    }

    /// Removes weights from the unfinished folders, because a record refers to them now.
    fn finish_weights(&mut self, weights: &WeightsLocation) {
        if let WeightsLocation::Local(folder) = weights {
            self.unfinished_folders.remove(folder);
        }
    }

    /// Returns whether a client trains a run: its session is open, and the client has sent
    /// something since the start of the server or waits for a result.
    pub fn is_in_use(&self, run: &ModelRunRecord) -> bool {
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
    pub fn compact_payloads(&mut self, min_bytes: u64) {
        self.disk.compact(
            min_bytes,
            Box::new(|compacted| {
                if let Err(error) = compacted {
                    tracing::warn!(target: log::STORAGE, %error, "payload file was not compacted");
                }
            }),
        );
    }

    /// Returns the finished requests of the owner of a run: the run's training requests, and the
    /// samples from its weights. The sampling sessions of an ended session are not known any more; then the samples
    /// of the run's session are included.
    pub fn finished_requests_of(&self, run: &ModelRunRecord) -> Vec<RequestId> {
        let session = self.sessions.get(&run.session);
        let session_ended = session.is_none_or(|session| session.row.end.is_some());
        let samples_run = |sampler: &SamplerRecord| {
            let path = sampler.model_path.as_ref().and_then(|path| path.parse().ok());
            sampler.run.as_ref() == Some(&run.id)
                || path.is_some_and(|path: TinkerPath| *path.run() == run.id)
        };
        let belongs = |row: &RequestRecord| match &row.scope {
            SequenceScope::Model(id) => *id == run.id,
            SequenceScope::Sampler(id) => match self.samplers.get(id) {
                Some(sampler) => samples_run(&sampler.row),
                None => session_ended && row.session == run.session,
            },
            SequenceScope::CustomLosses(_) => false,
        };
        let finished = self.requests.values().filter(|entry| entry.finished_at().is_some());
        let own = finished.filter(|entry| entry.owner == run.owner);
        own.filter(|entry| belongs(&entry.row)).map(|entry| entry.row.id.clone()).collect()
    }

    /// Returns the runs of a session.
    pub fn runs_of<'a>(&'a self, id: &'a SessionId) -> impl Iterator<Item = &'a ModelRunRecord> {
        self.runs.values().map(|entry| &entry.row).filter(move |run| run.session == *id)
    }
}

#[cfg(test)]
mod tests;
