//! Development commands: `cargo xtask <command>`.
//!
//! Every command prints the tools it runs, so that each can be repeated by hand, and stops at the
//! first failure.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "a command-line tool prints to standard output")]

mod arch;
mod bench;
mod browser;
mod cluster;
mod conformance;
mod contract;
mod coverage;
mod deny;
mod fuzz;
mod guided_fuzz;
mod llama;
mod python;
mod record;
mod screenshot;
mod soak;
mod step;
mod test_server;
mod type_names;
mod ui;

use std::process::ExitCode;

use step::{XtaskError, cargo, ignored_test, target};

const HELP: &str = "\
Usage: cargo xtask <command>

  test            Run everything that CI checks: fmt, lint, tests, doc, arch, browser,
                  conformance
                    --without-python  Skip conformance, which needs python3 and a registry
                    --without-torch   Skip the part of conformance that needs torch (6 GB of disk)
  fmt             Check formatting (`--fix` to apply it)
  lint            Run clippy with warnings as errors
  doc             Build the documentation with broken links as errors
  arch            Check dependencies between crates, and that type names are unique
  browser         Test the dashboard in headless Chromium (installs the Debian packages chromium and
                  chromium-driver if they are missing)
                    --screenshots  Update the images of docs/images instead
  ui              Compress the files of the dashboard after a change in crates/server/ui
  dist            Build the binary to ship: target/dist/tinkex
  package         Check that every crate can be packaged, without publishing
  screenshot      Render the output of `tinkex quickstart` as docs/images/quickstart.svg
  bench WHAT      Run a benchmark; results are ratios to a peer in the same run
                    wire      Codecs, compared with memcpy and prost
                    client    Client, compared with the Python SDK and with bare requests
                              (needs python3; `--quick` runs each row once)
                    cli       Binary size, start-up time and memory, compared with the Python CLI
                    engine    Training and sampling, compared with torch, peft and llama.cpp
                              (needs python3; without labels all rows, otherwise the rows with the
                              labels: train ragged decode lora adapters live context load, A B,
                              f32 bf16 q8_0 q4_k; `--repeat N` sets the measurements per row,
                              3 by default)
                    gateway   What a gateway adds to an upstream that responds at once: latency, CPU
                              time per sample, memory with 10,000 samples outstanding
                    server    Overhead over the engine's own time, idle and under load; `--streams`
                              measures only streams, `--llama` compares them with llama.cpp's
                              server (builds llama.cpp once)
  conformance     Run the official Python SDK against a new server, repeat a training run with the
                  Rust client and compare the numbers; run the packages openai and anthropic; and
                  compare adapters, exported models and model folders with peft and transformers
                    adapters         Compare adapters, exported models and model folders only
                    inference        Run the packages openai (PyPI, npm) and anthropic only
                    lm-eval          Evaluate a checkpoint with lm-eval (not part of the others)
                    --sdk VERSION    Test one version only: 0.36.0 or 0.25.0
                    --without-torch  Skip the custom losses and the adapters
  llama           Export trained models as GGUF files, load them in llama.cpp and compare what it
                  generates with the server (builds llama.cpp once, which takes minutes)
  contract        Run the contract suite against any Tinker server
                    --base-url URL        Base URL of the server
                    --api-key-file FILE   File that contains the API key
                    --model NAME          Base model [default: the first that the server lists]
  record          Record the exchanges of the official Python SDK with a new server as fixtures/sdk,
                  and list what changed
                    --sdk VERSION  Version of the SDK [default: 0.36.0]
  coverage        Measure line coverage of tinkex-wire and tinkex; fails below the minimum
                  (needs `rustup component add llvm-tools`)
  cluster         Run the contract suite, `tinkex`, the official SDK and openai against SkyRL, directly
                  and through a gateway (needs 2 GB of disk, and python3.12 or the variable
                  PYTHON312 with its path)
                    kills            Train while the gateway or SkyRL is killed, and compare losses
                    upstreams        Train through one gateway on two servers; one is killed
                    --skyrl VERSION  Check one release only: 0.4.0 or 0.3.0
                    --direct         Without the gateway
                    --gateway        Only through the gateway
                    --seeds N        Runs of `kills` in which the gateway is killed [default: 10];
                                     SkyRL is killed in half as many
                    --check NAME     Run only the checks whose names contain this; repeatable
                    --record         Record the exchanges that the tests replay
  simulate        Run clients and a server in simulated time with random faults (crates/simulation)
                    --seeds N    Number of scenarios [default: 1000]
                    --seed S     First seed [default: 0]
                    --minutes M  Run scenarios for this time
                    --check K    Run every K-th seed twice and compare [default: 50; 0: never]
                    -v           Print the events of every scenario
  crash           Train while the server is killed and its disk fills up, with 25 random seeds
  soak            Run client programs against a server that is killed or stopped at random moments and
                  one that is not; fails if they compute different things, or if memory, file handles,
                  threads or disk grow
                    --minutes N   Duration [default: 30]
                    --seed N      Seed of the programs and of the kills [default: 1]
  deny            Check licences, duplicate versions, sources and advisories of the dependencies
                  (installs cargo-deny; skips advisories if their database cannot be downloaded)
  fuzz [server]   Fuzz all decoders of the wire crate, or all routes of a server
  fuzz weights    Fuzz the reader of GGUF files
                    --seconds N   Duration [default: 60]
                    --seed N      Seed of the run to repeat
                    --target T    Decoder to fuzz [default: all]
  fuzz guided     Fuzz readers with libFuzzer, guided by coverage (needs Linux and a C++ compiler)
                    --seconds N   Duration for each reader [default: 60]
                    --target T    Reader: adapter, config, gguf, safetensors, template or wire
                                  [default: all]
                    --minimize    Replace fuzz/corpus by a minimal corpus with the same coverage
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("\nxtask: {failure}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[&str]) -> Result<(), XtaskError> {
    match arguments {
        ["test"] => test(Some(&[])),
        ["test", "--without-python"] => test(None),
        ["test", "--without-torch"] => test(Some(&["--without-torch"])),
        ["fmt"] => fmt(&["--check"]),
        ["fmt", "--fix"] => fmt(&[]),
        ["lint"] => lint(),
        ["doc"] => doc(),
        ["arch"] => architecture(),
        ["browser", options @ ..] => browser::run(options),
        ["ui"] => ui::run(),
        ["dist"] => dist(),
        ["package"] => package(),
        ["screenshot"] => screenshot::run(),
        ["bench", what, options @ ..] => bench::run(what, options),
        ["conformance", options @ ..] => conformance::run(options),
        ["contract", options @ ..] => contract::run(options),
        ["record", options @ ..] => record::run(options),
        ["coverage"] => coverage::run(),
        ["cluster", options @ ..] => cluster::run(options),
        ["simulate", options @ ..] => simulate(options),
        ["crash"] => crash(),
        ["soak", options @ ..] => soak::run(options),
        ["deny"] => deny::run(),
        ["llama"] => llama::run(),
        ["fuzz", options @ ..] => fuzz::run(options),
        [] | ["help" | "--help" | "-h"] => {
            print!("{HELP}");
            Ok(())
        }
        other => Err(XtaskError::new(format!("unknown command: {}\n\n{HELP}", other.join(" ")))),
    }
}

