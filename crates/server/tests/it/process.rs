//! A server in its own process, which tests can kill and whose disk they can fill.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::harness::{MODEL, golden};

/// A server in its own process.
pub(crate) struct Process {
    child: Child,
    pub(crate) url: String,
    data: PathBuf,
}

impl Process {
    pub(crate) fn start(data: &Path) -> Self {
        Self::with(data, 0, &[])
    }

    /// Starts a server on a port (0 picks a free one) with further command-line arguments.
    pub(crate) fn with(data: &Path, port: u16, arguments: &[&str]) -> Self {
        // Ignore SIGXFSZ, so that a write beyond the limit of `fill_disk` fails instead of ending
        // the process.
        let mut child = Command::new("sh")
            .args(["-c", "trap '' XFSZ; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_tinkex-server")])
            .args(["--port", &port.to_string(), "--threads", "1", "--quiet", "--no-hub-cache"])
            .arg("--no-key")
            .args(arguments)
            .arg("--data-dir")
            .arg(data)
            .arg("--model")
            .arg(format!("{MODEL}={}", golden("qwen3").display()))
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        Self { child, url: line.trim().to_owned(), data: data.to_owned() }
    }

    pub(crate) fn port(&self) -> u16 {
        self.url.rsplit(':').next().unwrap().parse().unwrap()
    }

    /// Kills the process with SIGKILL.
    pub(crate) fn kill(mut self) {
        self.kill_now();
    }

    /// Kills the process with SIGKILL and keeps the value, to be replaced by another process.
    pub(crate) fn kill_now(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends SIGTERM and waits for the end of the process.
    #[cfg(target_os = "linux")]
    pub(crate) fn terminate(self) -> std::process::ExitStatus {
        self.send_signal(rustix::process::Signal::TERM);
        self.wait()
    }

    #[cfg(target_os = "linux")]
    pub(crate) fn send_signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Waits for the end of the process.
    pub(crate) fn wait(mut self) -> std::process::ExitStatus {
        self.child.wait().unwrap()
    }

    /// Returns the size of the payload file in bytes.
    pub(crate) fn payloads(&self) -> u64 {
        self.len("payloads")
    }

    /// Returns the size of the write-ahead log in bytes.
    pub(crate) fn wal(&self) -> u64 {
        self.len("metadata.sqlite-wal")
    }

    fn len(&self, name: &str) -> u64 {
        std::fs::metadata(self.data.join(name)).unwrap().len()
    }

    /// Limits the size of every file to `max_bytes`: a write stops there, and the next one fails.
    #[cfg(target_os = "linux")]
    pub(crate) fn fill_disk(&self, max_bytes: u64) {
        self.limit(Some(max_bytes));
    }

    /// Removes the limit of [`fill_disk`](Self::fill_disk).
    #[cfg(target_os = "linux")]
    pub(crate) fn free_disk(&self) {
        self.limit(None);
    }

    #[cfg(target_os = "linux")]
    fn limit(&self, current: Option<u64>) {
        use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
        let maximum = getrlimit(Resource::Fsize).maximum;
        let pid = Pid::from_raw(i32::try_from(self.child.id()).unwrap());
        prlimit(pid, Resource::Fsize, Rlimit { current, maximum }).unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
