//! Determines the time with which the clock continues at a start of the server.

use crate::record::{BootTime, ClockRecord, UnixMicros};

/// Largest difference between the wall clock and the expected time, in microseconds, that the
/// server adopts: one minute. The operating system occasionally corrects its clock by up to this
/// much.
const MAX_CORRECTION: UnixMicros = 60_000_000;

/// Returns the time at a start.
///
/// `last` is the last time that the server stored, `newest` the newest time of any stored row, and
/// `wall` and `boot` are the current readings. If the machine has not been booted since `last`, the
/// elapsed time is the difference of the times since boot, whatever the wall clock shows. Otherwise
/// the server uses the wall clock: if it is ahead of the stored times, the machine was off for the
/// difference. The server ignores a wall clock that is behind the stored times.
pub(super) fn start_time(
    last: Option<&ClockRecord>,
    newest: Option<UnixMicros>,
    wall: UnixMicros,
    boot: Option<&BootTime>,
) -> UnixMicros {
    let known = last.map(|last| last.time).max(newest);
    let expected = last.and_then(|last| Some(last.time.saturating_add(passed(last, boot?)?)));
    let start = match expected {
        Some(expected) if wall.abs_diff(expected) > MAX_CORRECTION.unsigned_abs() => expected,
        _ => wall,
    };
    known.map_or(start, |known| start.max(known))
}

/// Returns the time that has passed since `last`, in microseconds, if both readings are of the same
/// boot. Returns `None` for a virtual machine that was restored from a snapshot: its time since
/// boot is earlier than the stored time.
fn passed(last: &ClockRecord, boot: &BootTime) -> Option<UnixMicros> {
    let before = last.boot.as_ref().filter(|before| before.id == boot.id)?;
    Some(boot.elapsed.saturating_sub(before.elapsed)).filter(|passed| *passed >= 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: i64 = 1_000_000;
    const DAY: i64 = 86_400 * SECOND;
    /// Last time that the server stored, ten seconds after the boot `a`.
    const LAST: i64 = 1_000 * DAY;

    fn boot(id: &str, seconds: i64) -> BootTime {
        BootTime { id: id.to_owned(), elapsed: seconds * SECOND }
    }

    /// Returns the start relative to [`LAST`], for a wall clock relative to it.
    fn start(wall: i64, boot_now: Option<&BootTime>) -> i64 {
        let last = ClockRecord { time: LAST, boot: Some(boot("a", 10)) };
        start_time(Some(&last), None, LAST + wall, boot_now) - LAST
    }

    #[test]
    fn within_a_boot_the_wall_clock_can_be_set_to_anything() {
        for wall in [-400 * DAY, -DAY, -61 * SECOND, 121 * SECOND, DAY, 400 * DAY] {
            assert_eq!(start(wall, Some(&boot("a", 40))), 30 * SECOND, "{wall}");
        }
    }

    #[test]
    fn small_corrections_are_adopted_but_the_time_never_goes_back() {
        assert_eq!(start(32 * SECOND, Some(&boot("a", 40))), 32 * SECOND);
        assert_eq!(start(5 * SECOND, Some(&boot("a", 40))), 5 * SECOND);
        assert_eq!(start(-5 * SECOND, Some(&boot("a", 40))), 0);
    }

    #[test]
    fn after_a_boot_only_a_wall_clock_behind_the_last_time_is_corrected() {
        // Another boot, a restored virtual machine, and unknown boots.
        for now in [Some(&boot("b", 40)), Some(&boot("a", 9)), None] {
            assert_eq!(start(-400 * DAY, now), 0);
            assert_eq!(start(3 * DAY, now), 3 * DAY, "the machine was off");
        }
    }

    #[test]
    fn a_new_folder_starts_with_the_wall_clock_and_an_old_one_after_its_rows() {
        let boot = boot("a", 40);
        assert_eq!(start_time(None, None, LAST, Some(&boot)), LAST);
        assert_eq!(start_time(None, Some(LAST + 5), LAST, Some(&boot)), LAST + 5);
        assert_eq!(start_time(None, Some(LAST - 5), LAST, Some(&boot)), LAST);
        // The record is older than the rows after a crash.
        let last = ClockRecord { time: LAST, boot: None };
        assert_eq!(start_time(Some(&last), Some(LAST + 5), LAST - DAY, Some(&boot)), LAST + 5);
    }
}
