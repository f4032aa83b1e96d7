//! [`ActiveSamples`]: limits the number of concurrent samples, and detects when no sample has
//! succeeded for the progress timeout.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tinkex_wire::ClientConfig;
use tokio::time::{Instant, sleep_until};

use crate::dispatch::{Limit, Permit};

/// Samples of one client that are in progress.
#[derive(Debug)]
pub(super) struct ActiveSamples {
    concurrency: Option<Arc<Limit>>,
    /// Whether samples fail if none has succeeded for the progress timeout.
    checks_progress: bool,
    epoch: Instant,
    /// Time of the last success, in microseconds since `epoch`.
    last_success: AtomicU64,
}

impl ActiveSamples {
    /// Applies the lower of the server's and the caller's concurrency limits.
    pub(super) fn new(config: &ClientConfig, max_concurrent: Option<u32>) -> Self {
        // The server limits concurrent samples to bound the number of open polls. The limit does
        // not apply to a server with batch polls, where one poll serves all samples.
        let server_limit =
            (!config.sample_use_retrieve_futures).then_some(config.sample_max_concurrent_requests);
        let limit = [server_limit, max_concurrent.map(u64::from)].into_iter().flatten().min();
        let concurrency =
            limit.map(|limit| Limit::concurrency(u32::try_from(limit).unwrap_or(u32::MAX).max(1)));
        Self {
            concurrency,
            checks_progress: config.sample_enable_stuck_detection,
            epoch: Instant::now(),
            last_success: AtomicU64::new(0),
        }
    }

    /// Waits for a concurrency permit. The progress timeout counts from the moment at which the
    /// permit is acquired.
    pub(super) async fn start(&self) -> ActiveSample<'_> {
        let permit = match &self.concurrency {
            Some(concurrency) => Some(concurrency.acquire(1).await),
            None => None,
        };
        ActiveSample { samples: self, start: Instant::now(), permit }
    }

    /// Restarts the progress timeout of all samples.
    pub(super) fn record_success(&self) {
        let micros = self.epoch.elapsed().as_micros();
        self.last_success.fetch_max(u64::try_from(micros).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    fn last_success(&self) -> Instant {
        self.epoch + Duration::from_micros(self.last_success.load(Ordering::Relaxed))
    }
}

/// One sample in progress. Dropping it releases its concurrency permit.
pub(super) struct ActiveSample<'a> {
    samples: &'a ActiveSamples,
    start: Instant,
    permit: Option<Permit>,
}

impl ActiveSample<'_> {
    /// Returns the concurrency permit, for a sample that has a timeout of its own; `None` if the
    /// number of samples is not limited.
    pub(super) fn into_permit(self) -> Option<Permit> {
        self.permit
    }

    /// Waits until no sample has succeeded for `timeout`, counted from the start of this sample at
    /// the earliest. Never resolves if the server disables the check.
    pub(super) async fn progress_timeout(&self, timeout: Duration) {
        loop {
            let last = self.start.max(self.samples.last_success());
            let deadline = last.checked_add(timeout).filter(|_| self.samples.checks_progress);
            let Some(deadline) = deadline else { return std::future::pending().await };
            if deadline <= Instant::now() {
                return;
            }
            sleep_until(deadline).await;
        }
    }
}
