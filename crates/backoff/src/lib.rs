//! [`Backoff`]: exponential delays between attempts.
//!
//! The client, the gateway and the server repeat what may succeed later. They share this one rule.

#![forbid(unsafe_code)]

use std::time::Duration;

/// Exponential delay between attempts. The delay doubles with each failure up to a cap. Jitter
/// keeps clients that failed at the same time from retrying at the same time.
///
/// [`delay`](Self::delay) computes the delay of a given retry. [`next_delay`](Self::next_delay)
/// counts the failures itself until [`reset`](Self::reset).
///
/// ```
/// use std::time::Duration;
/// use tinkex_backoff::Backoff;
///
/// let mut backoff = Backoff::new(Duration::from_secs(1)).cap(Duration::from_secs(3));
/// let delays = [(); 3].map(|()| backoff.next_delay().as_secs());
/// assert_eq!(delays, [1, 2, 3]);
/// backoff.reset();
/// assert_eq!(backoff.next_delay(), Duration::from_secs(1));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Backoff {
    base: Duration,
    cap: Duration,
    jitter: Jitter,
    /// Number of failures since the last reset.
    failures: u32,
}

/// How a delay varies at random. The fraction is a number from 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Jitter {
    /// The delay does not vary.
    None,
    /// The delay is shortened by up to this fraction.
    Shorten(f64),
    /// The delay is lengthened by up to this fraction.
    Lengthen(f64),
    /// The delay is shortened or lengthened by up to this fraction, but never exceeds the cap.
    Vary(f64),
}

impl Backoff {
    /// Creates a backoff whose first delay is `base`, without cap and jitter.
    #[must_use]
    pub const fn new(base: Duration) -> Self {
        Self { base, cap: Duration::MAX, jitter: Jitter::None, failures: 0 }
    }

    /// Sets the longest delay before jitter.
    #[must_use]
    pub const fn cap(mut self, cap: Duration) -> Self {
        self.cap = cap;
        self
    }

    /// Sets how the delay varies at random.
    #[must_use]
    pub const fn jitter(mut self, jitter: Jitter) -> Self {
        self.jitter = jitter;
        self
    }

    /// Records a failure and returns the delay before the next attempt.
    pub fn next_delay(&mut self) -> Duration {
        let delay = self.delay(self.failures, fastrand::f64());
        self.failures = self.failures.saturating_add(1);
        delay
    }

    /// Records a success: the next delay is the base delay again.
    pub const fn reset(&mut self) {
        self.failures = 0;
    }

    /// Returns the delay before retry number `retry`, counted from 0. `random` is a number from 0
    /// to 1.
    #[must_use]
    pub fn delay(&self, retry: u32, random: f64) -> Duration {
        // Limit the exponent: 2^1000 is finite and exceeds every cap.
        let exponent = i32::try_from(retry.min(1000)).unwrap_or(1000);
        let cap = self.cap.as_secs_f64();
        let doubled = (self.base.as_secs_f64() * 2_f64.powi(exponent)).min(cap);
        let delay = match self.jitter {
            Jitter::None => doubled,
            Jitter::Shorten(fraction) => doubled * (1.0 - fraction * random),
            Jitter::Lengthen(fraction) => doubled * (1.0 + fraction * random),
            Jitter::Vary(fraction) => {
                (doubled * (1.0 + fraction * (2.0 * random - 1.0))).clamp(0.0, cap)
            }
        };
        Duration::try_from_secs_f64(delay).unwrap_or(self.cap)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn the_delay_doubles_up_to_the_cap_and_starts_again_after_a_reset() {
        let mut backoff = Backoff::new(SECOND).cap(30 * SECOND);
        let delays: Vec<_> = (0..7).map(|_| backoff.next_delay().as_secs()).collect();
        assert_eq!(delays, [1, 2, 4, 8, 16, 30, 30]);
        backoff.reset();
        assert_eq!(backoff.next_delay(), SECOND);
    }

    #[test]
    fn jitter_stays_within_its_fraction() {
        for (jitter, at_0, at_half, at_1) in [
            (Jitter::None, 8.0, 8.0, 8.0),
            (Jitter::Shorten(0.25), 8.0, 7.0, 6.0),
            (Jitter::Lengthen(0.5), 8.0, 10.0, 12.0),
            (Jitter::Vary(0.25), 6.0, 8.0, 10.0),
        ] {
            let backoff = Backoff::new(SECOND).cap(100 * SECOND).jitter(jitter);
            let delays = [0.0, 0.5, 1.0].map(|random| backoff.delay(3, random).as_secs_f64());
            assert_eq!(delays, [at_0, at_half, at_1], "{jitter:?}");
        }
        let capped = Backoff::new(SECOND).cap(8 * SECOND).jitter(Jitter::Vary(0.25));
        assert_eq!(capped.delay(9, 1.0), 8 * SECOND, "the cap holds for a varied delay");
    }

    #[test]
    fn large_numbers_do_not_overflow() {
        let unlimited = Backoff::new(SECOND);
        assert_eq!(unlimited.delay(u32::MAX, 0.0), Duration::MAX);
        let longest = Backoff::new(Duration::MAX).jitter(Jitter::Vary(1.0));
        assert_eq!(longest.delay(1000, 1.0), Duration::MAX);
        assert_eq!(Backoff::new(Duration::ZERO).delay(u32::MAX, 0.5), Duration::ZERO);
    }
}
