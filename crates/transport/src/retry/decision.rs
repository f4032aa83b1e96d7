//! [`RetryContext::decide`]: decides what follows a failed attempt. This module does not wait, send
//! or change state; [`RetryState`](super::RetryState) carries out the decision.
//!
//! A *round* is a series of attempts with the same idempotency key. The first rule that covers the
//! failure decides:
//!
//! | Rule | Covers | Next attempt |
//! |---|---|---|
//! | final | a failure that is [not temporary](FailedAttempt::is_final), or whose response has `x-should-retry: false` | none |
//! | attempts | the call has no attempts left | none |
//! | user | a 402 if the policy does not wait for billing; a 409 or 501 if the policy has a time limit | none |
//! | retry | a [retryable](FailedAttempt::is_retryable) failure, while the round has retries left | same round, after [`delay::before_retry`] |
//! | billing | a 402, until the server's maximum wait is over | new round, 5 seconds later or after the shared backoff |
//! | rate limit | a 429 of a request that shares a [`SharedBackoff`](super::shared_backoff::SharedBackoff) | new round, after the backoff |
//! | round | any other temporary failure, until five minutes after the request was started | new round, 1, 2, 4, … 30 seconds later |
//! | none | everything else | none |
//!
//! No new round follows if the protocol does not repeat rounds of the request. The time limit of
//! the policy, if set, ends the retry, rate limit and round rules: the request fails if the next
//! attempt would start later. If the server has never responded and cannot be reached, the time
//! limit for unreached servers applies if it is shorter. A `retry-after` also ends these rules if
//! the [`RetryAfterRule`] of the policy does not allow the wait.

use std::time::Duration;

use tinkex_backoff::Backoff;

use crate::call_options::LOOPBACK_UNREACHED_TIMEOUT;

use super::delay;
#[cfg(doc)]
use super::delay::RetryAfterRule;
use super::failed_attempt::{FailedAttempt, Unreached};
use super::request_policy::RequestPolicy;
use super::shared_backoff::LONG_RETRY_AFTER;

/// Time after the start of a request during which new rounds are started.
const ROUNDS_TIMEOUT: Duration = Duration::from_secs(300);
/// Delays between rounds.
const ROUND_BACKOFF: Backoff = Backoff::new(Duration::from_secs(1)).cap(Duration::from_secs(30));

/// What follows a failed attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RetryDecision {
    /// The failure is temporary: repeat the request in the same round after `delay`.
    Retry { delay: Duration },
    /// The account is not settled: start a new round after
    /// [`billing::DELAY`](super::billing::DELAY).
    WaitForBilling,
    /// The server limits the rate, or the account of a request with a shared backoff is not
    /// settled: start the backoff, and start a new round once the backoff is over.
    BackOff,
    /// The round failed: start a new one after `delay`.
    NewRound { delay: Duration },
    /// No attempt follows.
    GiveUp(GiveUpReason),
}

/// Reason for not repeating a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GiveUpReason {
    /// The failure is not temporary, or the server declined retries.
    Final,
    /// The call has no attempts left.
    NoAttemptsLeft,
    /// Only the user can resolve the failure.
    NeedsUser,
    /// The retry would start after a limit of the call.
    RetryTooLate,
    /// The server limits the rate, and no attempt follows or the wait ends after a limit of the
    /// call.
    RateLimited,
    /// The round failed, and the failure is not temporary, the policy allows no new round, or five
    /// minutes have passed since the request was started.
    NoFurtherRound,
    /// The next round would start after a limit of the call.
    RoundTooLate,
}

impl GiveUpReason {
    /// Returns whether a time limit of the call may be the reason for giving up.
    pub(crate) fn is_limit(self) -> bool {
        matches!(self, Self::RetryTooLate | Self::RateLimited | Self::RoundTooLate)
    }
}

impl RetryDecision {
    /// Returns whether the shared backoff starts. The backoff starts even if this request gives up:
    /// the server limits the rate of all requests that share the backoff.
    pub(crate) fn starts_backoff(self) -> bool {
        matches!(self, Self::BackOff | Self::GiveUp(GiveUpReason::RateLimited))
    }

    /// Returns whether the attempt was the last one of a failed round; telemetry reports failed
    /// rounds. A round that waits for the account or for the shared backoff has not failed.
    pub(crate) fn is_failed_round(self) -> bool {
        use GiveUpReason::{NeedsUser, RateLimited, RetryTooLate};
        match self {
            Self::NewRound { .. } => true,
            Self::GiveUp(reason) => !matches!(reason, NeedsUser | RateLimited | RetryTooLate),
            Self::Retry { .. } | Self::WaitForBilling | Self::BackOff => false,
        }
    }
}

