//! Every command that a person or CI runs: `cargo xtask <command>`.
//!
//! Each says what it does, runs the same tools anyone could run by hand, and stops at the first
//! failure with the command that failed.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "a command-line tool talks to its user")]

mod arch;
mod bench;
mod conformance;
mod contract;
mod engine;
mod fuzz;
mod python;
mod step;

use std::process::ExitCode;

use step::{Failure, cargo};

const HELP: &str = "\
Usage: cargo xtask <command>

  test            everything that must hold: fmt, lint, the tests, doc, arch, conformance
                    --without-python  not the last one, which needs python3 and a registry
                    --without-torch   not the part of it that needs torch (6 GB of disk)
  fmt             formatting (`--fix` to mend it)
  lint            clippy, with warnings as errors
  doc             the documentation, with broken links as errors
  arch            who may depend on whom
  bench WHAT      a benchmark, as ratios to its peers in the same run
                    wire      codecs against memcpy and prost
                    client    tinkex against the Python SDK and the bare requests
                              (needs python3; `--quick` only shows that it runs)
                    cli       size, start-up and memory against the Python command line
                    engine    training and sampling against torch, peft and llama.cpp
                              (needs python3; all rows, or those of some work, model or weights:
                              train ragged decode adapters live context load, A B, f32 bf16;
                              `--turns N` measures each so often, 3 if not said)
                    server    what it adds to the engine's time, alone and under load
  conformance     the official Python SDK against a fresh server
                    --sdk VERSION    one version only (0.36.0 and 0.25.0)
                    --without-torch  not the losses of one's own
  contract        what a program may expect of any server
                    --base-url URL        which one
                    --api-key-file FILE   the key for it
                    --model NAME          the base model to use (the first it has)
  crash           a training run whose server is killed and whose disk is full, over many seeds
  fuzz            every reader of foreign bytes, on mutated fixtures and noise
  fuzz server     every route of a server, over HTTP
                    --seconds N   for how long (60)
                    --seed N      to repeat a run
                    --target T    one reader only
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

fn run(arguments: &[&str]) -> Result<(), Failure> {
    match arguments {
        ["test"] => test(Some(&[])),
        ["test", "--without-python"] => test(None),
        ["test", "--without-torch"] => test(Some(&["--without-torch"])),
        ["fmt"] => fmt(&["--check"]),
        ["fmt", "--fix"] => fmt(&[]),
        ["lint"] => lint(),
        ["doc"] => doc(),
        ["arch"] => arch::check(),
        ["bench", what, options @ ..] => bench::run(what, options),
        ["conformance", options @ ..] => conformance::run(options),
        ["contract", options @ ..] => contract::run(options),
        ["crash"] => crash(),
        ["fuzz", options @ ..] => fuzz::run(options),
        [] | ["help" | "--help" | "-h"] => {
            print!("{HELP}");
            Ok(())
        }
        other => Err(Failure::new(format!("no such command: {}\n\n{HELP}", other.join(" ")))),
    }
}

fn test(conformance: Option<&[&str]>) -> Result<(), Failure> {
    fmt(&["--check"])?;
    lint()?;
    cargo(
        "tests and documentation examples",
        &["test", "--workspace", "--all-features", "--locked"],
    )
    .run()?;
    doc()?;
    arch::check()?;
    match conformance {
        Some(options) => conformance::run(options)?,
        None => println!("\n==> WITHOUT PYTHON: the official SDK was not tried against the server"),
    }
    println!("\nAll of it holds.");
    Ok(())
}

fn fmt(options: &[&str]) -> Result<(), Failure> {
    cargo("formatting", &["fmt", "--all"]).arguments(options).run()
}

fn lint() -> Result<(), Failure> {
    // Features only add: the crates hold with all of them and with none.
    for features in ["--all-features", "--no-default-features"] {
        cargo("lints", &["clippy", "--workspace", "--all-targets", "--locked", features])
            .arguments(&["--", "--deny", "warnings"])
            .run()?;
    }
    Ok(())
}

fn doc() -> Result<(), Failure> {
    cargo("documentation", &["doc", "--workspace", "--all-features", "--no-deps", "--locked"])
        .variable("RUSTDOCFLAGS", "--deny warnings")
        .run()
}

fn crash() -> Result<(), Failure> {
    let test = "crash::runs_of_the_client_survive_troubles_over_many_seeds";
    cargo(
        "killing servers",
        &["test", "--locked", "--package", "tinkex-server", "--test", "it", test],
    )
    .arguments(&["--", "--ignored", "--nocapture"])
    .run()
}
