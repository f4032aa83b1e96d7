//! What the server knows: one lock, one journal.
//!
//! Every change is appended to the journal while the lock is held, so the order on disk is the
//! order in which things happened. Nothing here waits: what must wait for the disk is done by the
//! journal when it gets there.

mod checkpoint;
mod record;
mod replay;
mod request;
mod undo;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use bytes::Bytes;
use tinkex_engine::loss::graph::Graph;
use tinkex_wire::{LossId, ModelId, RequestId, SamplerId, SessionId, Timestamp, TinkerPath};

use crate::journal::{Journal, Then};

pub(crate) use self::record::*;
pub(crate) use self::replay::Undone;
pub(crate) use self::request::{Entry, Feed, Phase, Written};

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
#[derive(Clone, Debug)]
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

/// Facts of which all or none are written; the last one may have a body.
type Facts = Vec<(Vec<u8>, Bytes)>;

/// Facts as they are written.
fn written(records: &[Record], mut body: Bytes) -> Facts {
    let last = records.len().saturating_sub(1);
    let write = |(i, record)| {
        let head = serde_json::to_vec(record).expect("our own texts and numbers are always JSON");
        (head, if i == last { std::mem::take(&mut body) } else { Bytes::new() })
    };
    records.iter().enumerate().map(write).collect()
}

impl Store {
    /// Appends facts and makes them true. If they cannot be written `then` has to undo that: see
    /// [`before`](Self::before).
    pub(crate) fn put(&mut self, records: Vec<Record>, then: Then) {
        let first = self.journal.append(written(&records, Bytes::new()), then);
        self.apply_all(records, first);
    }

    /// The same where nobody waits and nothing is lost if it is not written.
    pub(crate) fn note(&mut self, record: Record) {
        self.put(vec![record], nothing());
    }

    /// Makes something true that has happened already, so it is written however long that takes.
    pub(crate) fn owe(&mut self, record: Record) {
        let records = vec![record];
        let first = self.journal.owe(written(&records, Bytes::new()), nothing());
        self.apply_all(records, first);
    }

    /// Appends facts that become true only once they are on disk: `then` is made with them and the
    /// number of the first.
    pub(crate) fn propose(
        &mut self,
        records: Vec<Record>,
        then: impl FnOnce(Vec<Record>, u64) -> Then,
    ) {
        let facts = written(&records, Bytes::new());
        let first = self.journal.next_number();
        self.journal.append(facts, then(records, first));
    }

    pub(crate) fn apply_all(&mut self, records: Vec<Record>, first: u64) {
        for (number, record) in (first..).zip(records) {
            self.apply(record, number, 0);
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
        live.extend((self.totals_number > 0).then_some(self.totals_number));
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

    /// The models of a session.
    pub(crate) fn runs_of<'a>(&'a self, id: &'a SessionId) -> impl Iterator<Item = &'a Run> {
        self.runs.values().map(|kept| &kept.row).filter(move |run| run.session == *id)
    }
}

#[cfg(test)]
mod tests;
