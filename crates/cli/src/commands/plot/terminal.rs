//! [`TerminalPlot`]: a plot made of characters: braille, with two by four dots each, or ASCII.

use std::fmt::Write as _;

use tinkex::Env;

use crate::context::CommandContext;

use super::scale::{Axis, robust_range, smooth};
use super::{Plot, PlotPoint};

/// Height of the plot in lines.
const LINES: usize = 9;
/// Maximum width of the plot in columns, without the labels.
const MAX_COLUMNS: usize = 72;

/// How a plot is drawn.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TerminalPlot {
    /// Width of the terminal.
    columns: usize,
    /// Whether only ASCII characters can be shown.
    ascii: bool,
}

/// Returns whether the terminal shows only ASCII characters: by its type, or because the locale has
/// another character set than UTF-8.
fn needs_ascii(env: &Env) -> bool {
    let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().filter_map(|name| env.get(name));
    let locale = locale.map(str::to_ascii_lowercase).find(|value| !value.is_empty());
    let is_utf8 = |value: &str| value.contains("utf-8") || value.contains("utf8");
    matches!(env.get("TERM"), Some("dumb" | "linux"))
        || locale.is_some_and(|locale| !is_utf8(&locale))
}

impl TerminalPlot {
    /// Draws for standard output: as wide as its terminal, or 80 columns.
    pub(crate) fn for_output(context: &CommandContext<'_>) -> Self {
        let columns = context.environment.terminals.out.unwrap_or(80);
        Self { columns, ascii: needs_ascii(&context.environment.variables) }
    }

    /// Draws the smoothed line, and a mark for each held-out value.
    pub(crate) fn draw(self, plot: &Plot) -> String {
        let smoothed = smooth(&plot.training, robust_range(&[&plot.training, &plot.held_out]));
        let line = smoothed.as_deref().unwrap_or(&plot.training);
        let (low, high) = robust_range(&[line, &plot.held_out]);
        let y_axis = Axis::covering(low, high, 4);
        let labels: Vec<(usize, String)> =
            y_axis.ticks.iter().map(|tick| (row(&y_axis, *tick), y_axis.label(*tick))).collect();
        let label_width = labels.iter().map(|(_, label)| label.len()).max().unwrap_or(0);
        let cells = self.columns.saturating_sub(label_width + 3).clamp(8, MAX_COLUMNS);
        let x_axis = Axis::of_steps(plot.last_step(), u32::try_from(cells / 10).unwrap_or(1));

        let mut grid = self.line(line, &x_axis, &y_axis, cells);
        for (step, value) in &plot.held_out {
            grid[row(&y_axis, *value)][column(&x_axis, *step, cells)] = 'o';
        }
        let [upright, tick, horizontal, corner] =
            if self.ascii { ['|', '+', '-', '+'] } else { ['│', '┤', '─', '└'] };
        let mut text = self.caption(plot, smoothed.is_some());
        for (at, cells) in grid.iter().enumerate() {
            let label = labels.iter().find(|(row, _)| *row == at).map(|(_, label)| label.as_str());
            let edge = if label.is_some() { tick } else { upright };
            let cells: String = cells.iter().collect();
            let label = label.unwrap_or_default();
            let _ = writeln!(text, "{label:>label_width$} {edge}{}", cells.trim_end());
        }
        let axis = horizontal.to_string().repeat(cells);
        let _ = writeln!(text, "{:label_width$} {corner}{axis}", "");
        let _ = writeln!(text, "{:label_width$}  {}", "", step_labels(&x_axis, cells));
        text
    }

    /// Returns the line that says what the plot shows.
    fn caption(self, plot: &Plot, is_smoothed: bool) -> String {
        let smoothed = if is_smoothed { ", smoothed" } else { "" };
        let held_out = if plot.held_out.is_empty() { "" } else { "; o = held out" };
        let caption = format!("{} by step{smoothed}{held_out}", plot.y_title);
        caption.chars().take(self.columns).collect::<String>() + "\n"
    }

    /// Draws the line. Returns the characters by rows.
    fn line(
        self,
        line: &[PlotPoint],
        x_axis: &Axis,
        y_axis: &Axis,
        cells: usize,
    ) -> Vec<Vec<char>> {
        let mut dots = vec![vec![0_u8; cells]; LINES];
        let mut before: Option<usize> = None;
        for x in 0..cells * 2 {
            #[expect(clippy::cast_precision_loss, reason = "below a few hundred")]
            let part = x as f64 / (cells * 2 - 1) as f64;
            let step = x_axis.low + (x_axis.high - x_axis.low) * part;
            let Some(value) = interpolate(line, step) else { continue };
            let y = height(y_axis, value);
            // Connect the dot with the previous one, so that steep parts have no gaps.
            let from = before.unwrap_or(y);
            for y in from.min(y)..=from.max(y) {
                dots[LINES - 1 - y / 4][x / 2] |= bit(x % 2, y % 4);
            }
            before = Some(y);
        }
        let shown = |dots: u8| match (dots, self.ascii) {
            (0, _) => ' ',
            (_, true) => '*',
            (dots, false) => char::from_u32(0x2800 + u32::from(dots)).unwrap_or(' '),
        };
        dots.into_iter().map(|row| row.into_iter().map(shown).collect()).collect()
    }
}

