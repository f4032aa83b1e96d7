//! Decides whether and when a failed attempt is repeated.
//!
//! [`Transport::send`](super::Transport::send) runs the loop; [`RetryState::failed`] decides after
//! each failure:
//!
//! * A *retry* follows within seconds of a lost connection or a retryable status, with the same
//!   idempotency key.
//! * A *round* of retries that failed is followed by another, with a new idempotency key, until
//!   five minutes have passed since the first attempt.
//! * A 402 waits until the account is settled, as long as the server allows.
//! * A sampling request that shares a [`Backoff`](super::backoff::Backoff) is repeated after every
//!   429, once the backoff is over. Only the retry timeout ends that.

use std::time::Duration;

use serde_json::json;
use tinkex_wire::JsonObject;
use tokio::time::{Instant, sleep};

use crate::error::Error;
use crate::targets;
use crate::telemetry::EventQueue;

use super::backoff::RequestBackoff;
use super::billing::{self, BillingState};
use super::delay;
use super::failed_attempt::FailedAttempt;
use super::instrument;
use super::request_policy::RequestPolicy;

/// Time after the first attempt during which new rounds are started.
const ROUNDS_TIMEOUT: Duration = Duration::from_secs(300);
/// Longest delay between two rounds.
const MAX_ROUND_DELAY: Duration = Duration::from_secs(30);
/// Name of the telemetry event for a failed round. The name is the Python SDK's.
const ROUND_FAILED: &str = "InternalClientHolder.execute_with_retries.exception";

/// Policy for repeating failed requests.
///
/// The default is what the service expects: up to ten retries per round, with delays that double
/// from 0.5 to 10 seconds and are shortened at random by up to a quarter, and new rounds for up to
/// five minutes. The protocol allows fewer attempts for some requests, for example one per round
/// for saves.
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

    /// Returns the maximum number of retries per round.
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

    /// Restricts the policy of a route by this policy.
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

/// Progress of one request through its attempts.
pub(crate) struct RetryState {
    policy: RequestPolicy,
    backoff: Option<RequestBackoff>,
    /// Idempotency key of all rounds, if the caller set one.
    fixed_key: Option<String>,
    /// Idempotency key of this round.
    key: String,
    /// Retries in this round.
    retry_count: u32,
    attempts: u32,
    round: u32,
    start: Instant,
    /// Start of the retry timeout.
    waiting_since: Instant,
}

impl RetryState {
    pub(crate) fn new(
        policy: RequestPolicy,
        backoff: Option<RequestBackoff>,
        fixed_key: Option<String>,
    ) -> Self {
        let key = fixed_key.clone().unwrap_or_else(new_key);
        let start = Instant::now();
        let (retry_count, attempts, round, waiting_since) = (0, 0, 0, start);
        Self { policy, backoff, fixed_key, key, retry_count, attempts, round, start, waiting_since }
    }

    /// Starts the retry timeout at `since` if given, for a request that resubmits an earlier one.
    pub(crate) fn with_waiting_since(self, since: Option<Instant>) -> Self {
        Self { waiting_since: since.unwrap_or(self.waiting_since), ..self }
    }

    /// Waits until the shared backoff, if any, is over.
    pub(crate) async fn wait_for_backoff(&self) {
        if let Some(request) = &self.backoff {
            request.backoff.wait().await;
        }
    }

    /// Returns the idempotency key, which is the same for all retries of a round.
    pub(crate) fn idempotency_key(&self) -> &str {
        &self.key
    }

    /// Returns the number of retries so far in this round.
    pub(crate) fn retry_count(&self) -> u32 {
        self.retry_count
    }

