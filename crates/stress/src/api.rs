//! [`Api`]: the requests of the Tinker API that attacks and honest users send.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tinkex_wire::{Datum, ForwardBackward, LossFn, Seq};

use crate::http::{HttpClient, HttpResponse};

/// Base model of all requests.
pub(crate) const MODEL: &str = "tinkex/tiny";

/// Client of the Tinker API and of the inference endpoints, with one API key.
pub(crate) struct Api {
    pub(crate) http: HttpClient,
    /// Number of models and sampling sessions that were created.
    created: AtomicU64,
}

impl Api {
    pub(crate) fn new(address: &str, key: Option<&str>) -> Self {
        Self { http: HttpClient::new(address, key), created: AtomicU64::new(0) }
    }

    fn next(&self) -> u64 {
        self.created.fetch_add(1, Ordering::Relaxed)
    }

    /// Creates a user and returns a key of the user. Needs the administrator's key. Returns the
    /// administrator's key if the server has no users.
    pub(crate) async fn user(&self, name: &str, administrator: &str) -> Result<String, String> {
        let body = json!({"name": name, "user": name, "role": "user"});
        let response = self.http.post("/api/v1/keys", &body, Duration::from_secs(20)).await?;
        match response.status {
            404 => Ok(administrator.to_owned()),
            200 => text(&response.json(), "key"),
            status => Err(format!("cannot create a key: status {status}: {}", response.json())),
        }
    }

    /// Sends a request to a route of the Tinker API, which must succeed.
    ///
    /// # Errors
    /// If there is no successful response within `timeout`.
    pub(crate) async fn request(
        &self,
        route: &str,
        body: &Value,
        timeout: Duration,
    ) -> Result<Value, String> {
        let response = self.http.succeed(&format!("/api/v1/{route}"), body, timeout).await?;
        Ok(response.json())
    }

    /// Creates a session and returns its id.
    pub(crate) async fn session(&self, timeout: Duration) -> Result<String, String> {
        let body = json!({
            "tags": [], "user_metadata": {}, "sdk_version": "0.36.0", "type": "create_session",
        });
        text(&self.request("create_session", &body, timeout).await?, "session_id")
    }

    /// Creates a model of rank 4, always with the same initial weights, and returns its id.
    pub(crate) async fn model(&self, session: &str, timeout: Duration) -> Result<String, String> {
        let body = json!({
            "session_id": session, "model_seq_id": self.next(), "base_model": MODEL,
            "lora_config": {"rank": 4, "seed": 7}, "type": "create_model",
        });
        let future = self.request("create_model", &body, timeout).await?;
        let result = self.result(&future, timeout).await?;
        text(&serde_json::from_slice(&result).unwrap_or_default(), "model_id")
    }

    /// Creates a sampling session of the base model and returns its id.
    pub(crate) async fn sampler(&self, session: &str, timeout: Duration) -> Result<String, String> {
        let body = json!({
            "session_id": session, "sampling_session_seq_id": self.next(), "base_model": MODEL,
        });
        text(&self.request("create_sampling_session", &body, timeout).await?, "sampling_session_id")
    }

    /// Polls until a request is finished, and returns its result.
    ///
    /// # Errors
    /// If the server does not know the request, the request has failed, or there is no result within
    /// `timeout`.
    pub(crate) async fn result(
        &self,
        future: &Value,
        timeout: Duration,
    ) -> Result<Vec<u8>, String> {
        let end = Instant::now() + timeout;
        let id = text(future, "request_id")?;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let poll = json!({"request_id": id});
            let path = "/api/v1/retrieve_future";
            let response = self.http.succeed(path, &poll, left).await?;
            match PollState::of(&response) {
                PollState::Pending => {}
                PollState::Finished => return Ok(response.body),
                PollState::Failed(reason) => return Err(format!("request {id} failed: {reason}")),
            }
        }
    }

    /// Runs a training pass and an optimizer step on a model, with the sequence numbers `seq` and
    /// `seq + 1`. Returns the result of the pass.
    pub(crate) async fn step(
        &self,
        model: &str,
        seq: u64,
        data: Vec<Datum>,
        timeout: Duration,
    ) -> Result<Vec<u8>, String> {
        let end = Instant::now() + timeout;
        let left = || end.saturating_duration_since(Instant::now());
        let pass = encode_pass(model, seq, data)?;
        let headers = [("content-type", "application/x-protobuf")];
        let pass = loop {
            let path = "/api/v1/forward_backward";
            let sent = self.http.call("POST", path, &headers, &pass, left()).await?;
            match sent.retry_after.filter(|wait| *wait < left()) {
                _ if sent.is_success() => break sent.json(),
                Some(wait) => tokio::time::sleep(wait).await,
                None => return Err(format!("{path}: status {}", sent.status)),
            }
        };
        let body = json!({
            "model_id": model, "seq_id": seq + 1, "type": "optim_step",
            "adam_params": {"learning_rate": 1e-3},
        });
        let step = self.request("optim_step", &body, left()).await?;
        let result = self.result(&pass, left()).await?;
        self.result(&step, left()).await?;
        Ok(result)
    }

    /// Returns the response of a completion of `tokens` tokens.
    pub(crate) async fn complete(
        &self,
        tokens: u32,
        timeout: Duration,
    ) -> Result<HttpResponse, String> {
        let body = json!({
            "model": MODEL, "prompt": "The cat", "max_tokens": tokens, "temperature": 0,
        });
        self.http.succeed("/v1/completions", &body, timeout).await
    }
}

/// What a poll says about a request.
pub(crate) enum PollState {
    Pending,
    Finished,
    /// The request has failed with this category and message.
    Failed(String),
}

impl PollState {
    /// Reads the response of a poll.
    pub(crate) fn of(response: &HttpResponse) -> Self {
        // A result in protobuf is not JSON.
        let Ok(json) = serde_json::from_slice::<Value>(&response.body) else {
            return Self::Finished;
        };
        if json["type"] == "try_again" {
            return Self::Pending;
        }
        match (&json["error"], &json["category"]) {
            (Value::String(error), Value::String(category)) => {
                Self::Failed(format!("{category}: {error}"))
            }
            _ => Self::Finished,
        }
    }
}

/// Encodes a training pass with cross entropy.
pub(crate) fn encode_pass(model: &str, seq: u64, data: Vec<Datum>) -> Result<Vec<u8>, String> {
    let pass = ForwardBackward::new(model, data, LossFn::CrossEntropy).seq_id(Seq::new(seq));
    pass.to_proto().map(|bytes| bytes.to_vec()).map_err(|error| error.to_string())
}

/// Returns a datum of `length` tokens. Data with different numbers share no prefix: the engine would
/// compute it only once.
pub(crate) fn datum(length: u32, number: u32) -> Result<Datum, String> {
    let hash = |n: u32| n.wrapping_add(number << 16).wrapping_mul(2_654_435_761) >> 16;
    let tokens: Vec<u32> = (0..length).map(|n| hash(n) % 90 + 5).collect();
    Datum::supervised(tokens, 1.0).map_err(|error| error.to_string())
}

pub(crate) fn text(json: &Value, field: &str) -> Result<String, String> {
    json[field].as_str().map(str::to_owned).ok_or_else(|| format!("no {field} in {json}"))
}
