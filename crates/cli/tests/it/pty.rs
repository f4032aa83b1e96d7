//! The program itself in a real terminal.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use pty_process::Size;
use pty_process::blocking::{Command, Pty, open};
use rustix::process::{Pid, Signal, kill_process};

use crate::home::Home;

/// A program that shows nothing for so long never will.
const PATIENCE: Duration = Duration::from_secs(60);

/// The program, in a terminal of its own.
pub(crate) struct Terminal {
    write: OwnedPty,
    shown: Receiver<Vec<u8>>,
    child: std::process::Child,
    /// Everything that was shown so far.
    pub(crate) seen: String,
    /// How much of it was waited for.
    past: usize,
}

type OwnedPty = Arc<Pty>;

impl Terminal {
    /// Runs a command line in a terminal that is so many columns wide.
    pub(crate) fn run(home: &Home, columns: u16, line: &str) -> Self {
        let (pty, pts) = open().unwrap();
        pty.resize(Size::new(24, columns)).unwrap();
        let command = Command::new(env!("CARGO_BIN_EXE_tinkex"))
            .args(line.split_whitespace())
            .current_dir(home.path(""))
            .env_clear()
            .envs(home.variables())
            .env("TERM", "xterm-256color");
        let child = command.spawn(pts).unwrap();
        let write = Arc::new(pty);
        let (tell, shown) = channel();
        let read = Arc::clone(&write);
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            // When the program has ended there is no terminal any more.
            while let Ok(length @ 1..) = (&*read).read(&mut buffer) {
                if tell.send(buffer[..length].to_vec()).is_err() {
                    return;
                }
            }
        });
        Self { write, shown, child, seen: String::new(), past: 0 }
    }

    /// Waits until the terminal shows this, after what was waited for before.
    #[track_caller]
    pub(crate) fn until(&mut self, text: &str) {
        loop {
            if let Some(at) = self.seen[self.past..].find(text) {
                self.past += at + text.len();
                return;
            }
            assert!(self.more(), "no {text:?} in {}", self.seen);
        }
    }

    /// Types something.
    pub(crate) fn kind(&mut self, text: &str) {
        (&*self.write).write_all(text.as_bytes()).unwrap();
    }

    /// Asks the program to end, as a system does.
    fn terminate(&self) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
    }

    /// Waits for the end.
    pub(crate) fn end(mut self) -> (i32, String) {
        while self.more() {}
        (self.child.wait().unwrap().code().unwrap(), std::mem::take(&mut self.seen))
    }

    fn more(&mut self) -> bool {
        match self.shown.recv_timeout(PATIENCE) {
            Ok(bytes) => {
                self.seen += &String::from_utf8_lossy(&bytes);
                true
            }
            Err(RecvTimeoutError::Disconnected) => false,
            Err(RecvTimeoutError::Timeout) => panic!("nothing more after {}", self.seen),
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // It has ended, unless the test failed.
        let _ = self.child.kill();
    }
}

fn home() -> Home {
    let home = Home::new();
    let line = |at| format!("{{\"prompt\": \"{at} and\", \"completion\": \" so on\"}}\n");
    home.write("talks.jsonl", &(0..8).map(line).collect::<String>());
    home
}

#[test]
fn training_shows_how_far_it_is_and_stops_when_asked() {
    let home = home();
    let mut terminal =
        Terminal::run(&home, 80, "train talks.jsonl --local --steps 100000 --batch-size 4");
    terminal.until("tokens/s");
    terminal.kind("\u{3}");
    terminal.until("stopping: saving first");
    let (code, seen) = terminal.end();
    assert_eq!(code, 130, "{seen}");
    assert!(seen.contains("tokens/s") && seen.contains(" left"), "{seen}");
    assert!(seen.contains("stopped at step") && seen.contains("--resume"), "{seen}");
    assert!(home.path("talks-run/loss.svg").exists());
}

#[test]
fn a_narrow_window_has_no_broken_lines() {
    let home = home();
    let terminal = Terminal::run(&home, 24, "train talks.jsonl --local --steps 3 --batch-size 4");
    let (code, seen) = terminal.end();
    assert_eq!(code, 0, "{seen}");
    let drawn = seen.split('\r').filter(|part| part.contains("step ") && part.contains("\u{1b}[K"));
    for part in drawn {
        let shown = part.split('\u{1b}').next().unwrap();
        assert!(shown.chars().count() < 24, "{shown:?}");
    }
}

#[test]
fn ctrl_c_stops_an_answer_and_not_the_conversation() {
    let home = home();
    // So daring that it hardly ever finds the end of its answer.
    let line = "chat --local --max-tokens 1900 -t 5";
    let mut terminal = Terminal::run(&home, 80, line);
    terminal.until("> ");
    terminal.kind("Tell me a story.\r");
    terminal.until("story.");
    terminal.until("\n");
    terminal.kind("\u{3}");
    terminal.until("(stopped)");
    terminal.until("> ");
    terminal.kind("/quit\r");
    let (code, seen) = terminal.end();
    assert_eq!(code, 0, "{seen}");
}

#[test]
fn a_signal_ends_a_conversation_in_a_terminal() {
    let home = home();
    let mut terminal = Terminal::run(&home, 80, "chat --local");
    terminal.until("> ");
    terminal.terminate();
    let (code, seen) = terminal.end();
    assert_eq!(code, 130, "{seen}");
}

#[test]
fn a_signal_ends_a_conversation_through_a_pipe() {
    let home = home();
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_tinkex"))
        .args(["chat", "--local", "-t", "0"])
        .current_dir(home.path(""))
        .env_clear()
        .envs(home.variables())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // It stays open to the end.
    let mut input = child.stdin.take().unwrap();
    input.write_all(b"What does a cow say?\n").unwrap();
    let mut said = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut said).unwrap();
    assert_eq!(said, "A cow says \"moo\".\n");
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
}
