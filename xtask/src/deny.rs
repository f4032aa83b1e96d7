//! `cargo xtask deny`: checks licences, duplicate versions, sources and advisories of all
//! dependencies with `cargo-deny`, by the rules of `deny.toml`.

use std::path::Path;

use crate::cargo_tool::CargoTool;
use crate::step::{XtaskError, tool};
use crate::test::skipped;

const DENY: CargoTool = CargoTool { name: "cargo-deny", version: "0.20.2" };

/// Checks what needs no network, if cargo-deny is installed.
pub(crate) fn check_if_installed() -> Result<(), XtaskError> {
    let program = DENY.program();
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
    let program = DENY.install()?;
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
