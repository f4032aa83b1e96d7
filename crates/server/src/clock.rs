//! [`Clock`]: the source of all timestamps.
//!
//! Durations are measured with [`tokio::time::Instant`], which follows simulated time in tests.

use std::time::SystemTime;

use tinkex_wire::Timestamp;
use tokio::time::Instant;

use crate::record::UnixMicros;

/// Latest time that the API can represent, in microseconds since the Unix epoch: the end of 9999.
const MAX_TIME: UnixMicros = 253_402_300_799_999_999;

/// Wall time at the start of the server plus the monotonic time since. A wall clock that is set
/// while the server runs has no effect.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    start: UnixMicros,
    started: Instant,
}

impl Clock {
    /// Creates a clock that shows the time of the system.
    pub(crate) fn system() -> Self {
        Self::starting_at(Timestamp::from(SystemTime::now()).unix_micros())
    }

    /// Creates a clock that shows `start` now.
    pub(crate) fn starting_at(start: UnixMicros) -> Self {
        Self { start, started: Instant::now() }
    }

    /// Returns the current time.
    pub(crate) fn now(&self) -> UnixMicros {
        let elapsed = self.started.elapsed().as_micros();
        self.start.saturating_add(UnixMicros::try_from(elapsed).unwrap_or(UnixMicros::MAX))
    }

    /// Returns the current time in hours since the Unix epoch.
    pub(crate) fn hour(&self) -> i64 {
        self.now().div_euclid(3_600_000_000)
    }

    /// Returns the time in `seconds` seconds.
    pub(crate) fn in_seconds(&self, seconds: u64) -> UnixMicros {
        let micros = i64::try_from(seconds).unwrap_or(i64::MAX).saturating_mul(1_000_000);
        self.now().saturating_add(micros)
    }
}

/// Converts a time to the API's form. A time that it cannot represent becomes the nearest one that
/// it can.
pub(crate) fn timestamp(at: UnixMicros) -> Timestamp {
    let nearest = Timestamp::from_unix_micros(at.clamp(0, MAX_TIME));
    nearest.unwrap_or_else(|_| SystemTime::UNIX_EPOCH.into())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_clock_follows_simulated_time() {
        let clock = Clock::starting_at(7_200_000_000);
        assert_eq!((clock.now(), clock.hour()), (7_200_000_000, 2));
        tokio::time::advance(Duration::from_secs(3_600)).await;
        assert_eq!((clock.now(), clock.hour()), (10_800_000_000, 3));
        assert_eq!(clock.in_seconds(1), 10_801_000_000);
        assert_eq!(clock.in_seconds(u64::MAX), i64::MAX);
    }

    #[test]
    fn bug_a_time_beyond_the_year_9999_was_shown_as_the_present() {
        assert_eq!(timestamp(i64::MAX).to_string(), "9999-12-31T23:59:59.999999Z");
        assert_eq!(timestamp(i64::MIN).to_string(), "1970-01-01T00:00:00Z");
    }
}
