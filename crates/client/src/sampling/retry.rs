//! [`SamplingRetry`]: when and how often a sample is submitted again, and how many run at once.

use std::time::Duration;

use crate::error::{Error, ErrorKind, Result};

/// Resubmission and concurrency of samples.
///
/// A sample is resubmitted under a new sequence number if its result expired, if its submission or
/// its polls failed in spite of all retries, or, at most three times, if the server reports that it
/// failed to execute it. [`RetryPolicy`](crate::RetryPolicy) bounds all of that together.
///
/// Set it for all sampling clients with
/// [`ServiceClientBuilder::sampling_retry`](crate::ServiceClientBuilder::sampling_retry), or for
/// one with [`SamplingClient::with_sampling_retry`](crate::SamplingClient::with_sampling_retry).
///
/// ```
/// use std::time::Duration;
/// use tinkex::SamplingRetry;
///
/// let patient = SamplingRetry::default()
///     .base_delay(Duration::from_secs(1))
///     .max_delay(Duration::from_secs(30))
///     .max_concurrent_samples(200);
/// let never = SamplingRetry::disabled();
/// assert_ne!(patient, never);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use = "a configuration has no effect until it is passed to a client"]
pub struct SamplingRetry {
    base_delay: Duration,
    max_delay: Duration,
    jitter: f64,
    max_resubmissions: u32,
    progress_timeout: Duration,
    max_concurrent_samples: Option<u32>,
}

impl Default for SamplingRetry {
    /// Returns the configuration of the Python SDK.
    fn default() -> Self {
        Self {
            base_delay: Duration::from_millis(500),
            max_delay: Duration::from_secs(10),
            jitter: 0.25,
            max_resubmissions: u32::MAX,
            progress_timeout: Duration::from_secs(7200),
            max_concurrent_samples: None,
        }
    }
}

impl SamplingRetry {
    /// Returns a configuration that never resubmits a sample. The submission itself is still
    /// retried as the [`RetryPolicy`](crate::RetryPolicy) says.
    pub fn disabled() -> Self {
        Self::default().max_resubmissions(0)
    }

    /// Sets the delay before the first resubmission. It doubles with each. Defaults to 0.5 seconds.
    pub fn base_delay(mut self, delay: Duration) -> Self {
        self.base_delay = delay;
        self
    }

    /// Sets the longest delay before a resubmission. Defaults to 10 seconds.
    pub fn max_delay(mut self, delay: Duration) -> Self {
        self.max_delay = delay;
        self
    }

    /// Sets the fraction, from 0 to 1, by which a delay varies at random in both directions.
    /// Defaults to 0.25.
    pub fn jitter(mut self, fraction: f64) -> Self {
        self.jitter = fraction;
        self
    }

    /// Sets the maximum number of resubmissions of one sample. Unlimited by default.
    pub fn max_resubmissions(mut self, resubmissions: u32) -> Self {
        self.max_resubmissions = resubmissions;
        self
    }

    /// Sets how long the samples of a client may go without any of them succeeding before they
    /// fail. Defaults to 2 hours. Has no effect if the server disables the check.
    pub fn progress_timeout(mut self, timeout: Duration) -> Self {
        self.progress_timeout = timeout;
        self
    }

    /// Sets the maximum number of concurrent samples per sampling client, at least 1. By default
    /// only the server limits them, usually to 2000. The lower limit applies.
    pub fn max_concurrent_samples(mut self, samples: u32) -> Self {
        self.max_concurrent_samples = Some(samples);
        self
    }

    /// Returns the caller's limit of concurrent samples.
    pub(super) fn concurrency(&self) -> Option<u32> {
        self.max_concurrent_samples
    }

    /// Returns the time without a success after which samples fail.
    pub(super) fn progress_limit(&self) -> Duration {
        self.progress_timeout
    }

    /// Returns whether a sample may be resubmitted after `resubmissions` resubmissions.
    pub(super) fn allows_resubmission(&self, resubmissions: u32) -> bool {
        resubmissions < self.max_resubmissions
    }

