//! The program: the real streams, terminal and environment, and the exit code.

#![forbid(unsafe_code)]

use std::io::{IsTerminal as _, stderr, stdout};
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
        width: width(),
        prepare: Box::new(|client| client),
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
