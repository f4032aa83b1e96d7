//! [`FakeServer`]: an in-process server of the protocol, for tests with concurrent requests. An
//! unknown request fails the test.

use std::collections::{HashMap, VecDeque};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{Request, Response};
use serde_json::{Value, json};
use tinkex::wire::codec::compress;
use tinkex::wire::{ForwardBackward, ForwardBackwardOutput, LossRecord, PROTO};
use tinkex::{Env, HttpFailure, HttpService, Lane, ServiceClient, ServiceClientBuilder};
use tokio::time::{Instant, sleep};

/// Time that the server takes to accept a training request.
pub(crate) const ACCEPTING: Duration = Duration::from_secs(1);

/// Server that accepts requests and serves prepared results. Clones share their state.
#[derive(Clone, Default)]
pub(crate) struct FakeServer(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    config: Value,
    /// Responses to rejected training requests, by sequence number; see [`to_response`].
    rejected: HashMap<u64, Value>,
    /// Start and end of accepting each training request, in order of occurrence.
    log: Vec<String>,
    /// Poll responses by request id, in order; the last one is repeated.
    responses: HashMap<String, Vec<Value>>,
    /// Responses to the next heartbeats; successful afterwards.
    heartbeats: Vec<Value>,
    heartbeat_latency: f64,
    /// Responses to the next sampling requests; "ok" afterwards.
    samples: VecDeque<Value>,
    dynamic_config: Value,
    /// Path whose next request loses its connection.
    lost: Option<String>,
    /// Whether every request loses its connection.
    gone: bool,
    /// Path whose requests fail, the response, and the number of further failures.
    failing: Option<(String, Value, u32)>,
    /// Number of sampling sessions that were created.
    samplers: u32,
    /// Path whose responses are delayed, and the delay.
    delayed: Option<(String, Duration)>,
    /// Session id; defaults to "s".
    session: Option<String>,
    /// Number of clients that joined a sampling session.
    joined: u32,
    /// Accepted samples that have not been announced.
    unannounced: Vec<String>,
    received: Vec<ReceivedRequest>,
}

/// Request that the server received.
#[derive(Clone, Debug)]
pub(crate) struct ReceivedRequest {
    pub(crate) at: Instant,
    pub(crate) path: String,
    pub(crate) headers: http::HeaderMap,
    pub(crate) body: Bytes,
}

impl ReceivedRequest {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }
}

/// Reads a fixture of recorded behaviour.
pub(crate) fn cases(file: &str) -> Vec<Value> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/behaviour");
    let file: Value = serde_json::from_slice(&std::fs::read(folder.join(file)).unwrap()).unwrap();
    file["cases"].as_array().unwrap().clone()
}

/// Returns the passes that the server received, in order.
pub(crate) fn passes(server: &FakeServer) -> Vec<ForwardBackward> {
    let requests = server.requests("/forward_backward");
    requests.iter().map(|request| ForwardBackward::from_proto(&request.body).unwrap()).collect()
}

impl FakeServer {
    pub(crate) fn new(config: Value) -> Self {
        crate::event_log::keep_events();
        let server = Self::default();
        server.0.lock().unwrap().config = config;
        server
    }

    /// Rejects the training request with this sequence number, with status 422.
    pub(crate) fn reject(&self, seq: u64) {
        self.reject_with(seq, json!(422));
    }

    /// Rejects the training request with this sequence number; see [`to_response`].
    pub(crate) fn reject_with(&self, seq: u64, response: Value) {
        self.0.lock().unwrap().rejected.insert(seq, response);
    }

    /// Sets the poll responses of a request.
    pub(crate) fn respond(&self, request_id: &str, responses: Vec<Value>) {
        self.0.lock().unwrap().responses.insert(request_id.to_owned(), responses);
    }

    /// Sets the responses to heartbeats and the latency of failing ones, in seconds.
    pub(crate) fn heartbeats(&self, outcomes: Vec<Value>, latency: f64) {
        let mut state = self.0.lock().unwrap();
        (state.heartbeats, state.heartbeat_latency) = (outcomes, latency);
    }

