//! [`ServerProcess`]: a `tinkex serve` process with limited memory.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// How to start a server.
pub(crate) struct ServerStart<'a> {
    /// Program `tinkex`.
    pub(crate) program: &'a Path,
    pub(crate) data: &'a Path,
    /// Limit of the address space in bytes; `None` for no limit.
    pub(crate) memory: Option<u64>,
    pub(crate) arguments: &'a [&'a str],
}

/// A server process on a free loopback port, killed on drop.
pub(crate) struct ServerProcess {
    child: Child,
    pub(crate) address: String,
    /// The administrator's API key.
    pub(crate) key: String,
    log: PathBuf,
}

impl ServerProcess {
    /// Starts a server and waits until it listens.
    ///
    /// # Errors
    /// If the server ends before it listens.
    pub(crate) fn start(start: &ServerStart<'_>) -> Result<Self, String> {
        let failed = |error: std::io::Error| format!("cannot start the server: {error}");
        fs::create_dir_all(start.data).map_err(failed)?;
        let log = start.data.with_extension("log");
        let errors = File::options().create(true).append(true).open(&log).map_err(failed)?;
        let mut command = match start.memory {
            Some(bytes) => {
                let mut command = Command::new("sh");
                let kibibytes = bytes / 1_024;
                command.args(["-c", &format!("ulimit -v {kibibytes}; exec \"$0\" \"$@\"")]);
                command.arg(start.program);
                // Each arena of the C library reserves 64 MiB of the address space.
                command.env("MALLOC_ARENA_MAX", "2");
                command
            }
            None => Command::new(start.program),
        };
        command.args(["serve", "--port", "0", "--no-hub-cache", "--log-level", "warn"]);
        command.arg("--data-dir").arg(start.data).args(start.arguments);
        let mut child = command.stdout(Stdio::piped()).stderr(errors).spawn().map_err(failed)?;
        let mut url = String::new();
        if let Some(stdout) = child.stdout.take() {
            BufReader::new(stdout).read_line(&mut url).map_err(failed)?;
        }
        let address = url.trim().strip_prefix("http://").unwrap_or_default().to_owned();
        let mut server = Self { child, address, key: String::new(), log };
        if server.address.is_empty() {
            return Err(format!("the server does not start: {}", server.log_end()));
        }
        let key = fs::read_to_string(start.data.join("key")).map_err(failed)?;
        server.key = key.trim().to_owned();
        Ok(server)
    }

    /// Returns the last lines of the log.
    pub(crate) fn log_end(&self) -> String {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(5)..].join("\n")
    }

    /// Returns the process id.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns how the process has ended; `None` while it runs.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Sends SIGTERM and waits for the end of the process. Returns how long that took.
    ///
    /// # Errors
    /// If the process does not end within `limit`, or ends with an error.
    pub(crate) fn terminate(&mut self, limit: Duration) -> Result<Duration, String> {
        let start = Instant::now();
        kill_process(Pid::from_child(&self.child), Signal::TERM)
            .map_err(|error| format!("cannot send SIGTERM: {error}"))?;
        loop {
            match self.ended() {
                Some(status) if status.success() => return Ok(start.elapsed()),
                Some(status) => return Err(format!("stopped with {status}: {}", self.log_end())),
                None if start.elapsed() > limit => {
                    return Err(format!("does not stop within {limit:?}"));
                }
                None => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        // Both calls fail if the process has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the peak resident memory of a process in bytes; `None` if the process has ended.
pub(crate) fn peak_memory(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1_024)
}
