//! Development commands: `cargo xtask <command>`.
//!
//! Every command prints the tools it runs, so that each can be repeated by hand, and stops at the
//! first failure.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "a command-line tool prints to standard output")]

mod api;
mod arch;
mod bench;
mod browser;
mod cargo_tool;
mod cluster;
mod conformance;
mod contract;
mod coverage;
mod deny;
mod features;
mod fixtures;
mod fuzz;
mod guided_fuzz;
mod llama;
mod mutants;
mod python;
mod record;
mod reference;
mod scenarios;
mod screenshot;
mod soak;
mod step;
mod stress;
mod test;
mod test_programs;
mod test_server;
mod type_names;
mod ui;

use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

use bench::Benchmark;
use browser::BrowserArgs;
use cluster::ClusterArgs;
use conformance::ConformanceArgs;
use contract::ContractArgs;
use fuzz::FuzzArgs;
use mutants::MutantsArgs;
use record::RecordArgs;
use soak::SoakArgs;
use step::{XtaskError, cargo, ignored_test, target};
use stress::{AttackArgs, LoadArgs};
use test::TestArgs;

/// Development commands of this repository
///
/// They need cargo only, except where the help of a command says otherwise.
#[derive(Parser)]
#[command(name = "xtask", bin_name = "cargo xtask", max_term_width = 100)]
struct Xtask {
    #[command(subcommand)]
    command: XtaskCommand,
}

#[derive(Subcommand)]
enum XtaskCommand {
    /// Run everything that CI checks
    Test(TestArgs),
    /// Check the formatting of the code
    Fmt(FixArgs),
    /// Run clippy with warnings as errors
    Lint,
    /// Lint every package without features, with each feature alone, and with all
    Features,
    /// Build the documentation with warnings as errors
    Doc,
    /// Check dependencies between crates, and that exported type names are unique
    Arch,
    /// Compare the public API of the crate tinkex with docs/api.txt
    Api(FixArgs),
    /// Compare the tests of every scenario with docs/scenarios.md
    Scenarios(FixArgs),
    /// Compare the help of every tinkex command with docs/commands.md
    Reference(FixArgs),
    /// Test the dashboard in headless Chromium
    ///
    /// Installs the Debian packages chromium and chromium-driver if they are missing and apt-get can
    /// be used; otherwise it says that it was skipped. Checks accessibility if npm can install
    /// axe-core.
    Browser(BrowserArgs),
    /// Test the scripts of the dashboard and check their types
    ///
    /// Needs node; without npm, the types are not checked.
    Ui,
    /// Build the binary to ship: target/dist/tinkex
    Dist,
    /// Check that every crate can be packaged, without publishing
    Package,
    /// Render the output of `tinkex quickstart` as docs/images/quickstart.svg
    Screenshot,
    /// Run a benchmark; results are ratios to a peer in the same run
    #[command(subcommand)]
    Bench(Benchmark),
    /// Run the official Python SDK against a new server
    ///
    /// Repeats a training run of the SDK with the Rust client and compares the numbers; runs the
    /// packages openai and anthropic; compares adapters, exported models and model folders with peft
    /// and transformers. Needs python3; installs the packages under target once (three minutes,
    /// 6 GB).
    Conformance(ConformanceArgs),
    /// Compare exported GGUF files in llama.cpp with the server
    ///
    /// Trains small models, exports them in all types, and compares tokens, chat template,
    /// log-probabilities and greedy samples: with the checkpoint, and with the file as base model.
    /// Needs python3 and a C++ compiler; installs the packages of `conformance` and builds llama.cpp
    /// under target once (12 minutes on 2 cores).
    Llama,
    /// Run the contract suite against any Tinker server
    Contract(ContractArgs),
    /// Record the official Python SDK as fixtures, and list what changed
    ///
    /// Records requests, command lines, behaviour and signatures against servers on the loopback
    /// interface (six minutes). Needs python3.11 or the variable PYTHON311 with its path.
    Record(RecordArgs),
    /// Measure line coverage of tinkex-wire and tinkex; fails below the minimum
    ///
    /// Needs `rustup component add llvm-tools`.
    Coverage,
    /// Check the client, the command line and the gateway against SkyRL
    ///
    /// Runs the contract suite, `tinkex`, the official SDK and the package openai, directly and
    /// through a gateway. Needs 2 GB of disk, and python3.12 or the variable PYTHON312 with its path.
    Cluster(ClusterArgs),
    /// Run clients and a server in simulated time with random faults
    ///
    /// `--seed S --seeds 1 -v` repeats a scenario that failed and prints its events.
    Simulate(SimulateArgs),
    /// Train while the server is killed and its disk fills up, with 25 random seeds
    Crash,
    /// Run client programs against a server that is killed or stopped at random moments
    ///
    /// Fails if they compute other things than with a server that is not killed, or if memory, file
    /// handles, threads or disk grow. Needs Linux.
    Soak(SoakArgs),
    /// Attack a server in 1 GiB of memory, and check that it serves an honest user meanwhile
    ///
    /// Slow bodies, thousands of connections, long prompts, large metadata, compressed and nested
    /// bodies, guessed keys, one very large training pass, and many queued samples. Prints a table,
    /// and fails if a request of the honest user takes too long, memory exceeds its limit, or an
    /// accepted request is lost. Needs Linux.
    Attack(AttackArgs),
    /// Measure a server with many clients of several users, compared with one client
    ///
    /// Completions, streams, samples, training and open dashboards. Prints a table for
    /// docs/performance.md, and fails if a request fails or the users are not treated alike.
    Load(LoadArgs),
    /// Check licences, duplicate versions, sources and advisories of the dependencies
    ///
    /// Follows the rules of deny.toml. Installs cargo-deny under target once; skips advisories if
    /// their database cannot be downloaded.
    Deny,
    /// Fuzz the decoders of the wire crate
    Fuzz(FuzzArgs),
    /// Change the client in one place at a time, and check that a test fails for each change
    ///
    /// Takes hours; `--shard 0/50` runs every 50th change. Installs cargo-mutants under target once;
    /// needs cargo-nextest.
    Mutants(MutantsArgs),
}

