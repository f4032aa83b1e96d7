//! [`PollInterval`]: delays between polls. [`OutageTimer`]: decides when to stop polling an
//! unreachable server.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::targets;

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

    /// Waits before the next poll, after one that was sent at `sent_at` and whose result was not
    /// ready.
    pub(super) async fn wait(&mut self, sent_at: Instant) {
        if !self.enabled || sent_at.elapsed() >= FAST_POLL {
            self.fast_polls = 0;
            return;
        }
        let delay = Duration::from_millis(250 << self.fast_polls.min(5)).min(MAX_DELAY);
        self.fast_polls += 1;
        sleep(delay.mul_f64(0.5 + 0.5 * fastrand::f64())).await;
    }
}

/// Measures how long the server has been unreachable.
#[derive(Debug)]
pub(super) struct OutageTimer {
    /// Duration of an outage after which polling ends; unlimited if `None`.
    timeout: Option<Duration>,
    started: Option<Instant>,
}

impl OutageTimer {
    pub(super) fn new(timeout: Option<Duration>) -> Self {
        Self { timeout, started: None }
    }

    /// Ends the outage, if there was one: the server responded.
    pub(super) fn end(&mut self) {
        self.started = None;
    }

    /// Records that a poll sent at `sent_at` got no response. Returns whether to give up.
    pub(super) fn record(&mut self, sent_at: Instant) -> bool {
        if self.started.is_none() {
            tracing::warn!(
                target: targets::OUTAGE,
                "connection lost while waiting for a result; polling continues"
            );
        }
        let duration = self.started.get_or_insert(sent_at).elapsed();
        self.timeout.is_some_and(|timeout| duration >= timeout)
    }
}
