//! Requests: one at a time, many in flight, and many that wait.

use std::collections::HashSet;
use std::time::Instant;

use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::connection::{Connection, Pool};
use crate::upstream::{MODEL, PROMPT_TOKENS, SAMPLED_TOKENS};

/// Kind of a request that is sent alone.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum AloneRequest {
    OptimStep,
    Sample,
}

/// Requests to measure alone.
pub(crate) const ALONE_REQUESTS: [AloneRequest; 2] =
    [AloneRequest::OptimStep, AloneRequest::Sample];

impl AloneRequest {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::OptimStep => "optim_step",
            Self::Sample => "asample",
        }
    }
}

/// A server with a model and a sampling session.
pub(crate) struct Target {
    connection: Connection,
    model: String,
    sampler: String,
    /// Next sequence numbers of the model and of the sampling session.
    next: [std::cell::Cell<u32>; 2],
}

impl Target {
    /// Uses the upstream itself. Its create_model responds with the id of the model.
    pub(crate) async fn direct(connection: Connection) -> Self {
        Self::new(connection, |created| created["model_id"].as_str().map(str::to_owned)).await
    }

    /// Uses a gateway. The result of its create_model has the id of the model.
    pub(crate) async fn through(connection: Connection) -> Self {
        Self::new(connection, |_| None).await
    }

    async fn new(connection: Connection, id: impl Fn(&Value) -> Option<String>) -> Self {
        let session = create_session(&connection).await;
        let request = json!({
            "session_id": session, "model_seq_id": 0, "base_model": MODEL,
            "lora_config": {"rank": 8, "seed": 1},
        });
        let created = connection.json("/create_model", &request).await;
        let result = result(&connection, &created).await;
        let result: Value = serde_json::from_slice(&result).unwrap();
        let model = id(&created).or_else(|| result["model_id"].as_str().map(str::to_owned));
        let sampler = create_sampling_session(&connection, &session).await;
        Self { connection, model: model.unwrap(), sampler, next: [1, 0].map(Into::into) }
    }

    async fn submit(&self, request: AloneRequest) -> Value {
        let next = &self.next[usize::from(request == AloneRequest::Sample)];
        let seq = next.replace(next.get() + 1);
        let body = match request {
            AloneRequest::OptimStep => json!({
                "model_id": self.model, "seq_id": seq,
                "adam_params": {"learning_rate": 1e-4},
            }),
            AloneRequest::Sample => sample(&self.sampler, seq),
        };
        self.connection.json(&format!("/{}", request.name()), &body).await
    }
}

async fn create_session(connection: &Connection) -> String {
    let request = json!({"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"});
    let session = connection.json("/create_session", &request).await;
    session["session_id"].as_str().unwrap().to_owned()
}

async fn create_sampling_session(connection: &Connection, session: &str) -> String {
    let request = json!({"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL});
    let sampler = connection.json("/create_sampling_session", &request).await;
    sampler["sampling_session_id"].as_str().unwrap().to_owned()
}

/// Returns a sample request of a sampling session.
fn sample(sampler: &str, seq: u32) -> Value {
    let tokens: Vec<u32> = (0..PROMPT_TOKENS).map(|n| (n * 7 + seq) % 1_000).collect();
    json!({
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
        "sampling_params": {"max_tokens": SAMPLED_TOKENS, "seed": seq, "stop": []},
        "sampling_session_id": sampler, "seq_id": seq, "num_samples": 1,
    })
}

/// Polls the result of an acknowledged request.
async fn result(connection: &Connection, acknowledged: &Value) -> Vec<u8> {
    let poll = json!({"request_id": acknowledged["request_id"]}).to_string();
    loop {
        let result = connection.call("POST", "/api/v1/retrieve_future", poll.as_bytes()).await;
        if !result.windows(11).any(|part| part == b"\"try_again\"") {
            return result;
        }
    }
}

/// Sends requests one after the other. Returns the milliseconds from the submission to the result
/// of each.
pub(crate) async fn alone(target: &Target, request: AloneRequest, count: u32) -> Vec<f64> {
    let mut times = Vec::new();
    for _ in 0..count {
        let start = Instant::now();
        let acknowledged = target.submit(request).await;
        let result = result(&target.connection, &acknowledged).await;
        times.push(1e3 * start.elapsed().as_secs_f64());
        // 256 tokens and as many log-probabilities; or metrics.
        let is_complete = request == AloneRequest::OptimStep || result.len() > 2_000;
        assert!(is_complete, "{}", String::from_utf8_lossy(&result));
    }
    times
}

/// Samples `rounds` times on every connection of the pool. Returns the seconds until all samples are
/// finished.
pub(crate) async fn in_flight(pool: &Pool, rounds: u32) -> f64 {
    let session = create_session(&pool.connections[0]).await;
    let sampler = &create_sampling_session(&pool.connections[0], &session).await;
    let start = Instant::now();
    let on_connection = async |(n, connection): (u32, &Connection)| {
        for round in 0..rounds {
            let request = sample(sampler, n * rounds + round);
            let acknowledged = connection.json("/asample", &request).await;
            let result = result(connection, &acknowledged).await;
            assert!(result.len() > 2_000, "{}", String::from_utf8_lossy(&result));
        }
    };
    join_all((0..).zip(&pool.connections).map(on_connection)).await;
    start.elapsed().as_secs_f64()
}

/// Samples that wait for the upstream.
pub(crate) struct Outstanding {
    sampler: String,
    request_ids: HashSet<String>,
}

/// Submits samples at once. Returns when all are acknowledged.
pub(crate) async fn outstanding(pool: &Pool, count: u32) -> Outstanding {
    let session = create_session(&pool.connections[0]).await;
    let sampler = create_sampling_session(&pool.connections[0], &session).await;
    let submit = async |seq: u32| {
        let connection = &pool.connections[seq as usize % pool.connections.len()];
        let acknowledged = connection.json("/asample", &sample(&sampler, seq)).await;
        acknowledged["request_id"].as_str().unwrap().to_owned()
    };
    let request_ids = join_all((0..count).map(submit)).await.into_iter().collect();
    Outstanding { sampler, request_ids }
}

impl Outstanding {
    /// Waits for the results of all samples.
    pub(crate) async fn finish(self, pool: &Pool) {
        let mut cursor = 0_u64;
        let mut acknowledged = Vec::<String>::new();
        let mut waiting = self.request_ids;
        while !waiting.is_empty() {
            let request = json!({
                "target": {"type": "sampling_session", "sampling_session_id": self.sampler},
                "prev_cursor": cursor, "retrieved_request_ids": acknowledged,
            });
            let page = pool.connections[0].json("/retrieve_futures", &request).await;
            cursor = page["cursor"].as_u64().unwrap();
            acknowledged.clear();
            for item in page["completions"].as_array().unwrap() {
                assert_eq!(item["state"], "finished");
                let id = item["request_id"].as_str().unwrap().to_owned();
                waiting.remove(&id);
                acknowledged.push(id);
            }
        }
    }
}
