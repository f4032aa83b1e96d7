//! `cargo xtask ui`: tests and type checks of the scripts of the dashboard.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::step::{XtaskError, target, tool};

/// Folder of the page.
const PAGE: &str = "crates/dashboard/ui";
/// Folder of the tests.
const TESTS: &str = "crates/dashboard/tests/ui";
/// Checks the types of the scripts.
const TYPESCRIPT: &str = "typescript@5.9.3";
/// Maximum time of an installation.
const INSTALL_LIMIT: Duration = Duration::from_secs(300);

/// Runs the tests and the type checker, where Node is installed.
pub(crate) fn check() -> Result<(), XtaskError> {
    if !is_installed("node") {
        println!("\n==> scripts of the dashboard: SKIPPED (`node --version` fails)");
        return Ok(());
    }
    tool("scripts of the dashboard", "node", &["--test", "--test-reporter=dot"])
        .arguments(&tests()?.iter().map(String::as_str).collect::<Vec<_>>())
        .run()?;
    let Some(compiler) = compiler() else {
        println!("\n==> types of the dashboard: SKIPPED (npm cannot install {TYPESCRIPT})");
        return Ok(());
    };
    // The modules of `model` are checked without the types of a browser, which they must not use.
    for project in [PAGE.to_owned(), format!("{PAGE}/model")] {
        tool("types of the dashboard", "node", &[])
            .argument(&compiler)
            .arguments(&["--project", &project])
            .run()?;
    }
    Ok(())
}

/// Returns the paths of the test files. Versions of Node differ in how they search a folder.
fn tests() -> Result<Vec<String>, XtaskError> {
    let failed = |error| XtaskError::new(format!("cannot read {TESTS}: {error}"));
    let entries = std::fs::read_dir(crate::step::root().join(TESTS)).map_err(failed)?;
    let mut found = Vec::new();
    for entry in entries {
        let name = entry.map_err(failed)?.file_name().to_string_lossy().into_owned();
        if name.ends_with(".test.js") {
            found.push(format!("{TESTS}/{name}"));
        }
    }
    if found.is_empty() {
        return Err(XtaskError::new(format!("{TESTS} has no test")));
    }
    found.sort();
    Ok(found)
}

fn is_installed(program: &str) -> bool {
    let mut command = Command::new(program);
    command.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// Installs the type checker from the npm registry and returns the path of its script.
fn compiler() -> Option<PathBuf> {
    let folder = target().join("typescript");
    let script = folder.join("node_modules/typescript/bin/tsc");
    if !script.is_file() {
        std::fs::create_dir_all(&folder).ok()?;
        let install =
            tool("typescript", "npm", &["install", "--no-audit", "--no-fund", "--prefix"]);
        install.argument(&folder).arguments(&[TYPESCRIPT]).run_within(INSTALL_LIMIT).ok()?;
    }
    script.is_file().then_some(script)
}
