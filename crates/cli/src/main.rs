//! The `tinkex` program: connects the command line to the process's streams, terminal, signals and
//! environment variables, and returns the exit code.

#![forbid(unsafe_code)]

use std::io::{IsTerminal, stderr, stdin, stdout};
use std::process::ExitCode;

use tinkex::Env;
use tinkex_cli::{Environment, Input, Interrupt, LogScope, ParsedCommand, Terminals};

fn main() -> ExitCode {
    let interrupt = Interrupt::default();
    let mut environment = Environment {
        variables: Env::from_process(),
        // An empty path leaves relative paths to the operating system.
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
        // The embedded server and the client's tasks run on other threads.
        log_scope: LogScope::AllThreads,
        prepare: Box::new(|client| client),
    };
    let line: Vec<_> = std::env::args_os().collect();
    if tinkex_cli::answer_completion(line.clone(), &environment.folder) {
        return ExitCode::SUCCESS;
    }
    let command = match ParsedCommand::parse(&mut environment, line) {
        Ok(command) => command,
        Err(exit) => return ExitCode::from(exit.code()),
    };
    // A client needs one thread. An embedded server needs more: its HTTP tasks must make progress
    // while the command computes.
    let mut builder = if command.embeds_server(&environment) {
        tokio::runtime::Builder::new_multi_thread()
    } else {
        tokio::runtime::Builder::new_current_thread()
    };
    let runtime = match builder.enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("error: cannot start the async runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    let exit = runtime.block_on(async {
        forward_signals(&interrupt);
        command.run(&mut environment).await
    });
    // Do not wait for threads that block on reading standard input.
    runtime.shutdown_background();
    ExitCode::from(exit.code())
}

/// Forwards SIGINT and SIGTERM (Ctrl-C elsewhere) to the command as an [`Interrupt`]. The default
/// action of these signals is disabled from then on.
#[expect(clippy::disallowed_methods, reason = "the tasks live as long as the program")]
fn forward_signals(interrupt: &Interrupt) {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        type Forward = fn(&Interrupt);
        let kinds: [(SignalKind, Forward); 2] = [
            (SignalKind::interrupt(), Interrupt::press),
            (SignalKind::terminate(), Interrupt::terminate),
        ];
        for (kind, forward) in kinds {
            let interrupt = interrupt.clone();
            if let Ok(mut signals) = signal(kind) {
                tokio::spawn(async move {
                    while signals.recv().await.is_some() {
                        forward(&interrupt);
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

/// Returns the number of columns if the stream is a terminal; 80 if the terminal does not report it.
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

/// Returns 80 columns if the stream is a terminal.
#[cfg(not(unix))]
fn width(stream: &impl IsTerminal) -> Option<usize> {
    stream.is_terminal().then_some(80)
}
