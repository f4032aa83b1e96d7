//! The commands, a file each: what can be typed after the name, and what it does.

mod chat;
mod logprobs;
mod prompt;
mod quickstart;
mod run;
mod sample;
mod save;
mod serve;
mod tokenizer;
mod train;
mod weights;

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
    /// See all of it work in under a minute: no key, no GPU, no network
    Quickstart(quickstart::Quickstart),
    /// Talk to a model
    Chat(Box<chat::Chat>),
    /// Teach a model from a file of examples
    Train(Box<train::Train>),
    /// Samples from a base model or a checkpoint
    Sample(Box<sample::Sample>),
    /// How likely a model finds a text
    Logprobs(logprobs::Logprobs),
    /// Text to tokens and back
    #[command(subcommand, arg_required_else_help = true)]
    Tokenizer(tokenizer::Tokenizer),
    /// The Tinker API on this machine
    Serve(serve::Serve),
    /// The version of this program
    Version,
}

impl Command {
    /// Whether the command ends itself in order when it is interrupted; the others just stop.
    pub(crate) fn minds_interrupts(&self) -> bool {
        match self {
            Self::Chat(_) | Self::Serve(_) | Self::Train(_) => true,
            Self::Quickstart(_)
            | Self::Run(_)
            | Self::Sample(_)
            | Self::Logprobs(_)
            | Self::Tokenizer(_)
            | Self::Version => false,
        }
    }
}

pub(crate) async fn run(shell: &mut Shell<'_>, command: Command) -> Result<Exit, Failure> {
    match command {
        Command::Run(command) => run::run(shell, command).await?,
        Command::Quickstart(command) => quickstart::run(shell, command).await?,
        Command::Chat(command) => return chat::run(shell, *command).await,
        Command::Train(command) => return train::run(shell, *command).await,
        Command::Sample(command) => sample::run(shell, *command).await?,
        Command::Logprobs(command) => logprobs::run(shell, command).await?,
        Command::Tokenizer(command) => tokenizer::run(shell, command).await?,
        Command::Serve(command) => return serve::run(shell, command).await,
        Command::Version => {
            let version = env!("CARGO_PKG_VERSION");
            let json = json!({ "name": "tinkex", "version": version });
            shell.text(&format!("tinkex {version}"), &json)?;
        }
    }
    Ok(Exit::Done)
}
