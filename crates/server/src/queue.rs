//! Queue of admitted requests that wait for a [backend](crate::backend): the worker, or the tasks
//! of an upstream.
//!
//! Requests of a model are dispatched by sequence number, regardless of the order in which they
//! arrive. A request that arrives early is held until the missing numbers arrive or the gap timeout
//! passes: a client may assign a number and never send its request. Models are served round-robin.
//! Samples and generations have no order.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tinkex_wire::{ModelId, RequestId, SessionId};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::clock::Clock;
#[cfg(feature = "upstream")]
use crate::operation::ModelOperation;
use crate::operation::{Operation, QueuedRequest};

/// Queue of requests that wait for a backend.
pub(crate) struct Queue {
    pending: Mutex<PendingRequests>,
    /// Wakes the backend. Keeps one notification while the backend is busy.
    wake: Notify,
    /// Maximum time for which a request waits for missing earlier sequence numbers.
    gap_timeout: Duration,
    clock: Clock,
}

#[derive(Default)]
struct PendingRequests {
    models: HashMap<ModelId, ModelQueue>,
    /// Models with queued requests, in round-robin order.
    round_robin: VecDeque<ModelId>,
    samples: VecDeque<QueuedRequest>,
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

#[derive(Default)]
struct ModelQueue {
    /// Next sequence number to dispatch.
    next: u64,
    /// Queued requests with their arrival times, by sequence number.
    waiting: BTreeMap<u64, (QueuedRequest, Duration)>,
    /// Sequence numbers whose requests were rejected. Later requests do not wait for them.
    rejected: BTreeSet<u64>,
    /// Set while the first request waits after a fault.
    retry: Option<Retry>,
}

/// The next attempt to execute a request that met a fault.
struct Retry {
    at: Instant,
    /// The fault, for clients that poll.
    reason: String,
}

impl ModelQueue {
    /// Returns the lowest sequence number that the queued requests wait for.
    fn missing(&self) -> Option<u64> {
        let first = *self.waiting.keys().next()?;
        (self.next..first).find(|number| !self.rejected.contains(number))
    }

