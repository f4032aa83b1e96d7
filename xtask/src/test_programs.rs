//! Runs the test programs of the workspace and measures every test.
//!
//! `cargo test` does not report how long a test takes. libtest does with the unstable option
//! `--report-time`, which it accepts on the stable toolchain if `RUSTC_BOOTSTRAP` is set. The
//! variable must not be set for cargo: build scripts that read it would run again, and their
//! dependents be compiled again. So cargo builds the test programs, and this module runs them as
//! `cargo test` does: one after the other, each in the folder of its package.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use crate::step::{Timing, XtaskError, cargo, timed, tool};

/// Test program that cargo has built.
#[derive(Debug, PartialEq)]
struct TestProgram {
    /// Name of its target, for example `it`.
    target: String,
    package: String,
    executable: PathBuf,
    /// Folder of its package, in which it runs.
    folder: PathBuf,
}

/// Builds and runs all test programs of the workspace, and returns the durations of their tests.
///
/// # Errors
/// If a program fails. The remaining programs run first, so that one run shows all failures.
pub(crate) fn run() -> Result<Vec<Timing>, XtaskError> {
    let mut tests = Vec::new();
    let mut failures = Vec::new();
    for program in timed("tests: building", build)? {
        let title = format!("tests of {} ({})", program.package, program.target);
        match program.run(&title) {
            Ok(timings) => tests.extend(timings),
            Err(error) => failures.push(error.to_string()),
        }
    }
    if !failures.is_empty() {
        return Err(XtaskError::new(failures.join("\n")));
    }
    cargo(
        "documentation examples",
        &["test", "--workspace", "--all-features", "--locked", "--doc"],
    )
    .run()?;
    Ok(tests)
}

fn build() -> Result<Vec<TestProgram>, XtaskError> {
    println!("\n==> tests: building");
    let messages = cargo("tests", &["test", "--workspace", "--all-features", "--locked"])
        .arguments(&["--no-run", "--message-format", "json-render-diagnostics"])
        .output_with_inherited_errors()?;
    Ok(messages.lines().filter_map(TestProgram::parse).collect())
}

impl TestProgram {
    /// Parses a JSON message of cargo. Returns `None` unless it reports a test program.
    fn parse(message: &str) -> Option<Self> {
        let message: Value = serde_json::from_str(message).ok()?;
        let is_test = message["profile"]["test"].as_bool()?;
        let executable = message["executable"].as_str()?;
        let manifest = Path::new(message["manifest_path"].as_str()?);
        let folder = manifest.parent()?;
        let package = message["package_id"].as_str()?;
        // Package ids end with `#version` or `#name@version`; without a name it is the folder's.
        let name = package.rsplit_once('#').map_or(package, |(_, end)| end);
        let name = match name.split_once('@') {
            Some((name, _)) => name.to_owned(),
            None => folder.file_name()?.to_string_lossy().into_owned(),
        };
        is_test.then(|| Self {
            target: message["target"]["name"].as_str().unwrap_or_default().to_owned(),
            package: name,
            executable: executable.into(),
            folder: folder.to_owned(),
        })
    }

    /// Runs the program and returns the durations of its tests.
    fn run(&self, title: &str) -> Result<Vec<Timing>, XtaskError> {
        let mut tests = Vec::new();
        tool(title, &self.executable, &["-Z", "unstable-options", "--report-time"])
            .folder(&self.folder)
            .variable("RUSTC_BOOTSTRAP", "1")
            .variable("CARGO_MANIFEST_DIR", &self.folder)
            .run_with_lines(|line| {
                if let Some((test, duration)) = parse_duration(line) {
                    let name = format!("{} {}::{test}", self.package, self.target);
                    tests.push(Timing { name, duration });
                }
            })?;
        Ok(tests)
    }
}

/// Parses a line such as `test a::b ... ok <0.123s>` into the name of the test and its duration.
fn parse_duration(line: &str) -> Option<(&str, Duration)> {
    let (test, rest) = line.strip_prefix("test ")?.split_once(" ... ")?;
    let seconds = rest.trim_end().strip_suffix("s>")?.rsplit_once('<')?.1;
    let seconds: f64 = seconds.parse().ok()?;
    Some((test, Duration::try_from_secs_f64(seconds).ok()?))
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use serde_json::json;

    use super::{TestProgram, parse_duration};

    #[test]
    fn durations_are_read_from_the_lines_of_tests() {
        let line = "test cluster::kills_are_spread ... ok <1.250s>";
        let expected = Some(("cluster::kills_are_spread", Duration::from_millis(1_250)));
        assert_eq!(parse_duration(line), expected);
        assert_eq!(parse_duration("test a ... ignored, takes minutes"), None);
        assert_eq!(parse_duration("test result: ok. 3 passed; 0 failed; finished in 0.00s"), None);
        assert_eq!(parse_duration("running 3 tests"), None);
    }

    #[test]
    fn messages_of_cargo_name_test_programs() {
        let mut message = json!({
            "reason": "compiler-artifact",
            "package_id": "path+file:///w/crates/client#tinkex@0.1.0",
            "manifest_path": "/w/crates/client/Cargo.toml",
            "target": {"name": "it", "kind": ["test"]},
            "profile": {"test": true},
            "executable": "/w/target/debug/deps/it-1",
        });
        let expected = TestProgram {
            target: "it".to_owned(),
            package: "tinkex".to_owned(),
            executable: "/w/target/debug/deps/it-1".into(),
            folder: "/w/crates/client".into(),
        };
        assert_eq!(TestProgram::parse(&message.to_string()), Some(expected));
        message["package_id"] = "path+file:///w/xtask#0.0.0".into();
        message["manifest_path"] = "/w/xtask/Cargo.toml".into();
        let xtask = TestProgram::parse(&message.to_string()).unwrap();
        assert_eq!(xtask.package, "xtask");
        assert_eq!(xtask.folder, Path::new("/w/xtask"));
        message["profile"]["test"] = false.into();
        assert_eq!(TestProgram::parse(&message.to_string()), None, "an example is not run");
        message["executable"] = json!(null);
        assert_eq!(TestProgram::parse(&message.to_string()), None, "a library is not run");
    }
}
