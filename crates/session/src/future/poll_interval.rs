//! [`PollInterval`]: delays between polls. [`OutageLimit`]: decides when to stop polling a failing
//! server.

use std::time::Duration;

use tinkex_backoff::{Backoff, Jitter};
use tokio::time::{Instant, sleep};

use crate::transport::CallOptions;

/// Response time below which a poll counts as not held open by the server.
const FAST_POLL: Duration = Duration::from_secs(1);
/// Delays between a fast poll and the next poll.
const FAST_POLL_BACKOFF: Backoff = Backoff::new(Duration::from_millis(250))
    .cap(Duration::from_secs(5))
    .jitter(Jitter::Shorten(0.5));

/// Delay between polls.
///
/// The server should hold a poll open until the result is ready. If the server responds at once
/// instead, the next poll is delayed: by 0.25 seconds at first, doubling up to 5 seconds, with
/// jitter.
#[derive(Debug)]
pub(super) struct PollInterval {
    enabled: bool,
    backoff: Backoff,
}

impl PollInterval {
    pub(super) fn new(enabled: bool) -> Self {
        Self { enabled, backoff: FAST_POLL_BACKOFF }
    }

    /// Returns the delay before the next poll, after a poll that was sent at `sent_at` and reported
    /// that the result is not ready.
    pub(super) fn next_delay(&mut self, sent_at: Instant) -> Duration {
        if !self.enabled || sent_at.elapsed() >= FAST_POLL {
            self.backoff.reset();
            return Duration::ZERO;
        }
        self.backoff.next_delay()
    }
}

/// Waits before the next poll. Returns at once if the delay is zero: a timer would wait for its
/// next tick.
pub(super) async fn wait(delay: Duration) {
    if !delay.is_zero() {
        sleep(delay).await;
    }
}

/// Limits of an outage, from the options of the call: how many polls in a row may fail, and for how
/// long.
#[derive(Debug)]
pub(super) struct OutageLimit {
    /// Number of consecutive failed polls after which polling ends.
    max_failures: u32,
    /// Duration of an outage after which no poll starts; unlimited if `None`.
    time_limit: Option<Duration>,
    /// Number of failed polls in the current outage.
    failures: u32,
    /// Start of the current outage; `None` if the last poll succeeded.
    started: Option<Instant>,
}

impl OutageLimit {
    pub(super) fn new(options: &CallOptions) -> Self {
        Self {
            max_failures: options.attempt_limit(),
            time_limit: options.retry_limit(),
            failures: 0,
            started: None,
        }
    }

    /// Ends the outage, if any. Call it after the server has processed a poll.
    pub(super) fn end(&mut self) {
        self.failures = 0;
        self.started = None;
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
