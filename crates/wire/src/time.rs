//! [`Timestamp`]: a point in time in the formats of the API.
//!
//! The printed format is RFC 3339 with `Z` for UTC, and with microseconds only if they are not zero.
//! Offsets other than UTC are preserved, and a time without an offset is printed without one. Accepted
//! formats are RFC 3339 with `T` or a space, with an optional offset, seconds and fraction; a date; and
//! Unix seconds or milliseconds as a number. ADR 49 gives the reason for this implementation.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::InvalidInput;

const DAY: i64 = 86_400;
/// Maximum of Unix seconds. Larger numbers are milliseconds, as in the Python SDK.
const MAX_UNIX_SECONDS: f64 = 2e10;
/// Years that the four digits of the printed format can represent.
const YEARS: std::ops::RangeInclusive<i64> = 0..=9999;

/// A point in time with microsecond precision and an optional UTC offset.
///
/// ```
/// # use tinkex_wire as tinkex;
/// use tinkex::Timestamp;
///
/// let t: Timestamp = "2026-01-02T03:04:05.678901+02:00".parse()?;
/// assert_eq!(t.to_string(), "2026-01-02T03:04:05.678901+02:00");
/// assert_eq!(t.unix_micros(), 1_767_315_845_678_901);
/// assert_eq!("2026-01-02".parse::<Timestamp>()?.to_string(), "2026-01-02T00:00:00");
/// # Ok::<_, tinkex_wire::InvalidInput>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Timestamp {
    /// Microseconds since 1970-01-01T00:00:00 in local time, without the offset applied.
    local: i64,
    offset: UtcOffset,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum UtcOffset {
    /// The input had no offset.
    Unspecified,
    /// Minutes east of UTC.
    East(i16),
}

impl Timestamp {
    /// Returns the current time in UTC.
    #[must_use]
    pub fn now() -> Self {
        SystemTime::now().into()
    }

    /// Creates a UTC timestamp from microseconds since 1970-01-01T00:00:00Z.
    ///
    /// # Errors
    /// Returns an error if the year is not within 0 to 9999.
    pub fn from_unix_micros(micros: i64) -> Result<Self, InvalidInput> {
        let at = Self { local: micros, offset: UtcOffset::East(0) };
        let (year, ..) = at.date();
        if YEARS.contains(&year) { Ok(at) } else { Err(invalid(&micros.to_string())) }
    }

    /// Returns microseconds since 1970-01-01T00:00:00Z. A timestamp without an offset counts as UTC.
    #[must_use]
    pub fn unix_micros(self) -> i64 {
        match self.offset {
            UtcOffset::Unspecified => self.local,
            UtcOffset::East(minutes) => self.local - i64::from(minutes) * 60_000_000,
        }
    }

    /// Returns `true` if the timestamp has a UTC offset.
    #[must_use]
    pub fn has_offset(self) -> bool {
        self.offset != UtcOffset::Unspecified
    }

    /// Returns year, month (1 to 12) and day (1 to 31), at the offset of the timestamp.
    #[must_use]
    pub fn date(self) -> (i64, u8, u8) {
        civil_from_days(self.local.div_euclid(DAY * 1_000_000))
    }
}

impl From<SystemTime> for Timestamp {
    /// Clamps times outside the years 0 to 9999.
    fn from(time: SystemTime) -> Self {
        let micros = match time.duration_since(UNIX_EPOCH) {
            Ok(after) => i64::try_from(after.as_micros()).unwrap_or(i64::MAX),
            Err(before) => i64::try_from(before.duration().as_micros()).map_or(i64::MIN, |m| -m),
        };
        let first = days_from_civil(*YEARS.start(), 1, 1) * DAY * 1_000_000;
        let last = days_from_civil(*YEARS.end() + 1, 1, 1) * DAY * 1_000_000 - 1;
        Self { local: micros.clamp(first, last), offset: UtcOffset::East(0) }
    }
}

impl From<Timestamp> for SystemTime {
    /// Returns the Unix epoch if `SystemTime` cannot represent the time.
    fn from(time: Timestamp) -> Self {
        let micros = time.unix_micros();
        let distance = Duration::from_micros(micros.unsigned_abs());
        let time = if micros < 0 {
            UNIX_EPOCH.checked_sub(distance)
        } else {
            UNIX_EPOCH.checked_add(distance)
        };
        time.unwrap_or(UNIX_EPOCH)
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (year, month, day) = self.date();
        let time_of_day = self.local.rem_euclid(DAY * 1_000_000);
        let seconds = time_of_day / 1_000_000;
        let micros = time_of_day % 1_000_000;
        let h = seconds / 3600;
        let m = seconds / 60 % 60;
        let s = seconds % 60;
        write!(f, "{year:04}-{month:02}-{day:02}T{h:02}:{m:02}:{s:02}")?;
        if micros != 0 {
            write!(f, ".{micros:06}")?;
        }
        match self.offset {
            UtcOffset::Unspecified => Ok(()),
            UtcOffset::East(0) => f.write_str("Z"),
            UtcOffset::East(minutes) => {
                let sign = if minutes < 0 { '-' } else { '+' };
                let minutes = minutes.abs();
                write!(f, "{sign}{:02}:{:02}", minutes / 60, minutes % 60)
            }
        }
    }
}

