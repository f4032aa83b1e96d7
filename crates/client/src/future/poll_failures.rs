//! [`PollFailures`]: decides after each failed poll whether and when to poll again.
//!
//! The counters `backoffs` and `bad_requests` are fields of [`PollFailures`]. A row that restricts a
//! status takes precedence over the row of the status alone.
//!
//! | Failed poll | Next poll | New `backoffs` | New `bad_requests` |
//! |---|---|---|---|
//! | 408: the result is not ready | at the poll interval | 0 | 0 if its body has a queue state |
//! | 500 to 599 | at the poll interval | 0 | unchanged |
//! | 400, at most three times | at once | 0 | + 1 |
//! | 400 with a body, if the policy does not [retry rejected polls](RetryPolicy::retry_rejected_polls) | none | | |
//! | 500, if the policy does not retry rejected polls | none | | |
//! | 429, or no response | after 1, 2, 4, … at most 30 seconds | + 1 | unchanged |
//! | 402 | after the billing delay, while the account may be settled | unchanged | unchanged |
//! | 400, 429 or 500 to 599 with `x-should-retry: false` | none | | |
//! | any other, for example 410 (the result expired) | none | | |
//!
//! A result that reports a failure of category `server` is polled again at most three times, after
//! 1, 2 and 4 seconds, unless the request is a sample, which is resubmitted instead. The Python SDK
//! returns the failure at once.
//!
//! A successful response sets `backoffs` to 0 and leaves `bad_requests` unchanged. Both counters
//! change as in the Python SDK, which the fixture `future_retrieve.json` records.

use std::time::Duration;

use tinkex_wire::ErrorCategory;

use crate::error::Error;
use crate::transport::retry_policy::RetryPolicy;

/// Longest delay between polls while the server is unreachable or limits the rate.
const MAX_DELAY: Duration = Duration::from_secs(30);
/// Number of 400 responses that are retried. One more ends polling.
pub(super) const MAX_BAD_REQUESTS: u32 = 3;
/// Number of polls that follow a failure of category `server`, and of times that a sample is
/// resubmitted after one. A request whose content makes the server fail would otherwise be repeated
/// without end.
pub(crate) const MAX_SERVER_FAILURES: u32 = 3;

/// Returns whether a failed poll is a 400 with a body, which ends polling if the policy does not
/// [retry rejected polls](RetryPolicy::retry_rejected_polls). A 400 without a body comes from a proxy,
/// or from a server that does not know the request yet.
pub(super) fn is_rejected(error: &Error) -> bool {
    error.status() == Some(400) && error.body().is_some()
}

/// When to poll again after a failed poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NextPoll {
    /// At the interval that applies while a result is not ready.
    AtInterval,
    /// Without a delay.
    AtOnce,
    /// After a delay: the server is unreachable or limits the rate.
    After(Duration),
    /// After the billing delay, as long as the account may still be settled.
    WhenSettled,
    /// Never: the server no longer has the result.
    Expired,
    /// Never: polling cannot resolve the failure.
    Never,
}

/// Counts the failed polls for one result.
#[derive(Debug, Default)]
pub(super) struct PollFailures {
    /// Number of consecutive polls that got a 429 or no response. The delay doubles with each:
    /// an overloaded or restarting server recovers faster if it receives fewer polls.
    ///
    /// A 2xx, 408, 5xx or 400 resets it, because the server processed the poll: it is reachable and
    /// accepts this rate. A 402 leaves it unchanged: it has a delay of its own, and shows only that
    /// the account is not settled.
    backoffs: u32,
    /// Number of 400 responses since the last 408 with a queue state. A server that does not know a
    /// new request yet responds with 400, so a few are retried; if more follow, the poll itself is
    /// invalid and polling would never end.
    ///
    /// A queue state in a 408 resets it: the server knows the request, so a later 400 has another
    /// cause. A 2xx that reports the same does not reset it, as in the Python SDK: a server that
    /// alternates between 2xx and 400 is polled no longer than one that only responds with 400.
    bad_requests: u32,
    /// Number of results that reported a failure of category `server`.
    server_failures: u32,
    /// Whether a 400 with a body, or a 500, ends polling.
    reject_bad_requests: bool,
}

impl PollFailures {
    pub(super) fn new(policy: &RetryPolicy) -> Self {
        Self { reject_bad_requests: !policy.retries_rejected_polls(), ..Self::default() }
    }

