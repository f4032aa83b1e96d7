//! Tidying: what expired goes, and folders that nothing refers to.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use tinkex_wire::{ModelId, RequestId, SessionId, TinkerPath};

use crate::settle::{Settled, settle};
use crate::state::Shared;
use crate::store::{End, Fault, Kind, Micros, Record, now};

/// Tidies once.
pub(crate) fn sweep(shared: &Arc<Shared>) {
    let now = now();
    expire_sessions(shared, now);
    let mut store = shared.store();
    let old = now.saturating_sub(micros(shared.options.times.answer));
    let stale: Vec<RequestId> = store
        .requests
        .values()
        .filter(|entry| entry.answered_at().is_some_and(|at| at <= old))
        // A loss is asked for by its session for as long as that lives.
        .filter(|entry| {
            entry.row.kind != Kind::CreateCustomLoss
                || store.sessions.get(&entry.row.session).is_none_or(|s| s.row.end.is_some())
        })
        .map(|entry| entry.row.id.clone())
        .collect();
    store.forget(stale);
    let expired: Vec<TinkerPath> = store
        .checkpoints
        .values()
        .filter(|kept| kept.row.is_expired())
        .map(|kept| kept.row.path.clone())
        .collect();
    for path in expired {
        store.note(Record::Gone { path });
    }
    store.compact(shared.options.limits.journal);
    drop(store);
    let time = std::time::Instant::now();
    shared.downloads().retain(|_, download| download.until > time);
    remove_folders(shared);
}

fn expire_sessions(shared: &Arc<Shared>, now: Micros) {
    let life = shared.options.times.session;
    if life.is_zero() {
        return;
    }
    let old = now.saturating_sub(micros(life));
    let ids: Vec<SessionId> = {
        let store = shared.store();
        let open = store.sessions.values().filter(|kept| kept.row.end.is_none());
        open.filter(|kept| kept.seen <= old).map(|kept| kept.row.id.clone()).collect()
    };
    for id in ids {
        end_session(shared, &id, End::Expired, Box::new(|_| {}));
    }
}

/// Ends a session: what waits in line fails, its models leave memory.
pub(crate) fn end_session(
    shared: &Arc<Shared>,
    id: &SessionId,
    end: End,
    then: crate::journal::Then,
) {
    let why = match &end {
        End::Finished(_) => "the session was finished by its client",
        End::Expired => "session expired: nothing was heard of its client",
    };
    let mut store = shared.store();
    let models: Vec<ModelId> = store.runs_of(id).map(|run| run.id.clone()).collect();
    store.end_session(id, end, then);
    for model in models {
        for waiting in shared.queue.drop_model(&model) {
            let failed = Settled::failed(Fault::User, why);
            settle(shared, &mut store, &waiting, failed);
        }
    }
}

/// Removes folders that nothing refers to: old snapshots, deleted checkpoints, half-written ones.
fn remove_folders(shared: &Shared) {
    let Ok(entries) = std::fs::read_dir(&shared.folders) else { return };
    let names: Vec<String> =
        entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    // Asked after listing: a folder that was begun since is not in the list.
    let used: HashSet<String> = shared.store().folders();
    let aside = |name: &str| {
        let inner = name.strip_prefix('.').unwrap_or(name);
        used.iter().any(|folder| inner.starts_with(folder.as_str()))
    };
    for name in names.iter().filter(|name| !used.contains(*name) && !aside(name)) {
        // Nobody waits for this; what is left is tried again.
        let _ = std::fs::remove_dir_all(shared.folders.join(name));
    }
}

fn micros(time: Duration) -> Micros {
    Micros::try_from(time.as_micros()).unwrap_or(Micros::MAX)
}
