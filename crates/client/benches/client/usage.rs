//! CPU time and memory of a process.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

use crate::Outcome;

/// CPU time of this process on all cores, in user and kernel mode.
pub(crate) fn cpu() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or_default())
}

/// Peak resident memory of this process (`VmHWM`).
fn peak_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse().ok()).unwrap_or_default()
}

/// A running measurement.
pub(crate) struct Stopwatch {
    cpu: Duration,
    wall: Instant,
}

impl Stopwatch {
    pub(crate) fn start() -> Self {
        Self { cpu: cpu(), wall: Instant::now() }
    }

    /// Prints the usage since the start, in the format of [`Usage::parse`].
    pub(crate) fn report(&self, count: u32) {
        let cpu = cpu().saturating_sub(self.cpu);
        let wall = self.wall.elapsed();
        let report = json!({
            "count": count,
            "cpu_seconds": cpu.as_secs_f64(),
            "wall_seconds": wall.as_secs_f64(),
            "peak_kib": peak_kib(),
        });
        println!("{report}");
    }
}

/// Usage that a process reported.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Usage {
    pub(crate) count: f64,
    pub(crate) cpu_seconds: f64,
    pub(crate) wall_seconds: f64,
    pub(crate) peak_kib: f64,
}

impl Usage {
    pub(crate) fn parse(line: &str) -> Outcome<Self> {
        let report: Value = serde_json::from_str(line)?;
        let number = |name: &str| report[name].as_f64().ok_or(format!("no {name} in {line:?}"));
        Ok(Self {
            count: number("count")?,
            cpu_seconds: number("cpu_seconds")?,
            wall_seconds: number("wall_seconds")?,
            peak_kib: number("peak_kib")?,
        })
    }

    pub(crate) fn cpu_each(&self) -> f64 {
        self.cpu_seconds / self.count
    }

    pub(crate) fn per_second(&self) -> f64 {
        self.count / self.wall_seconds
    }
}
