//! The calls of `xtask/record/exchanges.py`, made with this client and answered with the recorded
//! responses (`fixtures/sdk`). Every request must equal the recorded one.
//!
//! `cargo xtask record` records a new release of the Python SDK.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{Request, Response};
use serde_json::{Value, json};
use tinkex::{
    AdamParams, Datum, Env, HttpFailure, HttpService, Lane, LoraOptions, LossConfig, LossFn,
    LossSpec, RestoreMode, SampleOptions, SamplingParams, SaveOptions, ServiceClient,
    StopCondition, StopReason,
};
use tinkex_wire::codec::compress;
use tinkex_wire::{ApiRequest as _, ForwardBackward, RequestBody, SampleRequest};
use tokio::time::sleep;

use crate::request_parity::assert_same_pass;

/// Routes that the client uses when it connects, which may be in another step than for the SDK.
const CONNECTING: [&str; 3] = ["client/config", "client/dynamic_config", "create_session"];
/// Routes that background tasks use at any time.
const BACKGROUND: [&str; 2] = ["session_heartbeat", "telemetry"];
const BATCH_POLL: &str = "retrieve_futures";
/// Files beside the exchanges.
const OTHER_FILES: [&str; 2] = ["sdk", "signatures"];
/// Prefix of the steps that only encode a sample request, without a client. A test of their own
/// compares them.
const SAMPLE_REQUESTS: &str = "sample_request_";
/// Headers with a meaning for the protocol.
const HEADERS: [&str; 4] =
    ["accept", "content-type", "x-tinker-request-type", "x-tinker-sampling-backpressure"];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/sdk")
}

fn load(name: &str) -> Value {
    let path = folder().join(format!("{name}.json"));
    let text = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_slice(&text).unwrap()
}

/// Returns the body of a recorded protobuf message.
fn proto(side: &Value) -> Option<Bytes> {
    use base64::Engine as _;
    let text = side["body_base64"].as_str()?;
    Some(base64::engine::general_purpose::STANDARD.decode(text).unwrap().into())
}

/// Server that answers each request with the recorded response to the same request.
#[derive(Clone)]
struct ReplayServer(Arc<Mutex<ReplayState>>);

struct ReplayState {
    step: String,
    /// Exchanges by name, without those that were used.
    exchanges: BTreeMap<String, Value>,
    /// Differences between requests and recordings. A panic would fail only the request, which a
    /// background task may have sent.
    differences: Vec<String>,
}

/// Returns the names of all recorded exchanges, in alphabetical order.
fn exchange_names() -> Vec<String> {
    let files = std::fs::read_dir(folder()).unwrap();
    let names = files.filter_map(|entry| {
        let name = entry.unwrap().file_name().into_string().unwrap();
        name.strip_suffix(".json").filter(|name| !OTHER_FILES.contains(name)).map(str::to_owned)
    });
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}

impl ReplayServer {
    fn new() -> Self {
        let names = exchange_names().into_iter().filter(|name| !name.starts_with(SAMPLE_REQUESTS));
        let exchanges = names.map(|name| (name.clone(), load(&name))).collect();
        let step = "start".to_owned();
        let differences = Vec::new();
        Self(Arc::new(Mutex::new(ReplayState { step, exchanges, differences })))
    }

    /// Ends the current step, whose recorded exchanges must all have been used, and starts another.
    fn step(&self, name: &str) {
        let mut state = self.0.lock().unwrap();
        state.check(&format!("{}.", state.step));
        state.step = name.to_owned();
    }

    /// Ends the last step. The exchanges of all steps must have been used, also of those that the
    /// program never entered.
    fn finish(&self) {
        self.0.lock().unwrap().check("");
    }

    /// Returns the recorded response, or `None` for a batch poll without a result, which a server
    /// holds.
    fn respond(&self, request: &Request<Bytes>) -> Option<Response<Bytes>> {
        let path = request.uri().path();
        let name = path.trim_start_matches("/api/v1/");
        if BACKGROUND.contains(&name) {
            return Some(json_response(&json!({"status": "accepted"})));
        }
        let mut state = self.0.lock().unwrap();
        let step = format!("{}.", state.step);
        let found = state.exchanges.iter().find(|(exchange_name, exchange)| {
            let same_step = exchange_name.starts_with(&step) || CONNECTING.contains(&name);
            same_step && route(&exchange["request"]) == name
        });
        let Some(found) = found.map(|(name, _)| name.clone()) else {
            if name == BATCH_POLL {
                return None;
            }
            state.differences.push(format!("{step} the SDK does not send {path} here"));
            return Some(Response::builder().status(404).body(Bytes::new()).unwrap());
        };
        let exchange = state.exchanges.remove(&found).unwrap();
        if let Err(difference) = compare(request, &exchange["request"]) {
            state.differences.push(format!("{found}: {difference}"));
        }
        let recorded = &exchange["response"];
        let Some(body) = proto(recorded) else { return Some(json_response(&recorded["body"])) };
        let kind = recorded["headers"]["content-type"].as_str().unwrap();
        Some(Response::builder().header("content-type", kind).body(body).unwrap())
    }
}

