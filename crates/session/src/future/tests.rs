//! Tests of the batch poll against the recorded behaviour of the Python SDK.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ::http::{HeaderMap, Request, Response};
use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use serde_json::{Value, json};
use tinkex_wire::{FuturesTarget, RequestId, SamplerId};
use tokio::time::{Instant, sleep};

use super::{Announcement, BatchPoll};
use crate::config::{ApiKey, Credential};
use crate::fixture;
use crate::task::Task;
use crate::transport::CallOptions;
use crate::transport::Transport;
use crate::transport::http::{HttpFailure, HttpService, Lane};

/// Server that responds to polls as scripted, then holds every poll.
#[derive(Clone, Default)]
struct PollScript(Arc<Mutex<PollScriptState>>);

#[derive(Default)]
struct PollScriptState {
    /// Responses to the next polls: a status, a string for a lost connection, or a body.
    responses: VecDeque<Value>,
    /// Time after which the server responds to a poll without a scripted response, with no
    /// announcement; `None` if the server never responds.
    hold: Option<Duration>,
    /// Time and body of each poll.
    received: Vec<(Instant, Value)>,
}

impl PollScript {
    fn new(responses: impl IntoIterator<Item = Value>) -> Self {
        let script = Self::default();
        script.respond(responses);
        script
    }

    fn respond(&self, responses: impl IntoIterator<Item = Value>) {
        self.0.lock().unwrap().responses = responses.into_iter().collect();
    }

    fn received(&self) -> Vec<(Instant, Value)> {
        self.0.lock().unwrap().received.clone()
    }
}

