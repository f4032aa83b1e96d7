//! [`BatchPoll`]: one poll for all pending requests of a sampling session, if the server offers it.
//!
//! The server announces which requests have completed; their results are then retrieved one by one.
//! With thousands of pending samples, one open poll replaces thousands.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tinkex_wire::{CompletedFuture, FuturesRetrieved, FuturesTarget, RequestId, RetrieveFutures};
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, sleep};

use crate::background::BackgroundTask;
use crate::error::{Error, Result};
use crate::transport::retry_policy::RetryPolicy;
use crate::transport::{BILLING_DELAY, RequestOptions, Transport};

use super::poll_interval::{self, OutageLimit, PollInterval};

/// Delay after a failed poll.
const FAILURE_DELAY: Duration = Duration::from_secs(1);
/// Number of consecutive 400 responses that are retried.
const MAX_BAD_REQUESTS: u32 = 3;
/// Number of abandoned requests whose announcements are still recognized.
const MAX_ABANDONED: usize = 10_000;
/// Number of early announcements kept per generation. Admission control allows far fewer samples
/// between their submission and their first wait.
const MAX_UNCLAIMED: usize = 10_000;

/// Announcements of completed requests. Polling ends when this is dropped.
#[derive(Debug)]
pub(crate) struct BatchPoll {
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

#[derive(Debug, Default)]
struct BatchPollState {
    waiters: HashMap<RequestId, oneshot::Sender<Announcement>>,
    unclaimed: Unclaimed,
    /// Requests whose waiters were dropped.
    abandoned: HashSet<RequestId>,
    /// Requests whose results were retrieved, to be reported so that the server may drop them.
    retrieved: BTreeSet<RequestId>,
    ended: Option<PollingEnd>,
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

/// Reason for the end of polling.
#[derive(Debug)]
enum PollingEnd {
    /// The server lacks the endpoint; each result is polled for individually.
    NotOffered,
    Failed(Error),
}

/// Outcome of waiting: the completion, or `None` if the result must be polled for individually.
type Announcement = Result<Option<CompletedFuture>>;

impl BatchPoll {
    /// Starts the polling task. It sends nothing until there is a waiter.
    pub(crate) fn start(
        transport: Arc<Transport>,
        target: FuturesTarget,
        adaptive_polling: bool,
        policy: RetryPolicy,
    ) -> Self {
        let shared = Arc::new(BatchPollShared::default());
        let polled = Arc::clone(&shared);
        let task = transport.clone().background().start(move || {
            let interval = PollInterval::new(adaptive_polling);
            let waiters = ReleaseWaiters(Arc::clone(&polled));
            poll(waiters, Arc::clone(&transport), target.clone(), interval, policy)
        });
        Self { shared, _task: task }
    }

    /// Waits until the result of a request is announced.
    ///
    /// # Errors
    /// If polling has ended with an error, or the server fails for longer or more often than the
    /// retry policy allows.
    pub(crate) async fn wait_for(&self, request_id: &RequestId) -> Announcement {
        let announcement = {
            let mut state = self.shared.lock();
            // Earlier announcements stay valid after polling has ended.
            if let Some(completion) = state.unclaimed.remove(request_id) {
                return Ok(Some(completion));
            }
            if let Some(end) = &state.ended {
                return end.announcement();
            }
            let (sender, announcement) = oneshot::channel();
            state.waiters.insert(request_id.clone(), sender);
            announcement
        };
        let _waiter = Waiter { shared: &self.shared, request_id };
        self.shared.changed.notify_one();
        announcement.await.unwrap_or(Ok(None))
    }

