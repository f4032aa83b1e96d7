//! `cargo xtask test`: everything that CI checks.
//!
//! A gate whose tool is missing says that it was skipped. The quality gates are rows in
//! `docs/scenarios.md`.

use clap::Args;

use crate::browser::{self, BrowserArgs};
use crate::conformance::{self, ConformanceArgs};
use crate::step::{Timing, XtaskError, times};
use crate::{
    api, architecture, coverage, deny, doc, features, fmt, lint, scenarios, test_programs, ui,
};

/// Number of steps and of tests that the summary lists.
const SLOWEST: usize = 10;

/// Arguments of `cargo xtask test`.
#[derive(Args)]
pub(crate) struct TestArgs {
    /// Skip conformance, which needs python3 and a package registry
    #[arg(long)]
    without_python: bool,
    /// Skip the part of conformance that needs torch (6 GB of disk)
    #[arg(long, conflicts_with = "without_python")]
    without_torch: bool,
    /// Skip the measurement of coverage, which compiles the client again
    #[arg(long)]
    without_coverage: bool,
}

pub(crate) fn run(args: &TestArgs) -> Result<(), XtaskError> {
    fmt(false)?;
    lint()?;
    features::check()?;
    let tests = test_programs::run()?;
    doc()?;
    api::check(false)?;
    architecture()?;
    scenarios::check(false)?;
    deny::check_if_installed()?;
    ui::check()?;
    browser::run(&BrowserArgs::default())?;
    if args.without_python {
        skipped("conformance", "--without-python");
    } else {
        conformance::run(&ConformanceArgs::all(args.without_torch))?;
    }
    if args.without_coverage {
        skipped("coverage", "--without-coverage");
    } else {
        coverage::check_if_installed()?;
    }
    print_slowest("steps", times());
    print_slowest("tests", tests);
    println!("\nAll checks passed.");
    Ok(())
}

/// Reports that a check was skipped.
pub(crate) fn skipped(check: &str, reason: &str) {
    println!("\n==> {check}: SKIPPED ({reason})");
}

fn print_slowest(what: &str, mut timings: Vec<Timing>) {
    timings.sort_by_key(|timing| std::cmp::Reverse(timing.duration));
    println!("\nSlowest {what}:");
    for Timing { name, duration } in timings.iter().take(SLOWEST) {
        println!("  {:>8.1} s  {name}", duration.as_secs_f64());
    }
}
