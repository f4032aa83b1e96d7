//! How long to wait before the same bytes are sent again.

use std::time::{Duration, SystemTime};

use http::HeaderMap;
use tinkex_wire::header;

/// The longest wait that a server may ask for.
const LONGEST_ASKED: Duration = Duration::from_secs(60);
const FIRST: f64 = 0.5;
const LONGEST: f64 = 10.0;
const JITTER: f64 = 0.25;

/// The wait before resend number `sent` (from 0): what the server asked for if that is sensible,
/// else twice as long each time, a little less by chance.
pub(crate) fn before_resend(sent: u32, asked: Option<f64>, chance: f64) -> Duration {
    if let Some(asked) = sensible(asked) {
        return asked;
    }
    let doubled = FIRST * 2_f64.powi(i32::try_from(sent.min(1000)).unwrap_or(1000));
    Duration::from_secs_f64(doubled.min(LONGEST) * (1.0 - JITTER * chance))
}

/// What the server asked for, if it is neither nothing nor too long.
pub(crate) fn sensible(asked: Option<f64>) -> Option<Duration> {
    asked_duration(asked).filter(|asked| *asked <= LONGEST_ASKED)
}

/// What the server asked for, in seconds: `retry-after-ms`, or `retry-after` as seconds or a date.
pub(crate) fn asked(headers: &HeaderMap, now: SystemTime) -> Option<f64> {
    let text = |name: &str| headers.get(name)?.to_str().ok().map(str::trim);
    let number = |name: &str| text(name)?.parse::<f64>().ok();
    if let Some(millis) = number(header::RETRY_AFTER_MS) {
        return Some(millis / 1000.0);
    }
    if let Some(seconds) = number(header::RETRY_AFTER) {
        return Some(seconds);
    }
    let date = httpdate::parse_http_date(text(header::RETRY_AFTER)?).ok()?;
    Some(match date.duration_since(now) {
        Ok(ahead) => ahead.as_secs_f64(),
        Err(behind) => -behind.duration().as_secs_f64(),
    })
}

/// The same as a duration, for errors: only what makes sense as one.
pub(crate) fn asked_duration(asked: Option<f64>) -> Option<Duration> {
    asked.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()).filter(|d| !d.is_zero())
}

/// Whether the server says to send again, whatever the status.
pub(crate) fn should_resend(headers: &HeaderMap) -> Option<bool> {
    let word = headers.get(header::SHOULD_RETRY)?.to_str().ok()?.trim().to_ascii_lowercase();
    match &*word {
        "true" => Some(true),
        "false" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use http::{HeaderName, HeaderValue};
    use serde_json::Value;

    use super::*;
    use crate::fixture;

    fn headers(of: &Value) -> HeaderMap {
        let pair = |(name, value): (&String, &Value)| {
            let name: HeaderName = name.to_lowercase().parse().unwrap();
            (name, HeaderValue::from_str(value.as_str().unwrap()).unwrap())
        };
        of.as_object().unwrap().iter().map(pair).collect()
    }

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-9
    }

    #[test]
    fn what_a_server_asks_for_is_read_in_every_form() {
        for case in fixture::cases("retry_after_parsing.json") {
            let now = UNIX_EPOCH + Duration::from_secs_f64(case["now_unix"].as_f64().unwrap());
            let asked = asked(&headers(&case["headers"]), now);
            match &case["seconds"] {
                Value::Null => assert_eq!(asked, None, "{case}"),
                Value::Number(seconds) => {
                    assert!(close(asked.unwrap(), seconds.as_f64().unwrap()), "{case}");
                }
                odd => {
                    assert!(!asked.unwrap().is_finite(), "{odd}");
                    assert_eq!(asked_duration(asked), None);
                }
            }
        }
    }

    #[test]
    fn waits_grow_and_what_was_asked_for_wins() {
        for case in fixture::cases("http_retry_delay.json") {
            let sent = u32::try_from(case["retries_taken"].as_u64().unwrap()).unwrap();
            let asked = asked(&headers(&case["headers"]), SystemTime::now());
            for (chance, key) in [
                (0.0, "delay_at_random_0"),
                (0.5, "delay_at_random_half"),
                (1.0, "delay_at_random_1"),
            ] {
                let wait = before_resend(sent, asked, chance).as_secs_f64();
                assert!(close(wait, case[key].as_f64().unwrap()), "{case}: {wait}");
            }
        }
    }
}
