//! A server with a tiny model, and clients for it.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;
use tinkex::{AdamParams, Datum, Env, LoraOptions, LossFn, ServiceClient, TrainingClient};
use tinkex_server::{Server, ServerOptions};

/// Name of the base model that every test server has besides the built-in one.
pub(crate) const MODEL: &str = "tiny";

/// A running server and its data folder.
pub(crate) struct TestServer {
    pub(crate) server: Server,
    pub(crate) data: TempDir,
}

/// Returns an environment variable by which `cargo xtask` configures the tests that it runs.
pub(crate) fn setting(name: &str) -> Option<String> {
    #[expect(
        clippy::disallowed_methods,
        reason = "the only access of the tests to the environment"
    )]
    std::env::var(name).ok()
}

/// Returns the folder of a golden model of the engine crate.
pub(crate) fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/golden").join(name)
}

/// Returns the options of a test server: one thread, and a snapshot after every optimizer step.
pub(crate) fn options(data: &Path) -> ServerOptions {
    let mut options = ServerOptions::new(data).model(MODEL, golden("qwen3"));
    options.threads = 1;
    options.limits.kv_cache_bytes = 64 << 20;
    options.timeouts.poll_hold = Duration::from_secs(5);
    options.timeouts.snapshot_after = Duration::ZERO;
    options
}

impl TestServer {
    pub(crate) async fn new() -> Self {
        Self::with(|_| {}).await
    }

    /// Starts a server after `change` has modified its options.
    pub(crate) async fn with(change: impl FnOnce(&mut ServerOptions)) -> Self {
        let data = tempfile::tempdir().unwrap();
        let mut options = options(data.path());
        change(&mut options);
        let server = Server::start(options).await.unwrap();
        Self { server, data }
    }

    pub(crate) fn client(&self) -> ServiceClient {
        client(&self.server.base_url())
    }

    pub(crate) fn http(&self) -> Http {
        Http::new(&self.server.base_url())
    }
}

pub(crate) fn client(url: &str) -> ServiceClient {
    ServiceClient::builder().env(Env::empty()).base_url(url).api_key("tml-test").build().unwrap()
}

/// Returns an HTTP client that does not know the API.
pub(crate) fn http_client() -> reqwest::Client {
    // Installing fails if another test of this process has already installed the provider.
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::builder().no_proxy().build().unwrap()
}

/// Client for single endpoints, to send requests that the SDK would not send.
pub(crate) struct Http {
    base: String,
    client: reqwest::Client,
}

impl Http {
    pub(crate) fn new(base: &str) -> Self {
        Self { base: base.to_owned(), client: http_client() }
    }

