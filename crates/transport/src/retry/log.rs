//! [`RetryLog`]: events and metrics of retries.
//!
//! The first retry of a call is logged as a warning, so that a program that only prints warnings
//! shows why it waits. The end of a retried call is logged at the info level, further retries at
//! the debug level. Warnings are deduplicated: ten thousand samples in the same outage log one
//! warning.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::config::BaseUrl;
use crate::error::{Error, Result};
use crate::targets;

use super::call_progress::CallProgress;
use crate::http::Lane;
use crate::instrument;

/// Time during which a warning with the same lane and status is not repeated.
const WARNING_INTERVAL: Duration = Duration::from_secs(1);

/// Reason for another attempt after a failure. The names of the variants appear in events and
/// metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryReason {
    /// Same round, after a temporary failure.
    Retry,
    /// New round of retries.
    Round,
    /// After the shared backoff that a 429 started.
    Backoff,
    /// After a wait for a billing problem (402).
    Billing,
    /// The sample is submitted under a new sequence number.
    Resubmit,
    /// Another poll for the result, after a failed one.
    Poll,
}

impl RetryReason {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Retry => "retry",
            Self::Round => "round",
            Self::Backoff => "backoff",
            Self::Billing => "billing",
            Self::Resubmit => "resubmit",
            Self::Poll => "poll",
        }
    }
}

/// Emits the events of retries for one server.
#[derive(Debug)]
pub struct RetryLog {
    base_url: String,
    /// Time, lane and status of the latest warning.
    last_warning: Mutex<Option<(Instant, Lane, Option<u16>)>>,
    /// Whether the latest poll for a result failed. All pending requests share it, so that an
    /// outage is reported once.
    polls_fail: AtomicBool,
    /// Whether the loss of the connection was logged with target [`targets::OUTAGE`], so that its
    /// end is logged too.
    is_outage: AtomicBool,
}

impl RetryLog {
    pub(crate) fn new(base_url: &BaseUrl) -> Self {
        let base_url = base_url.as_str().to_owned();
        let polls_fail = AtomicBool::new(false);
        let is_outage = AtomicBool::new(false);
        Self { base_url, last_warning: Mutex::new(None), polls_fail, is_outage }
    }

    /// Records in `call` and in the log that another attempt follows `error` after `delay`.
    pub fn retry(
        &self,
        call: &mut CallProgress,
        lane: Lane,
        error: Error,
        delay: Duration,
        reason: RetryReason,
    ) {
        instrument::count_retry(reason.as_str());
        let status = error.status();
        let seconds = delay.as_secs_f64();
        let attempt = call.attempts();
        let first = call.retries() == 0;
        let base_url = &*self.base_url;
        let reason = reason.as_str();
        if first && self.is_new_warning(lane, status) {
            call.warned = true;
            let lane = lane.as_str();
            tracing::warn!(
                target: targets::RETRY, lane, base_url, reason, %error, status, seconds, attempt,
                "retrying request"
            );
        } else {
            let lane = lane.as_str();
            tracing::debug!(
                target: targets::RETRY, lane, base_url, reason, %error, status, seconds, attempt,
                "retrying request"
            );
        }
        call.record_failure(error);
    }

    /// Logs the end of a call, if the call failed, or succeeded after retries.
    ///
    /// Call this where the whole call ends, not where one of its requests ends: after a failed
    /// submission a sample may be resubmitted.
    pub fn ended<T>(&self, call: &CallProgress, lane: Lane, result: &Result<T>) {
        match result {
            Ok(_) => self.succeeded(call, lane),
            Err(error) => self.gave_up(call, lane, error),
        }
    }

    fn succeeded(&self, call: &CallProgress, lane: Lane) {
        if call.retries() == 0 {
            return;
        }
        let attempts = call.attempts();
        let elapsed = call.elapsed().as_secs_f64();
        let lane = lane.as_str();
        let base_url = &*self.base_url;
        if call.warned {
            tracing::info!(
                target: targets::RETRY, lane, base_url, attempts, elapsed,
                "request succeeded after retries"
            );
        } else {
            tracing::debug!(
                target: targets::RETRY, lane, base_url, attempts, elapsed,
                "request succeeded after retries"
            );
        }
    }

    fn gave_up(&self, call: &CallProgress, lane: Lane, error: &Error) {
        let attempts = call.attempts();
        let elapsed = call.elapsed().as_secs_f64();
        let lane = lane.as_str();
        let base_url = &*self.base_url;
        if call.warned {
            tracing::info!(
                target: targets::RETRY, lane, base_url, %error, attempts, elapsed, "giving up"
            );
        } else {
            tracing::debug!(
                target: targets::RETRY, lane, base_url, %error, attempts, elapsed, "giving up"
            );
        }
    }

    /// Logs a failed poll for a result: as a warning if the polls of this server succeeded before,
    /// with target [`targets::OUTAGE`] if the server did not respond. Further failed polls are
    /// events of [`targets::POLL`].
    pub fn poll_failed(&self, error: &Error, delay: Duration) {
        instrument::count_retry(RetryReason::Poll.as_str());
        let lane = Lane::Poll;
        let status = error.status();
        if self.polls_fail.swap(true, Ordering::Relaxed) || !self.is_new_warning(lane, status) {
            return;
        }
        let lane = lane.as_str();
        let base_url = &*self.base_url;
        let reason = RetryReason::Poll.as_str();
        if status.is_none() {
            self.is_outage.store(true, Ordering::Relaxed);
            tracing::warn!(
                target: targets::OUTAGE, base_url, %error,
                "connection lost while waiting for a result; polling continues"
            );
        } else {
            // Only the first failed poll of a series is logged.
            let seconds = delay.as_secs_f64();
            let attempt = 1;
            tracing::warn!(
                target: targets::RETRY, lane, base_url, reason, %error, status, seconds, attempt,
                "retrying request"
            );
        }
    }

    /// Logs the end of an outage, if one was logged.
    pub fn poll_succeeded(&self) {
        // Fast path: most polls succeed, and a load is cheaper than a swap.
        if !self.polls_fail.load(Ordering::Relaxed) {
            return;
        }
        self.polls_fail.store(false, Ordering::Relaxed);
        if self.is_outage.swap(false, Ordering::Relaxed) {
            let base_url = &*self.base_url;
            tracing::info!(target: targets::OUTAGE, base_url, "polls for results succeed again");
        }
    }

    /// Returns whether no warning with this lane and status was logged within the last second.
    fn is_new_warning(&self, lane: Lane, status: Option<u16>) -> bool {
        let mut last = self.last_warning.lock();
        let now = Instant::now();
        let repeated = |(at, last_lane, last_status): (Instant, Lane, Option<u16>)| {
            (last_lane, last_status) == (lane, status) && now - at < WARNING_INTERVAL
        };
        if last.is_some_and(repeated) {
            return false;
        }
        *last = Some((now, lane, status));
        true
    }
}