impl FromStr for Timestamp {
    type Err = InvalidInput;

    fn from_str(text: &str) -> Result<Self, InvalidInput> {
        let trimmed = text.trim();
        if let Ok(number) = trimmed.parse::<f64>() {
            return from_unix(number);
        }
        parse(trimmed.as_bytes()).ok_or_else(|| invalid(text))
    }
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Timestamp {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;

        impl de::Visitor<'_> for Visitor {
            type Value = Timestamp;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an RFC 3339 timestamp or Unix seconds")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Timestamp, E> {
                text.parse().map_err(E::custom)
            }

            fn visit_f64<E: de::Error>(self, seconds: f64) -> Result<Timestamp, E> {
                from_unix(seconds).map_err(E::custom)
            }

            #[expect(
                clippy::cast_precision_loss,
                reason = "the year check rejects numbers beyond 2^53"
            )]
            fn visit_i64<E: de::Error>(self, seconds: i64) -> Result<Timestamp, E> {
                self.visit_f64(seconds as f64)
            }

            #[expect(
                clippy::cast_precision_loss,
                reason = "the year check rejects numbers beyond 2^53"
            )]
            fn visit_u64<E: de::Error>(self, seconds: u64) -> Result<Timestamp, E> {
                self.visit_f64(seconds as f64)
            }
        }

        deserializer.deserialize_any(Visitor)
    }
}

fn invalid(text: &str) -> InvalidInput {
    InvalidInput::new(
        "timestamp",
        format!("{text:?} is not a timestamp such as 2026-01-02T03:04:05Z"),
    )
}

#[expect(clippy::cast_possible_truncation, reason = "`as` saturates, and the year is checked")]
fn from_unix(number: f64) -> Result<Timestamp, InvalidInput> {
    let seconds = if number.abs() > MAX_UNIX_SECONDS { number / 1000.0 } else { number };
    if !seconds.is_finite() {
        return Err(invalid(&number.to_string()));
    }
    Timestamp::from_unix_micros((seconds * 1e6).round() as i64)
}

/// Parses `YYYY-MM-DD[(T| )HH:MM[:SS[.fraction]][offset]]`.
fn parse(text: &[u8]) -> Option<Timestamp> {
    let mut rest = text;
    let year = digits(&mut rest, 4)?;
    expect(&mut rest, b"-")?;
    let month = digits(&mut rest, 2)?;
    expect(&mut rest, b"-")?;
    let day = digits(&mut rest, 2)?;
    let month = u8::try_from(month).ok()?;
    let day = u8::try_from(day).ok()?;
    let days = days_from_civil(year, month, day);
    if civil_from_days(days) != (year, month, day) {
        return None;
    }
    let mut local = days * DAY * 1_000_000;
    if rest.is_empty() {
        return Some(Timestamp { local, offset: UtcOffset::Unspecified });
    }

    expect(&mut rest, b"Tt ")?;
    let hour = digits(&mut rest, 2).filter(|h| *h < 24)?;
    expect(&mut rest, b":")?;
    let minute = digits(&mut rest, 2).filter(|m| *m < 60)?;
    let mut second = 0;
    let mut micros = 0;
    if expect(&mut rest, b":").is_some() {
        second = digits(&mut rest, 2).filter(|s| *s < 60)?;
        if expect(&mut rest, b".,").is_some() {
            micros = fraction(&mut rest)?;
        }
    }
    local += (hour * 3600 + minute * 60 + second) * 1_000_000 + micros;
    Some(Timestamp { local, offset: offset(rest)? })
}

fn offset(mut rest: &[u8]) -> Option<UtcOffset> {
    let sign = match rest {
        [] => return Some(UtcOffset::Unspecified),
        b"Z" | b"z" => return Some(UtcOffset::East(0)),
        [b'+', ..] => 1,
        [b'-', ..] => -1,
        _ => return None,
    };
    rest = &rest[1..];
    let hours = digits(&mut rest, 2).filter(|h| *h < 24)?;
    let _ = expect(&mut rest, b":");
    let minutes = if rest.is_empty() { 0 } else { digits(&mut rest, 2).filter(|m| *m < 60)? };
    let east = i16::try_from(sign * (hours * 60 + minutes)).ok()?;
    rest.is_empty().then_some(UtcOffset::East(east))
}

