//! What the server knows: one lock, one journal.
//!
//! Every change is appended to the journal while the lock is held, so the order on disk is the
//! order in which things happened. Nothing here waits: what must wait for the disk is done by the
//! journal when it gets there.

mod checkpoint;
mod record;
mod replay;
mod request;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use bytes::Bytes;
use tinkex_engine::loss::graph::Graph;
use tinkex_wire::{LossId, ModelId, RequestId, SamplerId, SessionId, Timestamp, TinkerPath};

use crate::journal::{Journal, Then};

pub(crate) use self::record::*;
pub(crate) use self::replay::Undone;
pub(crate) use self::request::{Entry, Feed, Phase};

/// Everything the server knows.
pub(crate) struct Store {
    pub(crate) journal: Journal,
    pub(crate) sessions: HashMap<SessionId, Kept<Session>>,
    pub(crate) runs: HashMap<ModelId, Kept<Run>>,
    pub(crate) samplers: HashMap<SamplerId, Kept<Sampler>>,
    pub(crate) checkpoints: BTreeMap<TinkerPath, Kept<Checkpoint>>,
    pub(crate) requests: HashMap<RequestId, Entry>,
    /// Which request has which number in its line.
    pub(crate) lines: HashMap<Line, BTreeMap<u64, RequestId>>,
    /// What a session's uploaded losses compute.
    pub(crate) losses: HashMap<LossId, Arc<Graph>>,
    /// Answers of each client of a sampling session.
    pub(crate) feeds: HashMap<(SamplerId, u64), Feed>,
    pub(crate) usage: BTreeMap<Use, u64>,
    totals_number: u64,
    /// Folders that are being written.
    pub(crate) making: HashSet<String>,
    /// Bytes of answers in memory.
    pub(crate) answer_bytes: usize,
    /// Bytes of answers that may stay there.
    pub(crate) answer_limit: usize,
}

/// A fact, its record's number, and what need not survive.
#[derive(Debug)]
pub(crate) struct Kept<T> {
    pub(crate) row: T,
    pub(crate) number: u64,
    /// When it was last used.
    pub(crate) seen: Micros,
    /// For a run: the requests since its snapshot that changed it.
    pub(crate) since: BTreeMap<u64, Change>,
}

/// A request that changed a model: what it was, its record and its answer's.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Change {
    pub(crate) kind: Kind,
    pub(crate) request: u64,
    pub(crate) done: u64,
}

impl<T> Kept<T> {
    fn new(row: T, number: u64) -> Self {
        Self { row, number, seen: now(), since: BTreeMap::new() }
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

/// Nothing to do when a record is on disk.
fn nothing() -> Then {
    Box::new(|_| {})
}

impl Store {
    /// Appends a fact and remembers it.
    pub(crate) fn put(&mut self, record: Record, then: Then) -> u64 {
        let number = self.append(&record, Bytes::new(), then);
        self.apply(record, number, 0);
        number
    }

    /// The same where nobody waits.
    pub(crate) fn note(&mut self, record: Record) {
        self.put(record, nothing());
    }

    fn append(&mut self, record: &Record, body: Bytes, then: Then) -> u64 {
        match serde_json::to_vec(record) {
            Ok(head) => self.journal.append(head, body, then),
            Err(why) => {
                // Our own types: texts and numbers are always JSON.
                then(Err(std::io::Error::other(why)));
                0
            }
        }
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

    /// Folders that something refers to.
    pub(crate) fn folders(&self) -> HashSet<String> {
        let checkpoints = self.checkpoints.values().map(|kept| kept.row.folder.clone());
        let samplers = self.samplers.values().filter_map(|kept| kept.row.folder.clone());
        let snapshots =
            self.runs.values().filter_map(|kept| Some(kept.row.snapshot.as_ref()?.folder.clone()));
        checkpoints.chain(samplers).chain(snapshots).chain(self.making.iter().cloned()).collect()
    }

    /// Records that are still needed.
    pub(crate) fn live(&self) -> HashSet<u64> {
        let mut live: HashSet<u64> = HashSet::new();
        live.extend(self.sessions.values().map(|kept| kept.number));
        live.extend(self.samplers.values().map(|kept| kept.number));
        live.extend(self.checkpoints.values().map(|kept| kept.number));
        for run in self.runs.values() {
            live.insert(run.number);
            live.extend(run.since.values().flat_map(|change| [change.request, change.done]));
        }
        for entry in self.requests.values() {
            live.insert(entry.number);
            live.extend(entry.done_number());
        }
        live.insert(self.totals_number);
        live
    }

    /// Rewrites the journal if more than half of it is of no use any more.
    pub(crate) fn compact(&mut self, at_least: u64) {
        let length = self.journal.len();
        if length < at_least || self.journal.len_of(&self.live()) > length / 2 {
            return;
        }
        // Runs stay where they are: what was done to them must come after them.
        let used = self.usage.iter().map(|(key, n)| (key.clone(), *n)).collect();
        let last = |kept: &Kept<Run>| Some((kept.row.id.clone(), kept.row.last_seq?));
        let last_seq = self.runs.values().filter_map(last).collect();
        self.note(Record::Totals { used, last_seq });
        let live = self.live();
        self.journal.keep(
            live,
            Box::new(|result| {
                if let Err(why) = result {
                    crate::log::warn(format_args!("the journal could not be tidied: {why}"));
                }
            }),
        );
    }

    /// Ends a session: what only it could use goes.
    pub(crate) fn end_session(&mut self, id: &SessionId, end: End, then: Then) {
        let Some(kept) = self.sessions.get(id) else { return then(Ok(())) };
        if kept.row.end.is_some() {
            return then(Ok(()));
        }
        let row = Session { end: Some(end), ..kept.row.clone() };
        self.put(Record::Session(row), then);
    }

    /// The models of a session.
    pub(crate) fn runs_of<'a>(&'a self, id: &'a SessionId) -> impl Iterator<Item = &'a Run> {
        self.runs.values().map(|kept| &kept.row).filter(move |run| run.session == *id)
    }
}

#[cfg(test)]
mod tests;
