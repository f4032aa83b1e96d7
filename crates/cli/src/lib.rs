//! The command line `tinkex`: parses arguments, calls the SDK, and prints tables or JSON.
//!
//! The crate is a library so that a test can run a command line with its own server, terminal and
//! environment variables ([`Environment`]). `main.rs` supplies the streams and variables of the process.
//!
//! | Modules | Contents |
//! |---|---|
//! | `args`, `commands` | arguments and subcommands, each command in its own file |
//! | `settings`, `config`, `key_source` | precedence of flags, environment variables and profile; the client built from them |
//! | `context` | settings, client and output of a running command |
//! | `local`, `local_models`, `startup_error` | the server on this machine: started, found, or taken over; models that commands name by their paths |
//! | `output`, `list`, `table`, `format` | results: tables, JSON, CSV, plain text |
//! | `style`, `wrap` | colors, and line breaks between words |
//! | `console`, `progress`, `log` | standard error: notices, progress bars, log events |
//! | `error` | error messages, hints and exit codes |
//! | `reference` | arguments that name runs and checkpoints: ids, names, folders, `latest` |
//! | `id_cache` | recently listed ids for shell completion |
//! | `environment` | streams, variables, terminal and signals |
//!
//! Standard output contains only results. Prompts, notices, progress and errors go to standard error.
//! With `--json` a result is exactly one JSON document, and so is an error.

#![forbid(unsafe_code)]

mod alias;
mod args;
#[cfg(test)]
mod command_reference;
mod commands;
mod config;
mod console;
mod context;
#[cfg(test)]
mod documented_commands;
mod environment;
mod error;
mod format;
mod id_cache;
mod inference_endpoints;
mod key_source;
mod list;
mod local;
mod local_models;
mod log;
mod output;
mod port_owner;
mod progress;
mod reference;
mod settings;
mod startup_error;
mod style;
mod table;
mod wrap;

use std::ffi::OsString;
use std::future::pending;
use std::mem;
use std::pin::pin;

use futures_util::future::{Either, select};

pub use environment::{Environment, Input, Interrupt, LogScope, Terminals};
pub use error::Exit;

use args::OutputFormat;
use commands::CliCommand;
use console::Console;
use context::CommandContext;
use error::CommandError;
use settings::CommandSettings;

/// Runs one command line, program name first, and returns the exit code.
pub async fn run(environment: &mut Environment, line: Vec<OsString>) -> Exit {
    match ParsedCommand::parse(environment, line) {
        Ok(command) => command.run(environment).await,
        Err(exit) => exit,
    }
}

/// Handles a shell's completion request, if the environment contains one. Returns whether it did.
#[must_use]
pub fn answer_completion(line: Vec<OsString>, folder: &std::path::Path) -> bool {
    let completions = clap_complete::CompleteEnv::with_factory(args::Args::definition);
    // A failed completion must not print to the user's prompt, so the error is dropped.
    completions.try_complete(line, Some(folder)).unwrap_or(true)
}

/// Command line that was parsed and is ready to run.
#[derive(Debug)]
pub struct ParsedCommand(args::Args);

impl ParsedCommand {
    /// Parses a command line, program name first.
    ///
    /// Commands that need nothing but the command line (help, version, completions, manual pages)
    /// run here, before a runtime is started: `tinkex --help` must return in milliseconds.
    ///
    /// # Errors
    ///
    /// Returns the exit code if the command is done, or if the command line is invalid and the
    /// error was reported.
    pub fn parse(environment: &mut Environment, line: Vec<OsString>) -> Result<Self, Exit> {
        let wants_json = args::wants_json(&line, &environment.variables);
        let globals = args::color_flags(&line);
        let style = settings::message_style(environment, &globals);
        let args = match args::Args::parse_line(alias::translate(line)) {
            Ok(args) => args,
            Err(error) if error.use_stderr() => {
                return Err(if wants_json {
                    error::report(environment, &CommandError::from_clap(&error), true, false, style)
                } else {
                    error::report_usage(environment, &error, style)
                });
            }
            Err(help) => {
                let style = settings::help_style(environment, &globals);
                return Err(output::print_help(environment, &style.help(&help.to_string())));
            }
        };
        match commands::run_offline(environment, &args.globals, &args.command) {
            Ok(false) => Ok(Self(args)),
            Ok(true) => Err(Exit::Success),
            Err(failure) => Err(error::report(environment, &failure, wants_json, false, style)),
        }
    }

