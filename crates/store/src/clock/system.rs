//! The clocks of the operating system.

use std::time::SystemTime;

use tinkex_wire::Timestamp;

use crate::record::UnixMicros;

/// Clocks of the machine. Tests and simulations set them.
pub trait SystemClocks: Send + Sync {
    /// Returns the wall time in microseconds since the Unix epoch. A user or the system can set the
    /// wall clock at any time.
    fn wall(&self) -> i64;

    /// Returns the microseconds since the machine was booted, including those for which it was
    /// suspended; `None` if they are not known.
    fn since_boot(&self) -> Option<i64>;

    /// Returns an id that changes with every boot of the machine; `None` if it is not known.
    fn boot_id(&self) -> Option<String>;
}

/// The clocks of the operating system.
pub struct OperatingSystem;

impl SystemClocks for OperatingSystem {
    fn wall(&self) -> UnixMicros {
        #[expect(clippy::disallowed_methods, reason = "this module is the permitted caller")]
        Timestamp::from(SystemTime::now()).unix_micros()
    }

    fn since_boot(&self) -> Option<UnixMicros> {
        since_boot()
    }

    fn boot_id(&self) -> Option<String> {
        // Only Linux has the file.
        let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        Some(id.trim().to_owned()).filter(|id| !id.is_empty())
    }
}

#[cfg(any(target_os = "linux", target_vendor = "apple"))]
fn since_boot() -> Option<UnixMicros> {
    use rustix::time::{ClockId, clock_gettime};
    // Apple's monotonic clock includes the time of a suspension, unlike the clock of `Instant`.
    #[cfg(target_vendor = "apple")]
    let clock = ClockId::Monotonic;
    #[cfg(target_os = "linux")]
    let clock = ClockId::Boottime;
    let time = clock_gettime(clock);
    time.tv_sec.checked_mul(1_000_000)?.checked_add(time.tv_nsec / 1_000)
}

#[cfg(not(any(target_os = "linux", target_vendor = "apple")))]
fn since_boot() -> Option<UnixMicros> {
    None
}
