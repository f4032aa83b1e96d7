//! [`PollFailures`]: decides after each failed poll whether and when to poll again.
//!
//! `backoff` and `bad_requests` are fields of [`PollFailures`]. A row with a condition on a status
//! takes precedence over the row of that status without a condition.
//!
//! | Failed poll | Next poll | `backoff` | New `bad_requests` |
//! |---|---|---|---|
//! | 408: the result is not ready | at the poll interval | reset | 0 if its body has a queue state |
//! | 500 to 599 | at the poll interval | reset | unchanged |
//! | 400, at most three times | at once | reset | + 1 |
//! | 400 with a body, if the policy does not [retry rejected polls](CallOptions::retry_rejected_polls) | none | | |
//! | 500, if the policy does not retry rejected polls | none | | |
//! | 429, or no response | after 1, 2, 4, … at most 30 seconds, and not before the `retry-after` of a 429 | next delay | unchanged |
//! | 402 | after the billing delay, while the account may be settled | unchanged | unchanged |
//! | 400, 429 or 500 to 599 with `x-should-retry: false` | none | | |
//! | any other, for example 410 (the result expired) | none | | |
//!
//! A result that reports a failure of category `server` is polled again at most three times, after
//! 1, 2 and 4 seconds, unless the request is a sample, which is resubmitted instead. The Python SDK
//! returns the failure at once.
//!
//! A successful response resets `backoff` and leaves `bad_requests` unchanged. Both fields change
//! as in the Python SDK, whose behaviour the fixture `future_retrieve.json` records.

use std::time::Duration;

use tinkex_backoff::Backoff;
use tinkex_wire::ErrorCategory;

use crate::error::Error;
use crate::transport::CallOptions;

/// Delays between polls while the server is unreachable or limits the rate.
const UNAVAILABLE_BACKOFF: Backoff =
    Backoff::new(Duration::from_secs(1)).cap(Duration::from_secs(30));
/// Delays before polls that follow a failure of category `server`.
const SERVER_FAILURE_BACKOFF: Backoff = Backoff::new(Duration::from_secs(1));
/// Maximum number of 400 responses after which polling continues. The next 400 ends polling.
pub(super) const MAX_BAD_REQUESTS: u32 = 3;
/// Maximum number of polls after failures of category `server`, and maximum number of resubmissions
/// of a sample after such failures. Without the limit, a request whose content makes the server
/// fail would be repeated for ever.
pub const MAX_SERVER_FAILURES: u32 = 3;

/// Returns whether a failed poll is a 400 with a body, which ends polling if the policy does not
/// [retry rejected polls](CallOptions::retry_rejected_polls). A 400 without a body comes from a
/// proxy, or from a server that does not know the request yet.
pub(super) fn is_rejected(error: &Error) -> bool {
    error.status() == Some(400) && error.body().is_some()
}

/// When to poll again after a failed poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NextPoll {
    /// After the delay of [`PollInterval`](super::poll_interval::PollInterval), which also applies
    /// while a result is not ready.
    AtInterval,
    /// Without a delay.
    AtOnce,
    /// After a delay: the server is unreachable or limits the rate.
    After(Duration),
    /// After the billing delay, until the server's maximum billing wait is over.
    AfterBillingDelay,
    /// Never: the server no longer has the result.
    Expired,
    /// Never: polling cannot resolve the failure.
    Never,
}

/// Counts the failed polls for one result.
#[derive(Debug)]
pub(super) struct PollFailures {
    /// Delay after a poll with a 429 or without a response. The delay doubles with each consecutive
    /// such poll: an overloaded or restarting server recovers faster if it receives fewer polls.
    ///
    /// A 2xx, 408, 5xx or 400 resets the backoff, because the server processed the poll: the server
    /// is reachable and accepts this rate. A 402 leaves the backoff unchanged: the billing wait has
    /// a delay of its own.
    backoff: Backoff,
    /// Number of 400 responses since the last 408 with a queue state. A server that does not know a
    /// new request yet responds with 400, so up to [`MAX_BAD_REQUESTS`] are retried. If more
    /// follow, the poll itself is invalid, and polling would never end.
    ///
    /// A queue state in a 408 resets the count: the server knows the request, so a later 400 has
    /// another cause. A 2xx with a queue state does not reset the count, as in the Python SDK, so
    /// that polling also ends if a server alternates between 2xx and 400.
    bad_requests: u32,
    /// Number of results that reported a failure of category `server`.
    server_failures: u32,
    /// Whether a 400 with a body, or a 500, ends polling.
    end_on_rejection: bool,
    options: CallOptions,
}

