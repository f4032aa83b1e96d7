//! [`CallOptions`]: time limits and retries of calls.

use std::time::Duration;

use tinkex_backoff::{Backoff, Jitter};

use crate::error::{Error, ErrorKind, Result};
use crate::retry::delay::RetryAfterRule;
use crate::retry::request_policy::RequestPolicy;

/// Default of [`CallOptions::unreached_timeout`] for loopback addresses.
pub(crate) const LOOPBACK_UNREACHED_TIMEOUT: Duration = Duration::from_secs(2);
/// Default of [`CallOptions::progress_timeout`].
const PROGRESS_TIMEOUT: Duration = Duration::from_secs(7200);
/// Default delays between resubmissions of a sample, which are the Python SDK's.
const RESUBMIT_BASE_DELAY: Duration = Duration::from_millis(500);
const RESUBMIT_MAX_DELAY: Duration = Duration::from_secs(10);
const RESUBMIT_JITTER: f64 = 0.25;

/// Time limits and retries of the calls of a client.
///
/// `ServiceClientBuilder::options` sets them for all calls. The method `with_options` of a client
/// returns a client with other options that shares everything else with the original: connection,
/// session, call order and limits. Options that are not set keep the value of the original client.
///
/// By default a call is retried as in the Python SDK, because the service expects this of its
/// clients: up to ten retries per round, with delays that double from 0.5 to 10 seconds and are
/// shortened at random by up to a quarter, and new rounds for up to five minutes. A round is a
/// series of attempts with the same idempotency key. The protocol allows fewer attempts for some
/// requests, for example one per round for saves.
///
/// | Option | Ends | Default |
/// |---|---|---|
/// | [`timeout`](Self::timeout) | the call | none |
/// | [`request_timeout`](Self::request_timeout) | one attempt to send a request | 60 seconds for most requests |
/// | [`poll_timeout`](Self::poll_timeout) | the wait for the result of an accepted request | none |
/// | [`max_attempts`](Self::max_attempts) | the retries of a call | none |
/// | [`give_up_after`](Self::give_up_after) | the retries of a call | none |
/// | [`unreached_timeout`](Self::unreached_timeout) | the retries of requests to a server that has never responded | 2 seconds on loopback addresses, else none |
/// | [`max_retry_after`](Self::max_retry_after) | the call, if the server asks for a longer wait (`retry-after`) | none |
/// | [`max_resubmissions`](Self::max_resubmissions) | the resubmissions of a sample | none |
/// | [`progress_timeout`](Self::progress_timeout) | all pending samples of a client, if none has succeeded for this time | 2 hours |
///
/// ```
/// use std::time::Duration;
/// use tinkex_transport::CallOptions;
///
/// // One attempt per call; `Error::retry_after` returns when to try again.
/// assert_eq!(CallOptions::without_retries(), CallOptions::new().max_attempts(1));
///
/// // An interactive program: give up after half a minute, and after 10 seconds per request.
/// let interactive = CallOptions::new()
///     .give_up_after(Duration::from_secs(30))
///     .request_timeout(Duration::from_secs(10));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[must_use = "options have no effect until they are passed to a client"]
pub struct CallOptions {
    timeout: Option<Duration>,
    request_timeout: Option<Duration>,
    poll_timeout: Option<Duration>,
    max_attempts: Option<u32>,
    give_up_after: Option<Duration>,
    unreached_timeout: Option<Duration>,
    max_retry_after: Option<Duration>,
    ignore_long_retry_after: Option<bool>,
    billing_wait: Option<bool>,
    retry_rejected_polls: Option<bool>,
    max_resubmissions: Option<u32>,
    resubmit_base_delay: Option<Duration>,
    resubmit_max_delay: Option<Duration>,
    resubmit_jitter: Option<f64>,
    progress_timeout: Option<Duration>,
}

impl CallOptions {
    /// Creates options that change nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates options with which the request of a call is sent once, and polling for its result
    /// ends after the first failed poll. A poll which reports that the result is not ready has not
    /// failed: polling continues.
    pub fn without_retries() -> Self {
        Self::new().max_attempts(1)
    }

    /// Sets the maximum duration of a call, from its start to its result, with all waits and
    /// retries. Unlimited by default.
    ///
    /// A sample that takes longer is cancelled. A training request that takes longer continues on
    /// the server, because later requests of the model depend on it.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Sets the timeout of one attempt. Defaults to 60 seconds for most requests. Polls for results
    /// keep their own timeout.
    pub fn request_timeout(mut self, timeout: Duration) -> Self {
        self.request_timeout = Some(timeout);
        self
    }

