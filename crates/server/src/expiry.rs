//! Ends silent sessions; removes expired results and checkpoints, ended sessions and unreferenced
//! folders. A session is silent if its client has sent no request and no heartbeat for the session
//! timeout.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tinkex_wire::{ModelId, RequestId, SessionId, TinkerPath};
use tokio::sync::{OwnedMutexGuard, oneshot};
use tokio::time::Instant;

use crate::clock::micros;
use crate::disk::WriteCallback;
use crate::history::{self, HistoryRecord};
use crate::outcome::{Outcome, record_outcome};
use crate::state::ServerState;
use crate::store::{
    FailureCategory, Record, RequestKind, SessionEnd, SessionRecord, Store, UnixMicros,
};

/// Failure message of the queued requests of an expired session, and detail of its status.
pub(crate) const EXPIRED: &str = "session expired: no heartbeat or request from its client";

/// Running time after an interruption in which nothing that depends on clients expires. Clients may
/// have been interrupted too, and reconnect.
const GRACE: Duration = Duration::from_secs(60);

/// Reports silent sessions, and removes expired objects and unreferenced folders. Removing files
/// blocks, so this runs as jobs.
pub(crate) async fn remove_expired(state: &Arc<ServerState>) {
    let (remover, lister) = (Arc::clone(state), Arc::clone(state));
    // A job that panicked or did not run is repeated at the next interval.
    let _ = state.executor.run_job(move || remove_records(&remover)).await;
    let Ok(Some(names)) = state.executor.run_job(move || list_folders(&lister)).await else {
        return;
    };
    let Some(unreferenced) = unreferenced(state, names).await else { return };
    let weights_dir = state.weights_dir.clone();
    let remove = move || {
        for name in unreferenced {
            // A folder that cannot be removed now is tried again at the next interval.
            let _ = std::fs::remove_dir_all(weights_dir.join(name));
        }
    };
    let _ = state.executor.run_job(remove).await;
}

fn remove_records(state: &Arc<ServerState>) {
    let now = state.clock.now();
    // Notice an interruption first: nothing may expire because of it.
    state.clock.tick();
    report_silent_sessions(state);
    let mut store = state.store();
    let timeouts = &state.options.timeouts;
    let oldest = expiry_deadline(state, timeouts.result_retention);
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
        let folder = store.checkpoints.get(&path).map(|entry| entry.row.folder.clone());
        store.put_required(Record::CheckpointDeleted { path, at: now });
        if let Some(folder) = folder.filter(|folder| !store.folders().contains(folder)) {
            state.backends.discard(folder);
        }
    }
    let retention = state.options.timeouts.ended_session_retention;
    if !retention.is_zero() {
        let ids = store.removable_sessions(now.saturating_sub(micros(retention)));
        if !ids.is_empty() {
            store.put_required(Record::SessionsRemoved { ids });
        }
    }
    store.compact_payloads(state.options.limits.payload_bytes);
    drop(store);
    if let Some(cutoff) = state.history.cutoff(now) {
        let record = history::record(HistoryRecord::Cutoff(cutoff));
        state.store().put_unconfirmed(record);
    }
    let instant = Instant::now();
    let mut ended = Vec::new();
    state.downloads().retain(|_, grant| {
        let valid = grant.expires > instant;
        ended.extend((!valid).then(|| grant.folder.clone()));
        valid
    });
    for folder in ended {
        // A copy of weights from an upstream: nothing else refers to it.
        state.store().unfinished_folders.remove(&folder);
    }
}

/// Returns whether the client of a session has finished it before a time.
fn is_finished(session: &SessionRecord, before: UnixMicros) -> bool {
    matches!(session.end, Some(SessionEnd::Finished(_)))
        && session.ended_at.is_some_and(|at| at <= before)
}

/// Reports silent sessions to the worker, which saves their models and ends the sessions.
fn report_silent_sessions(state: &Arc<ServerState>) {
    let Some(deadline) = silence_deadline(state) else { return };
    let silent: Vec<SessionId> = {
        let store = state.store();
        let open = store.sessions.values().filter(|entry| entry.row.end.is_none());
        open.filter(|entry| entry.last_used <= deadline).map(|entry| entry.row.id.clone()).collect()
    };
    if !silent.is_empty() {
        state.engine_queue().report_silent(silent);
    }
}

/// Returns whether an open session has sent nothing within the session timeout.
pub(crate) fn is_silent(state: &ServerState, id: &SessionId) -> bool {
    let Some(deadline) = silence_deadline(state) else { return false };
    state.store().open_session(id).is_some_and(|entry| entry.last_used <= deadline)
}

