//! Requests in the store: their phases, results, and feeds of completions.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tinkex_wire::{CompletedFuture, RequestFailed, RequestId, ResultPayload, SamplerId, Seq};
use tokio::sync::Notify;

use super::{
    ChangeRecord, MERGED_SESSION, Record, RequestRecord, ResultKind, ResultRecord, SequenceScope,
    Store, UsageKey,
};
use crate::disk::{StoredResult, WriteCallback};
use crate::user::UserId;

/// An admitted request and its progress.
#[derive(Debug)]
pub struct RequestEntry {
    pub row: Arc<RequestRecord>,
    /// Owner of the session of the request.
    pub owner: UserId,
    /// How often a server process has restored the request and started to execute it.
    pub starts: u32,
    pub phase: RequestPhase,
    /// [Running time](crate::clock::Clock::running) at which a client received the outcome last.
    pub delivered: Option<Duration>,
    /// Notified whenever the phase changes.
    pub changed: Arc<Notify>,
    /// Whether the write of the request failed. Set before the entry is removed.
    pub write_failed: Arc<AtomicBool>,
}

/// An admitted request that is being written or was written. Remains usable after the store has
/// removed the request.
#[derive(Debug)]
pub struct AdmittedRequest {
    pub row: Arc<RequestRecord>,
    write_failed: Arc<AtomicBool>,
}

impl AdmittedRequest {
    /// Returns whether the request could not be written.
    #[must_use]
    pub fn write_failed(&self) -> bool {
        self.write_failed.load(Ordering::Relaxed)
    }
}

/// Progress of a request.
#[derive(Clone, Debug)]
pub enum RequestPhase {
    /// The request is being written to disk. The client may cancel the request during the write.
    Writing { cancelled: bool },
    /// The request is queued or being executed.
    Queued,
    /// The request was executed and its result is being written to disk.
    Persisting,
    /// The result is available since the [running time](crate::clock::Clock::running) `at`: in
    /// `payload`, or only in the payload file under `number` if it was evicted from memory. `size`
    /// is in bytes.
    Ready { payload: Option<ResultPayload>, proto: bool, size: usize, number: u64, at: Duration },
    /// The request failed, at the running time `at`.
    Failed { failed: RequestFailed, at: Duration },
}

impl RequestEntry {
    /// Returns the [running time](crate::clock::Clock::running) at which the outcome became
    /// available, if it has.
    pub fn finished_at(&self) -> Option<Duration> {
        match self.phase {
            RequestPhase::Ready { at, .. } | RequestPhase::Failed { at, .. } => Some(at),
            RequestPhase::Writing { .. } | RequestPhase::Queued | RequestPhase::Persisting => None,
        }
    }

    /// Returns the key of the feed that announces the result; `None` for a request that is not a
    /// sample.
    fn feed(&self) -> Option<(SamplerId, u64)> {
        match &self.row.scope {
            SequenceScope::Sampler(sampler) => {
                Some((sampler.clone(), Seq::new(self.row.seq).clone_id()))
            }
            SequenceScope::Model(_) | SequenceScope::CustomLosses(_) => None,
        }
    }
}

/// Whether the client cancelled a request while it was being written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteStatus {
    Active,
    Cancelled,
}

/// Completions that one clone of a sampling client has not acknowledged.
#[derive(Debug, Default)]
pub struct CompletionFeed {
    /// Completions with their cursor positions. The positions increase, also across restarts.
    pub completions: VecDeque<(u64, CompletedFuture)>,
    pub changed: Arc<Notify>,
}

impl Store {
    /// Adds a request and queues it for writing, in one transaction with `records`.
    pub fn add_request(
        &mut self,
        row: RequestRecord,
        mut records: Vec<Record>,
        body: Bytes,
        on_written: WriteCallback,
    ) {
        let number = row.number;
        records.push(Record::Request(Arc::new(row)));
        self.disk.append(records.clone(), Some((number, body)), on_written);
        self.apply_all(records);
    }

    /// Returns a request that the store has.
    #[must_use]
    pub fn admitted(&self, id: &RequestId) -> Option<AdmittedRequest> {
        let RequestEntry { row, write_failed, .. } = self.requests.get(id)?;
        Some(AdmittedRequest { row: Arc::clone(row), write_failed: Arc::clone(write_failed) })
    }

    /// Returns the id of the request with sequence number `seq` in a scope.
    pub fn request_at(&self, scope: &SequenceScope, seq: u64) -> Option<&RequestId> {
        self.sequences.get(scope)?.get(&seq)
    }

