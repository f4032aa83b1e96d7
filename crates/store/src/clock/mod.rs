//! [`Clock`]: the source of all timestamps, and of the time that expiry timers measure.
//!
//! Other durations are measured with [`tokio::time::Instant`], which follows simulated time in
//! tests.

mod manual;
mod restart;
mod running;
mod system;

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, SystemTime};

use parking_lot::{Mutex, MutexGuard};
use tinkex_wire::Timestamp;
use tokio::time::Instant;

pub use self::manual::ManualClocks;
use self::restart::start_time;
use self::running::RunningTime;
pub use self::system::OperatingSystem;
pub use self::system::SystemClocks;
use crate::log;
use crate::record::{BootTime, ClockRecord, UnixMicros};

/// Interval at which [`Clock::tick`] must be called.
pub const TICK: Duration = Duration::from_secs(1);

/// Maximum time between the readings of two clocks that count as simultaneous.
const MAX_READING: Duration = Duration::from_millis(50);

/// Latest time that the API can represent, in microseconds since the Unix epoch: the end of 9999.
const MAX_TIME: UnixMicros = 253_402_300_799_999_999;

/// Clock of the server: the wall time at the start of the server plus the time since the start.
/// Setting the wall clock while the server runs has no effect. Setting it while the server is down
/// has no effect either, unless the machine is booted before the next start.
#[derive(Clone)]
pub struct Clock(Arc<ClockState>);

struct ClockState {
    system: Arc<dyn SystemClocks>,
    boot_id: Option<String>,
    /// Wall time at the start of the server.
    start: UnixMicros,
    started: Instant,
    /// Microseconds for which the machine was suspended since the start. `Instant` does not count
    /// the time of a suspension.
    suspended: AtomicI64,
    /// Time since boot at the start, in microseconds, if it is known.
    boot_start: Option<UnixMicros>,
    running: Mutex<RunningTime>,
}

impl Clock {
    /// Creates a clock that continues after the last time that the server stored: `last`, or
    /// `newest`, the newest time of any stored row.
    pub fn resume(
        system: Arc<dyn SystemClocks>,
        last: Option<&ClockRecord>,
        newest: Option<UnixMicros>,
    ) -> Self {
        let wall = system.wall();
        let boot_id = system.boot_id();
        let (started, boot_start) = read_clocks(&*system);
        let boot = boot_id.clone().zip(boot_start);
        let boot = boot.map(|(id, elapsed)| BootTime { id, elapsed });
        let start = start_time(last, newest, wall, boot.as_ref());
        let difference = wall.saturating_sub(start) / 1_000_000;
        if difference.abs() >= 60 {
            tracing::warn!(
                target: log::STORAGE,
                seconds = difference,
                "the clock of the system was set; the server continues with its own time, which \
                 differs by this many seconds"
            );
        }
        Self(Arc::new(ClockState {
            system,
            boot_id,
            start,
            started,
            suspended: AtomicI64::new(0),
            boot_start,
            running: Mutex::new(RunningTime::new(started)),
        }))
    }

    /// Returns the current time.
    pub fn now(&self) -> UnixMicros {
        self.at(Instant::now())
    }

    fn at(&self, now: Instant) -> UnixMicros {
        let elapsed = micros(now.saturating_duration_since(self.0.started));
        let suspended = self.0.suspended.load(Ordering::Relaxed);
        self.0.start.saturating_add(elapsed).saturating_add(suspended)
    }

    /// Returns the current time in hours since the Unix epoch.
    pub fn hour(&self) -> i64 {
        self.now().div_euclid(3_600_000_000)
    }

    /// Returns the time `seconds` seconds from now.
    pub fn in_seconds(&self, seconds: u64) -> UnixMicros {
        let micros = i64::try_from(seconds).unwrap_or(i64::MAX).saturating_mul(1_000_000);
        self.now().saturating_add(micros)
    }

