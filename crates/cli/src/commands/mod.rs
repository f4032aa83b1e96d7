//! The subcommands, one file or folder each: the arguments and the implementation.

mod audit;
mod auth;
mod billing;
mod chat;
mod checkpoint;
mod config;
mod dashboard;
mod doctor;
mod eval;
mod export;
mod generate;
mod import;
mod key;
mod logprobs;
mod model;
mod plot;
mod prompt;
mod quickstart;
mod rl;
mod run;
mod sample;
mod save;
mod serve;
mod server;
mod session;
mod tokenizer;
mod trace;
mod train;
mod training;
mod training_details;
mod user;
mod weights;

use clap::Subcommand;
use serde_json::json;

use crate::args::{Globals, OutputFormat};
use crate::context::CommandContext;
use crate::environment::Environment;
use crate::error::{CommandError, Exit};
use crate::log::ServerLog;
use crate::output;
use crate::settings;

pub(crate) use training::start::TrainingCommand;

/// Commands of the main help, grouped by purpose.
pub(crate) const GROUPS: &[(&str, &[&str])] = &[
    (
        "Getting started",
        &["quickstart", "train", "rl", "chat", "sample", "serve", "dashboard", "ui"],
    ),
    ("Models and text", &["model", "eval", "logprobs", "tokenizer"]),
    ("Resources on the server", &["run", "checkpoint", "export", "import", "session", "server"]),
    ("Account", &["auth", "key", "user", "billing", "audit"]),
    ("Setup", &["doctor", "config", "completions", "man", "version", "help"]),
];

/// The commands, in the order of [`GROUPS`].
#[derive(Debug, Subcommand)]
pub(crate) enum CliCommand {
    /// Fine-tune a built-in model in a few seconds; needs no key, GPU or network
    Quickstart(quickstart::QuickstartArgs),
    /// Fine-tune a model on a file of examples
    Train(Box<train::TrainArgs>),
    /// Train a model by reinforcement learning with any reward
    Rl(Box<rl::RlArgs>),
    /// Chat with a model
    Chat(Box<chat::ChatArgs>),
    /// Generate text with a base model or a checkpoint
    Sample(Box<sample::SampleArgs>),
    /// Run a Tinker API server on this machine
    Serve(Box<serve::ServeArgs>),
    /// Open the dashboard of the server on this machine
    Dashboard(dashboard::DashboardArgs),
    /// Show run folders in the browser
    Ui(dashboard::UiArgs),
    /// Show base models
    #[command(subcommand, arg_required_else_help = true)]
    Model(model::ModelCommand),
    /// Measure the loss and the answers of a model on a file of examples
    Eval(Box<eval::EvalArgs>),
    /// Compute the log-probability of each token of a text
    Logprobs(logprobs::LogprobsArgs),
    /// Convert text to tokens and back
    #[command(subcommand, arg_required_else_help = true)]
    Tokenizer(tokenizer::TokenizerCommand),
    /// Show and delete training runs
    #[command(subcommand, arg_required_else_help = true)]
    Run(run::RunCommand),
    /// List, download, publish and delete checkpoints
    #[command(subcommand, arg_required_else_help = true)]
    Checkpoint(checkpoint::CheckpointCommand),
    /// Write a checkpoint as a model that other programs load
    #[command(after_help = "Formats:
  hf      Hugging Face folder with the adapter merged into the base model: transformers, vLLM
  peft    the adapter alone, for peft and vLLM
  gguf    one GGUF file with the merged weights: llama.cpp, ollama

The base model is found by name: the folder that a server on this machine serves, or the hub cache. The
folder appears when it is complete; existing folders are kept unless --force is given.

Examples:
  tinkex export tinker://RUN/weights/final --to my-model
  tinkex export animals --to my-model                    the latest checkpoint of the run animals
  tinkex export tinker://RUN/weights/final --to my-model --dtype f16 --base models/Qwen3-0.6B
  tinkex export tinker://RUN/weights/final --to my-model --format gguf --dtype q4_k_m
  tinkex export adapter-folder --to my-model")]
    Export(export::ExportArgs),
    /// Import a PEFT adapter as a checkpoint of a tinkex server
    Import(import::ImportArgs),
    /// Show and search sessions
    #[command(subcommand, arg_required_else_help = true)]
    Session(session::SessionCommand),
    /// Administer a server: drain it, back it up, verify its data folder
    #[command(subcommand, arg_required_else_help = true)]
    Server(server::ServerCommand),
    /// Log in and out, and manage stored API keys
    #[command(subcommand, arg_required_else_help = true)]
    Auth(auth::AuthCommand),
    /// Create, list and revoke the API keys of a tinkex server
    #[command(subcommand, arg_required_else_help = true)]
    Key(key::KeyCommand),
    /// Show the users of a tinkex server, and limit them
    #[command(subcommand, arg_required_else_help = true)]
    User(user::UserCommand),
    /// Show usage and costs
    #[command(subcommand, arg_required_else_help = true)]
    Billing(billing::BillingCommand),
    /// Show the audit log of the organization
    #[command(subcommand, arg_required_else_help = true)]
    Audit(audit::AuditCommand),
    /// Check the configuration, the credential and the connection
    Doctor(doctor::DoctorArgs),
    /// Show and change the configuration file
    #[command(subcommand, arg_required_else_help = true)]
    Config(config::ConfigCommand),
    /// Print a shell completion script
    #[command(after_help = "The script completes commands, options, and recently listed ids.

Examples:
  source <(tinkex completions bash)              in ~/.bashrc
  source <(tinkex completions zsh)               in ~/.zshrc
  tinkex completions fish | source               in config.fish")]
    Completions(generate::CompletionsArgs),
    /// Print or write manual pages
    #[command(after_help = "Examples:
  tinkex man | man -l -
  tinkex man --dir ~/.local/share/man/man1")]
    Man(generate::ManArgs),
    /// Print the version
    #[command(after_help = "Example:
  tinkex version --json")]
    Version,
}

