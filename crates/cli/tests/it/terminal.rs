//! [`Terminal`]: the program as a child process in a pseudo-terminal.

use std::ffi::OsStr;
use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::Child;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use pty_process::Size;
use pty_process::blocking::{Command, Pty, open};
use rustix::process::{Pid, Signal, kill_process};

use crate::sandbox::Sandbox;

/// Maximum time without output. A test that reaches it has failed.
const OUTPUT_TIMEOUT: Duration = Duration::from_secs(120);

/// Program in a pseudo-terminal. Dropping it kills the process.
pub(crate) struct Terminal {
    child: Child,
    keys: Arc<Pty>,
    output: Receiver<Vec<u8>>,
    /// All output so far.
    shown: String,
    /// End of the text that [`wait_for`](Self::wait_for) found last.
    position: usize,
}

impl Terminal {
    /// Starts the program in a terminal of `width` columns, with only the variables of `env`.
    pub(crate) fn start(
        line: &[&str],
        env: impl IntoIterator<Item = (&'static str, impl AsRef<OsStr>)>,
        folder: &Path,
        width: u16,
    ) -> Self {
        let (pty, inner) = open().unwrap();
        pty.resize(Size::new(40, width)).unwrap();
        let command = Command::new(env!("CARGO_BIN_EXE_tinkex")).args(line).current_dir(folder);
        let child = command.env_clear().envs(env).spawn(inner).unwrap();
        let keys = Arc::new(pty);
        let screen = Arc::clone(&keys);
        let (sender, output) = channel();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            // Reading fails once the program has ended.
            while let Ok(count @ 1..) = (&*screen).read(&mut bytes) {
                if sender.send(bytes[..count].to_vec()).is_err() {
                    break;
                }
            }
        });
        Self { child, keys, output, shown: String::new(), position: 0 }
    }

    /// Starts the program in a sandbox, with `TERM=xterm-256color`.
    pub(crate) fn start_in(sandbox: &Sandbox, width: u16, line: &str) -> Self {
        let args: Vec<&str> = line.split_whitespace().collect();
        let term = ("TERM", "xterm-256color".to_owned());
        Self::start(&args, sandbox.variables().into_iter().chain([term]), &sandbox.path(""), width)
    }

    /// Sends key presses to the program.
    pub(crate) fn press(&mut self, keys: &str) {
        (&*self.keys).write_all(keys.as_bytes()).unwrap();
    }

    /// Waits until `text` appears after the text that was found last.
    #[track_caller]
    pub(crate) fn wait_for(&mut self, text: &str) {
        loop {
            if let Some(at) = self.shown[self.position..].find(text) {
                self.position += at + text.len();
                return;
            }
            assert!(self.read_more(), "{text:?} was not printed: {}", self.shown);
        }
    }

    /// Waits until a letter or digit appears after the text that was found last.
    #[track_caller]
    pub(crate) fn wait_for_text(&mut self) {
        let has_text = |shown: &str| {
            crate::compare::without_escapes(shown).contains(|c: char| c.is_ascii_alphanumeric())
        };
        while !has_text(&self.shown[self.position..]) {
            assert!(self.read_more(), "no text was printed: {}", self.shown);
        }
    }

    /// Sends SIGINT.
    pub(crate) fn interrupt(&self) {
        kill_process(Pid::from_child(&self.child), Signal::INT).unwrap();
    }

    /// Sends SIGTERM.
    pub(crate) fn terminate(&self) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
    }

    /// Waits until the program ends, and returns its exit code and all output.
    #[track_caller]
    pub(crate) fn end(mut self) -> (i32, String) {
        while self.read_more() {}
        (self.child.wait().unwrap().code().unwrap(), std::mem::take(&mut self.shown))
    }

    /// Waits for output and returns whether there was any before the program ended.
    #[track_caller]
    fn read_more(&mut self) -> bool {
        match self.output.recv_timeout(OUTPUT_TIMEOUT) {
            Ok(bytes) => {
                self.shown += &String::from_utf8_lossy(&bytes);
                true
            }
            Err(RecvTimeoutError::Disconnected) => false,
            Err(RecvTimeoutError::Timeout) => panic!("no output for 120 s after {}", self.shown),
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // The process has already ended, unless the test failed or gave it up.
        let _ = self.child.kill();
    }
}

/// Returns the final content of the screen, with carriage returns, backspaces and erase sequences
/// applied.
pub(crate) fn screen(shown: &str) -> String {
    let mut lines = Vec::new();
    for line in shown.split('\n') {
        let mut cells = Vec::new();
        let mut at = 0_usize;
        let plain = line.replace("\u{1b}[K", "\u{0}");
        for letter in crate::compare::without_escapes(&plain).chars() {
            match letter {
                '\r' => at = 0,
                '\u{8}' => at = at.saturating_sub(1),
                '\u{0}' => cells.truncate(at),
                letter => {
                    cells.truncate(cells.len().max(at));
                    if at < cells.len() {
                        cells[at] = letter;
                    } else {
                        cells.push(letter);
                    }
                    at += 1;
                }
            }
        }
        lines.push(cells.into_iter().collect::<String>());
    }
    lines.join("\n")
}
