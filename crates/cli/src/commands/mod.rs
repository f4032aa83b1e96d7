//! The commands, a file each: what can be typed after the name, and what it does.

mod audit;
mod auth;
mod billing;
mod chat;
mod checkpoint;
mod config;
mod doctor;
mod logprobs;
mod manual;
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
use crate::failure::{Exit, Failure};
use crate::output::{self, Shell};
use crate::settings;
use crate::world::World;

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
pub(crate) enum Command {
    /// See all of it work in under a minute: no key, no GPU, no network
    Quickstart(quickstart::Quickstart),
    /// Teach a model from a file of examples
    Train(Box<train::Train>),
    /// Talk to a model
    Chat(Box<chat::Chat>),
    /// Samples from a base model or a checkpoint
    Sample(Box<sample::Sample>),
    /// The Tinker API on this machine
    Serve(serve::Serve),
    /// Base models
    #[command(subcommand, arg_required_else_help = true)]
    Model(model::Model),
    /// How likely a model finds a text
    Logprobs(logprobs::Logprobs),
    /// Text to tokens and back
    #[command(subcommand, arg_required_else_help = true)]
    Tokenizer(tokenizer::Tokenizer),
    /// Training runs
    #[command(subcommand, arg_required_else_help = true)]
    Run(run::Run),
    /// Checkpoints: find, share, keep, delete
    #[command(subcommand, arg_required_else_help = true)]
    Checkpoint(checkpoint::Checkpoint),
    /// Sessions, looked at from outside
    #[command(subcommand, arg_required_else_help = true)]
    Session(session::Session),
    /// Who you are: log in and out, choose among stored keys
    #[command(subcommand, arg_required_else_help = true)]
    Auth(auth::Auth),
    /// What was used, and what it costs
    #[command(subcommand, arg_required_else_help = true)]
    Billing(billing::Billing),
    /// Who did what
    #[command(subcommand, arg_required_else_help = true)]
    Audit(audit::Audit),
    /// Look at everything that has to be right, and say what to do where it is not
    Doctor(doctor::Doctor),
    /// Settings that stay, in one file, by profile
    #[command(subcommand, arg_required_else_help = true)]
    Config(config::Settings),
    /// Lines for your shell, so that it completes commands, options, and ids that were listed lately
    #[command(after_help = "Examples:
  source <(tinkex completions bash)              in ~/.bashrc
  source <(tinkex completions zsh)               in ~/.zshrc
  tinkex completions fish | source               in config.fish")]
    Completions(manual::Completions),
    /// Manual pages
    #[command(after_help = "Examples:
  tinkex man | man -l -
  tinkex man --dir ~/.local/share/man/man1")]
    Man(manual::Man),
    /// The version of this program
    #[command(after_help = "Example:
  tinkex version --json")]
    Version,
}

/// What to do about a command line that makes no sense, where the parser does not say.
pub(crate) fn hint(said: &clap::Error) -> Option<String> {
    train::hint(said)
}

impl Command {
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
    world: &mut World,
    globals: &Globals,
    command: &Command,
) -> Result<bool, Failure> {
    let version = env!("CARGO_PKG_VERSION");
    let (text, json) = match command {
        Command::Version => {
            (format!("tinkex {version}\n"), json!({ "name": "tinkex", "version": version }))
        }
        Command::Completions(what) => {
            let script = manual::completions(*what)?;
            let json = json!({ "script": script });
            (script, json)
        }
        Command::Man(what) => {
            let page = manual::man(world, what)?;
            let json = json!({ "text": page });
            (page, json)
        }
        _ => return Ok(false),
    };
    let text = match settings::format(&world.env, globals)? {
        Some(Format::Json) => output::document(&json)?,
        _ => text,
    };
    world.out.write_all(text.as_bytes())?;
    world.out.flush()?;
    Ok(true)
}

pub(crate) async fn run(shell: &mut Shell<'_>, command: Command) -> Result<Exit, Failure> {
    match command {
        Command::Config(command) => config::run(shell, command)?,
        Command::Run(command) => run::run(shell, command).await?,
        Command::Quickstart(command) => Box::pin(quickstart::run(shell, command)).await?,
        Command::Chat(command) => return Box::pin(chat::run(shell, *command)).await,
        Command::Train(command) => return Box::pin(train::run(shell, *command)).await,
        Command::Auth(command) => return auth::run(shell, command).await,
        Command::Model(command) => model::run(shell, command).await?,
        Command::Checkpoint(command) => return checkpoint::run(shell, command).await,
        Command::Session(command) => session::run(shell, command).await?,
        Command::Billing(command) => billing::run(shell, command).await?,
        Command::Audit(command) => audit::run(shell, command).await?,
        Command::Sample(command) => Box::pin(sample::run(shell, *command)).await?,
        Command::Logprobs(command) => logprobs::run(shell, command).await?,
        Command::Tokenizer(command) => tokenizer::run(shell, command).await?,
        Command::Doctor(_) => return doctor::run(shell).await,
        Command::Serve(command) => return serve::run(shell, command).await,
        Command::Completions(_) | Command::Man(_) | Command::Version => {}
    }
    Ok(Exit::Done)
}