impl ReplayState {
    /// Fails if a request differed from its recording, or if an exchange whose name starts with
    /// `prefix` was not used.
    fn check(&self, prefix: &str) {
        assert_eq!(self.differences, Vec::<String>::new(), "step {}", self.step);
        let unused = self.exchanges.iter().filter(|(name, exchange)| {
            // The SDK connects once for each kind of client, this client once.
            name.starts_with(prefix) && !CONNECTING.contains(&route(&exchange["request"]))
        });
        let unused: Vec<_> = unused.map(|(name, _)| name).collect();
        assert!(unused.is_empty(), "requests that were not sent: {unused:?}");
    }
}

impl HttpService for ReplayServer {
    fn send(
        &self,
        _: Lane,
        request: Request<Bytes>,
        _: Duration,
    ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>> {
        let response = self.respond(&request);
        Box::pin(async move {
            if let Some(response) = response {
                return Ok(response);
            }
            sleep(Duration::from_secs(30)).await;
            let poll: Value = serde_json::from_slice(request.body()).unwrap();
            Ok(json_response(&json!({"completions": [], "cursor": poll["prev_cursor"]})))
        })
    }
}

fn json_response(body: &Value) -> Response<Bytes> {
    let response = Response::builder().header("content-type", "application/json");
    response.body(body.to_string().into()).unwrap()
}

fn route(request: &Value) -> &str {
    request["path"].as_str().unwrap().trim_start_matches("/api/v1/")
}

/// Compares a request with the recorded one.
fn compare(request: &Request<Bytes>, recorded: &Value) -> Result<(), String> {
    let same = |what: &str, sent: Value, recorded: &Value| {
        if &sent == recorded { Ok(()) } else { Err(format!("{what} {sent}, recorded {recorded}")) }
    };
    same("method", json!(request.method().as_str()), &recorded["method"])?;
    for name in HEADERS {
        let sent = request.headers().get(name).map(|value| value.to_str().unwrap());
        // A request without a body needs no content type.
        if name != "content-type" || !request.body().is_empty() {
            same(name, json!(sent), recorded["headers"].get(name).unwrap_or(&Value::Null))?;
        }
    }
    let Some(recorded_pass) = proto(recorded) else {
        let mut sent: Value = match &request.body()[..] {
            [] => Value::Null,
            body => serde_json::from_slice(body).map_err(|error| error.to_string())?,
        };
        if let Some(version) = sent.get_mut("sdk_version") {
            *version = json!("<sdk-version>");
        }
        let mut expected = recorded["body"].clone();
        if route(recorded) == BATCH_POLL {
            // Which poll reports a retrieved result depends on time.
            for poll in [&mut sent, &mut expected] {
                assert!(poll.as_object_mut().unwrap().remove("retrieved_request_ids").is_some());
            }
        }
        return same("body", sent, &expected);
    };
    let encoding = request.headers().get("content-encoding").map(|value| value.to_str().unwrap());
    same("content-encoding", json!(encoding), &recorded["headers"]["content-encoding"])?;
    let body = match encoding {
        Some(_) => compress::decompress(request.body(), 1 << 20).unwrap(),
        None => request.body().clone(),
    };
    let sent = ForwardBackward::from_proto(&body).unwrap();
    let recorded = ForwardBackward::from_proto(&recorded_pass).unwrap();
    same("model", json!(sent.model_id), &json!(recorded.model_id))?;
    same("sequence number", json!(sent.seq_id), &json!(recorded.seq_id))?;
    assert_same_pass(&sent, &recorded, "the pass");
    Ok(())
}

fn datum(tokens: &[u32], inputs: &[(&'static str, &[f32])]) -> Datum {
    let targets: Vec<i64> = tokens[1..].iter().map(|token| i64::from(*token)).collect();
    let builder = Datum::builder(tokens[..tokens.len() - 1].to_vec());
    let mut builder = builder.loss_input("target_tokens", targets);
    for (name, values) in inputs {
        builder = builder.loss_input(*name, values.to_vec());
    }
    builder.build().unwrap()
}

/// Covers T6.2, T0.1.1.
#[tokio::test(start_paused = true)]
async fn the_recorded_program_of_the_python_sdk_sends_the_same_requests() {
    let server = ReplayServer::new();
    let metadata = |key: &str, value: &str| [(key.to_owned(), json!(value))].into_iter().collect();
    let service = ServiceClient::builder()
        .env(Env::empty())
        .base_url("http://replay.test")
        .api_key("tml-recorded")
        .user_metadata(metadata("k", "v"))
        .http(server.clone())
        .build()
        .unwrap();
    let batch = || {
        vec![
            datum(&[5, 6, 7, 8], &[("weights", &[0.0, 1.0, 0.5])]),
            datum(&[9, 10, 11], &[("weights", &[1.0, 1.0])]),
        ]
    };
    let prompt = || [5, 6, 7];

    service.server_capabilities().await.unwrap();
    server.step("create_model");
    let options = LoraOptions::new("tiny").rank(4).seed(1).user_metadata(metadata("exp", "1"));
    let model = service.create_lora_training_client(options).await.unwrap();
    server.step("get_info");
    model.get_info().await.unwrap();
    server.step("forward_backward");
    let trained = model.forward_backward(batch(), LossFn::CrossEntropy).await.unwrap();
    server.step("optim_step");
    model.optim_step(AdamParams::with_learning_rate(0.01)).await.unwrap();
    server.step("forward");
    let evaluated = model.forward(batch(), LossFn::CrossEntropy).await.unwrap();
    assert!(evaluated.loss().unwrap() < trained.loss().unwrap(), "the recorded step trains");
    server.step("ppo");
    let rollout = datum(
        &[5, 6, 7, 8],
        &[("logprobs", &[0.0, -4.0, -4.5]), ("advantages", &[0.0, 1.0, -0.5])],
    );
    let config = LossConfig::new().set("clip_low_threshold", 0.9).set("clip_high_threshold", 1.1);
    model.forward_backward(vec![rollout], LossSpec::new(LossFn::Ppo, config)).await.unwrap();
    server.step("save_state");
    let state = model.save_state("a").await.unwrap();
    server.step("save_state_again");
    let options = SaveOptions::new("a").ttl(Duration::from_secs(3600)).overwrite();
    model.save_state(options.metadata("a", "b")).await.unwrap();
    server.step("create_model_from_state");
    service.create_training_client_from(&state, RestoreMode::WeightsOnly).await.unwrap();
    server.step("create_model_from_state_with_optimizer");
    service.create_training_client_from(&state, RestoreMode::WithOptimizer).await.unwrap();
    server.step("save_weights_for_sampler");
    let weights = model.save_weights_for_sampler("s").await.unwrap();

    server.step("sampler_of_base_model");
    let sampler = service.create_sampling_client("tiny").await.unwrap();
    server.step("sampler_of_checkpoint");
    let trained = service.create_sampling_client_from(&weights).await.unwrap();
    server.step("sample_until_length");
    let params = || {
        let params = SamplingParams::new().max_tokens(4).seed(1).temperature(0.7);
        params.top_k(20).top_p(0.9)
    };
    let call = sampler
        .sample(prompt(), SampleOptions::new(params().stop(StopCondition::NEVER)).num_samples(2));
    let response = call.await.unwrap();
    let first = &response.sequences[0];
    assert_eq!((first.tokens.len(), first.stop_reason), (4, StopReason::Length));
    server.step("sample_until_stop");
    let stop = params().stop([first.tokens[1]]);
    let response = sampler.sample(prompt(), stop).await.unwrap();
    assert_eq!(response.sequences[0].stop_reason, StopReason::Stop);
    server.step("sample_checkpoint");
    let params = SamplingParams::new().max_tokens(2).temperature(0.0);
    trained.sample(prompt(), SampleOptions::new(params).prompt_logprobs()).await.unwrap();
    server.step("compute_logprobs");
    assert_eq!(sampler.compute_logprobs(prompt()).await.unwrap().len(), 3);
    server.finish();
}

/// A recorded step that the program above does not make must not pass unnoticed.
#[test]
#[should_panic(expected = "requests that were not sent: [\"compute_logprobs.asample\"")]
fn a_recorded_step_that_is_never_entered_fails() {
    ReplayServer::new().finish();
}

/// Covers T6.2, T0.1.4, T1.2.2.
#[test]
fn sample_requests_without_a_session_equal_those_of_the_python_sdk() {
    let weights = load("sampler_of_checkpoint.create_sampling_session");
    let weights = weights["request"]["body"]["model_path"].as_str().unwrap().to_owned();
    let request = || {
        SampleRequest::new([5, 6, 7], SamplingParams::new().max_tokens(1))
            .prompt_logprobs(None)
            .record_stability_info(None)
    };
    let base = || request().base_model(Some("tiny".to_owned()));
    let mut recorded = exchange_names();
    recorded.retain(|name| name.starts_with(SAMPLE_REQUESTS));
    for (name, request) in [
        ("sample_request_base_model", base()),
        ("sample_request_model_path", request().model_path(Some(weights))),
        ("sample_request_prompt_logprobs_null", base().prompt_logprobs(None)),
        ("sample_request_prompt_logprobs_true", base().prompt_logprobs(Some(true))),
        ("sample_request_prompt_logprobs_false", base().prompt_logprobs(Some(false))),
    ] {
        let RequestBody::Json(body) = request.body().unwrap() else { panic!("not JSON") };
        let sent: Value = serde_json::from_slice(&body).unwrap();
        let name = format!("{name}.asample");
        assert_eq!(sent, load(&name)["request"]["body"], "{name}");
        recorded.retain(|recorded| *recorded != name);
    }
    assert!(recorded.is_empty(), "requests that were not compared: {recorded:?}");
}