    /// Returns the time for which the process has run since the start. The running time does not
    /// advance while the process is stopped, its cgroup is frozen or the machine is suspended:
    /// clients cannot send requests then, so their sessions must not expire.
    pub fn running(&self) -> Duration {
        self.lock().at(Instant::now())
    }

    /// Returns the running time since the end of the last interruption of at least
    /// `MIN_GAP`; `None` if there was none.
    pub fn since_gap(&self) -> Option<Duration> {
        self.lock().since_gap(Instant::now())
    }

    /// Counts the running time since the last tick. Returns the length of an interruption since the
    /// last tick, if it was at least `MIN_GAP`.
    pub fn tick(&self) -> Option<Duration> {
        let (now, boot) = read_clocks(&*self.0.system);
        let suspended = self.count_suspension(now, boot);
        let mut running = self.lock();
        let gap = running.tick(now).max(suspended);
        if gap >= running::MIN_GAP {
            running.end_gap();
            return Some(gap);
        }
        None
    }

    /// Adds the time for which the machine was suspended since the last call, and returns it.
    fn count_suspension(&self, now: Instant, boot: Option<UnixMicros>) -> Duration {
        let (Some(start), Some(boot)) = (self.0.boot_start, boot) else {
            return Duration::ZERO;
        };
        let ran = micros(now.saturating_duration_since(self.0.started));
        let suspended = boot.saturating_sub(start).saturating_sub(ran);
        let before = self.0.suspended.load(Ordering::Relaxed);
        let more = suspended.saturating_sub(before);
        if more < 2 * micros(MAX_READING) {
            return Duration::ZERO;
        }
        self.0.suspended.store(suspended, Ordering::Relaxed);
        Duration::from_micros(more.unsigned_abs())
    }

    /// Returns the record from which the next start continues.
    pub fn record(&self) -> ClockRecord {
        let (now, boot) = read_clocks(&*self.0.system);
        // Only the time since boot includes a suspension since the last tick. Without it, the clock
        // of the next start would be behind by the length of the suspension.
        let since_start = boot.zip(self.0.boot_start).map(|(now, start)| now.saturating_sub(start));
        let by_boot = self.0.start.saturating_add(since_start.unwrap_or(0));
        let boot = self.0.boot_id.clone().zip(boot);
        let boot = boot.map(|(id, elapsed)| BootTime { id, elapsed });
        ClockRecord { time: self.at(now).max(by_boot), boot }
    }

    fn lock(&self) -> MutexGuard<'_, RunningTime> {
        self.0.running.lock()
    }
}

/// Reads the monotonic clock and the time since boot at the same moment. If the process is stopped
/// between the two readings, they would look like a suspension, so both clocks are read again.
fn read_clocks(system: &dyn SystemClocks) -> (Instant, Option<UnixMicros>) {
    loop {
        let now = Instant::now();
        let boot = system.since_boot();
        if now.elapsed() < MAX_READING {
            return (now, boot);
        }
    }
}

/// Converts a time to the API's form. A time outside the range of the API becomes the nearest time
/// in the range.
pub fn timestamp(at: UnixMicros) -> Timestamp {
    let nearest = Timestamp::from_unix_micros(at.clamp(0, MAX_TIME));
    nearest.unwrap_or_else(|_| SystemTime::UNIX_EPOCH.into())
}

