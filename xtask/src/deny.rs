//! `cargo xtask deny`: checks licences, duplicate versions, sources and advisories of all
//! dependencies with `cargo-deny`, by the rules of `deny.toml`.

use std::path::{Path, PathBuf};

use crate::step::{XtaskError, cargo, target, tool};
use crate::test::skipped;

/// Version of cargo-deny. Other versions may read `deny.toml` differently.
const VERSION: &str = "0.20.2";

/// Returns the folder of the tool. The version is in its name, so that a new version replaces an
/// installed one.
fn folder() -> PathBuf {
    target().join(format!("tools/cargo-deny-{VERSION}"))
}

/// Checks what needs no network, if cargo-deny is installed.
pub(crate) fn check_if_installed() -> Result<(), XtaskError> {
    let program = folder().join("bin/cargo-deny");
    if program.exists() {
        return check_offline(&program);
    }
    skipped("licences, duplicates and sources", "`cargo xtask deny` installs cargo-deny");
    Ok(())
}

/// Checks licences, duplicate versions and sources.
fn check_offline(program: &Path) -> Result<(), XtaskError> {
    tool("licences, duplicates and sources", program, &["--locked", "--workspace", "check"])
        .arguments(&["licenses", "bans", "sources"])
        .run()
}

pub(crate) fn run() -> Result<(), XtaskError> {
    let tools = folder();
    let program = tools.join("bin/cargo-deny");
    if !program.exists() {
        let build = tools.join("build");
        cargo(
            "cargo-deny",
            &["install", "cargo-deny", "--version", VERSION, "--locked", "--debug"],
        )
        .arguments(&["--root"])
        .argument(&tools)
        // A fixed folder, so that an interrupted build continues with its finished crates.
        .variable("CARGO_TARGET_DIR", &build)
        .run()?;
        // Its size is several hundred megabytes; a failure to remove it does no harm.
        let _ = std::fs::remove_dir_all(&build);
    }
    check_offline(&program)?;
    println!("\n==> database of advisories: downloading");
    match tool("database of advisories", &program, &["--locked", "fetch", "db"]).output() {
        Ok(_) => {
            let check = ["--locked", "--workspace", "check", "advisories"];
            tool("advisories", &program, &check).run()
        }
        Err(error) => {
            println!("{error}");
            skipped("advisories", "the database could not be downloaded");
            Ok(())
        }
    }
}