    /// Marks a request as durable and returns whether its client has cancelled it.
    pub fn confirm_request(&mut self, id: &RequestId) -> WriteStatus {
        let Some(entry) = self.requests.get_mut(id) else { return WriteStatus::Active };
        let cancelled = matches!(entry.phase, RequestPhase::Writing { cancelled: true });
        entry.phase = RequestPhase::Queued;
        entry.changed.notify_waiters();
        if cancelled { WriteStatus::Cancelled } else { WriteStatus::Active }
    }

    /// Removes a request whose write failed.
    pub fn revoke_request(&mut self, id: &RequestId) {
        let Some(entry) = self.requests.remove(id) else { return };
        self.count_finished(&entry);
        if let Some(sequence) = self.sequences.get_mut(&entry.row.scope) {
            sequence.remove(&entry.row.seq);
        }
        entry.write_failed.store(true, Ordering::Relaxed);
        entry.changed.notify_waiters();
    }

    /// Queues the result of an executed request for writing, in one transaction with `records`.
    /// `on_written` must [publish](Self::publish) it.
    pub fn record_result(
        &mut self,
        result: ResultRecord,
        mut records: Vec<Record>,
        payload: Bytes,
        on_written: WriteCallback,
    ) {
        if let Some(entry) = self.requests.get_mut(&result.request.id) {
            if let Some(unfinished) = self.unfinished.get_mut(&entry.owner) {
                unfinished.remove_tokens(&entry.row);
            }
            entry.phase = RequestPhase::Persisting;
        }
        let number = result.number;
        records.push(Record::Result(result));
        self.disk.append_required(records.clone(), Some((number, payload)), on_written);
        self.apply_all(records);
    }

    /// Makes a result visible to pollers.
    pub fn publish(&mut self, id: &RequestId, result: ResultKind, payload: Bytes, number: u64) {
        let stored = StoredResult { number, size: payload.len(), at: self.clock.now(), result };
        self.set_result(id, stored, Some(payload));
        self.evict_results();
    }

    /// Stores the result of a request. Without a payload, polls read it from disk.
    pub(super) fn set_result(
        &mut self,
        id: &RequestId,
        stored: StoredResult,
        payload: Option<Bytes>,
    ) {
        let StoredResult { number, size, result, at: _ } = stored;
        // The retention time starts again after a restart: clients could not poll while the server
        // was down.
        let at = self.clock.running();
        if let Some(entry) = self.requests.get(id) {
            let unfinished = self.unfinished.get_mut(&entry.owner);
            // A request whose result is stored twice counts once.
            if let Some(unfinished) = unfinished.filter(|_| entry.finished_at().is_none()) {
                unfinished.remove(entry);
            }
        }
        let Some(entry) = self.requests.get_mut(id) else { return };
        let request_id = id.clone();
        let completion = match result {
            ResultKind::Failed { error, category } => {
                let failed = RequestFailed::new(error, category.into()).code(category.code());
                entry.phase = RequestPhase::Failed { failed, at };
                CompletedFuture::Failed { request_id }
            }
            encoding => {
                let proto = encoding == ResultKind::Proto;
                let wrap = if proto { ResultPayload::Proto } else { ResultPayload::Json };
                let payload = payload.map(wrap);
                self.result_bytes += payload.as_ref().map_or(0, |_| size);
                entry.phase = RequestPhase::Ready { payload, proto, size, number, at };
                let response_payload_uncompressed_size = u64::try_from(size).ok();
                CompletedFuture::Finished { request_id, response_payload_uncompressed_size }
            }
        };
        entry.changed.notify_waiters();
        if let Some(key) = entry.feed() {
            let feed = self.feeds.entry(key).or_default();
            feed.completions.push_back((number, completion));
            feed.changed.notify_waiters();
        }
    }

    /// Evicts the oldest results from memory once their total size exceeds the limit, until it is
    /// at most half of the limit. The evicted results remain in the payload file.
    fn evict_results(&mut self) {
        if self.result_bytes <= self.result_limit {
            return;
        }
        let mut in_memory: Vec<(u64, RequestId)> = self
            .requests
            .iter()
            .filter_map(|(id, entry)| match entry.phase {
                RequestPhase::Ready { payload: Some(_), number, .. } => Some((number, id.clone())),
                _ => None,
            })
            .collect();
        in_memory.sort_unstable_by_key(|(number, _)| *number);
        for (_, id) in in_memory {
            if self.result_bytes <= self.result_limit / 2 {
                break;
            }
            if let Some(entry) = self.requests.get_mut(&id)
                && let RequestPhase::Ready { payload, size, .. } = &mut entry.phase
            {
                *payload = None;
                self.result_bytes -= *size;
            }
        }
    }

