//! Whether the same bytes are sent again, and when.
//!
//! The loop itself is [`Transport::send`](super::Transport), the only one that resends; what it
//! does after a failure is decided here. There are two rhythms. A *resend* follows soon after a lost
//! connection or a passing failure, with the same idempotency key. A *round* of resends that failed
//! may be followed by another, with a new key, until minutes have passed.
//!
//! Two failures count as neither. A 402 waits for the account to be settled. A request that is held
//! back together with others (a sample) is sent again after a 429 when their common pause is over,
//! however often that happens; only a person's patience ends it.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::Response;
use serde_json::json;
use tinkex_wire::JsonObject;
use tokio::time::{Instant, sleep};

use crate::error::{Error, is_retryable_status};
use crate::targets;
use crate::telemetry::EventQueue;

use super::backoff::RequestBackoff;
use super::billing::{self, Billing};
use super::delay;
use super::http::Lane;
use super::instrument;
use super::request_policy::RequestPolicy;

/// How long rounds go on, from the first attempt.
const BUDGET: Duration = Duration::from_secs(300);
const LONGEST_ROUND_PAUSE: Duration = Duration::from_secs(30);
/// What the service calls a round that failed.
const ROUND_FAILED: &str = "InternalClientHolder.execute_with_retries.exception";

/// How failed requests are sent again.
///
/// ```
/// use tinkex::RetryPolicy;
///
/// // Exactly one HTTP request per call; the error says when to come back.
/// let once = RetryPolicy::disabled();
/// assert_eq!(once.max_resends(), 0);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryPolicy {
    max_resends: u32,
    persist: bool,
    patience: Option<Duration>,
    timeout: Option<Duration>,
    wait_for_billing: bool,
}

impl Default for RetryPolicy {
    /// As the service expects of its clients: up to ten resends, and persistence for five minutes
    /// where a call may be repeated.
    fn default() -> Self {
        Self {
            max_resends: u32::MAX,
            persist: true,
            patience: None,
            timeout: None,
            wait_for_billing: false,
        }
    }
}

impl RetryPolicy {
    /// Nothing is sent twice.
    #[must_use]
    pub fn disabled() -> Self {
        Self { max_resends: 0, persist: false, ..Self::default() }
    }

    /// At most this many resends at a time, fewer where the service expects fewer.
    #[must_use]
    pub fn with_max_resends(mut self, resends: u32) -> Self {
        self.max_resends = resends;
        self
    }

    /// For a person who waits: a call is given up when another attempt would begin later than this
    /// after the first, and at once where only a person can help: something is there already (409),
    /// or the account has to be settled (402).
    #[must_use]
    pub fn within(mut self, patience: Duration) -> Self {
        self.patience = Some(patience);
        self
    }

    /// Waits all the same while the account has to be settled (402), as long as the server allows.
    #[must_use]
    pub fn wait_for_billing(mut self) -> Self {
        self.wait_for_billing = true;
        self
    }

    /// How long one attempt may take, in place of what is usual for the call. Waiting for an answer
    /// that takes its time keeps its own rhythm.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// The limit on resends.
    #[must_use]
    pub fn max_resends(&self) -> u32 {
        self.max_resends
    }

    /// How long a person waits, if one does.
    pub(crate) fn patience(&self) -> Option<Duration> {
        self.patience
    }

    /// Whether a call is tried anew after its resends.
    pub(crate) fn persists(&self) -> bool {
        self.persist
    }

    pub(crate) fn apply(self, rule: RequestPolicy) -> RequestPolicy {
        let (resends, persist) = (rule.resends.min(self.max_resends), rule.persist && self.persist);
        let timeout = match rule.lane {
            Lane::Poll | Lane::PollMany => rule.timeout,
            _ => self.timeout.unwrap_or(rule.timeout),
        };
        let unsettled = self.patience.is_none() || self.wait_for_billing;
        RequestPolicy {
            resends,
            persist,
            timeout,
            patience: self.patience,
            waits_for_billing: unsettled,
            ..rule
        }
    }
}

/// Why an attempt failed, and what the server said about another.
pub(crate) struct Failed {
    pub(crate) error: Error,
    /// The wait that the server asked for, in seconds.
    pub(crate) asked: Option<f64>,
    /// Whether the server wants a resend, if it said so.
    pub(crate) wanted: Option<bool>,
    /// Whether there is no sense in another attempt of any kind.
    for_good: bool,
}

impl Failed {
    /// The server answered with an error.
    pub(crate) fn of_reply(reply: &Response<Bytes>) -> Self {
        let asked = delay::asked(reply.headers(), SystemTime::now());
        let retry_after = delay::asked_duration(asked);
        Self {
            error: Error::from_response(reply.status().as_u16(), reply.body(), retry_after),
            asked,
            wanted: delay::should_resend(reply.headers()),
            for_good: false,
        }
    }

    /// No other attempt can succeed, whatever kind of error it is.
    pub(crate) fn for_good(error: Error) -> Self {
        Self { for_good: true, ..Self::from(error) }
    }

