//! Compares our output with the Python CLI's.

use std::path::Path;

use serde_json::Value;
use tinkex::Timestamp;

/// Splits a table into rows of cells, without borders, progress, escape sequences and empty lines.
///
/// Replaces the path of `work` by the one in the recordings.
pub(crate) fn rows(text: &str, work: Option<&Path>) -> Vec<Vec<String>> {
    let mut rows = Vec::new();
    let plain = without_escapes(text);
    for line in plain.lines() {
        let progress = ["Fetching ", "Deleting checkpoints", "Downloading trace", "adapter_"];
        if progress.iter().any(|start| line.starts_with(start)) {
            continue;
        }
        if line.starts_with(['┏', '┡', '└']) || line.trim().is_empty() {
            continue;
        }
        let line = match work {
            Some(work) => line.replace(work.to_str().unwrap(), "/home/me"),
            None => line.to_owned(),
        };
        let cells = line.trim_matches(['│', '┃', ' ']).split(['│', '┃']);
        rows.push(cells.map(|cell| cell.trim().to_owned()).collect());
    }
    rows
}

/// Removes escape sequences (colors and links).
pub(crate) fn without_escapes(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text;
    while let Some(at) = rest.find('\u{1b}') {
        plain.push_str(&rest[..at]);
        let escape = &rest[at + 1..];
        let end = match escape.as_bytes().first() {
            Some(b']') => escape.find("\u{1b}\\").map_or(escape.len(), |end| end + 2),
            Some(b'[') => {
                let last = |c: char| c.is_ascii_alphabetic();
                escape.find(last).map_or(escape.len(), |end| end + 1)
            }
            _ => 1.min(escape.len()),
        };
        rest = &escape[end..];
    }
    plain + rest
}

/// Checks that `ours` contains every key and value of `theirs`. Timestamps are compared as instants.
///
/// # Errors
/// Describes the first difference.
pub(crate) fn contains_all(ours: &Value, theirs: &Value, work: &Path) -> Result<(), String> {
    match (ours, theirs) {
        (Value::Object(ours), Value::Object(theirs)) => {
            for (key, value) in theirs {
                let own = ours.get(key).ok_or_else(|| format!("{key} is missing"))?;
                contains_all(own, value, work)
                    .map_err(|difference| format!("{key}: {difference}"))?;
            }
            Ok(())
        }
        (Value::Array(ours), Value::Array(theirs)) if ours.len() == theirs.len() => {
            ours.iter().zip(theirs).try_for_each(|(ours, theirs)| contains_all(ours, theirs, work))
        }
        (Value::String(own), Value::String(their)) => {
            let instants = (own.parse::<Timestamp>(), their.parse::<Timestamp>());
            let same = match instants {
                (Ok(own), Ok(their)) => own.unix_micros() == their.unix_micros(),
                _ => own.replace(work.to_str().unwrap(), "/home/me") == *their,
            };
            if same { Ok(()) } else { Err(format!("expected {their:?}, got {own:?}")) }
        }
        (ours, theirs) if ours == theirs => Ok(()),
        (ours, theirs) => Err(format!("expected {theirs}, got {ours}")),
    }
}
