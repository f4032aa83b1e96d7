//! Decides what follows a failed attempt. Nothing here waits, sends or changes state;
//! [`RetryState`](super::retry::RetryState) carries the decision out.
//!
//! A *round* is a series of attempts with the same idempotency key. The first rule that covers the
//! failure decides:
//!
//! | Rule | Covers | Next attempt |
//! |---|---|---|
//! | final | [not temporary](FailedAttempt::is_final), or declined with `x-should-retry: false` | none |
//! | attempts | the call has no attempts left | none |
//! | user | a 402 if the policy does not wait for billing; a 409 or 501 if it has a time limit | none |
//! | retry | [retryable](FailedAttempt::is_retryable), and the round has retries left | same round, after [`delay::before_retry`] |
//! | billing | a 402, until the server's maximum wait is over | new round, 5 seconds later or after the shared backoff |
//! | rate limit | a 429 of a request that shares a [`Backoff`](super::backoff::Backoff) | new round, after the backoff |
//! | round | any other temporary failure, until five minutes after the request was started | new round, 1, 2, 4, … 30 seconds later |
//! | none | everything else | none |
//!
//! No new round follows if the protocol does not repeat rounds of the request. The time limit of
//! the policy, if set, ends the retry, rate limit and round rules: the request fails if the next
//! attempt would start later. If the server has never responded and cannot be reached, the shorter
//! time limit for the first contact applies.

use std::time::Duration;

use super::delay;
use super::failed_attempt::{FailedAttempt, FirstContact};
use super::request_policy::RequestPolicy;
use super::retry_policy::LOOPBACK_CONTACT_TIMEOUT;

/// Time after the start of a request during which new rounds are started.
const ROUNDS_TIMEOUT: Duration = Duration::from_secs(300);
/// Longest delay between two rounds.
const MAX_ROUND_DELAY: Duration = Duration::from_secs(30);

/// What follows a failed attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RetryDecision {
    /// The failure is temporary: repeat the request in the same round after `delay`.
    Retry { delay: Duration },
    /// The account is not settled: start a new round after
    /// [`billing::DELAY`](super::billing::DELAY).
    WaitForBilling,
    /// The server limits the rate, or the account of a request with a shared backoff is not
    /// settled: start the backoff, and a new round once it is over.
    BackOff,
    /// The round failed: start a new one after `delay`.
    NewRound { delay: Duration },
    /// No attempt follows.
    GiveUp(GiveUpReason),
}

/// Reason for not repeating a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GiveUpReason {
    /// The failure is not temporary, or the server declined retries.
    Final,
    /// The call has no attempts left.
    NoAttemptsLeft,
    /// Only the user can resolve the failure.
    NeedsUser,
    /// The retry would start after the time limit.
    RetryTooLate,
    /// The server limits the rate, and no attempt follows or the backoff ends after the time limit.
    RateLimited,
    /// The round failed, and the failure is not temporary, the policy allows no new round, or five
    /// minutes have passed since the request was started.
    NoFurtherRound,
    /// The next round would start after the time limit.
    RoundTooLate,
}

impl RetryDecision {
    /// Returns whether the shared backoff starts. It starts even if this request gives up: the
    /// server limits the rate of all requests that share it.
    pub(super) fn starts_backoff(self) -> bool {
        matches!(self, Self::BackOff | Self::GiveUp(GiveUpReason::RateLimited))
    }

    /// Returns whether the attempt was the last of a failed round, which telemetry reports. A round
    /// that waits for the account or for the shared backoff has not failed.
    pub(super) fn is_failed_round(self) -> bool {
        use GiveUpReason::{NeedsUser, RateLimited, RetryTooLate};
        match self {
            Self::NewRound { .. } => true,
            Self::GiveUp(reason) => !matches!(reason, NeedsUser | RateLimited | RetryTooLate),
            Self::Retry { .. } | Self::WaitForBilling | Self::BackOff => false,
        }
    }
}