    /// Waits before the next attempt, or returns the error if no attempt follows.
    pub(crate) async fn failed(
        &mut self,
        failed: FailedAttempt,
        billing: &BillingState,
        events: Option<&EventQueue>,
    ) -> Result<(), Error> {
        self.attempts += 1;
        let needs_user = match failed.error.status() {
            Some(402) => !self.policy.billing_wait,
            Some(409) => self.policy.retry_timeout.is_some(),
            _ => false,
        };
        if needs_user {
            return Err(failed.error.after(self.attempts, self.start.elapsed()));
        }
        if self.retry_count < self.policy.max_retries && failed.is_retryable() {
            let delay = delay::before_retry(self.retry_count, failed.retry_after, fastrand::f64());
            if self.exceeds_timeout(delay) {
                return Err(failed.error.after(self.attempts, self.start.elapsed()));
            }
            self.log_retry(&failed.error, delay, "retry");
            sleep(delay).await;
            self.retry_count += 1;
            return Ok(());
        }

        let status = failed.error.status();
        // The billing state is shared: call `should_wait` exactly once per 402.
        let unsettled = status == Some(402) && self.policy.repeat_rounds && billing.should_wait();
        if let Some(request) = self.backoff.as_ref().filter(|_| unsettled || status == Some(429)) {
            request.on_rate_limit(delay::acceptable(failed.retry_after));
            // The retry timeout does not apply to billing problems.
            let late = !unsettled && self.exceeds_timeout(request.backoff.remaining());
            if !self.policy.repeat_rounds || late {
                return Err(failed.error.after(self.attempts, self.start.elapsed()));
            }
            instrument::count_retry("backoff");
        } else if unsettled {
            sleep(billing::DELAY).await;
        } else {
            let elapsed = self.start.elapsed();
            if let Some(events) = events.filter(|_| self.policy.repeat_rounds) {
                events.attempt(ROUND_FAILED, &failed.error, self.progress(elapsed));
            }
            let retryable = !failed.permanent && failed.error.is_retryable();
            if !self.policy.repeat_rounds || !retryable || elapsed >= ROUNDS_TIMEOUT {
                let (error, attempts) = (&failed.error, self.attempts);
                tracing::debug!(target: targets::RETRY, %error, attempts, ?elapsed, "giving up");
                return Err(failed.error.after(self.attempts, elapsed));
            }
            let delay = Duration::from_secs(1 << self.round.min(5)).min(MAX_ROUND_DELAY);
            let delay = delay.min(ROUNDS_TIMEOUT - elapsed);
            if self.exceeds_timeout(delay) {
                return Err(failed.error.after(self.attempts, elapsed));
            }
            self.log_retry(&failed.error, delay, "round");
            sleep(delay).await;
            self.round += 1;
        }
        self.retry_count = 0;
        self.key = self.fixed_key.clone().unwrap_or_else(new_key);
        Ok(())
    }

    fn log_retry(&self, error: &Error, delay: Duration, reason: &'static str) {
        let (status, seconds, attempt) = (error.status(), delay.as_secs_f64(), self.attempts);
        tracing::debug!(
            target: targets::RETRY, %error, status, seconds, attempt, "retrying request"
        );
        instrument::count_retry(reason);
    }

    /// Returns whether an attempt after `delay` would start after the retry timeout.
    fn exceeds_timeout(&self, delay: Duration) -> bool {
        let timeout = self.policy.retry_timeout;
        timeout.is_some_and(|timeout| self.waiting_since.elapsed() + delay > timeout)
    }

    /// Returns the numbers that telemetry reports for a failed round.
    fn progress(&self, elapsed: Duration) -> JsonObject {
        let numbers = [
            ("attempt_count", json!(self.round + 1)),
            ("elapsed_time", json!(elapsed.as_secs_f64())),
        ];
        numbers.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }
}