impl HttpService for PollScript {
    fn send(
        &self,
        lane: Lane,
        request: Request<Bytes>,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>> {
        assert_eq!((lane, timeout), (Lane::PollMany, Duration::from_secs(45)));
        let body: Value = serde_json::from_slice(request.body()).unwrap();
        let mut state = self.0.lock().unwrap();
        state.received.push((Instant::now(), body));
        let Some(step) = state.responses.pop_front() else {
            let Some(hold) = state.hold else { return futures_util::future::pending().boxed() };
            return async move {
                sleep(hold).await;
                Ok(Response::new(Bytes::from_static(br#"{"completions": [], "cursor": 0}"#)))
            }
            .boxed();
        };
        let response = |status: u16, body: String| {
            Response::builder().status(status).body(Bytes::from(body)).unwrap()
        };
        let result = match step {
            Value::Number(status) => {
                Ok(response(u16::try_from(status.as_u64().unwrap()).unwrap(), "x".to_owned()))
            }
            Value::String(_) => Err(HttpFailure::connect("scripted")),
            body => Ok(response(200, body.to_string())),
        };
        futures_util::future::ready(result).boxed()
    }
}

fn start_batch_poll(script: &PollScript) -> BatchPoll {
    let key = Credential::Key(ApiKey::new("tml-x").unwrap());
    let transport = Transport::new(
        Arc::new(script.clone()),
        "http://poll.test".parse().unwrap(),
        key,
        HeaderMap::new(),
        CallOptions::new(),
        Arc::default(),
    );
    let target = FuturesTarget::new(SamplerId::from("s:sample:0"), 3);
    BatchPoll::start(transport, target, false)
}

/// Covers R-POLL.
#[tokio::test(start_paused = true)]
async fn batch_polls_match_the_python_sdk() {
    for case in fixture::cases("futures_poller.json") {
        let script = PollScript::new(case["script"].as_array().unwrap().clone());
        let batch_poll = Arc::new(start_batch_poll(&script));
        let outcomes: Arc<Mutex<HashMap<String, Value>>> = Arc::default();
        let mut waiters = Vec::new();
        for action in case["actions"].as_array().unwrap() {
            let id = action[1].as_str().unwrap_or_default().to_owned();
            match action[0].as_str().unwrap() {
                "wait" => {
                    let batch_poll = Arc::clone(&batch_poll);
                    let outcomes = Arc::clone(&outcomes);
                    waiters.push(Task::spawn(async move {
                        let outcome = batch_poll
                            .wait_for(&RequestId::from(id.as_str()), &CallOptions::new())
                            .await;
                        let outcome = match outcome {
                            Ok(Announcement::Completed(completion)) => {
                                serde_json::to_value(completion).unwrap()
                            }
                            Ok(_) => json!("poll individually"),
                            Err(_) => json!("error:TinkerError"),
                        };
                        outcomes.lock().unwrap().insert(id, outcome);
                    }));
                }
                "retrieved" => batch_poll.mark_retrieved(RequestId::from(id)),
                _ => {}
            }
            sleep(Duration::from_secs(100)).await;
        }
        let polls = script.received();
        let received: Vec<Value> = polls
            .iter()
            .map(|(_, poll)| {
                assert_eq!(poll["target"]["cloned_sampler_id"], 3);
                json!({
                    "prev_cursor": poll["prev_cursor"], "retrieved": poll["retrieved_request_ids"],
                    "timeout": 45.0, "max_retries": 0,
                })
            })
            .collect();
        assert_eq!(json!(received), case["requests"], "{case}");
        let sleeps: Vec<u64> =
            polls.windows(2).map(|pair| (pair[1].0 - pair[0].0).as_secs()).collect();
        // Longer gaps come from the delays between the actions of this test.
        let sleeps: Vec<u64> = sleeps.into_iter().filter(|s| (1..10).contains(s)).collect();
        assert_eq!(json!(sleeps), case["sleeps"], "{case}");
        for (id, expected) in case["waiters"].as_object().unwrap() {
            let mut expected = expected.clone();
            if let Some(fields) = expected.as_object_mut() {
                fields.retain(|_, value| !value.is_null());
            }
            assert_eq!(outcomes.lock().unwrap()[id], expected, "{case}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn results_are_polled_individually_if_the_server_lacks_the_endpoint() {
    let script = PollScript::new([json!(404)]);
    let batch_poll = start_batch_poll(&script);
    let id = RequestId::from("a");
    for _ in 0..2 {
        let announcement = batch_poll.wait_for(&id, &CallOptions::new()).await.unwrap();
        assert_eq!(announcement, Announcement::NotOffered);
    }
    assert_eq!(script.received().len(), 1, "the endpoint is not tried again");
}

#[tokio::test(start_paused = true)]
async fn dropped_waiters_are_forgotten() {
    let script = PollScript::default();
    let batch_poll = start_batch_poll(&script);
    let dropped = RequestId::from("dropped");
    let pending = RequestId::from("pending");
    assert!(batch_poll.wait_for(&dropped, &CallOptions::new()).now_or_never().is_none());
    sleep(Duration::from_secs(100)).await;
    assert!(script.received().is_empty(), "no poll without a waiter");
    let both = json!([{"request_id": "dropped"}, {"request_id": "pending"}]);
    script.respond([json!({"completions": both, "cursor": 2})]);
    batch_poll.wait_for(&pending, &CallOptions::new()).await.unwrap();
    assert!(batch_poll.is_empty(), "the announcement of a dropped waiter is not kept");
}

/// A sample cancelled during its submission is announced without ever having a waiter.
#[tokio::test(start_paused = true)]
async fn announcements_without_waiters_are_bounded() {
    let script = PollScript::default();
    let batch_poll = start_batch_poll(&script);
    let early = RequestId::from("early");
    let announced = |ids: Vec<String>, cursor: usize| {
        let completions: Vec<Value> = ids.iter().map(|id| json!({"request_id": id})).collect();
        json!({"completions": completions, "cursor": cursor})
    };
    let mut polls: VecDeque<Value> = (0..60)
        .map(|poll| announced((0..1000).map(|i| format!("{poll}-{i}")).collect(), poll))
        .collect();
    polls.push_back(announced(vec!["early".to_owned(), "pending".to_owned()], 60));
    script.respond(polls);
    batch_poll.wait_for(&RequestId::from("pending"), &CallOptions::new()).await.unwrap();
    assert!(batch_poll.unclaimed() <= 20_000, "{} announcements", batch_poll.unclaimed());
    let found = batch_poll.wait_for(&early, &CallOptions::new()).now_or_never();
    assert!(found.is_some(), "an early announcement is found");
}

/// Each call of a sampling session waits as long as its own policy allows.
#[tokio::test(start_paused = true)]
async fn a_failed_batch_poll_ends_calls_by_their_own_options() {
    let once = CallOptions::without_retries();
    let patient = CallOptions::new();
    let twice = CallOptions::new().max_attempts(2);
    let strict = CallOptions::new().retry_rejected_polls(false);
    let unsettled = CallOptions::new().give_up_after(Duration::from_secs(100));
    let announced = json!({"completions": [{"request_id": "patient"}], "cursor": 1});
    for (failures, policy, fails) in [
        (vec![json!("conn")], once, true),
        (vec![json!("conn")], twice, false),
        (vec![json!("conn"), json!("conn")], twice, true),
        (vec![json!("conn"), json!(408), json!("conn")], twice, false),
        (vec![json!(400)], strict, true),
        (vec![json!(400)], patient, false),
        (vec![json!(402)], unsettled, true),
        (vec![json!(503); 99], unsettled, false),
        (vec![json!(503); 101], unsettled, true),
    ] {
        let script = PollScript::new(failures.iter().chain([&announced]).cloned());
        let batch_poll = start_batch_poll(&script);
        let other = RequestId::from("patient");
        let id = RequestId::from("limited");
        let mut limited = Box::pin(batch_poll.wait_for(&id, &policy));
        assert!((&mut limited).now_or_never().is_none());
        batch_poll.wait_for(&other, &patient).await.unwrap();
        let outcome = limited.now_or_never();
        assert_eq!(outcome.is_some_and(|outcome| outcome.is_err()), fails, "{failures:?}");
    }
}

/// The server may have lost the announcement in a crash, or never made it.
#[tokio::test(start_paused = true)]
async fn a_call_whose_announcement_is_missing_is_polled() {
    let script = PollScript::default();
    script.0.lock().unwrap().hold = Some(Duration::from_secs(30));
    let batch_poll = Arc::new(start_batch_poll(&script));
    let released: Arc<Mutex<Vec<RequestId>>> = Arc::default();
    let wait = |id: RequestId| {
        let batch_poll = Arc::clone(&batch_poll);
        let released = Arc::clone(&released);
        Task::spawn(async move {
            let announcement = batch_poll.wait_for(&id, &CallOptions::new()).await;
            assert_eq!(announcement.unwrap(), Announcement::Silence);
            released.lock().unwrap().push(id);
        })
    };
    let mut calls: Vec<_> = (0..20).map(|n| wait(RequestId::from(format!("{n:02}")))).collect();
    let count = || released.lock().unwrap().len();
    sleep(Duration::from_secs(110)).await;
    assert_eq!(count(), 0);
    sleep(Duration::from_secs(20)).await;
    assert_eq!(count(), 1, "one call polls for its result");
    sleep(Duration::from_secs(90)).await;
    assert_eq!(count(), 1, "the next one follows later");
    // The call found its result, so other announcements may be missing too: two checks follow.
    let found = released.lock().unwrap()[0].clone();
    batch_poll.mark_retrieved(found);
    sleep(Duration::from_secs(30)).await;
    assert_eq!(count(), 3);
    // The results of the two calls are not ready, so the calls wait again, and one check follows.
    let pending = released.lock().unwrap()[1..].to_vec();
    calls.extend(pending.into_iter().map(wait));
    sleep(Duration::from_secs(90)).await;
    assert_eq!(count(), 3);
    sleep(Duration::from_secs(30)).await;
    assert_eq!(count(), 4);
}
