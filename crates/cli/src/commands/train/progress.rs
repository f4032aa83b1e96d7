//! [`TrainProgress`]: how far a run is, on one line of a terminal, or now and then as a line of its own.

use std::io::Write as _;
use std::time::Duration;

use tokio::time::Instant;
use unicode_width::UnicodeWidthStr as _;

use crate::format;
use crate::output::Shell;

/// How often the line is drawn anew at most.
const RHYTHM: Duration = Duration::from_millis(80);
/// How many lines a run has where nobody watches.
const LINES: u64 = 10;
const CELLS: u64 = 20;

/// How far a run is.
#[derive(Debug)]
pub(crate) struct TrainProgress {
    steps: u64,
    /// The step that this program started at.
    from: u64,
    started: Instant,
    drawn: Option<Instant>,
    tokens: usize,
    loss: Option<f64>,
    eval: Option<f64>,
}

impl TrainProgress {
    pub(crate) fn new(steps: u64, from: u64) -> Self {
        let started = Instant::now();
        Self { steps, from, started, drawn: None, tokens: 0, loss: None, eval: None }
    }

    pub(crate) fn seconds(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }

    /// Tokens in a second, since the start.
    #[expect(clippy::cast_precision_loss, reason = "a speed")]
    pub(crate) fn speed(&self) -> f64 {
        self.tokens as f64 / self.seconds().max(1e-9)
    }

    pub(crate) fn evaluated(&mut self, loss: f64) {
        self.eval = Some(loss);
    }

    /// So many steps are done; the last one trained on so many tokens.
    pub(crate) fn stepped(&mut self, shell: &mut Shell<'_>, step: u64, tokens: usize, loss: f64) {
        self.tokens += tokens;
        self.loss = Some(loss);
        self.draw(shell, step);
    }

    pub(crate) fn draw(&mut self, shell: &mut Shell<'_>, step: u64) {
        let Some(width) = shell.progress_width() else {
            let every = self.steps.div_ceil(LINES);
            if step > self.from && (step.is_multiple_of(every) || step == self.steps) {
                let text = self.text(step, 100, false);
                shell.notice(&text);
            }
            return;
        };
        let now = Instant::now();
        let soon = self.drawn.is_some_and(|drawn| now - drawn < RHYTHM);
        if soon && step < self.steps {
            return;
        }
        self.drawn = Some(now);
        let text = self.text(step, width.saturating_sub(1), true);
        let _ = write!(shell.environment.err, "\r{text}\u{1b}[K");
        let _ = shell.environment.err.flush();
    }

    /// Takes the line away again.
    pub(crate) fn clear(&mut self, shell: &mut Shell<'_>) {
        if self.drawn.take().is_some() {
            let _ = write!(shell.environment.err, "\r\u{1b}[K");
            let _ = shell.environment.err.flush();
        }
    }

    /// What fits, the most important first.
    fn text(&self, step: u64, width: usize, bar: bool) -> String {
        let done = step - self.from;
        let mut parts = vec![format!("step {step}/{}", self.steps)];
        if let Some(loss) = self.loss {
            parts.push(format!("loss {loss:.3}"));
        }
        if done > 0 && step < self.steps {
            #[expect(clippy::cast_precision_loss, reason = "an estimate")]
            let left = self.seconds() * (self.steps - step) as f64 / done as f64;
            parts.push(format!("{} left", format::seconds(left)));
        }
        if self.tokens > 0 {
            parts.push(format!("{} tokens/s", thousands(self.speed())));
        }
        if let Some(eval) = self.eval {
            parts.push(format!("held-out {eval:.3}"));
        }
        let mut text = parts.remove(0);
        for part in parts {
            if text.width() + 2 + part.width() > width {
                break;
            }
            text = format!("{text}  {part}");
        }
        let cells = usize::try_from(CELLS).unwrap_or(0);
        if bar && text.width() + cells + 2 <= width {
            let full = usize::try_from(step * CELLS / self.steps.max(1)).unwrap_or(0).min(cells);
            text = format!("{}{}  {text}", "█".repeat(full), "░".repeat(cells - full));
        }
        text.chars().take(width).collect()
    }
}

/// A number with its size in letters: 950, 12.3k.
pub(crate) fn thousands(number: f64) -> String {
    match number {
        _ if number < 1e3 => format!("{number:.0}"),
        _ if number < 1e6 => format!("{:.1}k", number / 1e3),
        _ => format!("{:.1}M", number / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_narrow_line_keeps_what_matters() {
        let mut show = TrainProgress::new(100, 0);
        (show.tokens, show.loss, show.eval) = (12_000, Some(1.25), Some(1.5));
        tokio::time::advance(Duration::from_secs(10)).await;
        let text = show.text(50, 100, true);
        assert_eq!(
            text,
            "██████████░░░░░░░░░░  step 50/100  loss 1.250  10s left  1.2k tokens/s  held-out 1.500"
        );
        assert_eq!(show.text(50, 30, true), "step 50/100  loss 1.250");
        assert_eq!(show.text(50, 5, true), "step ");
    }
}