/// A failed attempt, and everything else that the decision depends on.
pub(crate) struct RetryContext<'a> {
    pub(crate) policy: &'a RequestPolicy,
    pub(crate) failed: &'a FailedAttempt,
    /// Number of retries so far in this round.
    pub(crate) retry_count: u32,
    /// Number of failed rounds before this one.
    pub(crate) failed_rounds: u32,
    /// Number of attempts of the call so far.
    pub(crate) attempts: u32,
    /// Time since the request was started.
    pub(crate) elapsed: Duration,
    /// Time since the call was started: longer than `elapsed` if the request resubmits a sample.
    pub(crate) call_elapsed: Duration,
    /// Duration for which the request waits if this failure starts the shared backoff; `None` if
    /// the request shares none.
    pub(crate) backoff: Option<Duration>,
    /// Random number from 0 to 1 for the jitter of a retry.
    pub(crate) random: f64,
}

impl RetryContext<'_> {
    /// Applies the rules in the order of the table above.
    ///
    /// `should_wait_for_billing` returns whether the server's maximum wait for a 402 is not over
    /// yet. Call it only if the billing rule is reached with a 402: each call updates the billing
    /// incident that all requests share.
    pub(crate) fn decide(&self, should_wait_for_billing: impl FnOnce() -> bool) -> RetryDecision {
        let limited = self.backoff.is_some() && self.failed.error.status() == Some(429);
        if self.failed.is_final() || self.attempts >= self.policy.max_attempts {
            // A 429 of a token exchange (a permanent failure) does not limit the rate of the
            // requests that share a backoff, so it must not start the backoff.
            let reason = if limited && !self.failed.permanent {
                GiveUpReason::RateLimited
            } else if self.failed.is_final() {
                GiveUpReason::Final
            } else {
                GiveUpReason::NoAttemptsLeft
            };
            return RetryDecision::GiveUp(reason);
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
            // A time limit means that a user waits for the result. Report these failures at once: a
            // retry resolves neither a conflict nor a missing endpoint.
            Some(409 | 501) => self.policy.give_up_after.is_some(),
            _ => false,
        }
    }

    fn retry(&self) -> RetryDecision {
        let delay = delay::before_retry(self.retry_count, self.retry_after(), self.random);
        if self.is_too_late(delay) {
            return RetryDecision::GiveUp(GiveUpReason::RetryTooLate);
        }
        RetryDecision::Retry { delay }
    }

    fn back_off(&self, backoff: Duration) -> RetryDecision {
        if !self.policy.repeat_rounds || self.is_too_late(backoff) {
            return RetryDecision::GiveUp(GiveUpReason::RateLimited);
        }
        RetryDecision::BackOff
    }

    fn new_round(&self) -> RetryDecision {
        // As in the Python SDK, `x-should-retry: true` allows retries within a round, but no new
        // round.
        let is_temporary = self.failed.error.is_retryable();
        if !self.policy.repeat_rounds || !is_temporary || self.elapsed >= ROUNDS_TIMEOUT {
            return RetryDecision::GiveUp(GiveUpReason::NoFurtherRound);
        }
        // The delay is shortened so that the last round starts exactly when `ROUNDS_TIMEOUT` is
        // over.
        let delay = ROUND_BACKOFF.delay(self.failed_rounds, self.random);
        let delay = delay.min(ROUNDS_TIMEOUT - self.elapsed);
        // As in the Python SDK, a short `retry-after` does not delay a round.
        let long = self.retry_after().filter(|delay| *delay > LONG_RETRY_AFTER);
        let delay = long.map_or(delay, |long| long.max(delay));
        if self.is_too_late(delay) {
            return RetryDecision::GiveUp(GiveUpReason::RoundTooLate);
        }
        RetryDecision::NewRound { delay }
    }

    /// Returns the `retry-after` of the server, if the policy honours it.
    fn retry_after(&self) -> Option<Duration> {
        self.policy.retry_after.delay(self.failed.retry_after)
    }

    /// Returns the `retry-after` of the server if the call may not wait that long.
    pub(crate) fn too_long_retry_after(&self) -> Option<Duration> {
        let rule = self.policy.retry_after;
        self.retry_after().filter(|delay| !rule.allows(*delay, self.call_elapsed))
    }

    /// Returns whether an attempt after `delay` would start after a limit of the call.
    fn is_too_late(&self, delay: Duration) -> bool {
        if self.too_long_retry_after().is_some() {
            return true;
        }
        let unreached = match self.failed.unreached {
            Some(Unreached::Loopback) => {
                Some(self.policy.unreached_timeout.unwrap_or(LOOPBACK_UNREACHED_TIMEOUT))
            }
            Some(Unreached::Remote) => self.policy.unreached_timeout,
            None => None,
        };
        let limit = unreached.into_iter().chain(self.policy.give_up_after).min();
        limit.is_some_and(|limit| self.call_elapsed.saturating_add(delay) > limit)
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http::Response;
    use tinkex_wire::Route;

    use super::*;
    use crate::call_options::CallOptions;
    use crate::error::{Error, ErrorKind};

    const SECOND: Duration = Duration::from_secs(1);

    fn failure(status: u16) -> FailedAttempt {
        let response = Response::builder().status(status).body(Bytes::new()).unwrap();
        FailedAttempt::from_response(&response)
    }

    fn policy(route: Route) -> RequestPolicy {
        CallOptions::new().apply(RequestPolicy::for_route(route))
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
        let train = policy(Route::OptimStep);
        let sample = policy(Route::Sample);
        let unavailable = failure(503);
        let limited = failure(429);
        let unsettled = failure(402);

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
        let timeout = CallOptions::new().give_up_after(SECOND);
        let train = timeout.apply(RequestPolicy::for_route(Route::OptimStep));
        let sample = timeout.apply(RequestPolicy::for_route(Route::Sample));
        let single = CallOptions::without_retries().apply(RequestPolicy::for_route(Route::Sample));
        let unavailable = failure(503);
        let limited = failure(429);
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
    fn a_long_retry_after_is_honoured_unless_the_policy_ignores_it() {
        let response = Response::builder().status(503).header("retry-after", "90");
        let failed = FailedAttempt::from_response(&response.body(Bytes::new()).unwrap());
        let long = 90 * SECOND;
        let ignore = CallOptions::new().ignore_long_retry_after(true);
        for (options, retry, round) in [
            (CallOptions::new(), long, long),
            (CallOptions::new().max_retry_after(long), long, long),
            (ignore, SECOND / 2, SECOND),
            (ignore.max_retry_after(SECOND).timeout(SECOND), SECOND / 2, SECOND),
        ] {
            let train = options.apply(RequestPolicy::for_route(Route::OptimStep));
            let context = first(&train, &failed);
            assert_eq!(context.decide(not_called), RetryDecision::Retry { delay: retry });
            let context = RetryContext { retry_count: 10, ..context };
            assert_eq!(context.decide(not_called), RetryDecision::NewRound { delay: round });
        }
    }

    #[test]
    fn a_retry_after_that_the_limits_do_not_allow_ends_the_call() {
        let response = Response::builder().status(503).header("retry-after", "90");
        let failed = FailedAttempt::from_response(&response.body(Bytes::new()).unwrap());
        for options in [
            CallOptions::new().max_retry_after(89 * SECOND),
            CallOptions::new().timeout(99 * SECOND),
            CallOptions::new().give_up_after(99 * SECOND),
        ] {
            let train = options.apply(RequestPolicy::for_route(Route::OptimStep));
            let context = RetryContext { call_elapsed: 10 * SECOND, ..first(&train, &failed) };
            let decision = context.decide(not_called);
            assert_eq!(decision, RetryDecision::GiveUp(GiveUpReason::RetryTooLate), "{options:?}");
            assert_eq!(context.too_long_retry_after(), Some(90 * SECOND));
            let context = RetryContext { retry_count: 10, ..context };
            let decision = context.decide(not_called);
            assert_eq!(decision, RetryDecision::GiveUp(GiveUpReason::RoundTooLate), "{options:?}");
        }
    }

    #[test]
    fn a_server_that_never_responded_has_a_time_limit_of_its_own() {
        let default = policy(Route::OptimStep);
        let at_once = CallOptions::new().unreached_timeout(Duration::ZERO);
        let at_once = at_once.apply(RequestPolicy::for_route(Route::OptimStep));
        let mut failed = FailedAttempt::from(Error::new(ErrorKind::Connect, "refused"));
        let loopback = Some(Unreached::Loopback);
        let remote = Some(Unreached::Remote);
        for (train, elapsed, unreached, expected) in [
            (&default, 2 * SECOND, None, false),
            (&default, 2 * SECOND, remote, false),
            (&default, 2 * SECOND, loopback, true),
            (&default, SECOND, loopback, false),
            (&at_once, Duration::ZERO, None, false),
            (&at_once, Duration::ZERO, remote, true),
            (&at_once, Duration::ZERO, loopback, true),
        ] {
            failed.unreached = unreached;
            let context = RetryContext { call_elapsed: elapsed, ..first(train, &failed) };
            let decision = context.decide(not_called);
            let late = decision == RetryDecision::GiveUp(GiveUpReason::RetryTooLate);
            assert_eq!(late, expected, "{unreached:?} {decision:?}");
        }
    }
}
