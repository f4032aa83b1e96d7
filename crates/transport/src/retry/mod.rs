//! Retries of requests. After each failed attempt `decision` decides whether and when another
//! attempt follows, and `RetryState` carries out the decision: it waits, counts retries and rounds,
//! and changes the idempotency key with each round.
//!
//! [`Transport::send`](crate::Transport::send) runs the loop of attempts.
//!
//! [`CallOptions`](crate::CallOptions) has the caller's settings and `request_policy` the settings
//! of each request type; [`delay`] computes how long to wait, with the crate `tinkex-backoff`.
//! [`failed_attempt`] is an error with the retry headers of the response, [`call_progress`] counts
//! the attempts of a call, and [`log`] logs the retries. [`shared_backoff`] is the wait after a 429,
//! which [`backoff_registry`] shares between clients, and `billing` the wait after a 402.

pub mod backoff_registry;
pub(crate) mod billing;
pub mod call_progress;
mod decision;
pub mod delay;
pub mod failed_attempt;
pub mod log;
pub(crate) mod request_policy;
pub mod shared_backoff;

use std::time::Duration;

use serde_json::json;
use tinkex_wire::JsonObject;
use tokio::time::{Instant, sleep};

use crate::error::Error;
#[cfg(doc)]
use crate::error::ErrorKind;
use crate::telemetry::EventQueue;

use billing::BillingState;
use call_progress::CallProgress;
use decision::{RetryContext, RetryDecision};
use failed_attempt::FailedAttempt;
use log::{RetryLog, RetryReason};
use request_policy::RequestPolicy;
use shared_backoff::{LONG_RETRY_AFTER, RequestBackoff};

/// Name of the telemetry event for a failed round. The Python SDK uses the same name.
const ROUND_FAILED: &str = "InternalClientHolder.execute_with_retries.exception";

/// Progress of one request through its attempts.
pub(crate) struct RetryState<'a> {
    policy: RequestPolicy,
    backoff: Option<RequestBackoff>,
    /// Idempotency key of all rounds, if the caller set one.
    fixed_key: Option<String>,
    /// Idempotency key of this round.
    key: String,
    /// Number of retries so far in this round.
    retry_count: u32,
    /// Number of failed rounds, which determines the delay between rounds. Rounds that ended with a
    /// billing wait or a shared backoff do not count.
    failed_rounds: u32,
    /// When the request was started, before any wait for the shared backoff.
    start: Instant,
    /// The call that the request belongs to.
    call: &'a mut CallProgress,
}

/// State that the retries of all requests of one transport share.
pub(crate) struct RetryShared<'a> {
    pub(crate) billing: &'a BillingState,
    pub(crate) log: &'a RetryLog,
    pub(crate) events: Option<&'a EventQueue>,
}

impl<'a> RetryState<'a> {
    pub(crate) fn new(
        policy: RequestPolicy,
        backoff: Option<RequestBackoff>,
        fixed_key: Option<String>,
        call: &'a mut CallProgress,
    ) -> Self {
        Self {
            policy,
            backoff,
            key: fixed_key.clone().unwrap_or_else(new_key),
            fixed_key,
            retry_count: 0,
            failed_rounds: 0,
            start: Instant::now(),
            call,
        }
    }

