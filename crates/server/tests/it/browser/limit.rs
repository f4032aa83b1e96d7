//! [`TestLimit`]: ends the process if a test takes too long.
//!
//! A limit inside of the test is not enough: it does not end a thread that blocks.

use std::process::Command;
use std::sync::Mutex;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

/// Maximum time of one test.
const LIMIT: Duration = Duration::from_secs(240);

/// Last command that was sent to a browser.
static LAST_COMMAND: Mutex<String> = Mutex::new(String::new());

/// Remembers what a test waits for.
pub(super) fn note(command: &str) {
    command.clone_into(&mut LAST_COMMAND.lock().unwrap());
}

/// Ends a process.
pub(super) fn kill(process: u64) {
    let _ = Command::new("kill").args(["-KILL", &process.to_string()]).status();
}

/// Ends the process after [`LIMIT`], unless it is dropped before.
pub(super) struct TestLimit(Sender<u64>);

impl TestLimit {
    pub(super) fn start() -> Self {
        let test = thread::current().name().unwrap_or("browser test").to_owned();
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || {
            let mut processes = Vec::new();
            loop {
                match receiver.recv_timeout(LIMIT) {
                    Ok(process) => processes.push(process),
                    Err(RecvTimeoutError::Disconnected) => return,
                    Err(RecvTimeoutError::Timeout) => break,
                }
            }
            let last = LAST_COMMAND.lock().unwrap().clone();
            eprintln!("{test} has not ended within {LIMIT:?}; it waits for: {last}");
            processes.into_iter().for_each(kill);
            std::process::exit(1);
        });
        Self(sender)
    }

    /// Adds a process that is ended with the test.
    pub(super) fn watch(&self, process: u64) {
        // The receiver ends with the process.
        let _ = self.0.send(process);
    }
}
