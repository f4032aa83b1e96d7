//! [`NumberedServer`]: a [`FakeServer`] whose request ids are the sequence numbers, for tests that
//! script single requests and for the recorded behaviour of the Python SDK.

use std::collections::{HashMap, VecDeque};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{Request, Response};
use serde_json::{Value, json};
use tinkex::testing::{FakeServer, RecordedCall, Reply, Route};
use tinkex::{
    Env, HttpFailure, HttpService, Lane, LoraOptions, SampleResponse, ServiceClient,
    ServiceClientBuilder,
};
use tinkex_wire::{ForwardBackward, ForwardBackwardOutput, LossRecord, PROTO};
use tokio::time::Instant;

/// Time that the server takes to accept a training request.
pub(crate) const ACCEPTING: Duration = Duration::from_secs(1);

/// Server whose request ids are `r1`, `r2`, … for training requests and `q0`, `q1`, … for samples.
/// Clones share their state.
#[derive(Clone)]
pub(crate) struct NumberedServer(Arc<Shared>);

struct Shared {
    /// When the server was created.
    start: Instant,
    server: FakeServer,
    script: Arc<Mutex<Script>>,
}

/// Scripted responses; see [`to_reply`].
#[derive(Default)]
struct Script {
    config: Value,
    dynamic_config: Value,
    /// Responses to rejected training requests, by sequence number.
    rejected: HashMap<u64, Value>,
    /// Training requests, in the order of their arrival.
    training: Vec<TrainingRequest>,
    /// Poll responses by request id, in order; the last one is repeated.
    responses: HashMap<String, Vec<Value>>,
    /// Responses to the next heartbeats; successful afterwards.
    heartbeats: VecDeque<Value>,
    heartbeat_latency: Duration,
    /// Responses to the next sampling requests; "ok" afterwards.
    samples: VecDeque<Value>,
    /// Whether every request loses its connection.
    gone: bool,
    /// Path whose requests fail, the response, and the number of further failures.
    failing: Option<(String, Value, u32)>,
    /// Path whose responses are delayed, and the delay.
    delayed: Option<(String, Duration)>,
    /// Session id; defaults to "s".
    session: Option<String>,
}

struct TrainingRequest {
    seq: u64,
    at: Instant,
    rejected: bool,
}

/// Reads a fixture of recorded behaviour.
pub(crate) fn cases(file: &str) -> Vec<Value> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/behaviour");
    let file: Value = serde_json::from_slice(&std::fs::read(folder.join(file)).unwrap()).unwrap();
    file["cases"].as_array().unwrap().clone()
}

/// Returns the passes that the server received, in order.
pub(crate) fn passes(server: &NumberedServer) -> Vec<ForwardBackward> {
    let requests = server.requests("/forward_backward");
    requests.iter().map(|request| request.forward_backward().unwrap()).collect()
}

/// Returns the poll response of a pass with these log-probabilities, one list per datum.
pub(crate) fn pass_output(logprobs: &[Vec<f32>], metrics: &[(&str, f64)]) -> Value {
    let lengths: Vec<usize> = logprobs.iter().map(Vec::len).collect();
    let record = LossRecord::new(logprobs.len());
    let record = record.field("logprobs", logprobs.concat(), lengths).unwrap();
    let metrics = metrics.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
    let output = ForwardBackwardOutput::default().loss_fn_outputs(record).metrics(metrics);
    json!({"proto": output.to_proto().to_vec()})
}

/// Returns the poll response of a sample.
pub(crate) fn sample_output(response: &SampleResponse) -> Value {
    json!({"proto": response.to_proto().to_vec()})
}

impl NumberedServer {
    /// Creates a server with this client configuration.
    pub(crate) fn new(config: Value) -> Self {
        crate::event_log::keep_events();
        let script = Arc::new(Mutex::new(Script { config, ..Script::default() }));
        let routes = Route::ALL.iter().chain(&[Route::DiscardGradient, Route::CloseSampler]);
        let server = routes.fold(FakeServer::new(), |server, route| {
            let script = Arc::clone(&script);
            server.on_call(*route, move |call| script.lock().unwrap().reply(call))
        });
        Self(Arc::new(Shared { start: Instant::now(), server, script }))
    }

    fn script<T>(&self, change: impl FnOnce(&mut Script) -> T) -> T {
        change(&mut self.0.script.lock().unwrap())
    }

    /// Rejects the training request with this sequence number, with status 422.
    pub(crate) fn reject(&self, seq: u64) {
        self.reject_with(seq, json!(422));
    }

    /// Rejects the training request with this sequence number.
    pub(crate) fn reject_with(&self, seq: u64, response: Value) {
        self.script(|script| script.rejected.insert(seq, response));
    }

    /// Sets the poll responses of a request.
    pub(crate) fn respond(&self, request_id: &str, responses: Vec<Value>) {
        self.script(|script| script.responses.insert(request_id.to_owned(), responses));
    }

