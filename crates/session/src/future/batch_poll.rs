//! [`BatchPoll`]: one poll for all pending requests of a sampling session, if the server offers it.
//!
//! The server announces which requests have completed; their results are then retrieved one by one.
//! With thousands of pending samples, one open poll replaces thousands. After a failed poll, the
//! calls whose retry policy allows no further poll fail; polling continues for the other calls.
//!
//! An announcement can be missing, for example because the server lost it in a crash. A call that
//! has waited for [`ANNOUNCEMENT_TIMEOUT`] therefore polls for its own result once. At first a single call
//! does so at a time; [`Checks`] allows more after a missing announcement was found.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tinkex_wire::{CompletedFuture, FuturesRetrieved, FuturesTarget, RequestId, RetrieveFutures};
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

use crate::background::BackgroundTask;
use crate::error::{Error, Result};
use crate::transport::CallOptions;
use crate::transport::retry::call_progress::CallProgress;
use crate::transport::{BILLING_DELAY, RequestOptions, Transport};

use super::poll_failures::{MAX_BAD_REQUESTS, is_rejected};
use super::poll_interval::{self, OutageLimit, PollInterval};

/// Delay after a failed poll.
const FAILURE_DELAY: Duration = Duration::from_secs(1);
/// Longest delay that one `retry-after` causes.
const MAX_SHARED_DELAY: Duration = Duration::from_secs(60);
/// Time without an announcement after which a call polls for its own result once.
const ANNOUNCEMENT_TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum number of calls that poll for their own results at the same time because of missing
/// announcements.
const MAX_CHECKS: usize = 256;
/// Maximum number of abandoned requests that are remembered, so that their announcements are
/// discarded.
const MAX_ABANDONED: usize = 10_000;
/// Maximum number of announcements per generation of [`Unclaimed`]. The limit is never reached by
/// samples that will have a waiter: admission control allows far fewer samples between submission
/// and the start of the wait.
const MAX_UNCLAIMED: usize = 10_000;

/// Announces completed requests to the calls that wait for them. Dropping the value ends polling.
#[derive(Debug)]
pub struct BatchPoll {
    shared: Arc<BatchPollShared>,
    _task: Arc<BackgroundTask>,
}

/// State shared by the polling task and the waiters.
#[derive(Debug, Default)]
struct BatchPollShared {
    state: Mutex<BatchPollState>,
    /// Notified when there is a new waiter or a retrieved result.
    changed: Notify,
}

/// Waiters, announcements and checks of one batch poll.
#[derive(Debug, Default)]
struct BatchPollState {
    waiters: HashMap<RequestId, AnnouncementWaiter>,
    unclaimed: Unclaimed,
    /// Requests whose waiters were dropped.
    abandoned: HashSet<RequestId>,
    /// Requests whose results were retrieved, to be reported so that the server may drop them.
    retrieved: BTreeSet<RequestId>,
    /// Whether a poll has failed since the server last processed a poll.
    is_outage: bool,
    checks: Checks,
    ended: Option<PollingEnd>,
}

/// Call that waits for an announcement.
#[derive(Debug)]
struct AnnouncementWaiter {
    announce: oneshot::Sender<Result<Announcement>>,
    since: Instant,
    /// Limits of the call's retry policy. `None` if the policy sets no limit, which is the default.
    /// Boxed and optional to save memory: ten thousand samples can be pending.
    limits: Option<Box<CallLimits>>,
}

/// Limits of one call on failed polls. A call that reaches a limit fails.
#[derive(Debug)]
struct CallLimits {
    since: Instant,
    outage: OutageLimit,
    waits_for_billing: bool,
    retries_rejected_polls: bool,
}

impl CallLimits {
    fn new(policy: &CallOptions) -> Option<Box<Self>> {
        let waits_for_billing = policy.waits_for_billing();
        let retries_rejected_polls = policy.retries_rejected_polls();
        let unlimited = policy.attempt_limit() == u32::MAX && policy.retry_limit().is_none();
        if unlimited && waits_for_billing && retries_rejected_polls {
            return None;
        }
        let since = Instant::now();
        let outage = OutageLimit::new(policy);
        Some(Box::new(Self { since, outage, waits_for_billing, retries_rejected_polls }))
    }

    /// Records a failed poll that was sent at `sent_at`. Returns whether the call waits for another
    /// poll after `delay`.
    fn allows_poll(&mut self, error: &Error, sent_at: Instant, delay: Duration) -> bool {
        match error.status() {
            // The outage limit does not apply to a billing wait: the server limits how long it
            // lasts.
            Some(402) => return self.waits_for_billing,
            _ if !self.retries_rejected_polls && is_rejected(error) => return false,
            _ => {}
        }
        // If the poll was sent before the call started to wait, the outage of this call starts with
        // the wait.
        !self.outage.record(sent_at.max(self.since), delay)
    }
}

