//! [`RunningTime`]: how long the process has run, excluding interruptions.

use std::time::Duration;

use tokio::time::Instant;

/// Maximum time between two ticks that counts as running time. A running process ticks more often,
/// even under load.
const MAX_STEP: Duration = Duration::from_secs(3);

/// Smallest interruption after which clients get a grace period. A busy machine delays ticks by
/// less.
pub(super) const MIN_GAP: Duration = Duration::from_secs(10);

/// Sum of the times between ticks, each limited to [`MAX_STEP`]. A process that does not run does
/// not tick: it was stopped with SIGSTOP, or its cgroup was frozen.
#[derive(Debug)]
pub(super) struct RunningTime {
    /// Running time at the last tick.
    total: Duration,
    last_tick: Instant,
    /// Running time at the end of the last interruption.
    gap_end: Option<Duration>,
}

impl RunningTime {
    pub(super) fn new(now: Instant) -> Self {
        Self { total: Duration::ZERO, last_tick: now, gap_end: None }
    }

    /// Returns the running time. The running time never decreases: a later tick counts at least as
    /// much.
    pub(super) fn at(&self, now: Instant) -> Duration {
        self.total + now.saturating_duration_since(self.last_tick).min(MAX_STEP)
    }

    /// Counts the time since the last tick. Returns the part of this time that did not count.
    pub(super) fn tick(&mut self, now: Instant) -> Duration {
        let elapsed = now.saturating_duration_since(self.last_tick);
        self.total = self.at(now);
        // Two threads may tick, and the thread that read its clock first may count second. If
        // `last_tick` went back, the time between the two readings would count twice.
        self.last_tick = self.last_tick.max(now);
        elapsed.saturating_sub(MAX_STEP)
    }

    /// Marks the last tick as the end of an interruption.
    pub(super) fn end_gap(&mut self) {
        self.gap_end = Some(self.total);
    }

    /// Returns the running time since the end of the last interruption, if there was one.
    pub(super) fn since_gap(&self, now: Instant) -> Option<Duration> {
        self.gap_end.map(|end| self.at(now).saturating_sub(end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tick_with_an_earlier_reading_counts_no_time_twice() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut running = RunningTime::new(start);
        assert_eq!(running.tick(at(2)), Duration::ZERO);
        assert_eq!(running.tick(at(1)), Duration::ZERO);
        assert_eq!(running.at(at(2)), Duration::from_secs(2));
        assert_eq!(running.tick(at(3)), Duration::ZERO);
        assert_eq!(running.at(at(3)), Duration::from_secs(3));
    }
}
