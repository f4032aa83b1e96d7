//! The real program in a real terminal.

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

/// A program that shows nothing for so long never will; a test that gets so far has failed.
const PATIENCE: Duration = Duration::from_secs(120);

/// A program in a terminal.
pub(crate) struct Terminal {
    child: Child,
    keys: Arc<Pty>,
    news: Receiver<Vec<u8>>,
    /// Everything that was shown so far.
    shown: String,
    /// How much of it was waited for.
    past: usize,
}

impl Terminal {
    /// Starts the program in a terminal of this width, with these variables and no others.
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
        let (tell, news) = channel();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            // It cannot be read any more once the program is gone.
            while let Ok(count @ 1..) = (&*screen).read(&mut bytes) {
                if tell.send(bytes[..count].to_vec()).is_err() {
                    break;
                }
            }
        });
        Self { child, keys, news, shown: String::new(), past: 0 }
    }

    /// The same at home, in a terminal that knows all escapes.
    pub(crate) fn at(home: &Sandbox, width: u16, line: &str) -> Self {
        let words: Vec<&str> = line.split_whitespace().collect();
        let term = ("TERM", "xterm-256color".to_owned());
        Self::start(&words, home.variables().into_iter().chain([term]), &home.path(""), width)
    }

    /// Types.
    pub(crate) fn press(&mut self, keys: &str) {
        (&*self.keys).write_all(keys.as_bytes()).unwrap();
    }

    /// Waits until this is shown, after what was waited for before.
    #[track_caller]
    pub(crate) fn wait_for(&mut self, text: &str) {
        loop {
            if let Some(at) = self.shown[self.past..].find(text) {
                self.past += at + text.len();
                return;
            }
            assert!(self.more(), "{text:?} did not come: {}", self.shown);
        }
    }

    /// Asks the program to end, as a system does.
    pub(crate) fn terminate(&self) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
    }

    /// Waits until it ends, and gives its exit code and all that was shown.
    #[track_caller]
    pub(crate) fn end(mut self) -> (i32, String) {
        while self.more() {}
        (self.child.wait().unwrap().code().unwrap(), std::mem::take(&mut self.shown))
    }

    /// Whether something more was shown before the end.
    #[track_caller]
    fn more(&mut self) -> bool {
        match self.news.recv_timeout(PATIENCE) {
            Ok(bytes) => {
                self.shown += &String::from_utf8_lossy(&bytes);
                true
            }
            Err(RecvTimeoutError::Disconnected) => false,
            Err(RecvTimeoutError::Timeout) => panic!("nothing more after {}", self.shown),
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // It has ended, unless the test failed.
        let _ = self.child.kill();
    }
}

/// What stands on the screen in the end: carriage returns, backspaces and erased lines done.
pub(crate) fn screen(shown: &str) -> String {
    let mut lines = Vec::new();
    for line in shown.split('\n') {
        let (mut cells, mut at) = (Vec::new(), 0_usize);
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
