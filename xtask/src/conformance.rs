//! The official Python SDK against a freshly started server.
//!
//! Each version of the SDK gets an environment of its own under `target/conformance`, made once.
//! The checks are ours: `crates/server/tests/python/conformance.py`.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::python;
use crate::step::{Failure, cargo, root, target};

/// A version of the SDK, whether clients are asked to do things the efficient way, and whether the
/// losses of one's own are checked, which need torch.
struct Run {
    version: &'static str,
    efficient: bool,
    torch: bool,
}

const RUNS: &[Run] = &[
    Run { version: "0.36.0", efficient: true, torch: true },
    Run { version: "0.36.0", efficient: false, torch: true },
    Run { version: "0.25.0", efficient: true, torch: false },
];
const CHECKS: &str = "crates/server/tests/python/conformance.py";
const MODEL: &str = "tiny";

pub(crate) fn run(options: &[&str]) -> Result<(), Failure> {
    let (mut only, mut torch) = (None, true);
    let mut rest = options.iter();
    while let Some(option) = rest.next() {
        match *option {
            "--sdk" => match rest.next() {
                Some(version) if RUNS.iter().any(|run| run.version == *version) => {
                    only = Some(version);
                }
                _ => return Err(Failure::new("conformance: --sdk takes 0.36.0 or 0.25.0")),
            },
            "--without-torch" => torch = false,
            other => return Err(Failure::new(format!("conformance has no option {other}"))),
        }
    }
    cargo("server", &["build", "--locked", "--package", "tinkex-server"]).run()?;
    for run in RUNS.iter().filter(|run| only.is_none_or(|only| *only == run.version)) {
        let torch = torch && run.torch;
        let kind = if torch { "-torch" } else { "" };
        let folder = Path::new("conformance").join(format!("{}{kind}", run.version));
        let sdk = format!("tinker=={}", run.version);
        let packages = if torch { vec![sdk.as_str(), "torch"] } else { vec![sdk.as_str()] };
        let python = python::environment(&folder, &packages)?;
        check(&python, run, torch)?;
    }
    Ok(())
}

fn check(python: &Path, run: &Run, torch: bool) -> Result<(), Failure> {
    let Run { version, efficient, .. } = *run;
    let how = if efficient { "efficient" } else { "plain" };
    println!("\n==> conformance: tinker {version}, {how} clients");
    let data = target().join("conformance").join(format!("data-{version}-{how}"));
    // Left from the last time, or not there.
    let _ = std::fs::remove_dir_all(&data);
    let server = Server::start("debug", &data, efficient)?;
    let status = Command::new(python)
        .arg(root().join(CHECKS))
        .args([&server.url, MODEL])
        .args(torch.then_some("--torch"))
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
        let mut command = Command::new(target().join(profile).join("tinkex-server"));
        command.args(["--port", "0", "--quiet", "--no-hub-cache", "--data-dir"]).arg(data);
        command.args(["--model", &format!("{MODEL}={}", model.display())]);
        if !efficient {
            command.arg("--plain");
        }
        let mut child = command.stdout(Stdio::piped()).spawn().map_err(failed)?;
        let mut url = String::new();
        if let Some(out) = child.stdout.take() {
            BufReader::new(out).read_line(&mut url).map_err(failed)?;
        }
        let server = Self { child, url: url.trim().to_owned() };
        if server.url.starts_with("http://") {
            return Ok(server);
        }
        Err(Failure::new("the server ended before it was ready; it says why above"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself, which the checks have told already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
