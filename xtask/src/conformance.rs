//! `cargo xtask conformance`: runs the official Python SDK against a new server.
//!
//! The checks are in `crates/server/tests/python/conformance.py`. Each SDK version has its own
//! Python environment under `target/conformance`.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::python::{self, Packages};
use crate::step::{XtaskError, cargo, root, target};

/// One run of the checks.
struct ConformanceRun {
    sdk_version: &'static str,
    /// Whether the server offers batched polling, protobuf and compression; otherwise none of them.
    efficient: bool,
    /// Whether custom losses are checked, which needs torch.
    torch: bool,
}

const RUNS: &[ConformanceRun] = &[
    ConformanceRun { sdk_version: "0.36.0", efficient: true, torch: true },
    ConformanceRun { sdk_version: "0.36.0", efficient: false, torch: true },
    ConformanceRun { sdk_version: "0.25.0", efficient: true, torch: false },
];
const CHECKS: &str = "crates/server/tests/python/conformance.py";
const MODEL: &str = "tiny";

pub(crate) fn run(options: &[&str]) -> Result<(), XtaskError> {
    let (mut only, mut torch) = (None, true);
    let mut options = options.iter();
    while let Some(option) = options.next() {
        match *option {
            "--sdk" => match options.next() {
                Some(version) if RUNS.iter().any(|run| run.sdk_version == *version) => {
                    only = Some(version);
                }
                _ => return Err(XtaskError::new("conformance: --sdk must be 0.36.0 or 0.25.0")),
            },
            "--without-torch" => torch = false,
            other => return Err(XtaskError::new(format!("conformance: unknown option {other}"))),
        }
    }
    cargo("server", &["build", "--locked", "--package", "tinkex-server"]).run()?;
    for run in RUNS.iter().filter(|run| only.is_none_or(|only| *only == run.sdk_version)) {
        let torch = torch && run.torch;
        let suffix = if torch { "-torch" } else { "" };
        let folder = Path::new("conformance").join(format!("{}{suffix}", run.sdk_version));
        let sdk = format!("tinker=={}", run.sdk_version);
        let names = if torch { vec![sdk.as_str(), "torch"] } else { vec![sdk.as_str()] };
        let python = python::environment(&folder, &Packages::wheels(&names))?;
        check(&python, run, torch)?;
    }
    Ok(())
}

fn check(python: &Path, run: &ConformanceRun, torch: bool) -> Result<(), XtaskError> {
    let ConformanceRun { sdk_version, efficient, .. } = *run;
    let mode = if efficient { "efficient" } else { "plain" };
    println!("\n==> conformance: tinker {sdk_version}, {mode} protocol options");
    let data = target().join("conformance").join(format!("data-{sdk_version}-{mode}"));
    // Remove the data of an earlier run, if any.
    let _ = std::fs::remove_dir_all(&data);
    let server = TestServer::start(&data, efficient)?;
    let status = Command::new(python)
        .arg(root().join(CHECKS))
        .args([&server.url, MODEL])
        .args(torch.then_some("--torch"))
        .status()
        .map_err(|error| XtaskError::new(format!("cannot run {}: {error}", python.display())))?;
    if status.success() {
        return Ok(());
    }
    Err(XtaskError::new(format!("conformance with tinker {sdk_version} failed: {status}")))
}

/// Server process, killed on drop.
struct TestServer {
    child: Child,
    url: String,
}

impl TestServer {
    fn start(data: &Path, efficient: bool) -> Result<Self, XtaskError> {
        let failed =
            |error: std::io::Error| XtaskError::new(format!("cannot start the server: {error}"));
        let model = root().join("crates/engine/tests/golden/qwen3");
        let mut command = Command::new(target().join("debug/tinkex-server"));
        command.args(["--port", "0", "--quiet", "--no-hub-cache", "--data-dir"]).arg(data);
        command.args(["--model", &format!("{MODEL}={}", model.display())]);
        if !efficient {
            command.arg("--plain");
        }
        let mut child = command.stdout(Stdio::piped()).spawn().map_err(failed)?;
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
        // Both calls fail if the server has already exited; the checks have then failed already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
