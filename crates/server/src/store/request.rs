//! Requests and their answers.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use bytes::Bytes;
use tinkex_wire::{CompletedFuture, RequestFailed, RequestId, ResultPayload, SamplerId, Seq};
use tokio::sync::Notify;

use super::{Answer, Change, Done, Fact, Line, Micros, Request, Store, now};
use crate::disk::{Answered, Then};

/// A request that was taken in.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) row: Arc<Request>,
    pub(crate) phase: Phase,
    /// Told whenever the phase changes.
    pub(crate) changed: Arc<Notify>,
}

/// How far a request is.
#[derive(Clone, Debug)]
pub(crate) enum Phase {
    /// On its way to the disk. Its client may have changed its mind meanwhile.
    Writing { cancelled: bool },
    /// In line, or being carried out.
    Waiting,
    /// Carried out; the answer is on its way to the disk.
    Settling,
    /// Answered. A payload that memory had no room for is on disk.
    Ready { payload: Option<ResultPayload>, proto: bool, size: usize, number: u64, at: Micros },
    /// Failed for good.
    Failed { failed: RequestFailed, at: Micros },
}

impl Entry {
    /// When it was answered.
    pub(crate) fn answered_at(&self) -> Option<Micros> {
        match self.phase {
            Phase::Ready { at, .. } | Phase::Failed { at, .. } => Some(at),
            Phase::Writing { .. } | Phase::Waiting | Phase::Settling => None,
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

/// Whether a request is still wanted when it is on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Written {
    Wanted,
    Cancelled,
}

/// The answers that one client of a sampling session has not been told of.
#[derive(Debug, Default)]
pub(crate) struct Feed {
    /// Each with its place, which grows, also across restarts.
    pub(crate) completions: VecDeque<(u64, CompletedFuture)>,
    pub(crate) changed: Arc<Notify>,
}

impl Store {
    /// Takes a request in, together with facts that come with it. `then` runs when it is on disk or
    /// known not to be.
    pub(crate) fn open_request(
        &mut self,
        row: Request,
        mut facts: Vec<Fact>,
        body: Bytes,
        then: Then,
    ) {
        let number = row.number;
        facts.push(Fact::Request(Arc::new(row)));
        self.disk.append(facts.clone(), Some((number, body)), then);
        self.apply_all(facts);
    }

    /// A request is on disk.
    pub(crate) fn request_written(&mut self, id: &RequestId) -> Written {
        let Some(entry) = self.requests.get_mut(id) else { return Written::Wanted };
        let cancelled = matches!(entry.phase, Phase::Writing { cancelled: true });
        entry.phase = Phase::Waiting;
        entry.changed.notify_waiters();
        if cancelled { Written::Cancelled } else { Written::Wanted }
    }

    /// A request could not be written: as if it had never come.
    pub(crate) fn request_lost(&mut self, id: &RequestId) {
        let Some(entry) = self.requests.remove(id) else { return };
        if let Some(line) = self.lines.get_mut(&entry.row.line) {
            line.remove(&entry.row.seq);
        }
        entry.changed.notify_waiters();
    }

    /// A request was carried out, and `facts` became true by it. Its answer is shown once it is on
    /// disk, by `then`.
    pub(crate) fn settle(&mut self, done: Done, mut facts: Vec<Fact>, body: Bytes, then: Then) {
        if let Some(entry) = self.requests.get_mut(&done.request.id) {
            entry.phase = Phase::Settling;
        }
        let number = done.number;
        facts.push(Fact::Done(done));
        self.disk.owe(facts.clone(), Some((number, body)), then);
        self.apply_all(facts);
    }

    /// Shows an answer to those who wait for it.
    pub(crate) fn show(&mut self, id: &RequestId, answer: Answer, body: Bytes, number: u64) {
        let answered = Answered { number, size: body.len(), at: now(), answer };
        self.answered(id, answered, Some(body));
        self.spill();
    }

    /// A request was answered. Without its body the answer is read from disk.
    pub(super) fn answered(&mut self, id: &RequestId, answered: Answered, body: Option<Bytes>) {
        let Answered { number, size, at, answer } = answered;
        let Some(entry) = self.requests.get_mut(id) else { return };
        let request_id = id.clone();
        let completion = match answer {
            Answer::Failed { error, category } => {
                let failed = RequestFailed { error, category: category.into() };
                entry.phase = Phase::Failed { failed, at };
                CompletedFuture::Failed { request_id }
            }
            form => {
                let proto = form == Answer::Proto;
                let pack = if proto { ResultPayload::Proto } else { ResultPayload::Json };
                let payload = body.map(pack);
                self.answer_bytes += payload.as_ref().map_or(0, |_| size);
                entry.phase = Phase::Ready { payload, proto, size, number, at };
                let response_payload_uncompressed_size = u64::try_from(size).ok();
                CompletedFuture::Finished { request_id, response_payload_uncompressed_size }
            }
        };
        entry.changed.notify_waiters();
        if let Some(feed) = entry.feed() {
            self.announce(feed, number, completion);
        }
    }

    fn announce(&mut self, feed: (SamplerId, u64), place: u64, completion: CompletedFuture) {
        let feed = self.feeds.entry(feed).or_default();
        feed.completions.push_back((place, completion));
        feed.changed.notify_waiters();
    }

    /// Answers beyond the limit leave memory; the disk has them.
    fn spill(&mut self) {
        if self.answer_bytes <= self.answer_limit {
            return;
        }
        let mut held: Vec<(u64, RequestId)> = self
            .requests
            .iter()
            .filter_map(|(id, entry)| match entry.phase {
                Phase::Ready { payload: Some(_), number, .. } => Some((number, id.clone())),
                _ => None,
            })
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
        // If this is not written they come back with the next start, and go again.
        self.note(Fact::Forget { ids: known });
    }

    pub(super) fn drop_requests(&mut self, ids: &[RequestId]) {
        let mut told: HashMap<(SamplerId, u64), HashSet<&RequestId>> = HashMap::new();
        for id in ids {
            if let Some(feed) = self.drop_request(id) {
                told.entry(feed).or_default().insert(id);
            }
        }
        // A feed may be long: it is gone through once for all of them.
        for (key, gone) in told {
            if let Some(feed) = self.feeds.get_mut(&key) {
                let stays = |completion: &CompletedFuture| !gone.contains(completion.request_id());
                feed.completions.retain(|(_, completion)| stays(completion));
                self.drop_feed(&key);
            }
        }
    }

    /// Drops one; returns the feed that may tell of it.
    fn drop_request(&mut self, id: &RequestId) -> Option<(SamplerId, u64)> {
        let entry = self.requests.remove(id)?;
        if let Phase::Ready { payload: Some(_), size, .. } = &entry.phase {
            self.answer_bytes -= size;
        }
        if let Some(line) = self.lines.get_mut(&entry.row.line) {
            line.remove(&entry.row.seq);
            if line.is_empty() {
                self.lines.remove(&entry.row.line);
            }
        }
        entry.changed.notify_waiters();
        entry.feed()
    }

    /// Drops a feed that has nothing to tell and that nobody listens to.
    pub(crate) fn drop_feed(&mut self, key: &(SamplerId, u64)) {
        let idle =
            |feed: &Feed| feed.completions.is_empty() && Arc::strong_count(&feed.changed) == 1;
        if self.feeds.get(key).is_some_and(idle) {
            self.feeds.remove(key);
        }
    }

    pub(super) fn account(&mut self, done: &Done) {
        for (key, count) in &done.used {
            *self.usage.entry(key.clone()).or_default() += count;
        }
        let row = &done.request;
        let Line::Model(model) = &row.line else { return };
        let Some(run) = self.runs.get_mut(model) else { return };
        run.row.last_seq = run.row.last_seq.max(Some(row.seq));
        let session = self.sessions.get(&row.session);
        if done.changed && session.is_none_or(|kept| kept.row.end.is_none()) {
            run.since.insert(row.seq, Change { kind: row.kind, body: row.number });
        }
    }
}
