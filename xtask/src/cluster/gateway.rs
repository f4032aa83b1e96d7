//! [`Gateway`]: `tinkex serve --upstream` as a process that can be killed and started again.

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use crate::step::{XtaskError, target};

use super::http;

/// Gateway process of the debug build on a loopback address. Killed when dropped.
pub(super) struct Gateway {
    process: Child,
    /// Arguments after `tinkex serve`, without those for the data folder and the port.
    arguments: Vec<String>,
    folder: PathBuf,
    port: u16,
    url: String,
}

impl Gateway {
    /// Starts a gateway with an empty data folder in front of `upstreams`, each a URL or
    /// `NAME=URL`. `name` is the name of its folder.
    pub(super) fn start(name: &str, port: u16, upstreams: &[String]) -> Result<Self, XtaskError> {
        let folder = target().join("cluster/gateways").join(name);
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).map_err(|error| failed(&error))?;
        let upstreams = upstreams.iter().flat_map(|upstream| ["--upstream", upstream]);
        let arguments: Vec<String> = upstreams.map(str::to_owned).collect();
        let process = spawn(&folder, port, &arguments)?;
        let mut gateway = Self { process, arguments, folder, port, url: String::new() };
        gateway.wait_until_ready()?;
        Ok(gateway)
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }

    pub(super) fn log_path(&self) -> String {
        self.folder.join("log").display().to_string()
    }

    /// Kills the process with SIGKILL and starts another one with the same data.
    pub(super) fn kill_and_start_again(&mut self) -> Result<(), XtaskError> {
        self.kill();
        self.process = spawn(&self.folder, self.port, &self.arguments)?;
        self.wait_until_ready()
    }

    /// Returns the sum of all values of a metric, or `None` if the gateway does not report it.
    /// `labels` selects lines that contain it.
    pub(super) fn metric(&self, name: &str, labels: &str) -> Option<f64> {
        let metrics = http::get(self.port, "/metrics")?;
        let values = metrics.lines().filter_map(|line| {
            let (key, value) = line.rsplit_once(' ')?;
            let is_named = key.split('{').next() == Some(name) && key.contains(labels);
            is_named.then(|| value.parse::<f64>().ok())?
        });
        values.reduce(|a, b| a + b)
    }

    fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    /// Waits for the line with the URL.
    fn wait_until_ready(&mut self) -> Result<(), XtaskError> {
        let mut line = String::new();
        if let Some(stdout) = self.process.stdout.take() {
            BufReader::new(stdout).read_line(&mut line).map_err(|error| failed(&error))?;
        }
        line.trim().clone_into(&mut self.url);
        if self.url.starts_with("http://") {
            return Ok(());
        }
        let log = self.log_path();
        Err(XtaskError::new(format!("the gateway exited before it was ready\n  log: {log}")))
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Starts the process. It appends to the log of an earlier process.
fn spawn(folder: &std::path::Path, port: u16, arguments: &[String]) -> Result<Child, XtaskError> {
    let log = File::options().create(true).append(true).open(folder.join("log"));
    Command::new(target().join("debug/tinkex"))
        .args(["serve", "--no-key", "--no-hub-cache", "--port", &port.to_string()])
        .args(arguments)
        .arg("--data-dir")
        .arg(folder.join("data"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log.map_err(|error| failed(&error))?)
        .spawn()
        .map_err(|error| failed(&error))
}

fn failed(error: &std::io::Error) -> XtaskError {
    XtaskError::new(format!("cannot start the gateway: {error}"))
}
