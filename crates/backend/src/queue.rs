//! Queue of admitted requests that wait for a backend: the worker thread of the engine, or the
//! tasks of an upstream.
//!
//! Requests of a model are dispatched by sequence number, regardless of the order in which they
//! arrive. A request that arrives early is held until the missing numbers arrive or the gap timeout
//! passes: a client may assign a number and never send its request. The next model is a model of the
//! user and session that have received least; models of one session are served round-robin. Samples
//! and generations have no order: the engine shares its sampler fairly.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tinkex_fairness::{FairShares, FairnessKey, ShareId};
use tinkex_store::clock::Clock;
use tinkex_store::user::Account;
use tinkex_wire::{ModelId, RequestId, SessionId};
use tokio::sync::Notify;
use tokio::time::Instant;

/// A model's request that waits for its backend. `M` is the backend's type of a model operation.
pub struct QueuedOperation<M> {
    pub id: RequestId,
    /// Memory that the request holds, in bytes.
    pub bytes: usize,
    /// How often earlier server processes restored the request after a restart and started to
    /// execute it. `None` for a request that this process has admitted itself.
    pub starts: Option<u32>,
    /// User and session of the model.
    pub account: Account,
    pub model: ModelId,
    pub seq: u64,
    pub operation: M,
}

/// Cost of a request besides its bytes, in bytes of a training pass: a step is short, but not free.
const REQUEST_COST: usize = 4_096;

impl<M> QueuedOperation<M> {
    /// Returns the cost of the request, in bytes. The time of a pass is about proportional to its
    /// bytes.
    fn cost(&self) -> u64 {
        u64::try_from(self.bytes.saturating_add(REQUEST_COST)).unwrap_or(u64::MAX)
    }
}

/// Returns the key of an account for fair shares.
#[must_use]
pub fn fairness_key(account: &Account) -> FairnessKey {
    FairnessKey::new(account.owner.as_str(), account.session.as_str())
}

/// A sampling or inference request that waits for its backend. `S` is the backend's type of a
/// sample.
pub struct QueuedSample<S> {
    pub id: RequestId,
    /// Memory that the request holds, in bytes.
    pub bytes: usize,
    /// Number of earlier starts; see [`QueuedOperation::starts`].
    pub starts: Option<u32>,
    pub sample: S,
}

/// Returns whether a request may have killed the server: an earlier process restored the request,
/// started to execute it, and died.
#[must_use]
pub fn is_suspect(starts: Option<u32>) -> bool {
    starts.is_some_and(|starts| starts > 0)
}

/// Operations of a queue that do not depend on the types of the backend's operations and samples.
pub trait RequestQueue: Send + Sync {
    /// Returns the number of requests that are being written, queued or sampled, and their size in
    /// bytes.
    fn size(&self) -> (usize, usize);

    /// Counts a request of `bytes` bytes that is being written to disk.
    fn write_started(&self, bytes: usize);

    /// Stops counting a request that was counted by [`write_started`](Self::write_started).
    fn write_finished(&self, bytes: usize);

    /// Sets the first sequence number that a model expects after a restart.
    fn start_at(&self, model: &ModelId, next: u64);

    /// Returns the next sequence number that a model expects.
    fn next_of(&self, model: &ModelId) -> u64;

    /// Returns the missing sequence number that request `seq` of a model waits for, if any.
    fn missing(&self, model: &ModelId, seq: u64) -> Option<u64>;

    /// Marks a sequence number as rejected, so that later requests do not wait for it.
    fn reject(&self, model: &ModelId, seq: u64);

    /// Returns why a model's queue is blocked, if it is.
    fn fault(&self, model: &ModelId) -> Option<String>;

    /// Asks the backend to cancel a sample.
    fn cancel(&self, id: RequestId);

    /// Removes a model from the queue and asks the backend to unload it. Returns the requests that
    /// were still queued for it.
    fn drop_model(&self, model: &ModelId) -> Vec<RequestId>;

    /// Asks the backend to save its models and return.
    fn stop(&self);
}

/// Queue of requests that wait for a backend, which executes model operations `M` and samples `S`.
pub struct Queue<M, S> {
    pending: Mutex<PendingRequests<M, S>>,
    /// Wakes the backend. Keeps one notification while the backend is busy.
    wake: Notify,
    /// Maximum time for which a request waits for missing earlier sequence numbers.
    gap_timeout: Duration,
    clock: Clock,
}

