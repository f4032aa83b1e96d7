//! Line plot made of braille characters, each of which has two by four dots.

use std::fmt::Write as _;

/// Height of the plot in lines.
const LINES: usize = 8;
/// Width of the labels on the left.
const LABEL_WIDTH: usize = 7;

/// Plots numbers in `columns` columns, with a vertical axis from 0 to the highest number.
pub(super) fn draw(numbers: &[f64], columns: usize) -> String {
    let cells = columns.saturating_sub(LABEL_WIDTH + 2).clamp(8, 72);
    let top = numbers.iter().copied().filter(|number| number.is_finite()).fold(0.0, f64::max);
    let mut dots = vec![vec![0_u8; cells]; LINES];
    let mut before: Option<usize> = None;
    for x in 0..cells * 2 {
        let Some(number) = interpolate(numbers, x, cells * 2) else { continue };
        let y = height(number, top);
        // Connect the dot with the previous one, so that steep parts have no gaps.
        let from = before.unwrap_or(y);
        for y in from.min(y)..=from.max(y) {
            let row = LINES - 1 - y / 4;
            dots[row][x / 2] |= bit(x % 2, y % 4);
        }
        before = Some(y);
    }
    let mut text = String::new();
    for (line, cells) in dots.iter().enumerate() {
        let label = match line {
            0 => format!("{top:.2}"),
            _ if line == LINES - 1 => "0".to_owned(),
            _ => String::new(),
        };
        let curve: String = cells.iter().map(|dots| braille(*dots)).collect();
        let _ = writeln!(text, "{label:>LABEL_WIDTH$} │{}", curve.trim_end_matches('⠀'));
    }
    let _ = writeln!(text, "{:>LABEL_WIDTH$} └{}", "", "─".repeat(cells));
    text
}

/// Returns the number at a horizontal position, interpolated linearly.
#[expect(clippy::cast_precision_loss, reason = "positions are below a few hundred")]
fn interpolate(numbers: &[f64], x: usize, width: usize) -> Option<f64> {
    let steps = (width - 1).max(1);
    let position = x * numbers.len().checked_sub(1)?;
    let (left, part) = (position / steps, (position % steps) as f64 / steps as f64);
    let from = *numbers.get(left)?;
    let to = numbers.get(left + 1).copied().unwrap_or(from);
    Some(from + (to - from) * part).filter(|number| number.is_finite())
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the result is between 0 and 31"
)]
/// Returns the height of a number as a count of dots above the axis.
fn height(number: f64, top: f64) -> usize {
    let highest = LINES * 4 - 1;
    if top <= 0.0 {
        return 0;
    }
    ((number / top * highest as f64).round().max(0.0) as usize).min(highest)
}

/// Returns the bit of a dot in a braille character; `y` counts from the bottom.
fn bit(x: usize, y: usize) -> u8 {
    const BITS: [[u8; 4]; 2] = [[0x40, 0x04, 0x02, 0x01], [0x80, 0x20, 0x10, 0x08]];
    BITS[x][y]
}

fn braille(dots: u8) -> char {
    char::from_u32(0x2800 + u32::from(dots)).unwrap_or(' ')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_decreasing_loss_is_drawn_from_top_to_bottom() {
        let text = draw(&[4.0, 2.0, 1.0, 0.5, 0.0], 30);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), LINES + 1);
        assert!(lines[0].starts_with("   4.00 │⠹⣄"), "{text}");
        assert!(lines[LINES - 1].starts_with("      0 │⠀"), "{text}");
        assert!(lines.iter().all(|line| line.chars().count() <= 30), "{text}");
    }

    #[test]
    fn missing_and_non_finite_numbers_are_skipped() {
        for numbers in [vec![], vec![1.0], vec![f64::NAN, 2.0], vec![0.0; 5], vec![-1.0, 3.0]] {
            assert_eq!(draw(&numbers, 10).lines().count(), LINES + 1, "{numbers:?}");
        }
    }
}
