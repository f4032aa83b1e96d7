//! The commands, a file each: what can be typed after the name, and what it does.

mod audit;
mod auth;
mod billing;
mod chat;
mod checkpoint;
mod config;
mod doctor;
mod generate;
mod logprobs;
mod model;
mod prompt;
mod quickstart;
mod run;
mod sample;
mod save;
mod serve;
mod session;
mod tokenizer;
mod trace;
mod train;
mod weights;

use clap::Subcommand;
use serde_json::json;

use crate::args::{Format, Globals};
use crate::environment::Environment;
use crate::error::{CommandError, Exit};
use crate::output::{self, Shell};
use crate::settings;

/// The commands by what they are for, as somebody new needs them.
pub(crate) const GROUPS: &[(&str, &[&str])] = &[
    ("Start here", &["quickstart", "train", "chat", "sample", "serve"]),
    ("Models and text", &["model", "logprobs", "tokenizer"]),
    ("What you have on the server", &["run", "checkpoint", "session"]),
    ("Your account", &["auth", "billing", "audit"]),
    ("This program", &["doctor", "config", "completions", "man", "version", "help"]),
];

/// What can be done, in the order of [`GROUPS`].
#[derive(Debug, Subcommand)]
pub(crate) enum CliCommand {
    /// See all of it work in under a minute: no key, no GPU, no network
    Quickstart(quickstart::QuickstartArgs),
    /// Teach a model from a file of examples
    Train(Box<train::TrainArgs>),
    /// Talk to a model
    Chat(Box<chat::ChatArgs>),
    /// Samples from a base model or a checkpoint
    Sample(Box<sample::SampleArgs>),
    /// The Tinker API on this machine
    Serve(serve::ServeArgs),
    /// Base models
    #[command(subcommand, arg_required_else_help = true)]
    Model(model::ModelCommand),
    /// How likely a model finds a text
    Logprobs(logprobs::LogprobsArgs),
    /// Text to tokens and back
    #[command(subcommand, arg_required_else_help = true)]
    Tokenizer(tokenizer::TokenizerCommand),
    /// Training runs
    #[command(subcommand, arg_required_else_help = true)]
    Run(run::RunCommand),
    /// Checkpoints: find, share, keep, delete
    #[command(subcommand, arg_required_else_help = true)]
    Checkpoint(checkpoint::CheckpointCommand),
    /// Sessions, looked at from outside
    #[command(subcommand, arg_required_else_help = true)]
    Session(session::SessionCommand),
    /// Who you are: log in and out, choose among stored keys
    #[command(subcommand, arg_required_else_help = true)]
    Auth(auth::AuthCommand),
    /// What was used, and what it costs
    #[command(subcommand, arg_required_else_help = true)]
    Billing(billing::BillingCommand),
    /// Who did what
    #[command(subcommand, arg_required_else_help = true)]
    Audit(audit::AuditCommand),
    /// Look at everything that has to be right, and say what to do where it is not
    Doctor(doctor::DoctorArgs),
    /// Settings that stay, in one file, by profile
    #[command(subcommand, arg_required_else_help = true)]
    Config(config::ConfigCommand),
    /// Lines for your shell, so that it completes commands, options, and ids that were listed lately
    #[command(after_help = "Examples:
  source <(tinkex completions bash)              in ~/.bashrc
  source <(tinkex completions zsh)               in ~/.zshrc
  tinkex completions fish | source               in config.fish")]
    Completions(generate::CompletionsArgs),
    /// Manual pages
    #[command(after_help = "Examples:
  tinkex man | man -l -
  tinkex man --dir ~/.local/share/man/man1")]
    Man(generate::ManArgs),
    /// The version of this program
    #[command(after_help = "Example:
  tinkex version --json")]
    Version,
}

/// What to do about a command line that makes no sense, where the parser does not say.
pub(crate) fn hint(said: &clap::Error) -> Option<String> {
    train::hint(said)
}

impl CliCommand {
    /// Whether the command works even if the profile makes no sense.
    pub(crate) fn mends_settings(&self) -> bool {
        matches!(self, Self::Config(_))
    }

    /// Whether the command ends itself in order when it is interrupted; the others just stop.
    pub(crate) fn minds_interrupts(&self) -> bool {
        match self {
            Self::Chat(_) | Self::Serve(_) | Self::Train(_) => true,
            Self::Checkpoint(command) => command.minds_interrupts(),
            _ => false,
        }
    }
}

/// Does what needs nothing but the command line itself, and says whether it was that.
pub(crate) fn at_once(
    environment: &mut Environment,
    globals: &Globals,
    command: &CliCommand,
) -> Result<bool, CommandError> {
    let version = env!("CARGO_PKG_VERSION");
    let (text, json) = match command {
        CliCommand::Version => {
            (format!("tinkex {version}\n"), json!({ "name": "tinkex", "version": version }))
        }
        CliCommand::Completions(what) => {
            let script = generate::completions(*what)?;
            let json = json!({ "script": script });
            (script, json)
        }
        CliCommand::Man(what) => {
            let page = generate::man(environment, what)?;
            let json = json!({ "text": page });
            (page, json)
        }
        _ => return Ok(false),
    };
    let text = match settings::format(&environment.variables, globals)? {
        Some(Format::Json) => output::document(&json)?,
        _ => text,
    };
    environment.out.write_all(text.as_bytes())?;
    environment.out.flush()?;
    Ok(true)
}

pub(crate) async fn run(shell: &mut Shell<'_>, command: CliCommand) -> Result<Exit, CommandError> {
    match command {
        CliCommand::Config(command) => config::run(shell, command)?,
        CliCommand::Run(command) => run::run(shell, command).await?,
        CliCommand::Quickstart(command) => Box::pin(quickstart::run(shell, command)).await?,
        CliCommand::Chat(command) => return Box::pin(chat::run(shell, *command)).await,
        CliCommand::Train(command) => return Box::pin(train::run(shell, *command)).await,
        CliCommand::Auth(command) => return auth::run(shell, command).await,
        CliCommand::Model(command) => model::run(shell, command).await?,
        CliCommand::Checkpoint(command) => return checkpoint::run(shell, command).await,
        CliCommand::Session(command) => session::run(shell, command).await?,
        CliCommand::Billing(command) => billing::run(shell, command).await?,
        CliCommand::Audit(command) => audit::run(shell, command).await?,
        CliCommand::Sample(command) => Box::pin(sample::run(shell, *command)).await?,
        CliCommand::Logprobs(command) => logprobs::run(shell, command).await?,
        CliCommand::Tokenizer(command) => tokenizer::run(shell, command).await?,
        CliCommand::Doctor(_) => return doctor::run(shell).await,
        CliCommand::Serve(command) => return serve::run(shell, command).await,
        CliCommand::Completions(_) | CliCommand::Man(_) | CliCommand::Version => {}
    }
    Ok(Exit::Success)
}