struct PendingRequests<M, S> {
    models: HashMap<ModelId, ModelQueue<M>>,
    /// Models with queued requests, least recently served first.
    round_robin: VecDeque<ModelId>,
    /// Cost of the work done for each user and session, in bytes.
    shares: FairShares,
    samples: VecDeque<QueuedSample<S>>,
    /// Samples to cancel.
    cancelled: Vec<RequestId>,
    /// Models to unload.
    dropped: Vec<ModelId>,
    /// Sessions to end.
    silent: Vec<SessionId>,
    /// Number of requests that are queued or being sampled.
    count: usize,
    /// Memory of the counted requests in bytes.
    bytes: usize,
    /// Requests that are being written to disk and are not queued yet. They count towards the
    /// limits, so that a slow disk cannot accumulate an unlimited number of them.
    writing: WritingRequests,
    stopping: bool,
}

#[derive(Default)]
struct WritingRequests {
    count: usize,
    bytes: usize,
}

struct ModelQueue<M> {
    /// Share of the model's account, while the model has queued requests.
    share: Option<ShareId>,
    /// Next sequence number to dispatch.
    next: u64,
    /// Queued requests with their arrival times, by sequence number.
    waiting: BTreeMap<u64, (QueuedOperation<M>, Duration)>,
    /// Sequence numbers whose requests were rejected. Later requests do not wait for them.
    rejected: BTreeSet<u64>,
    /// Set while the first request waits after a fault.
    retry: Option<Retry>,
    /// Whether the backend still executes a request of the model. Later requests wait.
    busy: bool,
}

/// The next attempt to execute a request that met a fault.
struct Retry {
    at: Instant,
    /// The fault, for the responses to polls.
    reason: String,
}

impl<M> Default for ModelQueue<M> {
    fn default() -> Self {
        Self {
            share: None,
            next: 0,
            waiting: BTreeMap::new(),
            rejected: BTreeSet::new(),
            retry: None,
            busy: false,
        }
    }
}

impl<M> ModelQueue<M> {
    /// Returns the lowest sequence number that the queued requests wait for.
    fn missing(&self) -> Option<u64> {
        let first = *self.waiting.keys().next()?;
        (self.next..first).find(|number| !self.rejected.contains(number))
    }

    /// Removes and returns the next request if it may run.
    fn pop(&mut self, now: Duration, gap_timeout: Duration) -> Option<QueuedOperation<M>> {
        if self.busy || self.retry.as_ref().is_some_and(|retry| retry.at > Instant::now()) {
            return None;
        }
        let first_arrival = self.waiting.values().next().map(|(_, arrived)| *arrived);
        let timed_out = first_arrival.is_some_and(|at| now.saturating_sub(at) >= gap_timeout);
        if self.missing().is_some() && !timed_out {
            return None;
        }
        let (seq, (request, _)) = self.waiting.pop_first()?;
        self.retry = None;
        self.next = self.next.max(seq + 1);
        self.rejected = self.rejected.split_off(&self.next);
        Some(request)
    }
}

/// Maximum number of rejected sequence numbers stored per model. Beyond this number, requests wait
/// for a rejected sequence number until the gap timeout passes.
const MAX_REJECTED: usize = 4_096;

/// Everything that a backend takes from the queue in one call.
pub struct Dispatch<M, S> {
    /// The next request of a model.
    pub model_request: Option<QueuedOperation<M>>,
    /// All new samples.
    pub samples: Vec<QueuedSample<S>>,
    /// Samples that their clients cancelled.
    pub cancelled: Vec<RequestId>,
    /// Models whose sessions have ended.
    pub dropped: Vec<ModelId>,
    /// Sessions without a request or heartbeat within the session timeout.
    pub silent: Vec<SessionId>,
    /// Whether the backend must save its models and return.
    pub stopping: bool,
}

impl<M, S> Dispatch<M, S> {
    fn is_empty(&self) -> bool {
        self.model_request.is_none()
            && self.samples.is_empty()
            && self.cancelled.is_empty()
            && self.dropped.is_empty()
            && self.silent.is_empty()
            && !self.stopping
    }
}

/// Error returned for a request whose sequence number was already skipped.
pub struct LateRequest(pub RequestId);

impl<M, S> Queue<M, S> {
    /// Creates an empty queue.
    #[must_use]
    pub fn new(gap_timeout: Duration, clock: Clock) -> Self {
        Self {
            pending: Mutex::new(PendingRequests::new()),
            wake: Notify::new(),
            gap_timeout,
            clock,
        }
    }

