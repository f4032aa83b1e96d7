//! `cargo xtask cluster`: checks the client and the command line against SkyRL's own server.
//!
//! Installs SkyRL from PyPI into `target/cluster`, starts it on a loopback address with its JAX
//! backend on the CPU, and runs the contract suite and `tinkex` against it.

mod program;
mod server;

use std::time::Instant;

use crate::contract;
use crate::step::{XtaskError, cargo, ignored_test, root, target};

use program::Program;
use server::SkyrlServer;

/// Release of SkyRL to check.
struct Release {
    version: &'static str,
    port: u16,
}

/// Releases to check. `--record` records the exchanges of the first.
const RELEASES: [Release; 2] =
    [Release { version: "0.4.0", port: 8391 }, Release { version: "0.3.0", port: 8392 }];

/// Checks of the contract suite that SkyRL fails, and why.
const DIFFERENCES: [(&str, &str); 5] = [
    ("every_documented_loss_runs", "there is no loss `dro`"),
    ("the_most_likely_tokens_are_reported", "the JAX backend has no top-k log-probabilities"),
    (
        "saved_weights_can_be_sampled",
        "the JAX backend loads a sampled checkpoint into the model in training",
    ),
    ("invalid_samples_are_rejected", "token ids outside the vocabulary are accepted"),
    ("missing_objects_are_not_found", "a missing model or checkpoint fails at the first sample"),
];

/// Line of the final table.
struct Row {
    version: &'static str,
    check: &'static str,
    result: String,
    seconds: f64,
}

pub(crate) fn run(options: &[&str]) -> Result<(), XtaskError> {
    let (mut only, mut record) = (None, false);
    let mut options = options.iter();
    while let Some(option) = options.next() {
        match (*option, options.as_slice().first()) {
            ("--record", _) => record = true,
            ("--skyrl", Some(version)) if RELEASES.iter().any(|r| r.version == *version) => {
                only = options.next();
            }
            ("--skyrl", _) => {
                return Err(XtaskError::new("cluster: --skyrl must be 0.4.0 or 0.3.0"));
            }
            (other, _) => {
                return Err(XtaskError::new(format!("cluster: unknown option {other}")));
            }
        }
    }
    if record && only.is_some_and(|only| *only != RELEASES[0].version) {
        return Err(XtaskError::new("cluster: --record needs SkyRL 0.4.0"));
    }
    cargo("command line", &["build", "--locked", "--package", "tinkex-cli"]).run()?;
    let mut rows = Vec::new();
    for release in RELEASES.iter().filter(|r| only.is_none_or(|only| *only == r.version)) {
        let server = SkyrlServer::start(release.version, release.port)?;
        check(&server, release.version, &mut rows)
            .map_err(|error| XtaskError::new(format!("{error}\n  log: {}", server.log_path())))?;
        if record && release.version == RELEASES[0].version {
            let test = "recorded_server::record_skyrl_0_4";
            ignored_test("recording", "tinkex", test, &["--all-features"])?
                .variable("TINKEX_RECORD_URL", server.url())
                .run()?;
        }
    }
    print_table(&rows);
    Ok(())
}

/// Runs all checks against one server.
fn check(
    server: &SkyrlServer,
    version: &'static str,
    rows: &mut Vec<Row>,
) -> Result<(), XtaskError> {
    let mut row = |check, run: &dyn Fn() -> Result<String, XtaskError>| {
        let start = Instant::now();
        let result = run()?;
        rows.push(Row { version, check, result, seconds: start.elapsed().as_secs_f64() });
        Ok::<_, XtaskError>(())
    };
    row("contract suite", &|| contract_suite(server))?;
    let folder = target().join("cluster").join(version).join("program");
    let program = Program::new(folder, server.url())?;
    row("tinkex train", &|| program.train())?;
    row("tinkex sample", &|| program.sample())?;
    row("tinkex train --resume", &|| program.resume())
}

/// Runs the contract suite and returns a summary.
fn contract_suite(server: &SkyrlServer) -> Result<String, XtaskError> {
    let report = target().join("cluster").join("contract-report");
    let names: Vec<&str> = DIFFERENCES.iter().map(|(name, _)| *name).collect();
    let _ = std::fs::remove_file(&report);
    contract::step(&[("TINKEX_CONTRACT_URL", server.url().to_owned())])?
        .variable("TINKEX_CONTRACT_DIFFERENCES", names.join(","))
        .variable("TINKEX_CONTRACT_REPORT", &report)
        .run()?;
    let report = std::fs::read_to_string(&report)
        .map_err(|error| XtaskError::new(format!("the contract suite left no report: {error}")))?;
    let count = |outcome: &str| report.lines().filter(|line| line.starts_with(outcome)).count();
    let (passed, differ, skipped) = (count("passed"), count("differs"), count("skipped"));
    Ok(format!("{passed} passed, {differ} differ, {skipped} without the endpoint"))
}

fn print_table(rows: &[Row]) {
    println!("\n| SkyRL | Check | Result | Seconds |\n|---|---|---|---|");
    for Row { version, check, result, seconds } in rows {
        println!("| {version} | {check} | {result} | {seconds:.0} |");
    }
    println!("\nKnown differences:");
    for (check, reason) in DIFFERENCES {
        println!("  {check}: {reason}");
    }
    println!("\nLogs and environments: {}", target().join("cluster").display());
}

/// Returns the folder of the model that the servers load.
fn model() -> std::path::PathBuf {
    root().join("crates/engine/models/tiny")
}
