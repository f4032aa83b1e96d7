//! `cargo xtask reference`: keeps the reference of the command line, `docs/commands.md`, current.
//!
//! A test of `tinkex-cli` renders the help of every command and compares it with the document. With
//! the environment variable `TINKEX_UPDATE_REFERENCE` it writes the document instead.

use crate::step::{XtaskError, cargo};

pub(crate) fn check(fix: bool) -> Result<(), XtaskError> {
    let test = "command_reference::the_reference_equals_the_help";
    let arguments =
        ["test", "--locked", "--package", "tinkex-cli", "--lib", "--all-features", test];
    let mut step = cargo("command reference", &arguments).arguments(&["--", "--exact"]);
    if fix {
        step = step.variable("TINKEX_UPDATE_REFERENCE", "1");
    }
    step.run()
}
