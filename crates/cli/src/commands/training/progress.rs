//! [`TrainProgress`]: progress of a training run, as a bar on a terminal or as occasional lines.

use indicatif::ProgressBar;
use tokio::time::Instant;
use unicode_width::UnicodeWidthStr as _;

use crate::console::Console;
use crate::context::CommandContext;
use crate::format;
use crate::progress;

/// Number of lines per run if standard error is not a terminal.
const LINES: u64 = 10;
/// Maximum width of such a line.
const LINE_WIDTH: usize = 100;
/// Width of the bar and of the space after it.
const BAR_COLUMNS: usize = 22;
/// Terminals with fewer columns show the numbers without a bar.
const MIN_COLUMNS_FOR_BAR: usize = 60;

/// Progress of a training run. The bar is removed when it is dropped.
pub(crate) struct TrainProgress {
    steps: u64,
    /// Step at which this process started.
    from: u64,
    started: Instant,
    tokens: usize,
    /// Name of the number that is shown for each step.
    label: &'static str,
    loss: Option<f64>,
    eval_loss: Option<f64>,
    /// Evaluation interval; `None` if nothing is evaluated after a step.
    eval_every: Option<u64>,
    /// Step of a line that is printed once the evaluation after it is finished.
    unprinted: Option<u64>,
    bar: Option<Bar>,
}

struct Bar {
    bar: ProgressBar,
    console: Console,
    /// Columns for the text after the bar.
    text_columns: usize,
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.console.remove_bar();
    }
}

impl TrainProgress {
    /// Starts the clock and shows the first line on a terminal.
    pub(crate) fn new(context: &mut CommandContext<'_>, steps: u64, from: u64) -> Self {
        let bar = context.progress_width().map(|width| {
            let bar = context.console().progress_bar(Some(steps), Some(width));
            let columns = width.saturating_sub(1);
            let text_columns = if columns < MIN_COLUMNS_FOR_BAR {
                bar.set_style(progress::style("{wide_msg}"));
                columns
            } else {
                bar.set_style(progress::style("{bar:20}  {wide_msg}"));
                columns - BAR_COLUMNS
            };
            Bar { bar, console: context.console().clone(), text_columns }
        });
        let mut progress = Self { bar, ..Self::without_bar(steps, from) };
        progress.show(context, from);
        progress
    }

    fn without_bar(steps: u64, from: u64) -> Self {
        let started = Instant::now();
        Self {
            steps,
            from,
            started,
            tokens: 0,
            label: "loss",
            loss: None,
            eval_loss: None,
            eval_every: None,
            unprinted: None,
            bar: None,
        }
    }

    /// Shows another number than the loss.
    pub(crate) fn label(mut self, label: &'static str) -> Self {
        self.label = label;
        self
    }

    /// Sets the evaluation interval. 0 evaluates after the last step only.
    pub(crate) fn evaluates(mut self, every: u64) -> Self {
        self.eval_every = Some(every);
        self
    }

    /// Returns the seconds since the start.
    pub(crate) fn seconds(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }

    /// Returns the mean number of tokens per second since the start.
    #[expect(clippy::cast_precision_loss, reason = "a speed")]
    pub(crate) fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.seconds().max(1e-9)
    }

    /// Shows the loss of the held-out data after `step` steps.
    pub(crate) fn set_eval_loss(&mut self, context: &mut CommandContext<'_>, step: u64, loss: f64) {
        self.eval_loss = Some(loss);
        if let Some(Bar { bar, text_columns, .. }) = &self.bar {
            bar.set_message(self.text(step, *text_columns));
        }
        self.print(context);
    }

    /// Shows that `step` steps are finished. The last one had `tokens` tokens.
    ///
    /// Without a bar, the line of a step that is evaluated is printed with the next call, so that
    /// it has the held-out loss after the step.
    pub(crate) fn finish_step(
        &mut self,
        context: &mut CommandContext<'_>,
        step: u64,
        tokens: usize,
        loss: f64,
    ) {
        self.print(context);
        self.tokens += tokens;
        self.loss = Some(loss);
        self.show(context, step);
    }

    /// Prints the last line and removes the bar.
    pub(crate) fn clear(&mut self, context: &mut CommandContext<'_>) {
        self.print(context);
        self.bar = None;
    }

    fn show(&mut self, context: &mut CommandContext<'_>, step: u64) {
        if let Some(Bar { bar, text_columns, .. }) = &self.bar {
            bar.set_message(self.text(step, *text_columns));
            bar.set_position(step);
            return;
        }
        let interval = self.steps.div_ceil(LINES);
        if step > self.from && (step.is_multiple_of(interval) || step == self.steps) {
            let is_evaluated = self
                .eval_every
                .is_some_and(|every| step == self.steps || every > 0 && step.is_multiple_of(every));
            self.unprinted = Some(step);
            if !is_evaluated {
                self.print(context);
            }
        }
    }

    fn print(&mut self, context: &mut CommandContext<'_>) {
        if let Some(step) = self.unprinted.take() {
            context.notice(&self.text(step, LINE_WIDTH));
        }
    }

    /// Returns as many of the numbers as fit into `columns`, the most important first.
    fn text(&self, step: u64, columns: usize) -> String {
        let finished = step - self.from;
        let mut parts = vec![format!("step {step}/{}", self.steps)];
        if let Some(loss) = self.loss {
            parts.push(format!("{} {loss:.3}", self.label));
        }
        if let Some(loss) = self.eval_loss {
            parts.push(format!("held-out {loss:.3}"));
        }
        if finished > 0 && step < self.steps {
            #[expect(clippy::cast_precision_loss, reason = "an estimate")]
            let left = self.seconds() * (self.steps - step) as f64 / finished as f64;
            parts.push(format!("{} left", format::short_duration(left)));
        }
        if self.tokens > 0 {
            parts.push(format!("{} tokens/s", thousands(self.tokens_per_second())));
        }
        let mut text = parts.remove(0);
        for part in parts {
            if text.width() + 2 + part.width() > columns {
                break;
            }
            text = format!("{text}  {part}");
        }
        text.chars().take(columns).collect()
    }
}

/// Returns a number in units of thousands or millions: `950`, `12.3k`, `1.2M`.
pub(crate) fn thousands(number: f64) -> String {
    match number {
        _ if number < 1e3 => format!("{number:.0}"),
        _ if number < 1e6 => format!("{:.1}k", number / 1e3),
        _ => format!("{:.1}M", number / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_narrow_line_keeps_the_most_important_numbers() {
        let mut progress = TrainProgress::without_bar(100, 0);
        progress.tokens = 12_000;
        progress.loss = Some(1.25);
        progress.eval_loss = Some(1.5);
        tokio::time::advance(Duration::from_secs(10)).await;
        assert_eq!(
            progress.text(50, 100),
            "step 50/100  loss 1.250  held-out 1.500  10s left  1.2k tokens/s"
        );
        assert_eq!(progress.text(50, 40), "step 50/100  loss 1.250  held-out 1.500");
        assert_eq!(progress.text(50, 30), "step 50/100  loss 1.250");
        assert_eq!(progress.text(50, 5), "step ");
    }
}
