//! `cargo xtask contract`: runs the contract suite against any Tinker server.

use std::path::PathBuf;

use clap::Args;

use crate::step::{Step, XtaskError, ignored_test};

/// Arguments of `cargo xtask contract`.
#[derive(Args)]
pub(crate) struct ContractArgs {
    /// Base URL of the server
    #[arg(long, value_name = "URL")]
    base_url: String,
    /// File that contains the API key
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Base model [default: the first that the server lists]
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
}

pub(crate) fn run(args: &ContractArgs) -> Result<(), XtaskError> {
    let mut suite = step(&args.base_url)?;
    if let Some(file) = &args.api_key_file {
        // The test runs in the folder of its crate.
        let path = std::path::absolute(file).map_err(|error| {
            XtaskError::new(format!("contract: cannot resolve {}: {error}", file.display()))
        })?;
        suite = suite.variable("TINKEX_CONTRACT_KEY_FILE", path);
    }
    if let Some(model) = &args.model {
        suite = suite.variable("TINKEX_CONTRACT_MODEL", model);
    }
    suite.run()
}

/// Returns the step that runs the suite against the server at `base_url`.
pub(crate) fn step(base_url: &str) -> Result<Step, XtaskError> {
    let test = "contract::another_server_passes_the_contract";
    let step = ignored_test("contract suite", "tinkex-server", test, &[])?;
    Ok(step.variable("TINKEX_CONTRACT_URL", base_url))
}