    fn lock(&self) -> MutexGuard<'_, PendingRequests<M, S>> {
        self.pending.lock()
    }

    /// Enqueues a request of a model.
    ///
    /// # Errors
    /// If the model has already continued with a later sequence number.
    pub fn push(&self, request: QueuedOperation<M>) -> Result<(), LateRequest> {
        let mut pending = self.lock();
        let queue = pending.models.entry(request.model.clone()).or_default();
        if request.seq < queue.next {
            return Err(LateRequest(request.id));
        }
        pending.insert(request, self.clock.running());
        drop(pending);
        self.wake.notify_one();
        Ok(())
    }

    /// Enqueues a sample.
    pub fn push_sample(&self, request: QueuedSample<S>) {
        let mut pending = self.lock();
        pending.count += 1;
        pending.bytes += request.bytes;
        pending.samples.push_back(request);
        drop(pending);
        self.wake.notify_one();
    }

    /// Puts a request that met a fault back into the queue of its model. The queue dispatches the
    /// request again at `retry_at`, and no other request of the model before that.
    pub fn put_back(&self, request: QueuedOperation<M>, retry_at: Instant, reason: String) {
        let mut pending = self.lock();
        let queue = pending.models.entry(request.model.clone()).or_default();
        queue.next = request.seq;
        queue.retry = Some(Retry { at: retry_at, reason });
        pending.insert(request, self.clock.running());
        drop(pending);
        self.wake.notify_one();
    }

    /// Holds back the later requests of a model while the backend executes a request of `bytes`
    /// bytes in several steps. The request counts towards the limits until
    /// [`release`](Self::release): its data stay in memory.
    pub fn hold(&self, model: &ModelId, bytes: usize) {
        let mut pending = self.lock();
        pending.count += 1;
        pending.bytes += bytes;
        if let Some(queue) = pending.models.get_mut(model) {
            queue.busy = true;
        }
    }

    /// Ends a [`hold`](Self::hold) of a model and of `bytes` bytes.
    pub fn release(&self, model: &ModelId, bytes: usize) {
        let mut pending = self.lock();
        pending.count -= 1;
        pending.bytes -= bytes;
        if let Some(queue) = pending.models.get_mut(model) {
            queue.busy = false;
        }
    }

    /// Returns whether the backend must save its models and return.
    pub fn is_stopping(&self) -> bool {
        self.lock().stopping
    }

    /// Removes all queued requests of a model and returns their ids in order.
    pub fn take_waiting(&self, model: &ModelId) -> Vec<RequestId> {
        let mut pending = self.lock();
        let Some(queue) = pending.models.get_mut(model) else { return Vec::new() };
        let waiting = std::mem::take(&mut queue.waiting);
        queue.retry = None;
        if let Some(last) = waiting.keys().next_back() {
            queue.next = queue.next.max(last + 1);
            queue.rejected = queue.rejected.split_off(&queue.next);
        }
        pending.remove_empty(model);
        pending.count -= waiting.len();
        pending.bytes -= waiting.values().map(|(request, _)| request.bytes).sum::<usize>();
        waiting.into_values().map(|(request, _)| request.id).collect()
    }

    /// Stops counting a sample of `bytes` bytes. Samples count towards the limits until they are
    /// finished: a backend takes all queued samples in one call, so the queue alone would never be
    /// full.
    pub fn sample_finished(&self, bytes: usize) {
        let mut pending = self.lock();
        pending.count -= 1;
        pending.bytes -= bytes;
    }

    /// Asks the worker to end sessions that have been silent for too long.
    pub fn report_silent(&self, sessions: Vec<SessionId>) {
        // Replaces the previous report: sessions that are still silent are in the new one too.
        self.lock().silent = sessions;
        self.wake.notify_one();
    }

    /// Wakes the backend, so that it checks the queue.
    pub fn wake(&self) {
        self.wake.notify_one();
    }

    /// Waits until something is added to the queue, for at most `wait`. For a backend that takes
    /// the requests of each model separately, with [`take_next`](Self::take_next).
    pub async fn changed(&self, wait: Duration) {
        let _ = tokio::time::timeout(wait, self.wake.notified()).await;
    }

    /// Takes everything except the requests of models.
    pub fn take_unordered(&self) -> Dispatch<M, S> {
        self.try_take(false).0
    }

    /// Returns the models with queued requests.
    pub fn waiting_models(&self) -> Vec<ModelId> {
        self.lock().round_robin.iter().cloned().collect()
    }

    /// Removes and returns the next request of a model if it may run and `accept` returns true for
    /// its operation.
    pub fn take_next(
        &self,
        model: &ModelId,
        accept: impl FnOnce(&M) -> bool,
    ) -> Option<QueuedOperation<M>> {
        let mut pending = self.lock();
        let queue = pending.models.get_mut(model)?;
        let (first, _) = queue.waiting.values().next()?;
        if !accept(&first.operation) {
            return None;
        }
        let request = queue.pop(self.clock.running(), self.gap_timeout)?;
        pending.remove_empty(model);
        pending.count -= 1;
        pending.bytes -= request.bytes;
        Some(request)
    }

    /// Sets or clears why a model's queue is blocked. Responses to polls contain the reason.
    pub fn set_fault(&self, model: &ModelId, reason: Option<String>) {
        let mut pending = self.lock();
        if let Some(queue) = pending.models.get_mut(model) {
            queue.retry = reason.map(|reason| Retry { at: Instant::now(), reason });
        }
    }

    /// Takes everything that the worker can execute now. Takes the next request of a model only if
    /// `model_request` is true. If the queue has nothing to execute, waits for at most `wait`;
    /// `None` does not wait.
    pub async fn take(&self, model_request: bool, wait: Option<Duration>) -> Dispatch<M, S> {
        let deadline = wait.map(|wait| Instant::now() + wait);
        loop {
            let (dispatch, gap_ends_in) = self.try_take(model_request);
            let now = Instant::now();
            let Some(deadline) = deadline.filter(|at| *at > now && dispatch.is_empty()) else {
                return dispatch;
            };
            let until = gap_ends_in.map_or(deadline, |wait| deadline.min(now + wait));
            // The timer may fire early by its resolution of a millisecond.
            let until = until.max(now + Duration::from_millis(1));
            let _ = tokio::time::timeout_at(until, self.wake.notified()).await;
        }
    }

    /// Takes everything that the worker can execute now. Also returns the time until a held request
    /// may be dispatched: when its gap timeout or its delay after a fault ends.
    fn try_take(&self, model_request: bool) -> (Dispatch<M, S>, Option<Duration>) {
        let mut pending = self.lock();
        let now = self.clock.running();
        let dispatch = pending.take(model_request, now, self.gap_timeout);
        let gap_end = pending.next_gap_end(self.gap_timeout);
        let gap_ends_in = gap_end.map(|end| end.saturating_sub(now));
        let retry = pending.next_retry();
        let retry_in = retry.map(|at| at.saturating_duration_since(Instant::now()));
        (dispatch, gap_ends_in.into_iter().chain(retry_in).min())
    }
}