    /// Reports to the server, with the next poll, that a result was retrieved and may be dropped.
    pub(crate) fn mark_retrieved(&self, request_id: RequestId) {
        let mut state = self.shared.lock();
        if state.ended.is_none() {
            state.retrieved.insert(request_id);
            drop(state);
            self.shared.changed.notify_one();
        }
    }
}

/// Removes a waiter when it is dropped.
struct Waiter<'a> {
    shared: &'a BatchPollShared,
    request_id: &'a RequestId,
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        if state.waiters.remove(self.request_id).is_some() && state.ended.is_none() {
            // A cancelled request may never be announced, so the set must be bounded. After it is
            // cleared, announcements of abandoned requests go to `unclaimed`, which is bounded too.
            if state.abandoned.len() >= MAX_ABANDONED {
                state.abandoned.clear();
            }
            state.abandoned.insert(self.request_id.clone());
        }
    }
}

/// Releases the waiters when the polling task ends or its runtime does: each then polls for its
/// result individually.
struct ReleaseWaiters(Arc<BatchPollShared>);

impl Drop for ReleaseWaiters {
    fn drop(&mut self) {
        self.0.lock().waiters.clear();
    }
}

/// Polls while there is work, until an error ends polling or the task is aborted.
async fn poll(
    waiters: ReleaseWaiters,
    transport: Arc<Transport>,
    target: FuturesTarget,
    mut interval: PollInterval,
    policy: RetryPolicy,
) {
    let shared = &waiters.0;
    let (mut cursor, mut bad_requests) = (0, 0);
    let mut outage = OutageLimit::new(&policy);
    let retry_log = transport.retry_log();
    loop {
        let retrieved = shared.wait_for_work().await;
        let poll = RetrieveFutures::new(target.clone())
            .prev_cursor(cursor)
            .retrieved_request_ids(retrieved.iter().cloned().collect());
        let sent_at = Instant::now();
        let error = match transport.send(&poll, &RequestOptions::default()).await {
            Ok(response) => {
                (cursor, bad_requests) = (response.cursor, 0);
                outage.end();
                let empty = response.completions.is_empty();
                shared.announce(response, &retrieved);
                retry_log.poll_succeeded();
                if empty {
                    poll_interval::wait(interval.next_delay(sent_at)).await;
                }
                continue;
            }
            Err(error) => error,
        };
        let delay = match error.status() {
            Some(402) if policy.waits_for_billing() && transport.wait_for_billing() => {
                retry_log.poll_failed(&error, BILLING_DELAY);
                sleep(BILLING_DELAY).await;
                continue;
            }
            Some(400)
                if bad_requests < MAX_BAD_REQUESTS
                    && !error.declines_retries()
                    && (policy.retries_rejected_polls() || error.body().is_none()) =>
            {
                bad_requests += 1;
                FAILURE_DELAY
            }
            Some(404 | 405 | 501) => return shared.end(PollingEnd::NotOffered),
            Some(408) => {
                outage.end();
                sleep(FAILURE_DELAY).await;
                continue;
            }
            _ if error.is_retryable() => FAILURE_DELAY,
            _ => return shared.end(PollingEnd::Failed(error)),
        };
        if outage.record(sent_at, delay) {
            // Later waiters may find that the server has recovered.
            shared.fail_waiters(&error);
            outage.end();
        } else {
            retry_log.poll_failed(&error, delay);
        }
        sleep(delay).await;
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
                let _ = waiter.send(Ok(Some(completion)));
            } else if !state.abandoned.remove(request_id) {
                state.unclaimed.insert(completion);
            }
        }
    }

    /// Fails all current waiters.
    fn fail_waiters(&self, error: &Error) {
        for (_, waiter) in self.lock().waiters.drain() {
            let _ = waiter.send(Err(error.clone()));
        }
    }

    /// Ends polling: resolves all waiters, and forgets everything except unclaimed announcements.
    fn end(&self, end: PollingEnd) {
        let mut state = self.lock();
        for (_, waiter) in state.waiters.drain() {
            let _ = waiter.send(end.announcement());
        }
        *state = BatchPollState {
            ended: Some(end),
            unclaimed: std::mem::take(&mut state.unclaimed),
            ..BatchPollState::default()
        };
    }

    fn lock(&self) -> MutexGuard<'_, BatchPollState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PollingEnd {
    fn announcement(&self) -> Announcement {
        match self {
            Self::NotOffered => Ok(None),
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