    /// Removes and returns the next request if it may run.
    fn pop(&mut self, now: Duration, gap_timeout: Duration) -> Option<QueuedRequest> {
        if self.retry.as_ref().is_some_and(|retry| retry.at > Instant::now()) {
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

/// Maximum number of rejected sequence numbers stored per model. Later requests wait for further
/// ones until the gap timeout.
const MAX_REJECTED: usize = 4_096;

/// Everything that the queue hands to a backend in one call.
#[derive(Default)]
pub(crate) struct Dispatch {
    /// The next request of a model.
    pub(crate) model_request: Option<QueuedRequest>,
    /// All new samples.
    pub(crate) samples: Vec<QueuedRequest>,
    /// Samples that their clients cancelled.
    pub(crate) cancelled: Vec<RequestId>,
    /// Models whose sessions have ended.
    pub(crate) dropped: Vec<ModelId>,
    /// Sessions without a request or heartbeat within the session timeout.
    pub(crate) silent: Vec<SessionId>,
    /// Whether the backend must save its models and return.
    pub(crate) stopping: bool,
}

impl Dispatch {
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
pub(crate) struct LateRequest(pub(crate) RequestId);

impl Queue {
    pub(crate) fn new(gap_timeout: Duration, clock: Clock) -> Self {
        Self { pending: Mutex::default(), wake: Notify::new(), gap_timeout, clock }
    }

    fn lock(&self) -> MutexGuard<'_, PendingRequests> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of requests that are being written, queued or sampled, and their size in
    /// bytes.
    pub(crate) fn size(&self) -> (usize, usize) {
        let pending = self.lock();
        (pending.count + pending.writing.count, pending.bytes + pending.writing.bytes)
    }

    /// Counts a request of `bytes` bytes that is being written to disk.
    pub(crate) fn write_started(&self, bytes: usize) {
        let writing = &mut self.lock().writing;
        writing.count += 1;
        writing.bytes += bytes;
    }

    /// Ends the count started by [`write_started`](Self::write_started).
    pub(crate) fn write_finished(&self, bytes: usize) {
        let writing = &mut self.lock().writing;
        writing.count -= 1;
        writing.bytes -= bytes;
    }

    /// Sets the first sequence number that a model expects after a restart.
    pub(crate) fn start_at(&self, model: &ModelId, next: u64) {
        let mut pending = self.lock();
        let queue = pending.models.entry(model.clone()).or_default();
        queue.next = queue.next.max(next);
    }

    /// Returns the next sequence number that a model expects.
    pub(crate) fn next_of(&self, model: &ModelId) -> u64 {
        self.lock().models.get(model).map_or(0, |queue| queue.next)
    }

    /// Returns the missing sequence number that request `seq` of a model waits for, if any.
    pub(crate) fn missing(&self, model: &ModelId, seq: u64) -> Option<u64> {
        let pending = self.lock();
        pending.models.get(model)?.missing().filter(|missing| seq > *missing)
    }

    /// Marks a sequence number as rejected, so that later requests do not wait for it.
    pub(crate) fn reject(&self, model: &ModelId, seq: u64) {
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

    /// Enqueues a request.
    ///
    /// # Errors
    /// If the model has continued with a later sequence number.
    pub(crate) fn push(&self, request: QueuedRequest) -> Result<(), LateRequest> {
        let mut pending = self.lock();
        match &request.operation {
            Operation::Sample(_) | Operation::Generate(_) | Operation::Relay(_) => {
                pending.count += 1;
                pending.bytes += request.bytes;
                pending.samples.push_back(request);
            }
            Operation::Model { model, seq, .. } => {
                let (model, seq) = (model.clone(), *seq);
                let queue = pending.models.entry(model.clone()).or_default();
                if seq < queue.next {
                    return Err(LateRequest(request.id));
                }
                let bytes = request.bytes;
                let idle = queue.waiting.is_empty();
                queue.waiting.insert(seq, (request, self.clock.running()));
                pending.count += 1;
                pending.bytes += bytes;
                if idle {
                    pending.round_robin.push_back(model);
                }
            }
        }
        drop(pending);
        self.wake.notify_one();
        Ok(())
    }

    /// Puts a request that met a fault back into the queue of its model. It is dispatched again at
    /// `retry_at`, and until then no other request of the model is.
    pub(crate) fn put_back(&self, request: QueuedRequest, retry_at: Instant, reason: String) {
        let Operation::Model { model, seq, .. } = &request.operation else { return };
        let (model, seq) = (model.clone(), *seq);
        let mut pending = self.lock();
        let queue = pending.models.entry(model.clone()).or_default();
        queue.next = seq;
        queue.retry = Some(Retry { at: retry_at, reason });
        let bytes = request.bytes;
        let idle = queue.waiting.is_empty();
        queue.waiting.insert(seq, (request, self.clock.running()));
        pending.count += 1;
        pending.bytes += bytes;
        if idle {
            pending.round_robin.push_back(model);
        }
        drop(pending);
        self.wake.notify_one();
    }

    /// Returns the fault because of which the queue of a model waits, if any.
    pub(crate) fn fault(&self, model: &ModelId) -> Option<String> {
        let pending = self.lock();
        pending.models.get(model)?.retry.as_ref().map(|retry| retry.reason.clone())
    }

    /// Removes all queued requests of a model and returns their ids in order.
    pub(crate) fn take_waiting(&self, model: &ModelId) -> Vec<RequestId> {
        let mut pending = self.lock();
        let Some(queue) = pending.models.get_mut(model) else { return Vec::new() };
        let waiting = std::mem::take(&mut queue.waiting);
        queue.retry = None;
        if let Some(last) = waiting.keys().next_back() {
            queue.next = queue.next.max(last + 1);
            queue.rejected = queue.rejected.split_off(&queue.next);
        }
        pending.round_robin.retain(|other| other != model);
        pending.count -= waiting.len();
        pending.bytes -= waiting.values().map(|(request, _)| request.bytes).sum::<usize>();
        waiting.into_values().map(|(request, _)| request.id).collect()
    }

    /// Ends the count of a sample of `bytes` bytes. Samples count towards the limits until they are
    /// finished: a backend takes all queued samples in one call, so the queue alone would never be
    /// full.
    pub(crate) fn sample_finished(&self, bytes: usize) {
        let mut pending = self.lock();
        pending.count -= 1;
        pending.bytes -= bytes;
    }

    /// Asks the backend to cancel a sample.
    pub(crate) fn cancel(&self, id: RequestId) {
        self.lock().cancelled.push(id);
        self.wake.notify_one();
    }

    /// Removes a model from the queue and asks the backend to unload it. Returns the requests that
    /// were still queued for it.
    pub(crate) fn drop_model(&self, model: &ModelId) -> Vec<RequestId> {
        let mut pending = self.lock();
        let queue = pending.models.remove(model).unwrap_or_default();
        pending.round_robin.retain(|other| other != model);
        pending.count -= queue.waiting.len();
        pending.bytes -= queue.waiting.values().map(|(request, _)| request.bytes).sum::<usize>();
        pending.dropped.push(model.clone());
        drop(pending);
        self.wake.notify_one();
        queue.waiting.into_values().map(|(request, _)| request.id).collect()
    }

    /// Asks the worker to end sessions that have been silent for too long.
    pub(crate) fn report_silent(&self, sessions: Vec<SessionId>) {
        // Replaces the previous report: sessions that are still silent are in the new one too.
        self.lock().silent = sessions;
        self.wake.notify_one();
    }

    /// Makes the backend look for work.
    pub(crate) fn wake(&self) {
        self.wake.notify_one();
    }

    /// Asks the backend to save its models and return.
    pub(crate) fn stop(&self) {
        self.lock().stopping = true;
        self.wake.notify_one();
    }

    /// Waits until something is added, or for up to `wait`. For a backend that takes the requests
    /// of each model separately, with [`take_next`](Self::take_next).
    #[cfg(feature = "upstream")]
    pub(crate) async fn changed(&self, wait: Duration) {
        let _ = tokio::time::timeout(wait, self.wake.notified()).await;
    }

    /// Takes everything except the requests of models.
    #[cfg(feature = "upstream")]
    pub(crate) fn take_unordered(&self) -> Dispatch {
        self.try_take(false).0
    }

    /// Returns the models with queued requests.
    #[cfg(feature = "upstream")]
    pub(crate) fn waiting_models(&self) -> Vec<ModelId> {
        self.lock().round_robin.iter().cloned().collect()
    }

    /// Removes and returns the next request of a model if it may run and `accept` returns true for
    /// its operation.
    #[cfg(feature = "upstream")]
    pub(crate) fn take_next(
        &self,
        model: &ModelId,
        accept: impl FnOnce(&ModelOperation) -> bool,
    ) -> Option<QueuedRequest> {
        let mut pending = self.lock();
        let queue = pending.models.get_mut(model)?;
        let (first, _) = queue.waiting.values().next()?;
        let Operation::Model { operation, .. } = &first.operation else { return None };
        if !accept(operation) {
            return None;
        }
        let request = queue.pop(self.clock.running(), self.gap_timeout)?;
        if queue.waiting.is_empty() {
            pending.round_robin.retain(|other| other != model);
        }
        pending.count -= 1;
        pending.bytes -= request.bytes;
        Some(request)
    }

    /// Sets or clears the fault because of which the requests of a model wait. Responses to polls
    /// contain it.
    #[cfg(feature = "upstream")]
    pub(crate) fn set_fault(&self, model: &ModelId, reason: Option<String>) {
        let mut pending = self.lock();
        if let Some(queue) = pending.models.get_mut(model) {
            queue.retry = reason.map(|reason| Retry { at: Instant::now(), reason });
        }
    }

    /// Takes everything that the worker can do now, with the next request of a model only if
    /// `model_request` is true. If there is nothing to do, waits for up to `wait`, or not at all if
    /// `wait` is `None`.
    pub(crate) async fn take(&self, model_request: bool, wait: Option<Duration>) -> Dispatch {
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

    /// Takes everything that the worker can do now. Also returns the time until a held request may
    /// be dispatched: when its gap timeout or its delay after a fault ends.
    fn try_take(&self, model_request: bool) -> (Dispatch, Option<Duration>) {
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

impl PendingRequests {
    fn take(&mut self, model_request: bool, now: Duration, gap_timeout: Duration) -> Dispatch {
        let model_request = if model_request { self.pop(now, gap_timeout) } else { None };
        let samples: Vec<QueuedRequest> = self.samples.drain(..).collect();
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

    /// Removes and returns the next request of the first model, in round-robin order, that has one
    /// ready.
    fn pop(&mut self, now: Duration, gap_timeout: Duration) -> Option<QueuedRequest> {
        for _ in 0..self.round_robin.len() {
            let model = self.round_robin.pop_front()?;
            let Some(queue) = self.models.get_mut(&model) else { continue };
            let request = queue.pop(now, gap_timeout);
            if !queue.waiting.is_empty() {
                self.round_robin.push_back(model);
            }
            if request.is_some() {
                return request;
            }
        }
        None
    }

    /// Returns the earliest running time at which a held request stops waiting for missing numbers.
    fn next_gap_end(&self, gap_timeout: Duration) -> Option<Duration> {
        self.models
            .values()
            .filter(|queue| queue.retry.is_none())
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
