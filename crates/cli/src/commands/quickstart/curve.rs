//! A curve drawn with letters: each holds two by four dots.

use std::fmt::Write as _;

/// How high the curve is, in lines.
const LINES: usize = 8;
/// Room for the numbers at the left.
const MARGIN: usize = 7;

/// Draws numbers as a curve in so many columns, from 0 to the highest.
pub(super) fn draw(numbers: &[f64], columns: usize) -> String {
    let cells = columns.saturating_sub(MARGIN + 2).clamp(8, 72);
    let top = numbers.iter().copied().filter(|number| number.is_finite()).fold(0.0, f64::max);
    let mut dots = vec![vec![0_u8; cells]; LINES];
    let mut before: Option<usize> = None;
    for x in 0..cells * 2 {
        let Some(number) = at(numbers, x, cells * 2) else { continue };
        let y = height(number, top);
        // A steep part is a line too: fill up to where the last dot was.
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
        let curve: String = cells.iter().map(|dots| letter(*dots)).collect();
        let _ = writeln!(text, "{label:>MARGIN$} │{}", curve.trim_end_matches('⠀'));
    }
    let _ = writeln!(text, "{:>MARGIN$} └{}", "", "─".repeat(cells));
    text
}

/// The number at a place of the curve, between those beside it.
#[expect(clippy::cast_precision_loss, reason = "a place among a few hundred")]
fn at(numbers: &[f64], x: usize, width: usize) -> Option<f64> {
    let steps = (width - 1).max(1);
    let place = x * numbers.len().checked_sub(1)?;
    let (left, part) = (place / steps, (place % steps) as f64 / steps as f64);
    let from = *numbers.get(left)?;
    let to = numbers.get(left + 1).copied().unwrap_or(from);
    Some(from + (to - from) * part).filter(|number| number.is_finite())
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a dot among 32"
)]
fn height(number: f64, top: f64) -> usize {
    let most = LINES * 4 - 1;
    if top <= 0.0 {
        return 0;
    }
    ((number / top * most as f64).round().max(0.0) as usize).min(most)
}

/// The bit of a dot, counted from the lower left.
fn bit(x: usize, y: usize) -> u8 {
    const BITS: [[u8; 4]; 2] = [[0x40, 0x04, 0x02, 0x01], [0x80, 0x20, 0x10, 0x08]];
    BITS[x][y]
}

fn letter(dots: u8) -> char {
    char::from_u32(0x2800 + u32::from(dots)).unwrap_or(' ')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_falling_loss_falls() {
        let text = draw(&[4.0, 2.0, 1.0, 0.5, 0.0], 30);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), LINES + 1);
        assert!(lines[0].starts_with("   4.00 │⠹⣄"), "{text}");
        assert!(lines[LINES - 1].starts_with("      0 │⠀"), "{text}");
        assert!(lines.iter().all(|line| line.chars().count() <= 30), "{text}");
    }

    #[test]
    fn odd_numbers_are_no_trouble() {
        for numbers in [vec![], vec![1.0], vec![f64::NAN, 2.0], vec![0.0; 5], vec![-1.0, 3.0]] {
            assert_eq!(draw(&numbers, 10).lines().count(), LINES + 1, "{numbers:?}");
        }
    }
}
