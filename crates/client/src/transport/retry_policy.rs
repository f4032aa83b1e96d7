//! [`RetryPolicy`]: the user's limits for repeating the requests of one call.

use std::time::Duration;

use super::delay;
use super::request_policy::RequestPolicy;

/// Default of [`RetryPolicy::first_contact_timeout`] for loopback addresses.
pub(super) const LOOPBACK_CONTACT_TIMEOUT: Duration = Duration::from_secs(2);

/// Limits how often and how long the requests of one call are repeated after failures.
///
/// The policy bounds one call: the submission of its request with all retries, the resubmissions of
/// a sample, waits after a 429 or 402, and failed polls for the result.
///
/// The default is what the service expects of its clients, and equals the Python SDK: up to ten
/// retries per round, with delays that double from 0.5 to 10 seconds and are shortened at random by
/// up to a quarter, and new rounds for up to five minutes. A round is a series of attempts with the
/// same idempotency key. The protocol allows fewer attempts for some requests, for example one per
/// round for saves. [`max_attempts`](Self::max_attempts) and
/// [`give_up_after`](Self::give_up_after) cap the total over all rounds.
///
/// ```
/// use std::time::Duration;
/// use tinkex::RetryPolicy;
///
/// // One attempt per call; `Error::retry_after` returns when to try again.
/// assert_eq!(RetryPolicy::disabled(), RetryPolicy::default().max_attempts(1));
///
/// // An interactive program: give up after half a minute, and after 10 seconds per request.
/// let interactive = RetryPolicy::default()
///     .give_up_after(Duration::from_secs(30))
///     .request_timeout(Duration::from_secs(10));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a policy has no effect until it is passed to a client or a call"]
pub struct RetryPolicy {
    max_attempts: u32,
    give_up_after: Option<Duration>,
    request_timeout: Option<Duration>,
    billing_wait: bool,
    max_retry_after: Duration,
    retry_rejected_polls: bool,
    first_contact_timeout: Option<Duration>,
}

impl Default for RetryPolicy {
    /// Returns the policy that the service expects of its clients.
    fn default() -> Self {
        Self {
            max_attempts: u32::MAX,
            give_up_after: None,
            request_timeout: None,
            billing_wait: false,
            max_retry_after: delay::MAX_RETRY_AFTER,
            retry_rejected_polls: true,
            first_contact_timeout: None,
        }
    }
}

impl RetryPolicy {
    /// Returns a policy that sends the request of a call once, and gives up polling for its result
    /// after the first failed poll. Polls that report that the result is not ready continue.
    pub fn disabled() -> Self {
        Self::default().max_attempts(1)
    }

    /// Sets the maximum number of times that the request of one call is sent, over all retries,
    /// rounds and resubmissions of a sample. Unlimited by default; 0 means 1.
    ///
    /// Failed polls for the result count separately: polling ends after as many consecutive failed
    /// polls.
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.max_attempts = attempts.max(1);
        self
    }

    /// Sets the time after the start of a call after which no further attempt starts. Unlimited by
    /// default. For interactive programs.
    ///
    /// The time includes delays between attempts, the shared backoff after a 429 and resubmissions
    /// of a sample, but not the wait for admission control before the first attempt. While the
    /// client polls for a result, it limits how long the server may be unreachable or fail with 5xx
    /// or 429 without any other response in between; it does not limit how long the server executes
    /// the request.
    ///
    /// It also ends a call at once if only the user can resolve the failure: a conflict (409), or a
    /// billing problem (402) unless [`wait_for_billing`](Self::wait_for_billing) is set.
    pub fn give_up_after(mut self, time: Duration) -> Self {
        self.give_up_after = Some(time);
        self
    }

    /// Waits for a billing problem (402) to be settled although
    /// [`give_up_after`](Self::give_up_after) is set, as long as the server allows.
    pub fn wait_for_billing(mut self) -> Self {
        self.billing_wait = true;
        self
    }

    /// Sets the timeout of one attempt. Defaults to 60 seconds for most requests. Polls for results
    /// keep their own timeout.
    pub fn request_timeout(mut self, timeout: Duration) -> Self {
        self.request_timeout = Some(timeout);
        self
    }

    /// Sets the longest `retry-after` that is honoured. Defaults to 60 seconds: a longer one is
    /// ignored, as in the Python SDK.
    pub fn max_retry_after(mut self, longest: Duration) -> Self {
        self.max_retry_after = longest;
        self
    }

    /// Sets whether a poll that the server rejects with status 400 and a body is repeated, up to
    /// three times, and one with status 500 without a limit. Defaults to `true`, as in the Python
    /// SDK.
    pub fn retry_rejected_polls(mut self, retry: bool) -> Self {
        self.retry_rejected_polls = retry;
        self
    }

    /// Sets how long a refused connection, or a host whose name is unknown, is retried before the
    /// server has responded for the first time; zero reports it at once. Later outages, for example
    /// a restart, are waited for. Defaults to 2 seconds for loopback addresses, because a local
    /// server that does not run should be reported soon, and to the usual time for all others.
    pub fn first_contact_timeout(mut self, timeout: Duration) -> Self {
        self.first_contact_timeout = Some(timeout);
        self
    }

    /// Returns the maximum number of attempts of a call, and of consecutive failed polls.
    pub(crate) fn attempt_limit(&self) -> u32 {
        self.max_attempts
    }

    /// Returns the time after which no further attempt starts, if limited.
    pub(crate) fn time_limit(&self) -> Option<Duration> {
        self.give_up_after
    }

    /// Returns whether a call waits for a billing problem to be settled.
    pub(crate) fn waits_for_billing(&self) -> bool {
        self.max_attempts > 1 && (self.give_up_after.is_none() || self.billing_wait)
    }

    /// Returns whether a poll that was rejected with status 400 and a body is repeated.
    pub(crate) fn retries_rejected_polls(&self) -> bool {
        self.retry_rejected_polls
    }

    /// Returns whether another attempt may start `delay` from now, after `attempts` attempts of a
    /// call that started `elapsed` ago.
    pub(crate) fn allows_attempt(&self, attempts: u32, elapsed: Duration, delay: Duration) -> bool {
        attempts < self.max_attempts
            && self.give_up_after.is_none_or(|limit| elapsed.saturating_add(delay) <= limit)
    }

    /// Restricts `policy`, which the protocol defines for a route, by the user's settings.
    pub(crate) fn apply(self, policy: RequestPolicy) -> RequestPolicy {
        let timeout = match policy.lane.is_poll() {
            true => policy.timeout,
            false => self.request_timeout.unwrap_or(policy.timeout),
        };
        RequestPolicy {
            timeout,
            max_attempts: self.max_attempts,
            give_up_after: self.give_up_after,
            billing_wait: self.waits_for_billing(),
            max_retry_after: self.max_retry_after,
            first_contact_timeout: self.first_contact_timeout,
            ..policy
        }
    }
}