impl<M: Send, S: Send> RequestQueue for Queue<M, S> {
    fn size(&self) -> (usize, usize) {
        let pending = self.lock();
        (pending.count + pending.writing.count, pending.bytes + pending.writing.bytes)
    }

    fn write_started(&self, bytes: usize) {
        let writing = &mut self.lock().writing;
        writing.count += 1;
        writing.bytes += bytes;
    }

    fn write_finished(&self, bytes: usize) {
        let writing = &mut self.lock().writing;
        writing.count -= 1;
        writing.bytes -= bytes;
    }

    fn start_at(&self, model: &ModelId, next: u64) {
        let mut pending = self.lock();
        let queue = pending.models.entry(model.clone()).or_default();
        queue.next = queue.next.max(next);
    }

    fn next_of(&self, model: &ModelId) -> u64 {
        self.lock().models.get(model).map_or(0, |queue| queue.next)
    }

    fn missing(&self, model: &ModelId, seq: u64) -> Option<u64> {
        let pending = self.lock();
        pending.models.get(model)?.missing().filter(|missing| seq > *missing)
    }

    fn reject(&self, model: &ModelId, seq: u64) {
        let mut pending = self.lock();
        if let Some(queue) = pending.models.get_mut(model)
            && seq >= queue.next
            && queue.rejected.len() < MAX_REJECTED
        {
            queue.rejected.insert(seq);
        }
        drop(pending);
        self.wake.notify_one();
    }

    fn fault(&self, model: &ModelId) -> Option<String> {
        let pending = self.lock();
        pending.models.get(model)?.retry.as_ref().map(|retry| retry.reason.clone())
    }

