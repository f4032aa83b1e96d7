//! [`World`]: everything a command line touches outside itself.

use std::fmt;
use std::io::{self, BufRead, IsTerminal as _, Write};
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::future::{Either, select};
use tinkex::{Env, ServiceClientBuilder};
use tokio::sync::{oneshot, watch};

use crate::failure::Failure;

/// Everything a command line touches outside itself.
///
/// The program brings its own streams and environment; a test brings others, and looks at what was
/// written afterwards.
pub struct World {
    /// The environment. It is read nowhere else.
    pub env: Env,
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
    /// Changes every client before it is built: a test puts its own server in here.
    pub prepare: Box<dyn Fn(ServiceClientBuilder) -> ServiceClientBuilder + Send>,
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World")
            .field("env", &self.env)
            .field("terminals", &self.terminals)
            .finish_non_exhaustive()
    }
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
}

impl fmt::Debug for Input {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Input").finish_non_exhaustive()
    }
}

impl Input {
    /// Lines of this stream.
    pub fn new(stream: impl BufRead + Send + 'static) -> Self {
        Self { stream: Arc::new(Mutex::new(Box::new(stream))), edits: false }
    }

    /// Standard input, where lines can be edited if it is a terminal.
    #[must_use]
    pub fn of_process() -> Self {
        let stdin = io::stdin();
        Self { edits: stdin.is_terminal(), ..Self::new(io::BufReader::new(stdin)) }
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
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        match select(pin!(work), pin!(self.pressed(times))).await {
            Either::Left((done, _)) => done,
            Either::Right(_) => Err(Failure::interrupted()),
        }
    }
}
