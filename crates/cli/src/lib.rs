//! The command line `tinkex`: arguments in, calls of the SDK, tables or JSON out.
//!
//! It is a library so that a test can run a command line as the program does, with a server, a
//! terminal and an environment of its own ([`World`]). `main.rs` brings the real ones.
//!
//! | A line about… | lives in |
//! |---|---|
//! | what can be typed | `args` |
//! | the server on this machine | `local` |
//! | flags over environment, and the client they make | `settings` |
//! | what a person or a program reads | `output`, `table`, `human`, `progress` |
//! | what a failure says, and the exit code | `failure` |
//! | a command | `commands` |
//!
//! Standard output holds results and nothing else; questions, notices and errors go to standard
//! error. With `--json` a result is exactly one document, and so is an error.

#![forbid(unsafe_code)]

mod args;
mod commands;
mod failure;
mod human;
mod local;
mod output;
mod progress;
mod settings;
mod table;
mod world;

use std::ffi::OsString;
use std::future::pending;
use std::pin::pin;

use clap::Parser as _;
use futures_util::future::{Either, select};

pub use failure::Exit;
pub use world::{Input, Interrupt, Terminals, World};

use failure::Failure;
use output::Shell;

/// Runs one command line, the program's name first, and says with which code to end.
pub async fn run(world: &mut World, line: Vec<OsString>) -> Exit {
    let wants_json = args::wants_json(&line);
    let args = match args::Args::try_parse_from(line) {
        Ok(args) => args,
        Err(said) if said.use_stderr() => {
            return if wants_json {
                failure::report(world, &Failure::usage_of(&said), true)
            } else {
                failure::show_usage(world, &said)
            };
        }
        Err(help) => return output::help(world, &help.to_string()),
    };
    let json = args.globals.format() == args::Format::Json;
    match obey(world, args).await {
        Ok(exit) => exit,
        Err(failure) => failure::report(world, &failure, json),
    }
}

/// Whether a command line runs a server in this process, which wants more than one thread.
#[must_use]
pub fn serves(line: &[OsString]) -> bool {
    line.iter().any(|word| ["serve", "quickstart", "--local"].iter().any(|own| word == own))
}

/// Carries the command out, unless the user stops it.
async fn obey(world: &mut World, args: args::Args) -> Result<Exit, Failure> {
    let interrupt = world.interrupt.clone();
    let minds = args.command.minds_interrupts();
    let mut shell = Shell::new(world, args.globals);
    let ended = {
        let done = pin!(commands::run(&mut shell, args.command));
        let stopped = pin!(async move {
            if minds {
                pending::<()>().await;
            }
            interrupt.pressed(1).await;
        });
        match select(done, stopped).await {
            Either::Left((ended, _)) => ended,
            Either::Right(_) => Err(Failure::interrupted()),
        }
    };
    if ended.is_err() {
        // Progress may stand where the error goes.
        shell.clear_line();
    }
    shell.end().await;
    ended
}