/// Returns the labels below the axis of steps.
fn step_labels(axis: &Axis, cells: usize) -> String {
    let mut text = String::new();
    for tick in &axis.ticks {
        let label = axis.label(*tick);
        let middle = column(axis, *tick, cells);
        let start = middle.saturating_sub(label.len() / 2);
        let is_free = text.is_empty() || start > text.len();
        if is_free && start + label.len() <= cells {
            text = format!("{text:start$}{label}");
        }
    }
    text
}

/// Returns the value of a line at a step, interpolated linearly; `None` outside the line.
fn interpolate(points: &[PlotPoint], step: f64) -> Option<f64> {
    let after = points.partition_point(|(at, _)| *at < step);
    let (to_step, to) = *points.get(after)?;
    if to_step <= step {
        return Some(to);
    }
    let (from_step, from) = *points.get(after.checked_sub(1)?)?;
    Some(from + (to - from) * (step - from_step) / (to_step - from_step))
}

/// Returns the height of a value as a count of dots above the axis.
fn height(axis: &Axis, value: f64) -> usize {
    scaled(axis.position(value), LINES * 4 - 1)
}

/// Returns the row of characters that contains a value.
fn row(axis: &Axis, value: f64) -> usize {
    LINES - 1 - height(axis, value) / 4
}

fn column(axis: &Axis, step: f64, cells: usize) -> usize {
    scaled(axis.position(step), cells * 2 - 1) / 2
}

/// Returns a position of 0 to 1 as a whole number of 0 to `most`.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the result is between 0 and a few hundred"
)]
fn scaled(position: f64, most: usize) -> usize {
    ((position * most as f64).round().max(0.0) as usize).min(most)
}

/// Returns the bit of a dot in a braille character; `y` counts from the bottom.
fn bit(x: usize, y: usize) -> u8 {
    const BITS: [[u8; 4]; 2] = [[0x40, 0x04, 0x02, 0x01], [0x80, 0x20, 0x10, 0x08]];
    BITS[x][y]
}

#[cfg(test)]
mod tests {
    use super::super::tests::plot_of;
    use super::*;

    const UNICODE: TerminalPlot = TerminalPlot { columns: 44, ascii: false };

    #[test]
    fn a_decreasing_loss_is_drawn_from_top_to_bottom() {
        let text = UNICODE.draw(&Plot { held_out: Vec::new(), ..plot_of(&[4.0, 2.0, 1.0, 0.5]) });
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), LINES + 3, "{text}");
        assert_eq!(lines[0], "loss per token by step");
        assert!(lines[1].starts_with("4 ┤") && lines[1].contains('⢦'), "{text}");
        assert!(lines[LINES].starts_with("0 ┤"), "{text}");
        assert_eq!(lines[LINES + 1], format!("  └{}", "─".repeat(40)));
        assert_eq!(lines[LINES + 2], "   0         1         2        3         4");
        assert!(lines.iter().all(|line| line.chars().count() <= 44), "{text}");
    }

    #[test]
    fn ascii_is_used_where_the_terminal_needs_it() {
        let ascii = TerminalPlot { ascii: true, ..UNICODE };
        let text = ascii.draw(&plot_of(&[4.0, 2.0, 1.0, 0.5]));
        assert!(text.is_ascii() && text.contains('*') && text.contains('o'), "{text}");
        assert!(text.starts_with("loss per token by step; o = held out\n"), "{text}");
        for (variables, expected) in [
            (&[][..], false),
            (&[("TERM", "xterm"), ("LANG", "de_DE.UTF-8")], false),
            (&[("LANG", "de_DE.UTF-8"), ("LC_ALL", "C")], true),
            (&[("LANG", "C.utf8")], false),
            (&[("TERM", "linux"), ("LANG", "C.utf8")], true),
        ] {
            assert_eq!(needs_ascii(&Env::from_pairs(variables.iter().copied())), expected);
        }
    }

    #[test]
    fn every_run_can_be_drawn() {
        for numbers in [vec![], vec![1.0], vec![f64::NAN, 2.0], vec![0.0; 5], vec![-1.0, 3.0]] {
            for columns in [0, 10, 80, 300] {
                let text = TerminalPlot { columns, ascii: false }.draw(&plot_of(&numbers));
                assert_eq!(text.lines().count(), LINES + 3, "{numbers:?}");
            }
        }
    }
}
