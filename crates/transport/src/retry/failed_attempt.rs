//! [`FailedAttempt`]: an error, and whether and when the server accepts another attempt.

use std::time::SystemTime;

use ::http::{HeaderMap, Response};

use super::delay;
use crate::error::{Error, is_retryable_status};
use crate::hint::Hint;

/// Failed attempt, with the retry headers of the server's response.
#[derive(Debug)]
pub struct FailedAttempt {
    /// What failed.
    pub error: Error,
    /// Delay that the server requested (`retry-after`), in seconds.
    pub(crate) retry_after: Option<f64>,
    /// The server's `x-should-retry` override, if present.
    pub(crate) should_retry: Option<bool>,
    /// Whether the failure is not temporary, even if the error is of a retryable kind.
    pub(crate) permanent: bool,
    /// Set if the server cannot be reached and has never responded: the connection is refused, or
    /// the name of the host is unknown.
    pub(crate) unreached: Option<Unreached>,
}

/// Address of a server that has never responded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unreached {
    /// An address of this machine.
    Loopback,
    /// Any other address.
    Remote,
}

impl FailedAttempt {
    /// Creates the failure for a response with an unexpected status.
    pub fn from_response(response: &Response<impl AsRef<[u8]>>) -> Self {
        Self::from_parts(response.status().as_u16(), response.headers(), response.body().as_ref())
    }

    /// Creates the failure for a response. `body` may be only the start of the body.
    pub fn from_parts(status: u16, headers: &HeaderMap, body: &[u8]) -> Self {
        let retry_after = delay::retry_after(headers, SystemTime::now());
        let mut error = Error::from_response(status, body, delay::to_duration(retry_after));
        let should_retry = delay::should_retry(headers);
        if should_retry == Some(false) {
            error = error.not_retryable();
        }
        Self { retry_after, should_retry, ..Self::from(error) }
    }

    /// Creates a failure that is not temporary, even if the error is of a retryable kind.
    pub(crate) fn permanent(error: Error) -> Self {
        Self { permanent: true, ..Self::from(error) }
    }

    /// Sets the advice of the error.
    #[must_use]
    pub fn with_hint(self, hint: impl Into<Hint>) -> Self {
        Self { error: self.error.with_hint(hint), ..self }
    }

    /// Returns whether no attempt may follow: the failure is not temporary, or the server declined
    /// retries with `x-should-retry: false`.
    pub fn is_final(&self) -> bool {
        self.permanent || self.should_retry == Some(false)
    }

    /// Returns whether the request may be retried in the same round. The header `x-should-retry`
    /// decides; without the header, the status decides; without a response, the kind of error.
    /// Unlike [`Error::is_retryable`], every status of 500 or more is retryable, as in the Python
    /// SDK.
    pub fn is_retryable(&self) -> bool {
        if self.permanent {
            return false;
        }
        self.should_retry.unwrap_or_else(|| match self.error.status() {
            Some(status) => is_retryable_status(status) || status >= 600,
            None => self.error.is_retryable(),
        })
    }
}

impl From<Error> for FailedAttempt {
    fn from(error: Error) -> Self {
        Self { error, retry_after: None, should_retry: None, permanent: false, unreached: None }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use serde_json::json;

    use super::*;
    use crate::fixture;

    #[test]
    fn the_server_may_demand_or_decline_a_retry() {
        for case in fixture::cases("should_retry.json") {
            let status = u16::try_from(case["status"].as_u64().unwrap()).unwrap();
            if status < 400 {
                // Successful responses are never failed attempts.
                continue;
            }
            for (key, expected) in case.as_object().unwrap() {
                let value = match key.as_str() {
                    "status" => continue,
                    "absent" => None,
                    other => other.strip_prefix("header="),
                };
                let mut response = Response::builder().status(status);
                if let Some(value) = value {
                    response = response.header("x-should-retry", value);
                }
                let failed = FailedAttempt::from_response(&response.body(Bytes::new()).unwrap());
                // Unlike the Python SDK, the client ignores the case of the value (D-05).
                let expected = if value == Some("TRUE") { &json!(true) } else { expected };
                assert_eq!(json!(failed.is_retryable()), *expected, "{status} {value:?}");
            }
        }
    }
}