    /// Waits until the shared backoff, if any, is over, and counts the attempt that follows.
    ///
    /// # Errors
    /// If the backoff ends after the time limit of the policy: the last failure, or an error of
    /// kind [`ErrorKind::RateLimited`] if nothing was sent yet. This can happen during the wait,
    /// because other requests may extend the backoff at any time.
    pub(crate) async fn before_attempt(&mut self) -> Result<(), Error> {
        // The time limit does not apply to a billing wait: a 402 is retried only if the policy
        // waits for the account to be settled, and the server limits that wait.
        let waits_for_billing = self.call.last_status() == Some(402);
        let limit = self.policy.give_up_after.filter(|_| !waits_for_billing);
        if let Some(request) = &self.backoff {
            while let Some(remaining) = request.backoff.active() {
                if limit.is_some_and(|limit| self.call.elapsed() + remaining > limit) {
                    let error = self.call.take_last_failure();
                    let error = error.unwrap_or_else(|| Error::rate_limited(remaining));
                    return Err(self.call.finish(error));
                }
                sleep(remaining).await;
            }
        }
        self.call.begin_attempt();
        Ok(())
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
    /// caller calls [`before_attempt`](Self::before_attempt) before each attempt, because other
    /// requests may start or extend the backoff at any time.
    pub(crate) async fn wait_or_give_up(
        &mut self,
        failed: FailedAttempt,
        shared: &RetryShared<'_>,
    ) -> Result<(), Error> {
        let context = self.context(&failed);
        let elapsed = context.elapsed;
        let backoff = context.backoff.unwrap_or_default();
        let too_long = context.too_long_retry_after();
        let decision = context.decide(|| shared.billing.should_wait());
        if let Some(request) = self.backoff.as_ref().filter(|_| decision.starts_backoff()) {
            request.on_rate_limit(self.retry_after(&failed));
        }
        if decision.is_failed_round() {
            self.report_failed_round(&failed.error, elapsed, shared.events);
        }
        let billing = failed.error.status() == Some(402);
        let retry_after = self.retry_after(&failed).filter(|_| !billing);
        let long_wait = retry_after.filter(|delay| *delay > LONG_RETRY_AFTER);
        let (delay, reason) = match decision {
            RetryDecision::Retry { delay } => (delay, RetryReason::Retry),
            RetryDecision::WaitForBilling => (billing::DELAY, RetryReason::Billing),
            RetryDecision::BackOff if billing => (backoff, RetryReason::Billing),
            RetryDecision::BackOff => (backoff, RetryReason::Backoff),
            RetryDecision::NewRound { delay } => (delay, RetryReason::Round),
            RetryDecision::GiveUp(reason) => {
                let error = match too_long {
                    Some(retry_after) if reason.is_limit() => {
                        failed.error.asks_for_too_long_wait(retry_after)
                    }
                    _ => failed.error,
                };
                return Err(self.call.finish(error));
            }
        };
        shared.log.retry(self.call, self.policy.lane, failed.error, delay, reason);
        match decision {
            RetryDecision::Retry { .. } => {
                sleep(delay).await;
                self.retry_count += 1;
            }
            RetryDecision::NewRound { .. } => {
                sleep(delay).await;
                self.failed_rounds += 1;
                self.start_round();
            }
            RetryDecision::WaitForBilling => {
                sleep(delay).await;
                self.start_round();
            }
            RetryDecision::BackOff => {
                // `before_attempt` waits for the backoff, which ends earlier than a long
                // `retry-after` of this request.
                if let Some(retry_after) = long_wait {
                    sleep(retry_after).await;
                }
                self.start_round();
            }
            // `GiveUp` has returned above.
            RetryDecision::GiveUp(_) => {}
        }
        Ok(())
    }

    /// Returns the context that the decision about `failed` needs.
    fn context<'b>(&'b self, failed: &'b FailedAttempt) -> RetryContext<'b> {
        let retry_after = self.retry_after(failed);
        let backoff = self.backoff.as_ref();
        RetryContext {
            policy: &self.policy,
            failed,
            retry_count: self.retry_count,
            failed_rounds: self.failed_rounds,
            attempts: self.call.attempts(),
            elapsed: self.start.elapsed(),
            call_elapsed: self.call.elapsed(),
            backoff: backoff.map(|request| request.wait_after_rate_limit(retry_after)),
            random: fastrand::f64(),
        }
    }

    /// Returns the `retry-after` of the server, if the policy honours it.
    fn retry_after(&self, failed: &FailedAttempt) -> Option<Duration> {
        self.policy.retry_after.delay(failed.retry_after)
    }

    /// Starts a round of retries, with an idempotency key of its own unless the caller set one.
    fn start_round(&mut self) {
        self.retry_count = 0;
        self.key = self.fixed_key.clone().unwrap_or_else(new_key);
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

    use super::*;
    use crate::call_options::CallOptions;
    use crate::error::ErrorKind;
    use crate::fixture;
    use crate::http::HttpFailure;
    use crate::retry::shared_backoff::SharedBackoff;

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

    /// State that the requests of one test share.
    struct Shared {
        billing: BillingState,
        log: RetryLog,
    }

    impl Shared {
        fn new() -> Self {
            let log = RetryLog::new(&"http://server.test".parse().unwrap());
            Self { billing: BillingState::new(Duration::from_secs(3600)), log }
        }

        fn get(&self) -> RetryShared<'_> {
            RetryShared { billing: &self.billing, log: &self.log, events: None }
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
            let shared = Shared::new();
            let mut call = CallProgress::new();
            let start = Instant::now();
            let mut attempts = 0;
            let mut sleeps = Vec::new();
            let mut state = RetryState::new(request_policy, None, None, &mut call);
            let result = loop {
                attempts += 1;
                let step = script.pop_front().unwrap_or_else(|| case["then_forever"].clone());
                state.before_attempt().await.unwrap();
                sleep(busy).await;
                let idle_since = Instant::now();
                match outcome(&step) {
                    Ok(_) => break Ok(()),
                    Err(failed) => match state.wait_or_give_up(failed, &shared.get()).await {
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

    /// Returns the number of attempts, and the final error, of a call whose attempts all fail.
    async fn fail(
        policy: RequestPolicy,
        backoff: Option<RequestBackoff>,
        step: &Value,
    ) -> (u32, Error) {
        let shared = Shared::new();
        let mut call = CallProgress::new();
        let start = Instant::now();
        let mut state = RetryState::new(policy, backoff, None, &mut call);
        let mut sent = 0;
        loop {
            if let Err(error) = state.before_attempt().await {
                return (sent, error);
            }
            assert!(policy.give_up_after.is_none_or(|limit| start.elapsed() <= limit));
            sent += 1;
            let failed = outcome(step).unwrap_err();
            if let Err(error) = state.wait_or_give_up(failed, &shared.get()).await {
                return (sent, error);
            }
        }
    }

    fn shared_backoff() -> RequestBackoff {
        RequestBackoff { backoff: Arc::new(SharedBackoff::new()), bytes: 1 }
    }

    #[tokio::test(start_paused = true)]
    async fn the_time_limit_ends_repeated_rate_limits() {
        let policy = CallOptions::new().give_up_after(Duration::from_secs(20));
        let policy = policy.apply(RequestPolicy::for_route(Route::Sample));
        let (sent, error) = fail(policy, Some(shared_backoff()), &json!(429)).await;
        assert_eq!((error.status(), error.attempts(), sent), (Some(429), 21, 21));
    }

    /// Another request may extend the backoff beyond the time limit of a waiting one.
    #[tokio::test(start_paused = true)]
    async fn the_time_limit_ends_the_wait_for_a_shared_backoff() {
        let policy = CallOptions::new().give_up_after(Duration::from_secs(20));
        let policy = policy.apply(RequestPolicy::for_route(Route::Sample));
        let backoff = shared_backoff();
        backoff.backoff.start(Duration::from_secs(21));
        let (sent, error) = fail(policy, Some(backoff.clone()), &json!(429)).await;
        assert_eq!((sent, error.attempts()), (0, 0), "nothing is sent");
        assert_eq!(error.kind(), ErrorKind::RateLimited);
        assert_eq!(error.retry_after(), Some(Duration::from_secs(21)));

        sleep(Duration::from_secs(21)).await;
        let shared = Shared::new();
        let mut call = CallProgress::new();
        let mut state = RetryState::new(policy, Some(backoff.clone()), None, &mut call);
        state.before_attempt().await.unwrap();
        let failed = outcome(&json!(429)).unwrap_err();
        state.wait_or_give_up(failed, &shared.get()).await.unwrap();
        backoff.backoff.start(Duration::from_secs(60));
        let error = state.before_attempt().await.unwrap_err();
        assert_eq!((error.status(), error.attempts()), (Some(429), 1), "the last failure is kept");
    }

    /// The default repeats rounds as the Python SDK does; `max_attempts` caps their total.
    #[tokio::test(start_paused = true)]
    async fn max_attempts_caps_all_rounds() {
        for route in [Route::OptimStep, Route::SaveWeights, Route::Sample] {
            let by_protocol = RequestPolicy::for_route(route);
            let (sent, _) = fail(CallOptions::new().apply(by_protocol), None, &json!(500)).await;
            assert!(sent >= 15, "{route}: rounds are repeated for five minutes: {sent}");
            for (limit, expected) in [(0, 1), (1, 1), (2, 2), (12, 12), (14, 14)] {
                let policy = CallOptions::new().max_attempts(limit).apply(by_protocol);
                for step in [json!(500), json!("conn"), json!("timeout")] {
                    let (sent, error) = fail(policy, None, &step).await;
                    assert_eq!((sent, error.attempts()), (expected, expected), "{route} {step}");
                }
                let (sent, error) = fail(policy, Some(shared_backoff()), &json!(429)).await;
                assert_eq!((sent, error.status()), (expected, Some(429)), "{route}");
                let (sent, _) = fail(policy, None, &json!(402)).await;
                assert_eq!(sent, expected, "{route}: billing waits count");
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_time_limit_ends_rounds_and_failures_that_need_the_user_end_at_once() {
        let policy = CallOptions::new().give_up_after(Duration::from_secs(20));
        let by_protocol = RequestPolicy::for_route(Route::ListTrainingRuns);
        for (status, waits) in [(503, true), (429, true), (409, false), (402, false)] {
            let (sent, error) = fail(policy.apply(by_protocol), None, &json!(status)).await;
            assert_eq!(error.status(), Some(status));
            assert_eq!(sent > 1, waits, "{status}");
            assert!(error.elapsed() <= Duration::from_secs(20), "{status}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_time_limit_does_not_end_a_wait_for_billing() {
        let policy = CallOptions::new().give_up_after(Duration::from_secs(20));
        for (route, backoff) in
            [(Route::ListTrainingRuns, None), (Route::Sample, Some(shared_backoff()))]
        {
            let shared = Shared::new();
            let mut call = CallProgress::new();
            let policy = policy.wait_for_billing().apply(RequestPolicy::for_route(route));
            let mut state = RetryState::new(policy, backoff, None, &mut call);
            for _ in 0..30 {
                state.before_attempt().await.unwrap();
                let failed = outcome(&json!(402)).unwrap_err();
                state.wait_or_give_up(failed, &shared.get()).await.unwrap();
            }
        }
    }
}
