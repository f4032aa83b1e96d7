//! The program: the real streams, terminal, signals and environment, and the exit code.

#![forbid(unsafe_code)]

use std::io::{BufReader, IsTerminal, stderr, stdin, stdout};
use std::process::ExitCode;

use tinkex::Env;
use tinkex_cli::{Input, Interrupt, Order, Terminals, World};

fn main() -> ExitCode {
    let interrupt = Interrupt::default();
    let mut world = World {
        env: Env::of_process(),
        // Without one, relative paths mean what they always do.
        folder: std::env::current_dir().unwrap_or_default(),
        out: Box::new(stdout()),
        err: Box::new(stderr()),
        input: input(),
        terminals: Terminals {
            out: width(&stdout()),
            err: width(&stderr()),
            input: stdin().is_terminal(),
        },
        interrupt: interrupt.clone(),
        prepare: Box::new(|client| client),
    };
    let order = match Order::read(&mut world, std::env::args_os().collect()) {
        Ok(order) => order,
        Err(exit) => return ExitCode::from(exit.code()),
    };
    // One thread is enough to wait for a server.
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(why) => {
            eprintln!("error: the program cannot start: {why}");
            return ExitCode::FAILURE;
        }
    };
    let exit = runtime.block_on(async {
        tokio::spawn(listen(interrupt));
        order.obey(&mut world).await
    });
    // A thread may still wait for input that nobody wants any more.
    runtime.shutdown_background();
    ExitCode::from(exit.code())
}

/// Passes Ctrl-C, and what a system sends to end a program, on to the command.
async fn listen(interrupt: Interrupt) {
    #[cfg(unix)]
    if let Ok(mut end) = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()) {
        let interrupt = interrupt.clone();
        tokio::spawn(async move {
            while end.recv().await.is_some() {
                interrupt.press();
            }
        });
    }
    while tokio::signal::ctrl_c().await.is_ok() {
        interrupt.press();
    }
}

/// What is typed or piped in.
fn input() -> Input {
    #[cfg(unix)]
    if stdin().is_terminal() {
        return Input::of_terminal(BufReader::new(stdin()), hide);
    }
    Input::new(BufReader::new(stdin()))
}

/// Hides what is typed, until the guard is dropped.
#[cfg(unix)]
fn hide() -> std::io::Result<Box<dyn Send>> {
    use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};

    struct Before(Termios);

    impl Drop for Before {
        fn drop(&mut self) {
            let _ = tcsetattr(stdin(), OptionalActions::Now, &self.0);
        }
    }

    let before = tcgetattr(stdin())?;
    let mut hidden = before.clone();
    hidden.local_modes -= LocalModes::ECHO | LocalModes::ICANON | LocalModes::ISIG;
    tcsetattr(stdin(), OptionalActions::Now, &hidden)?;
    Ok(Box::new(Before(before)))
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