    /// Returns the delay before resubmission number `attempt` (from 0). `random` is a number from 0
    /// to 1.
    pub(super) fn delay(&self, attempt: u32, random: f64) -> Duration {
        let exponent = i32::try_from(attempt.min(1000)).unwrap_or(1000);
        let longest = self.max_delay.as_secs_f64();
        let doubled = (self.base_delay.as_secs_f64() * 2_f64.powi(exponent)).min(longest);
        let delay = doubled * (1.0 + self.jitter * (2.0 * random - 1.0));
        Duration::try_from_secs_f64(delay.clamp(0.0, longest)).unwrap_or(self.max_delay)
    }

    /// Checks the ranges.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] if no sample could ever run, or the jitter is not in 0..=1.
    pub(crate) fn validate(&self) -> Result<()> {
        if self.max_concurrent_samples == Some(0) {
            let message = "invalid max_concurrent_samples 0: must be at least 1";
            return Err(Error::new(ErrorKind::Config, message));
        }
        if !(0.0..=1.0).contains(&self.jitter) {
            let message = format!("invalid jitter {}: must be from 0 to 1", self.jitter);
            return Err(Error::new(ErrorKind::Config, message));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::fixture;

    fn config(fields: &Value) -> SamplingRetry {
        let mut retry = SamplingRetry::default();
        for (name, value) in fields.as_object().unwrap() {
            let number = value.as_f64().unwrap();
            let seconds = Duration::from_secs_f64(number);
            retry = match name.as_str() {
                "jitter_factor" => retry.jitter(number),
                "retry_delay_base" => retry.base_delay(seconds),
                "retry_delay_max" => retry.max_delay(seconds),
                other => panic!("{other}"),
            };
        }
        retry
    }

    /// Covers AUD.4.
    #[test]
    fn delays_and_defaults_equal_those_of_the_python_sdk() {
        let cases = fixture::cases("retry_handler_delay.json");
        assert_eq!(cases.len(), 21);
        for case in cases {
            let retry = config(&case["config"]);
            let attempt = u32::try_from(case["attempt"].as_u64().unwrap()).unwrap();
            for (random, key) in [
                (0.0, "delay_at_random_0"),
                (0.5, "delay_at_random_half"),
                (1.0, "delay_at_random_1"),
            ] {
                let actual = retry.delay(attempt, random).as_secs_f64();
                assert!((actual - case[key].as_f64().unwrap()).abs() < 1e-9, "{case}");
            }
        }
        let file = fixture::load("retry_handler_delay.json");
        let defaults = &file["defaults"];
        let retry = SamplingRetry::default();
        for (actual, name) in [
            (retry.progress_timeout.as_secs_f64(), "progress_timeout"),
            (retry.base_delay.as_secs_f64(), "retry_delay_base"),
            (retry.max_delay.as_secs_f64(), "retry_delay_max"),
            (retry.jitter, "jitter_factor"),
        ] {
            assert_eq!(Some(actual), defaults[name].as_f64(), "{name}");
        }
        assert_eq!(defaults["enable_retry_logic"], retry.allows_resubmission(1_000_000));
        // The Python SDK replaces its default of 1000 by the limit that the server sets; here the
        // server's limit applies without a default.
        assert_eq!((&defaults["max_connections"], retry.concurrency()), (&1000.into(), None));
        for case in file["config_validation"].as_array().unwrap() {
            let limit = &case["max_connections"];
            // A negative number cannot be expressed here.
            let Some(limit) =
                limit.as_i64().map_or(Some(None), |n| u32::try_from(n).ok().map(Some))
            else {
                continue;
            };
            let retry = limit.map_or(retry, |limit| retry.max_concurrent_samples(limit));
            assert_eq!(case["ok"], retry.validate().is_ok(), "{case}");
        }
        for jitter in [f64::NAN, -0.1, 1.1] {
            assert!(retry.jitter(jitter).validate().is_err(), "{jitter}");
        }
        let longest = retry.base_delay(Duration::MAX).max_delay(Duration::MAX);
        assert_eq!(longest.delay(1000, 1.0), Duration::MAX, "no overflow");
    }
}
