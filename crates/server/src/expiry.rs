//! Ends silent sessions and unused sampling sessions; removes expired results and checkpoints, ended
//! sessions and unreferenced folders. A session is silent if its client has sent no request and no
//! heartbeat for the session timeout.

use std::collections::{BTreeSet, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::MutexGuard;
use tinkex_backend::context::BackendContext;
use tinkex_backend::outcome::Outcome;
use tinkex_dashboard::History;
use tinkex_store::clock::micros;
use tinkex_store::disk::WriteCallback;
use tinkex_store::durable::ChangeGuard;
use tinkex_store::history::HistoryRecord;
use tinkex_store::log;
use tinkex_store::store::{
    FailureCategory, Record, RequestKind, SamplerEnd, SamplerRecord, SessionEnd, SessionRecord,
    Store, UnixMicros,
};
use tinkex_store::weights::WeightsLocation;
use tinkex_wire::{ModelId, RequestId, SessionId, TinkerPath};
use tokio::sync::oneshot;

use crate::backends::Backends;
use crate::disk_usage;
use crate::downloads::Downloads;
use crate::options::ServerTimeouts;
use crate::retention::Retention;

/// Failure message of the queued requests of an expired session, and detail of its status.
pub(crate) const EXPIRED: &str = "session expired: no heartbeat or request from its client";

/// Grace period after an interruption, in [running time](tinkex_store::clock::Clock::running).
/// During the grace period nothing that depends on clients expires: the clients may have been
/// interrupted too, and need time to reconnect.
const GRACE_PERIOD: Duration = Duration::from_secs(60);

/// Ends silent sessions, and removes expired objects.
pub(crate) struct Expiry {
    pub(crate) context: BackendContext,
    pub(crate) backends: Arc<Backends>,
    pub(crate) history: Arc<History>,
    pub(crate) downloads: Arc<Downloads>,
    /// Parent folder of all adapter folders.
    pub(crate) weights_dir: PathBuf,
    pub(crate) timeouts: ServerTimeouts,
    /// Value of [`ServerLimits::payload_bytes`](crate::ServerLimits::payload_bytes).
    pub(crate) payload_bytes: u64,
    pub(crate) retention: Retention,
    /// Held while files are removed, and while a backup copies them; see
    /// [`lock_files`](Self::lock_files).
    pub(crate) files: Arc<tokio::sync::Mutex<()>>,
}

impl Expiry {
    fn store(&self) -> MutexGuard<'_, Store> {
        self.context.store.lock()
    }

    /// Waits until no files are being removed. No weights are removed and no compaction of payloads
    /// is started until the guard is dropped.
    pub(crate) async fn lock_files(&self) -> tokio::sync::OwnedMutexGuard<()> {
        Arc::clone(&self.files).lock_owned().await
    }

    /// Queues a compaction of the payload file if it has at least `min_bytes` bytes. During a backup,
    /// leaves the compaction to a later expiry interval.
    pub(crate) fn compact_payloads(&self, min_bytes: u64) {
        // A compaction that is queued before a backup locks the files is started before the backup
        // copies the database, so that it keeps all payloads that the copy needs.
        if let Ok(_files) = self.files.try_lock() {
            self.store().compact_payloads(min_bytes);
        }
    }

    /// Reports silent sessions, and removes expired objects and unreferenced folders. Removing
    /// files blocks, so the removal runs as jobs.
    pub(crate) async fn remove_expired(self: &Arc<Self>) {
        let executor = &self.context.executor;
        // A backup may take long. Files are removed after it.
        let files = self.files.try_lock();
        let remover = Arc::clone(self);
        // A job that panicked or did not run is repeated at the next interval.
        let _ = executor.run_job(move || remover.remove_records()).await;
        if files.is_err() {
            return;
        }
        self.store().compact_payloads(self.payload_bytes);
        let lister = Arc::clone(self);
        let Ok(Some(names)) = executor.run_job(move || lister.list_folders()).await else {
            return;
        };
        let Some(unreferenced) = self.unreferenced(names).await else { return };
        let weights_dir = self.weights_dir.clone();
        let remove = move || {
            let mut folders: usize = 0;
            let mut bytes = 0;
            for name in unreferenced {
                let folder = weights_dir.join(name);
                let size = disk_usage::size(&folder);
                // A folder that cannot be removed now is tried again at the next interval.
                if std::fs::remove_dir_all(folder).is_ok() {
                    folders += 1;
                    bytes += size;
                }
            }
            if folders > 0 {
                tracing::info!(target: log::STORAGE, folders, bytes, "removed unused weights");
            }
        };
        let _ = executor.run_job(remove).await;
    }

    fn remove_records(&self) {
        let now = self.context.clock().now();
        // Tick first, so that the clock notices an interruption: nothing may expire because of an
        // interruption.
        self.context.clock().tick();
        self.report_silent_sessions();
        let mut store = self.store();
        let timeouts = &self.timeouts;
        let oldest = self.deadline(timeouts.result_retention);
        let finished_before = now.saturating_sub(micros(timeouts.finished_session_retention));
        let stale: Vec<RequestId> = store
            .requests
            .values()
            .filter(|entry| {
                let Some(at) = entry.finished_at() else { return false };
                let session = store.sessions.get(&entry.row.session).map(|session| &session.row);
                let ended = session.is_none_or(|session| session.end.is_some());
                // A custom loss is used for as long as its session is open.
                let in_use = entry.row.kind == RequestKind::CreateCustomLoss && !ended;
                Some(at) <= oldest && !in_use
                    || session.is_some_and(|session| is_finished(session, finished_before))
            })
            .map(|entry| entry.row.id.clone())
            .collect();
        store.remove_results(stale);
        let expired: Vec<TinkerPath> = store
            .checkpoints
            .values()
            .filter(|entry| entry.row.is_expired(now))
            .map(|entry| entry.row.path.clone())
            .collect();
        for path in expired {
            let weights = store.checkpoints.get(&path).map(|entry| entry.row.weights.clone());
            store.put_required(Record::CheckpointDeleted { path, at: now });
            if let Some(weights) =
                weights.filter(|weights| !store.weights_in_use().contains(weights))
            {
                self.backends.discard(weights);
            }
        }
        let removed = self.retention.apply(&mut store, now);
        if !removed.is_empty() {
            let in_use = store.weights_in_use();
            let unused = removed.into_iter().filter(|weights| !in_use.contains(weights));
            unused.for_each(|weights| self.backends.discard(weights));
        }
        self.end_unused_samplers(&mut store);
        self.release_weights(&mut store);
        let retention = timeouts.ended_session_retention;
        if !retention.is_zero() {
            let ids = store.removable_sessions(now.saturating_sub(micros(retention)));
            if !ids.is_empty() {
                store.put_required(Record::SessionsRemoved { ids });
            }
        }
        self.merge_usage(&mut store);
        store.count_records();
        drop(store);
        if let Some(cutoff) = self.history.cutoff(now) {
            let record = HistoryRecord::Cutoff(cutoff).into_record();
            self.store().put_unconfirmed(record);
        }
        for folder in self.downloads.remove_expired() {
            // The folder is a copy of weights from an upstream. Only the expired download
            // permission referred to it.
            self.store().unfinished_folders.remove(&folder);
        }
    }

    /// Merges old usage counters, whose number would grow with the number of sessions for ever.
    fn merge_usage(&self, store: &mut Store) {
        let retention = self.timeouts.usage_detail;
        if retention.is_zero() {
            return;
        }
        let hours = i64::try_from(retention.as_secs() / 3_600).unwrap_or(i64::MAX);
        // Merge whole days: the counters of a day get the same key.
        let before = self.context.clock().hour().saturating_sub(hours);
        let before = before - before.rem_euclid(24);
        if store.has_unmerged_usage(before) {
            store.put_required(Record::UsageMerged { before });
        }
    }

    /// Ends the sampling sessions with weights without a name that were not used for the timeout.
    fn end_unused_samplers(&self, store: &mut Store) {
        let timeout = self.timeouts.unused_sampler;
        let deadline = if timeout.is_zero() { None } else { self.deadline(timeout) };
        let Some(deadline) = deadline else { return };
        let busy = store.busy_samplers();
        let unused: Vec<SamplerRecord> = store
            .samplers
            .values()
            .filter(|entry| entry.row.end.is_none() && entry.row.run.is_some())
            .filter(|entry| entry.last_used <= deadline && !busy.contains(&entry.row.id))
            .map(|entry| SamplerRecord { end: Some(SamplerEnd::Unused), ..entry.row.clone() })
            .collect();
        for row in unused {
            tracing::info!(
                target: log::MODEL,
                sampling_session_id = %row.id,
                session_id = %row.session,
                "ended an unused sampling session"
            );
            store.put_required(Record::Sampler(row));
        }
    }

    /// Releases the weights of ended sampling sessions whose requests are finished. The weights are
    /// deleted if nothing else refers to them.
    fn release_weights(&self, store: &mut Store) {
        let ended = |row: &SamplerRecord| row.end.is_some() && !row.weights_released;
        if !store.samplers.values().any(|entry| ended(&entry.row)) {
            return;
        }
        let busy = store.busy_samplers();
        let mut released: Vec<SamplerRecord> = store
            .samplers
            .values()
            .filter(|entry| ended(&entry.row) && !busy.contains(&entry.row.id))
            .map(|entry| SamplerRecord { weights_released: true, ..entry.row.clone() })
            .collect();
        // Sort, so that the upstreams get the requests in the same order in every run of a
        // simulation.
        released.sort_by(|a, b| a.id.cmp(&b.id));
        let weights: Vec<WeightsLocation> =
            released.iter().filter_map(|row| row.weights.clone()).collect();
        for row in released {
            store.put_required(Record::Sampler(row));
        }
        let in_use = store.weights_in_use();
        for weights in weights.into_iter().filter(|weights| !in_use.contains(weights)) {
            self.backends.discard(weights);
        }
    }

    /// Reports silent sessions to the worker, which saves their models and ends the sessions.
    fn report_silent_sessions(&self) {
        let Some(deadline) = self.silence_deadline() else { return };
        let silent: Vec<SessionId> = {
            let store = self.store();
            let open = store.sessions.values().filter(|entry| entry.row.end.is_none());
            let silent = open.filter(|entry| entry.last_used <= deadline);
            silent.map(|entry| entry.row.id.clone()).collect()
        };
        if !silent.is_empty() {
            self.backends.engine().report_silent(silent);
        }
    }

    /// Returns whether an open session has sent nothing within the session timeout.
    pub(crate) fn is_silent(&self, id: &SessionId) -> bool {
        let Some(deadline) = self.silence_deadline() else { return false };
        self.store().open_session(id).is_some_and(|entry| entry.last_used <= deadline)
    }

    /// Returns the deadline for the last request of a session, in running time: a session is silent
    /// if its last request is not later. Returns `None` if no session expires now.
    fn silence_deadline(&self) -> Option<Duration> {
        let timeout = self.timeouts.session_expiry;
        if timeout.is_zero() { None } else { self.deadline(timeout) }
    }

    /// Returns the time `timeout` before now, in running time: objects that were not used after
    /// this time expire. Returns `None` if no object expires: the server has not run for `timeout`
    /// yet, or the grace period after an interruption has not passed.
    fn deadline(&self, timeout: Duration) -> Option<Duration> {
        let grace = GRACE_PERIOD.min(timeout);
        let clock = self.context.clock();
        if clock.since_gap().is_some_and(|since| since < grace) {
            return None;
        }
        clock.running().checked_sub(timeout)
    }

    /// Ends sessions. Once the change is durable, their queued requests fail and their models are
    /// unloaded; then `on_written` runs.
    pub(crate) fn end_sessions(
        self: &Arc<Self>,
        guard: ChangeGuard,
        sessions: Vec<(SessionId, SessionEnd)>,
        on_written: WriteCallback,
    ) {
        let mut store = self.store();
        let mut records = Vec::new();
        for (id, end) in sessions {
            if let Some(entry) = store.open_session(&id) {
                records.push(Record::Session(SessionRecord {
                    end: Some(end),
                    ended_at: Some(self.context.clock().now()),
                    ..entry.row.clone()
                }));
            }
        }
        if records.is_empty() {
            drop(store);
            return on_written(Ok(()));
        }
        let this = Arc::clone(self);
        store.write_then_apply(records, move |records| {
            Box::new(move |written| {
                if written.is_ok() {
                    this.apply_ended(records);
                }
                drop(guard);
                on_written(written);
            })
        });
    }

    /// Applies the durable records of ended sessions.
    fn apply_ended(&self, records: Vec<Record>) {
        let mut store = self.store();
        // Use an ordered set, so that the upstreams get the requests in the same order in every run
        // of a simulation.
        let mut sampled = BTreeSet::new();
        for record in &records {
            let Record::Session(SessionRecord { id, end: Some(end), .. }) = record else {
                continue;
            };
            self.fail_queued(&mut store, id, end);
            let samplers = store.samplers.values().filter(|entry| entry.row.session == *id);
            sampled.extend(samplers.filter_map(|entry| entry.row.needed_weights().cloned()));
        }
        store.apply_all(records);
        drop(store);
        // Discard the weights of the sampling sessions that have no checkpoint path.
        sampled.into_iter().for_each(|weights| self.backends.discard(weights));
    }

    /// Removes the models of a session from the queue and fails their queued requests.
    fn fail_queued(&self, store: &mut Store, id: &SessionId, end: &SessionEnd) {
        let message = match end {
            SessionEnd::Finished(_) => "the client finished the session",
            SessionEnd::Expired => EXPIRED,
        };
        let models: Vec<ModelId> = store.runs_of(id).map(|run| run.id.clone()).collect();
        for model in models {
            let Some(queue) = self.backends.queue_of_model(store, &model) else { continue };
            for request in queue.drop_model(&model) {
                let failed = Outcome::failed(FailureCategory::User, message);
                self.context.outcomes.record(store, &request, failed);
            }
        }
    }

    /// Lists the folders of weights.
    fn list_folders(&self) -> Option<Vec<String>> {
        let entries = std::fs::read_dir(&self.weights_dir).ok()?;
        Some(entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect())
    }

    /// Returns the folders in `names` to which no record refers: old snapshots, deleted
    /// checkpoints, unfinished saves. `None` if they must not be removed now.
    ///
    /// List the folders first: a folder created since is not in the list and cannot be removed by
    /// mistake.
    async fn unreferenced(&self, names: Vec<String>) -> Option<Vec<String>> {
        let (sender, written) = oneshot::channel();
        let mut referenced: HashSet<WeightsLocation> = {
            let mut store = self.store();
            store.disk.barrier(Box::new(move |written| drop(sender.send(written))));
            store.weights_in_use()
        };
        // Wait until the current records are durable: after a crash, earlier records would refer to
        // the folders to be removed.
        if written.await.ok()?.is_err() {
            // Results are outstanding because the disk is full or failing. Removing folders may free
            // the space that the results need. Keep the folders that durable records refer to.
            let (sender, stored) = oneshot::channel();
            self.store().disk.stored_folders(Box::new(move |read| drop(sender.send(read))));
            let stored = stored.await.ok()?.ok()?;
            referenced.extend(stored.into_iter().map(WeightsLocation::Local));
        }
        // Add the references that a rolled-back deletion has restored during the wait.
        referenced.extend(self.store().weights_in_use());
        let referenced: HashSet<&str> =
            referenced.iter().filter_map(WeightsLocation::local).collect();
        let in_use = |name: &str| referenced.contains(name);
        let unreferenced = |name: &String| !in_use(name) && !final_name(name).is_some_and(in_use);
        Some(names.into_iter().filter(unreferenced).collect())
    }
}

/// Returns whether the client of a session has finished it before a time.
fn is_finished(session: &SessionRecord, before: UnixMicros) -> bool {
    matches!(session.end, Some(SessionEnd::Finished(_)))
        && session.ended_at.is_some_and(|at| at <= before)
}

/// Returns the final name of a folder that is being written, whose temporary name is
/// `.NAME.SUFFIX`; see [`StagedFolder`](tinkex_files::StagedFolder).
fn final_name(temporary: &str) -> Option<&str> {
    Some(temporary.strip_prefix('.')?.rsplit_once('.')?.0)
}

#[cfg(test)]
mod tests;