/// Announcements that arrived before their waiter.
///
/// A sample cancelled during its submission is announced without ever having a waiter. To bound the
/// memory, announcements are kept in two generations, and the older one is dropped when the newer
/// one is full.
#[derive(Debug, Default)]
struct Unclaimed {
    new: HashMap<RequestId, CompletedFuture>,
    old: HashMap<RequestId, CompletedFuture>,
}

impl Unclaimed {
    fn insert(&mut self, completion: CompletedFuture) {
        if self.new.len() >= MAX_UNCLAIMED {
            self.old = std::mem::take(&mut self.new);
        }
        self.new.insert(completion.request_id().clone(), completion);
    }

    fn remove(&mut self, request_id: &RequestId) -> Option<CompletedFuture> {
        self.new.remove(request_id).or_else(|| self.old.remove(request_id))
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.new.len() + self.old.len()
    }
}

/// Reason why polling ended.
#[derive(Debug)]
enum PollingEnd {
    /// The server lacks the endpoint; each result is polled for individually.
    NotOffered,
    /// A poll failed with an error that polling again cannot resolve.
    Failed(Error),
}

/// Outcome of [`BatchPoll::wait_for`].
#[derive(Debug, PartialEq)]
pub(crate) enum Announcement {
    /// The request has completed.
    Completed(CompletedFuture),
    /// Nothing was announced for a while: poll for the result once, then wait again.
    Silence,
    /// The server does not announce results: poll for the result until it is ready.
    NotOffered,
}

/// Checks for missing announcements: in each check, one call polls for its own result once.
#[derive(Debug, Default)]
struct Checks {
    /// Start of the last round of checks.
    last: Option<Instant>,
    /// Calls that are polling for their own results.
    running: HashSet<RequestId>,
    /// Number of checks in the next round. Starts at 1. Doubles when a check finds a result whose
    /// announcement is missing, because other announcements may be missing too.
    next: usize,
}

impl Checks {
    /// Returns how many checks may start now.
    fn due(&self, now: Instant) -> usize {
        let waited = self.last.is_none_or(|last| now.duration_since(last) >= ANNOUNCEMENT_TIMEOUT);
        if waited || self.next > 1 { self.next.max(1) } else { 0 }
    }

    fn start(&mut self, now: Instant, ids: Vec<RequestId>) {
        *self = Self { last: Some(now), running: ids.into_iter().collect(), next: 1 };
    }

    /// Records that a call has retrieved its result.
    fn found(&mut self, id: &RequestId) {
        if self.running.remove(id) {
            self.next = (self.next.max(1) * 2).min(MAX_CHECKS);
        }
    }
}

impl BatchPoll {
    /// Starts the polling task. The task sends nothing until there is a waiter.
    pub fn start(transport: Arc<Transport>, target: FuturesTarget, adaptive_polling: bool) -> Self {
        let shared = Arc::new(BatchPollShared::default());
        let polled = Arc::clone(&shared);
        let task = transport.clone().background().start(move || {
            let polling = PollingTask {
                waiters: ReleaseWaiters(Arc::clone(&polled)),
                transport: Arc::clone(&transport),
                target: target.clone(),
                interval: PollInterval::new(adaptive_polling),
                cursor: 0,
                bad_requests: 0,
                sent_at: Instant::now(),
            };
            polling.run()
        });
        Self { shared, _task: task }
    }

    /// Waits until the result of a request is announced.
    ///
    /// # Errors
    /// If polling has ended with an error, or the server fails for longer or more often than
    /// `policy` allows.
    pub(crate) async fn wait_for(
        &self,
        request_id: &RequestId,
        policy: &CallOptions,
    ) -> Result<Announcement> {
        let announcement = {
            let mut state = self.shared.lock();
            // Earlier announcements stay valid after polling has ended.
            if let Some(completion) = state.unclaimed.remove(request_id) {
                return Ok(Announcement::Completed(completion));
            }
            if let Some(end) = &state.ended {
                return end.announcement();
            }
            let (announce, announcement) = oneshot::channel();
            let since = Instant::now();
            let limits = CallLimits::new(policy);
            let call = AnnouncementWaiter { announce, since, limits };
            state.checks.running.remove(request_id);
            state.waiters.insert(request_id.clone(), call);
            announcement
        };
        let _waiter = WaiterGuard { shared: &self.shared, request_id };
        self.shared.changed.notify_one();
        announcement.await.unwrap_or(Ok(Announcement::NotOffered))
    }

