//! [`Environment`]: the streams, variables, terminal and signals that a command line uses.

use std::fmt;
use std::io::{self, BufRead, IsTerminal as _, Write};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;

use futures_util::future::{Either, select};
use parking_lot::Mutex;
use tinkex::{Env, ServiceClientBuilder};
use tokio::sync::{oneshot, watch};

use crate::error::CommandError;

/// Streams, variables, terminal and signals that a command line uses.
///
/// `main.rs` supplies the streams, variables and signals of the process. A test supplies its own and
/// inspects the output.
pub struct Environment {
    /// Environment variables. The crate reads them nowhere else, except for shell completion.
    pub variables: Env,
    /// Working directory, the base of relative paths.
    pub folder: PathBuf,
    /// Standard output, for results.
    pub out: Box<dyn Write + Send>,
    /// Standard error, for prompts, notices, progress and errors.
    pub err: Box<dyn Write + Send>,
    /// Standard input, for answers to prompts and for arguments given as `-`.
    pub input: Input,
    /// Which streams are terminals, and how wide they are.
    pub terminals: Terminals,
    /// Interruptions by the user.
    pub interrupt: Interrupt,
    /// Threads whose events are logged to standard error.
    pub log_scope: LogScope,
    /// Hook that changes every client builder; a test sets its own HTTP service here.
    pub prepare: Box<dyn Fn(ServiceClientBuilder) -> ServiceClientBuilder + Send>,
}

impl Environment {
    /// Resolves a path relative to the working directory.
    pub(crate) fn path(&self, path: &Path) -> PathBuf {
        self.folder.join(path)
    }
}

impl fmt::Debug for Environment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Environment")
            .field("variables", &self.variables)
            .field("terminals", &self.terminals)
            .finish_non_exhaustive()
    }
}

/// Threads whose events are logged to standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogScope {
    /// The thread that runs the command. Other commands may run in the same process.
    ThisThread,
    /// All threads. Only the first such command of a process takes effect.
    AllThreads,
}

/// Which streams are terminals, and how wide they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terminals {
    /// Columns of standard output; `None` if it is not a terminal.
    pub out: Option<usize>,
    /// Columns of standard error; `None` if it is not a terminal.
    pub err: Option<usize>,
    /// Whether standard input is a terminal, so that prompts can be answered.
    pub input: bool,
}

/// Input stream that is read on a separate thread, because a read may block indefinitely.
#[derive(Clone)]
pub struct Input {
    stream: Arc<Mutex<Box<dyn BufRead + Send>>>,
    edits: bool,
    disable_echo: Option<DisableEcho>,
}

/// Disables echo and line buffering of the terminal until the returned guard is dropped.
type DisableEcho = fn() -> io::Result<Box<dyn Send>>;

impl fmt::Debug for Input {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Input").finish_non_exhaustive()
    }
}

impl Input {
    /// Creates an input from a stream.
    pub fn new(stream: impl BufRead + Send + 'static) -> Self {
        Self { stream: Arc::new(Mutex::new(Box::new(stream))), edits: false, disable_echo: None }
    }

    /// Returns the process's standard input. Lines can be edited if it is a terminal.
    #[must_use]
    pub fn of_process() -> Self {
        let edits = io::stdin().is_terminal();
        let input = Self::new(io::BufReader::new(io::stdin()));
        #[cfg(unix)]
        let disable_echo: Option<DisableEcho> = edits.then_some(disable_echo);
        #[cfg(not(unix))]
        let disable_echo = None;
        Self { edits, disable_echo, ..input }
    }

    /// Returns whether lines can be edited while they are typed.
    #[must_use]
    pub fn edits(&self) -> bool {
        self.edits
    }

    /// Reads the next line without its line ending; `None` at the end of the stream.
    ///
    /// The reading thread is detached, so that a program interrupted at a prompt can exit.
    ///
    /// # Errors
    ///
    /// Returns an error if the stream cannot be read or is not UTF-8.
    pub async fn line(&self) -> io::Result<Option<String>> {
        self.read(|stream| {
            let mut line = String::new();
            let length = stream.read_line(&mut line)?;
            let end = line.trim_end_matches(['\n', '\r']).len();
            line.truncate(end);
            Ok((length > 0).then_some(line))
        })
        .await
    }

    /// Reads the remaining text.
    ///
    /// # Errors
    ///
    /// Returns an error if the stream cannot be read or is not UTF-8.
    pub async fn rest(&self) -> io::Result<String> {
        self.read(|stream| {
            let mut text = String::new();
            stream.read_to_string(&mut text)?;
            Ok(text)
        })
        .await
    }

    /// Copies the remaining bytes to `file`.
    ///
    /// # Errors
    ///
    /// Returns an error if the stream cannot be read or the file cannot be written.
    pub async fn copy_to(&self, mut file: std::fs::File) -> io::Result<u64> {
        self.read(move |stream| io::copy(stream, &mut file)).await
    }

    /// Prompts for a secret and echoes a star for each character through `echo`.
    ///
    /// If the stream is not a terminal, an ordinary line is read. Returns `None` at the end of the
    /// stream and if the user presses Ctrl-D.
    ///
    /// # Errors
    ///
    /// Returns an error if the stream cannot be read, or [`io::ErrorKind::Interrupted`] if the user
    /// presses Ctrl-C.
    pub async fn secret(
        &self,
        prompt: &str,
        mut echo: impl FnMut(&str) + Send + 'static,
    ) -> io::Result<Option<String>> {
        let Some(disable_echo) = self.disable_echo else {
            echo(prompt);
            return self.line().await;
        };
        // The guard is held here, not by the reading thread, which may never return.
        let _restore = disable_echo()?;
        echo(prompt);
        self.read(move |stream| read_secret(stream, echo)).await
    }

