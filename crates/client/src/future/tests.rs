//! The poll for many tickets, step by step as in the reference.

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

use super::BatchPoll;
use crate::config::{ApiKey, Credential};
use crate::fixture;
use crate::task::Task;
use crate::transport::Transport;
use crate::transport::http::{HttpFailure, HttpService, Lane};
use crate::transport::retry::RetryPolicy;

/// Answers in order, then holds the poll for ever.
#[derive(Clone, Default)]
struct Script(Arc<Mutex<(VecDeque<Value>, Seen)>>);

/// When each poll came, and with what.
type Seen = Vec<(Instant, Value)>;

impl HttpService for Script {
    fn send(
        &self,
        lane: Lane,
        request: Request<Bytes>,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>> {
        assert_eq!((lane, timeout), (Lane::PollMany, Duration::from_secs(45)));
        let body: Value = serde_json::from_slice(request.body()).unwrap();
        let mut state = self.0.lock().unwrap();
        let (script, seen) = &mut *state;
        seen.push((Instant::now(), body));
        let Some(answer) = script.pop_front() else {
            return futures_util::future::pending().boxed();
        };
        let reply = |status: u16, body: String| {
            Response::builder().status(status).body(Bytes::from(body)).unwrap()
        };
        let result = match answer {
            Value::Number(status) => {
                Ok(reply(u16::try_from(status.as_u64().unwrap()).unwrap(), "x".to_owned()))
            }
            Value::String(_) => Err(HttpFailure::connect("scripted")),
            body => Ok(reply(200, body.to_string())),
        };
        futures_util::future::ready(result).boxed()
    }
}

fn batch_poll(script: &Script) -> BatchPoll {
    let key = Credential::Key(ApiKey::new("tml-x").unwrap());
    let transport = Transport::new(
        Arc::new(script.clone()),
        "http://poll.test".parse().unwrap(),
        key,
        HeaderMap::new(),
        RetryPolicy::default(),
    );
    let target =
        FuturesTarget { sampling_session_id: SamplerId::from("s:sample:0"), cloned_sampler_id: 3 };
    BatchPoll::watch(transport, target, false, None)
}

/// Covers R-POLL.
#[tokio::test(start_paused = true)]
async fn many_tickets_are_polled_for_as_in_the_reference() {
    for case in fixture::cases("futures_poller.json") {
        let script = Script::default();
        script.0.lock().unwrap().0 = case["script"].as_array().unwrap().clone().into();
        let batch_poll = Arc::new(batch_poll(&script));
        let heard: Arc<Mutex<HashMap<String, Value>>> = Arc::default();
        let mut waiters = Vec::new();
        for action in case["actions"].as_array().unwrap() {
            let id = action[1].as_str().unwrap_or_default().to_owned();
            match action[0].as_str().unwrap() {
                "wait" => {
                    let (batch_poll, heard) = (Arc::clone(&batch_poll), Arc::clone(&heard));
                    waiters.push(Task::spawn(async move {
                        let arrival = batch_poll.wait_for(&RequestId::from(id.as_str())).await;
                        let arrival = match arrival {
                            Ok(Some(completion)) => serde_json::to_value(completion).unwrap(),
                            Ok(None) => json!("ask for yourself"),
                            Err(_) => json!("error:TinkerError"),
                        };
                        heard.lock().unwrap().insert(id, arrival);
                    }));
                }
                "retrieved" => batch_poll.fetched(RequestId::from(id)),
                _ => {}
            }
            sleep(Duration::from_secs(100)).await;
        }
        let state = script.0.lock().unwrap();
        let seen: Vec<Value> = state
            .1
            .iter()
            .map(|(_, poll)| {
                assert_eq!(poll["target"]["cloned_sampler_id"], 3);
                json!({
                    "prev_cursor": poll["prev_cursor"], "retrieved": poll["retrieved_request_ids"],
                    "timeout": 45.0, "max_retries": 0,
                })
            })
            .collect();
        assert_eq!(json!(seen), case["requests"], "{case}");
        let sleeps: Vec<u64> =
            state.1.windows(2).map(|pair| (pair[1].0 - pair[0].0).as_secs()).collect();
        // Longer gaps are the test's own, between its actions.
        let sleeps: Vec<u64> = sleeps.into_iter().filter(|s| (1..10).contains(s)).collect();
        assert_eq!(json!(sleeps), case["sleeps"], "{case}");
        for (id, expected) in case["waiters"].as_object().unwrap() {
            let mut expected = expected.clone();
            if let Some(fields) = expected.as_object_mut() {
                fields.retain(|_, value| !value.is_null());
            }
            assert_eq!(heard.lock().unwrap()[id], expected, "{case}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_that_does_not_know_the_call_is_asked_ticket_by_ticket() {
    let script = Script::default();
    script.0.lock().unwrap().0 = [json!(404)].into();
    let batch_poll = batch_poll(&script);
    let id = RequestId::from("a");
    assert_eq!(batch_poll.wait_for(&id).await.unwrap(), None);
    assert_eq!(batch_poll.wait_for(&id).await.unwrap(), None);
    assert_eq!(script.0.lock().unwrap().1.len(), 1, "it is not asked again");
}

#[tokio::test(start_paused = true)]
async fn who_does_not_wait_any_more_is_forgotten() {
    let script = Script::default();
    let batch_poll = batch_poll(&script);
    let (gone, here) = (RequestId::from("gone"), RequestId::from("here"));
    assert!(batch_poll.wait_for(&gone).now_or_never().is_none());
    sleep(Duration::from_secs(100)).await;
    assert!(script.0.lock().unwrap().1.is_empty(), "nobody waits, so nobody polls");
    let both = json!([{"request_id": "gone"}, {"request_id": "here"}]);
    script.0.lock().unwrap().0 = [json!({"completions": both, "cursor": 2})].into();
    batch_poll.wait_for(&here).await.unwrap();
    assert!(batch_poll.is_empty(), "an answer that nobody wants is not kept");
}

/// A sample that is given up while it is handed over has a ticket that nobody here ever sees.
#[tokio::test(start_paused = true)]
async fn answers_that_nobody_ever_asks_for_do_not_pile_up() {
    let script = Script::default();
    let batch_poll = batch_poll(&script);
    let early = RequestId::from("early");
    let announced = |ids: Vec<String>, cursor: usize| {
        let completions: Vec<Value> = ids.iter().map(|id| json!({"request_id": id})).collect();
        json!({"completions": completions, "cursor": cursor})
    };
    let mut polls: VecDeque<Value> = (0..60)
        .map(|poll| announced((0..1000).map(|i| format!("{poll}-{i}")).collect(), poll))
        .collect();
    polls.push_back(announced(vec!["early".to_owned(), "here".to_owned()], 60));
    script.0.lock().unwrap().0 = polls;
    batch_poll.wait_for(&RequestId::from("here")).await.unwrap();
    assert!(batch_poll.kept() <= 20_000, "{} are remembered", batch_poll.kept());
    let found = batch_poll.wait_for(&early).now_or_never();
    assert!(found.is_some(), "whoever is announced before they ask still learns of it");
}
