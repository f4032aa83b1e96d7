//! A whole program against SkyRL 0.4.0: `cargo xtask cluster --record` records its exchanges with
//! the real server, and the test here replays them.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::header::CONTENT_TYPE;
use http::{Request, Response};
use serde_json::{Value, json};
use tinkex::{
    AdamParams, Datum, Env, ErrorKind, HttpFailure, HttpService, Lane, LoraOptions, LossFn,
    RestoreMode, SampleOptions, SamplingParams, ServiceClient,
};

const PROTO: &str = "application/x-protobuf";

fn fixture_path() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/servers/skyrl-0.4.0.json")
}

/// Trains, saves, restores and samples, and returns what the server computed.
async fn program(service: &ServiceClient, base_model: &str) -> Value {
    let options = LoraOptions::new(base_model).rank(8).seed(1);
    let model = service.create_lora_training_client(options).await.unwrap();
    let data = || {
        vec![
            Datum::completion([5, 6, 7], [8, 9]).unwrap(),
            Datum::completion([11], [12, 13]).unwrap(),
        ]
    };
    let pass = model.forward_backward(data(), LossFn::CrossEntropy).await.unwrap();
    model.optim_step(AdamParams::with_learning_rate(1e-2)).await.unwrap();
    let forward = model.forward(data(), LossFn::CrossEntropy).await.unwrap();
    let unknown = model.forward_backward(data(), LossFn::Dro).await.unwrap_err();

    let state = model.save_state("state").await.unwrap();
    let restored = service.create_training_client_from(&state, RestoreMode::WithOptimizer);
    let restored = restored.await.unwrap();
    let repeated = restored.forward(data(), LossFn::CrossEntropy).await.unwrap();

    let weights = model.save_weights_for_sampler("weights").await.unwrap();
    let sampler = service.create_sampling_client_from(&weights).await.unwrap();
    let params = SamplingParams::new().max_tokens(4).temperature(0.0).seed(1);
    let sampled =
        sampler.sample([5, 6, 7], SampleOptions::new(params).num_samples(2)).await.unwrap();
    let scored = sampler.compute_logprobs([5, 6, 7, 8, 9]).await.unwrap();
    let prompt_topk = SamplingParams::new().max_tokens(1);
    let failed = sampler
        .sample([5, 6], SampleOptions::new(prompt_topk).topk_prompt_logprobs(2))
        .await
        .unwrap_err();
    json!({
        "losses": [pass.loss(), forward.loss(), repeated.loss()],
        "unknown_loss": unknown.status(),
        "state": state.to_string(),
        "weights": weights.to_string(),
        "tokens": sampled.sequences.iter().map(|s| s.tokens.to_vec()).collect::<Vec<_>>(),
        "logprobs": scored.iter().collect::<Vec<_>>(),
        "failed": [json!(failed.status()), json!(failed.kind() == ErrorKind::Rejected)],
    })
}

/// Forwards requests to a server and keeps the exchanges.
#[derive(Clone, Default)]
struct Recorder {
    client: reqwest::Client,
    exchanges: Arc<Mutex<Vec<Value>>>,
}