fn test(conformance: Option<&[&str]>) -> Result<(), XtaskError> {
    fmt(&["--check"])?;
    lint()?;
    cargo(
        "tests and documentation examples",
        &["test", "--workspace", "--all-features", "--locked"],
    )
    .run()?;
    doc()?;
    architecture()?;
    browser::run(&[])?;
    match conformance {
        Some(options) => conformance::run(options)?,
        None => println!("\n==> conformance: SKIPPED (--without-python)"),
    }
    println!("\nAll checks passed.");
    Ok(())
}

fn fmt(options: &[&str]) -> Result<(), XtaskError> {
    cargo("formatting", &["fmt", "--all"]).arguments(options).run()
}

fn lint() -> Result<(), XtaskError> {
    // Features are additive, so the crates must compile with all of them and with none.
    for features in ["--all-features", "--no-default-features"] {
        cargo("lints", &["clippy", "--workspace", "--all-targets", "--locked", features])
            .arguments(&["--", "--deny", "warnings"])
            .run()?;
    }
    Ok(())
}

fn doc() -> Result<(), XtaskError> {
    cargo("documentation", &["doc", "--workspace", "--all-features", "--no-deps", "--locked"])
        .variable("RUSTDOCFLAGS", "--deny warnings")
        .run()
}

fn architecture() -> Result<(), XtaskError> {
    arch::check()?;
    type_names::check()
}

fn dist() -> Result<(), XtaskError> {
    cargo("shipped binary", &["build", "--locked", "--profile", "dist", "--package", "tinkex-cli"])
        .run()?;
    println!("    {}", target().join("dist/tinkex").display());
    Ok(())
}

fn package() -> Result<(), XtaskError> {
    cargo("packages", &["package", "--workspace", "--locked", "--exclude", "xtask"])
        .arguments(&["--allow-dirty"])
        .run()
}

fn simulate(options: &[&str]) -> Result<(), XtaskError> {
    let run = ["run", "--release", "--locked", "--package", "tinkex-simulation", "--"];
    cargo("simulation", &run).arguments(options).run()
}

fn crash() -> Result<(), XtaskError> {
    ignored_test(
        "crash test",
        "tinkex-server",
        "crash::training_survives_faults_over_many_seeds",
        &[],
    )?
    .run()
}
