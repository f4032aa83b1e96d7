//! Decides whether and when a failed sample is submitted again under a new sequence number.

use std::time::Duration;

use serde_json::json;
use tinkex_wire::JsonObject;

use crate::error::{Error, ErrorKind};

/// Telemetry event of a failed sample. The name is the Python SDK's.
pub(super) const SAMPLE_FAILED: &str = "RetryHandler.execute.exception";

/// Delay before the first resubmission, in seconds. It doubles with every attempt.
const BASE_DELAY: f64 = 0.5;
/// Maximum delay in seconds.
const MAX_DELAY: f64 = 10.0;
/// Fraction by which a delay varies at random, in both directions.
const JITTER: f64 = 0.25;

/// Returns the delay before resubmission number `attempt`, counted from 0. `random` is in 0..1.
pub(super) fn delay(attempt: u32, random: f64) -> Duration {
    let doubled = BASE_DELAY * 2_f64.powi(i32::try_from(attempt.min(1000)).unwrap_or(1000));
    let delay = doubled.min(MAX_DELAY) * (1.0 + JITTER * (2.0 * random - 1.0));
    Duration::from_secs_f64(delay.clamp(0.0, MAX_DELAY))
}

/// Returns whether submitting the sample again may succeed: after a transient failure, or if the
/// result expired on the server before it was fetched.
pub(crate) fn is_resubmittable(error: &Error) -> bool {
    error.kind() == ErrorKind::Expired
        || (error.kind() != ErrorKind::WorkFailed && error.is_retryable())
}

/// Returns the attributes of the telemetry event [`SAMPLE_FAILED`].
pub(super) fn event_attributes(resubmit: bool, attempt: u32) -> JsonObject {
    let attributes = [("should_retry", json!(resubmit)), ("attempt_count", json!(attempt + 1))];
    attributes.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;

    /// Covers AUD.4.
    #[test]
    fn delays_equal_those_of_the_python_sdk() {
        for case in fixture::cases("retry_handler_delay.json") {
            if case["config"].as_object().is_some_and(|config| !config.is_empty()) {
                // The base delay and the jitter are not configurable here.
                continue;
            }
            let attempt = u32::try_from(case["attempt"].as_u64().unwrap()).unwrap();
            for (random, key) in [
                (0.0, "delay_at_random_0"),
                (0.5, "delay_at_random_half"),
                (1.0, "delay_at_random_1"),
            ] {
                let actual = delay(attempt, random).as_secs_f64();
                assert!((actual - case[key].as_f64().unwrap()).abs() < 1e-9, "{case}");
            }
        }
    }

    #[test]
    fn only_transient_failures_and_expired_results_are_resubmitted() {
        for status in [408, 409, 429, 500, 503] {
            assert!(is_resubmittable(&Error::from_response(status, b"", None)), "{status}");
        }
        for status in [400, 401, 404, 410, 422] {
            assert!(!is_resubmittable(&Error::from_response(status, b"", None)), "{status}");
        }
        assert!(is_resubmittable(&Error::from_response(410, b"", None).expired()));
        assert!(is_resubmittable(&crate::HttpFailure::timeout("t").into()));
        let failed = tinkex_wire::RequestFailed::new("x", tinkex_wire::ErrorCategory::Server);
        assert!(!is_resubmittable(&Error::from_failed_request(failed)));
    }
}