    /// Reports to the server, with the next poll, that a result was retrieved and may be dropped.
    pub(crate) fn mark_retrieved(&self, request_id: RequestId) {
        let mut state = self.shared.lock();
        if state.ended.is_none() {
            state.checks.found(&request_id);
            state.retrieved.insert(request_id);
            drop(state);
            self.shared.changed.notify_one();
        }
    }
}

/// Guard that removes the waiter of `request_id` from the batch poll when it is dropped.
struct WaiterGuard<'a> {
    shared: &'a BatchPollShared,
    request_id: &'a RequestId,
}

impl Drop for WaiterGuard<'_> {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        if state.waiters.remove(self.request_id).is_some() && state.ended.is_none() {
            // A cancelled request may never be announced, so the set must be bounded. After the set
            // is cleared, announcements of abandoned requests go to `unclaimed`, which is bounded
            // too.
            if state.abandoned.len() >= MAX_ABANDONED {
                state.abandoned.clear();
            }
            state.abandoned.insert(self.request_id.clone());
        }
    }
}

/// Guard that releases the waiters when the polling task or its runtime ends. Each waiter then
/// polls for its result individually.
struct ReleaseWaiters(Arc<BatchPollShared>);

impl Drop for ReleaseWaiters {
    fn drop(&mut self) {
        self.0.lock().waiters.clear();
    }
}

/// Task that polls while there is work, until an error ends polling or the task is aborted.
struct PollingTask {
    waiters: ReleaseWaiters,
    transport: Arc<Transport>,
    target: FuturesTarget,
    interval: PollInterval,
    /// Position of the server's announcements that the next poll continues from.
    cursor: u64,
    /// Number of 400 responses since the last successful poll.
    bad_requests: u32,
    /// When the last poll was sent.
    sent_at: Instant,
}

impl PollingTask {
    async fn run(mut self) {
        loop {
            let retrieved = self.shared().wait_for_work().await;
            let poll = RetrieveFutures::new(self.target.clone())
                .prev_cursor(self.cursor)
                .retrieved_request_ids(retrieved.iter().cloned().collect());
            self.sent_at = Instant::now();
            // Use `send_in_call`: `send` would log the failure of a poll as the end of a call.
            let options = RequestOptions::default();
            let mut call = CallProgress::new();
            let delay = match self.transport.send_in_call(&poll, &options, &mut call).await {
                Ok(response) => self.after_response(response, &retrieved),
                Err(error) => match self.after_failure(&error) {
                    Ok(delay) => delay,
                    Err(end) => return self.shared().end(end),
                },
            };
            poll_interval::wait(delay).await;
        }
    }

    fn shared(&self) -> &BatchPollShared {
        &self.waiters.0
    }

    /// Announces the completed requests of a response, and returns the delay before the next poll.
    fn after_response(
        &mut self,
        response: FuturesRetrieved,
        retrieved: &BTreeSet<RequestId>,
    ) -> Duration {
        self.cursor = response.cursor;
        self.bad_requests = 0;
        let is_empty = response.completions.is_empty();
        self.shared().announce(response, retrieved);
        self.shared().check_silent(Instant::now());
        self.shared().end_outage();
        self.transport.retry_log().poll_succeeded();
        if is_empty { self.interval.next_delay(self.sent_at) } else { Duration::ZERO }
    }

    /// Fails the calls whose retry policy allows no further poll after this failed one, and returns
    /// the delay before the next poll.
    ///
    /// # Errors
    /// The reason why polling ends, if no poll follows.
    fn after_failure(&mut self, error: &Error) -> std::result::Result<Duration, PollingEnd> {
        let failed = || PollingEnd::Failed(error.clone());
        let delay = match error.status() {
            Some(402) => BILLING_DELAY,
            Some(400) if self.bad_requests < MAX_BAD_REQUESTS && !error.declines_retries() => {
                self.bad_requests += 1;
                FAILURE_DELAY
            }
            Some(404 | 405 | 501) => return Err(PollingEnd::NotOffered),
            Some(408) => {
                self.shared().end_outage();
                return Ok(FAILURE_DELAY);
            }
            // All samples of the client wait for this poll, so one `retry-after` delays it by at
            // most a minute.
            Some(429) if error.is_retryable() => {
                let retry_after = error.retry_after().unwrap_or_default();
                FAILURE_DELAY.max(retry_after.min(MAX_SHARED_DELAY))
            }
            _ if error.is_retryable() => FAILURE_DELAY,
            _ => return Err(failed()),
        };
        let waiting = self.shared().fail_waiters(error, self.sent_at, delay);
        if waiting {
            // Call `wait_for_billing` only if a call is still waiting: each call updates the
            // billing incident that all requests share.
            if error.status() == Some(402) && !self.transport.wait_for_billing() {
                return Err(failed());
            }
            self.transport.retry_log().poll_failed(error, delay);
        }
        Ok(delay)
    }
}

