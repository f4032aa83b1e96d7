//! `cargo xtask bench`: benchmarks against peers that run on the same machine at the same time.

mod engine;
mod engine_rows;

use std::path::{Path, PathBuf};

use clap::Subcommand;

use crate::python::{self, Packages};
use crate::step::{Step, XtaskError, cargo, target, tool};
use engine::EngineArgs;

/// The Python SDK that `bench client` and `bench cli` compare with.
const PYTHON_SDK: &str = "tinker==0.36.0";

/// Benchmark to run.
#[derive(Subcommand)]
pub(crate) enum Benchmark {
    /// Codecs, compared with memcpy and prost
    Wire,
    /// Client, compared with the Python SDK and with bare requests (needs python3)
    Client {
        /// Run each row once
        #[arg(long)]
        quick: bool,
    },
    /// Binary size, start-up time and memory, compared with the Python CLI (needs python3)
    Cli,
    /// Training and sampling, compared with torch, peft and llama.cpp (needs python3)
    Engine(EngineArgs),
    /// What a gateway adds to an upstream that responds at once
    ///
    /// Measures latency, CPU time per sample, and memory with 10,000 samples outstanding.
    Gateway,
    /// Overhead of the server over the engine's own time, idle and under load
    Server {
        /// Measure only streams
        #[arg(long, conflicts_with = "llama")]
        streams: bool,
        /// Compare streams with llama.cpp's server, which is built once
        #[arg(long)]
        llama: bool,
    },
}

pub(crate) fn run(benchmark: &Benchmark) -> Result<(), XtaskError> {
    match *benchmark {
        Benchmark::Wire => program("tinkex-wire", "codec").run(),
        Benchmark::Client { quick } => program("tinkex", "client")
            .arguments(&["--", "--python"])
            .argument(python_sdk()?)
            .arguments(if quick { &["--quick"] } else { &[] })
            .run(),
        Benchmark::Cli => cli(),
        Benchmark::Engine(ref args) => engine::run(args),
        Benchmark::Gateway => program("tinkex-cli", "gateway").run(),
        Benchmark::Server { llama: true, .. } => program("tinkex-server", "server")
            .arguments(&["--", "--llama"])
            .argument(python::llama_cpp()?)
            .run(),
        Benchmark::Server { streams, .. } => program("tinkex-server", "server")
            .arguments(if streams { &["--", "--streams"] } else { &[] })
            .run(),
    }
}

/// Creates a step that runs the benchmark program `name` of `package`.
fn program(package: &str, name: &str) -> Step {
    cargo("benchmark", &["bench", "--locked", "--package", package, "--bench", name])
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

#[cfg(test)]
mod tests {
    use clap::Subcommand as _;

    use crate::step::root;

    use super::Benchmark;

    /// Covers P6C.7.
    #[test]
    fn the_performance_baseline_names_every_benchmark() {
        let document = std::fs::read_to_string(root().join("docs/performance.md")).unwrap();
        for benchmark in
            Benchmark::augment_subcommands(clap::Command::new("bench")).get_subcommands()
        {
            let command = format!("`cargo xtask bench {}`", benchmark.get_name());
            assert!(document.contains(&command), "docs/performance.md does not name {command}");
        }
    }
}
