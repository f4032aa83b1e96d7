//! What the server knows: one lock, one disk.
//!
//! Every change is handed to the disk while the lock is held, so the order there is the order in
//! which things happened. Nothing here waits: what must wait for the disk is done by the disk's
//! thread when it gets there.

mod checkpoint;
mod replay;
mod request;
mod undo;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use tinkex_autodiff::LossProgram;
use tinkex_wire::{LossId, ModelId, RequestId, SamplerId, SessionId, Timestamp, TinkerPath};

use crate::disk::{Disk, Reader, Then};
pub(crate) use crate::fact::*;

pub(crate) use self::replay::Undone;
pub(crate) use self::request::{Entry, Feed, Phase, Written};

/// Everything the server knows.
pub(crate) struct Store {
    pub(crate) disk: Disk,
    pub(crate) sessions: HashMap<SessionId, Kept<Session>>,
    pub(crate) runs: HashMap<ModelId, Kept<Run>>,
    pub(crate) samplers: HashMap<SamplerId, Kept<Sampler>>,
    pub(crate) checkpoints: BTreeMap<TinkerPath, Kept<Checkpoint>>,
    pub(crate) requests: HashMap<RequestId, Entry>,
    /// Which request has which number in its line.
    pub(crate) lines: HashMap<Line, BTreeMap<u64, RequestId>>,
    /// What a session's uploaded losses compute.
    pub(crate) losses: HashMap<LossId, Arc<LossProgram>>,
    /// Answers of each client of a sampling session.
    pub(crate) feeds: HashMap<(SamplerId, u64), Feed>,
    pub(crate) usage: BTreeMap<Use, u64>,
    /// Folders that are being written.
    pub(crate) making: HashSet<String>,
    /// Bytes of answers in memory.
    pub(crate) answer_bytes: usize,
    /// Bytes of answers that may stay there.
    pub(crate) answer_limit: usize,
}

/// A fact, and what is known beside it.
#[derive(Clone, Debug)]
pub(crate) struct Kept<T> {
    pub(crate) row: T,
    /// When it was last used.
    pub(crate) seen: Micros,
    /// For a run: the requests since its snapshot that changed it.
    pub(crate) since: BTreeMap<u64, Change>,
}

impl<T> Kept<T> {
    fn new(row: T) -> Self {
        Self { row, seen: now(), since: BTreeMap::new() }
    }
}

/// The current moment.
pub(crate) fn now() -> Micros {
    Timestamp::now().unix_micros()
}

/// A moment as the API writes it.
pub(crate) fn timestamp(at: Micros) -> Timestamp {
    Timestamp::from_unix_micros(at).unwrap_or_else(|_| Timestamp::now())
}

/// Nothing to do when a fact is on disk.
fn nothing() -> Then {
    Box::new(|_| {})
}

impl Store {
    /// Makes facts true, and has them written, all or none. If they cannot be written `then` has to
    /// undo that: see [`before`](Self::before).
    pub(crate) fn put(&mut self, facts: Vec<Fact>, then: Then) {
        self.disk.append(facts.clone(), None, then);
        self.apply_all(facts);
    }

    /// The same where nobody waits and nothing is lost if it is not written.
    pub(crate) fn note(&mut self, fact: Fact) {
        self.put(vec![fact], nothing());
    }

    /// Makes something true that has happened already, so it is written however long that takes.
    pub(crate) fn owe(&mut self, fact: Fact) {
        self.disk.owe(vec![fact.clone()], None, nothing());
        self.apply(fact);
    }

    /// Has facts written that become true only once they are on disk: `then` is made with them.
    pub(crate) fn propose(&mut self, facts: Vec<Fact>, then: impl FnOnce(Vec<Fact>) -> Then) {
        self.disk.append(facts.clone(), None, then(facts));
    }

    pub(crate) fn apply_all(&mut self, facts: Vec<Fact>) {
        facts.into_iter().for_each(|fact| self.apply(fact));
    }

    /// Reads payloads back.
    pub(crate) fn reader(&self) -> Reader {
        self.disk.reader()
    }

    /// The session, if it is still open.
    pub(crate) fn open_session(&mut self, id: &SessionId) -> Option<&mut Kept<Session>> {
        self.sessions.get_mut(id).filter(|session| session.row.end.is_none())
    }

    /// Something was heard of a session.
    pub(crate) fn touch(&mut self, id: &SessionId) {
        if let Some(session) = self.sessions.get_mut(id) {
            session.seen = now();
        }
    }

    /// The clock went on by so much while nothing else did: nobody was silent meanwhile.
    pub(crate) fn slept(&mut self, gap: Micros) {
        for session in self.sessions.values_mut() {
            session.seen = session.seen.saturating_add(gap);
        }
        for entry in self.requests.values_mut() {
            if let Phase::Ready { at, .. } | Phase::Failed { at, .. } = &mut entry.phase {
                *at = at.saturating_add(gap);
            }
        }
    }

    /// Sessions that were over at `moment`, and that nothing refers to.
    pub(crate) fn left(&self, moment: Micros) -> Vec<SessionId> {
        let mut used: HashSet<&SessionId> = HashSet::new();
        used.extend(self.runs.values().map(|kept| &kept.row.session));
        used.extend(self.requests.values().map(|entry| &entry.row.session));
        let sessions = self.sessions.values().map(|kept| &kept.row);
        let over = sessions.filter(|row| row.ended_at.is_some_and(|at| at <= moment));
        over.map(|row| &row.id).filter(|id| !used.contains(id)).cloned().collect()
    }

    /// Whether weights will be loaded. Such a request has a folder's name, whatever becomes of the
    /// checkpoint meanwhile: until it is carried out no folder may go.
    pub(crate) fn has_loads(&self) -> bool {
        let loads = |entry: &Entry| matches!(entry.row.kind, Kind::LoadWeights | Kind::CreateModel);
        self.requests.values().any(|entry| entry.answered_at().is_none() && loads(entry))
    }

    /// Folders that something refers to.
    pub(crate) fn folders(&self) -> HashSet<String> {
        let checkpoints = self.checkpoints.values().map(|kept| kept.row.folder.clone());
        let samplers = self.samplers.values().filter_map(|kept| kept.row.folder.clone());
        let snapshots =
            self.runs.values().filter_map(|kept| Some(kept.row.snapshot.as_ref()?.folder.clone()));
        checkpoints.chain(samplers).chain(snapshots).chain(self.making.iter().cloned()).collect()
    }

    /// Drops payloads that nothing needs any more, once there are `at_least` so many bytes of them.
    pub(crate) fn tidy(&mut self, at_least: u64) {
        self.disk.tidy(
            at_least,
            Box::new(|tidied| {
                if let Err(why) = tidied {
                    crate::log::warn(format_args!("the payloads could not be tidied: {why}"));
                }
            }),
        );
    }

    /// The models of a session.
    pub(crate) fn runs_of<'a>(&'a self, id: &'a SessionId) -> impl Iterator<Item = &'a Run> {
        self.runs.values().map(|kept| &kept.row).filter(move |run| run.session == *id)
    }
}

#[cfg(test)]
mod tests;
