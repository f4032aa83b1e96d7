//! Tidying: what expired goes, and folders that nothing refers to.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use tinkex_wire::{ModelId, RequestId, SessionId, TinkerPath};
use tokio::sync::OwnedMutexGuard;

use crate::settle::{Settled, settle};
use crate::state::Shared;
use crate::store::{End, Fact, Fault, Kind, Micros, Session, Store, now};

/// A moment by two clocks: one goes on while the machine sleeps, or is set; the other does not.
#[derive(Clone, Copy)]
pub(crate) struct Moment {
    wall: Micros,
    running: std::time::Instant,
}

/// Less is two clocks that do not agree about a second.
const GAP: Micros = 60_000_000;

impl Moment {
    pub(crate) fn now() -> Self {
        Self { wall: now(), running: std::time::Instant::now() }
    }

    /// How much longer it was by the wall clock, if that is worth speaking of.
    pub(crate) fn gap_since(self, before: Self) -> Option<Micros> {
        let ran = micros(self.running.duration_since(before.running));
        let gap = self.wall.saturating_sub(before.wall).saturating_sub(ran);
        (gap > GAP).then_some(gap)
    }
}

/// Tidies once.
pub(crate) fn sweep(shared: &Arc<Shared>) {
    let now = now();
    expire_sessions(shared);
    let mut store = shared.store();
    let old = now.saturating_sub(micros(shared.options.timeouts.result_retention));
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
        store.note(Fact::Gone { path });
    }
    let life = shared.options.timeouts.ended_session_retention;
    let left = if life.is_zero() { vec![] } else { store.left(now.saturating_sub(micros(life))) };
    if !left.is_empty() {
        store.note(Fact::Left { ids: left });
    }
    store.tidy(shared.options.limits.payload_bytes);
    drop(store);
    let time = std::time::Instant::now();
    shared.downloads().retain(|_, download| download.until > time);
    remove_folders(shared);
}

/// Tells the worker of sessions that say nothing: it knows what they have not saved.
fn expire_sessions(shared: &Arc<Shared>) {
    let Some(old) = oldest(shared) else { return };
    let silent: Vec<SessionId> = {
        let store = shared.store();
        let open = store.sessions.values().filter(|kept| kept.row.end.is_none());
        open.filter(|kept| kept.seen <= old).map(|kept| kept.row.id.clone()).collect()
    };
    if !silent.is_empty() {
        shared.queue.silent(silent);
    }
}

/// Whether nothing was heard of a session for too long.
pub(crate) fn is_silent(shared: &Shared, id: &SessionId) -> bool {
    let Some(old) = oldest(shared) else { return false };
    shared.store().open_session(id).is_some_and(|kept| kept.seen <= old)
}

/// Before which moment a session must have been heard of to be over.
fn oldest(shared: &Shared) -> Option<Micros> {
    let life = shared.options.timeouts.session_expiry;
    (!life.is_zero()).then(|| now().saturating_sub(micros(life)))
}

/// Ends sessions, once that is on disk: what waits in line fails, their models leave memory.
pub(crate) fn end_sessions(
    shared: &Arc<Shared>,
    turn: OwnedMutexGuard<()>,
    sessions: Vec<(SessionId, End)>,
    then: crate::disk::Then,
) {
    let mut store = shared.store();
    let mut facts = Vec::new();
    for (id, end) in sessions {
        if let Some(kept) = store.open_session(&id) {
            let (end, ended_at) = (Some(end), Some(now()));
            facts.push(Fact::Session(Session { end, ended_at, ..kept.row.clone() }));
        }
    }
    if facts.is_empty() {
        drop(store);
        return then(Ok(()));
    }
    let own = Arc::clone(shared);
    store.propose(facts, move |facts| {
        Box::new(move |written| {
            if written.is_ok() {
                let mut store = own.store();
                for fact in &facts {
                    let Fact::Session(Session { id, end: Some(end), .. }) = fact else {
                        continue;
                    };
                    fail_waiting(&own, &mut store, id, end);
                }
                store.apply_all(facts);
            }
            drop(turn);
            then(written);
        })
    });
}

fn fail_waiting(shared: &Arc<Shared>, store: &mut Store, id: &SessionId, end: &End) {
    let why = match end {
        End::Finished(_) => "the session was finished by its client",
        End::Expired => "session expired: nothing was heard of its client",
    };
    let models: Vec<ModelId> = store.runs_of(id).map(|run| run.id.clone()).collect();
    for model in models {
        for waiting in shared.queue.drop_model(&model) {
            settle(shared, store, &waiting, Settled::failed(Fault::User, why));
        }
    }
}

/// Removes folders that nothing refers to: old snapshots, deleted checkpoints, half-written ones.
fn remove_folders(shared: &Shared) {
    let Ok(entries) = std::fs::read_dir(&shared.folders) else { return };
    let names: Vec<String> =
        entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    let (sent, settled) = std::sync::mpsc::channel();
    // Asked after listing: a folder that was begun since is not in the list.
    let mut used: HashSet<String> = {
        let mut store = shared.store();
        if store.has_loads() {
            return;
        }
        store.disk.settled(Box::new(move |settled| drop(sent.send(settled))));
        store.folders()
    };
    // What the disk does not know yet, a crash would undo: then the old folders are needed.
    if !matches!(settled.recv(), Ok(Ok(()))) {
        return;
    }
    // A deletion that the disk refused meanwhile was taken back.
    used.extend(shared.store().folders());
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_is_what_only_the_wall_clock_saw() {
        let before = Moment::now();
        let after = |wall: Micros, ran: u64| Moment {
            wall: before.wall + wall,
            running: before.running + Duration::from_secs(ran),
        };
        assert_eq!(after(3_600_000_000, 30).gap_since(before), Some(3_570_000_000));
        // It ran all the time; or the clock was set back.
        assert_eq!(after(3_600_000_000, 3_600).gap_since(before), None);
        assert_eq!(after(-3_600_000_000, 30).gap_since(before), None);
    }
}