fn new_key() -> String {
    format!("stainless-rust-retry-{}", uuid::Uuid::new_v4())
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Arc;

    use bytes::Bytes;
    use http::Response;
    use serde_json::Value;
    use tinkex_wire::Route;

    use super::super::backoff::Backoff;
    use super::super::http::HttpFailure;
    use super::*;
    use crate::error::ErrorKind;
    use crate::fixture;

    /// Converts a scripted step: a status or the name of an outcome.
    fn outcome(step: &Value) -> Result<Response<Bytes>, FailedAttempt> {
        let lost = |failure: HttpFailure| Err(Error::from(failure).into());
        match step {
            Value::Number(status) => {
                let status = u16::try_from(status.as_u64().unwrap()).unwrap();
                let response = Response::builder().status(status).body(Bytes::new()).unwrap();
                Err(FailedAttempt::from_response(&response))
            }
            Value::String(word) => match word.as_str() {
                "ok" => Ok(Response::new(Bytes::new())),
                "conn" => lost(HttpFailure::connect("scripted")),
                "timeout" | "asyncio_timeout" => lost(HttpFailure::timeout("scripted")),
                "value_error" => Err(Error::new(ErrorKind::InvalidInput, "scripted").into()),
                other => panic!("{other}"),
            },
            other => panic!("{other}"),
        }
    }

    /// Covers X15.
    #[tokio::test(start_paused = true)]
    async fn rounds_are_repeated_as_in_the_python_sdk() {
        for case in fixture::cases("execute_with_retries.json") {
            let mut script: VecDeque<Value> = case["script"].as_array().unwrap().clone().into();
            let busy = Duration::from_secs_f64(case["seconds_per_attempt"].as_f64().unwrap());
            let request_policy = RequestPolicy {
                max_retries: 0,
                repeat_rounds: true,
                ..RequestPolicy::for_route(Route::OptimStep)
            };
            let billing = BillingState::new(Duration::from_secs(3600));
            let start = Instant::now();
            let (mut attempts, mut sleeps) = (0, Vec::new());
            let mut state = RetryState::new(request_policy, None, None);
            let result = loop {
                attempts += 1;
                let step = script.pop_front().unwrap_or_else(|| case["then_forever"].clone());
                sleep(busy).await;
                let idle_since = Instant::now();
                match outcome(&step) {
                    Ok(_) => break Ok(()),
                    Err(failed) => match state.failed(failed, &billing, None).await {
                        Ok(()) => sleeps.push(json!(idle_since.elapsed().as_secs_f64())),
                        Err(error) => break Err(error),
                    },
                }
            };
            assert_eq!(json!(attempts), case["attempts"], "{case}");
            assert_eq!(json!(result.is_ok()), case["result"]["ok"], "{case}");
            if let Err(error) = result {
                assert_eq!(json!(error.status()), case["result"]["status"], "{case}");
                assert_eq!(json!(error.attempts()), case["attempts"], "{case}");
            }
            let expected: Vec<Value> = match &case["sleeps"] {
                Value::Array(each) => each.iter().map(|s| json!(s.as_f64().unwrap())).collect(),
                all => {
                    let count = usize::try_from(all["count"].as_u64().unwrap()).unwrap();
                    vec![json!(all["each"].as_f64().unwrap()); count]
                }
            };
            assert_eq!(sleeps, expected, "{case}");
            let total = (Instant::now() - start).as_secs_f64();
            assert_eq!(json!(total), case["total_elapsed"], "{case}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_retry_timeout_ends_repeated_rate_limits() {
        let timeout = Duration::from_secs(20);
        let request_policy = RetryPolicy::default()
            .with_retry_timeout(timeout)
            .apply(RequestPolicy::for_route(Route::Sample));
        let backoff = RequestBackoff { backoff: Arc::new(Backoff::new()), bytes: 1 };
        let billing = BillingState::new(Duration::from_secs(3600));
        let (mut state, start) =
            (RetryState::new(request_policy, Some(backoff), None), Instant::now());
        let error = loop {
            state.wait_for_backoff().await;
            assert!(start.elapsed() <= timeout, "no attempt starts later");
            let failed = outcome(&json!(429)).unwrap_err();
            if let Err(error) = state.failed(failed, &billing, None).await {
                break error;
            }
        };
        assert_eq!((error.status(), error.attempts()), (Some(429), 21));
    }

    #[tokio::test(start_paused = true)]
    async fn the_retry_timeout_ends_rounds_and_failures_that_need_the_user_end_at_once() {
        let policy = RetryPolicy::default().with_retry_timeout(Duration::from_secs(20));
        for (status, waits) in [(503, true), (429, true), (409, false), (402, false)] {
            let billing = BillingState::new(Duration::from_secs(3600));
            let request_policy = policy.apply(RequestPolicy::for_route(Route::ListTrainingRuns));
            let mut state = RetryState::new(request_policy, None, None);
            let error = loop {
                let failed = outcome(&json!(status)).unwrap_err();
                if let Err(error) = state.failed(failed, &billing, None).await {
                    break error;
                }
            };
            assert_eq!(error.status(), Some(status));
            assert_eq!(error.attempts() > 1, waits, "{status}");
            assert!(error.elapsed() <= Duration::from_secs(20), "{status}");
        }
        let request_policy =
            policy.with_billing_wait().apply(RequestPolicy::for_route(Route::ListTrainingRuns));
        let mut state = RetryState::new(request_policy, None, None);
        let billing = BillingState::new(Duration::from_secs(3600));
        for _ in 0..10 {
            let failed = outcome(&json!(402)).unwrap_err();
            state.failed(failed, &billing, None).await.unwrap();
        }
    }

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
                // Unlike the Python SDK, the value is case-insensitive.
                let expected = if value == Some("TRUE") { &json!(true) } else { expected };
                assert_eq!(json!(failed.is_retryable()), *expected, "{status} {value:?}");
            }
        }
    }
}