impl PollFailures {
    pub(super) fn new(options: &CallOptions) -> Self {
        Self {
            backoff: UNAVAILABLE_BACKOFF,
            bad_requests: 0,
            server_failures: 0,
            end_on_rejection: !options.retries_rejected_polls(),
            options: *options,
        }
    }

    /// Records that the server reports a failed request. Returns the delay before the next poll if
    /// the category of the failure is `server`: the server may recover, so a later poll may return
    /// the result.
    pub(super) fn record_failed_request(&mut self, error: &Error) -> Option<Duration> {
        if error.category() != Some(ErrorCategory::Server)
            || self.server_failures >= MAX_SERVER_FAILURES
        {
            return None;
        }
        self.server_failures += 1;
        Some(SERVER_FAILURE_BACKOFF.delay(self.server_failures - 1, 0.0))
    }

    /// Records a successful response.
    pub(super) fn record_success(&mut self) {
        self.backoff.reset();
    }

    /// Records a failed poll and returns when to poll again.
    pub(super) fn record(&mut self, error: &Error) -> NextPoll {
        match error.status() {
            // The server declined retries. A 408 is not a failure: the result is not ready.
            Some(400 | 429 | 500..600) if error.declines_retries() => NextPoll::Never,
            _ if self.end_on_rejection && is_rejected(error) => NextPoll::Never,
            Some(500) if self.end_on_rejection => NextPoll::Never,
            Some(408) => {
                self.backoff.reset();
                // The body of a 408 is the queue state.
                if error.body().is_some() {
                    self.bad_requests = 0;
                }
                NextPoll::AtInterval
            }
            Some(500..600) => {
                self.backoff.reset();
                NextPoll::AtInterval
            }
            Some(400) if self.bad_requests < MAX_BAD_REQUESTS => {
                self.backoff.reset();
                self.bad_requests += 1;
                NextPoll::AtOnce
            }
            Some(402) => NextPoll::AfterBillingDelay,
            Some(410) => NextPoll::Expired,
            Some(429) => self.back_off(self.options.honoured_retry_after(error)),
            None if error.is_retryable() => self.back_off(None),
            _ => NextPoll::Never,
        }
    }

    /// Returns the next delay, or `retry_after` if it is longer.
    fn back_off(&mut self, retry_after: Option<Duration>) -> NextPoll {
        let delay = self.backoff.next_delay();
        NextPoll::After(delay.max(retry_after.unwrap_or_default()))
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
        let mut failures = PollFailures::new(&CallOptions::new());
        let lost = Error::new(ErrorKind::Connect, "lost");
        for delay in [1, 2, 4, 8, 16, 30, 30] {
            assert_eq!(failures.record(&lost), seconds(delay));
        }
        assert_eq!(failures.record(&status(402, "")), NextPoll::AfterBillingDelay);
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
        let mut failures = PollFailures::new(&CallOptions::new().retry_rejected_polls(false));
        assert_eq!(failures.record(&status(400, "")), NextPoll::AtOnce, "an empty 400");
        assert_eq!(failures.record(&status(400, "{}")), NextPoll::Never);
        assert_eq!(failures.record(&status(503, "{}")), NextPoll::AtInterval);
        assert_eq!(failures.record(&status(500, "")), NextPoll::Never);
        let mut failures = PollFailures::new(&CallOptions::new());
        assert_eq!(failures.record(&status(400, "{}")), NextPoll::AtOnce);
        assert_eq!(failures.record(&status(500, "")), NextPoll::AtInterval);
    }

    #[test]
    fn a_poll_waits_for_the_retry_after_of_a_429() {
        let limited = Error::from_response(429, b"", Some(Duration::from_secs(90)));
        let mut failures = PollFailures::new(&CallOptions::new());
        assert_eq!(failures.record(&limited), seconds(90));
        assert_eq!(failures.record(&status(429, "")), seconds(2), "the next delay of the backoff");
        let python = CallOptions::new().ignore_long_retry_after(true);
        assert_eq!(PollFailures::new(&python).record(&limited), seconds(1));
    }

    #[test]
    fn a_declined_poll_is_not_repeated() {
        for code in [400, 429, 500, 503] {
            let declined = status(code, "").not_retryable();
            assert_eq!(
                PollFailures::new(&CallOptions::new()).record(&declined),
                NextPoll::Never,
                "{code}"
            );
        }
        let pending = status(408, "").not_retryable();
        assert_eq!(PollFailures::new(&CallOptions::new()).record(&pending), NextPoll::AtInterval);
    }

    #[test]
    fn bad_requests_are_counted_until_the_server_reports_the_queue_state() {
        let mut failures = PollFailures::new(&CallOptions::new());
        let invalid = status(400, "{}");
        let pending = status(408, r#"{"queue_state":"active"}"#);
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