    /// Records that the server reports a failed request. Returns the delay before the next poll if
    /// the server itself failed, which it may have recovered from.
    pub(super) fn record_failed_request(&mut self, error: &Error) -> Option<Duration> {
        if error.category() != Some(ErrorCategory::Server)
            || self.server_failures >= MAX_SERVER_FAILURES
        {
            return None;
        }
        self.server_failures += 1;
        Some(Duration::from_secs(1 << (self.server_failures - 1)))
    }

    /// Records a successful response.
    pub(super) fn record_success(&mut self) {
        self.backoffs = 0;
    }

    /// Records a failed poll and returns when to poll again.
    pub(super) fn record(&mut self, error: &Error) -> NextPoll {
        match error.status() {
            // The server declined retries. A 408 is not a failure: the result is not ready.
            Some(400 | 429 | 500..600) if error.declines_retries() => NextPoll::Never,
            _ if self.reject_bad_requests && is_rejected(error) => NextPoll::Never,
            Some(500) if self.reject_bad_requests => NextPoll::Never,
            Some(408) => {
                self.backoffs = 0;
                // The body of a 408 is the queue state.
                if error.body().is_some() {
                    self.bad_requests = 0;
                }
                NextPoll::AtInterval
            }
            Some(500..600) => {
                self.backoffs = 0;
                NextPoll::AtInterval
            }
            Some(400) if self.bad_requests < MAX_BAD_REQUESTS => {
                self.backoffs = 0;
                self.bad_requests += 1;
                NextPoll::AtOnce
            }
            Some(402) => NextPoll::WhenSettled,
            Some(410) => NextPoll::Expired,
            Some(429) => self.back_off(),
            None if error.is_retryable() => self.back_off(),
            _ => NextPoll::Never,
        }
    }

    fn back_off(&mut self) -> NextPoll {
        let doubled = Duration::from_secs(1 << self.backoffs.min(5));
        self.backoffs += 1;
        NextPoll::After(doubled.min(MAX_DELAY))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    fn status(status: u16, body: &str) -> Error {
        Error::from_response(status, body.as_bytes(), None)
    }

    fn seconds(seconds: u64) -> NextPoll {
        NextPoll::After(Duration::from_secs(seconds))
    }

    #[test]
    fn the_delay_doubles_until_the_server_processes_a_poll() {
        let mut failures = PollFailures::default();
        let lost = Error::new(ErrorKind::Connect, "lost");
        for delay in [1, 2, 4, 8, 16, 30, 30] {
            assert_eq!(failures.record(&lost), seconds(delay));
        }
        assert_eq!(failures.record(&status(402, "")), NextPoll::WhenSettled);
        assert_eq!(
            failures.record(&status(429, "")),
            seconds(30),
            "a 402 does not reset the delay"
        );
        for processed in [408, 500, 400] {
            failures.record(&status(processed, ""));
            assert_eq!(failures.record(&status(429, "")), seconds(1), "{processed}");
        }
        failures.record_success();
        assert_eq!(failures.record(&lost), seconds(1));
    }

    #[test]
    fn the_policy_may_end_polling_at_the_first_400_with_a_body() {
        let mut failures = PollFailures::new(&RetryPolicy::default().retry_rejected_polls(false));
        assert_eq!(failures.record(&status(400, "")), NextPoll::AtOnce, "an empty 400");
        assert_eq!(failures.record(&status(400, "{}")), NextPoll::Never);
        assert_eq!(failures.record(&status(503, "{}")), NextPoll::AtInterval);
        assert_eq!(failures.record(&status(500, "")), NextPoll::Never);
        let mut failures = PollFailures::new(&RetryPolicy::default());
        assert_eq!(failures.record(&status(400, "{}")), NextPoll::AtOnce);
        assert_eq!(failures.record(&status(500, "")), NextPoll::AtInterval);
    }

    #[test]
    fn a_declined_poll_is_not_repeated() {
        for code in [400, 429, 500, 503] {
            let declined = status(code, "").not_retryable();
            assert_eq!(PollFailures::default().record(&declined), NextPoll::Never, "{code}");
        }
        let pending = status(408, "").not_retryable();
        assert_eq!(PollFailures::default().record(&pending), NextPoll::AtInterval);
    }

    #[test]
    fn bad_requests_are_counted_until_the_server_reports_the_queue_state() {
        let mut failures = PollFailures::default();
        let (invalid, pending) = (status(400, "{}"), status(408, r#"{"queue_state":"active"}"#));
        for _ in 0..2 {
            for _ in 0..MAX_BAD_REQUESTS {
                assert_eq!(failures.record(&invalid), NextPoll::AtOnce);
                failures.record_success();
                failures.record(&status(408, ""));
            }
            assert_eq!(failures.record(&invalid), NextPoll::Never);
            failures.record(&pending);
        }
    }
}
