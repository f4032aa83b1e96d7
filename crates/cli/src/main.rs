//! The program: the real streams, terminal and environment, and the exit code.

#![forbid(unsafe_code)]

use std::io::{BufReader, IsTerminal as _, stderr, stdin, stdout};
use std::process::ExitCode;

use tinkex::Env;
use tinkex_cli::World;

fn main() -> ExitCode {
    // One thread is enough to wait for a server.
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(why) => {
            eprintln!("error: the program cannot start: {why}");
            return ExitCode::FAILURE;
        }
    };
    let mut world = World {
        env: Env::of_process(),
        out: Box::new(stdout()),
        err: Box::new(stderr()),
        input: Box::new(BufReader::new(stdin())),
        interactive: stdin().is_terminal() && stderr().is_terminal(),
        width: width(),
        prepare: Box::new(|client| client),
        echo: Box::new(echo),
    };
    let line = std::env::args_os().collect();
    let exit = runtime.block_on(tinkex_cli::run(&mut world, line));
    ExitCode::from(exit.code())
}

/// How wide the terminal is, if results go to one.
fn width() -> Option<usize> {
    if !stdout().is_terminal() {
        return None;
    }
    #[cfg(unix)]
    if let Ok(size) = rustix::termios::tcgetwinsize(stdout())
        && size.ws_col > 0
    {
        return Some(usize::from(size.ws_col));
    }
    Some(80)
}

#[cfg(unix)]
fn echo(on: bool) {
    use rustix::termios::{LocalModes, OptionalActions, tcgetattr, tcsetattr};
    if let Ok(mut mode) = tcgetattr(stdin()) {
        mode.local_modes.set(LocalModes::ECHO, on);
        // If it cannot be switched off, what is typed is seen, as everything else is.
        let _ = tcsetattr(stdin(), OptionalActions::Now, &mode);
    }
}

#[cfg(not(unix))]
fn echo(_on: bool) {}
