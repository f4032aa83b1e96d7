//! The program: the real streams, terminal, signals and environment, and the exit code.

#![forbid(unsafe_code)]

use std::io::{IsTerminal, stderr, stdin, stdout};
use std::process::ExitCode;

use tinkex::Env;
use tinkex_cli::{Environment, Input, Interrupt, LogScope, ParsedCommand, Terminals};

fn main() -> ExitCode {
    let interrupt = Interrupt::default();
    let mut environment = Environment {
        variables: Env::of_process(),
        // Without one, relative paths mean what they always do.
        folder: std::env::current_dir().unwrap_or_default(),
        out: Box::new(stdout()),
        err: Box::new(stderr()),
        input: Input::of_process(),
        terminals: Terminals {
            out: width(&stdout()),
            err: width(&stderr()),
            input: stdin().is_terminal(),
        },
        interrupt: interrupt.clone(),
        // A server in this program, and a client beside it, have threads of their own.
        log_scope: LogScope::AllThreads,
        prepare: Box::new(|client| client),
    };
    let line: Vec<_> = std::env::args_os().collect();
    if tinkex_cli::completed(line.clone(), &environment.folder) {
        return ExitCode::SUCCESS;
    }
    let serves = tinkex_cli::serves(&line);
    let command = match ParsedCommand::parse(&mut environment, line) {
        Ok(command) => command,
        Err(exit) => return ExitCode::from(exit.code()),
    };
    // One thread is enough to wait for a server, but not to be one.
    let mut builder = if serves {
        tokio::runtime::Builder::new_multi_thread()
    } else {
        tokio::runtime::Builder::new_current_thread()
    };
    let runtime = match builder.enable_all().build() {
        Ok(runtime) => runtime,
        Err(why) => {
            eprintln!("error: the program cannot start: {why}");
            return ExitCode::FAILURE;
        }
    };
    let exit = runtime.block_on(async {
        listen(&interrupt);
        command.run(&mut environment).await
    });
    // A thread may still wait for input that nobody wants any more.
    runtime.shutdown_background();
    ExitCode::from(exit.code())
}

/// Passes Ctrl-C, and what a system sends to end a program, on to the command. From the moment this
/// returns, neither ends the program by itself.
#[expect(clippy::disallowed_methods, reason = "they live as long as the program")]
fn listen(interrupt: &Interrupt) {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        for kind in [SignalKind::interrupt(), SignalKind::terminate()] {
            let interrupt = interrupt.clone();
            if let Ok(mut signals) = signal(kind) {
                tokio::spawn(async move {
                    while signals.recv().await.is_some() {
                        interrupt.press();
                    }
                });
            }
        }
    }
    #[cfg(not(unix))]
    let interrupt = interrupt.clone();
    #[cfg(not(unix))]
    tokio::spawn(async move {
        while tokio::signal::ctrl_c().await.is_ok() {
            interrupt.press();
        }
    });
}

/// How wide the terminal is, if the stream is one.
#[cfg(unix)]
fn width(stream: &(impl IsTerminal + std::os::fd::AsFd)) -> Option<usize> {
    if !stream.is_terminal() {
        return None;
    }
    match rustix::termios::tcgetwinsize(stream) {
        Ok(size) if size.ws_col > 0 => Some(usize::from(size.ws_col)),
        _ => Some(80),
    }
}

/// How wide the terminal is, if the stream is one.
#[cfg(not(unix))]
fn width(stream: &impl IsTerminal) -> Option<usize> {
    stream.is_terminal().then_some(80)
}
