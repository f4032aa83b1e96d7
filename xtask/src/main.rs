//! Every command that a person or CI runs: `cargo xtask <command>`.
//!
//! Each says what it does, runs the same tools anyone could run by hand, and stops at the first
//! failure with the command that failed.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "a command-line tool talks to its user")]

mod arch;
mod bench;
mod conformance;
mod engine;
mod fuzz;
mod step;

use std::process::ExitCode;

use step::{Failure, cargo};

const HELP: &str = "\
Usage: cargo xtask <command>

  test            everything that must hold: fmt, lint, the tests, doc, arch
  fmt             formatting (`--fix` to mend it)
  lint            clippy, with warnings as errors
  doc             the documentation, with broken links as errors
  arch            who may depend on whom
  bench WHAT      a benchmark, as ratios to its peers in the same run
                    wire      codecs against memcpy and prost
                    client    tinkex against the Python SDK and the bare requests
                              (needs python3; `--quick` only shows that it runs)
                    cli       size, start-up and memory against the Python command line
                    engine    training and sampling against torch and peft
                    server    requests per second, many connections, large bodies
  conformance     the official Python SDK against a fresh server
                    --sdk VERSION  one version only (0.36.0 and 0.25.0)
  crash           a training run that is killed again and again, over many seeds
  fuzz            every reader of foreign bytes, on mutated fixtures and noise
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
        ["test"] => test(),
        ["fmt"] => fmt(&["--check"]),
        ["fmt", "--fix"] => fmt(&[]),
        ["lint"] => lint(),
        ["doc"] => doc(),
        ["arch"] => arch::check(),
        ["bench", what, options @ ..] => bench::run(what, options),
        ["conformance", options @ ..] => conformance::run(options),
        ["crash"] => crash(),
        ["fuzz", options @ ..] => fuzz::run(options),
        [] | ["help" | "--help" | "-h"] => {
            print!("{HELP}");
            Ok(())
        }
        other => Err(Failure::new(format!("no such command: {}\n\n{HELP}", other.join(" ")))),
    }
}

fn test() -> Result<(), Failure> {
    fmt(&["--check"])?;
    lint()?;
    cargo(
        "tests and documentation examples",
        &["test", "--workspace", "--all-features", "--locked"],
    )
    .run()?;
    doc()?;
    arch::check()?;
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
    let test = "restart::runs_of_the_client_survive_kills_over_many_seeds";
    cargo(
        "killing servers",
        &["test", "--locked", "--package", "tinkex-server", "--test", "it", test],
    )
    .arguments(&["--", "--ignored", "--nocapture"])
    .run()
}
