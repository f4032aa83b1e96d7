//! Counters of executed work.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::histogram::Histograms;

/// Counters of the requests that backends execute.
#[derive(Debug, Default)]
pub struct WorkMetrics {
    /// Number of finished requests: requests that return a future, and inference requests.
    pub requests: AtomicMetric,
    pub failed_requests: AtomicMetric,
    /// Number of times that a request was returned to its queue after a fault.
    pub retries: AtomicMetric,
    pub trained_tokens: AtomicMetric,
    pub prompt_tokens: AtomicMetric,
    pub sampled_tokens: AtomicMetric,
    /// Time from the admission of a request until its outcome, by kind of request.
    pub request_seconds: Histograms,
}

impl WorkMetrics {
    /// Counts a finished request.
    pub fn count_request(&self, successful: bool) {
        self.requests.add(1);
        if !successful {
            self.failed_requests.add(1);
        }
    }
}

/// Atomic value of a counter or gauge.
#[derive(Debug, Default)]
pub struct AtomicMetric(AtomicU64);

impl AtomicMetric {
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub fn set(&self, n: usize) {
        self.0.store(u64::try_from(n).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
