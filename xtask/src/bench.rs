//! Benchmarks, and the peer that one of them needs.

use std::path::PathBuf;

use crate::step::{Failure, cargo, root, tool};

/// What `bench client` and `bench cli` measure against.
const PEER: &str = "tinker==0.36.0";

pub(crate) fn run(what: &str, options: &[&str]) -> Result<(), Failure> {
    match (what, options) {
        ("wire", []) => {
            cargo("benchmark", &["bench", "--locked", "--package", "tinkex-wire"]).run()
        }
        ("client", [] | ["--quick"]) => {
            let python = peer()?;
            let python = python.to_str().ok_or_else(|| Failure::new("a path that is no text"))?;
            cargo("benchmark", &["bench", "--locked", "--package", "tinkex", "--bench", "client"])
                .arguments(&["--", "--python", python])
                .arguments(options)
                .run()
        }
        ("cli", []) => cli(),
        ("engine", []) => crate::engine::bench(),
        ("server", []) => crate::conformance::load(),
        ("wire" | "client" | "cli" | "engine" | "server", options) => {
            Err(Failure::new(format!("bench {what}: no such option: {}", options.join(" "))))
        }
        (other, _) => Err(Failure::new(format!(
            "no such benchmark: {other}; there are: wire, client, cli, engine, server"
        ))),
    }
}

/// The command line against the one of the Python SDK: size, start-up, memory.
fn cli() -> Result<(), Failure> {
    let python = peer()?;
    let peer = python.with_file_name("tinker");
    cargo("the command line", &["build", "--locked", "--release", "--package", "tinkex-cli"])
        .run()?;
    tool("start-up and memory", &python, &["crates/cli/benches/startup.py"])
        .argument(root().join("target/release/tinkex"))
        .argument(&peer)
        .run()
}

/// A Python with the peer, installed when it is not there yet.
fn peer() -> Result<PathBuf, Failure> {
    let folder = root().join("target").join("bench").join("python");
    let python = folder.join("bin").join("python");
    // Written last, so that half an installation is not taken for one.
    let done = folder.join(PEER);
    if !done.exists() {
        tool("a Python environment", "python3", &["-m", "venv", "--clear"])
            .argument(&folder)
            .run()?;
        tool("the Python SDK", &python, &["-m", "pip", "install", "--quiet", PEER]).run()?;
        std::fs::write(&done, "")
            .map_err(|why| Failure::new(format!("{}: {why}", done.display())))?;
    }
    Ok(python)
}
