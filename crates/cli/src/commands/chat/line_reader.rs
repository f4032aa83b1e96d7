//! [`LineReader`]: what the user types, with editing and a history where somebody types.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use tokio::sync::oneshot;

use crate::environment::Input;
use crate::error::{CommandError, Exit};

/// What the user types.
pub(super) enum LineReader {
    /// From a terminal.
    Edited { editor: Arc<Mutex<DefaultEditor>>, history: Option<PathBuf> },
    /// From anything else.
    Plain(Input),
}

/// What came.
pub(super) enum InputLine {
    Text(String),
    /// Ctrl-C at an empty line, or in the middle of one.
    Cancelled,
    End,
}

impl LineReader {
    pub(super) fn new(input: &Input, history: Option<PathBuf>) -> Self {
        if !input.edits() {
            return Self::Plain(input.clone());
        }
        let Ok(mut editor) = DefaultEditor::new() else { return Self::Plain(input.clone()) };
        if let Some(path) = &history {
            // None yet, the first time.
            let _ = editor.load_history(path);
        }
        Self::Edited { editor: Arc::new(Mutex::new(editor)), history }
    }

    /// The next line.
    pub(super) async fn next(&self, prompt: &'static str) -> Result<InputLine, CommandError> {
        let (editor, history) = match self {
            Self::Plain(input) => {
                let line = input.line().await.map_err(|why| not_read(&why.to_string()))?;
                return Ok(line.map_or(InputLine::End, InputLine::Text));
            }
            Self::Edited { editor, history } => (Arc::clone(editor), history.clone()),
        };
        let _mode = SavedTerminalMode::now();
        let (tell, told) = oneshot::channel();
        // On a thread of its own: a terminal may take for ever to say something.
        std::thread::spawn(move || {
            let mut editor = editor.lock().unwrap_or_else(PoisonError::into_inner);
            let line = editor.readline(prompt);
            if let Ok(text) = &line
                && !text.trim().is_empty()
            {
                let _ = editor.add_history_entry(text.as_str());
                if let Some(path) = history {
                    // A history that cannot be kept is no reason to stop.
                    let _ = editor.save_history(&path);
                }
            }
            let _ = tell.send(line);
        });
        match told.await {
            Ok(Ok(text)) => Ok(InputLine::Text(text)),
            Ok(Err(ReadlineError::Interrupted)) => Ok(InputLine::Cancelled),
            Ok(Err(ReadlineError::Eof)) | Err(_) => Ok(InputLine::End),
            Ok(Err(why)) => Err(not_read(&why.to_string())),
        }
    }
}

/// The terminal as it is now, and again once this is dropped: an editor that is left behind in the
/// middle of a line does not put it back itself.
#[cfg(unix)]
struct SavedTerminalMode(Option<rustix::termios::Termios>);

#[cfg(unix)]
impl SavedTerminalMode {
    fn now() -> Self {
        Self(rustix::termios::tcgetattr(std::io::stdin()).ok())
    }
}

#[cfg(unix)]
impl Drop for SavedTerminalMode {
    fn drop(&mut self) {
        use rustix::termios::{OptionalActions, tcsetattr};
        if let Some(mode) = &self.0 {
            let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, mode);
        }
    }
}

#[cfg(not(unix))]
struct SavedTerminalMode;

#[cfg(not(unix))]
impl SavedTerminalMode {
    fn now() -> Self {
        Self
    }
}

fn not_read(why: &str) -> CommandError {
    CommandError::new(Exit::Failed, format!("standard input cannot be read: {why}"))
}
