//! `cargo xtask coverage`: line coverage of `tinkex-wire`, and of `tinkex` with the crates that only
//! it and the gateway use, by their own tests.
//!
//! The tests are compiled with `-C instrument-coverage` in a target folder of their own, because
//! the option changes every crate. Documentation examples are not part of the measurement. Code of
//! unit tests does not count.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::step::{Step, XtaskError, cargo, root, target, timed, tool};
use crate::test::skipped;

/// Crates that are measured together, and the least coverage in percent that the command accepts.
struct Measured {
    packages: &'static [&'static str],
    sources: &'static [&'static str],
    minimum: f64,
}

const CRATES: [Measured; 2] = [
    Measured { packages: &["tinkex-wire"], sources: &["crates/wire/src"], minimum: 90.0 },
    // The integration tests of the SDK cover most of the sessions and losses.
    Measured {
        packages: &["tinkex", "tinkex-session", "tinkex-loss"],
        sources: &["crates/client/src", "crates/session/src", "crates/loss/src"],
        minimum: 90.0,
    },
];

/// Names of files that contain only code of unit tests.
const TEST_FILES: [&str; 2] = ["tests.rs", "fixture.rs"];

/// Measures the coverage if the LLVM tools are installed.
pub(crate) fn check_if_installed() -> Result<(), XtaskError> {
    match llvm_tools()? {
        Some(tools) => timed("coverage", || measure(&tools)),
        None => {
            skipped("coverage", "needs `rustup component add llvm-tools`");
            Ok(())
        }
    }
}

pub(crate) fn run() -> Result<(), XtaskError> {
    let tools = llvm_tools()?.ok_or_else(|| {
        XtaskError::new(
            "coverage: the toolchain has no LLVM tools\n  Run `rustup component add llvm-tools`.",
        )
    })?;
    measure(&tools)
}

fn measure(tools: &Path) -> Result<(), XtaskError> {
    let folder = target().join("coverage");
    let profiles = folder.join("profiles");
    let tests = || instrumented(&folder, &profiles);
    println!("\n==> coverage: building");
    let built = tests().arguments(&["--no-run", "--message-format", "json"]).output()?;
    // Build scripts and procedural macros are instrumented too.
    let _ = fs::remove_dir_all(&profiles);
    tests().run()?;

    let merged = folder.join("merged.profdata");
    tool("profiles", tools.join("llvm-profdata"), &["merge", "--sparse", "--output"])
        .argument(&merged)
        .argument(&profiles)
        .run()?;
    let mut export = tool("export", tools.join("llvm-cov"), &["export", "--format", "lcov"])
        .argument(format!("--instr-profile={}", merged.display()));
    for program in executables(&built) {
        export = export.argument(format!("--object={program}"));
    }
    // Leave out dependencies and the standard library.
    let export = export.argument("--ignore-filename-regex=/registry/|/rustc/");
    report(&parse(&export.output()?))
}

/// Creates a step that tests the crates with instrumented code.
fn instrumented(folder: &Path, profiles: &Path) -> Step {
    let step = cargo("tests", &["test", "--locked", "--all-features", "--lib", "--tests"]);
    let packages = CRATES.iter().flat_map(|measured| measured.packages);
    let packages = packages.flat_map(|package| ["--package", package]);
    step.arguments(&packages.collect::<Vec<_>>())
        .variable("CARGO_TARGET_DIR", folder)
        .variable("RUSTFLAGS", "-C instrument-coverage")
        .variable("LLVM_PROFILE_FILE", profiles.join("%p-%m.profraw"))
}

/// Returns the folder of the LLVM tools of the Rust toolchain; `None` if they are not installed.
fn llvm_tools() -> Result<Option<PathBuf>, XtaskError> {
    let libraries = tool("toolchain", "rustc", &["--print", "target-libdir"]).output()?;
    let folder = Path::new(libraries.trim()).with_file_name("bin");
    let installed = folder.join("llvm-cov").exists() && folder.join("llvm-profdata").exists();
    Ok(installed.then_some(folder))
}

/// Returns the test programs that cargo names in its JSON messages.
fn executables(messages: &str) -> Vec<&str> {
    let key = "\"executable\":\"";
    messages.lines().filter_map(|line| line.split_once(key)?.1.split('"').next()).collect()
}

/// Number of lines with code, and number of lines that a test executes.
#[derive(Clone, Copy, Default)]
struct Lines {
    total: u32,
    covered: u32,
}

impl Lines {
    fn percent(self) -> f64 {
        if self.total == 0 {
            100.0
        } else {
            f64::from(self.covered) * 100.0 / f64::from(self.total)
        }
    }

    fn add(&mut self, other: Self) {
        self.total += other.total;
        self.covered += other.covered;
    }
}

/// Parses a report in the format of lcov. Returns the line counts of each file, by its path relative
/// to the workspace, without the lines of unit tests.
fn parse(lcov: &str) -> BTreeMap<String, Lines> {
    let mut files = BTreeMap::new();
    let mut file = String::new();
    let mut lines = Lines::default();
    let mut tests_start = u32::MAX;
    for record in lcov.lines() {
        if let Some(path) = record.strip_prefix("SF:") {
            let path = Path::new(path);
            file = path.strip_prefix(root()).unwrap_or(path).to_string_lossy().into_owned();
            lines = Lines::default();
            tests_start = first_test_line(path);
        } else if let Some(data) = record.strip_prefix("DA:") {
            let mut numbers = data.split(',').map(str::parse::<u64>);
            if let (Some(Ok(line)), Some(Ok(count))) = (numbers.next(), numbers.next())
                && line < u64::from(tests_start)
            {
                lines.add(Lines { total: 1, covered: u32::from(count > 0) });
            }
        } else if record == "end_of_record"
            && !TEST_FILES.iter().any(|name| Path::new(&file).ends_with(name))
        {
            files.insert(std::mem::take(&mut file), lines);
        }
    }
    files
}

/// Returns the number of the first line of the unit tests, which end a file.
fn first_test_line(path: &Path) -> u32 {
    let text = fs::read_to_string(path).unwrap_or_default();
    let at = text.lines().position(|line| line == "mod tests {");
    at.and_then(|index| u32::try_from(index + 1).ok()).unwrap_or(u32::MAX)
}

fn report(files: &BTreeMap<String, Lines>) -> Result<(), XtaskError> {
    let mut too_low = Vec::new();
    for Measured { packages, sources, minimum } in &CRATES {
        let package = packages[0];
        let mut total = Lines::default();
        println!("\n{package:<52} {:>6} {:>8} {:>7}", "lines", "covered", "%");
        let is_measured = |file: &str| sources.iter().any(|folder| file.starts_with(folder));
        for (file, lines) in files.iter().filter(|(file, _)| is_measured(file)) {
            print_row(file.strip_prefix("crates/").unwrap_or(file), *lines);
            total.add(*lines);
        }
        print_row("total", total);
        if total.total == 0 {
            return Err(XtaskError::new(format!("coverage: no data for {package}")));
        }
        if total.percent() < *minimum {
            too_low.push(format!("{package} {:.1} % (minimum {minimum} %)", total.percent()));
        }
    }
    if too_low.is_empty() {
        return Ok(());
    }
    Err(XtaskError::new(format!("coverage is too low: {}", too_low.join(", "))))
}

fn print_row(name: &str, lines: Lines) {
    let Lines { total, covered } = lines;
    println!("{name:<52} {total:>6} {covered:>8} {:>7.1}", lines.percent());
}
