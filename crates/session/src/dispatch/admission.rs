//! Admission control for sampling requests.
//!
//! A request needs a concurrency permit and a share of the in-flight byte budget before it is sent.
//! While a backoff is active or recent (the server responded with 429) the limits are tighter: 10
//! concurrent requests instead of 400, and each byte counts 20 times. Otherwise all waiting
//! requests would be sent at once when the backoff ends. Permits are released when the server has
//! accepted the request, not when the sample is finished: results are polled without a permit.

use std::sync::Arc;

use crate::transport::retry::shared_backoff::SharedBackoff;

use super::limit::{Limit, Permit};

/// Maximum number of sampling requests being submitted at the same time.
const MAX_CONCURRENT: u32 = 400;
/// Replaces [`MAX_CONCURRENT`] while a backoff is active or recent.
const MAX_CONCURRENT_AFTER_BACKOFF: u32 = 10;
/// Factor applied to a request's size while a backoff is active or recent.
const BYTE_PENALTY_AFTER_BACKOFF: u64 = 20;

/// Limits how many sampling requests, and how many bytes of them, are in flight.
#[derive(Debug)]
pub struct Admission {
    concurrency: Arc<Limit>,
    reduced_concurrency: Arc<Limit>,
    bytes_in_flight: Arc<Limit>,
    backoff: Arc<SharedBackoff>,
}

/// Permission to submit one request. Dropping this value releases the permits.
#[derive(Debug)]
pub struct SubmitPermit {
    _concurrency: Permit,
    _reduced_concurrency: Option<Permit>,
    _bytes_in_flight: Permit,
}

impl Admission {
    /// Creates an admission control with the default concurrency limits and a budget of `max_bytes`
    /// bytes in flight.
    pub(crate) fn new(max_bytes: u64, backoff: Arc<SharedBackoff>) -> Self {
        Self::with_limits(MAX_CONCURRENT, MAX_CONCURRENT_AFTER_BACKOFF, max_bytes, backoff)
    }

    pub(crate) fn with_limits(
        max_concurrent: u32,
        max_concurrent_after_backoff: u32,
        max_bytes: u64,
        backoff: Arc<SharedBackoff>,
    ) -> Self {
        Self {
            concurrency: Limit::concurrency(max_concurrent),
            reduced_concurrency: Limit::concurrency(max_concurrent_after_backoff),
            bytes_in_flight: Limit::bytes(max_bytes),
            backoff,
        }
    }

    /// Waits until a request of `bytes` bytes may be submitted.
    ///
    /// Cancel safe: dropping the future releases all permits that it had acquired.
    pub async fn acquire(&self, bytes: u64) -> SubmitPermit {
        let concurrency = self.concurrency.acquire(1).await;
        let reduced_concurrency = if self.backoff.is_recent() {
            Some(self.reduced_concurrency.acquire(1).await)
        } else {
            None
        };
        let factor = if self.backoff.is_recent() { BYTE_PENALTY_AFTER_BACKOFF } else { 1 };
        let bytes_in_flight = self.bytes_in_flight.acquire(bytes.saturating_mul(factor)).await;
        SubmitPermit {
            _concurrency: concurrency,
            _reduced_concurrency: reduced_concurrency,
            _bytes_in_flight: bytes_in_flight,
        }
    }

    /// Returns the remaining budget of bytes in flight, which may be negative.
    #[cfg(test)]
    pub(super) fn bytes_remaining(&self) -> i64 {
        self.bytes_in_flight.remaining()
    }

    /// Returns the backoff shared by all clients of this server and API key in the process.
    pub fn backoff(&self) -> &Arc<SharedBackoff> {
        &self.backoff
    }
}
