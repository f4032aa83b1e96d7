//! Delays before retries.

use std::time::{Duration, SystemTime};

use http::HeaderMap;
use tinkex_backoff::{Backoff, Jitter};
use tinkex_wire::header;

use super::shared_backoff::LONG_RETRY_AFTER;

/// Delays between the retries of a round.
const RETRY_BACKOFF: Backoff = Backoff::new(Duration::from_millis(500))
    .cap(Duration::from_secs(10))
    .jitter(Jitter::Shorten(0.25));

/// What a call does about a `retry-after`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RetryAfterRule {
    /// Waits as long as the server asks, or fails if the limits do not allow it.
    Honour {
        /// Longest `retry-after` that the call waits for; unlimited if `None`.
        longest: Option<Duration>,
        /// Time after the start of the call at which the wait must be over; unlimited if `None`.
        until: Option<Duration>,
    },
    /// Ignores a `retry-after` above [`LONG_RETRY_AFTER`], as the Python SDK does.
    IgnoreLong,
}

impl RetryAfterRule {
    /// Returns the delay that the server asks for, unless the rule ignores it. `retry_after` is in
    /// seconds and may be negative or not finite.
    pub(crate) fn delay(self, retry_after: Option<f64>) -> Option<Duration> {
        let delay = to_duration(retry_after)?;
        match self {
            Self::Honour { .. } => Some(delay),
            Self::IgnoreLong => Some(delay).filter(|delay| *delay <= LONG_RETRY_AFTER),
        }
    }

    /// Returns whether a call that started `elapsed` ago may wait for `delay`.
    pub(crate) fn allows(self, delay: Duration, elapsed: Duration) -> bool {
        let (longest, until) = match self {
            Self::Honour { longest, until } => (longest, until),
            Self::IgnoreLong => (None, None),
        };
        let end = elapsed.saturating_add(delay);
        longest.is_none_or(|longest| delay <= longest) && until.is_none_or(|until| end <= until)
    }
}

/// Returns the delay before retry number `retry` (from 0): `retry_after` if the server asks for a
/// delay, else an exponential delay with jitter. `random` is a number from 0 to 1.
pub(crate) fn before_retry(retry: u32, retry_after: Option<Duration>, random: f64) -> Duration {
    retry_after.unwrap_or_else(|| RETRY_BACKOFF.delay(retry, random))
}

/// Returns the delay that the server requests, in seconds, from `retry-after-ms`, or from
/// `retry-after` as seconds or as a date. The value may be negative or not finite.
pub(crate) fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<f64> {
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

/// Converts seconds to a duration, if they are positive and finite.
pub(crate) fn to_duration(retry_after: Option<f64>) -> Option<Duration> {
    retry_after
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .filter(|d| !d.is_zero())
}

/// Returns the server's `x-should-retry` override, if present.
pub(crate) fn should_retry(headers: &HeaderMap) -> Option<bool> {
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

    fn headers(pairs: &Value) -> HeaderMap {
        let pair = |(name, value): (&String, &Value)| {
            let name: HeaderName = name.to_lowercase().parse().unwrap();
            (name, HeaderValue::from_str(value.as_str().unwrap()).unwrap())
        };
        pairs.as_object().unwrap().iter().map(pair).collect()
    }

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-9
    }

    #[test]
    fn retry_after_is_read_in_every_form() {
        for case in fixture::cases("retry_after_parsing.json") {
            let now = UNIX_EPOCH + Duration::from_secs_f64(case["now_unix"].as_f64().unwrap());
            let seconds = retry_after(&headers(&case["headers"]), now);
            match &case["seconds"] {
                Value::Null => assert_eq!(seconds, None, "{case}"),
                Value::Number(expected) => {
                    assert!(close(seconds.unwrap(), expected.as_f64().unwrap()), "{case}");
                }
                not_finite => {
                    assert!(!seconds.unwrap().is_finite(), "{not_finite}");
                    assert_eq!(to_duration(seconds), None);
                }
            }
        }
    }

    #[test]
    fn with_the_python_rule_delays_equal_those_of_the_python_sdk() {
        for case in fixture::cases("http_retry_delay.json") {
            let retry = u32::try_from(case["retries_taken"].as_u64().unwrap()).unwrap();
            let seconds = retry_after(&headers(&case["headers"]), SystemTime::now());
            let seconds = RetryAfterRule::IgnoreLong.delay(seconds);
            for (random, key) in [
                (0.0, "delay_at_random_0"),
                (0.5, "delay_at_random_half"),
                (1.0, "delay_at_random_1"),
            ] {
                let delay = before_retry(retry, seconds, random).as_secs_f64();
                assert!(close(delay, case[key].as_f64().unwrap()), "{case}: {delay}");
            }
        }
    }
}
