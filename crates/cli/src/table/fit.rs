//! Fits cells into columns: shortens ids, breaks between words, truncates and pads.

use std::collections::HashSet;

use unicode_width::UnicodeWidthStr as _;

/// Maximum number of lines of a cell that is broken between words.
const MAX_CELL_LINES: usize = 8;
/// Lengths to which ids are shortened: the first at which they differ.
const SHORT_ID_LENGTHS: [usize; 3] = [8, 13, 23];
/// Length of a UUID.
const UUID_LENGTH: usize = 36;

/// Shortens the UUIDs of each column to the first length at which all values differ as before. The
/// column `except` is not changed.
pub(super) fn shorten_ids(mut rows: Vec<Vec<String>>, except: Option<usize>) -> Vec<Vec<String>> {
    let columns = rows.first().map_or(0, Vec::len);
    for column in (0..columns).filter(|column| except != Some(*column)) {
        let values: HashSet<&String> = rows.iter().map(|row| &row[column]).collect();
        let shortened = |keep: usize| -> HashSet<String> {
            values.iter().map(|text| shorten_uuid(text, keep)).collect()
        };
        let keep = SHORT_ID_LENGTHS.into_iter().find(|keep| shortened(*keep).len() == values.len());
        if let Some(keep) = keep {
            for row in &mut rows {
                row[column] = shorten_uuid(&row[column], keep);
            }
        }
    }
    rows
}

/// Removes `:train:N` behind the shortened ids of each column if all values differ as before. The
/// rest names the run too. The column `except` is not changed.
pub(super) fn omit_run_numbers(
    mut rows: Vec<Vec<String>>,
    except: Option<usize>,
) -> Vec<Vec<String>> {
    let columns = rows.first().map_or(0, Vec::len);
    for column in (0..columns).filter(|column| except != Some(*column)) {
        let values: HashSet<&String> = rows.iter().map(|row| &row[column]).collect();
        let shorter: HashSet<String> = values.iter().map(|text| without_run_number(text)).collect();
        if shorter.len() == values.len() {
            for row in &mut rows {
                row[column] = without_run_number(&row[column]);
            }
        }
    }
    rows
}

/// Returns a shortened run id without `:train:N`, and any other text unchanged.
fn without_run_number(text: &str) -> String {
    match text.split_once("…:train:") {
        Some((id, number)) if number.bytes().all(|byte| byte.is_ascii_digit()) => format!("{id}…"),
        _ => text.to_owned(),
    }
}

/// Replaces the end of the first UUID of a text with an ellipsis.
fn shorten_uuid(text: &str, keep: usize) -> String {
    let is_uuid = |bytes: &[u8]| {
        bytes.iter().enumerate().all(|(at, byte)| match at {
            8 | 13 | 18 | 23 => *byte == b'-',
            _ => byte.is_ascii_hexdigit(),
        })
    };
    match text.as_bytes().windows(UUID_LENGTH).position(is_uuid) {
        Some(at) => format!("{}…{}", &text[..at + keep], &text[at + UUID_LENGTH..]),
        None => text.to_owned(),
    }
}

/// Breaks a cell between words into lines of `width` columns.
pub(super) fn break_cell(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let mut word = word.to_owned();
        while let Some(line) = lines.last_mut() {
            let space = usize::from(!line.is_empty());
            if line.width() + space + word.width() <= width {
                line.extend((space == 1).then_some(' '));
                *line += &word;
                break;
            }
            if line.is_empty() {
                let cut = cut(&word, width);
                word = word[cut.len()..].to_owned();
                *line = cut;
            }
            lines.push(String::new());
        }
    }
    if lines.len() > MAX_CELL_LINES {
        let rest = lines.split_off(MAX_CELL_LINES - 1);
        lines.push(rest.join(" "));
    }
    lines.iter().map(|line| fit(line, width)).collect()
}

/// Returns the start of a text that fits into `width` columns, at least one character.
fn cut(text: &str, width: usize) -> String {
    let mut cut = String::new();
    for letter in text.chars() {
        let next = format!("{cut}{letter}");
        if next.width() > width && !cut.is_empty() {
            break;
        }
        cut = next;
    }
    cut
}

/// Pads text to `width` columns, or truncates it with an ellipsis.
pub(super) fn fit(text: &str, width: usize) -> String {
    let current = text.width();
    if current <= width {
        return format!("{text}{}", " ".repeat(width - current));
    }
    let cut = if width > 1 { cut(text, width - 1) } else { String::new() };
    let rest = width.saturating_sub(cut.width() + 1);
    format!("{cut}…{}", " ".repeat(rest))
}

pub(super) fn center(text: &str, width: usize) -> String {
    let spare = width.saturating_sub(text.width());
    format!("{}{text}{}", " ".repeat(spare / 2), " ".repeat(spare - spare / 2))
}
