//! [`RecordBudget`]: limits the records of each user.
//!
//! Records are in memory, except for metadata, and are read again at each start. Without a limit, a
//! client could create sessions until the process has no memory, and runs out of memory again at each
//! restart.

use std::collections::HashMap;
use std::time::Duration;

use tinkex_wire::{OptimizerConfig, RequestId, SessionId};

use super::{
    CheckpointRecord, ModelRunRecord, Record, RequestEntry, RequestKind, SequenceScope, SessionEnd,
    SessionRecord, Store, UnixMicros,
};
use crate::error::ServerError;
use crate::log;
use crate::user::UserId;

/// Cost of a record besides its texts of variable length, in bytes: an upper bound of its memory.
const RECORD_COST: u64 = 1_024;
/// Cost of a usage counter or a remembered deletion, in bytes.
const SMALL_COST: u64 = 256;
/// Memory of a custom loss per byte of its request.
const LOSS_COST: u64 = 16;
/// Time for which a result that a client has received is kept although its user has no budget left.
/// The client polls again if it did not receive the whole result.
const DELIVERED_RETENTION: Duration = Duration::from_secs(60);
/// Interval at which the records are counted while a user has no budget left.
const COUNT_INTERVAL: Duration = Duration::from_secs(1);
/// Time after which a client should retry a request that exceeds the budget.
const RETRY: Duration = Duration::from_secs(5);

/// Costs of the records of each user.
///
/// New records are added as they are created. Removed records are subtracted when the records are
/// counted again: at the expiry interval, and when a user has no budget left.
#[derive(Debug)]
pub struct RecordBudget {
    /// Maximum cost of the records of one user, in bytes.
    limit: u64,
    used: HashMap<UserId, RecordUsage>,
    /// [Running time](crate::clock::Clock::running) of the last count that left a user without
    /// budget. Counting takes long, so that it is not repeated for every request.
    full_at: HashMap<UserId, Duration>,
}

/// Cost and number of the records of a user.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecordUsage {
    /// Cost in bytes.
    pub bytes: u64,
    pub sessions: usize,
    pub runs: usize,
    pub checkpoints: usize,
    pub requests: usize,
}

impl Default for RecordBudget {
    fn default() -> Self {
        Self { limit: u64::MAX, used: HashMap::new(), full_at: HashMap::new() }
    }
}

impl RecordBudget {
    /// Returns the cost and number of the records of each user at the last count.
    #[must_use]
    pub fn used(&self) -> &HashMap<UserId, RecordUsage> {
        &self.used
    }
}

impl Store {
    /// Limits the cost of the records of each user to `bytes` bytes, and counts the records.
    pub fn limit_records(&mut self, bytes: u64) {
        self.records.limit = bytes;
        self.count_records();
    }

    /// Reserves budget for records that `owner` creates.
    ///
    /// If the budget is exceeded, first removes records that the user does not need: results that a
    /// client has received, and ended sessions without runs.
    ///
    /// # Errors
    /// [`ServerError::Busy`] if the user has no budget left.
    pub fn reserve_records(&mut self, owner: &UserId, bytes: u64) -> Result<(), ServerError> {
        let now = self.clock.running();
        let full_at = self.records.full_at.get(owner).copied();
        if self.exceeds(owner, bytes) && full_at.is_none_or(|at| at + COUNT_INTERVAL <= now) {
            self.count_records();
            if self.exceeds(owner, bytes) {
                self.reclaim(owner, bytes);
                self.count_records();
                self.records.full_at.insert(owner.clone(), now);
            }
        }
        if self.exceeds(owner, bytes) {
            return Err(self.no_budget(owner, bytes));
        }
        self.records.used.entry(owner.clone()).or_default().bytes += bytes;
        Ok(())
    }

    fn exceeds(&self, owner: &UserId, bytes: u64) -> bool {
        let used = self.records.used.get(owner).map_or(0, |used| used.bytes);
        used.saturating_add(bytes) > self.records.limit
    }