/// Whether a command updates what it otherwise checks.
#[derive(Args)]
struct FixArgs {
    /// Apply the changes instead of failing
    #[arg(long)]
    fix: bool,
}

/// Options of the simulation; the program `tinkex-simulation` has the defaults.
#[derive(Args)]
struct SimulateArgs {
    /// Number of scenarios [default: 1000, or as many as fit into --minutes]
    #[arg(long, value_name = "N")]
    seeds: Option<u64>,
    /// First seed [default: 0]
    #[arg(long, value_name = "SEED")]
    seed: Option<u64>,
    /// Start no further scenario after this time
    #[arg(long, value_name = "MINUTES")]
    minutes: Option<u64>,
    /// Run every N-th seed twice and compare the events; 0 disables the check [default: 50]
    #[arg(long, value_name = "N")]
    check: Option<u64>,
    /// Print the events of every scenario
    #[arg(short)]
    verbose: bool,
}

impl SimulateArgs {
    fn run(&self) -> Result<(), XtaskError> {
        let run = ["run", "--release", "--locked", "--package", "tinkex-simulation", "--"];
        let numbers = [
            ("--seeds", self.seeds),
            ("--seed", self.seed),
            ("--minutes", self.minutes),
            ("--check", self.check),
        ];
        let mut simulation = cargo("simulation", &run);
        for (name, number) in numbers {
            if let Some(number) = number {
                simulation = simulation.arguments(&[name, &number.to_string()]);
            }
        }
        if self.verbose {
            simulation = simulation.arguments(&["-v"]);
        }
        simulation.run()
    }
}

