//! Formatting of sizes, times, numbers and untrusted text for tables and messages.

use std::fmt;

use tinkex::Timestamp;

const NOT_AVAILABLE: &str = "N/A";
const MINUTE: i64 = 60;
const HOUR: i64 = 3600;
const DAY: i64 = 86_400;

/// Returns whether a cell says that there is no value.
pub(crate) fn is_placeholder(text: &str) -> bool {
    matches!(text, NOT_AVAILABLE | "None" | "Never")
}

pub(crate) fn yes_no(value: bool) -> &'static str {
    if value { "Yes" } else { "No" }
}

/// Returns a count with its noun, in the plural unless the count is 1.
pub(crate) fn count<N: Copy + fmt::Display + PartialEq + From<u8>>(
    number: N,
    noun: &str,
) -> String {
    let ending = if number == N::from(1) { "" } else { "s" };
    format!("{number} {noun}{ending}")
}

/// Formats a number of bytes in units of powers of 1024, with one decimal from 1 KB on. A negative
/// number is `N/A`, as in the Python CLI.
pub(crate) fn size(bytes: i64) -> String {
    const UNITS: [&str; 6] = ["KB", "MB", "GB", "TB", "PB", "EB"];
    if bytes < 0 {
        return NOT_AVAILABLE.to_owned();
    }
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    #[expect(clippy::cast_precision_loss, reason = "one decimal is shown")]
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// Formats an unsigned number of bytes as [`size`] does.
pub(crate) fn bytes(bytes: u64) -> String {
    size(i64::try_from(bytes).unwrap_or(i64::MAX))
}

/// Returns a number in Python's notation: the shortest text that parses to the same value.
pub(crate) fn float(value: f64) -> String {
    let scientific = format!("{value:e}");
    match scientific.split_once('e') {
        Some((digits, exponent)) if value != 0.0 => match exponent.parse::<i32>() {
            Ok(-4..16) | Err(_) => format!("{value:?}"),
            Ok(exponent) => {
                let sign = if exponent < 0 { '-' } else { '+' };
                format!("{digits}e{sign}{:02}", exponent.abs())
            }
        },
        _ => format!("{value:?}"),
    }
}

/// Describes whether a model is a LoRA adapter, with its rank if known: `Yes (Rank 32)`, `Yes`, `No`.
pub(crate) fn lora(is_lora: bool, rank: Option<u32>) -> String {
    match rank.filter(|rank| is_lora && *rank > 0) {
        Some(rank) => format!("Yes (Rank {rank})"),
        None => yes_no(is_lora).to_owned(),
    }
}

/// Formats a number of seconds in the largest unit that divides it: `2 days`, `90 seconds`.
pub(crate) fn duration_in_words(seconds: u64) -> String {
    let units = [(86_400, "day"), (3600, "hour"), (60, "minute"), (1, "second")];
    let whole = units.iter().find(|(unit, _)| seconds.is_multiple_of(*unit) && seconds >= *unit);
    let (number, word) = whole.map_or((seconds, "second"), |(unit, word)| (seconds / unit, *word));
    count(number, word)
}

/// Formats a number of seconds in short form: `9s`, `2m05s`, `1h30m`.
pub(crate) fn short_duration(seconds: f64) -> String {
    #[expect(clippy::cast_possible_truncation, reason = "the cast saturates")]
    let whole = seconds.max(0.0).round() as i64;
    match whole {
        0..MINUTE => format!("{whole}s"),
        MINUTE..HOUR => format!("{}m{:02}s", whole / MINUTE, whole % MINUTE),
        _ => format!("{}h{:02}m", whole / HOUR, whole % HOUR / MINUTE),
    }
}

/// Returns the value as text, or `N/A`.
pub(crate) fn or_na(value: Option<impl ToString>) -> String {
    value.map_or_else(|| NOT_AVAILABLE.to_owned(), |value| value.to_string())
}

/// Returns a time relative to `now` (`3 hours ago`), or its date if more than 30 days away.
pub(crate) fn relative_time(time: Timestamp, now: Timestamp) -> String {
    let distance = now.unix_micros() - time.unix_micros();
    let seconds = distance.abs() / 1_000_000;
    let days = seconds / DAY;
    if days > 30 {
        return date(time);
    }
    let relative = |number: i64, unit: &str| match distance {
        ..0 => format!("in {}", count(number, unit)),
        _ => format!("{} ago", count(number, unit)),
    };
    match seconds {
        _ if days > 7 => relative(days / 7, "week"),
        _ if days > 0 => relative(days, "day"),
        _ if seconds > HOUR => relative(seconds / HOUR, "hour"),
        _ if seconds > MINUTE => relative(seconds / MINUTE, "minute"),
        _ if distance < 0 => "in less than a minute".to_owned(),
        _ => "just now".to_owned(),
    }
}

/// Returns the date in UTC as `YYYY-MM-DD`.
pub(crate) fn date(time: Timestamp) -> String {
    let utc = Timestamp::from_unix_micros(time.unix_micros()).unwrap_or(time);
    utc.to_string().split('T').next().unwrap_or_default().to_owned()
}

/// Returns whether a character controls the terminal instead of being shown: control characters,
/// which can move the cursor and change colors, and the characters that reorder or break the text
/// around them (bidirectional controls, line and paragraph separators).
pub(crate) fn is_terminal_control(letter: char) -> bool {
    letter.is_control()
        || matches!(
            letter,
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
        )
}

/// Escapes the [terminal controls](is_terminal_control) of text from a server, a model or a file.
pub(crate) fn escape_controls(text: &str) -> String {
    escape_controls_except(text, |_| false)
}

/// Escapes terminal controls as [`escape_controls`] does, except line breaks and tabs.
pub(crate) fn escape_controls_in_lines(text: &str) -> String {
    escape_controls_except(text, |letter| matches!(letter, '\n' | '\t'))
}

/// Escapes terminal controls, except the characters that `keep` selects.
pub(crate) fn escape_controls_except(text: &str, keep: impl Fn(char) -> bool) -> String {
    let mut shown = String::with_capacity(text.len());
    for letter in text.chars() {
        if is_terminal_control(letter) && !keep(letter) {
            shown.extend(letter.escape_default());
        } else {
            shown.push(letter);
        }
    }
    shown
}

/// Escapes the terminal controls that encoders of JSON leave in strings. The document has the same
/// meaning.
pub(crate) fn escape_controls_in_json(json: &str) -> String {
    let mut shown = String::with_capacity(json.len());
    for letter in json.chars() {
        // The encoder has escaped the other control characters. All terminal controls are in the
        // first plane of Unicode, and need one escape.
        if is_terminal_control(letter) && !matches!(letter, '\n' | '\t') {
            shown.push_str(&format!("\\u{:04x}", u32::from(letter)));
        } else {
            shown.push(letter);
        }
    }
    shown
}

/// Quotes an argument for a POSIX shell, if it needs quotes.
pub(crate) fn shell_quote(text: &str) -> String {
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "/._-:@%+=,".contains(letter);
    if !text.is_empty() && text.chars().all(plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn vectors() -> Value {
        serde_json::from_str(include_str!("../../../fixtures/cli/formatting.json")).unwrap()
    }

    #[test]
    fn times_match_the_reference() {
        let vectors = vectors();
        let now = vectors["now"].as_str().unwrap().parse().unwrap();
        for case in vectors["timestamps"].as_array().unwrap() {
            let Some(at) = case["time"].as_str() else {
                assert_eq!(case["text"], NOT_AVAILABLE);
                continue;
            };
            assert_eq!(case["text"], relative_time(at.parse().unwrap(), now), "{case}");
        }
    }

    #[test]
    fn sizes_match_the_reference() {
        for case in vectors()["sizes"].as_array().unwrap() {
            assert_eq!(case["text"], size(case["bytes"].as_i64().unwrap()), "{case}");
        }
    }

    #[test]
    fn numbers_and_durations_are_in_their_shortest_form() {
        for (value, text) in [
            (0.0, "0.0"),
            (5.0, "5.0"),
            (0.00096, "0.00096"),
            (1.4e-6, "1.4e-06"),
            (5e-5, "5e-05"),
            (1e16, "1e+16"),
            (123_456.75, "123456.75"),
            (-2.5e-7, "-2.5e-07"),
        ] {
            assert_eq!(float(value), text);
        }
        for (seconds, text) in [
            (1, "1 second"),
            (90, "90 seconds"),
            (3600, "1 hour"),
            (172_800, "2 days"),
            (0, "0 seconds"),
        ] {
            assert_eq!(duration_in_words(seconds), text);
        }
    }

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(escape_controls("a\u{1b}[2Jb\nc é 日本"), "a\\u{1b}[2Jb\\nc é 日本");
        assert_eq!(escape_controls_in_lines("a\u{1b}\n\tb\r"), "a\\u{1b}\n\tb\\r");
        // C1 controls, and characters that show other text in another order.
        let spoofed = "a\u{9b}2J \u{202e}txt.exe\u{202c} \u{2066}x\u{2069}\u{200f}\u{2028}";
        let escaped = escape_controls_in_lines(spoofed);
        assert_eq!(
            escaped,
            "a\\u{9b}2J \\u{202e}txt.exe\\u{202c} \\u{2066}x\\u{2069}\\u{200f}\\u{2028}"
        );
        assert_eq!(escape_controls_in_lines(&escaped), escaped, "escaping twice changes nothing");
        let json = serde_json::to_string_pretty(&serde_json::json!({ "a": spoofed })).unwrap();
        let safe = escape_controls_in_json(&json);
        assert!(!safe.chars().any(|c| is_terminal_control(c) && c != '\n'), "{safe}");
        let read: serde_json::Value = serde_json::from_str(&safe).unwrap();
        assert_eq!(read["a"], spoofed);
    }

    #[test]
    fn quoted_arguments_can_be_pasted_into_a_shell() {
        for (text, quoted) in [
            ("/a/b-c.d", "/a/b-c.d"),
            ("my run", "'my run'"),
            ("it's", "'it'\\''s'"),
            ("a;$(b)", "'a;$(b)'"),
            ("", "''"),
        ] {
            assert_eq!(shell_quote(text), quoted);
        }
    }
}