    /// Sets the responses to heartbeats and the latency of failing ones, in seconds.
    pub(crate) fn heartbeats(&self, outcomes: Vec<Value>, latency: f64) {
        let latency = Duration::from_secs_f64(latency);
        self.script(|script| {
            script.heartbeats = outcomes.into();
            script.heartbeat_latency = latency;
        });
    }

    /// Sets the responses to the next sampling requests: "ok", or as in [`to_reply`].
    pub(crate) fn samples(&self, outcomes: Vec<Value>) {
        self.script(|script| script.samples = outcomes.into());
    }

    /// Loses the connection of the next request with this path.
    pub(crate) fn lose_once(&self, path: &str) {
        self.fail_times(path, json!("conn"), 1);
    }

    /// Loses the connection of all further requests.
    pub(crate) fn go_away(&self) {
        self.script(|script| script.gone = true);
    }

    /// Responds to all requests with this path as scripted.
    pub(crate) fn fail(&self, path: &str, outcome: Value) {
        self.fail_times(path, outcome, u32::MAX);
    }

    /// Responds to the next `times` requests with this path as scripted.
    pub(crate) fn fail_times(&self, path: &str, outcome: Value, times: u32) {
        self.script(|script| script.failing = Some((path.to_owned(), outcome, times)));
    }

    /// Responds to all paths again.
    pub(crate) fn recover(&self) {
        self.script(|script| script.failing = None);
    }

    /// Sets the dynamic configuration.
    pub(crate) fn dynamic_config(&self, config: Value) {
        self.script(|script| script.dynamic_config = config);
    }

    /// Delays the responses to requests with this path.
    pub(crate) fn delay(&self, path: &str, delay: Duration) {
        self.script(|script| script.delayed = Some((path.to_owned(), delay)));
    }

    /// Sets the id of the session to create.
    pub(crate) fn session_id(&self, id: &str) {
        self.script(|script| script.session = Some(id.to_owned()));
    }

    /// Returns the number of values that share this server: 1 once all its clients are gone.
    pub(crate) fn references(&self) -> usize {
        Arc::strong_count(&self.0)
    }

    /// Returns the log of training requests: `start N`, then `done N` or `fail N`.
    pub(crate) fn log(&self) -> Vec<String> {
        let now = Instant::now();
        let mut log: Vec<(Instant, bool, String)> = Vec::new();
        self.script(|script| {
            for TrainingRequest { seq, at, rejected } in &script.training {
                log.push((*at, true, format!("start {seq}")));
                let end = if *rejected { "fail" } else { "done" };
                log.push((*at + ACCEPTING, false, format!("{end} {seq}")));
            }
        });
        log.retain(|(at, ..)| *at <= now);
        // The next request starts when the one before it has been accepted.
        log.sort_by_key(|(at, is_start, _)| (*at, *is_start));
        log.into_iter().map(|(_, _, line)| line).collect()
    }

    /// Returns the received requests whose path ends with `path`, in order.
    pub(crate) fn requests(&self, path: &str) -> Vec<RecordedCall> {
        let calls = self.0.server.calls();
        calls.into_iter().filter(|request| request.path.ends_with(path)).collect()
    }

    /// Returns the sequence numbers of the received requests whose path ends with `path`, in the
    /// order of their arrival.
    pub(crate) fn sequence_numbers(&self, path: &str) -> Vec<u64> {
        let requests = self.requests(path);
        requests.iter().map(|request| request.json()["seq_id"].as_u64().unwrap()).collect()
    }

    /// Returns the time since the server was created, as in [`RecordedCall::at`].
    pub(crate) fn now(&self) -> Duration {
        self.0.start.elapsed()
    }

    /// Returns a builder of a client that polls without a delay, as the Python SDK does.
    pub(crate) fn builder(&self) -> ServiceClientBuilder {
        self.polling_builder().poll_immediately()
    }

    /// Returns a builder of a client with the usual delays between polls, and with telemetry.
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
        service.create_lora_training_client(LoraOptions::new("base").rank(8)).await.unwrap()
    }

    /// Creates a sampling client.
    pub(crate) async fn sampler(&self) -> tinkex::SamplingClient {
        let service = self.builder().build().unwrap();
        service.create_sampling_client("base").await.unwrap()
    }
}

impl Script {
    fn reply(&mut self, call: &RecordedCall) -> Reply {
        if self.gone {
            return Reply::connection_lost();
        }
        if let Some((path, outcome, times)) = &mut self.failing
            && call.path.ends_with(&**path)
            && *times > 0
        {
            *times -= 1;
            return to_reply(outcome);
        }
        let reply = self.scripted(call);
        match &self.delayed {
            Some((path, delay)) if call.path.ends_with(&**path) => reply.delay(*delay),
            _ => reply,
        }
    }