fn main() -> ExitCode {
    if let Some(code) = api::run_as_rustdoc() {
        return code;
    }
    match run(Xtask::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("\nxtask: {failure}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: XtaskCommand) -> Result<(), XtaskError> {
    match command {
        XtaskCommand::Test(args) => test::run(&args),
        XtaskCommand::Fmt(FixArgs { fix }) => fmt(fix),
        XtaskCommand::Lint => lint(),
        XtaskCommand::Features => features::check(),
        XtaskCommand::Doc => doc(),
        XtaskCommand::Arch => architecture(),
        XtaskCommand::Api(FixArgs { fix }) => api::check(fix),
        XtaskCommand::Scenarios(FixArgs { fix }) => scenarios::check(fix),
        XtaskCommand::Reference(FixArgs { fix }) => reference::check(fix),
        XtaskCommand::Browser(args) => browser::run(&args),
        XtaskCommand::Ui => ui::check(),
        XtaskCommand::Dist => dist(),
        XtaskCommand::Package => package(),
        XtaskCommand::Screenshot => screenshot::run(),
        XtaskCommand::Bench(benchmark) => bench::run(&benchmark),
        XtaskCommand::Conformance(args) => conformance::run(&args),
        XtaskCommand::Llama => llama::run(),
        XtaskCommand::Contract(args) => contract::run(&args),
        XtaskCommand::Record(args) => record::run(&args),
        XtaskCommand::Coverage => coverage::run(),
        XtaskCommand::Cluster(args) => cluster::run(&args),
        XtaskCommand::Simulate(args) => args.run(),
        XtaskCommand::Crash => crash(),
        XtaskCommand::Soak(args) => soak::run(&args),
        XtaskCommand::Attack(args) => stress::attack(&args),
        XtaskCommand::Load(args) => stress::load(&args),
        XtaskCommand::Deny => deny::run(),
        XtaskCommand::Fuzz(args) => fuzz::run(&args),
        XtaskCommand::Mutants(args) => mutants::run(&args),
    }
}

fn fmt(fix: bool) -> Result<(), XtaskError> {
    let options: &[&str] = if fix { &[] } else { &["--check"] };
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

fn crash() -> Result<(), XtaskError> {
    ignored_test(
        "crash test",
        "tinkex-server",
        "crash::training_survives_faults_over_many_seeds",
        &[],
    )?
    .run()
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, Parser as _};

    use super::Xtask;
    use crate::step::root;

    #[test]
    fn the_command_line_is_well_formed() {
        Xtask::command().debug_assert();
    }

    #[test]
    fn the_commands_of_the_quality_gates_exist() {
        let document = std::fs::read_to_string(root().join("docs/scenarios.md")).unwrap();
        let gates: Vec<&str> = document.lines().filter(|line| line.starts_with("| Q")).collect();
        assert_eq!(gates.len(), 8, "Q0 to Q7");
        for gate in gates {
            let commands = gate.split('|').nth(4).unwrap();
            for name in commands.split('`').skip(1).step_by(2) {
                assert!(Xtask::command().find_subcommand(name).is_some(), "{gate}: {name}");
            }
        }
    }

    #[test]
    fn valid_command_lines_are_accepted_and_invalid_ones_refused() {
        for line in [
            "xtask simulate --seed 7 --seeds 1 -v",
            "xtask fuzz --seconds 5",
            "xtask fuzz server --seed 3",
            "xtask fuzz guided --target wire --minimize",
            "xtask conformance adapters",
            "xtask bench engine decode B --repeat 5",
            "xtask cluster kills --seeds 4",
            "xtask test --without-python",
            "xtask attack --seconds 5 --only slow-bodies",
        ] {
            assert!(Xtask::try_parse_from(line.split(' ')).is_ok(), "{line}");
        }
        for line in [
            "xtask fuzz guided --seed 3",
            "xtask conformance adapters --sdk 0.36.0",
            "xtask conformance --sdk 1.0.0",
            "xtask contract",
            "xtask cluster --direct --gateway",
            "xtask bench engine none",
        ] {
            assert!(Xtask::try_parse_from(line.split(' ')).is_err(), "{line}");
        }
    }
}
