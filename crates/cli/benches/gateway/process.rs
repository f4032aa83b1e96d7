//! [`GatewayProcess`]: `tinkex serve --upstream` with a temporary data folder.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

/// Gateway process. Killed when dropped.
pub(crate) struct GatewayProcess {
    child: Child,
    pub(crate) address: String,
    /// Removed when dropped.
    _data: tempfile::TempDir,
}

impl GatewayProcess {
    pub(crate) fn start(upstream: &str) -> Self {
        let data = tempfile::tempdir().unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_tinkex"))
            .args(["serve", "--port", "0", "--no-key", "--no-hub-cache", "--log-level", "warn"])
            .args(["--upstream", upstream, "--data-dir"])
            .arg(data.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("http://").expect("the gateway starts").to_owned();
        Self { child, address, _data: data }
    }

    /// Returns the CPU time of the process so far, in user and kernel mode.
    pub(crate) fn cpu_seconds(&self) -> f64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        // The second field, the name in parentheses, may contain spaces.
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
        // Ticks of 10 ms: the kernel reports 100 per second on every platform that Rust supports.
        let ticks = |at: usize| fields[at].parse::<f64>().unwrap();
        (ticks(11) + ticks(12)) / 100.0
    }

    /// Returns a field of the memory of the process in MiB, such as `VmRSS` or `VmHWM`.
    pub(crate) fn memory(&self, field: &str) -> f64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
        let number = line.trim_start_matches(':').trim().trim_end_matches("kB").trim();
        number.parse::<f64>().unwrap() / 1_024.0
    }
}

impl Drop for GatewayProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
