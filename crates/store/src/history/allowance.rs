//! [`Allowance`]: limits the rate at which samples are logged.

use tokio::time::Instant;

/// Number of sampling requests that are logged at once.
const BURST: f64 = 4_096.0;
/// Number of sampling requests per second that are logged continuously.
const RATE: f64 = 100.0;

/// Two token buckets, for requests and for bytes. A burst of up to [`BURST`] requests, such as a
/// group of rollouts, is logged completely. Of a longer flood, [`RATE`] requests per second are
/// logged.
pub(super) struct Allowance {
    requests: f64,
    bytes: f64,
    max_bytes: f64,
    refilled: Instant,
}

impl Allowance {
    /// Creates full buckets. `limit` is the maximum size of the log in bytes: a quarter of it is
    /// logged at once, and the whole log can be replaced within ten minutes.
    #[expect(clippy::cast_precision_loss, reason = "a limit needs no exact bytes")]
    pub(super) fn new(limit: u64) -> Self {
        let max_bytes = limit as f64 / 4.0;
        Self { requests: BURST, bytes: max_bytes, max_bytes, refilled: Instant::now() }
    }

    /// Takes tokens for one request of `bytes` bytes from both buckets. Returns false if a bucket
    /// has too few tokens.
    #[expect(clippy::cast_precision_loss, reason = "a limit needs no exact bytes")]
    pub(super) fn take(&mut self, bytes: usize) -> bool {
        let now = Instant::now();
        let seconds = now.saturating_duration_since(self.refilled).as_secs_f64();
        self.refilled = now;
        self.requests = (self.requests + seconds * RATE).min(BURST);
        self.bytes = (self.bytes + seconds * self.max_bytes / 150.0).min(self.max_bytes);
        let size = bytes as f64;
        if self.requests < 1.0 || self.bytes < size {
            return false;
        }
        self.requests -= 1.0;
        self.bytes -= size;
        true
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn bursts_pass_and_floods_are_thinned() {
        let mut allowance = Allowance::new(4 << 20);
        let taken = (0..10_000).filter(|_| allowance.take(10)).count();
        assert_eq!(taken, 4_096);
        tokio::time::advance(Duration::from_secs(2)).await;
        assert_eq!((0..10_000).filter(|_| allowance.take(10)).count(), 200);
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_are_limited_too() {
        let mut allowance = Allowance::new(4 << 20);
        assert!(!allowance.take((1 << 20) + 1));
        assert!(allowance.take(1 << 20));
        assert!(!allowance.take(1_000));
        tokio::time::advance(Duration::from_secs(150)).await;
        assert!(allowance.take(1 << 20));
    }
}
