//! The steps `inference` and `lm-eval` run the official packages of the OpenAI and Anthropic APIs,
//! and a public evaluation harness, against a new server. The checks are in
//! `crates/server/tests/python` and `crates/server/tests/javascript`.

use std::path::{Path, PathBuf};

use crate::python::{self, Packages};
use crate::step::{XtaskError, cargo, root, target, tool};
use crate::test::skipped;
use crate::test_server::{TestServer, golden_model};

use super::adapters::script;

/// Guide whose programs are run.
const GUIDE: &str = "docs/inference.md";
/// API key of the server that requires one.
const KEY: &str = "tml-conformance-0123456789abcdef";

/// Runs the packages `openai` (of PyPI and npm) and `anthropic` against a server without an API key
/// and a server with a key.
pub(super) fn check(sdk: &str) -> Result<(), XtaskError> {
    TestServer::build()?;
    let names = [sdk, "numpy", "openai", "anthropic"];
    let python =
        python::environment(Path::new("conformance/inference"), &Packages::wheels(&names))?;
    let folder = folder("inference")?;
    let without_key = TestServer::start(&folder.join("data"), &[golden_model()], true)?;
    let key_file = folder.join("key");
    write(&key_file, KEY)?;
    let key_argument = key_file.display().to_string();
    let with_key =
        TestServer::start_with(&folder.join("secured"), &[], &["--api-key-file", &key_argument])?;
    script("inference", &python)
        .argument(&without_key.url)
        .argument(&with_key.url)
        .argument(KEY)
        .argument(root().join(GUIDE))
        .run()?;
    check_npm(&without_key.url)
}

/// Runs the package `openai` of npm, if node is installed.
fn check_npm(url: &str) -> Result<(), XtaskError> {
    let version = |program| tool("version", program, &["--version"]).output();
    if version("node").and(version("npm")).is_err() {
        skipped("openai of npm", "node and npm are not installed");
        return Ok(());
    }
    let folder = target().join("conformance/npm");
    let failed = |error| XtaskError::new(format!("cannot create {}: {error}", folder.display()));
    std::fs::create_dir_all(&folder).map_err(failed)?;
    let install = ["install", "--silent", "--no-audit", "--no-fund", "--prefix"];
    tool("npm package", "npm", &install).argument(&folder).argument("openai").run()?;
    tool("openai of npm", "node", &["crates/server/tests/javascript/openai.mjs"])
        .argument(url)
        .argument(&folder)
        .argument(root().join(GUIDE))
        .run()
}

/// Runs a task of `lm-eval` on a trained checkpoint and compares it with `tinkex logprobs`.
pub(super) fn check_lm_eval(sdk: &str) -> Result<(), XtaskError> {
    TestServer::build()?;
    cargo("command line", &["build", "--locked", "--package", "tinkex-cli"]).run()?;
    let names = [sdk, "numpy", "lm-eval[api]", "transformers"];
    let python = python::environment(Path::new("conformance/lm-eval"), &Packages::wheels(&names))?;
    let folder = folder("lm-eval-task")?;
    let server = TestServer::start(&folder.join("data"), &[], true)?;
    script("lm_eval_task", &python)
        .argument(&server.url)
        .argument(target().join("debug/tinkex"))
        .argument(&folder)
        .run()
}

/// Returns an empty folder for the files of a step.
fn folder(name: &str) -> Result<PathBuf, XtaskError> {
    let folder = target().join("conformance").join(name).join("run");
    let _ = std::fs::remove_dir_all(&folder);
    let failed = |error| XtaskError::new(format!("cannot create {}: {error}", folder.display()));
    std::fs::create_dir_all(&folder).map_err(failed)?;
    Ok(folder)
}

fn write(path: &Path, text: &str) -> Result<(), XtaskError> {
    let failed = |error| XtaskError::new(format!("cannot write {}: {error}", path.display()));
    std::fs::write(path, text).map_err(failed)
}