    /// Sets the responses to the next sampling requests: "ok", or as in [`to_response`].
    pub(crate) fn samples(&self, outcomes: Vec<Value>) {
        self.0.lock().unwrap().samples = outcomes.into();
    }

    /// Loses the connection of the next request with this path.
    pub(crate) fn lose_once(&self, path: &str) {
        self.0.lock().unwrap().lost = Some(path.to_owned());
    }

    /// Loses the connection of all further requests.
    pub(crate) fn go_away(&self) {
        self.0.lock().unwrap().gone = true;
    }

    /// Responds to all requests with this path as scripted; see [`to_response`].
    pub(crate) fn fail(&self, path: &str, outcome: Value) {
        self.fail_times(path, outcome, u32::MAX);
    }

    /// Responds to the next `times` requests with this path as scripted.
    pub(crate) fn fail_times(&self, path: &str, outcome: Value, times: u32) {
        self.0.lock().unwrap().failing = Some((path.to_owned(), outcome, times));
    }

    /// Sets the dynamic configuration.
    pub(crate) fn dynamic_config(&self, config: Value) {
        self.0.lock().unwrap().dynamic_config = config;
    }

    /// Creates a sampling client.
    pub(crate) async fn sampler(&self) -> tinkex::SamplingClient {
        let service = self.builder().build().unwrap();
        service.create_sampling_client("base").await.unwrap()
    }

    /// Delays the responses to requests with this path.
    pub(crate) fn delay(&self, path: &str, delay: Duration) {
        self.0.lock().unwrap().delayed = Some((path.to_owned(), delay));
    }

    /// Sets the id of the session to create.
    pub(crate) fn session_id(&self, id: &str) {
        self.0.lock().unwrap().session = Some(id.to_owned());
    }

    /// Returns the number of values that share this server: 1 once all its clients are gone.
    pub(crate) fn references(&self) -> usize {
        Arc::strong_count(&self.0)
    }

    /// Returns the log of training requests: `start N`, then `done N` or `fail N`.
    pub(crate) fn log(&self) -> Vec<String> {
        self.0.lock().unwrap().log.clone()
    }

    /// Returns the received requests whose path ends with `path`, in order.
    pub(crate) fn requests(&self, path: &str) -> Vec<ReceivedRequest> {
        let state = self.0.lock().unwrap();
        state.received.iter().filter(|request| request.path.ends_with(path)).cloned().collect()
    }

    /// Returns a builder of a client that polls without a delay, as the Python SDK does.
    pub(crate) fn builder(&self) -> ServiceClientBuilder {
        self.polling_builder().poll_immediately()
    }

    /// Returns a builder of a client with the usual delays between polls.
    pub(crate) fn polling_builder(&self) -> ServiceClientBuilder {
        ServiceClient::builder()
            .env(Env::empty())
            .base_url("http://server.test")
            .api_key("tml-server")
            .http(self.clone())
    }

    /// Creates a training client.
    pub(crate) async fn model(&self) -> tinkex::TrainingClient {
        // The service is dropped here on purpose: the training client keeps the session.
        let service = self.builder().build().unwrap();
        service.create_lora_training_client("base").rank(8).create().await.unwrap()
    }

    fn note(&self, line: String) {
        self.0.lock().unwrap().log.push(line);
    }

    /// Accepts or rejects a training request.
    async fn train(&self, seq: u64) -> Value {
        self.note(format!("start {seq}"));
        sleep(ACCEPTING).await;
        let rejected = self.0.lock().unwrap().rejected.get(&seq).cloned();
        self.note(format!("{} {seq}", if rejected.is_some() { "fail" } else { "done" }));
        rejected.unwrap_or_else(|| json!({"request_id": format!("r{seq}")}))
    }

