//! The real program in a real pseudo-terminal.

use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::Child;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use pty_process::Size;
use pty_process::blocking::{Command, Pty, open};

/// Longer than anything takes here; a test that gets so far has failed.
const TOO_LONG: Duration = Duration::from_secs(120);

/// A program in a terminal.
pub(crate) struct Terminal {
    child: Child,
    keys: Arc<Pty>,
    news: Receiver<Vec<u8>>,
    /// Everything that was shown.
    pub(crate) shown: String,
}

impl Terminal {
    /// Starts the program in a terminal of this width, with these variables and no others.
    pub(crate) fn start(line: &[&str], env: &[(&str, &str)], folder: &Path, width: u16) -> Self {
        let (pty, inner) = open().unwrap();
        pty.resize(Size::new(40, width)).unwrap();
        let command = Command::new(env!("CARGO_BIN_EXE_tinkex")).args(line).current_dir(folder);
        let child = command.env_clear().envs(env.iter().copied()).spawn(inner).unwrap();
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
        Self { child, keys, news, shown: String::new() }
    }

    /// Types.
    pub(crate) fn press(&mut self, keys: &str) {
        (&*self.keys).write_all(keys.as_bytes()).unwrap();
    }

    /// Waits until this is shown.
    pub(crate) fn wait_for(&mut self, text: &str) {
        while !self.shown.contains(text) {
            match self.news.recv_timeout(TOO_LONG) {
                Ok(bytes) => self.shown += &String::from_utf8_lossy(&bytes),
                Err(_) => panic!("{text:?} did not come: {}", self.shown),
            }
        }
    }

    /// Waits until it ends, and gives its exit code and all that was shown.
    pub(crate) fn end(mut self) -> (i32, String) {
        let code = self.child.wait().unwrap().code().unwrap();
        while let Ok(bytes) = self.news.recv_timeout(TOO_LONG) {
            self.shown += &String::from_utf8_lossy(&bytes);
        }
        (code, self.shown)
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
