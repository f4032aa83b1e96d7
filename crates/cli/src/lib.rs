//! The command line `tinkex`: arguments in, calls of the SDK, tables or JSON out.
//!
//! It is a library so that a test can run a command line as the program does, with a server, a
//! terminal and an environment of its own ([`Environment`]). `main.rs` brings the real ones.
//!
//! | A line about… | lives in |
//! |---|---|
//! | what can be typed | `args` |
//! | the server on this machine | `local` |
//! | flags over environment over profile, and the client they make | `settings`, `config` |
//! | what a person or a program reads | `output`, `list`, `table`, `human`, `progress` |
//! | what the SDK says on the way | `log` |
//! | what a failure says, and the exit code | `failure` |
//! | a command | `commands` |
//!
//! Standard output holds results and nothing else; questions, notices and errors go to standard
//! error. With `--json` a result is exactly one document, and so is an error.

#![forbid(unsafe_code)]

mod alias;
mod args;
mod commands;
mod config;
mod environment;
mod error;
mod format;
mod id_cache;
mod list;
mod local;
mod log;
mod output;
mod progress;
mod settings;
mod startup_error;
mod table;

use std::ffi::OsString;
use std::future::pending;
use std::mem;
use std::pin::pin;

use futures_util::future::{Either, select};

pub use environment::{Environment, Input, Interrupt, LogScope, Terminals};
pub use error::Exit;

use error::CommandError;
use log::{Console, ConsoleLog};
use output::Shell;
use settings::Settings;

/// Runs one command line, the program's name first, and says with which code to end.
pub async fn run(environment: &mut Environment, line: Vec<OsString>) -> Exit {
    match ParsedCommand::parse(environment, line) {
        Ok(command) => command.run(environment).await,
        Err(exit) => exit,
    }
}

/// Answers a shell that asks what could come next, and says whether one did.
#[must_use]
pub fn completed(line: Vec<OsString>, folder: &std::path::Path) -> bool {
    let completions = clap_complete::CompleteEnv::with_factory(args::Args::definition);
    // A shell that cannot be answered completes nothing; there is nobody to tell.
    completions.try_complete(line, Some(folder)).unwrap_or(true)
}

/// A command line that was understood.
#[derive(Debug)]
pub struct ParsedCommand(args::Args);

impl ParsedCommand {
    /// Reads a command line. What needs nothing but the line itself is done at once, as is
    /// complaining about one that makes no sense: help and versions must not wait for anything.
    ///
    /// # Errors
    ///
    /// With the code to end with, where there is nothing left to do.
    pub fn parse(environment: &mut Environment, line: Vec<OsString>) -> Result<Self, Exit> {
        let wants_json = args::wants_json(&line, &environment.variables);
        let args = match args::Args::read(alias::translate(line)) {
            Ok(args) => args,
            Err(said) if said.use_stderr() => {
                return Err(if wants_json {
                    error::report(environment, &CommandError::usage_of(&said), true)
                } else {
                    error::show_usage(environment, &said)
                });
            }
            Err(help) => return Err(output::help(environment, &help.to_string())),
        };
        match commands::at_once(environment, &args.globals, &args.command) {
            Ok(false) => Ok(Self(args)),
            Ok(true) => Err(Exit::Success),
            Err(failure) => Err(error::report(environment, &failure, wants_json)),
        }
    }

    /// Carries it out, and says with which code to end.
    pub async fn run(self, environment: &mut Environment) -> Exit {
        let wants_json = matches!(
            settings::format(&environment.variables, &self.0.globals),
            Ok(Some(args::Format::Json))
        );
        let settings = match Settings::new(environment, &self.0.globals) {
            Ok(settings) => settings,
            Err(_) if self.0.command.mends_settings() => {
                Settings::without_profile(environment, &self.0.globals)
            }
            Err(failure) => return error::report(environment, &failure, wants_json),
        };
        let format = settings.format;
        let err = Console::new(mem::replace(&mut environment.err, Box::new(std::io::sink())));
        environment.err = Box::new(err.clone());
        let terminal = environment.terminals.err.is_some();
        let log =
            ConsoleLog::new(err.clone(), &environment.variables, &self.0.globals, format, terminal);
        let _told = match environment.log_scope {
            LogScope::ThisThread => Some(tracing::subscriber::set_default(log)),
            LogScope::AllThreads => {
                // One that is there already tells, too.
                let _ = tracing::subscriber::set_global_default(log);
                None
            }
        };
        match execute(environment, err, self.0, settings).await {
            Ok(exit) => exit,
            Err(failure) => error::report(environment, &failure, format == args::Format::Json),
        }
    }
}

/// Whether a command line runs a server in this process, which wants more than one thread.
#[must_use]
pub fn serves(line: &[OsString]) -> bool {
    line.iter().any(|word| ["serve", "quickstart", "--local"].iter().any(|own| word == own))
}

/// Carries the command out, unless the user stops it.
async fn execute(
    environment: &mut Environment,
    err: Console,
    args: args::Args,
    settings: Settings,
) -> Result<Exit, CommandError> {
    let interrupt = environment.interrupt.clone();
    let minds = args.command.minds_interrupts();
    let mut shell = Shell::new(environment, err, args.globals, settings);
    let ended = {
        // Boxed: the largest command must not fill the stack of the smallest.
        let done = Box::pin(commands::run(&mut shell, args.command));
        let stopped = pin!(async move {
            if minds {
                pending::<()>().await;
            }
            interrupt.pressed(1).await;
        });
        // The command is asked first, so it may say what is left when it is stopped.
        match select(done, stopped).await {
            Either::Left((ended, _)) => ended,
            Either::Right(_) => Err(CommandError::interrupted()),
        }
    };
    if ended.is_err() {
        // Progress may stand where the error goes.
        shell.clear_line();
    }
    let (server, local) = (shell.settings.server(shell.environment), shell.settings.local);
    shell.end().await;
    ended.map_err(|failure| failure.at(&server, local))
}
