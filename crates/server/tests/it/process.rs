//! A server in its own process, which tests can kill and whose disk they can fill.

use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use crate::child_server::{ChildOptions, serve_if_child, start};
use crate::harness::{MODEL, golden};

/// Arguments of this test binary that select [`child_server`].
pub(crate) const SERVE: [&str; 4] =
    ["--exact", "process::child_server", "--ignored", "--nocapture"];

/// Runs the server of another test.
#[test]
#[ignore = "other tests start it in a process of its own"]
fn child_server() {
    serve_if_child();
}

/// A server in its own process.
pub(crate) struct Process {
    child: Child,
    pub(crate) url: String,
    data: PathBuf,
}

impl Process {
    pub(crate) fn start(data: &Path) -> Self {
        Self::with(data, 0, ChildOptions::default())
    }

    /// Starts a server on a port (0 picks a free one) with further options.
    pub(crate) fn with(data: &Path, port: u16, options: ChildOptions) -> Self {
        let options = ChildOptions {
            data_dir: data.to_owned(),
            port,
            threads: 1,
            models: vec![(MODEL.to_owned(), golden("qwen3"))],
            ..options
        };
        let mut command = options.command(&SERVE);
        command.stderr(Stdio::null());
        let (child, url) = start(command);
        Self { child, url, data: data.to_owned() }
    }

    pub(crate) fn port(&self) -> u16 {
        self.url.rsplit(':').next().unwrap().parse().unwrap()
    }

    /// Returns the largest resident size of the process so far, in bytes.
    #[cfg(target_os = "linux")]
    pub(crate) fn peak_memory(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() * 1_024
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
