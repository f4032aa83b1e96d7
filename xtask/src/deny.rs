//! `cargo xtask deny`: checks licences, duplicate versions, sources and advisories of all
//! dependencies with `cargo-deny`, by the rules of `deny.toml`.

use crate::step::{XtaskError, cargo, target, tool};

/// Version of cargo-deny. Other versions may read `deny.toml` differently.
const VERSION: &str = "0.20.2";

pub(crate) fn run() -> Result<(), XtaskError> {
    // With the version in its name, so that a new version replaces an installed one.
    let tools = target().join(format!("tools/cargo-deny-{VERSION}"));
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
    let deny = |title, checks: &[&str]| {
        tool(title, &program, &["--locked", "--workspace", "check"]).arguments(checks)
    };
    deny("licences, duplicates and sources", &["licenses", "bans", "sources"]).run()?;
    println!("\n==> database of advisories: downloading");
    match tool("database of advisories", &program, &["--locked", "fetch", "db"]).output() {
        Ok(_) => deny("advisories", &["advisories"]).run(),
        Err(error) => {
            println!("{error}");
            println!("\n==> advisories: SKIPPED (the database could not be downloaded)");
            Ok(())
        }
    }
}
