//! Command-line program that runs scenarios with consecutive seeds and reports the failing seeds.

#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "a command-line tool prints to standard output")]
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::{Duration, Instant};

const USAGE: &str = "\
Usage: cargo xtask simulate [--seeds N] [--seed S] [--minutes M] [--check K] [-v]

  --seeds N     Number of scenarios [default: 1000, or as many as fit into --minutes]
  --seed S      First seed [default: 0]
  --minutes M   Start no further scenario after this time
  --check K     Run every K-th seed twice and compare the events [default: 50; 0: never]
  -v            Print the events of every scenario
";

struct Arguments {
    seeds: u64,
    first: u64,
    limit: Option<Duration>,
    check: u64,
    verbose: bool,
}

fn parse(arguments: impl IntoIterator<Item = String>) -> Result<Arguments, String> {
    let mut parsed = Arguments { seeds: 0, first: 0, limit: None, check: 50, verbose: false };
    let mut seeds = None;
    let mut arguments = arguments.into_iter();
    while let Some(name) = arguments.next() {
        if name == "-v" {
            parsed.verbose = true;
            continue;
        }
        let value = arguments.next().ok_or_else(|| format!("{name}: expected a value"))?;
        let number: u64 = value.parse().map_err(|_| format!("{name}: expected a number"))?;
        match name.as_str() {
            "--seeds" => seeds = Some(number),
            "--seed" => parsed.first = number,
            "--minutes" => parsed.limit = Some(Duration::from_secs(number.saturating_mul(60))),
            "--check" => parsed.check = number,
            _ => return Err(format!("unknown option {name}")),
        }
    }
    let default = if parsed.limit.is_some() { u64::MAX } else { 1_000 };
    parsed.seeds = seeds.unwrap_or(default);
    Ok(parsed)
}

fn main() -> ExitCode {
    let arguments = match parse(std::env::args().skip(1)) {
        Ok(arguments) => arguments,
        Err(error) => {
            println!("{error}\n\n{USAGE}");
            return ExitCode::FAILURE;
        }
    };
    match simulate(&arguments) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            println!("cannot run the simulation: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the scenarios and returns how many failed.
fn simulate(arguments: &Arguments) -> std::io::Result<u64> {
    let start = Instant::now();
    let mut runs = 0_u64;
    let mut failures = 0_u64;
    let mut simulated = 0.0;
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    let end = arguments.first.saturating_add(arguments.seeds);
    for seed in arguments.first..end {
        if arguments.limit.is_some_and(|limit| start.elapsed() >= limit) {
            break;
        }
        let report = tinkex_simulation::run(seed, arguments.verbose)?;
        runs += 1;
        simulated += report.simulated_seconds;
        for (name, count) in report.counts {
            *counts.entry(name).or_default() += count;
        }
        for event in &report.events {
            println!("{event}");
        }
        let mut failure = report.failure;
        if failure.is_none() && arguments.check > 0 && seed % arguments.check == 0 {
            let again = tinkex_simulation::run(seed, false)?;
            if again.hash != report.hash {
                failure = Some("two runs with this seed differ".to_owned());
            }
        }
        if let Some(failure) = failure {
            failures += 1;
            println!("seed {seed}: {failure}");
            println!("  to repeat: cargo xtask simulate --seeds 1 --seed {seed} -v");
        }
        if runs.is_multiple_of(1_000) {
            println!("{runs} scenarios, {failures} failures, {:.0?}", start.elapsed());
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    #[expect(clippy::cast_precision_loss, reason = "a rate to print")]
    let rate = runs as f64 / seconds;
    println!(
        "{runs} scenarios in {seconds:.1} s ({rate:.1} per second), {:.0} simulated hours, \
         {failures} failures",
        simulated / 3_600.0
    );
    for (name, count) in counts {
        println!("  {count:>8} {name}");
    }
    Ok(failures)
}
