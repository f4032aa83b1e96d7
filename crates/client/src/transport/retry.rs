//! Carries out what [`retry_decision`](super::retry_decision) decides after each failed attempt:
//! waits, counts retries and rounds, and changes the idempotency key with each round.
//!
//! [`Transport::send`](super::Transport::send) runs the loop of attempts.

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
use super::retry_decision::{RetryContext, RetryDecision};

/// Name of the telemetry event for a failed round. The name is the Python SDK's.
const ROUND_FAILED: &str = "InternalClientHolder.execute_with_retries.exception";

/// Progress of one request through its attempts.
pub(crate) struct RetryState {
    policy: RequestPolicy,
    backoff: Option<RequestBackoff>,
    /// Idempotency key of all rounds, if the caller set one.
    fixed_key: Option<String>,
    /// Idempotency key of this round.
    key: String,
    /// Number of retries so far in this round.
    retry_count: u32,
    /// Number of attempts in all rounds.
    attempts: u32,
    /// Number of failed rounds. Rounds that ended with a billing wait or a shared backoff do not
    /// count, so that they do not lengthen the delay between rounds.
    failed_rounds: u32,
    /// When the request was started, before any wait for the shared backoff.
    start: Instant,
    /// Start of the retry timeout. Earlier than `start` if the request resubmits another one.
    waiting_since: Instant,
}

impl RetryState {
    pub(crate) fn new(
        policy: RequestPolicy,
        backoff: Option<RequestBackoff>,
        fixed_key: Option<String>,
    ) -> Self {
        let start = Instant::now();
        Self {
            policy,
            backoff,
            key: fixed_key.clone().unwrap_or_else(new_key),
            fixed_key,
            retry_count: 0,
            attempts: 0,
            failed_rounds: 0,
            start,
            waiting_since: start,
        }
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

    /// Waits before the next attempt, or returns the error of `failed` if no attempt follows.
    ///
    /// Starts the shared backoff if the server limits the rate, but does not wait for it: the
    /// caller calls [`wait_for_backoff`](Self::wait_for_backoff) before each attempt, because other
    /// requests may start or extend the backoff at any time.
    pub(crate) async fn wait_or_give_up(
        &mut self,
        failed: FailedAttempt,
        billing: &BillingState,
        events: Option<&EventQueue>,
    ) -> Result<(), Error> {
        self.attempts += 1;
        let context = self.context(&failed);
        let elapsed = context.elapsed;
        let decision = context.decide(|| billing.should_wait());
        if let Some(request) = self.backoff.as_ref().filter(|_| decision.starts_backoff()) {
            request.on_rate_limit(delay::acceptable(failed.retry_after));
        }
        if decision.is_failed_round() {
            self.report_failed_round(&failed.error, elapsed, events);
        }
        match decision {
            RetryDecision::Retry { delay } => {
                self.log_retry(&failed.error, delay, "retry");
                sleep(delay).await;
                self.retry_count += 1;
            }
            RetryDecision::WaitForBilling => {
                sleep(billing::DELAY).await;
                self.start_round();
            }
            RetryDecision::BackOff => {
                instrument::count_retry("backoff");
                self.start_round();
            }
            RetryDecision::NewRound { delay } => {
                self.log_retry(&failed.error, delay, "round");
                sleep(delay).await;
                self.failed_rounds += 1;
                self.start_round();
            }
            RetryDecision::GiveUp(_) => {
                let (error, attempts) = (failed.error, self.attempts);
                tracing::debug!(target: targets::RETRY, %error, attempts, elapsed = elapsed.as_secs_f64(),
                    "giving up");
                return Err(error.after(attempts, elapsed));
            }
        }
        Ok(())
    }

    /// Returns the context of a failure, for the decision about it.
    fn context<'a>(&'a self, failed: &'a FailedAttempt) -> RetryContext<'a> {
        let retry_after = delay::acceptable(failed.retry_after);
        let backoff = self.backoff.as_ref();
        RetryContext {
            policy: &self.policy,
            failed,
            retry_count: self.retry_count,
            failed_rounds: self.failed_rounds,
            elapsed: self.start.elapsed(),
            waited: self.waiting_since.elapsed(),
            backoff: backoff.map(|request| request.remaining_after_rate_limit(retry_after)),
            random: fastrand::f64(),
        }
    }

    /// Starts a round of retries, with an idempotency key of its own unless the caller set one.
    fn start_round(&mut self) {
        self.retry_count = 0;
        self.key = self.fixed_key.clone().unwrap_or_else(new_key);
    }

    fn log_retry(&self, error: &Error, delay: Duration, reason: &'static str) {
        let (status, seconds, attempt) = (error.status(), delay.as_secs_f64(), self.attempts);
        let lane = self.policy.lane.as_str();
        tracing::debug!(
            target: targets::RETRY, lane, %error, status, seconds, attempt, "retrying request"
        );
        instrument::count_retry(reason);
    }

    /// Reports a failed round in telemetry, if the policy repeats rounds.
    fn report_failed_round(&self, error: &Error, elapsed: Duration, events: Option<&EventQueue>) {
        let Some(events) = events.filter(|_| self.policy.repeat_rounds) else { return };
        let numbers = [
            ("attempt_count", json!(self.failed_rounds + 1)),
            ("elapsed_time", json!(elapsed.as_secs_f64())),
        ];
        let numbers = numbers.into_iter().map(|(name, value)| (name.to_owned(), value));
        events.attempt(ROUND_FAILED, error, numbers.collect::<JsonObject>());
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
    use super::super::retry_policy::RetryPolicy;
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
                    Err(failed) => match state.wait_or_give_up(failed, &billing, None).await {
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
            if let Err(error) = state.wait_or_give_up(failed, &billing, None).await {
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
                if let Err(error) = state.wait_or_give_up(failed, &billing, None).await {
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
            state.wait_or_give_up(failed, &billing, None).await.unwrap();
        }
    }
}