    /// Returns a client that sends an API key.
    pub(crate) fn with_key(base: &str, key: &str) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let headers =
            [(reqwest::header::HeaderName::from_static("x-api-key"), key.parse().unwrap())];
        let headers = headers.into_iter().collect();
        let client = reqwest::Client::builder().no_proxy().default_headers(headers).build();
        Self { base: base.to_owned(), client: client.unwrap() }
    }

    /// Sends a request and returns its status and the text of the response.
    pub(crate) async fn text(&self, method: &str, path: &str, body: Vec<u8>) -> (u16, String) {
        let method = reqwest::Method::from_bytes(method.as_bytes()).unwrap();
        let request = self.client.request(method, format!("{}{path}", self.base)).body(body);
        let response = request.send().await.unwrap();
        (response.status().as_u16(), response.text().await.unwrap())
    }

    pub(crate) async fn send(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: Vec<u8>,
    ) -> (u16, Value) {
        let method = reqwest::Method::from_bytes(method.as_bytes()).unwrap();
        let url = format!("{}{path}", self.base);
        let mut request = self.client.request(method, url).body(body);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let response = request.send().await.unwrap();
        let status = response.status().as_u16();
        let body = response.bytes().await.unwrap();
        (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> (u16, Value) {
        self.send("POST", &format!("/api/v1{path}"), &[], body.to_string().into_bytes()).await
    }

    pub(crate) async fn get(&self, path: &str) -> (u16, Value) {
        self.send("GET", path, &[], Vec::new()).await
    }

    /// Polls until a request is finished and returns its JSON result.
    pub(crate) async fn result(&self, future: &Value) -> Value {
        loop {
            let poll = serde_json::json!({"request_id": future["request_id"]});
            let (status, body) = self.post("/retrieve_future", poll).await;
            assert_eq!(status, 200, "{body}");
            if body["type"] != "try_again" {
                return body;
            }
        }
    }

    /// Polls until a request is finished and returns its protobuf result.
    pub(crate) async fn proto_result(&self, future: &Value) -> bytes::Bytes {
        loop {
            let poll = serde_json::json!({"request_id": future["request_id"]});
            let url = format!("{}/api/v1/retrieve_future", self.base);
            let response = self.client.post(url).body(poll.to_string()).send().await.unwrap();
            assert_eq!(response.status(), 200);
            let proto = response.headers()["content-type"] == "application/x-protobuf";
            let body = response.bytes().await.unwrap();
            if proto {
                return body;
            }
            assert!(body.windows(9).any(|part| part == b"try_again"), "{body:?}");
        }
    }

    /// Polls once and returns the body of the response.
    pub(crate) async fn poll(&self, future: &Value) -> bytes::Bytes {
        let poll = serde_json::json!({"request_id": future["request_id"]});
        let url = format!("{}/api/v1/retrieve_future", self.base);
        let response = self.client.post(url).body(poll.to_string()).send().await.unwrap();
        assert_eq!(response.status(), 200);
        response.bytes().await.unwrap()
    }

    /// Polls until a sampling request is finished and returns the tokens of its first sample.
    pub(crate) async fn sampled(&self, future: &Value) -> Vec<u32> {
        let body = self.proto_result(future).await;
        let response = tinkex_wire::SampleResponse::from_proto(&body).unwrap();
        response.sequences[0].tokens.to_vec()
    }

    /// Returns the values of `/metrics` without the prefix `tinkex_`. Leaves out the sums of
    /// histograms, which are not integers.
    pub(crate) async fn metrics(&self) -> HashMap<String, u64> {
        let response = self.client.get(format!("{}/metrics", self.base)).send().await.unwrap();
        let text = response.text().await.unwrap();
        let lines = text.lines().filter_map(|line| line.strip_prefix("tinkex_")?.split_once(' '));
        let lines = lines.filter(|(name, _)| !name.contains("_seconds_sum"));
        lines.map(|(name, value)| (name.to_owned(), value.parse().unwrap())).collect()
    }

    /// Creates a session and returns its id.
    pub(crate) async fn session(&self) -> String {
        let request = serde_json::json!({
            "tags": [], "user_metadata": {}, "sdk_version": "0.36.0", "type": "create_session",
        });
        let (status, body) = self.post("/create_session", request).await;
        assert_eq!(status, 200, "{body}");
        body["session_id"].as_str().unwrap().to_owned()
    }

    /// Creates a sampling session of the base model and returns its id.
    pub(crate) async fn sampler(&self, session: &str) -> String {
        let request = serde_json::json!({
            "session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL,
        });
        let (status, body) = self.post("/create_sampling_session", request).await;
        assert_eq!(status, 200, "{body}");
        body["sampling_session_id"].as_str().unwrap().to_owned()
    }

    /// Creates a model, waits until it is ready and returns its id.
    pub(crate) async fn model(&self, session: &str) -> String {
        let (status, future) = self.post("/create_model", create_model(session, 0)).await;
        assert_eq!(status, 200, "{future}");
        self.result(&future).await["model_id"].as_str().unwrap().to_owned()
    }

    /// Saves a training checkpoint, waits until it is written and returns its path.
    pub(crate) async fn save(&self, model: &str, seq: u64, name: &str) -> String {
        let request = serde_json::json!({
            "model_id": model, "path": name, "seq_id": seq, "type": "save_weights",
        });
        let (status, future) = self.post("/save_weights", request).await;
        assert_eq!(status, 200, "{future}");
        self.result(&future).await["path"].as_str().unwrap().to_owned()
    }
}

/// Returns the body of a `create_model` request with `model_seq_id` `n`.
pub(crate) fn create_model(session: &str, n: u32) -> Value {
    serde_json::json!({
        "session_id": session, "model_seq_id": n, "base_model": MODEL,
        "lora_config": {"rank": 4, "seed": 7}, "type": "create_model",
    })
}

/// Returns the body of an `optim_step` request.
pub(crate) fn step(model: &str, seq: u64, learning_rate: f64) -> Value {
    serde_json::json!({
        "model_id": model, "seq_id": seq, "type": "optim_step",
        "adam_params": {"learning_rate": learning_rate},
    })
}

/// Creates a model through the client, always with the same seed.
pub(crate) async fn training_client(service: &ServiceClient) -> TrainingClient {
    service.create_lora_training_client(LoraOptions::new(MODEL).rank(4).seed(5)).await.unwrap()
}

/// Trains a model and returns the bits of its losses.
pub(crate) async fn train(model: &TrainingClient, steps: usize) -> Vec<u64> {
    let mut losses = Vec::new();
    for _ in 0..steps {
        let batch = vec![Datum::completion([5, 6, 7], [8, 9, 10]).unwrap(); 2];
        let adam = AdamParams::with_learning_rate(1e-2);
        let step = model.step(batch, LossFn::CrossEntropy, adam).await.unwrap();
        losses.push(step.pass.metrics["loss:sum"].as_f64().to_bits());
    }
    losses
}
