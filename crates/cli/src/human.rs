//! How sizes, times and the like are written for people.

use tinkex::Timestamp;

const MISSING: &str = "N/A";
const MINUTE: i64 = 60;
const HOUR: i64 = 3600;
const DAY: i64 = 86_400;

/// A size in bytes, in steps of 1024.
pub(crate) fn size(bytes: u64) -> String {
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    #[expect(clippy::cast_precision_loss, reason = "one decimal is shown")]
    let mut amount = bytes as f64 / 1024.0;
    let mut units = ["KB", "MB", "GB", "TB", "PB", "EB"].into_iter();
    let mut unit = units.next().unwrap_or_default();
    while amount >= 1024.0 {
        let Some(next) = units.next() else { break };
        (amount, unit) = (amount / 1024.0, next);
    }
    format!("{amount:.1} {unit}")
}

/// A size that may be unknown.
pub(crate) fn maybe_size(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| MISSING.to_owned(), size)
}

/// Yes or no.
pub(crate) fn yes(value: bool) -> &'static str {
    if value { "Yes" } else { "No" }
}

/// Yes, no, or unknown.
pub(crate) fn maybe_yes(value: Option<bool>) -> &'static str {
    value.map_or(MISSING, yes)
}

/// Anything that may be unknown.
pub(crate) fn or_missing(value: Option<impl ToString>) -> String {
    value.map_or_else(|| MISSING.to_owned(), |value| value.to_string())
}

/// A time as seen from another: in words if it is near, as a date if it is not.
pub(crate) fn time(time: Timestamp, now: Timestamp) -> String {
    let distance = now.unix_micros() - time.unix_micros();
    let seconds = distance.abs() / 1_000_000;
    let days = seconds / DAY;
    if days > 30 {
        return date(time);
    }
    let count = |number: i64, unit: &str| {
        let plural = if number == 1 { "" } else { "s" };
        if distance < 0 {
            format!("in {number} {unit}{plural}")
        } else {
            format!("{number} {unit}{plural} ago")
        }
    };
    match seconds {
        _ if days > 7 => count(days / 7, "week"),
        _ if days > 0 => count(days, "day"),
        _ if seconds > HOUR => count(seconds / HOUR, "hour"),
        _ if seconds > MINUTE => count(seconds / MINUTE, "minute"),
        _ if distance < 0 => "in less than a minute".to_owned(),
        _ => "just now".to_owned(),
    }
}

/// When something ends, if it does.
pub(crate) fn expiry(time_of_end: Option<Timestamp>, now: Timestamp) -> String {
    time_of_end.map_or_else(|| "Never".to_owned(), |end| time(end, now))
}

/// The day, in UTC.
pub(crate) fn date(time: Timestamp) -> String {
    let utc = Timestamp::from_unix_micros(time.unix_micros()).unwrap_or(time);
    utc.to_string().split('T').next().unwrap_or_default().to_owned()
}

/// A number in its shortest form: `0.4`, `5.0`, `1.4e-06`.
pub(crate) fn number(value: f64) -> String {
    let magnitude = value.abs();
    if magnitude == 0.0 || (1e-4..1e16).contains(&magnitude) || !value.is_finite() {
        return format!("{value:?}");
    }
    let text = format!("{value:e}");
    let Some((digits, exponent)) = text.split_once('e') else { return text };
    let (sign, exponent) = match exponent.strip_prefix('-') {
        Some(exponent) => ('-', exponent),
        None => ('+', exponent),
    };
    format!("{digits}e{sign}{exponent:0>2}")
}

/// Text from elsewhere, with what would move the cursor or change colours written out.
pub(crate) fn visible(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for letter in text.chars() {
        if letter.is_control() {
            shown.extend(letter.escape_default());
        } else {
            shown.push(letter);
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn vectors() -> Value {
        serde_json::from_str(include_str!("../../../fixtures/cli/formatting.json")).unwrap()
    }

    #[test]
    fn times_read_as_in_the_reference() {
        let vectors = vectors();
        let now = vectors["now"].as_str().unwrap().parse().unwrap();
        for case in vectors["timestamps"].as_array().unwrap() {
            let Some(at) = case["time"].as_str() else {
                assert_eq!(case["text"], MISSING);
                continue;
            };
            assert_eq!(case["text"], time(at.parse().unwrap(), now), "{case}");
        }
    }

    #[test]
    fn sizes_and_answers_read_as_in_the_reference() {
        let vectors = vectors();
        for case in vectors["sizes"].as_array().unwrap() {
            // There are no sizes below nothing here.
            let Some(bytes) = case["bytes"].as_u64() else { continue };
            assert_eq!(case["text"], size(bytes), "{case}");
        }
        for case in vectors["booleans"].as_array().unwrap() {
            assert_eq!(case["text"], maybe_yes(case["value"].as_bool()), "{case}");
        }
    }

    #[test]
    fn numbers_are_short_and_keep_their_value() {
        for (value, text) in
            [(0.4, "0.4"), (5.0, "5.0"), (1.4e-6, "1.4e-06"), (0.00096, "0.00096"), (1e16, "1e+16")]
        {
            assert_eq!(number(value), text);
        }
    }

    #[test]
    fn foreign_text_cannot_move_the_cursor() {
        assert_eq!(visible("a\u{1b}[2Jb\nc é 日本"), "a\\u{1b}[2Jb\\nc é 日本");
    }
}