    /// Returns the scripted response to a request; see [`to_response`].
    async fn handle(&self, request: &ReceivedRequest) -> Value {
        let lost = self.0.lock().unwrap().lost.take_if(|lost| request.path.ends_with(&**lost));
        if lost.is_some() || self.0.lock().unwrap().gone {
            return json!("conn");
        }
        if let Some((path, outcome, times)) = &mut self.0.lock().unwrap().failing
            && request.path.ends_with(&**path)
            && *times > 0
        {
            *times -= 1;
            return outcome.clone();
        }
        let delayed = self.0.lock().unwrap().delayed.clone();
        if let Some((_, delay)) = delayed.filter(|(path, _)| request.path.ends_with(path.as_str()))
        {
            sleep(delay).await;
        }
        match request.path.trim_start_matches("/api/v1/") {
            "client/config" => self.0.lock().unwrap().config.clone(),
            "client/dynamic_config" => match &self.0.lock().unwrap().dynamic_config {
                Value::Null => json!({}),
                config => config.clone(),
            },
            "create_sampling_session" => {
                let mut state = self.0.lock().unwrap();
                state.samplers += 1;
                json!({"sampling_session_id": format!("s:sample:{}", state.samplers - 1)})
            }
            "asample" => {
                let outcome = self.0.lock().unwrap().samples.pop_front();
                match outcome {
                    Some(outcome) if outcome != "ok" => outcome,
                    _ => {
                        let (seq, n) = (&request.json()["seq_id"], &request.json()["num_samples"]);
                        let names: Vec<_> =
                            (0..n.as_u64().unwrap()).map(|i| format!("q{seq}:{i}")).collect();
                        self.0.lock().unwrap().unannounced.push(format!("q{seq}"));
                        json!({"request_id": format!("q{seq}"), "sample_sequence_ids": names})
                    }
                }
            }
            "weights_info" => json!({
                "base_model": "base", "is_lora": true, "lora_rank": 8, "train_mlp": false,
                "optimizer_config": {"type": "dimuon", "version": 1},
            }),
            "cancel_future" => json!({}),
            "telemetry" => json!({"status": "accepted"}),
            "join_sampling_session" => {
                let mut state = self.0.lock().unwrap();
                state.joined += 1;
                json!({"type": "join_sampling_session", "client_counter": state.joined})
            }
            "retrieve_futures" => self.announce(&request.json()).await,
            "create_session" => {
                let state = self.0.lock().unwrap();
                json!({"session_id": state.session.as_deref().unwrap_or("s")})
            }
            "create_custom_loss" => json!({"request_id": "loss"}),
            "create_model" => json!({"request_id": "created"}),
            "forward_backward" => {
                let body = match request.header("content-encoding") {
                    Some("zstd") => compress::decompress(&request.body, 1 << 20).unwrap(),
                    _ => request.body.clone(),
                };
                let pass = ForwardBackward::from_proto(&body).unwrap();
                let seq = pass.seq_id.unwrap().get();
                self.0.lock().unwrap().responses.entry(format!("r{seq}")).or_insert_with(|| {
                    let n = pass.data.len();
                    let values = vec![-(seq as f32); n];
                    let record = LossRecord::new(n).field("logprobs", values, vec![1; n]).unwrap();
                    let output = ForwardBackwardOutput::default()
                        .loss_fn_outputs(record)
                        .metrics([("n:sum".to_owned(), n as f64)].into());
                    vec![json!({"proto": output.to_proto().to_vec()})]
                });
                self.train(seq).await
            }
            "load_weights" if request.json()["seq_id"].is_null() => json!({"request_id": "loaded"}),
            "auth/token" => {
                json!({"jwt": format!("eyJ-of-{}", request.header("x-api-key").unwrap())})
            }
            "optim_step"
            | "save_weights"
            | "save_weights_for_sampler"
            | "save_weights_external"
            | "load_weights" => self.train(request.json()["seq_id"].as_u64().unwrap()).await,
            "retrieve_future" => self.poll(&request.json()),
            "session_heartbeat" => {
                let (outcome, latency) = {
                    let mut state = self.0.lock().unwrap();
                    let none = state.heartbeats.is_empty();
                    let outcome = if none { json!({}) } else { state.heartbeats.remove(0) };
                    (outcome, state.heartbeat_latency)
                };
                if !outcome.is_object() {
                    sleep(Duration::from_secs_f64(latency)).await;
                }
                outcome
            }
            "sessions/s/finish" | "get_info" => json!({
                "model_data": {}, "model_id": "s:train:0",
            }),
            other => panic!("unexpected request {other}"),
        }
    }

