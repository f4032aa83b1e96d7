//! Requests and their answers.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use tinkex_wire::{Completion, Payload, RequestFailed, RequestId, SamplerId, Seq};
use tokio::sync::Notify;

use super::record::{Answer, Done, Line, Micros, Record, Request};
use super::{Change, Store, nothing, now};
use crate::journal::Then;

/// A request that was taken in.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) row: Arc<Request>,
    /// The number of its record.
    pub(crate) number: u64,
    pub(crate) phase: Phase,
    /// Told whenever the phase changes.
    pub(crate) changed: Arc<Notify>,
}

/// How far a request is.
#[derive(Clone, Debug)]
pub(crate) enum Phase {
    /// On its way to the disk.
    Writing,
    /// In line, or being carried out.
    Waiting,
    /// Carried out; the answer is on its way to the disk.
    Settling,
    /// Answered. A payload that memory had no room for is in the journal.
    Ready { payload: Option<Payload>, proto: bool, size: usize, number: u64, at: Micros },
    /// Failed for good.
    Failed { failed: RequestFailed, number: u64, at: Micros },
}

impl Entry {
    pub(super) fn done_number(&self) -> Option<u64> {
        match self.phase {
            Phase::Ready { number, .. } | Phase::Failed { number, .. } => Some(number),
            Phase::Writing | Phase::Waiting | Phase::Settling => None,
        }
    }

    /// When it was answered.
    pub(crate) fn answered_at(&self) -> Option<Micros> {
        match self.phase {
            Phase::Ready { at, .. } | Phase::Failed { at, .. } => Some(at),
            Phase::Writing | Phase::Waiting | Phase::Settling => None,
        }
    }

    /// Which feed it reports to.
    fn feed(&self) -> Option<(SamplerId, u64)> {
        match &self.row.line {
            Line::Sampler(sampler) => Some((sampler.clone(), Seq::new(self.row.seq).clone_id())),
            Line::Model(_) | Line::Losses(_) => None,
        }
    }
}

/// The answers that one client of a sampling session has not been told of.
#[derive(Debug, Default)]
pub(crate) struct Feed {
    /// Each with its place, which grows, also across restarts.
    pub(crate) completions: VecDeque<(u64, Completion)>,
    pub(crate) changed: Arc<Notify>,
}

impl Store {
    /// Takes a request in. `then` runs when it is on disk or known not to be.
    pub(crate) fn open_request(&mut self, row: Request, body: Bytes, then: Then) {
        let record = Record::Request(row);
        let number = self.append(&record, body, then);
        self.apply(record, number, 0);
    }

    /// A request is on disk.
    pub(crate) fn request_written(&mut self, id: &RequestId) {
        if let Some(entry) = self.requests.get_mut(id) {
            entry.phase = Phase::Waiting;
            entry.changed.notify_waiters();
        }
    }

    /// A request could not be written: as if it had never come.
    pub(crate) fn request_lost(&mut self, id: &RequestId) {
        let Some(entry) = self.requests.remove(id) else { return };
        if let Some(line) = self.lines.get_mut(&entry.row.line) {
            line.remove(&entry.row.seq);
        }
        entry.changed.notify_waiters();
    }

    /// A request was carried out. Its answer is shown once it is on disk.
    ///
    /// `then` gets the store back when that is so.
    pub(crate) fn settle(&mut self, done: Done, body: Bytes, then: impl FnOnce(u64) -> Then) {
        if let Some(entry) = self.requests.get_mut(&done.id) {
            entry.phase = Phase::Settling;
        }
        let next = self.journal_next();
        let record = Record::Done(done);
        let number = self.append(&record, body, then(next));
        debug_assert_eq!(number, next, "only who holds the lock appends");
        if let Record::Done(done) = record {
            self.account(&done, number);
        }
    }

    fn journal_next(&self) -> u64 {
        self.journal.next_number()
    }