    async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&mut dyn BufRead) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let (sender, receiver) = oneshot::channel();
        let stream = Arc::clone(&self.stream);
        std::thread::spawn(move || {
            let mut stream = stream.lock();
            // The caller may have been cancelled.
            let _ = sender.send(read(&mut **stream));
        });
        receiver.await.unwrap_or_else(|_| Err(io::Error::other("the reading thread panicked")))
    }
}

/// Disables echo, line buffering and signal keys of standard input until the guard is dropped.
#[cfg(unix)]
fn disable_echo() -> io::Result<Box<dyn Send>> {
    use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};

    struct RestoreMode(Termios);

    impl Drop for RestoreMode {
        fn drop(&mut self) {
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.0);
        }
    }

    let before = tcgetattr(io::stdin())?;
    let mut mode = before.clone();
    mode.local_modes -= LocalModes::ECHO | LocalModes::ICANON | LocalModes::ISIG;
    tcsetattr(io::stdin(), OptionalActions::Now, &mode)?;
    Ok(Box::new(RestoreMode(before)))
}

/// Reads a line from a terminal without line buffering, handling the editing keys itself.
fn read_secret(stream: &mut dyn BufRead, mut echo: impl FnMut(&str)) -> io::Result<Option<String>> {
    let mut line = Vec::new();
    loop {
        let mut key = [0];
        if stream.read(&mut key)? == 0 {
            return Ok(None);
        }
        match key[0] {
            // Ctrl-C: signal keys are disabled while the terminal does not echo.
            3 => return Err(io::ErrorKind::Interrupted.into()),
            // Ctrl-D.
            4 if line.is_empty() => return Ok(None),
            b'\r' | b'\n' | 4 => break,
            8 | 127 => {
                if line.pop().is_some() {
                    echo("\u{8} \u{8}");
                }
            }
            // Ctrl-U.
            21 => {
                echo(&"\u{8} \u{8}".repeat(line.len()));
                line.clear();
            }
            0..32 => {}
            letter => {
                line.push(letter);
                echo("*");
            }
        }
    }
    String::from_utf8(line)
        .map(Some)
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "the input is not UTF-8"))
}

/// Interruptions by the user: Ctrl-C and SIGTERM. Clones share the state.
#[derive(Clone, Debug)]
pub struct Interrupt(Arc<watch::Sender<Interruptions>>);

#[derive(Clone, Copy, Debug, Default)]
struct Interruptions {
    /// Number of interruptions of both kinds.
    count: u32,
    /// Whether SIGTERM was received.
    terminated: bool,
}

impl Default for Interrupt {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(Interruptions::default())))
    }
}

impl Interrupt {
    /// Counts one interruption.
    pub fn press(&self) {
        self.0.send_modify(|state| state.count += 1);
    }

    /// Counts one interruption after which the program must end, also where Ctrl-C stops only a
    /// part of it.
    pub fn terminate(&self) {
        self.0.send_modify(|state| {
            state.count += 1;
            state.terminated = true;
        });
    }

    /// Returns the number of interruptions so far.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.0.borrow().count
    }

    /// Returns whether the program must end.
    pub(crate) fn is_terminated(&self) -> bool {
        self.0.borrow().terminated
    }

    /// Waits until the number of interruptions is at least `times`.
    pub async fn pressed(&self, times: u32) {
        // `self` holds the sender, so the channel cannot close.
        let _ = self.0.subscribe().wait_for(|state| state.count >= times).await;
    }

    /// Waits for `work`, or returns `None` once the number of interruptions reaches `times`.
    pub(crate) async fn race<T>(&self, times: u32, work: impl Future<Output = T>) -> Option<T> {
        match select(pin!(work), pin!(self.pressed(times))).await {
            Either::Left((result, _)) => Some(result),
            Either::Right(_) => None,
        }
    }

    /// Runs `work`, cancelling it when the number of interruptions reaches `times`.
    pub(crate) async fn run_until<T>(
        &self,
        times: u32,
        work: impl Future<Output = Result<T, CommandError>>,
    ) -> Result<T, CommandError> {
        // Not with `race`: the future of each call would be twice as large.
        match select(pin!(work), pin!(self.pressed(times))).await {
            Either::Left((result, _)) => result,
            Either::Right(_) => Err(CommandError::interrupted()),
        }
    }

    /// Runs `work`, cancelling it when the program must end.
    pub(crate) async fn run_until_terminated<T>(
        &self,
        work: impl Future<Output = Result<T, CommandError>>,
    ) -> Result<T, CommandError> {
        let mut states = self.0.subscribe();
        match select(pin!(work), pin!(states.wait_for(|state| state.terminated))).await {
            Either::Left((result, _)) => result,
            Either::Right(_) => Err(CommandError::interrupted()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_read_key_by_key_and_echoed_as_stars() {
        for (keys, line, shown) in [
            (&b"tml-1\r"[..], Some("tml-1"), "*****"),
            (b"ab\x7fc\n", Some("ac"), "**\u{8} \u{8}*"),
            (b"ab\x15\x01c\n", Some("c"), "**\u{8} \u{8}\u{8} \u{8}*"),
            (b"\x04", None, ""),
            (b"", None, ""),
            (b"a\x04", Some("a"), "*"),
        ] {
            let mut echoed = String::new();
            let read = read_secret(&mut &keys[..], |text| echoed.push_str(text)).unwrap();
            assert_eq!((read.as_deref(), echoed.as_str()), (line, shown));
        }
        let interrupted = read_secret(&mut &b"ab\x03"[..], |_| ()).unwrap_err();
        assert_eq!(interrupted.kind(), io::ErrorKind::Interrupted);
    }
}