fn expect(rest: &mut &[u8], any_of: &[u8]) -> Option<()> {
    let (first, tail) = rest.split_first()?;
    any_of.contains(first).then(|| *rest = tail)
}

fn digits(rest: &mut &[u8], count: usize) -> Option<i64> {
    let (number, tail) = rest.split_at_checked(count)?;
    *rest = tail;
    number.iter().try_fold(0, |n, d| d.is_ascii_digit().then(|| n * 10 + i64::from(d - b'0')))
}

/// Parses the fraction of a second as microseconds. Ignores further digits.
fn fraction(rest: &mut &[u8]) -> Option<i64> {
    let len = rest.iter().take_while(|d| d.is_ascii_digit()).count();
    let (number, tail) = rest.split_at(len);
    *rest = tail;
    let digits = number.iter().chain(std::iter::repeat(&b'0')).take(6);
    (len > 0).then(|| digits.fold(0, |n, d| n * 10 + i64::from(d - b'0')))
}

// Conversion between dates of the proleptic Gregorian calendar and days since 1970-01-01. Years start
// in March, so that the leap day is the last day of the year.

fn days_from_civil(year: i64, month: u8, day: u8) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let from_march = (i64::from(month) + 9) % 12;
    let day_of_year = (153 * from_march + 2) / 5 + i64::from(day) - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "1..=31")]
fn civil_from_days(days: i64) -> (i64, u8, u8) {
    let days = days + 719_468;
    let era = days.div_euclid(146_097);
    let day_of_era = days.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = era * 400 + year_of_era + i64::from(month <= 2);
    (year, month as u8, day as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> String {
        text.parse::<Timestamp>().map_or_else(|e| e.to_string(), |t| t.to_string())
    }

    #[test]
    fn all_formats_of_the_reference_are_parsed() {
        for (text, written) in [
            ("2026-01-02T03:04:05Z", "2026-01-02T03:04:05Z"),
            ("2026-01-02T03:04:05.678901Z", "2026-01-02T03:04:05.678901Z"),
            ("2026-01-02T03:04:05.5Z", "2026-01-02T03:04:05.500000Z"),
            ("2026-01-02T03:04:05.1234567Z", "2026-01-02T03:04:05.123456Z"),
            ("2026-01-02T03:04:05+00:00", "2026-01-02T03:04:05Z"),
            ("2026-01-02T03:04:05-0530", "2026-01-02T03:04:05-05:30"),
            ("2026-01-02 03:04:05", "2026-01-02T03:04:05"),
            ("2026-01-02", "2026-01-02T00:00:00"),
            ("1767323045", "2026-01-02T03:04:05Z"),
            ("1767323045000", "2026-01-02T03:04:05Z"),
            ("1767323045.25", "2026-01-02T03:04:05.250000Z"),
            ("1969-12-31T23:59:59Z", "1969-12-31T23:59:59Z"),
            ("2024-02-29T00:00:00Z", "2024-02-29T00:00:00Z"),
        ] {
            assert_eq!(read(text), written, "{text}");
        }
    }

    #[test]
    fn invalid_timestamps_are_rejected() {
        for text in [
            "",
            "now",
            "2026-13-01",
            "2026-02-29",
            "2026-01-02T24:00:00Z",
            "2026-01-02T03:04:05+",
            "2026-01-02T03:04:05Zx",
            "2026-01-02T03:04:05.Z",
            "nan",
            "inf",
            "1e300",
            "2026-1-2",
        ] {
            assert!(text.parse::<Timestamp>().is_err(), "{text}");
        }
    }

    #[test]
    fn calendar_conversions_are_inverse_over_800_years() {
        let mut previous = civil_from_days(-146_097);
        for days in -146_096..146_097 {
            let (y, m, d) = civil_from_days(days);
            assert_eq!(days_from_civil(y, m, d), days);
            assert!((y, m, d) > previous);
            previous = (y, m, d);
        }
    }

    #[test]
    fn system_time_round_trips() {
        for seconds in [0, 1, 1_767_323_045] {
            let time = UNIX_EPOCH + Duration::from_secs(seconds);
            assert_eq!(SystemTime::from(Timestamp::from(time)), time);
        }
        let before_epoch = UNIX_EPOCH - Duration::from_millis(1500);
        assert_eq!(SystemTime::from(Timestamp::from(before_epoch)), before_epoch);
        assert_eq!(Timestamp::from(before_epoch).to_string(), "1969-12-31T23:59:58.500000Z");
    }

    #[test]
    fn json_numbers_are_unix_seconds() {
        let t: Timestamp = serde_json::from_str("1767323045").unwrap();
        assert_eq!(t.to_string(), "2026-01-02T03:04:05Z");
        assert!(serde_json::from_str::<Timestamp>("1e30").is_err());
        assert!(serde_json::from_str::<Timestamp>("true").is_err());
    }
}
