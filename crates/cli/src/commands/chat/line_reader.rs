//! [`LineReader`]: input lines of a chat, with editing and history on a terminal.

use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;
use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::DefaultHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Editor, Helper};
use tokio::sync::oneshot;

use crate::environment::{Input, Interrupt};
use crate::error::{CommandError, Exit};

/// Source of input lines.
pub(super) enum LineReader {
    /// Terminal with line editing.
    Edited { editor: Arc<Mutex<LineEditor>>, history: Option<PathBuf> },
    /// Any other stream.
    Plain(Input),
}

pub(super) type LineEditor = Editor<SubmissionObserver, DefaultHistory>;

/// Counts interruptions when a line is submitted. The editor calls the validator before it prints the
/// line break, so an interruption by a user who has seen the line break always counts as later.
pub(super) struct SubmissionObserver {
    interrupt: Interrupt,
    /// Number of interruptions when the last line was submitted.
    interruptions: Mutex<u32>,
}

impl Validator for SubmissionObserver {
    fn validate(&self, _: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        *self.interruptions.lock() = self.interrupt.count();
        Ok(ValidationResult::Valid(None))
    }
}

impl Completer for SubmissionObserver {
    type Candidate = String;
}

impl Hinter for SubmissionObserver {
    type Hint = String;
}

impl Highlighter for SubmissionObserver {}

impl Helper for SubmissionObserver {}

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
    pub(super) fn new(input: &Input, history: Option<PathBuf>, interrupt: &Interrupt) -> Self {
        if !input.edits() {
            return Self::Plain(input.clone());
        }
        let Ok(mut editor) = LineEditor::new() else { return Self::Plain(input.clone()) };
        let interrupt = interrupt.clone();
        editor.set_helper(Some(SubmissionObserver { interrupt, interruptions: Mutex::default() }));
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
                let line = edit(editor, history.clone(), prompt);
                interrupt.run_until_terminated(line).await
            }
        }
    }
}

/// Reads a line with the editor.
async fn edit(
    editor: &Arc<Mutex<LineEditor>>,
    history: Option<PathBuf>,
    prompt: &'static str,
) -> Result<InputLine, CommandError> {
    let editor = Arc::clone(editor);
    let _restore = SavedTerminalMode::current();
    let (sender, receiver) = oneshot::channel();
    // The read blocks until the user types, so it runs on a detached thread.
    std::thread::spawn(move || {
        let mut editor = editor.lock();
        let line = editor.readline(prompt);
        let interruptions = editor.helper().map_or(0, |helper| *helper.interruptions.lock());
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