    fn no_budget(&self, owner: &UserId, bytes: u64) -> ServerError {
        let used = self.records.used.get(owner).cloned().unwrap_or_default();
        let RecordUsage { bytes: total, sessions, runs, checkpoints, requests } = used;
        let message = format!(
            "the records of user {owner} have {total} bytes, this request needs {bytes} more, the \
             limit is {}: {sessions} sessions, {runs} runs, {checkpoints} checkpoints and \
             {requests} requests with their metadata; finish sessions, delete runs and \
             checkpoints, acknowledge results, or wait until sessions without heartbeats and \
             results expire",
            self.records.limit
        );
        ServerError::Busy { message, retry_after: RETRY }
    }

    /// Counts the records of all users. A record whose owner is not known any more, because its
    /// session or run was removed, counts for no user.
    pub fn count_records(&mut self) {
        let mut used: HashMap<UserId, RecordUsage> = HashMap::new();
        for entry in self.sessions.values() {
            let usage = used.entry(entry.row.owner.clone()).or_default();
            usage.bytes += session_cost(&entry.row);
            usage.sessions += 1;
        }
        for entry in self.runs.values() {
            let usage = used.entry(entry.row.owner.clone()).or_default();
            usage.bytes += run_cost(&entry.row) + SMALL_COST * entry.changes.len() as u64;
            usage.runs += 1;
        }
        for entry in self.checkpoints.values() {
            let Some(run) = self.runs.get(entry.row.path.run()) else { continue };
            let usage = used.entry(run.row.owner.clone()).or_default();
            usage.bytes += checkpoint_cost(&entry.row);
            usage.checkpoints += 1;
        }
        for entry in self.samplers.values() {
            let Some(owner) = self.owner_of(&entry.row.session) else { continue };
            used.entry(owner.clone()).or_default().bytes += RECORD_COST;
        }
        for entry in self.requests.values() {
            let Some(owner) = self.owner_of_request(entry) else { continue };
            let usage = used.entry(owner.clone()).or_default();
            usage.bytes += RECORD_COST + self.loss_cost(entry);
            usage.requests += 1;
        }
        for key in self.usage.keys() {
            used.entry(key.owner.clone()).or_default().bytes += SMALL_COST;
        }
        for path in self.deleted_checkpoints.keys() {
            let Some(run) = self.runs.get(path.run()) else { continue };
            used.entry(run.row.owner.clone()).or_default().bytes += SMALL_COST;
        }
        self.records.used = used;
    }

    /// Returns the user to whom a session belongs.
    fn owner_of(&self, session: &SessionId) -> Option<&UserId> {
        self.sessions.get(session).map(|entry| &entry.row.owner)
    }

    /// Returns the user to whom a request belongs. The session of a request may have been removed
    /// before its run.
    fn owner_of_request(&self, entry: &RequestEntry) -> Option<&UserId> {
        let run = match &entry.row.scope {
            SequenceScope::Model(run) => self.runs.get(run),
            _ => None,
        };
        run.map(|run| &run.row.owner).or_else(|| self.owner_of(&entry.row.session))
    }

    fn loss_cost(&self, entry: &RequestEntry) -> u64 {
        if entry.row.kind != RequestKind::CreateCustomLoss {
            return 0;
        }
        self.disk.payload_len(entry.row.number).saturating_mul(LOSS_COST)
    }