impl HttpService for Recorder {
    fn send(
        &self,
        _lane: Lane,
        request: Request<Bytes>,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>> {
        Box::pin(async move {
            let (parts, body) = request.into_parts();
            let content_type = parts.headers.get(CONTENT_TYPE).cloned();
            let response = self
                .client
                .request(parts.method.clone(), parts.uri.to_string())
                .headers(parts.headers)
                .body(body.clone())
                .timeout(timeout)
                .send()
                .await
                .map_err(HttpFailure::connect)?;
            let mut copy = Response::builder().status(response.status());
            let response_type = response.headers().get(CONTENT_TYPE).cloned();
            if let Some(response_type) = &response_type {
                copy = copy.header(CONTENT_TYPE, response_type);
            }
            let status = response.status().as_u16();
            let received = response.bytes().await.map_err(HttpFailure::connect)?;
            let text = |value: Option<http::HeaderValue>| {
                value.map(|value| value.to_str().unwrap().to_owned())
            };
            self.exchanges.lock().unwrap().push(json!({
                "method": parts.method.as_str(),
                "path": parts.uri.path(),
                "request_type": text(content_type),
                "request": body_value(&body),
                "status": status,
                "response_type": text(response_type),
                "response": body_value(&received),
            }));
            Ok(copy.body(received).unwrap())
        })
    }
}

/// Returns a body as JSON, or as base64 if it is not JSON.
fn body_value(body: &Bytes) -> Value {
    serde_json::from_slice(body).unwrap_or_else(|_| json!({"base64": STANDARD.encode(body)}))
}

fn body_bytes(value: &Value) -> Bytes {
    match value["base64"].as_str() {
        Some(text) => STANDARD.decode(text).unwrap().into(),
        None => value.to_string().into(),
    }
}

/// Responds to each request with the next recorded response of its method, path and polled request.
#[derive(Clone)]
struct Replay(Arc<Mutex<Vec<Value>>>);

impl HttpService for Replay {
    fn send(
        &self,
        _lane: Lane,
        request: Request<Bytes>,
        _timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>> {
        let (parts, body) = request.into_parts();
        let content_type = parts.headers.get(CONTENT_TYPE).map(|value| value.to_str().unwrap());
        let polled = body_value(&body)["request_id"].clone();
        let mut exchanges = self.0.lock().unwrap();
        let matches = |exchange: &Value| {
            exchange["method"] == parts.method.as_str()
                && exchange["path"] == parts.uri.path()
                && exchange["request_type"] == json!(content_type)
                && exchange["request"]["request_id"] == polled
        };
        let found = exchanges.iter().position(matches);
        let found = found.unwrap_or_else(|| panic!("{} was not recorded", parts.uri));
        let exchange = exchanges.remove(found);
        let status = u16::try_from(exchange["status"].as_u64().unwrap()).unwrap();
        let mut response = Response::builder().status(status);
        if let Some(content_type) = exchange["response_type"].as_str() {
            response = response.header(CONTENT_TYPE, content_type);
        }
        let response = response.body(body_bytes(&exchange["response"])).unwrap();
        Box::pin(async { Ok(response) })
    }
}

fn client(http: impl HttpService, base_url: &str) -> ServiceClient {
    ServiceClient::builder()
        .without_telemetry()
        .env(Env::empty())
        .base_url(base_url)
        .api_key("tml-recorded")
        .http(http)
        .build()
        .unwrap()
}

#[tokio::test(start_paused = true)]
async fn skyrl_0_4_trains_and_samples() {
    let recorded: Value = serde_json::from_slice(&std::fs::read(fixture_path()).unwrap()).unwrap();
    let exchanges = recorded["exchanges"].as_array().unwrap().clone();
    let first = |path: &str| exchanges.iter().find(|exchange| exchange["path"] == path).unwrap();
    assert_eq!(first("/api/v1/client/dynamic_config")["status"], 404);
    assert_eq!(first("/api/v1/forward_backward")["request"]["base64"], "", "the empty pass");
    let sample = &first("/api/v1/asample")["response"];
    assert!(sample.get("sample_sequence_ids").is_none(), "{sample}");

    let replay = Replay(Arc::new(Mutex::new(exchanges)));
    let service = client(replay.clone(), "http://server.test");
    let result = program(&service, recorded["base_model"].as_str().unwrap()).await;
    assert_eq!(result, recorded["result"]);
    let losses = &result["losses"];
    assert!(losses[1].as_f64() < losses[0].as_f64(), "the step lowered the loss: {losses}");
    assert_eq!(losses[1], losses[2], "the restored model is the saved one");
    let left = replay.0.lock().unwrap();
    let unused = left.iter().filter(|exchange| exchange["path"] != "/api/v1/session_heartbeat");
    assert_eq!(unused.count(), 0, "every exchange was repeated: {left:?}");
    drop(left);
}

/// Records the exchanges; run by `cargo xtask cluster --record`.
#[tokio::test]
#[ignore = "needs SkyRL 0.4.0; cargo xtask cluster --record runs it"]
async fn record_skyrl_0_4() {
    #[expect(clippy::disallowed_methods, reason = "set by cargo xtask cluster")]
    let url = std::env::var("TINKEX_RECORD_URL").unwrap();
    rustls::crypto::ring::default_provider().install_default().unwrap();
    let recorder = Recorder::default();
    let service = client(recorder.clone(), &url);
    let models = service.server_capabilities().await.unwrap().supported_models;
    let base_model = models.into_iter().find_map(|model| model.model_name).unwrap();
    recorder.exchanges.lock().unwrap().retain(|exchange| exchange["method"] != "GET");
    let result = program(&service, &base_model).await;
    let exchanges = recorder.exchanges.lock().unwrap().clone();
    let pass = exchanges.iter().filter(|exchange| exchange["request_type"] == PROTO);
    assert!(pass.count() > 1, "passes were sent as protobuf");
    let recorded = json!({"base_model": base_model, "result": result, "exchanges": exchanges});
    // The server names the model by its folder on the machine that recorded it.
    let text = serde_json::to_string_pretty(&recorded).unwrap().replace(&base_model, "tiny");
    std::fs::create_dir_all(fixture_path().parent().unwrap()).unwrap();
    std::fs::write(fixture_path(), text + "\n").unwrap();
}