/// A failed attempt, and everything else that the decision depends on.
pub(super) struct RetryContext<'a> {
    pub(super) policy: &'a RequestPolicy,
    pub(super) failed: &'a FailedAttempt,
    /// Number of retries so far in this round.
    pub(super) retry_count: u32,
    /// Number of failed rounds before this one.
    pub(super) failed_rounds: u32,
    /// Number of attempts of the call so far.
    pub(super) attempts: u32,
    /// Time since the request was started.
    pub(super) elapsed: Duration,
    /// Time since the call was started: longer than `elapsed` if the request resubmits a sample.
    pub(super) call_elapsed: Duration,
    /// Time until the end of the shared backoff if this failure starts it; `None` if the request
    /// shares none.
    pub(super) backoff: Option<Duration>,
    /// Random number from 0 to 1 for the jitter of a retry.
    pub(super) random: f64,
}

impl RetryContext<'_> {
    /// Applies the rules in the order of the table above.
    ///
    /// `should_wait_for_billing` returns whether the server's maximum wait for a 402 is not over
    /// yet. It is called only if the billing rule is reached with a 402: each call updates the
    /// billing incident that all requests share.
    pub(super) fn decide(&self, should_wait_for_billing: impl FnOnce() -> bool) -> RetryDecision {
        let limited = self.backoff.is_some() && self.failed.error.status() == Some(429);
        if self.failed.is_final() || self.attempts >= self.policy.max_attempts {
            // The failure of a token exchange says nothing about the requests that share a backoff.
            return RetryDecision::GiveUp(match self.failed.is_final() {
                _ if limited && !self.failed.permanent => GiveUpReason::RateLimited,
                true => GiveUpReason::Final,
                false => GiveUpReason::NoAttemptsLeft,
            });
        }
        if self.needs_user() {
            return RetryDecision::GiveUp(GiveUpReason::NeedsUser);
        }
        if self.retry_count < self.policy.max_retries && self.failed.is_retryable() {
            return self.retry();
        }
        let status = self.failed.error.status();
        if status == Some(402) && self.policy.repeat_rounds && should_wait_for_billing() {
            return match self.backoff {
                Some(_) => RetryDecision::BackOff,
                None => RetryDecision::WaitForBilling,
            };
        }
        match self.backoff {
            Some(backoff) if status == Some(429) => self.back_off(backoff),
            _ => self.new_round(),
        }
    }

    /// Returns whether only the user can resolve the failure, and the policy does not wait for the
    /// user.
    fn needs_user(&self) -> bool {
        match self.failed.error.status() {
            Some(402) => !self.policy.billing_wait,
            // A call with a time limit has a user who waits for its result. Repeating it changes
            // neither a conflict nor the endpoints of the server.
            Some(409 | 501) => self.policy.give_up_after.is_some(),
            _ => false,
        }
    }

    fn retry(&self) -> RetryDecision {
        let delay = delay::before_retry(self.retry_count, self.retry_after(), self.random);
        if self.exceeds_timeout(delay) {
            return RetryDecision::GiveUp(GiveUpReason::RetryTooLate);
        }
        RetryDecision::Retry { delay }
    }

    fn back_off(&self, backoff: Duration) -> RetryDecision {
        if !self.policy.repeat_rounds || self.exceeds_timeout(backoff) {
            return RetryDecision::GiveUp(GiveUpReason::RateLimited);
        }
        RetryDecision::BackOff
    }

    fn new_round(&self) -> RetryDecision {
        // As in the Python SDK, `x-should-retry: true` applies to retries only.
        let is_temporary = self.failed.error.is_retryable();
        if !self.policy.repeat_rounds || !is_temporary || self.elapsed >= ROUNDS_TIMEOUT {
            return RetryDecision::GiveUp(GiveUpReason::NoFurtherRound);
        }
        let doubled = Duration::from_secs(1 << self.failed_rounds.min(5));
        // The last round starts exactly when the time for rounds is over.
        let delay = doubled.min(MAX_ROUND_DELAY).min(ROUNDS_TIMEOUT - self.elapsed);
        // As in the Python SDK, a short `retry-after` does not delay a round.
        let long = self.retry_after().filter(|delay| *delay > delay::MAX_RETRY_AFTER);
        let delay = long.map_or(delay, |long| long.max(delay));
        if self.exceeds_timeout(delay) {
            return RetryDecision::GiveUp(GiveUpReason::RoundTooLate);
        }
        RetryDecision::NewRound { delay }
    }

    /// Returns the delay that the server asked for, if the policy honours it.
    fn retry_after(&self) -> Option<Duration> {
        delay::acceptable(self.failed.retry_after, self.policy.max_retry_after)
    }

    /// Returns whether an attempt after `delay` would start after the time limit.
    fn exceeds_timeout(&self, delay: Duration) -> bool {
        let first_contact = match self.failed.first_contact {
            Some(FirstContact::Loopback) => {
                Some(self.policy.first_contact_timeout.unwrap_or(LOOPBACK_CONTACT_TIMEOUT))
            }
            Some(FirstContact::Remote) => self.policy.first_contact_timeout,
            None => None,
        };
        let limit = first_contact.into_iter().chain(self.policy.give_up_after).min();
        limit.is_some_and(|limit| self.call_elapsed.saturating_add(delay) > limit)
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http::Response;
    use tinkex_wire::Route;

    use super::super::retry_policy::RetryPolicy;
    use super::*;
    use crate::error::{Error, ErrorKind};

    const SECOND: Duration = Duration::from_secs(1);

    fn failure(status: u16) -> FailedAttempt {
        let response = Response::builder().status(status).body(Bytes::new()).unwrap();
        FailedAttempt::from_response(&response)
    }

    fn policy(route: Route) -> RequestPolicy {
        RetryPolicy::default().apply(RequestPolicy::for_route(route))
    }

    /// Returns the context of a failed first attempt.
    fn first<'a>(policy: &'a RequestPolicy, failed: &'a FailedAttempt) -> RetryContext<'a> {
        RetryContext {
            policy,
            failed,
            retry_count: 0,
            failed_rounds: 0,
            attempts: 1,
            elapsed: Duration::ZERO,
            call_elapsed: Duration::ZERO,
            backoff: None,
            random: 0.0,
        }
    }

    /// Passed to `decide` for failures that the billing rule does not cover.
    fn not_called() -> bool {
        panic!("only the billing rule calls this")
    }

    #[test]
    fn the_first_rule_that_covers_a_failure_decides() {
        let (train, sample) = (policy(Route::OptimStep), policy(Route::Sample));
        let (unavailable, limited, unsettled) = (failure(503), failure(429), failure(402));

        let delay = Duration::from_millis(500);
        let retry = first(&train, &unavailable);
        assert_eq!(retry.decide(not_called), RetryDecision::Retry { delay });
        let last = RetryContext { retry_count: 10, failed_rounds: 2, ..retry };
        assert_eq!(last.decide(not_called), RetryDecision::NewRound { delay: 4 * SECOND });

        let shared = |failed| RetryContext { backoff: Some(SECOND), ..first(&sample, failed) };
        assert_eq!(shared(&limited).decide(not_called), RetryDecision::BackOff);
        assert_eq!(
            shared(&unavailable).decide(not_called),
            RetryDecision::NewRound { delay: SECOND }
        );

        assert_eq!(first(&train, &unsettled).decide(|| true), RetryDecision::WaitForBilling);
        assert_eq!(shared(&unsettled).decide(|| true), RetryDecision::BackOff);
        let decision = shared(&unsettled).decide(|| false);
        assert_eq!(decision, RetryDecision::GiveUp(GiveUpReason::NoFurtherRound));
    }

    #[test]
    fn the_reason_for_giving_up_names_the_rule() {
        let timeout = RetryPolicy::default().give_up_after(SECOND);
        let train = timeout.apply(RequestPolicy::for_route(Route::OptimStep));
        let sample = timeout.apply(RequestPolicy::for_route(Route::Sample));
        let single = RetryPolicy::disabled().apply(RequestPolicy::for_route(Route::Sample));
        let (unavailable, limited) = (failure(503), failure(429));
        let reason = |context: &RetryContext<'_>| match context.decide(not_called) {
            RetryDecision::GiveUp(reason) => reason,
            other => panic!("{other:?}"),
        };

        for status in [402, 409, 501] {
            assert_eq!(reason(&first(&train, &failure(status))), GiveUpReason::NeedsUser);
        }
        let late = RetryContext { call_elapsed: SECOND, ..first(&train, &unavailable) };
        assert_eq!(reason(&late), GiveUpReason::RetryTooLate);
        let late = RetryContext { retry_count: 10, ..late };
        assert_eq!(reason(&late), GiveUpReason::RoundTooLate);
        assert_eq!(reason(&first(&train, &failure(400))), GiveUpReason::NoFurtherRound);
        for policy in [&sample, &single] {
            let backoff = Some(2 * SECOND);
            let context = RetryContext { backoff, ..first(policy, &limited) };
            assert_eq!(reason(&context), GiveUpReason::RateLimited);
            assert!(context.decide(not_called).starts_backoff(), "other requests must wait");
        }
        let once = first(&single, &unavailable);
        assert_eq!(reason(&once), GiveUpReason::NoAttemptsLeft);
    }

    /// The 429 or 402 of a token exchange neither starts the backoff of the requests that need the
    /// token nor a billing wait.
    #[test]
    fn a_permanent_failure_neither_starts_the_backoff_nor_waits_for_billing() {
        let sample = policy(Route::Sample);
        for status in [402, 429, 503] {
            let failed = FailedAttempt::permanent(failure(status).error);
            let context = RetryContext { backoff: Some(SECOND), ..first(&sample, &failed) };
            let decision = context.decide(not_called);
            assert_eq!(decision, RetryDecision::GiveUp(GiveUpReason::Final), "{status}");
            assert!(!decision.starts_backoff());
        }
    }

    #[test]
    fn the_server_declines_retries_of_any_status_in_any_round() {
        let train = policy(Route::OptimStep);
        for status in [400, 402, 408, 409, 429, 500, 503, 600] {
            let response = Response::builder().status(status).header("x-should-retry", "false");
            let declined = FailedAttempt::from_response(&response.body(Bytes::new()).unwrap());
            assert!(!declined.error.is_retryable(), "{status}");
            for (retry_count, failed_rounds) in [(0, 0), (10, 0), (0, 3)] {
                let first = first(&train, &declined);
                let context = RetryContext { retry_count, failed_rounds, ..first };
                let decision = context.decide(not_called);
                assert_eq!(decision, RetryDecision::GiveUp(GiveUpReason::Final), "{status}");
            }
        }
    }

    #[test]
    fn a_long_retry_after_is_honoured_if_the_policy_allows_it() {
        let response = Response::builder().status(503).header("retry-after", "90");
        let failed = FailedAttempt::from_response(&response.body(Bytes::new()).unwrap());
        let long = Duration::from_secs(90);
        let policy = |longest| RetryPolicy::default().max_retry_after(longest);
        for (longest, retry, round) in
            [(Duration::from_secs(60), SECOND / 2, SECOND), (Duration::from_secs(120), long, long)]
        {
            let train = policy(longest).apply(RequestPolicy::for_route(Route::OptimStep));
            let context = first(&train, &failed);
            assert_eq!(context.decide(not_called), RetryDecision::Retry { delay: retry });
            let context = RetryContext { retry_count: 10, ..context };
            assert_eq!(context.decide(not_called), RetryDecision::NewRound { delay: round });
        }
    }

    #[test]
    fn the_first_contact_has_a_time_limit_of_its_own() {
        let default = policy(Route::OptimStep);
        let at_once = RetryPolicy::default().first_contact_timeout(Duration::ZERO);
        let at_once = at_once.apply(RequestPolicy::for_route(Route::OptimStep));
        let mut failed = FailedAttempt::from(Error::new(ErrorKind::Connect, "refused"));
        let (loopback, remote) = (Some(FirstContact::Loopback), Some(FirstContact::Remote));
        for (train, elapsed, first_contact, expected) in [
            (&default, 2 * SECOND, None, false),
            (&default, 2 * SECOND, remote, false),
            (&default, 2 * SECOND, loopback, true),
            (&default, SECOND, loopback, false),
            (&at_once, Duration::ZERO, None, false),
            (&at_once, Duration::ZERO, remote, true),
            (&at_once, Duration::ZERO, loopback, true),
        ] {
            failed.first_contact = first_contact;
            let context = RetryContext { call_elapsed: elapsed, ..first(train, &failed) };
            let decision = context.decide(not_called);
            let late = decision == RetryDecision::GiveUp(GiveUpReason::RetryTooLate);
            assert_eq!(late, expected, "{first_contact:?} {decision:?}");
        }
    }
}