/// Converts a duration to microseconds.
pub fn micros(duration: Duration) -> UnixMicros {
    UnixMicros::try_from(duration.as_micros()).unwrap_or(UnixMicros::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: i64 = 1_000_000;
    const DAY: i64 = 86_400 * SECOND;

    #[tokio::test(start_paused = true)]
    async fn a_wall_clock_that_is_set_has_no_effect() {
        let system = ManualClocks::new(7_200 * SECOND, "boot", 0);
        let clock = Clock::resume(Arc::clone(&system) as _, None, None);
        assert_eq!((clock.now(), clock.hour()), (7_200 * SECOND, 2));
        for wall in [0, -DAY, 100 * DAY] {
            system.wall.store(wall, Ordering::Relaxed);
            assert_eq!(clock.tick(), None);
            assert_eq!(clock.now(), 7_200 * SECOND);
        }
        tokio::time::advance(Duration::from_secs(3_600)).await;
        assert_eq!((clock.now(), clock.hour()), (10_800 * SECOND, 3));
        assert_eq!(clock.in_seconds(1), 10_801 * SECOND);
        assert_eq!(clock.in_seconds(u64::MAX), i64::MAX);
    }

    #[tokio::test(start_paused = true)]
    async fn a_suspension_advances_the_time_and_stops_the_running_time() {
        let system = ManualClocks::new(DAY, "boot", 5 * SECOND);
        let clock = Clock::resume(Arc::clone(&system) as _, None, None);
        tokio::time::advance(TICK).await;
        // The machine slept for an hour, which tokio's clock does not count.
        system.since_boot.store((5 + 1 + 3_600) * SECOND, Ordering::Relaxed);
        assert_eq!(clock.tick(), Some(Duration::from_secs(3_600)));
        assert_eq!(clock.now(), DAY + 3_601 * SECOND);
        assert_eq!(clock.running(), TICK);
        assert_eq!(clock.since_gap(), Some(Duration::ZERO));
        assert_eq!(clock.tick(), None, "counted once");
        assert_eq!(clock.now(), DAY + 3_601 * SECOND);
        let expected = BootTime { id: "boot".to_owned(), elapsed: 3_606 * SECOND };
        let record = ClockRecord { time: DAY + 3_601 * SECOND, boot: Some(expected) };
        assert_eq!(clock.record(), record);
    }

    #[tokio::test(start_paused = true)]
    async fn a_stop_soon_after_a_suspension_saves_a_time_that_includes_it() {
        let system = ManualClocks::new(DAY, "boot", 5 * SECOND);
        let clock = Clock::resume(Arc::clone(&system) as _, None, None);
        tokio::time::advance(TICK).await;
        system.since_boot.store((5 + 1 + 3_600) * SECOND, Ordering::Relaxed);
        assert_eq!(clock.record().time, DAY + 3_601 * SECOND);
        assert_eq!(clock.tick(), Some(Duration::from_secs(3_600)), "clients get a grace period");
    }

    #[tokio::test(start_paused = true)]
    async fn no_time_passes_for_expiry_while_the_process_is_stopped() {
        let clock = Clock::resume(ManualClocks::new(DAY, "boot", 0), None, None);
        for _ in 0..10 {
            tokio::time::advance(TICK).await;
            assert_eq!(clock.tick(), None);
        }
        assert_eq!(clock.running(), 10 * TICK);
        tokio::time::advance(Duration::from_secs(3_600)).await;
        // A timer may be checked before the next tick.
        let stopped = clock.running();
        assert!(stopped < 20 * TICK, "{stopped:?}");
        assert!(clock.tick().is_some_and(|gap| gap.as_secs() > 3_000));
        assert_eq!(clock.running(), stopped, "the running time never goes back");
        // Timestamps include the time of the interruption.
        assert_eq!(clock.now(), DAY + 3_610 * SECOND);
        tokio::time::advance(TICK).await;
        assert_eq!(clock.since_gap(), Some(TICK));
    }

    #[test]
    fn the_clocks_of_the_operating_system_advance() {
        let first = (OperatingSystem.wall(), OperatingSystem.since_boot());
        let second = (OperatingSystem.wall(), OperatingSystem.since_boot());
        assert!(first.0 > 1_700_000_000 * SECOND && second.1 >= first.1);
        if cfg!(target_os = "linux") {
            assert!(first.1 > Some(0));
            assert_eq!(OperatingSystem.boot_id(), OperatingSystem.boot_id());
        }
    }

    #[test]
    fn times_beyond_the_range_of_the_api_are_shown_as_its_limits() {
        assert_eq!(timestamp(i64::MAX).to_string(), "9999-12-31T23:59:59.999999Z");
        assert_eq!(timestamp(i64::MIN).to_string(), "1970-01-01T00:00:00Z");
    }
}
