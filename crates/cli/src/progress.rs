//! [`Progress`]: how far something is that takes a while, drawn over itself on a terminal.

use std::future::pending;
use std::io::Write as _;
use std::pin::pin;

use futures_util::future::{Either, select};
use tinkex::{DownloadProgress, Error};
use tokio::sync::watch;
use tokio::time::{Duration, Instant};

use crate::error::CommandError;
use crate::format;
use crate::output::Shell;

/// How often it is drawn anew at most.
const RHYTHM: Duration = Duration::from_millis(100);
/// How long the bar itself is.
const CELLS: u64 = 24;

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProgressUnit {
    /// Things: runs, checkpoints, steps.
    Things,
    /// Bytes, shown as sizes.
    Bytes,
}

/// How far something is. It shows nothing where nobody watches.
#[derive(Debug)]
pub(crate) struct Progress {
    label: String,
    unit: ProgressUnit,
    total: Option<u64>,
    done: u64,
    /// How wide the terminal is; nothing is drawn without one.
    width: Option<usize>,
    started: Instant,
    drawn: Option<Instant>,
}

impl Progress {
    pub(crate) fn new(
        shell: &Shell<'_>,
        label: impl Into<String>,
        unit: ProgressUnit,
        total: Option<u64>,
    ) -> Self {
        Self {
            label: label.into(),
            unit,
            total,
            done: 0,
            width: shell.progress_width(),
            started: Instant::now(),
            drawn: None,
        }
    }

    /// This much more is done.
    pub(crate) fn advance(&mut self, shell: &mut Shell<'_>, more: u64) {
        self.set(shell, self.done + more, self.total);
    }

    /// This much is done, of so much.
    pub(crate) fn set(&mut self, shell: &mut Shell<'_>, done: u64, total: Option<u64>) {
        (self.done, self.total) = (done, total);
        let now = Instant::now();
        if self.drawn.is_some_and(|drawn| now - drawn < RHYTHM) {
            return;
        }
        self.drawn = Some(now);
        if let Some(width) = self.width {
            let text = self.text(now, width);
            draw(shell, &format!("\r{text}\u{1b}[K"));
        }
    }

    /// Takes the bar away again.
    pub(crate) fn clear(&mut self, shell: &mut Shell<'_>) {
        if self.width.is_some() && self.drawn.take().is_some() {
            draw(shell, "\r\u{1b}[K");
        }
    }

    fn text(&self, now: Instant, width: usize) -> String {
        let show = |number: u64| match self.unit {
            ProgressUnit::Things => number.to_string(),
            ProgressUnit::Bytes => format::size(i64::try_from(number).unwrap_or(i64::MAX)),
        };
        let seconds = (now - self.started).as_secs_f64();
        let text = match self.total.filter(|total| *total > 0) {
            None => format!("{}  {}", self.label, show(self.done)),
            Some(total) => {
                let done = self.done.min(total);
                let cells = usize::try_from(done * CELLS / total).unwrap_or(0);
                let empty = usize::try_from(CELLS).unwrap_or(0) - cells;
                let left = if done > 0 {
                    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
                    let left = seconds * (total - done) as f64 / done as f64;
                    format!("  {} left", format::seconds(left))
                } else {
                    String::new()
                };
                format!(
                    "{}  {}{}  {}/{}{left}",
                    self.label,
                    "█".repeat(cells),
                    "░".repeat(empty),
                    show(done),
                    show(total),
                )
            }
        };
        text.chars().take(width.saturating_sub(1)).collect()
    }
}

/// Progress that cannot be shown is no reason to stop.
fn draw(shell: &mut Shell<'_>, text: &str) {
    let _ = shell.environment.err.write_all(text.as_bytes());
    let _ = shell.environment.err.flush();
}

/// Shows how far a download is until it ends, or the user stops it.
pub(crate) async fn of_download<T, F>(
    shell: &mut Shell<'_>,
    label: &str,
    start: impl FnOnce(Box<dyn Fn(&DownloadProgress) + Send + Sync>) -> F,
) -> Result<T, CommandError>
where
    F: Future<Output = Result<T, Error>>,
{
    let (tell, mut told) = watch::channel(DownloadProgress::default());
    let mut work = pin!(start(Box::new(move |now| {
        tell.send_replace(*now);
    })));
    let interrupt = shell.environment.interrupt.clone();
    let mut stopped = pin!(interrupt.pressed(1));
    let mut bar = Progress::new(shell, label, ProgressUnit::Bytes, None);
    let ended = loop {
        let step = {
            let news = pin!(async {
                if told.changed().await.is_err() {
                    // Nobody tells any more, so it is about to end.
                    pending::<()>().await;
                }
            });
            match select(select(work.as_mut(), stopped.as_mut()), news).await {
                Either::Left((Either::Left((ended, _)), _)) => {
                    Some(ended.map_err(CommandError::from))
                }
                Either::Left((Either::Right(_), _)) => Some(Err(CommandError::interrupted())),
                Either::Right(_) => None,
            }
        };
        if let Some(ended) = step {
            break ended;
        }
        let now = *told.borrow();
        bar.set(shell, now.bytes, now.bytes_total);
    };
    bar.clear(shell);
    ended
}
