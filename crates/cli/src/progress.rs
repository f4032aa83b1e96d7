//! [`Progress`]: progress bar on the terminal, for downloads and lists of many pages.

use std::future::pending;
use std::pin::pin;
use std::time::Duration;

use futures_util::future::{Either, select};
use indicatif::{ProgressBar, ProgressState, ProgressStyle};
use tinkex::{DownloadProgress, Error};
use tokio::sync::watch;

use crate::console::Console;
use crate::context::CommandContext;
use crate::error::CommandError;
use crate::format;

/// Terminals with fewer columns show the numbers without a bar.
const MIN_COLUMNS_FOR_BAR: usize = 72;
/// Template of [`Progress::waiting`].
const WAITING: &str = "{spinner} {elapsed}  {wide_msg}";

/// Unit of a progress bar's position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProgressUnit {
    /// Runs, checkpoints or other items.
    Items,
    /// Bytes, shown as sizes.
    Bytes,
}

/// Progress bar that is removed when it is dropped. Draws nothing unless standard error is a
/// terminal.
pub(crate) struct Progress {
    bar: ProgressBar,
    console: Console,
    columns: usize,
}

impl Progress {
    pub(crate) fn new(
        context: &CommandContext<'_>,
        label: impl Into<String>,
        unit: ProgressUnit,
        total: Option<u64>,
    ) -> Self {
        let width = context.progress_width();
        let bar = context.console().progress_bar(total, width);
        let progress =
            Self { bar, console: context.console().clone(), columns: width.unwrap_or_default() };
        progress.bar.set_style(progress.style(unit, total.is_some()));
        progress.bar.set_message(format::escape_controls(&label.into()));
        progress
    }

    /// Shows `label` and the elapsed time while an operation runs that does not report progress.
    pub(crate) fn waiting(context: &CommandContext<'_>, label: impl Into<String>) -> Self {
        let progress = Self::new(context, label, ProgressUnit::Items, None);
        progress.bar.set_style(style(WAITING));
        progress.bar.tick();
        progress.bar.enable_steady_tick(Duration::from_millis(200));
        progress
    }

    pub(crate) fn advance(&self, count: u64) {
        self.bar.inc(count);
    }

    pub(crate) fn set_position(&self, position: u64) {
        self.bar.set_position(position);
    }

    /// Sets the number of bytes that are done, and the total once it is known.
    pub(crate) fn set_bytes(&self, bytes: u64, total: Option<u64>) {
        if let Some(total) = total.filter(|total| self.bar.length() != Some(*total)) {
            self.bar.set_length(total);
            self.bar.set_style(self.style(ProgressUnit::Bytes, true));
        }
        self.bar.set_position(bytes);
    }

    fn style(&self, unit: ProgressUnit, total_known: bool) -> ProgressStyle {
        let template = match (total_known, self.columns < MIN_COLUMNS_FOR_BAR) {
            (false, _) => "{done}  {wide_msg}",
            (true, true) => "{done}/{total}  {wide_msg}",
            (true, false) => "{msg}  {bar:24}  {done}/{total}  {eta} left",
        };
        let write = move |number: u64, out: &mut dyn std::fmt::Write| {
            let _ = match unit {
                ProgressUnit::Items => write!(out, "{number}"),
                ProgressUnit::Bytes => out.write_str(&format::bytes(number)),
            };
        };
        let done = move |state: &ProgressState, out: &mut dyn std::fmt::Write| {
            write(state.pos(), out);
        };
        let total = move |state: &ProgressState, out: &mut dyn std::fmt::Write| {
            write(state.len().unwrap_or_default(), out);
        };
        style(template).with_key("done", done).with_key("total", total)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.console.remove_bar();
    }
}

/// Returns a bar style with the characters that all bars of the program use.
pub(crate) fn style(template: &str) -> ProgressStyle {
    // Templates are constants; a test draws each of them.
    let style = ProgressStyle::with_template(template);
    style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("█░")
}

/// Runs a download with a progress bar until it ends or the user presses Ctrl-C.
///
/// `start` receives the callback to report progress to and returns the download.
pub(crate) async fn show_download<T, F>(
    context: &mut CommandContext<'_>,
    label: &str,
    start: impl FnOnce(Box<dyn Fn(&DownloadProgress) + Send + Sync>) -> F,
) -> Result<T, CommandError>
where
    F: Future<Output = Result<T, Error>>,
{
    let (report, mut reports) = watch::channel(DownloadProgress::default());
    let mut download = pin!(start(Box::new(move |now| {
        report.send_replace(*now);
    })));
    let interrupt = context.environment.interrupt.clone();
    let mut interrupted = pin!(interrupt.pressed(1));
    let progress = Progress::new(context, label, ProgressUnit::Bytes, None);
    loop {
        {
            let reported = pin!(async {
                if reports.changed().await.is_err() {
                    // The callback was dropped, so the download itself is about to end.
                    pending::<()>().await;
                }
            });
            match select(select(download.as_mut(), interrupted.as_mut()), reported).await {
                Either::Left((Either::Left((result, _)), _)) => {
                    return result.map_err(CommandError::from);
                }
                Either::Left((Either::Right(_), _)) => return Err(CommandError::interrupted()),
                Either::Right(_) => {}
            }
        }
        let now = *reports.borrow();
        progress.set_bytes(now.bytes, now.bytes_total);
    }
}
