//! [`MachineClocks`]: the clocks of the simulated machine.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tinkex_server::simulation::SystemClocks;
use tokio::time::Instant;

/// Wall time at the start of a simulation, in microseconds since the Unix epoch.
const START: i64 = 1_800_000_000_000_000;

/// Clocks that follow simulated time. The machine boots at the start and after each power loss.
pub(crate) struct MachineClocks {
    start: Instant,
    boot: Mutex<Boot>,
    /// Error of the wall clock in microseconds.
    wall_error: AtomicI64,
}

#[derive(Clone, Copy)]
struct Boot {
    number: u64,
    at: Instant,
}

impl MachineClocks {
    pub(crate) fn new() -> Self {
        let start = Instant::now();
        let boot = Mutex::new(Boot { number: 1, at: start });
        Self { start, boot, wall_error: AtomicI64::new(0) }
    }

    /// Sets the wall clock to a time that is wrong by `error` seconds.
    pub(crate) fn set_wall(&self, error: i64) {
        self.wall_error.store(error * 1_000_000, Ordering::Relaxed);
    }

    /// Boots the machine again.
    pub(crate) fn reboot(&self) {
        let mut boot = self.boot.lock();
        *boot = Boot { number: boot.number + 1, at: Instant::now() };
    }

    fn boot(&self) -> Boot {
        *self.boot.lock()
    }
}

impl SystemClocks for MachineClocks {
    fn wall(&self) -> i64 {
        START + micros(self.start.elapsed()) + self.wall_error.load(Ordering::Relaxed)
    }

    fn since_boot(&self) -> Option<i64> {
        Some(micros(self.boot().at.elapsed()))
    }

    fn boot_id(&self) -> Option<String> {
        Some(self.boot().number.to_string())
    }
}

fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}