impl BatchPollShared {
    /// Waits until there is a reason to poll, and returns the retrieved requests to report.
    async fn wait_for_work(&self) -> BTreeSet<RequestId> {
        loop {
            {
                let state = self.lock();
                if !state.waiters.is_empty() || !state.retrieved.is_empty() {
                    return state.retrieved.clone();
                }
            }
            self.changed.notified().await;
        }
    }

    /// Passes the announced completions to their waiters. `reported` are the retrieved requests
    /// that the poll reported, which need not be reported again.
    fn announce(&self, response: FuturesRetrieved, reported: &BTreeSet<RequestId>) {
        let mut state = self.lock();
        state.retrieved.retain(|request_id| !reported.contains(request_id));
        for completion in response.completions {
            let request_id = completion.request_id();
            if let Some(waiter) = state.waiters.remove(request_id) {
                let _ = waiter.announce.send(Ok(Announcement::Completed(completion)));
            } else if !state.abandoned.remove(request_id) {
                state.unclaimed.insert(completion);
            }
        }
    }

    /// Makes calls that have waited for [`ANNOUNCEMENT_TIMEOUT`] poll for their own results, the oldest
    /// first.
    fn check_silent(&self, now: Instant) {
        let mut state = self.lock();
        let due = state.checks.due(now);
        if due == 0 {
            return;
        }
        let waiting = state.waiters.iter();
        let mut silent: Vec<(Instant, RequestId)> = waiting
            .filter(|(_, call)| now.duration_since(call.since) >= ANNOUNCEMENT_TIMEOUT)
            .map(|(id, call)| (call.since, id.clone()))
            .collect();
        if silent.is_empty() {
            return;
        }
        silent.sort_unstable();
        silent.truncate(due);
        let ids: Vec<RequestId> = silent.into_iter().map(|(_, id)| id).collect();
        for id in &ids {
            if let Some(waiter) = state.waiters.remove(id) {
                let _ = waiter.announce.send(Ok(Announcement::Silence));
            }
        }
        state.checks.start(now, ids);
    }

    /// Fails the waiters whose retry policy allows no further poll `delay` after the failed poll,
    /// which was sent at `sent_at`. Returns whether other waiters remain. Polling continues even if
    /// no waiter remains: the server may have recovered when the next waiter arrives.
    fn fail_waiters(&self, error: &Error, sent_at: Instant, delay: Duration) -> bool {
        let mut state = self.lock();
        let ends = |_: &RequestId, call: &mut AnnouncementWaiter| {
            call.limits.as_mut().is_some_and(|limits| !limits.allows_poll(error, sent_at, delay))
        };
        for (_, waiter) in state.waiters.extract_if(ends) {
            let _ = waiter.announce.send(Err(error.clone()));
        }
        state.is_outage = true;
        !state.waiters.is_empty()
    }

    /// Ends an outage: the server processed a poll.
    fn end_outage(&self) {
        let mut state = self.lock();
        if std::mem::take(&mut state.is_outage) {
            let limits = state.waiters.values_mut().filter_map(|call| call.limits.as_mut());
            limits.for_each(|limits| limits.outage.end());
        }
    }

    /// Ends polling: resolves all waiters, and clears all state except unclaimed announcements,
    /// which stay valid.
    fn end(&self, end: PollingEnd) {
        let mut state = self.lock();
        for (_, waiter) in state.waiters.drain() {
            let _ = waiter.announce.send(end.announcement());
        }
        *state = BatchPollState {
            ended: Some(end),
            unclaimed: std::mem::take(&mut state.unclaimed),
            ..BatchPollState::default()
        };
    }

    fn lock(&self) -> MutexGuard<'_, BatchPollState> {
        self.state.lock()
    }
}

impl PollingEnd {
    fn announcement(&self) -> Result<Announcement> {
        match self {
            Self::NotOffered => Ok(Announcement::NotOffered),
            Self::Failed(error) => Err(error.clone()),
        }
    }
}

#[cfg(test)]
impl BatchPoll {
    /// Returns the number of announcements without a waiter.
    pub(super) fn unclaimed(&self) -> usize {
        self.shared.lock().unclaimed.len()
    }

    /// Returns whether no request is tracked.
    pub(super) fn is_empty(&self) -> bool {
        let state = self.shared.lock();
        let BatchPollState { waiters, unclaimed, abandoned, retrieved, .. } = &*state;
        waiters.is_empty() && unclaimed.len() == 0 && abandoned.is_empty() && retrieved.is_empty()
    }
}