    /// Shows an answer to those who wait for it.
    pub(crate) fn show(&mut self, id: &RequestId, answer: Answer, body: Bytes, number: u64) {
        let at = now();
        let Some(entry) = self.requests.get_mut(id) else { return };
        let size = body.len();
        let completion = match answer {
            Answer::Failed { error, category } => {
                let failed = RequestFailed { error, category: category.into() };
                entry.phase = Phase::Failed { failed, number, at };
                Completion::Failed { request_id: id.clone() }
            }
            form => {
                let proto = form == Answer::Proto;
                let payload = if proto { Payload::Proto(body) } else { Payload::Json(body) };
                self.answer_bytes += size;
                entry.phase = Phase::Ready { payload: Some(payload), proto, size, number, at };
                let response_payload_uncompressed_size = u64::try_from(size).ok();
                Completion::Finished { request_id: id.clone(), response_payload_uncompressed_size }
            }
        };
        entry.changed.notify_waiters();
        if let Some(feed) = entry.feed() {
            self.announce(feed, number, completion);
        }
        self.spill();
    }

    pub(super) fn announce(&mut self, feed: (SamplerId, u64), place: u64, completion: Completion) {
        let feed = self.feeds.entry(feed).or_default();
        feed.completions.push_back((place, completion));
        feed.changed.notify_waiters();
    }

    /// Answers beyond the limit leave memory; the journal has them.
    fn spill(&mut self) {
        if self.answer_bytes <= self.answer_limit {
            return;
        }
        let mut held: Vec<(u64, RequestId)> = self
            .requests
            .iter()
            .filter(|(_, entry)| matches!(&entry.phase, Phase::Ready { payload: Some(_), .. }))
            .filter_map(|(id, entry)| Some((entry.done_number()?, id.clone())))
            .collect();
        held.sort_unstable_by_key(|(number, _)| *number);
        for (_, id) in held {
            if self.answer_bytes <= self.answer_limit / 2 {
                break;
            }
            if let Some(entry) = self.requests.get_mut(&id)
                && let Phase::Ready { payload, size, .. } = &mut entry.phase
            {
                *payload = None;
                self.answer_bytes -= *size;
            }
        }
    }

    /// Forgets answers: they were fetched, or nobody came for them.
    pub(crate) fn forget(&mut self, ids: Vec<RequestId>) {
        let known: Vec<RequestId> = ids
            .into_iter()
            .filter(|id| self.requests.get(id).is_some_and(|e| e.answered_at().is_some()))
            .collect();
        if known.is_empty() {
            return;
        }
        let record = Record::Forget { ids: known };
        let number = self.append(&record, Bytes::new(), nothing());
        self.apply(record, number, 0);
    }

    pub(super) fn drop_request(&mut self, id: &RequestId) {
        let Some(entry) = self.requests.remove(id) else { return };
        if let Phase::Ready { payload: Some(_), size, .. } = &entry.phase {
            self.answer_bytes -= size;
        }
        if let Some(line) = self.lines.get_mut(&entry.row.line) {
            line.remove(&entry.row.seq);
            if line.is_empty() {
                self.lines.remove(&entry.row.line);
            }
        }
        if let Some(feed) = entry.feed().and_then(|key| self.feeds.get_mut(&key)) {
            feed.completions.retain(|(_, completion)| completion.request_id() != id);
        }
        entry.changed.notify_waiters();
    }

    fn account(&mut self, done: &Done, number: u64) {
        for (key, count) in &done.used {
            *self.usage.entry(key.clone()).or_default() += count;
        }
        let Some(entry) = self.requests.get(&done.id) else { return };
        let Line::Model(model) = &entry.row.line else { return };
        let Some(run) = self.runs.get_mut(model) else { return };
        let seq = entry.row.seq;
        run.row.last_seq = run.row.last_seq.max(Some(seq));
        if done.changed {
            let (kind, request) = (entry.row.kind, entry.number);
            run.since.insert(seq, Change { kind, request, done: number });
        }
    }

    pub(super) fn apply_done(&mut self, done: &Done, number: u64, size: usize) {
        self.account(done, number);
        let Some(entry) = self.requests.get_mut(&done.id) else { return };
        let at = done.at;
        let request_id = done.id.clone();
        let completion = match &done.answer {
            Answer::Failed { error, category } => {
                let failed = RequestFailed { error: error.clone(), category: (*category).into() };
                entry.phase = Phase::Failed { failed, number, at };
                Completion::Failed { request_id }
            }
            form => {
                let proto = *form == Answer::Proto;
                entry.phase = Phase::Ready { payload: None, proto, size, number, at };
                let response_payload_uncompressed_size = u64::try_from(size).ok();
                Completion::Finished { request_id, response_payload_uncompressed_size }
            }
        };
        if let Some(feed) = entry.feed() {
            self.announce(feed, number, completion);
        }
    }
}