    fn scripted(&mut self, call: &RecordedCall) -> Reply {
        let Some(route) = call.route else { return Reply::ok() };
        match route {
            Route::ClientConfig => Reply::json(&self.config),
            Route::DynamicConfig if !self.dynamic_config.is_null() => {
                Reply::json(&self.dynamic_config)
            }
            Route::CreateSession => {
                Reply::json(json!({"session_id": self.session.as_deref().unwrap_or("s")}))
            }
            Route::AuthToken => {
                Reply::json(json!({"jwt": format!("eyJ-of-{}", call.header("x-api-key").unwrap())}))
            }
            Route::WeightsInfo => Reply::json(json!({
                "base_model": "base", "is_lora": true, "lora_rank": 8, "train_mlp": false,
                "optimizer_config": {"type": "dimuon", "version": 1},
            })),
            Route::SessionHeartbeat => match self.heartbeats.pop_front() {
                Some(outcome) if outcome.is_object() => to_reply(&outcome),
                Some(outcome) => to_reply(&outcome).delay(self.heartbeat_latency),
                None => Reply::ok(),
            },
            Route::Sample => match self.samples.pop_front() {
                Some(outcome) if outcome != "ok" => to_reply(&outcome),
                _ => Reply::sampled([7]).request_id(format!("q{}", call.json()["seq_id"])),
            },
            Route::ForwardBackward => {
                let pass = call.forward_backward().unwrap();
                let seq = pass.seq_id.unwrap().get();
                let n = pass.data.len();
                let values = vec![-(seq as f32); n];
                let record = LossRecord::new(n).field("logprobs", values, vec![1; n]).unwrap();
                let output = ForwardBackwardOutput::default()
                    .loss_fn_outputs(record)
                    .metrics([("n:sum".to_owned(), n as f64)].into());
                self.train(seq, Reply::forward_backward(&output))
            }
            Route::OptimStep
            | Route::DiscardGradient
            | Route::SaveWeights
            | Route::SaveWeightsForSampler
            | Route::SaveWeightsExternal
            | Route::LoadWeights => match call.json()["seq_id"].as_u64() {
                Some(seq) => self.train(seq, Reply::ok()),
                None => Reply::ok(),
            },
            Route::RetrieveFuture => self.poll(call.json()["request_id"].as_str().unwrap()),
            _ => Reply::ok(),
        }
    }

    /// Accepts a training request with `reply`, or rejects it.
    fn train(&mut self, seq: u64, reply: Reply) -> Reply {
        let rejected = self.rejected.get(&seq).map(to_reply);
        let at = Instant::now();
        let is_rejected = rejected.is_some();
        self.training.push(TrainingRequest { seq, at, rejected: is_rejected });
        rejected.unwrap_or(reply.request_id(format!("r{seq}"))).delay(ACCEPTING)
    }

    /// Returns the next response to a poll.
    fn poll(&mut self, id: &str) -> Reply {
        match self.responses.get_mut(id) {
            Some(responses) if responses.len() > 1 => to_reply(&responses.remove(0)),
            Some(responses) => to_reply(&responses[0]),
            None => Reply::ok(),
        }
    }
}

/// Converts a scripted response:
///
/// * a number is a status without a body, an array a status with a JSON body;
/// * the string `timeout` is a timeout, `hang` no response, `refused` a refused connection, any
///   other string a lost connection;
/// * an object is a JSON body, with the field `proto` a protobuf body, and with the field `status`
///   a status whose other fields are headers.
fn to_reply(scripted: &Value) -> Reply {
    let status = |status: &Value| Reply::status(u16::try_from(status.as_u64().unwrap()).unwrap());
    match scripted {
        Value::Number(_) => status(scripted),
        Value::Array(pair) => status(&pair[0]).with_json(&pair[1]),
        Value::String(word) if word == "timeout" => Reply::timeout(),
        Value::String(word) if word == "hang" => Reply::never(),
        Value::String(word) if word == "refused" => Reply::connection_refused(),
        Value::String(_) => Reply::connection_lost(),
        Value::Object(fields) if fields.get("status").is_some_and(Value::is_u64) => {
            let headers = fields.iter().filter(|(name, _)| *name != "status");
            headers.fold(status(&fields["status"]), |reply, (name, value)| {
                reply.header(name, value.as_str().unwrap())
            })
        }
        Value::Object(fields) if fields.contains_key("proto") => {
            let bytes: Vec<u8> = serde_json::from_value(fields["proto"].clone()).unwrap();
            Reply::status(200).header("content-type", PROTO).text(bytes)
        }
        body => Reply::json(body),
    }
}

impl HttpService for NumberedServer {
    fn send(
        &self,
        lane: Lane,
        request: Request<Bytes>,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>> {
        self.0.server.send(lane, request, timeout)
    }
}
