//! [`Environment`]: everything a command line touches outside itself.

use std::fmt;
use std::io::{self, BufRead, IsTerminal as _, Write};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::future::{Either, select};
use tinkex::{Env, ServiceClientBuilder};
use tokio::sync::{oneshot, watch};

use crate::error::CommandError;

/// Everything a command line touches outside itself.
///
/// The program brings its own streams and environment; a test brings others, and looks at what was
/// written afterwards.
pub struct Environment {
    /// The environment. It is read nowhere else.
    pub variables: Env,
    /// The folder that relative paths start from.
    pub folder: PathBuf,
    /// Where results go.
    pub out: Box<dyn Write + Send>,
    /// Where questions, notices, progress and errors go.
    pub err: Box<dyn Write + Send>,
    /// Where answers to questions, and input given as `-`, come from.
    pub input: Input,
    /// Which of the streams are terminals.
    pub terminals: Terminals,
    /// Tells when the user wants it to stop.
    pub interrupt: Interrupt,
    /// Whose events are told on standard error.
    pub log_scope: LogScope,
    /// Changes every client before it is built: a test puts its own server in here.
    pub prepare: Box<dyn Fn(ServiceClientBuilder) -> ServiceClientBuilder + Send>,
}

impl Environment {
    /// A path as the user means it.
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

/// Whose events are told on standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogScope {
    /// Those of the thread that runs the command: beside it others may run.
    ThisThread,
    /// Those of every thread. The first command of a process that wants it gets it.
    AllThreads,
}

/// Which of the streams are terminals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terminals {
    /// How wide the terminal is that results go to; `None` if they go elsewhere.
    pub out: Option<usize>,
    /// The same for progress and questions.
    pub err: Option<usize>,
    /// Whether somebody sits there to answer questions.
    pub input: bool,
}

/// Lines from a stream that may block for as long as it likes.
#[derive(Clone)]
pub struct Input {
    stream: Arc<Mutex<Box<dyn BufRead + Send>>>,
    edits: bool,
    hide: Option<Hide>,
}

/// Makes the terminal show nothing of what is typed and hand it over at once, until the value it
/// gives is dropped.
type Hide = fn() -> io::Result<Box<dyn Send>>;

impl fmt::Debug for Input {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Input").finish_non_exhaustive()
    }
}

impl Input {
    /// Lines of this stream.
    pub fn new(stream: impl BufRead + Send + 'static) -> Self {
        Self { stream: Arc::new(Mutex::new(Box::new(stream))), edits: false, hide: None }
    }

    /// Standard input, where lines can be edited if it is a terminal.
    #[must_use]
    pub fn of_process() -> Self {
        let (edits, input) =
            (io::stdin().is_terminal(), Self::new(io::BufReader::new(io::stdin())));
        #[cfg(unix)]
        let hide: Option<Hide> = edits.then_some(hide);
        #[cfg(not(unix))]
        let hide = None;
        Self { edits, hide, ..input }
    }

    /// Whether lines can be edited as they are typed.
    #[must_use]
    pub fn edits(&self) -> bool {
        self.edits
    }

    /// The next line without its end; `None` when there are no more.
    ///
    /// It is read on a thread of its own, which nobody waits for: a program that is interrupted at
    /// a question must be able to end.
    ///
    /// # Errors
    ///
    /// If the stream cannot be read, or is no text.
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

    /// Everything that is left.
    ///
    /// # Errors
    ///
    /// If the stream cannot be read, or is no text.
    pub async fn rest(&self) -> io::Result<String> {
        self.read(|stream| {
            let mut text = String::new();
            stream.read_to_string(&mut text)?;
            Ok(text)
        })
        .await
    }

