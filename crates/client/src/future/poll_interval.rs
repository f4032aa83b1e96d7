//! [`PollInterval`]: delays between polls. [`OutageLimit`]: decides when to stop polling a failing
//! server.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::transport::retry_policy::RetryPolicy;

/// Response time below which the server did not hold the poll.
const FAST_POLL: Duration = Duration::from_secs(1);
/// Longest delay before the next poll.
const MAX_DELAY: Duration = Duration::from_secs(5);

/// Delay between polls.
///
/// The server should hold a poll until the result is ready. If it responds at once, polls are
/// delayed, by 0.25 seconds at first and doubling up to 5 seconds, with jitter.
#[derive(Debug)]
pub(super) struct PollInterval {
    enabled: bool,
    fast_polls: u32,
}

impl PollInterval {
    pub(super) fn new(enabled: bool) -> Self {
        Self { enabled, fast_polls: 0 }
    }

    /// Returns the delay before the next poll, after one that was sent at `sent_at` and whose
    /// result was not ready.
    pub(super) fn next_delay(&mut self, sent_at: Instant) -> Duration {
        if !self.enabled || sent_at.elapsed() >= FAST_POLL {
            self.fast_polls = 0;
            return Duration::ZERO;
        }
        let delay = Duration::from_millis(250 << self.fast_polls.min(5)).min(MAX_DELAY);
        self.fast_polls += 1;
        delay.mul_f64(0.5 + 0.5 * fastrand::f64())
    }
}

/// Waits before the next poll. A delay of zero does not wait for the timer's next tick.
pub(super) async fn wait(delay: Duration) {
    if !delay.is_zero() {
        sleep(delay).await;
    }
}

/// Decides when to stop polling a server that is unreachable or fails, by the retry policy.
#[derive(Debug)]
pub(super) struct OutageLimit {
    /// Number of consecutive failed polls after which polling ends.
    max_failures: u32,
    /// Duration of an outage after which no poll starts; unlimited if `None`.
    time_limit: Option<Duration>,
    failures: u32,
    started: Option<Instant>,
}

impl OutageLimit {
    pub(super) fn new(policy: &RetryPolicy) -> Self {
        let (max_failures, time_limit) = (policy.attempt_limit(), policy.time_limit());
        Self { max_failures, time_limit, failures: 0, started: None }
    }

    /// Ends the outage, if there was one: the server processed a poll.
    pub(super) fn end(&mut self) {
        (self.failures, self.started) = (0, None);
    }

    /// Records a failed poll that was sent at `sent_at`. Returns whether to give up instead of
    /// polling again after `delay`.
    pub(super) fn record(&mut self, sent_at: Instant, delay: Duration) -> bool {
        self.failures = self.failures.saturating_add(1);
        let duration = self.started.get_or_insert(sent_at).elapsed();
        self.failures >= self.max_failures
            || self.time_limit.is_some_and(|limit| duration.saturating_add(delay) > limit)
    }
}
