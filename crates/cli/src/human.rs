//! How sizes, times and the like are written for people.

use tinkex::Timestamp;

const MISSING: &str = "N/A";
const MINUTE: i64 = 60;
const HOUR: i64 = 3600;
const DAY: i64 = 86_400;

/// Yes or no.
pub(crate) fn yes(value: bool) -> &'static str {
    if value { "Yes" } else { "No" }
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

/// The day, in UTC.
pub(crate) fn date(time: Timestamp) -> String {
    let utc = Timestamp::from_unix_micros(time.unix_micros()).unwrap_or(time);
    utc.to_string().split('T').next().unwrap_or_default().to_owned()
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
    fn foreign_text_cannot_move_the_cursor() {
        assert_eq!(visible("a\u{1b}[2Jb\nc é 日本"), "a\\u{1b}[2Jb\\nc é 日本");
    }
}
