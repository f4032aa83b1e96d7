//! [`RetryPolicy`]: the user's settings for repeating failed requests.

use std::time::Duration;

use super::request_policy::RequestPolicy;

/// Policy for repeating failed requests.
///
/// A round is a series of attempts with the same idempotency key. The default is what the service
/// expects: up to ten retries per round, with delays that double from 0.5 to 10 seconds and are
/// shortened at random by up to a quarter, and new rounds for up to five minutes. The protocol
/// allows fewer attempts for some requests, for example one per round for saves.
///
/// ```
/// use std::time::Duration;
/// use tinkex::RetryPolicy;
///
/// // Exactly one attempt per request; `Error::retry_after` returns when to try again.
/// assert_eq!(RetryPolicy::disabled().max_retries(), 0);
///
/// // An interactive program: give up after half a minute, and after 10 seconds per request.
/// let interactive = RetryPolicy::default()
///     .with_retry_timeout(Duration::from_secs(30))
///     .with_request_timeout(Duration::from_secs(10));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryPolicy {
    max_retries: u32,
    repeat_rounds: bool,
    retry_timeout: Option<Duration>,
    request_timeout: Option<Duration>,
    billing_wait: bool,
}

impl Default for RetryPolicy {
    /// Returns the policy that the service expects of its clients.
    fn default() -> Self {
        Self {
            max_retries: u32::MAX,
            repeat_rounds: true,
            retry_timeout: None,
            request_timeout: None,
            billing_wait: false,
        }
    }
}

impl RetryPolicy {
    /// Returns a policy that sends every request exactly once.
    #[must_use]
    pub fn disabled() -> Self {
        Self { max_retries: 0, repeat_rounds: false, ..Self::default() }
    }

    /// Sets the maximum number of retries per round. The protocol allows fewer for some requests.
    #[must_use]
    pub fn with_max_retries(mut self, retries: u32) -> Self {
        self.max_retries = retries;
        self
    }

    /// Sets the time after which no further attempt starts, counted from the first attempt. For
    /// interactive programs.
    ///
    /// It also ends a request at once if only the user can resolve the failure: a conflict (409),
    /// or a billing problem (402) unless [`with_billing_wait`](Self::with_billing_wait) is set.
    #[must_use]
    pub fn with_retry_timeout(mut self, timeout: Duration) -> Self {
        self.retry_timeout = Some(timeout);
        self
    }

    /// Waits for a billing problem (402) to be settled although a retry timeout is set, as long as
    /// the server allows.
    #[must_use]
    pub fn with_billing_wait(mut self) -> Self {
        self.billing_wait = true;
        self
    }

    /// Sets the timeout of one attempt. Defaults to 60 seconds for most requests. Polls for results
    /// keep their own timeout.
    #[must_use]
    pub fn with_request_timeout(mut self, timeout: Duration) -> Self {
        self.request_timeout = Some(timeout);
        self
    }

    /// Returns the maximum number of retries per round. Defaults to [`u32::MAX`]: only the protocol
    /// limits them.
    #[must_use]
    pub fn max_retries(&self) -> u32 {
        self.max_retries
    }

    /// Returns the time after which no further attempt starts, if limited.
    #[must_use]
    pub fn retry_timeout(&self) -> Option<Duration> {
        self.retry_timeout
    }

    /// Returns the timeout of one attempt, if set.
    #[must_use]
    pub fn request_timeout(&self) -> Option<Duration> {
        self.request_timeout
    }

    /// Returns whether further rounds follow a failed one.
    pub(crate) fn repeats_rounds(&self) -> bool {
        self.repeat_rounds
    }

    /// Restricts `policy`, which the protocol defines for a route, by the user's settings.
    pub(crate) fn apply(self, policy: RequestPolicy) -> RequestPolicy {
        let timeout = match policy.lane.is_poll() {
            true => policy.timeout,
            false => self.request_timeout.unwrap_or(policy.timeout),
        };
        RequestPolicy {
            max_retries: policy.max_retries.min(self.max_retries),
            repeat_rounds: policy.repeat_rounds && self.repeat_rounds,
            timeout,
            retry_timeout: self.retry_timeout,
            billing_wait: self.retry_timeout.is_none() || self.billing_wait,
            ..policy
        }
    }
}
