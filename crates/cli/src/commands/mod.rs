//! The commands, a file each.

mod run;

use serde_json::json;

use crate::args::Command;
use crate::failure::{Exit, Failure};
use crate::output::Shell;

pub(crate) async fn run(shell: &mut Shell<'_>, command: Command) -> Result<Exit, Failure> {
    match command {
        Command::Run(run) => run::run(shell, run).await?,
        Command::Version => {
            let version = env!("CARGO_PKG_VERSION");
            let json = json!({ "name": "tinkex", "version": version });
            shell.text(&format!("tinkex {version}"), &json)?;
        }
    }
    Ok(Exit::Done)
}