    /// Removes records that `owner` does not need, until `bytes` bytes and a quarter of the budget
    /// are free or nothing is left to remove.
    fn reclaim(&mut self, owner: &UserId, bytes: u64) {
        let used = self.records.used.get(owner).map_or(0, |used| used.bytes);
        let target = self.records.limit.saturating_sub(self.records.limit / 4);
        let mut excess = used.saturating_add(bytes).saturating_sub(target);
        let mut delivered = self.delivered_results(owner);
        let results = excess.div_ceil(RECORD_COST);
        delivered.truncate(usize::try_from(results).unwrap_or(usize::MAX));
        excess = excess.saturating_sub(RECORD_COST * delivered.len() as u64);
        let mut sessions: Vec<(Option<UnixMicros>, SessionId)> = self
            .removable_sessions(UnixMicros::MAX)
            .into_iter()
            .filter_map(|id| self.sessions.get(&id))
            .filter(|entry| entry.row.owner == *owner)
            .map(|entry| (entry.row.ended_at, entry.row.id.clone()))
            .collect();
        sessions.sort();
        let mut ids = Vec::new();
        for (_, id) in sessions {
            if excess == 0 {
                break;
            }
            let cost = self.sessions.get(&id).map_or(0, |entry| session_cost(&entry.row));
            excess = excess.saturating_sub(cost);
            ids.push(id);
        }
        if delivered.is_empty() && ids.is_empty() {
            return;
        }
        tracing::warn!(
            target: log::STORAGE,
            user = %owner,
            results = delivered.len(),
            sessions = ids.len(),
            "a user has no budget for records left; removed results that were received, and \
             ended sessions"
        );
        self.remove_results(delivered);
        if !ids.is_empty() {
            self.put_required(Record::SessionsRemoved { ids });
        }
    }

    /// Returns the requests of a user whose outcomes a client has received a while ago, oldest
    /// first. Custom losses are used for as long as their sessions are open.
    fn delivered_results(&self, owner: &UserId) -> Vec<RequestId> {
        let now = self.clock.running();
        let mut delivered: Vec<(Duration, RequestId)> = self
            .requests
            .values()
            .filter(|entry| entry.row.kind != RequestKind::CreateCustomLoss)
            .filter_map(|entry| Some((entry.delivered?, entry)))
            .filter(|(at, entry)| {
                *at + DELIVERED_RETENTION <= now && self.owner_of_request(entry) == Some(owner)
            })
            .map(|(at, entry)| (at, entry.row.id.clone()))
            .collect();
        delivered.sort();
        delivered.into_iter().map(|(_, id)| id).collect()
    }
}

/// Returns the cost of new records, in bytes.
#[must_use]
pub fn cost_of_records(records: &[Record]) -> u64 {
    let cost = |record: &Record| match record {
        Record::Session(row) => session_cost(row),
        Record::Run(row) => run_cost(row),
        Record::Checkpoint(row) => checkpoint_cost(row),
        Record::Sampler(_) => RECORD_COST,
        _ => 0,
    };
    records.iter().map(cost).sum()
}

/// Returns the cost of a request of `bytes` bytes, including the record that it creates, in bytes.
#[must_use]
pub fn cost_of_request(kind: RequestKind, bytes: usize) -> u64 {
    let bytes = bytes as u64;
    let created = match kind {
        RequestKind::CreateCustomLoss => bytes.saturating_mul(LOSS_COST),
        // The metadata of the checkpoint is a part of the body.
        RequestKind::SaveWeights
        | RequestKind::SaveWeightsForSampler
        | RequestKind::SaveWeightsExternal => RECORD_COST.saturating_add(bytes),
        RequestKind::CreateModel
        | RequestKind::ForwardBackward
        | RequestKind::OptimStep
        | RequestKind::DiscardGradient
        | RequestKind::LoadWeights
        | RequestKind::Sample => 0,
    };
    RECORD_COST.saturating_add(created)
}

fn session_cost(row: &SessionRecord) -> u64 {
    let detail = match &row.end {
        Some(SessionEnd::Finished(details)) => details.detail.as_ref(),
        Some(SessionEnd::Expired) | None => None,
    };
    let names = [row.project_id.as_ref(), row.display_name.as_ref(), detail];
    let labels: usize = row.tags.iter().chain(names.into_iter().flatten()).map(String::len).sum();
    RECORD_COST + labels as u64 + row.metadata_bytes
}

fn run_cost(row: &ModelRunRecord) -> u64 {
    RECORD_COST + optimizer_cost(&row.optimizer) + row.metadata_bytes
}

fn checkpoint_cost(row: &CheckpointRecord) -> u64 {
    RECORD_COST + optimizer_cost(&row.optimizer) + row.metadata_bytes
}

fn optimizer_cost(optimizer: &OptimizerConfig) -> u64 {
    if optimizer.settings.is_empty() {
        return 0;
    }
    serde_json::to_vec(optimizer).map_or(0, |json| json.len() as u64)
}