    fn may_be_resent(&self) -> bool {
        if self.for_good {
            return false;
        }
        self.wanted.unwrap_or_else(|| match self.error.status() {
            Some(status) => is_retryable_status(status) || status >= 600,
            None => self.error.is_retryable(),
        })
    }
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self { error, asked: None, wanted: None, for_good: false }
    }
}

/// Where a call stands: how often it was sent, and what tells its resends apart from new requests.
pub(crate) struct Sending {
    rule: RequestPolicy,
    backoff: Option<RequestBackoff>,
    fixed_key: Option<String>,
    key: String,
    sent_before: u32,
    attempts: u32,
    round: u32,
    start: Instant,
    /// When a person began to wait.
    since: Instant,
}

impl Sending {
    pub(crate) fn new(
        rule: RequestPolicy,
        backoff: Option<RequestBackoff>,
        fixed_key: Option<String>,
    ) -> Self {
        let key = fixed_key.clone().unwrap_or_else(new_key);
        let start = Instant::now();
        let (sent_before, attempts, round, since) = (0, 0, 0, start);
        Self { rule, backoff, fixed_key, key, sent_before, attempts, round, start, since }
    }

    /// The same where it is not the first that somebody waits for.
    pub(crate) fn waited_for_since(self, since: Option<Instant>) -> Self {
        Self { since: since.unwrap_or(self.since), ..self }
    }

    /// Waits until everyone may send again who is held back together with this.
    pub(crate) async fn held(&self) {
        if let Some(backoff) = &self.backoff {
            backoff.backoff.over().await;
        }
    }

    /// The same for all resends of a round.
    pub(crate) fn idempotency_key(&self) -> &str {
        &self.key
    }

    /// How often these bytes were sent before in this round.
    pub(crate) fn sent_before(&self) -> u32 {
        self.sent_before
    }

    /// An attempt failed: waits until it is time for another, or says why there is none.
    pub(crate) async fn failed(
        &mut self,
        failed: Failed,
        billing: &Billing,
        events: Option<&EventQueue>,
    ) -> Result<(), Error> {
        self.attempts += 1;
        let hopeless = match failed.error.status() {
            Some(402) => !self.rule.waits_for_billing,
            Some(409) => self.rule.patience.is_some(),
            _ => false,
        };
        if hopeless {
            return Err(failed.error.after(self.attempts, self.start.elapsed()));
        }
        if self.sent_before < self.rule.resends && failed.may_be_resent() {
            let wait = delay::before_resend(self.sent_before, failed.asked, fastrand::f64());
            if self.too_late_in(wait) {
                return Err(failed.error.after(self.attempts, self.start.elapsed()));
            }
            let (error, attempt) = (&failed.error, self.attempts);
            let (status, seconds) = (error.status(), wait.as_secs_f64());
            tracing::debug!(
                target: targets::RETRY, %error, status, seconds, attempt, "retrying request"
            );
            instrument::resend("soon");
            sleep(wait).await;
            self.sent_before += 1;
            return Ok(());
        }

        let status = failed.error.status();
        // One decision of the whole client: asked once for each 402.
        let unsettled = status == Some(402) && self.rule.persist && billing.pause();
        if let Some(backoff) = self.backoff.as_ref().filter(|_| unsettled || status == Some(429)) {
            backoff.too_much(delay::sensible(failed.asked));
            // Whoever waits for the account to be settled waits as long as the server allows.
            let late = !unsettled && self.too_late_in(backoff.backoff.rest());
            if !self.rule.persist || late {
                return Err(failed.error.after(self.attempts, self.start.elapsed()));
            }
            instrument::resend("pause");
        } else if unsettled {
            sleep(billing::PAUSE).await;
        } else {
            let elapsed = self.start.elapsed();
            if let Some(events) = events.filter(|_| self.rule.persist) {
                events.attempt(ROUND_FAILED, &failed.error, self.so_far(elapsed));
            }
            let sensible = !failed.for_good && failed.error.is_retryable();
            if !self.rule.persist || !sensible || elapsed >= BUDGET {
                let (error, attempts) = (&failed.error, self.attempts);
                tracing::debug!(target: targets::RETRY, %error, attempts, ?elapsed, "giving up");
                return Err(failed.error.after(self.attempts, elapsed));
            }
            let pause = Duration::from_secs(1 << self.round.min(5)).min(LONGEST_ROUND_PAUSE);
            let pause = pause.min(BUDGET - elapsed);
            if self.too_late_in(pause) {
                return Err(failed.error.after(self.attempts, elapsed));
            }
            let (error, attempt) = (&failed.error, self.attempts);
            let (status, seconds) = (error.status(), pause.as_secs_f64());
            tracing::debug!(target: targets::RETRY, %error, status, seconds, attempt, "retrying request");
            instrument::resend("round");
            sleep(pause).await;
            self.round += 1;
        }
        self.sent_before = 0;
        self.key = self.fixed_key.clone().unwrap_or_else(new_key);
        Ok(())
    }

