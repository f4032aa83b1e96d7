//! Benchmarks, and the peer that one of them needs.

use std::path::Path;

use crate::python;
use crate::step::{Failure, cargo, target, tool};

/// What `bench client` and `bench cli` measure against.
const PEER: &str = "tinker==0.36.0";

pub(crate) fn run(what: &str, options: &[&str]) -> Result<(), Failure> {
    match (what, options) {
        ("wire", []) => {
            cargo("benchmark", &["bench", "--locked", "--package", "tinkex-wire"]).run()
        }
        ("client", [] | ["--quick"]) => {
            let python = python::environment(Path::new("bench/python"), &[PEER])?;
            let python = python.to_str().ok_or_else(|| Failure::new("a path that is no text"))?;
            cargo("benchmark", &["bench", "--locked", "--package", "tinkex", "--bench", "client"])
                .arguments(&["--", "--python", python])
                .arguments(options)
                .run()
        }
        ("cli", []) => cli(),
        ("engine", options) => crate::engine::bench(options),
        ("server", []) => {
            let arguments =
                ["bench", "--locked", "--package", "tinkex-server", "--bench", "server"];
            cargo("benchmark", &arguments).run()
        }
        ("wire" | "client" | "cli" | "server", options) => {
            Err(Failure::new(format!("bench {what}: no such option: {}", options.join(" "))))
        }
        (other, _) => Err(Failure::new(format!(
            "no such benchmark: {other}; there are: wire, client, cli, engine, server"
        ))),
    }
}

/// The command line against the one of the Python SDK: size, start-up, memory.
fn cli() -> Result<(), Failure> {
    let python = python::environment(Path::new("bench/python"), &[PEER])?;
    let peer = python.with_file_name("tinker");
    cargo("the command line", &["build", "--locked", "--release", "--package", "tinkex-cli"])
        .run()?;
    tool("start-up and memory", &python, &["crates/cli/benches/startup.py"])
        .argument(target().join("release/tinkex"))
        .argument(&peer)
        .run()
}
