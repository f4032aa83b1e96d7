//! [`SharedBackoff`]: the delay after a 429, shared by all clients of one server and API key.
//!
//! The [registry](super::backoff_registry) decides which clients share a backoff.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::sync::{AtomicU64, Ordering};

/// Time after the end of a backoff during which it counts as recent, and admission control keeps
/// its reduced limits.
const RECENT: Duration = Duration::from_secs(10);
/// Longest delay by which one `retry-after` extends a backoff, and longest `retry-after` that the
/// Python SDK honours.
pub(crate) const LONG_RETRY_AFTER: Duration = Duration::from_secs(60);

/// Point in time before which no request may be sent.
#[derive(Debug)]
pub struct SharedBackoff {
    epoch: Instant,
    /// End of the latest backoff, in microseconds since `epoch`; 0 if there was none.
    until: AtomicU64,
}

/// The backoff that applies to one request.
#[derive(Clone, Debug)]
pub struct RequestBackoff {
    /// Delay that all requests to the server with the same credential share.
    pub backoff: Arc<SharedBackoff>,
    /// Estimated size of the request in bytes.
    pub bytes: u64,
}

impl RequestBackoff {
    /// Starts a backoff after a 429. It lasts `retry_after` if set, else 1 second, or 5 seconds for
    /// requests above 128 KiB, but at most 60 seconds: a server that asks one call to wait for an
    /// hour must not stop all clients of the key for an hour.
    pub(crate) fn on_rate_limit(&self, retry_after: Option<Duration>) {
        self.backoff.start(self.duration(retry_after).min(LONG_RETRY_AFTER));
    }

    /// Returns the duration for which the request would wait if
    /// [`on_rate_limit`](Self::on_rate_limit) were called now: until the end of the backoff, and at
    /// least `retry_after`.
    pub(crate) fn wait_after_rate_limit(&self, retry_after: Option<Duration>) -> Duration {
        self.backoff.remaining().max(self.duration(retry_after))
    }

    fn duration(&self, retry_after: Option<Duration>) -> Duration {
        /// Size in bytes above which a request gets the longer backoff.
        const LARGE_BYTES: u64 = 128 * 1024;
        let default = Duration::from_secs(if self.bytes <= LARGE_BYTES { 1 } else { 5 });
        retry_after.unwrap_or(default)
    }
}

impl Default for SharedBackoff {
    fn default() -> Self {
        Self::new()
    }
}

impl SharedBackoff {
    /// Creates a backoff that is not active.
    pub fn new() -> Self {
        Self { epoch: Instant::now(), until: AtomicU64::new(0) }
    }

    /// Backs off for `duration` from now. Never shortens an active backoff.
    pub fn start(&self, duration: Duration) {
        let end = Instant::now().saturating_duration_since(self.epoch) + duration;
        let micros = u64::try_from(end.as_micros()).unwrap_or(u64::MAX).max(1);
        self.until.fetch_max(micros, Ordering::AcqRel);
    }

    /// Returns when the latest backoff ends or ended.
    pub fn until(&self) -> Option<Instant> {
        match self.until.load(Ordering::Acquire) {
            0 => None,
            micros => Some(self.epoch + Duration::from_micros(micros)),
        }
    }

    /// Returns the remaining time of an active backoff, else zero.
    pub fn remaining(&self) -> Duration {
        self.until().map_or(Duration::ZERO, |until| until.saturating_duration_since(Instant::now()))
    }

    /// Returns the remaining time of the active backoff, if any.
    pub fn active(&self) -> Option<Duration> {
        Some(self.remaining()).filter(|remaining| !remaining.is_zero())
    }

    /// Returns whether a backoff is active or ended less than 10 seconds ago.
    pub fn is_recent(&self) -> bool {
        is_recent(self.until(), Instant::now())
    }
}

/// Returns whether a backoff that ends at `until` is active at `now` or ended less than [`RECENT`]
/// before it.
pub(crate) fn is_recent(until: Option<Instant>, now: Instant) -> bool {
    until.is_some_and(|until| now.saturating_duration_since(until) < RECENT)
}