    /// Sets the maximum time to wait for the result of a request after the server has accepted the
    /// request. Unlimited by default. After the timeout a sample is cancelled; the server continues
    /// to execute any other request.
    pub fn poll_timeout(mut self, timeout: Duration) -> Self {
        self.poll_timeout = Some(timeout);
        self
    }

    /// Sets the maximum number of times that the request of one call is sent, over all retries,
    /// rounds and resubmissions of a sample. Unlimited by default; 0 means 1.
    ///
    /// Failed polls for the result count separately: polling ends after `attempts` consecutive
    /// failed polls.
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.max_attempts = Some(attempts.max(1));
        self
    }

    /// Sets the time after the start of a call after which no further attempt starts. Unlimited by
    /// default. Useful for interactive programs, where a user waits for the result.
    ///
    /// The time includes delays between attempts, the shared backoff after a 429 and resubmissions
    /// of a sample, but not the wait for admission control before the first attempt. While the
    /// client polls for a result, `time` limits how long the server may be unreachable or fail with
    /// 5xx or 429 without any other response in between. It does not limit how long the server
    /// executes the request.
    ///
    /// With this option a call also fails at once if only the user can resolve the failure: a
    /// conflict (409), a missing endpoint (501), or a billing problem (402) unless
    /// [`wait_for_billing`](Self::wait_for_billing) is set.
    pub fn give_up_after(mut self, time: Duration) -> Self {
        self.give_up_after = Some(time);
        self
    }

    /// Sets how long the client retries a refused connection or an unknown host name while the
    /// server has never responded; with zero, the call fails at once. After the first response this
    /// option has no effect, so that the client survives a restart of the server. Defaults to 2
    /// seconds for loopback addresses, because a local server that does not run should be reported
    /// soon. For other addresses there is no special limit by default.
    pub fn unreached_timeout(mut self, timeout: Duration) -> Self {
        self.unreached_timeout = Some(timeout);
        self
    }

    /// Sets the longest `retry-after` for which a call waits. Unlimited by default.
    ///
    /// The call waits as long as the server asks. If that exceeds this limit,
    /// [`timeout`](Self::timeout) or [`give_up_after`](Self::give_up_after), the call fails at once,
    /// and [`Error::retry_after`] returns the time. A `retry-after` above 60 seconds applies in
    /// full to the call that received it. Other calls of the same server and key wait for at most
    /// 60 seconds.
    pub fn max_retry_after(mut self, longest: Duration) -> Self {
        self.max_retry_after = Some(longest);
        self
    }

    /// Sets whether a `retry-after` above 60 seconds is ignored, as the Python SDK does: the request
    /// is then repeated after the delay of a response without `retry-after`, which is 1 second for a
    /// sample. With `true`, [`max_retry_after`](Self::max_retry_after) has no effect. Defaults to
    /// `false`.
    pub fn ignore_long_retry_after(mut self, ignore: bool) -> Self {
        self.ignore_long_retry_after = Some(ignore);
        self
    }

    /// Waits for a billing problem (402) to be settled although
    /// [`give_up_after`](Self::give_up_after) is set, as long as the server allows.
    pub fn wait_for_billing(mut self) -> Self {
        self.billing_wait = Some(true);
        self
    }

    /// Sets whether a poll that the server rejects with status 400 and a body is repeated, up to
    /// three times, and a poll with status 500 without a limit. Defaults to `true`, as in the
    /// Python SDK.
    pub fn retry_rejected_polls(mut self, retry: bool) -> Self {
        self.retry_rejected_polls = Some(retry);
        self
    }

    /// Sets the maximum number of resubmissions of one sample; 0 disables them. Unlimited by
    /// default.
    ///
    /// A sample is resubmitted under a new sequence number if its result expired, if its submission
    /// or its polls failed in spite of all retries, or, at most three times, if the server reports
    /// that it failed to execute the sample.
    pub fn max_resubmissions(mut self, resubmissions: u32) -> Self {
        self.max_resubmissions = Some(resubmissions);
        self
    }

    /// Sets the delay before the first resubmission of a sample. The delay doubles with each
    /// further resubmission. Defaults to 0.5 seconds.
    pub fn resubmit_base_delay(mut self, delay: Duration) -> Self {
        self.resubmit_base_delay = Some(delay);
        self
    }

    /// Sets the longest delay before a resubmission of a sample. Defaults to 10 seconds.
    pub fn resubmit_max_delay(mut self, delay: Duration) -> Self {
        self.resubmit_max_delay = Some(delay);
        self
    }

    /// Sets the fraction, from 0 to 1, by which the delay before a resubmission varies at random in
    /// both directions. Defaults to 0.25. A fraction outside this range is an error: building a
    /// client with it fails, and so do the samples of a client that gets it from `with_options`.
    pub fn resubmit_jitter(mut self, fraction: f64) -> Self {
        self.resubmit_jitter = Some(fraction);
        self
    }

    /// Sets the time without any successful sample of a client after which all its pending samples
    /// fail. Defaults to 2 hours. Has no effect if the server disables the check.
    pub fn progress_timeout(mut self, timeout: Duration) -> Self {
        self.progress_timeout = Some(timeout);
        self
    }

    /// Returns these options. Options that are not set get the value of `client`.
    #[doc(hidden)]
    pub fn or(self, client: &Self) -> Self {
        Self {
            timeout: self.timeout.or(client.timeout),
            request_timeout: self.request_timeout.or(client.request_timeout),
            poll_timeout: self.poll_timeout.or(client.poll_timeout),
            max_attempts: self.max_attempts.or(client.max_attempts),
            give_up_after: self.give_up_after.or(client.give_up_after),
            unreached_timeout: self.unreached_timeout.or(client.unreached_timeout),
            max_retry_after: self.max_retry_after.or(client.max_retry_after),
            ignore_long_retry_after: self
                .ignore_long_retry_after
                .or(client.ignore_long_retry_after),
            billing_wait: self.billing_wait.or(client.billing_wait),
            retry_rejected_polls: self.retry_rejected_polls.or(client.retry_rejected_polls),
            max_resubmissions: self.max_resubmissions.or(client.max_resubmissions),
            resubmit_base_delay: self.resubmit_base_delay.or(client.resubmit_base_delay),
            resubmit_max_delay: self.resubmit_max_delay.or(client.resubmit_max_delay),
            resubmit_jitter: self.resubmit_jitter.or(client.resubmit_jitter),
            progress_timeout: self.progress_timeout.or(client.progress_timeout),
        }
    }

    /// Checks that the values of the options are in range.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] if the jitter is not in 0..=1.
    #[doc(hidden)]
    pub fn validate(&self) -> Result<()> {
        match self.resubmit_jitter {
            Some(jitter) if !(0.0..=1.0).contains(&jitter) => {
                let message = format!("invalid resubmit_jitter {jitter}: must be from 0 to 1");
                Err(Error::new(ErrorKind::Config, message))
            }
            _ => Ok(()),
        }
    }

    /// Returns the maximum duration of a call.
    #[doc(hidden)]
    pub fn call_limit(&self) -> Option<Duration> {
        self.timeout
    }

    /// Returns the maximum time to wait for a result.
    #[doc(hidden)]
    pub fn poll_limit(&self) -> Option<Duration> {
        self.poll_timeout
    }

    /// Returns the maximum number of attempts of a call, and of consecutive failed polls.
    #[doc(hidden)]
    pub fn attempt_limit(&self) -> u32 {
        self.max_attempts.unwrap_or(u32::MAX)
    }

    /// Returns the time after which no further attempt starts, if limited.
    #[doc(hidden)]
    pub fn retry_limit(&self) -> Option<Duration> {
        self.give_up_after
    }

    /// Returns whether a call waits for a billing problem to be settled.
    #[doc(hidden)]
    pub fn waits_for_billing(&self) -> bool {
        let is_patient = self.give_up_after.is_none() || self.billing_wait.unwrap_or(false);
        self.attempt_limit() > 1 && is_patient
    }

    /// Returns whether a poll that was rejected with status 400 and a body is repeated.
    #[doc(hidden)]
    pub fn retries_rejected_polls(&self) -> bool {
        self.retry_rejected_polls.unwrap_or(true)
    }

    /// Returns whether another attempt may start `delay` from now, after `attempts` attempts of a
    /// call that started `elapsed` ago.
    #[doc(hidden)]
    pub fn allows_attempt(&self, attempts: u32, elapsed: Duration, delay: Duration) -> bool {
        attempts < self.attempt_limit()
            && self.give_up_after.is_none_or(|limit| elapsed.saturating_add(delay) <= limit)
    }

    /// Returns whether a sample may be resubmitted after `resubmissions` resubmissions.
    #[doc(hidden)]
    pub fn allows_resubmission(&self, resubmissions: u32) -> bool {
        self.max_resubmissions.is_none_or(|limit| resubmissions < limit)
    }

    /// Returns the delays before resubmissions of a sample.
    #[doc(hidden)]
    pub fn resubmit_backoff(&self) -> Backoff {
        Backoff::new(self.resubmit_base_delay.unwrap_or(RESUBMIT_BASE_DELAY))
            .cap(self.resubmit_max_delay.unwrap_or(RESUBMIT_MAX_DELAY))
            .jitter(Jitter::Vary(self.resubmit_jitter.unwrap_or(RESUBMIT_JITTER)))
    }

    /// Returns the time without a success after which samples fail.
    #[doc(hidden)]
    pub fn progress_limit(&self) -> Duration {
        self.progress_timeout.unwrap_or(PROGRESS_TIMEOUT)
    }

    /// Returns what a call does about a `retry-after`.
    fn retry_after_rule(&self) -> RetryAfterRule {
        if self.ignore_long_retry_after.unwrap_or(false) {
            return RetryAfterRule::IgnoreLong;
        }
        let until = self.timeout.into_iter().chain(self.give_up_after).min();
        RetryAfterRule::Honour { longest: self.max_retry_after, until }
    }

    /// Returns the delay that the server asks for in the response of `error`, unless the options
    /// ignore it.
    pub fn honoured_retry_after(&self, error: &Error) -> Option<Duration> {
        let delay = error.retry_after()?;
        self.retry_after_rule().delay(Some(delay.as_secs_f64()))
    }

    /// Returns whether a call that started `elapsed` ago may wait for `retry_after` because the
    /// server asks for it.
    pub fn allows_retry_after(&self, retry_after: Duration, elapsed: Duration) -> bool {
        self.retry_after_rule().allows(retry_after, elapsed)
    }

    /// Restricts `policy`, which the protocol defines for a route, by these options.
    pub(crate) fn apply(&self, policy: RequestPolicy) -> RequestPolicy {
        let request_timeout = self.request_timeout.filter(|_| !policy.lane.is_poll());
        RequestPolicy {
            timeout: request_timeout.unwrap_or(policy.timeout),
            max_attempts: self.attempt_limit(),
            give_up_after: self.give_up_after,
            billing_wait: self.waits_for_billing(),
            retry_after: self.retry_after_rule(),
            unreached_timeout: self.unreached_timeout,
            ..policy
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::fixture;

    fn options(fields: &Value) -> CallOptions {
        let mut options = CallOptions::new();
        for (name, value) in fields.as_object().unwrap() {
            let number = value.as_f64().unwrap();
            let seconds = Duration::from_secs_f64(number);
            options = match name.as_str() {
                "jitter_factor" => options.resubmit_jitter(number),
                "retry_delay_base" => options.resubmit_base_delay(seconds),
                "retry_delay_max" => options.resubmit_max_delay(seconds),
                other => panic!("{other}"),
            };
        }
        options
    }

    /// Covers AUD.4.
    #[test]
    fn delays_and_defaults_equal_those_of_the_python_sdk() {
        let cases = fixture::cases("retry_handler_delay.json");
        assert_eq!(cases.len(), 21);
        for case in cases {
            let backoff = options(&case["config"]).resubmit_backoff();
            let attempt = u32::try_from(case["attempt"].as_u64().unwrap()).unwrap();
            for (random, key) in [
                (0.0, "delay_at_random_0"),
                (0.5, "delay_at_random_half"),
                (1.0, "delay_at_random_1"),
            ] {
                let actual = backoff.delay(attempt, random).as_secs_f64();
                assert!((actual - case[key].as_f64().unwrap()).abs() < 1e-9, "{case}");
            }
        }
        let file = fixture::load("retry_handler_delay.json");
        let defaults = &file["defaults"];
        for (actual, name) in [
            (CallOptions::new().progress_limit().as_secs_f64(), "progress_timeout"),
            (RESUBMIT_BASE_DELAY.as_secs_f64(), "retry_delay_base"),
            (RESUBMIT_MAX_DELAY.as_secs_f64(), "retry_delay_max"),
            (RESUBMIT_JITTER, "jitter_factor"),
        ] {
            assert_eq!(Some(actual), defaults[name].as_f64(), "{name}");
        }
        let allows = CallOptions::new().allows_resubmission(1_000_000);
        assert_eq!(defaults["enable_retry_logic"], allows);
        for jitter in [f64::NAN, -0.1, 1.1] {
            let invalid = CallOptions::new().resubmit_jitter(jitter);
            assert!(invalid.validate().is_err(), "{jitter}");
        }
        let longest = CallOptions::new()
            .resubmit_base_delay(Duration::MAX)
            .resubmit_max_delay(Duration::MAX)
            .resubmit_backoff();
        assert_eq!(longest.delay(1000, 1.0), Duration::MAX, "no overflow");
    }

    #[test]
    fn options_that_are_not_set_keep_the_value_of_the_client() {
        let client = CallOptions::new().max_attempts(3).poll_timeout(Duration::from_secs(9));
        let call = CallOptions::new().max_attempts(1).timeout(Duration::from_secs(5));
        let merged = call.or(&client);
        assert_eq!(merged, call.poll_timeout(Duration::from_secs(9)));
        assert_eq!(CallOptions::new().or(&client), client);
    }
}