    /// Announces accepted samples, or holds the poll.
    async fn announce(&self, poll: &Value) -> Value {
        for _ in 0..30 {
            let ready = std::mem::take(&mut self.0.lock().unwrap().unannounced);
            if !ready.is_empty() {
                let cursor = poll["prev_cursor"].as_u64().unwrap() + ready.len() as u64;
                let completions: Vec<Value> = ready
                    .iter()
                    .map(|id| {
                        json!({"state": "finished", "request_id": id,
                        "response_payload_uncompressed_size": 8})
                    })
                    .collect();
                return json!({"completions": completions, "cursor": cursor});
            }
            sleep(Duration::from_secs(1)).await;
        }
        json!({"completions": [], "cursor": poll["prev_cursor"]})
    }

    /// Returns the next response to a poll.
    fn poll(&self, poll: &Value) -> Value {
        let id = poll["request_id"].as_str().unwrap();
        if id == "created" {
            return json!({"type": "create_model", "model_id": "s:train:0"});
        }
        if id == "loss" {
            return json!({"type": "create_custom_loss", "loss_id": "loss-0"});
        }
        if id == "loaded" {
            return json!({"type": "load_weights"});
        }
        let mut state = self.0.lock().unwrap();
        match state.responses.get_mut(id) {
            Some(responses) if responses.len() > 1 => responses.remove(0),
            Some(responses) => responses[0].clone(),
            // A sample of one token.
            None if id.starts_with('q') => json!({"proto": b"\x0a\x06\x12\x04\x07\0\0\0".to_vec()}),
            None => json!({"metrics": {}}),
        }
    }
}

/// Converts a scripted response:
///
/// * a number is a status without a body, an array a status with a JSON body;
/// * the string `timeout` is a timeout, any other string a lost connection;
/// * an object is a JSON body, with the field `proto` a protobuf body, and with the field `status`
///   a status whose other fields are headers.
fn to_response(scripted: &Value) -> Result<Response<Bytes>, HttpFailure> {
    let with = |status: u64, body: Bytes, kind: &str| {
        let status = u16::try_from(status).unwrap();
        let response = Response::builder().status(status).header("content-type", kind);
        Ok(response.body(body).unwrap())
    };
    match scripted {
        Value::Number(status) => with(status.as_u64().unwrap(), Bytes::new(), "text/plain"),
        Value::Array(pair) => {
            with(pair[0].as_u64().unwrap(), pair[1].to_string().into(), "application/json")
        }
        Value::String(word) if word == "timeout" => Err(HttpFailure::timeout("scripted")),
        Value::String(_) => Err(HttpFailure::connect("scripted")),
        Value::Object(fields) if fields.get("status").is_some_and(Value::is_u64) => {
            let status = u16::try_from(fields["status"].as_u64().unwrap()).unwrap();
            let mut response = Response::builder().status(status);
            for (name, value) in fields.iter().filter(|(name, _)| *name != "status") {
                response = response.header(name, value.as_str().unwrap());
            }
            Ok(response.body(Bytes::new()).unwrap())
        }
        Value::Object(fields) if fields.contains_key("proto") => {
            let bytes: Vec<u8> = serde_json::from_value(fields["proto"].clone()).unwrap();
            with(200, bytes.into(), PROTO)
        }
        body => with(200, body.to_string().into(), "application/json"),
    }
}

impl HttpService for FakeServer {
    fn send(
        &self,
        _: Lane,
        request: Request<Bytes>,
        _: Duration,
    ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>> {
        let (parts, body) = request.into_parts();
        let path = parts.uri.path().to_owned();
        let request = ReceivedRequest { at: Instant::now(), path, headers: parts.headers, body };
        self.0.lock().unwrap().received.push(request.clone());
        Box::pin(async move {
            match self.handle(&request).await {
                Value::String(word) if word == "hang" => std::future::pending().await,
                scripted => to_response(&scripted),
            }
        })
    }
}
