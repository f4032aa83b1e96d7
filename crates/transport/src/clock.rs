//! [`WallClock`]: the time of day, which tests can replace.

use std::fmt;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// Source of the wall-clock time.
///
/// Expiry times of tokens and URLs are compared with the wall clock and not with a monotonic clock,
/// which stops while a computer is suspended.
#[derive(Clone)]
pub struct WallClock(Arc<dyn Fn() -> SystemTime + Send + Sync>);

impl WallClock {
    /// Creates a clock that reads the time from `now`.
    pub fn new(now: impl Fn() -> SystemTime + Send + Sync + 'static) -> Self {
        Self(Arc::new(now))
    }

    /// Returns the seconds since the Unix epoch, or 0 if the clock is set to a time before it.
    pub fn unix_now(&self) -> f64 {
        (self.0)().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
    }
}

impl Default for WallClock {
    /// Returns the clock of the system.
    fn default() -> Self {
        Self::new(SystemTime::now)
    }
}

impl fmt::Debug for WallClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WallClock")
    }
}