    /// Removes finished requests whose results were acknowledged or have expired.
    pub fn remove_results(&mut self, ids: Vec<RequestId>) {
        let finished: Vec<RequestId> = ids
            .into_iter()
            .filter(|id| self.requests.get(id).is_some_and(|e| e.finished_at().is_some()))
            .collect();
        if finished.is_empty() {
            return;
        }
        // Retry the write until it succeeds: otherwise the payloads would be kept until the next
        // start, because rows refer to them and no request does.
        self.put_required(Record::RequestsRemoved { ids: finished });
    }

    /// Drops requests and their completions from memory.
    pub(super) fn drop_requests(&mut self, ids: &[RequestId]) {
        let mut feeds: HashMap<(SamplerId, u64), HashSet<&RequestId>> = HashMap::new();
        for id in ids {
            if let Some(feed) = self.drop_request(id) {
                feeds.entry(feed).or_default().insert(id);
            }
        }
        // A feed may be long: scan it once for all removed requests.
        for (key, removed) in feeds {
            if let Some(feed) = self.feeds.get_mut(&key) {
                feed.completions
                    .retain(|(_, completion)| !removed.contains(completion.request_id()));
                self.drop_idle_feed(&key);
            }
        }
    }

    /// Drops one request and returns the key of the feed that may announce it.
    fn drop_request(&mut self, id: &RequestId) -> Option<(SamplerId, u64)> {
        let entry = self.requests.remove(id)?;
        self.count_finished(&entry);
        if let RequestPhase::Ready { payload: Some(_), size, .. } = &entry.phase {
            self.result_bytes -= size;
        }
        if let Some(sequence) = self.sequences.get_mut(&entry.row.scope) {
            sequence.remove(&entry.row.seq);
            if sequence.is_empty() {
                self.sequences.remove(&entry.row.scope);
            }
        }
        entry.changed.notify_waiters();
        entry.feed()
    }

    /// Drops a feed that is empty and has no listener.
    pub fn drop_idle_feed(&mut self, key: &(SamplerId, u64)) {
        let idle = |feed: &CompletionFeed| {
            feed.completions.is_empty() && Arc::strong_count(&feed.changed) == 1
        };
        if self.feeds.get(key).is_some_and(idle) {
            self.feeds.remove(key);
        }
    }

    /// Adds amounts to the hourly usage counters.
    pub(super) fn add_usage(&mut self, amounts: &[(UsageKey, u64)]) {
        for (key, count) in amounts {
            *self.usage.entry(key.clone()).or_default() += count;
        }
    }

    /// Merges the counters of hours before `before`; see [`Record::UsageMerged`].
    pub(super) fn merge_usage(&mut self, before: i64) {
        let is_old = |key: &UsageKey| key.hour < before && key.session.as_str() != MERGED_SESSION;
        let old: Vec<(UsageKey, u64)> = self
            .usage
            .iter()
            .take_while(|(key, _)| key.hour < before)
            .filter(|(key, _)| is_old(key))
            .map(|(key, count)| (key.clone(), *count))
            .collect();
        for (key, count) in old {
            self.usage.remove(&key);
            *self.usage.entry(key.merged()).or_default() += count;
        }
    }

    /// Returns whether counters of hours before `before` are not merged yet.
    pub fn has_unmerged_usage(&self, before: i64) -> bool {
        let mut old = self.usage.keys().take_while(|key| key.hour < before);
        old.any(|key| key.session.as_str() != MERGED_SESSION)
    }

    /// Applies the effects of a result on usage counters and on its run.
    pub(super) fn apply_result(&mut self, result: &ResultRecord) {
        self.add_usage(&result.usage);
        let row = &result.request;
        let SequenceScope::Model(model) = &row.scope else { return };
        let Some(run) = self.runs.get_mut(model) else { return };
        run.row.last_seq = run.row.last_seq.max(Some(row.seq));
        let session = self.sessions.get(&row.session);
        if result.model_changed && session.is_none_or(|entry| entry.row.end.is_none()) {
            let kind = result.change_kind();
            run.changes.insert(row.seq, ChangeRecord { kind, body: row.number });
        }
    }
}
