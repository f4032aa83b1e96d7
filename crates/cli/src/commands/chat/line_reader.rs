//! [`LineReader`]: input lines of a chat, with editing and history on a terminal.

use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use tokio::sync::oneshot;

use crate::environment::{Input, Interrupt};
use crate::error::{CommandError, Exit};

/// Source of input lines.
pub(super) enum LineReader {
    /// Terminal with line editing.
    Edited { editor: Arc<Mutex<DefaultEditor>>, history: Option<PathBuf> },
    /// Any other stream.
    Plain(Input),
}

/// Result of reading a line.
pub(super) enum InputLine {
    Text {
        line: String,
        /// Number of interruptions before the line was submitted. Later ones concern the response,
        /// even if they arrive before it starts.
        interruptions: u32,
    },
    /// The user pressed Ctrl-C while editing.
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
            // The file does not exist at the first start.
            let _ = editor.load_history(path);
        }
        Self::Edited { editor: Arc::new(Mutex::new(editor)), history }
    }

    /// Reads the next line.
    ///
    /// While the editor reads, Ctrl-C is a key and not a signal: a signal has arrived before the
    /// editor started, and is ignored, or after the line was submitted. Any other stream is read
    /// until the number of interruptions reaches `max_interruptions`.
    pub(super) async fn next(
        &self,
        prompt: &'static str,
        interrupt: &Interrupt,
        max_interruptions: u32,
    ) -> Result<InputLine, CommandError> {
        match self {
            Self::Plain(input) => {
                let line =
                    async { input.line().await.map_err(|error| read_error(&error.to_string())) };
                let line = interrupt.run_until(max_interruptions, line).await?;
                let interruptions = max_interruptions - 1;
                Ok(line.map_or(InputLine::End, |line| InputLine::Text { line, interruptions }))
            }
            Self::Edited { editor, history } => {
                let line = edit(editor, history.clone(), prompt, interrupt.clone());
                interrupt.run_until_terminated(line).await
            }
        }
    }
}

/// Reads a line with the editor.
async fn edit(
    editor: &Arc<Mutex<DefaultEditor>>,
    history: Option<PathBuf>,
    prompt: &'static str,
    interrupt: Interrupt,
) -> Result<InputLine, CommandError> {
    let editor = Arc::clone(editor);
    let _restore = SavedTerminalMode::current();
    let (sender, receiver) = oneshot::channel();
    // The read blocks until the user types, so it runs on a detached thread.
    std::thread::spawn(move || {
        let mut editor = editor.lock();
        let line = editor.readline(prompt);
        let interruptions = interrupt.count();
        if let Ok(text) = &line
            && !text.trim().is_empty()
        {
            let _ = editor.add_history_entry(text.as_str());
            if let Some(path) = history {
                // The history is a convenience; errors are ignored.
                let _ = editor.save_history(&path);
            }
        }
        let _ = sender.send((line, interruptions));
    });
    match receiver.await {
        Ok((Ok(line), interruptions)) => Ok(InputLine::Text { line, interruptions }),
        Ok((Err(ReadlineError::Interrupted), _)) => Ok(InputLine::Cancelled),
        Ok((Err(ReadlineError::Eof), _)) | Err(_) => Ok(InputLine::End),
        Ok((Err(error), _)) => Err(read_error(&error.to_string())),
    }
}

/// Terminal mode that is restored on drop. The editor does not restore it if the program ends while
/// a line is being edited.
#[cfg(unix)]
struct SavedTerminalMode(Option<rustix::termios::Termios>);

#[cfg(unix)]
impl SavedTerminalMode {
    fn current() -> Self {
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
    fn current() -> Self {
        Self
    }
}

fn read_error(error: &str) -> CommandError {
    CommandError::new(Exit::Failed, format!("cannot read standard input: {error}"))
}
