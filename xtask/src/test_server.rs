//! A local server process, for commands that run the Python SDK.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::step::{XtaskError, cargo, root, target};

/// Name of the [golden model](golden_model).
pub(crate) const MODEL: &str = "tiny";

/// Base model of a server: its name and its folder.
pub(crate) type NamedModel = (String, PathBuf);

/// Returns the small model of the engine's tests.
pub(crate) fn golden_model() -> NamedModel {
    (MODEL.to_owned(), root().join("crates/engine/tests/golden/qwen3"))
}

/// Server process, killed on drop.
pub(crate) struct TestServer {
    child: Child,
    pub(crate) url: String,
}

impl TestServer {
    /// Builds the server program.
    pub(crate) fn build() -> Result<(), XtaskError> {
        cargo("server", &["build", "--locked", "--package", "tinkex-cli"]).run()
    }

    /// Starts a server with an empty data folder.
    ///
    /// `efficient` offers batched polling, protobuf and compression; otherwise neither.
    pub(crate) fn start(
        data: &Path,
        models: &[NamedModel],
        efficient: bool,
    ) -> Result<Self, XtaskError> {
        Self::start_with(data, models, if efficient { &[] } else { &["--plain"] })
    }

    /// Starts a server with an empty data folder and more arguments. It requires an API key only
    /// with `--api-key-file`.
    pub(crate) fn start_with(
        data: &Path,
        models: &[NamedModel],
        arguments: &[&str],
    ) -> Result<Self, XtaskError> {
        let failed =
            |error: std::io::Error| XtaskError::new(format!("cannot start the server: {error}"));
        // Remove the data of an earlier run, if any.
        let _ = std::fs::remove_dir_all(data);
        let mut command = Command::new(target().join("debug/tinkex"));
        command.args(["serve", "--port", "0", "--quiet", "--no-hub-cache", "--data-dir"]).arg(data);
        for (name, folder) in models {
            command.args(["--model", &format!("{name}={}", folder.display())]);
        }
        if !arguments.contains(&"--api-key-file") {
            command.arg("--no-key");
        }
        let mut child = command.args(arguments).stdout(Stdio::piped()).spawn().map_err(failed)?;
        let mut url = String::new();
        if let Some(stdout) = child.stdout.take() {
            BufReader::new(stdout).read_line(&mut url).map_err(failed)?;
        }
        let server = Self { child, url: url.trim().to_owned() };
        if server.url.starts_with("http://") {
            return Ok(server);
        }
        Err(XtaskError::new("the server exited before it was ready; see its error above"))
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        // Both calls fail if the server has already exited. The command that used it has then
        // reported the failure.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
