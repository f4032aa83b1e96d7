//! Whether two outputs say the same.

use std::path::Path;

use serde_json::Value;
use tinkex::Timestamp;

/// Results as rows of cells, without what the reference writes around them: borders, progress,
/// questions and links.
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

/// Text without colours and links.
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

/// Whether `ours` has everything that `theirs` has, with the same values; times as moments.
pub(crate) fn has_all(ours: &Value, theirs: &Value, work: &Path) -> Result<(), String> {
    match (ours, theirs) {
        (Value::Object(ours), Value::Object(theirs)) => {
            for (key, value) in theirs {
                let own = ours.get(key).ok_or_else(|| format!("{key} is missing"))?;
                has_all(own, value, work).map_err(|why| format!("{key}: {why}"))?;
            }
            Ok(())
        }
        (Value::Array(ours), Value::Array(theirs)) if ours.len() == theirs.len() => {
            ours.iter().zip(theirs).try_for_each(|(ours, theirs)| has_all(ours, theirs, work))
        }
        (Value::String(own), Value::String(their)) => {
            let moments = (own.parse::<Timestamp>(), their.parse::<Timestamp>());
            let same = match moments {
                (Ok(own), Ok(their)) => own.unix_micros() == their.unix_micros(),
                _ => own.replace(work.to_str().unwrap(), "/home/me") == *their,
            };
            if same { Ok(()) } else { Err(format!("{own:?} is not {their:?}")) }
        }
        (ours, theirs) if ours == theirs => Ok(()),
        (ours, theirs) => Err(format!("{ours} is not {theirs}")),
    }
}
