//! The commands, a file each: what can be typed after the name, and what it does.

mod run;

use clap::Subcommand;
use serde_json::json;

use crate::failure::{Exit, Failure};
use crate::output::Shell;

/// What can be done.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Training runs
    #[command(subcommand, arg_required_else_help = true)]
    Run(run::Run),
    /// The version of this program
    Version,
}

impl Command {
    /// Whether the command ends itself in order when it is interrupted; the others just stop.
    pub(crate) fn minds_interrupts(&self) -> bool {
        match self {
            Self::Run(_) | Self::Version => false,
        }
    }
}

pub(crate) async fn run(shell: &mut Shell<'_>, command: Command) -> Result<Exit, Failure> {
    match command {
        Command::Run(command) => run::run(shell, command).await?,
        Command::Version => {
            let version = env!("CARGO_PKG_VERSION");
            let json = json!({ "name": "tinkex", "version": version });
            shell.text(&format!("tinkex {version}"), &json)?;
        }
    }
    Ok(Exit::Done)
}
