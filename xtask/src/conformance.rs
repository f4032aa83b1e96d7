//! The official Python SDK against a freshly started server.
//!
//! Each version of the SDK gets an environment of its own under `target/conformance`, made once.
//! The checks are ours: `crates/server/tests/python/conformance.py`.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::step::{Failure, cargo, root};

/// Versions, and whether clients are asked to do things the efficient way.
const RUNS: &[(&str, bool)] = &[("0.36.0", true), ("0.36.0", false), ("0.25.0", true)];
const CHECKS: &str = "crates/server/tests/python/conformance.py";
const LOAD: &str = "crates/server/tests/python/load.py";
const MODEL: &str = "tiny";

pub(crate) fn run(options: &[&str]) -> Result<(), Failure> {
    let only = match options {
        [] => None,
        ["--sdk", version] => Some(*version),
        other => {
            return Err(Failure::new(format!("conformance has no options {}", other.join(" "))));
        }
    };
    cargo("server", &["build", "--locked", "--package", "tinkex-server"]).run()?;
    let runs = RUNS.iter().filter(|(version, _)| only.is_none_or(|only| only == *version));
    for (version, efficient) in runs {
        let python = environment(version)?;
        check(&python, version, *efficient)?;
    }
    Ok(())
}

/// A server under load: `crates/server/tests/python/load.py`.
pub(crate) fn load() -> Result<(), Failure> {
    cargo("server", &["build", "--release", "--locked", "--package", "tinkex-server"]).run()?;
    let data = root().join("target/conformance/data-load");
    // Left from the last time, or not there.
    let _ = std::fs::remove_dir_all(&data);
    let server = Server::start("release", &data, true)?;
    call(Command::new("python3").arg(root().join(LOAD)).args([&server.url, MODEL]))?;
    let peak = std::fs::read_to_string(format!("/proc/{}/status", server.child.id()));
    if let Some(line) =
        peak.ok().as_deref().and_then(|text| text.lines().find(|l| l.starts_with("VmHWM")))
    {
        println!("peak memory of the server: {}", line.trim_start_matches("VmHWM:").trim());
    }
    Ok(())
}

/// The Python of an environment with this version of the SDK.
fn environment(version: &str) -> Result<PathBuf, Failure> {
    let folder = root().join("target/conformance").join(version);
    let python = folder.join("bin/python");
    let marker = folder.join("installed");
    if marker.is_file() {
        return Ok(python);
    }
    println!("\n==> installing tinker {version}");
    let folder_text = folder.to_string_lossy().into_owned();
    call(Command::new("python3").args(["-m", "venv", &folder_text]))?;
    let package = format!("tinker=={version}");
    call(Command::new(&python).args(["-m", "pip", "install", "--quiet", &package]))?;
    std::fs::write(&marker, version)
        .map_err(|why| Failure::new(format!("{}: {why}", marker.display())))?;
    Ok(python)
}

fn call(command: &mut Command) -> Result<(), Failure> {
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(Failure::new(format!("{command:?}: {status}"))),
        Err(why) => Err(Failure::new(format!("{command:?}: {why}"))),
    }
}

fn check(python: &Path, version: &str, efficient: bool) -> Result<(), Failure> {
    let how = if efficient { "efficient" } else { "plain" };
    println!("\n==> conformance: tinker {version}, {how} clients");
    let data = root().join("target/conformance").join(format!("data-{version}-{how}"));
    // Left from the last time, or not there.
    let _ = std::fs::remove_dir_all(&data);
    let server = Server::start("debug", &data, efficient)?;
    let status = Command::new(python)
        .arg(root().join(CHECKS))
        .args([&server.url, MODEL])
        .status()
        .map_err(|why| Failure::new(format!("{}: {why}", python.display())))?;
    if status.success() { Ok(()) } else { Err(Failure::new(format!("tinker {version}: {status}"))) }
}

/// A server that ends with this value.
struct Server {
    child: Child,
    url: String,
}

impl Server {
    fn start(profile: &str, data: &Path, efficient: bool) -> Result<Self, Failure> {
        let failed = |why: std::io::Error| Failure::new(format!("the server did not start: {why}"));
        let model = root().join("crates/engine/tests/golden/qwen3");
        let mut command = Command::new(root().join("target").join(profile).join("tinkex-server"));
        command.args(["--port", "0", "--quiet", "--data-dir"]).arg(data);
        command.args(["--model", &format!("{MODEL}={}", model.display())]);
        if !efficient {
            command.arg("--plain");
        }
        let mut child = command.stdout(Stdio::piped()).spawn().map_err(failed)?;
        let mut url = String::new();
        if let Some(out) = child.stdout.take() {
            BufReader::new(out).read_line(&mut url).map_err(failed)?;
        }
        let url = url.trim().to_owned();
        Ok(Self { child, url })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself, which the checks have told already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
