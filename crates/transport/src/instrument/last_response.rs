//! [`LastResponse`]: when the server last responded to any request.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

/// Time of the last response. Responses are recorded without a lock.
pub(crate) struct LastResponse {
    created: Instant,
    /// Milliseconds from `created` to the last response.
    millis: AtomicU64,
}

impl LastResponse {
    pub(crate) fn new() -> Self {
        Self { created: Instant::now(), millis: AtomicU64::new(0) }
    }

    /// Records a response.
    pub(crate) fn record(&self) {
        self.millis.fetch_max(self.age(), Ordering::Relaxed);
    }

    /// Returns the time since the last response, or since this value was created.
    pub(crate) fn elapsed(&self) -> Duration {
        // Saturating: another thread may record a response after this thread has computed the age.
        Duration::from_millis(self.age().saturating_sub(self.millis.load(Ordering::Relaxed)))
    }

    fn age(&self) -> u64 {
        u64::try_from(self.created.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}
