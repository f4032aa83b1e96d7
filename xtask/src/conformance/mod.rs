//! `cargo xtask conformance`: runs the official Python SDK against a new server.
//!
//! The checks are in `crates/server/tests/python/conformance.py`. Each SDK version has its own
//! Python environment under `target/conformance`. Afterwards the Rust client repeats a training run
//! of the SDK on the same server and must get the same numbers. [`adapters`] checks that `peft`
//! loads downloaded adapters and computes the same numbers, [`inference`] the packages `openai` and
//! `anthropic`, [`limits`] the limits of users, and on request the evaluation harness `lm-eval`.

mod adapters;
mod inference;
mod limits;

pub(crate) use adapters::{ModelServer, TinyModels, make_tiny_models, models_in};

use std::path::{Path, PathBuf};
use std::process::Command;

use clap::{Args, Subcommand};

use crate::python::{self, Packages};
use crate::step::{XtaskError, ignored_test, root, target};
use crate::test_server::{MODEL, TestServer, golden_model};

/// One run of the checks.
struct ConformanceRun {
    sdk_version: &'static str,
    /// Whether the server offers batched polling, protobuf and compression.
    efficient: bool,
    /// Whether custom losses and adapters are checked, which needs torch.
    torch: bool,
}

const RUNS: &[ConformanceRun] = &[
    ConformanceRun { sdk_version: "0.36.0", efficient: true, torch: true },
    ConformanceRun { sdk_version: "0.36.0", efficient: false, torch: true },
    ConformanceRun { sdk_version: "0.25.0", efficient: true, torch: false },
];
const REPEATED_RUN: &str = "conformance::the_client_and_the_python_sdk_train_to_the_same_numbers";
const CHECKS: &str = "crates/server/tests/python/conformance.py";

/// Arguments of `cargo xtask conformance`.
#[derive(Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct ConformanceArgs {
    /// Step to run alone.
    #[command(subcommand)]
    only: Option<OnlyStep>,
    /// Test one version of the SDK only
    #[arg(long, value_name = "VERSION", value_parser = ["0.36.0", "0.25.0"])]
    sdk: Option<String>,
    /// Skip the custom losses and the adapters, which need torch (6 GB of disk)
    #[arg(long)]
    without_torch: bool,
}

/// Step that can be run alone.
#[derive(Clone, Copy, Subcommand)]
enum OnlyStep {
    /// Compare adapters, exported models and model folders with peft and transformers only
    Adapters,
    /// Run the packages openai (PyPI, npm) and anthropic only; npm is skipped without node
    Inference,
    /// Evaluate a checkpoint with lm-eval and compare with `tinkex logprobs`
    ///
    /// Not part of `conformance`: its packages need a gigabyte and minutes to install.
    LmEval,
}

impl ConformanceArgs {
    /// Selects all versions and steps.
    pub(crate) fn all(without_torch: bool) -> Self {
        Self { only: None, sdk: None, without_torch }
    }

    fn selects(&self, run: &ConformanceRun) -> bool {
        self.sdk.as_ref().is_none_or(|version| version == run.sdk_version)
    }
}

pub(crate) fn run(args: &ConformanceArgs) -> Result<(), XtaskError> {
    match args.only {
        Some(OnlyStep::Adapters) => return adapters::check(&torch_environment()?),
        Some(OnlyStep::Inference) => return inference::check(&newest_sdk()),
        Some(OnlyStep::LmEval) => return inference::check_lm_eval(&newest_sdk()),
        None => {}
    }
    TestServer::build()?;
    for run in RUNS.iter().filter(|run| args.selects(run)) {
        let torch = run.torch && !args.without_torch;
        check(&environment(run.sdk_version, torch)?, run, torch)?;
    }
    if args.selects(&RUNS[0]) {
        let torch = RUNS[0].torch && !args.without_torch;
        limits::check(&environment(RUNS[0].sdk_version, torch)?)?;
        inference::check(&newest_sdk())?;
    }
    let with_torch = RUNS.iter().find(|run| run.torch && args.selects(run));
    match with_torch {
        Some(run) if !args.without_torch => adapters::check(&environment(run.sdk_version, true)?),
        _ => Ok(()),
    }
}

/// Returns the requirement of the newest SDK.
fn newest_sdk() -> String {
    format!("tinker=={}", RUNS[0].sdk_version)
}

/// Returns a Python interpreter with the SDK, torch, transformers and peft.
pub(crate) fn torch_environment() -> Result<PathBuf, XtaskError> {
    environment(RUNS[0].sdk_version, true)
}

/// Returns the Python interpreter of an environment with the SDK and, with `torch`, the packages
/// that custom losses and adapters are compared with.
fn environment(sdk_version: &str, torch: bool) -> Result<PathBuf, XtaskError> {
    let suffix = if torch { "-torch" } else { "" };
    let folder = Path::new("conformance").join(format!("{sdk_version}{suffix}"));
    let sdk = format!("tinker=={sdk_version}");
    let mut names = vec![sdk.as_str()];
    if torch {
        names.extend(["torch", "transformers", "peft"]);
    }
    python::environment(&folder, &Packages::wheels(&names))
}

fn check(python: &Path, run: &ConformanceRun, torch: bool) -> Result<(), XtaskError> {
    let ConformanceRun { sdk_version, efficient, .. } = *run;
    let mode = if efficient { "efficient" } else { "plain" };
    println!("\n==> conformance: tinker {sdk_version}, {mode} protocol options");
    let data = target().join("conformance").join(format!("data-{sdk_version}-{mode}"));
    let server = TestServer::start(&data, &[golden_model()], efficient)?;
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