    /// The answer to a question, shown by `echo` as so many stars. Elsewhere than on a terminal a line as any
    /// other. `None` at the end, and where the user gives up with Ctrl-D.
    ///
    /// # Errors
    ///
    /// If the stream cannot be read, or the user pressed Ctrl-C ([`io::ErrorKind::Interrupted`]).
    pub async fn secret(
        &self,
        question: &str,
        mut echo: impl FnMut(&str) + Send + 'static,
    ) -> io::Result<Option<String>> {
        let Some(hide) = self.hide else {
            echo(question);
            return self.line().await;
        };
        // Held here, not by the thread that may wait for ever: it has to go when this is dropped.
        let _hidden = hide()?;
        echo(question);
        self.read(move |stream| typed(stream, echo)).await
    }

    async fn read<T: Send + 'static>(
        &self,
        how: impl FnOnce(&mut dyn BufRead) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let (tell, told) = oneshot::channel();
        let stream = Arc::clone(&self.stream);
        std::thread::spawn(move || {
            let mut stream = stream.lock().unwrap_or_else(PoisonError::into_inner);
            // Whoever asked may have gone.
            let _ = tell.send(how(&mut **stream));
        });
        told.await.unwrap_or_else(|_| Err(io::Error::other("the input could not be read")))
    }
}

/// Hides what is typed, until the guard is dropped.
#[cfg(unix)]
fn hide() -> io::Result<Box<dyn Send>> {
    use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};

    struct Before(Termios);

    impl Drop for Before {
        fn drop(&mut self) {
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.0);
        }
    }

    let before = tcgetattr(io::stdin())?;
    let mut hidden = before.clone();
    hidden.local_modes -= LocalModes::ECHO | LocalModes::ICANON | LocalModes::ISIG;
    tcsetattr(io::stdin(), OptionalActions::Now, &hidden)?;
    Ok(Box::new(Before(before)))
}

/// Reads a line that the terminal hands over key by key.
fn typed(stream: &mut dyn BufRead, mut echo: impl FnMut(&str)) -> io::Result<Option<String>> {
    let mut line = Vec::new();
    loop {
        let mut key = [0];
        if stream.read(&mut key)? == 0 {
            return Ok(None);
        }
        match key[0] {
            // Ctrl-C, which a hidden terminal does not make a signal of.
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
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "what was typed is no text"))
}

/// Tells when the user wants it to stop: Ctrl-C, once or more often.
#[derive(Clone, Debug)]
pub struct Interrupt(Arc<watch::Sender<u32>>);

impl Default for Interrupt {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(0)))
    }
}

impl Interrupt {
    /// The user pressed Ctrl-C.
    pub fn press(&self) {
        self.0.send_modify(|count| *count += 1);
    }

    /// How often that happened.
    #[must_use]
    pub fn count(&self) -> u32 {
        *self.0.borrow()
    }

    /// Waits until it has happened at least this often.
    pub async fn pressed(&self, times: u32) {
        // It holds a sender itself, so the channel cannot close.
        let _ = self.0.subscribe().wait_for(|count| *count >= times).await;
    }

    /// Does something, unless it is pressed so often before it is done.
    pub(crate) async fn stops<T>(
        &self,
        times: u32,
        work: impl Future<Output = Result<T, CommandError>>,
    ) -> Result<T, CommandError> {
        match select(pin!(work), pin!(self.pressed(times))).await {
            Either::Left((done, _)) => done,
            Either::Right(_) => Err(CommandError::interrupted()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_become_a_line_and_stars() {
        for (keys, line, shown) in [
            (&b"tml-1\r"[..], Some("tml-1"), "*****"),
            (b"ab\x7fc\n", Some("ac"), "**\u{8} \u{8}*"),
            (b"ab\x15\x01c\n", Some("c"), "**\u{8} \u{8}\u{8} \u{8}*"),
            (b"\x04", None, ""),
            (b"", None, ""),
            (b"a\x04", Some("a"), "*"),
        ] {
            let mut echoed = String::new();
            let read = typed(&mut &keys[..], |text| echoed.push_str(text)).unwrap();
            assert_eq!((read.as_deref(), echoed.as_str()), (line, shown));
        }
        let stopped = typed(&mut &b"ab\x03"[..], |_| ()).unwrap_err();
        assert_eq!(stopped.kind(), io::ErrorKind::Interrupted);
    }
}
