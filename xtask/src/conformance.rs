//! `cargo xtask conformance`: runs the official Python SDK against a new server.
//!
//! The checks are in `crates/server/tests/python/conformance.py`. Each SDK version has its own
//! Python environment under `target/conformance`. Afterwards the Rust client repeats a training run
//! of the SDK on the same server and must get the same numbers.

use std::path::Path;
use std::process::Command;

use crate::python::{self, Packages};
use crate::step::{XtaskError, ignored_test, root, target};
use crate::test_server::{MODEL, TestServer};

/// One run of the checks.
struct ConformanceRun {
    sdk_version: &'static str,
    /// Whether the server offers batched polling, protobuf and compression; otherwise none of them.
    efficient: bool,
    /// Whether custom losses are checked, which needs torch.
    torch: bool,
}

const RUNS: &[ConformanceRun] = &[
    ConformanceRun { sdk_version: "0.36.0", efficient: true, torch: true },
    ConformanceRun { sdk_version: "0.36.0", efficient: false, torch: true },
    ConformanceRun { sdk_version: "0.25.0", efficient: true, torch: false },
];
const REPEATED_RUN: &str = "conformance::the_client_and_the_python_sdk_train_to_the_same_numbers";
const CHECKS: &str = "crates/server/tests/python/conformance.py";

pub(crate) fn run(options: &[&str]) -> Result<(), XtaskError> {
    let (mut only, mut torch) = (None, true);
    let mut options = options.iter();
    while let Some(option) = options.next() {
        match *option {
            "--sdk" => match options.next() {
                Some(version) if RUNS.iter().any(|run| run.sdk_version == *version) => {
                    only = Some(version);
                }
                _ => return Err(XtaskError::new("conformance: --sdk must be 0.36.0 or 0.25.0")),
            },
            "--without-torch" => torch = false,
            other => return Err(XtaskError::new(format!("conformance: unknown option {other}"))),
        }
    }
    TestServer::build()?;
    for run in RUNS.iter().filter(|run| only.is_none_or(|only| *only == run.sdk_version)) {
        let torch = torch && run.torch;
        let suffix = if torch { "-torch" } else { "" };
        let folder = Path::new("conformance").join(format!("{}{suffix}", run.sdk_version));
        let sdk = format!("tinker=={}", run.sdk_version);
        let names = if torch { vec![sdk.as_str(), "torch"] } else { vec![sdk.as_str()] };
        let python = python::environment(&folder, &Packages::wheels(&names))?;
        check(&python, run, torch)?;
    }
    Ok(())
}

fn check(python: &Path, run: &ConformanceRun, torch: bool) -> Result<(), XtaskError> {
    let ConformanceRun { sdk_version, efficient, .. } = *run;
    let mode = if efficient { "efficient" } else { "plain" };
    println!("\n==> conformance: tinker {sdk_version}, {mode} protocol options");
    let data = target().join("conformance").join(format!("data-{sdk_version}-{mode}"));
    let server = TestServer::start(&data, efficient)?;
    let numbers = target().join("conformance").join(format!("numbers-{sdk_version}-{mode}.json"));
    // The numbers of an earlier run must not be compared.
    let _ = std::fs::remove_file(&numbers);
    let status = Command::new(python)
        .arg(root().join(CHECKS))
        .args([&server.url, MODEL])
        .arg(&numbers)
        .args(torch.then_some("--torch"))
        .status()
        .map_err(|error| XtaskError::new(format!("cannot run {}: {error}", python.display())))?;
    if !status.success() {
        let message = format!("conformance with tinker {sdk_version} failed: {status}");
        return Err(XtaskError::new(message));
    }
    ignored_test("Rust client", "tinkex", REPEATED_RUN, &[])?
        .variable("TINKEX_CONFORMANCE_URL", &server.url)
        .variable("TINKEX_CONFORMANCE_MODEL", MODEL)
        .variable("TINKEX_CONFORMANCE_NUMBERS", &numbers)
        .run()
}