    fn cancel(&self, id: RequestId) {
        self.lock().cancelled.push(id);
        self.wake.notify_one();
    }

    fn drop_model(&self, model: &ModelId) -> Vec<RequestId> {
        let mut pending = self.lock();
        let waiting = pending.models.get_mut(model).map(|queue| std::mem::take(&mut queue.waiting));
        let waiting = waiting.unwrap_or_default();
        pending.remove_empty(model);
        pending.models.remove(model);
        pending.count -= waiting.len();
        pending.bytes -= waiting.values().map(|(request, _)| request.bytes).sum::<usize>();
        pending.dropped.push(model.clone());
        drop(pending);
        self.wake.notify_one();
        waiting.into_values().map(|(request, _)| request.id).collect()
    }

    fn stop(&self) {
        self.lock().stopping = true;
        self.wake.notify_one();
    }
}

impl<M, S> PendingRequests<M, S> {
    fn new() -> Self {
        Self {
            models: HashMap::new(),
            round_robin: VecDeque::new(),
            shares: FairShares::default(),
            samples: VecDeque::new(),
            cancelled: Vec::new(),
            dropped: Vec::new(),
            silent: Vec::new(),
            count: 0,
            bytes: 0,
            writing: WritingRequests::default(),
            stopping: false,
        }
    }

    /// Adds a request to the queue of its model.
    fn insert(&mut self, request: QueuedOperation<M>, arrived: Duration) {
        let queue = self.models.entry(request.model.clone()).or_default();
        if queue.share.is_none() {
            queue.share = Some(self.shares.enter(&fairness_key(&request.account)));
            self.round_robin.push_back(request.model.clone());
        }
        self.count += 1;
        self.bytes += request.bytes;
        queue.waiting.insert(request.seq, (request, arrived));
    }

    fn take(
        &mut self,
        model_request: bool,
        now: Duration,
        gap_timeout: Duration,
    ) -> Dispatch<M, S> {
        let model_request = if model_request { self.pop(now, gap_timeout) } else { None };
        let samples: Vec<QueuedSample<S>> = self.samples.drain(..).collect();
        if let Some(request) = &model_request {
            self.count -= 1;
            self.bytes -= request.bytes;
        }
        Dispatch {
            model_request,
            samples,
            cancelled: std::mem::take(&mut self.cancelled),
            dropped: std::mem::take(&mut self.dropped),
            silent: std::mem::take(&mut self.silent),
            stopping: self.stopping,
        }
    }

    /// Removes a model without queued requests from the models that are served.
    fn remove_empty(&mut self, model: &ModelId) {
        let Some(queue) = self.models.get_mut(model) else { return };
        if queue.waiting.is_empty()
            && let Some(share) = queue.share.take()
        {
            self.shares.leave(share);
            self.round_robin.retain(|other| other != model);
        }
    }

    /// Removes and returns the next request that may run: of the user and session that have
    /// received least, and of the model that was served least recently.
    fn pop(&mut self, now: Duration, gap_timeout: Duration) -> Option<QueuedOperation<M>> {
        let mut models: Vec<ModelId> = self.round_robin.iter().cloned().collect();
        let share = |model: &ModelId| self.models.get(model).and_then(|queue| queue.share);
        models.sort_by_key(|model| share(model).map(|share| self.shares.order(share)));
        for model in models {
            let Some(queue) = self.models.get_mut(&model) else { continue };
            let Some(request) = queue.pop(now, gap_timeout) else { continue };
            if let Some(share) = queue.share {
                self.shares.charge(share, request.cost());
            }
            self.round_robin.retain(|other| *other != model);
            self.round_robin.push_back(model.clone());
            self.remove_empty(&model);
            return Some(request);
        }
        None
    }

    /// Returns the earliest running time at which a held request stops waiting for missing numbers.
    fn next_gap_end(&self, gap_timeout: Duration) -> Option<Duration> {
        self.models
            .values()
            .filter(|queue| queue.retry.is_none() && !queue.busy)
            .filter_map(|queue| queue.waiting.first_key_value())
            .map(|(_, (_, arrived))| arrived.saturating_add(gap_timeout))
            .min()
    }

    /// Returns the earliest time at which a request is executed again after a fault.
    fn next_retry(&self) -> Option<Instant> {
        self.models.values().filter_map(|queue| Some(queue.retry.as_ref()?.at)).min()
    }
}

#[cfg(test)]
mod tests;
