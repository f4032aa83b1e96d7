//! `cargo xtask mutants`: changes the code of the client in one place at a time with
//! `cargo-mutants`, and checks that a test fails for each change.
//!
//! A changed program whose tests all pass is a survivor. `docs/scenarios.md` lists the survivors
//! that change nothing a user can observe, with the reason; any other survivor fails the command.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use clap::Args;

use crate::cargo_tool::CargoTool;
use crate::step::{XtaskError, root, target, tool};

const MUTANTS: CargoTool = CargoTool { name: "cargo-mutants", version: "27.1.0" };

/// Files that are changed.
const FILES: [&str; 5] = [
    "crates/transport/src/**/*.rs",
    "crates/session/src/future/*.rs",
    "crates/session/src/dispatch/*.rs",
    "crates/client/src/training/*.rs",
    "crates/client/src/sampling/*.rs",
];

/// Packages whose tests run for each change.
const TESTED: [&str; 3] = ["tinkex-transport", "tinkex-session", "tinkex"];

/// Heading of the list of survivors in `docs/scenarios.md`.
const HEADING: &str = "\n## Mutants that survive\n";

/// Arguments of `cargo xtask mutants`.
#[derive(Args)]
pub(crate) struct MutantsArgs {
    /// Files to change, as a glob; repeatable [default: transport, futures, training, sampling]
    #[arg(long, value_name = "GLOB")]
    file: Vec<String>,
    /// Run part K of N of the changes, with K from 0: each N-th change
    #[arg(long, value_name = "K/N")]
    shard: Option<String>,
}

pub(crate) fn run(args: &MutantsArgs) -> Result<(), XtaskError> {
    let program = MUTANTS.install()?;
    let folder = target().join("mutants");
    // Reports of an earlier run must not be read as reports of this one.
    let _ = fs::remove_dir_all(&folder);
    let default = FILES.map(str::to_owned);
    let files: &[String] = if args.file.is_empty() { &default } else { &args.file };
    // Changes of `Debug` texts are not behaviour.
    let mut step =
        tool("mutants", &program, &["mutants", "--workspace", "--exclude-re", "fmt::Debug"])
            .arguments(&["--test-tool", "nextest", "--sharding", "round-robin", "--no-times"])
            .arguments(&["--all-features", "--output"])
            .argument(&folder);
    for file in files {
        step = step.arguments(&["--file", file]);
    }
    for package in TESTED {
        step = step.arguments(&["--test-package", package]);
    }
    if let Some(shard) = &args.shard {
        step = step.arguments(&["--shard", shard]);
    }
    // cargo-mutants also fails if mutants survive, which is decided below.
    let finished = step.run();
    let reports = folder.join("mutants.out");
    let Ok(missed) = fs::read_to_string(reports.join("missed.txt")) else { return finished };
    let caught = fs::read_to_string(reports.join("caught.txt")).unwrap_or_default();
    if missed.is_empty() && caught.is_empty() {
        return finished;
    }
    let explained = explained(root())?;
    let unexplained: Vec<String> =
        missed.lines().map(without_position).filter(|mutant| !explained.contains(mutant)).collect();
    println!(
        "\n{} changes are found by a test, {} are not, of which {} are explained",
        caught.lines().count(),
        missed.lines().count(),
        missed.lines().count() - unexplained.len(),
    );
    if unexplained.is_empty() {
        return Ok(());
    }
    let list = unexplained.join("\n  ");
    Err(XtaskError::new(format!(
        "no test fails for these changes; add a test, or explain them in docs/scenarios.md:\n  \
         {list}"
    )))
}

/// Returns the survivors that `docs/scenarios.md` explains.
fn explained(root: &Path) -> Result<BTreeSet<String>, XtaskError> {
    let path = root.join("docs/scenarios.md");
    let document = fs::read_to_string(&path)
        .map_err(|error| XtaskError::new(format!("cannot read {}: {error}", path.display())))?;
    let Some((_, section)) = document.split_once(HEADING) else {
        return Err(XtaskError::new("docs/scenarios.md has no list of mutants that survive"));
    };
    let section = section.split("\n## ").next().unwrap_or_default();
    let cell = |row: &str| Some(row.strip_prefix("| `")?.split_once("` |")?.0.replace("\\|", "|"));
    Ok(section.lines().filter_map(cell).collect())
}

/// Removes line and column from `FILE:LINE:COLUMN: CHANGE`, because they move with every edit.
fn without_position(mutant: &str) -> String {
    let mut parts = mutant.splitn(4, ':');
    match (parts.next(), parts.next(), parts.next(), parts.next()) {
        (Some(file), Some(_), Some(_), Some(change)) => format!("{file}:{change}"),
        _ => mutant.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn survivors_are_named_without_their_position() {
        let mutant = "crates/a/src/b.rs:12:5: replace a::f -> bool with true";
        assert_eq!(without_position(mutant), "crates/a/src/b.rs: replace a::f -> bool with true");
    }

    #[test]
    fn the_explained_survivors_are_read_from_the_document() {
        let explained = explained(root()).unwrap();
        assert!(explained.iter().all(|mutant| mutant.starts_with("crates/")), "{explained:?}");
    }
}
