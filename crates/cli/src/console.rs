//! [`Console`]: standard error, shared by notices, the log and the progress bar.
//!
//! A progress bar occupies the last line of the terminal. Every other writer must therefore remove
//! the bar, write, and draw it again. `Console` does this for all of them.

use std::fmt;
use std::io::{self, Write};
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use indicatif::{ProgressBar, ProgressDrawTarget, TermLike};
use parking_lot::Mutex;
use tracing_subscriber::fmt::MakeWriter;

use crate::style::Style;

/// Maximum number of times per second that a progress bar is drawn.
const REDRAWS_PER_SECOND: u8 = 12;
/// Escape sequence that returns to the first column and erases the line.
const CLEAR_LINE: &str = "\r\u{1b}[K";

/// Standard error, shared by all writers of the process.
///
/// Clones write to the same stream.
#[derive(Clone)]
pub(crate) struct Console {
    stream: Arc<Mutex<Box<dyn Write + Send>>>,
    bar: Arc<Mutex<Option<ProgressBar>>>,
    log_closed: Arc<AtomicBool>,
    style: Style,
}

impl Console {
    /// Creates a console. `style` applies to messages, not to text that is written unchanged.
    pub(crate) fn new(stream: Box<dyn Write + Send>, style: Style) -> Self {
        Self {
            style,
            stream: Arc::new(Mutex::new(stream)),
            bar: Arc::default(),
            log_closed: Arc::default(),
        }
    }

    /// Creates the progress bar, replacing the previous one.
    ///
    /// `width` is the number of columns of the terminal; without one nothing is drawn.
    pub(crate) fn progress_bar(&self, total: Option<u64>, width: Option<usize>) -> ProgressBar {
        let target = match width {
            None => ProgressDrawTarget::hidden(),
            Some(width) => {
                let terminal = Terminal {
                    stream: Arc::clone(&self.stream),
                    pending: Mutex::default(),
                    // A full line would move the cursor to the next one on some terminals.
                    columns: u16::try_from(width.saturating_sub(1)).unwrap_or(u16::MAX),
                };
                ProgressDrawTarget::term_like_with_hz(Box::new(terminal), REDRAWS_PER_SECOND)
            }
        };
        let bar = ProgressBar::with_draw_target(total, target);
        self.remove_bar();
        *self.bar.lock() = Some(bar.clone());
        bar
    }

    /// Removes the progress bar from the terminal, if there is one.
    pub(crate) fn remove_bar(&self) {
        let bar = self.bar.lock().take();
        if let Some(bar) = bar {
            bar.finish_and_clear();
        }
    }

    /// Writes a line of the log, unless the log is closed.
    ///
    /// The line is one write, so that lines of different threads do not mix.
    pub(crate) fn log_line(&self, line: &str) {
        if !self.log_closed.load(Ordering::Relaxed) {
            let line = self.style.message(&format!("{line}\n"));
            let _ = self.write_around_bar(line.as_bytes());
        }
    }

    /// Returns the style of messages.
    pub(crate) fn style(&self) -> Style {
        self.style
    }

    /// Discards all later events of the log. Notices and errors are still written.
    pub(crate) fn close_log(&self) {
        self.log_closed.store(true, Ordering::Relaxed);
    }

    fn write_around_bar(&self, bytes: &[u8]) -> io::Result<()> {
        let write = || {
            let mut stream = self.stream.lock();
            stream.write_all(bytes)?;
            stream.flush()
        };
        // Drawing locks the bar and then the stream; `suspend` keeps this order, which prevents a
        // deadlock.
        let bar = self.bar.lock().clone();
        match bar {
            Some(bar) => bar.suspend(write),
            None => write(),
        }
    }
}

impl Write for Console {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_around_bar(bytes)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.lock().flush()
    }
}

/// Writer for one event of the log.
pub(crate) struct LogWriter(Console);

impl Write for LogWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if !self.0.log_closed.load(Ordering::Relaxed) {
            self.0.write_around_bar(bytes)?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl MakeWriter<'_> for Console {
    type Writer = LogWriter;

    fn make_writer(&self) -> LogWriter {
        LogWriter(self.clone())
    }
}

/// Terminal that `indicatif` draws to.
///
/// It collects the escapes and the text of one drawing and writes them together, so that the bar
/// does not flicker.
struct Terminal {
    stream: Arc<Mutex<Box<dyn Write + Send>>>,
    pending: Mutex<String>,
    columns: u16,
}

impl Terminal {
    fn push(&self, text: &str) {
        self.pending.lock().push_str(text);
    }

    fn move_cursor(&self, count: usize, direction: char) {
        if count > 0 {
            self.push(&format!("\u{1b}[{count}{direction}"));
        }
    }
}

impl TermLike for Terminal {
    fn width(&self) -> u16 {
        self.columns
    }

    fn move_cursor_up(&self, n: usize) -> io::Result<()> {
        self.move_cursor(n, 'A');
        Ok(())
    }

    fn move_cursor_down(&self, n: usize) -> io::Result<()> {
        self.move_cursor(n, 'B');
        Ok(())
    }

    fn move_cursor_right(&self, n: usize) -> io::Result<()> {
        self.move_cursor(n, 'C');
        Ok(())
    }

    fn move_cursor_left(&self, n: usize) -> io::Result<()> {
        self.move_cursor(n, 'D');
        Ok(())
    }

    fn write_line(&self, s: &str) -> io::Result<()> {
        self.push(s);
        self.push("\n");
        Ok(())
    }

    fn write_str(&self, s: &str) -> io::Result<()> {
        // `indicatif` fills the line with spaces. The line is erased before it is drawn, so they are
        // not needed, and the cursor stays behind the text: an echoed `^C` does not wrap.
        if s.bytes().any(|byte| byte != b' ') {
            self.push(s);
        }
        Ok(())
    }

    fn clear_line(&self) -> io::Result<()> {
        self.push(CLEAR_LINE);
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        let text = mem::take(&mut *self.pending.lock());
        if text.is_empty() {
            return Ok(());
        }
        let mut stream = self.stream.lock();
        stream.write_all(text.as_bytes())?;
        stream.flush()
    }
}

impl fmt::Debug for Terminal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Terminal").field("columns", &self.columns).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Default)]
    struct Captured(Arc<Mutex<Vec<u8>>>);

    impl Write for Captured {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().write(bytes)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn log_lines_are_written_above_the_bar() {
        let captured = Captured::default();
        let console = Console::new(Box::new(captured.clone()), Style::default());
        let bar = console.progress_bar(Some(10), Some(60));
        bar.tick();
        console.log_line("warning: slow");
        console.remove_bar();
        let text = String::from_utf8(captured.0.lock().clone()).unwrap();
        let line = format!("{CLEAR_LINE}warning: slow\n");
        let at = text.find(&line).unwrap_or_else(|| panic!("{text:?}"));
        assert!(
            text[..at].contains("0/10") && text[at + line.len()..].contains("0/10"),
            "{text:?}"
        );
        assert!(text.ends_with(CLEAR_LINE), "the bar is removed at the end: {text:?}");
    }

    #[test]
    fn a_stream_that_is_no_terminal_has_no_bar_and_no_escapes() {
        let captured = Captured::default();
        let mut console = Console::new(Box::new(captured.clone()), Style::default());
        let bar = console.progress_bar(Some(10), None);
        bar.inc(5);
        console.write_all(b"a notice\n").unwrap();
        console.remove_bar();
        console.close_log();
        console.log_line("discarded");
        assert_eq!(*captured.0.lock(), b"a notice\n");
    }
}