/// Returns a hint for an error of the argument parser, if there is a better one than its usage line.
pub(crate) fn usage_hint(error: &clap::Error) -> Option<String> {
    training::args::usage_hint(error)
}

impl CliCommand {
    /// Returns whether the command must run even if the configuration file is invalid.
    pub(crate) fn repairs_settings(&self) -> bool {
        matches!(self, Self::Config(_))
    }

    /// Returns whether the command handles interruptions itself. Other commands are cancelled.
    pub(crate) fn handles_interrupts(&self) -> bool {
        match self {
            Self::Chat(_)
            | Self::Export(_)
            | Self::Rl(_)
            | Self::Serve(_)
            | Self::Train(_)
            | Self::Ui(_) => true,
            Self::Checkpoint(command) => command.handles_interrupts(),
            _ => false,
        }
    }

    /// Returns the log options, if the command is a server.
    pub(crate) fn server_log(&self, colors: bool) -> Option<ServerLog> {
        match self {
            Self::Serve(args) => Some(args.log(colors)),
            _ => None,
        }
    }
}

/// Runs a command that needs nothing but the command line. Returns whether it was one.
pub(crate) fn run_offline(
    environment: &mut Environment,
    globals: &Globals,
    command: &CliCommand,
) -> Result<bool, CommandError> {
    let version = env!("CARGO_PKG_VERSION");
    let (text, json) = match command {
        CliCommand::Version => {
            (format!("tinkex {version}\n"), json!({ "name": "tinkex", "version": version }))
        }
        CliCommand::Completions(args) => {
            let script = generate::completions(*args)?;
            let json = json!({ "script": script });
            (script, json)
        }
        CliCommand::Man(args) => {
            let page = generate::man(environment, args)?;
            let json = json!({ "text": page });
            (page, json)
        }
        _ => return Ok(false),
    };
    let text = match settings::output_format(&environment.variables, globals)? {
        Some(OutputFormat::Json) => output::to_json(&json)?,
        _ => text,
    };
    environment.out.write_all(text.as_bytes())?;
    environment.out.flush()?;
    Ok(true)
}

pub(crate) async fn run(
    context: &mut CommandContext<'_>,
    command: CliCommand,
) -> Result<Exit, CommandError> {
    match command {
        CliCommand::Config(command) => config::run(context, command)?,
        CliCommand::Run(command) => run::run(context, command).await?,
        CliCommand::Quickstart(args) => Box::pin(quickstart::run(context, args)).await?,
        CliCommand::Chat(args) => return Box::pin(chat::run(context, *args)).await,
        CliCommand::Train(args) => return Box::pin(train::run(context, *args)).await,
        CliCommand::Rl(args) => return Box::pin(rl::run(context, *args)).await,
        CliCommand::Auth(command) => return auth::run(context, command).await,
        CliCommand::Model(command) => model::run(context, command).await?,
        CliCommand::Checkpoint(command) => return checkpoint::run(context, command).await,
        CliCommand::Import(args) => import::run(context, args).await?,
        CliCommand::Export(args) => Box::pin(export::run(context, args)).await?,
        CliCommand::Session(command) => session::run(context, command).await?,
        CliCommand::Server(command) => return server::run(context, command).await,
        CliCommand::Key(command) => key::run(context, command).await?,
        CliCommand::User(command) => user::run(context, command).await?,
        CliCommand::Billing(command) => billing::run(context, command).await?,
        CliCommand::Audit(command) => audit::run(context, command).await?,
        CliCommand::Sample(args) => Box::pin(sample::run(context, *args)).await?,
        CliCommand::Eval(args) => return Box::pin(eval::run(context, *args)).await,
        CliCommand::Logprobs(args) => logprobs::run(context, args).await?,
        CliCommand::Tokenizer(command) => tokenizer::run(context, command).await?,
        CliCommand::Doctor(_) => return doctor::run(context).await,
        CliCommand::Serve(args) => return serve::run(context, *args).await,
        CliCommand::Dashboard(args) => dashboard::run(context, args).await?,
        CliCommand::Ui(args) => return dashboard::run_folders(context, args).await,
        CliCommand::Completions(_) | CliCommand::Man(_) | CliCommand::Version => {}
    }
    Ok(Exit::Success)
}