    /// Returns whether the command runs a server in this process, which needs a multi-threaded
    /// runtime: `serve`, `quickstart`, and every command with `--local` or `local = true` in its
    /// profile.
    #[must_use]
    pub fn embeds_server(&self, environment: &Environment) -> bool {
        matches!(self.0.command, CliCommand::Serve(_) | CliCommand::Quickstart(_))
            || CommandSettings::new(environment, &self.0.globals)
                .is_ok_and(|settings| settings.local)
    }

    /// Runs the command and returns the exit code.
    pub async fn run(self, environment: &mut Environment) -> Exit {
        let globals = &self.0.globals;
        let command = &self.0.command;
        let verbose = globals.verbose > 0;
        let wants_json = matches!(
            settings::output_format(&environment.variables, globals),
            Ok(Some(OutputFormat::Json))
        );
        let settings = match CommandSettings::new(environment, globals) {
            Ok(settings) => settings,
            Err(_) if command.repairs_settings() => {
                CommandSettings::without_profile(environment, globals)
            }
            Err(failure) => {
                let style = settings::message_style(environment, globals);
                return error::report(environment, &failure, wants_json, verbose, style);
            }
        };
        let format = settings.format;
        let style = settings.messages;
        let stream = mem::replace(&mut environment.err, Box::new(std::io::sink()));
        let console = Console::new(stream, style);
        environment.err = Box::new(console.clone());
        let server_log = command.server_log(settings.colors);
        let _log = log::install(&console, environment, globals, format, server_log);
        match execute(environment, console, self.0, settings).await {
            Ok(exit) => exit,
            Err(failure) => {
                error::report(environment, &failure, format == OutputFormat::Json, verbose, style)
            }
        }
    }
}

/// Runs the command until it ends or the user interrupts it.
async fn execute(
    environment: &mut Environment,
    console: Console,
    args: args::Args,
    settings: CommandSettings,
) -> Result<Exit, CommandError> {
    let interrupt = environment.interrupt.clone();
    let handles_interrupts = args.command.handles_interrupts();
    let mut context = CommandContext::new(environment, console, args.globals, settings);
    let result = {
        // Boxed, so that the future of the largest command is not on the stack of every command.
        let finished = Box::pin(commands::run(&mut context, args.command));
        let interrupted = pin!(async move {
            if handles_interrupts {
                pending::<()>().await;
            }
            interrupt.pressed(1).await;
        });
        // The command is polled first, so that its own report of the interruption wins.
        match select(finished, interrupted).await {
            Either::Left((result, _)) => result,
            Either::Right(_) => Err(CommandError::interrupted()),
        }
    };
    context.console().remove_bar();
    let server = context.settings.server(context.environment);
    let local = context.settings.local;
    context.close().await;
    result.map_err(|failure| failure.with_server(&server, local))
}

#[cfg(test)]
mod tests {
    use tinkex::Env;

    use super::*;

    fn embeds_server(config: &str, line: &str, variables: &[(&str, &str)]) -> bool {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.toml");
        std::fs::write(&path, config).unwrap();
        let config = [("TINKEX_CONFIG", path.to_str().unwrap())];
        let mut environment = Environment {
            variables: Env::from_pairs(config.into_iter().chain(variables.iter().copied())),
            folder: folder.path().to_owned(),
            out: Box::new(std::io::sink()),
            err: Box::new(std::io::sink()),
            input: Input::new(std::io::empty()),
            terminals: Terminals::default(),
            interrupt: Interrupt::default(),
            log_scope: LogScope::ThisThread,
            prepare: Box::new(|client| client),
        };
        let line = line.split(' ').map(Into::into).collect();
        let command = ParsedCommand::parse(&mut environment, line).unwrap();
        command.embeds_server(&environment)
    }

    #[test]
    fn commands_that_may_run_a_server_get_a_multi_threaded_runtime() {
        let local = "[profiles.default]\nlocal = \"true\"\n";
        let url = [("TINKER_BASE_URL", "http://a.test")];
        for (config, line, variables, expected) in [
            ("", "tinkex run list", &[][..], false),
            ("", "tinkex run list --local", &[], true),
            ("", "tinkex serve", &[], true),
            ("", "tinkex quickstart", &[], true),
            ("", "tinkex sample --prompt serve", &[], false),
            (local, "tinkex run list", &[], true),
            (local, "tinkex run list", &url, false),
            (local, "tinkex run list --base-url http://a.test", &[], false),
        ] {
            assert_eq!(embeds_server(config, line, variables), expected, "{line} {variables:?}");
        }
    }
}