/// Returns the running time before which a session's last request makes it silent; `None` if no
/// session expires now.
fn silence_deadline(state: &ServerState) -> Option<Duration> {
    let timeout = state.options.timeouts.session_expiry;
    if timeout.is_zero() { None } else { expiry_deadline(state, timeout) }
}

/// Returns the running time up to which objects must have been used last to expire now. `None` if
/// none expires: the server has not run for long enough, or the grace period after an interruption
/// has not passed.
fn expiry_deadline(state: &ServerState, timeout: Duration) -> Option<Duration> {
    let grace = GRACE.min(timeout);
    if state.clock.since_gap().is_some_and(|since| since < grace) {
        return None;
    }
    state.clock.running().checked_sub(timeout)
}

/// Ends sessions. Once the change is durable, their queued requests fail and their models are
/// unloaded; then `on_written` runs.
pub(crate) fn end_sessions(
    state: &Arc<ServerState>,
    guard: OwnedMutexGuard<()>,
    sessions: Vec<(SessionId, SessionEnd)>,
    on_written: WriteCallback,
) {
    let mut store = state.store();
    let mut records = Vec::new();
    for (id, end) in sessions {
        if let Some(entry) = store.open_session(&id) {
            let (end, ended_at) = (Some(end), Some(state.clock.now()));
            records.push(Record::Session(SessionRecord { end, ended_at, ..entry.row.clone() }));
        }
    }
    if records.is_empty() {
        drop(store);
        return on_written(Ok(()));
    }
    let callback_state = Arc::clone(state);
    store.write_then_apply(records, move |records| {
        Box::new(move |written| {
            if written.is_ok() {
                let mut store = callback_state.store();
                // Ordered, so that the upstreams get the same requests in every run.
                let mut sampled = BTreeSet::new();
                for record in &records {
                    let Record::Session(SessionRecord { id, end: Some(end), .. }) = record else {
                        continue;
                    };
                    fail_queued(&callback_state, &mut store, id, end);
                    let samplers = store.samplers.values().filter(|entry| entry.row.session == *id);
                    sampled.extend(samplers.filter_map(|entry| entry.row.folder.clone()));
                }
                store.apply_all(records);
                drop(store);
                // Those of the sampling sessions that have no checkpoint path.
                sampled.into_iter().for_each(|folder| callback_state.backends.discard(folder));
            }
            drop(guard);
            on_written(written);
        })
    });
}

/// Removes the models of a session from the queue and fails their queued requests.
fn fail_queued(state: &Arc<ServerState>, store: &mut Store, id: &SessionId, end: &SessionEnd) {
    let message = match end {
        SessionEnd::Finished(_) => "the client finished the session",
        SessionEnd::Expired => EXPIRED,
    };
    let models: Vec<ModelId> = store.runs_of(id).map(|run| run.id.clone()).collect();
    for model in models {
        for request in state.queue_of_model(store, &model).drop_model(&model) {
            let failed = Outcome::failed(FailureCategory::User, message);
            record_outcome(state, store, &request, failed);
        }
    }
}

/// Lists the folders of weights.
fn list_folders(state: &ServerState) -> Option<Vec<String>> {
    let entries = std::fs::read_dir(&state.weights_dir).ok()?;
    Some(entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect())
}

/// Returns those of the folders `names` to which no record refers: old snapshots, deleted
/// checkpoints, unfinished saves. `None` if they must not be removed now.
///
/// List the folders first: a folder created since is not in the list and cannot be removed by
/// mistake.
async fn unreferenced(state: &ServerState, names: Vec<String>) -> Option<Vec<String>> {
    let (sender, written) = oneshot::channel();
    let mut referenced: HashSet<String> = {
        let mut store = state.store();
        store.disk.barrier(Box::new(move |written| drop(sender.send(written))));
        store.folders()
    };
    // Wait until the current records are durable: after a crash, earlier records would refer to the
    // folders to be removed.
    written.await.ok()?.ok()?;
    // Add the references that a rolled-back deletion has restored meanwhile.
    referenced.extend(state.store().folders());
    let in_use = |name: &str| referenced.contains(name);
    let unreferenced = |name: &String| !in_use(name) && !final_name(name).is_some_and(in_use);
    Some(names.into_iter().filter(unreferenced).collect())
}

/// Returns the final name of a folder that is being written, whose temporary name is `.NAME.SUFFIX`;
/// see [`StagedFolder`](tinkex_files::StagedFolder).
fn final_name(temporary: &str) -> Option<&str> {
    Some(temporary.strip_prefix('.')?.rsplit_once('.')?.0)
}

#[cfg(test)]
mod tests;
