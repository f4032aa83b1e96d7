//! `cargo xtask contract`: runs the contract suite against any Tinker server.

use crate::step::{Step, XtaskError, ignored_test};

pub(crate) fn run(options: &[&str]) -> Result<(), XtaskError> {
    let mut variables = Vec::new();
    let mut options = options.iter();
    while let Some(option) = options.next() {
        let Some(value) = options.next() else {
            return Err(XtaskError::new(format!("contract: {option} needs a value")));
        };
        variables.push(match *option {
            "--base-url" => ("TINKEX_CONTRACT_URL", (*value).to_owned()),
            "--model" => ("TINKEX_CONTRACT_MODEL", (*value).to_owned()),
            "--api-key-file" => {
                // The test runs in the folder of its crate.
                let path = std::path::absolute(value).map_err(|error| {
                    XtaskError::new(format!("contract: cannot resolve {value}: {error}"))
                })?;
                ("TINKEX_CONTRACT_KEY_FILE", path.to_string_lossy().into_owned())
            }
            other => return Err(XtaskError::new(format!("contract: unknown option {other}"))),
        });
    }
    if !variables.iter().any(|(name, _)| *name == "TINKEX_CONTRACT_URL") {
        let usage = "contract: no server given; pass --base-url URL [--api-key-file FILE]";
        return Err(XtaskError::new(usage));
    }
    step(&variables)?.run()
}

/// Returns the step that runs the suite, with its settings as environment variables.
pub(crate) fn step(variables: &[(&str, String)]) -> Result<Step, XtaskError> {
    let test = "contract::another_server_passes_the_contract";
    let step = ignored_test("contract suite", "tinkex-server", test, &[])?;
    Ok(variables.iter().fold(step, |step, (name, value)| step.variable(name, value)))
}
