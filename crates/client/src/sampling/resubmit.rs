//! Decides whether a failed sample is submitted again under a new sequence number.

use serde_json::json;
use tinkex_wire::{ErrorCategory, JsonObject};

use crate::error::{Error, ErrorKind};
use crate::future::MAX_SERVER_FAILURES;

/// Telemetry event of a failed sample. The Python SDK uses the same name.
pub(super) const SAMPLE_FAILED: &str = "RetryHandler.execute.exception";

/// Counts the failures of one sample.
#[derive(Debug, Default)]
pub(super) struct SampleFailures {
    /// Number of times the server executed the sample and failed.
    server_failures: u32,
}

impl SampleFailures {
    /// Records a failure and returns whether submitting the sample again may succeed: after a
    /// transient failure, if the result expired on the server before it was fetched, or, at most
    /// three times, if the server failed to execute the sample.
    pub(super) fn should_resubmit(&mut self, error: &Error) -> bool {
        if is_server_failure(error) {
            self.server_failures += 1;
            return self.server_failures <= MAX_SERVER_FAILURES;
        }
        is_resubmittable(error)
    }
}

/// Returns whether the server reports a failed request whose category is `server`.
fn is_server_failure(error: &Error) -> bool {
    error.kind() == ErrorKind::WorkFailed && error.category() == Some(ErrorCategory::Server)
}

/// Returns whether the Python SDK resubmits the sample: after a transient failure, or if the result
/// expired on the server before it was fetched.
fn is_resubmittable(error: &Error) -> bool {
    error.kind() == ErrorKind::Expired
        || (error.kind() != ErrorKind::WorkFailed && error.is_retryable())
}

/// Returns the attributes of the telemetry event [`SAMPLE_FAILED`]. `resubmissions` is the number
/// of resubmissions before this failure.
pub(super) fn event_attributes(resubmit: bool, resubmissions: u32) -> JsonObject {
    let count = resubmissions + 1;
    let attributes = [("should_retry", json!(resubmit)), ("attempt_count", json!(count))];
    attributes.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

#[cfg(test)]
mod tests {
    use tinkex_wire::RequestFailed;

    use super::*;
    use crate::fixture;
    use crate::transport::http::{HttpFailure, HttpFailureKind};

    #[test]
    fn transient_failures_and_expired_results_are_resubmitted() {
        for status in [408, 409, 429, 500, 503] {
            assert!(is_resubmittable(&Error::from_response(status, b"", None)), "{status}");
        }
        for status in [400, 401, 404, 410, 422] {
            assert!(!is_resubmittable(&Error::from_response(status, b"", None)), "{status}");
        }
        assert!(is_resubmittable(&Error::from_response(410, b"", None).expired()));
        assert!(is_resubmittable(&crate::HttpFailure::timeout("t").into()));
        let declined = Error::from_response(503, b"", None).not_retryable();
        assert!(!is_resubmittable(&declined), "the server declined retries");
    }

    #[test]
    fn errors_are_resubmitted_as_in_the_python_sdk() {
        let failure = |kind| Error::from(HttpFailure::new(kind, "scripted"));
        for case in fixture::cases("retry_classification.json") {
            let name = case["error"].as_str().unwrap();
            let error = match name {
                "timeout" | "api_timeout" | "transport_timeout" => {
                    failure(HttpFailureKind::Timeout)
                }
                "connection" => failure(HttpFailureKind::Connect),
                "generic_sdk_error" => Error::new(ErrorKind::Config, "scripted"),
                "promise_expired(410)" => Error::from_response(410, b"", None).expired(),
                failed if failed.starts_with("request_failed") => {
                    let category = failed.rsplit(['=', '_']).next().unwrap();
                    let category = ErrorCategory::from_name(category);
                    Error::from_failed_request(RequestFailed::new("", category))
                }
                // Other cases are exceptions that this client does not have.
                _ => match name.strip_prefix("status ") {
                    Some(status) => Error::from_response(status.parse().unwrap(), b"", None),
                    None => continue,
                },
            };
            let resubmitted = json!(is_resubmittable(&error));
            assert_eq!(resubmitted, case["sampling_handler_retryable"], "{case}");
        }
    }

    #[test]
    fn a_sample_that_the_server_failed_to_execute_is_resubmitted_three_times() {
        for (category, resubmissions) in
            [(ErrorCategory::Server, 3), (ErrorCategory::Unknown, 0), (ErrorCategory::User, 0)]
        {
            let error = Error::from_failed_request(RequestFailed::new("x", category));
            let mut failures = SampleFailures::default();
            let count = (0..10).take_while(|_| failures.should_resubmit(&error)).count();
            assert_eq!(count, resubmissions, "{category:?}");
        }
    }
}
