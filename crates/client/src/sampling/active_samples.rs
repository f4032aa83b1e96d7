//! Limits the samples in progress, and fails them if none has succeeded for too long.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tinkex_wire::ClientConfig;
use tokio::time::{Instant, sleep_until};

use crate::dispatch::{Limit, Permit};

use super::retry::SamplingRetry;

/// Samples of one client that are in progress.
#[derive(Debug)]
pub(super) struct ActiveSamples {
    concurrency: Option<Arc<Limit>>,
    /// Time without a successful sample after which samples fail. `None` disables the check.
    progress_timeout: Option<Duration>,
    epoch: Instant,
    /// Time of the last success, in microseconds since `epoch`.
    last_success: AtomicU64,
}

impl ActiveSamples {
    /// Applies the lower of the server's and the caller's concurrency limits.
    pub(super) fn new(config: &ClientConfig, retry: &SamplingRetry) -> Self {
        // The server's limit bounds the number of open polls. With a batch poll there is one poll
        // for all samples, so it does not apply.
        let server_limit =
            (!config.sample_use_retrieve_futures).then_some(config.sample_max_concurrent_requests);
        let limit = [server_limit, retry.concurrency().map(u64::from)].into_iter().flatten().min();
        let concurrency =
            limit.map(|limit| Limit::concurrency(u32::try_from(limit).unwrap_or(u32::MAX).max(1)));
        let progress_timeout = config.sample_enable_stuck_detection.then(|| retry.progress_limit());
        Self {
            concurrency,
            progress_timeout,
            epoch: Instant::now(),
            last_success: AtomicU64::new(0),
        }
    }

    /// Waits for a concurrency permit. The progress timeout starts afterwards.
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

    /// Waits until no sample has succeeded for the progress timeout, counted from the start of this
    /// sample at the earliest, and returns the timeout. Never resolves if the timeout is disabled.
    pub(super) async fn progress_timeout(&self) -> Duration {
        loop {
            let last = self.start.max(self.samples.last_success());
            let timeout = self.samples.progress_timeout;
            let deadline = timeout.and_then(|timeout| last.checked_add(timeout));
            let Some(deadline) = deadline else { return std::future::pending().await };
            if deadline <= Instant::now() {
                return timeout.unwrap_or_default();
            }
            sleep_until(deadline).await;
        }
    }
}
