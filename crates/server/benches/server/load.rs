//! Load: samples, large bodies and health checks.

use std::collections::HashSet;
use std::sync::{Arc, Mutex as StdMutex};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde_json::{Value, json};
use tinkex_wire::{Datum, ForwardBackward, LossFn, Seq};

use crate::TOKENS;
use crate::connection::{Connection, Pool};

/// Submits `count` samples of a sampling session at once, with sequence numbers from `first`.
/// Returns the seconds until all are acknowledged and until all are finished. Panics if a
/// completion is duplicated.
pub(crate) async fn run_samples(pool: &Pool, sampler: &str, first: u32, count: u32) -> (f64, f64) {
    let start = Instant::now();
    let submit = async |i: u32| {
        let request = json!({
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [i % 90 + 1]}]},
            "sampling_params": {"max_tokens": TOKENS, "seed": i, "stop": []},
            "sampling_session_id": sampler, "seq_id": i,
        });
        let connection = &pool.connections[i as usize % pool.connections.len()];
        connection.json("/asample", &request).await["request_id"].as_str().unwrap().to_owned()
    };
    let request_ids = join_all((first..first + count).map(submit)).await;
    let submitted = start.elapsed().as_secs_f64();
    let expected: HashSet<&str> = request_ids.iter().map(String::as_str).collect();
    assert_eq!(expected.len(), request_ids.len(), "two requests have the same id");
    let mut done: HashSet<String> = HashSet::new();
    let mut cursor = 0_u64;
    let mut acknowledged = Vec::<String>::new();
    while done.len() < request_ids.len() {
        let request = json!({
            "target": {"type": "sampling_session", "sampling_session_id": sampler},
            "prev_cursor": cursor, "retrieved_request_ids": acknowledged,
        });
        let page = pool.connections[0].json("/retrieve_futures", &request).await;
        cursor = page["cursor"].as_u64().unwrap();
        acknowledged.clear();
        for item in page["completions"].as_array().unwrap() {
            assert_eq!(item["state"], "finished");
            let id = item["request_id"].as_str().unwrap().to_owned();
            // Completions of earlier samples are repeated until they are acknowledged.
            acknowledged.push(id.clone());
            assert!(!expected.contains(&*id) || done.insert(id.clone()), "{id} completed twice");
        }
    }
    (submitted, start.elapsed().as_secs_f64())
}

/// Sends `count` training bodies of about `size` bytes at once. They remain queued, because an
/// earlier sequence number is missing, and fail when the session ends. Returns the seconds until
/// all are acknowledged.
pub(crate) async fn send_bodies(
    pool: &Pool,
    session: &str,
    model: &str,
    count: usize,
    size: usize,
) -> f64 {
    let one = &pool.connections[0];
    let request = json!({
        "session_id": session, "model_seq_id": 0, "base_model": model, "lora_config": {"rank": 4},
    });
    one.json("/create_model", &request).await;
    let run = format!("{session}:train:0");
    let tokens: Vec<u32> = (0..255).map(|i| i % 90 + 1).collect();
    let datum = Datum::supervised(tokens, 1.0).unwrap();
    let encode = |seq: u64, n: usize| {
        let data = vec![datum.clone(); n];
        let request = ForwardBackward::new(&*run, data, LossFn::CrossEntropy).seq_id(Seq::new(seq));
        request.to_proto().unwrap()
    };
    let n = size / (encode(1, 2).len() - encode(1, 1).len());
    let bodies: Vec<_> = (2..).take(count).map(|seq| encode(seq, n)).collect();
    let start = Instant::now();
    let send = async |(body, connection): (&bytes::Bytes, &Connection)| {
        let response = connection.call("POST", "/api/v1/forward_backward", body).await;
        let future: Value = serde_json::from_slice(&response).unwrap();
        future["request_id"].as_str().unwrap().to_owned()
    };
    let request_ids = join_all(bodies.iter().zip(&pool.connections[1..]).map(send)).await;
    let took = start.elapsed().as_secs_f64();
    let finish = json!({"reason": {"type": "success"}, "detail": null});
    one.json(&format!("/sessions/{session}/finish"), &finish).await;
    let distinct: HashSet<&String> = request_ids.iter().collect();
    assert_eq!(distinct.len(), count, "two requests have the same id");
    for id in &request_ids {
        let result = one.json("/retrieve_future", &json!({"request_id": id})).await;
        assert_eq!(result["category"], "user", "{result}");
    }
    took
}

/// Sends health checks every 20 ms and records the slowest response in seconds.
pub(crate) fn watch_health(address: &str) -> (tokio::task::JoinHandle<()>, Arc<StdMutex<f64>>) {
    let slowest = Arc::new(StdMutex::new(0.0_f64));
    let connection = Connection::new(address);
    let recorded = Arc::clone(&slowest);
    let watch = async move {
        loop {
            let start = Instant::now();
            connection.call("GET", "/api/v1/healthz", b"").await;
            let took = start.elapsed().as_secs_f64();
            if let Ok(mut slowest) = recorded.lock() {
                *slowest = took.max(*slowest);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    #[expect(clippy::disallowed_methods, reason = "the caller aborts it through the handle")]
    (tokio::spawn(watch), slowest)
}