    /// Whether nobody would wait for an attempt that begins after this pause.
    fn too_late_in(&self, pause: Duration) -> bool {
        self.rule.patience.is_some_and(|patience| self.since.elapsed() + pause > patience)
    }

    /// For the events.
    fn so_far(&self, elapsed: Duration) -> JsonObject {
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

    use serde_json::Value;
    use tinkex_wire::Route;

    use super::super::backoff::Backoff;
    use super::super::http::HttpFailure;
    use super::*;
    use crate::error::ErrorKind;
    use crate::fixture;

    fn outcome(step: &Value) -> Result<Response<Bytes>, Failed> {
        let lost = |failure: HttpFailure| Err(Error::from(failure).into());
        match step {
            Value::Number(status) => {
                let status = u16::try_from(status.as_u64().unwrap()).unwrap();
                let reply = Response::builder().status(status).body(Bytes::new()).unwrap();
                Err(Failed::of_reply(&reply))
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
    async fn rounds_go_on_as_in_the_reference() {
        for case in fixture::cases("execute_with_retries.json") {
            let mut script: VecDeque<Value> = case["script"].as_array().unwrap().clone().into();
            let busy = Duration::from_secs_f64(case["seconds_per_attempt"].as_f64().unwrap());
            let rule =
                RequestPolicy { resends: 0, persist: true, ..RequestPolicy::of(Route::OptimStep) };
            let billing = Billing::new(Duration::from_secs(3600));
            let start = Instant::now();
            let (mut attempts, mut sleeps) = (0, Vec::new());
            let mut sending = Sending::new(rule, None, None);
            let result = loop {
                attempts += 1;
                let step = script.pop_front().unwrap_or_else(|| case["then_forever"].clone());
                sleep(busy).await;
                let idle_since = Instant::now();
                match outcome(&step) {
                    Ok(_) => break Ok(()),
                    Err(failed) => match sending.failed(failed, &billing, None).await {
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
    async fn patience_ends_also_for_what_is_always_too_much() {
        let patience = Duration::from_secs(20);
        let rule = RetryPolicy::default().within(patience).apply(RequestPolicy::of(Route::Sample));
        let backoff = RequestBackoff { backoff: Arc::new(Backoff::new()), bytes: 1 };
        let billing = Billing::new(Duration::from_secs(3600));
        let (mut sending, start) = (Sending::new(rule, Some(backoff), None), Instant::now());
        let error = loop {
            sending.held().await;
            assert!(start.elapsed() <= patience, "nobody waits any more");
            let failed = outcome(&json!(429)).unwrap_err();
            if let Err(error) = sending.failed(failed, &billing, None).await {
                break error;
            }
        };
        assert_eq!((error.status(), error.attempts()), (Some(429), 21));
    }

    #[tokio::test(start_paused = true)]
    async fn patience_ends_the_rounds_and_is_not_spent_on_what_only_a_person_can_mend() {
        let policy = RetryPolicy::default().within(Duration::from_secs(20));
        for (status, waits) in [(503, true), (429, true), (409, false), (402, false)] {
            let billing = Billing::new(Duration::from_secs(3600));
            let rule = policy.apply(RequestPolicy::of(Route::ListTrainingRuns));
            let mut sending = Sending::new(rule, None, None);
            let error = loop {
                let failed = outcome(&json!(status)).unwrap_err();
                if let Err(error) = sending.failed(failed, &billing, None).await {
                    break error;
                }
            };
            assert_eq!(error.status(), Some(status));
            assert_eq!(error.attempts() > 1, waits, "{status}");
            assert!(error.elapsed() <= Duration::from_secs(20), "{status}");
        }
        let rule = policy.wait_for_billing().apply(RequestPolicy::of(Route::ListTrainingRuns));
        let mut sending = Sending::new(rule, None, None);
        let billing = Billing::new(Duration::from_secs(3600));
        for _ in 0..10 {
            let failed = outcome(&json!(402)).unwrap_err();
            sending.failed(failed, &billing, None).await.unwrap();
        }
    }

    #[test]
    fn the_server_may_insist_or_decline() {
        for case in fixture::cases("should_retry.json") {
            let status = u16::try_from(case["status"].as_u64().unwrap()).unwrap();
            if status < 400 {
                // A success never gets as far as this question.
                continue;
            }
            for (key, expected) in case.as_object().unwrap() {
                let value = match key.as_str() {
                    "status" => continue,
                    "absent" => None,
                    other => other.strip_prefix("header="),
                };
                let mut reply = Response::builder().status(status);
                if let Some(value) = value {
                    reply = reply.header("x-should-retry", value);
                }
                let failed = Failed::of_reply(&reply.body(Bytes::new()).unwrap());
                // Unlike the reference, the case of the word does not matter.
                let expected = if value == Some("TRUE") { &json!(true) } else { expected };
                assert_eq!(json!(failed.may_be_resent()), *expected, "{status} {value:?}");
            }
        }
    }
}
