//! `cargo xtask bench`: benchmarks against peers that run on the same machine at the same time.

mod engine;
mod engine_rows;

use std::path::{Path, PathBuf};

use crate::python::{self, Packages};
use crate::step::{XtaskError, cargo, target, tool};

/// The Python SDK that `bench client` and `bench cli` compare with.
const PYTHON_SDK: &str = "tinker==0.36.0";

pub(crate) fn run(what: &str, options: &[&str]) -> Result<(), XtaskError> {
    match (what, options) {
        ("wire", []) => {
            cargo("benchmark", &["bench", "--locked", "--package", "tinkex-wire"]).run()
        }
        ("client", [] | ["--quick"]) => {
            cargo("benchmark", &["bench", "--locked", "--package", "tinkex", "--bench", "client"])
                .arguments(&["--", "--python"])
                .argument(python_sdk()?)
                .arguments(options)
                .run()
        }
        ("cli", []) => cli(),
        ("gateway", []) => {
            let arguments = ["bench", "--locked", "--package", "tinkex-cli", "--bench", "gateway"];
            cargo("benchmark", &arguments).run()
        }
        ("engine", options) => engine::run(options),
        ("server", [] | ["--llama"] | ["--streams"]) => {
            let arguments =
                ["bench", "--locked", "--package", "tinkex-server", "--bench", "server"];
            let benchmark = cargo("benchmark", &arguments);
            match options {
                [] => benchmark.run(),
                ["--streams"] => benchmark.arguments(&["--", "--streams"]).run(),
                _ => {
                    let python = python::llama_cpp()?;
                    benchmark.arguments(&["--", "--llama"]).argument(python).run()
                }
            }
        }
        ("wire" | "client" | "cli" | "gateway" | "server", options) => {
            Err(XtaskError::new(format!("bench {what}: unknown option {}", options.join(" "))))
        }
        (other, _) => Err(XtaskError::new(format!(
            "no benchmark {other}; expected one of: wire, client, cli, engine, gateway, server"
        ))),
    }
}

fn python_sdk() -> Result<PathBuf, XtaskError> {
    python::environment(Path::new("bench/python"), &Packages::wheels(&[PYTHON_SDK]))
}

/// Compares the shipped binary with the Python CLI: size, start-up time and memory.
fn cli() -> Result<(), XtaskError> {
    let python = python_sdk()?;
    crate::dist()?;
    tool("start-up and memory", &python, &["crates/cli/benches/startup.py"])
        .argument(target().join("dist/tinkex"))
        .argument(python.with_file_name("tinker"))
        .run()
}
