//! [`CannedUpstream`]: a server with the endpoints of SkyRL 0.4.0 that responds at once with prepared
//! bytes.

use std::convert::Infallible;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use bytes::Bytes;
use http::{Method, Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tinkex::{SampleResponse, SampledSequence, StopReason};
use tokio::sync::watch;

/// Name of the base model.
pub(crate) const MODEL: &str = "canned";
/// Number of tokens of a prompt and of a completion.
pub(crate) const PROMPT_TOKENS: u32 = 512;
pub(crate) const SAMPLED_TOKENS: u32 = 256;

const JSON: &str = "application/json";
const PROTO: &str = "application/x-protobuf";
/// Paths that SkyRL 0.4.0 lists, and 0.3.0 does not.
const DELETE_PATH: &str = "/api/v1/training_runs/{unique_id}/checkpoints/{checkpoint_path}";

/// Upstream on a loopback address, on a thread of its own.
pub(crate) struct CannedUpstream {
    pub(crate) address: String,
    shared: Arc<Shared>,
}

struct Shared {
    next_id: AtomicU32,
    /// Whether results of samples are held back.
    held: watch::Sender<bool>,
    /// Result of a sample.
    sample: Bytes,
}

/// Kinds of requests. The id of a request ends with the digit of its kind.
#[derive(Clone, Copy)]
enum Kind {
    Sample = 0,
    CreateModel = 1,
    OptimStep = 2,
    SaveWeights = 3,
    SaveWeightsForSampler = 4,
    LoadWeights = 5,
    UnloadModel = 6,
}

impl CannedUpstream {
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let sequence = SampledSequence::default()
            .stop_reason(StopReason::Length)
            .logprobs(Some(vec![-0.5; SAMPLED_TOKENS as usize].into()))
            .tokens((0..SAMPLED_TOKENS).collect::<Vec<_>>());
        let sample = SampleResponse::default().sequences(vec![sequence]).to_proto();
        let held = watch::Sender::new(false);
        let next_id = AtomicU32::new(1);
        let shared = Arc::new(Shared { next_id, held, sample });
        let serving = Arc::clone(&shared);
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let local = tokio::task::LocalSet::new();
            local.block_on(&runtime.unwrap(), serve(listener, serving));
        });
        Self { address, shared }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Holds the results of samples back, or releases them.
    pub(crate) fn hold(&self, held: bool) {
        self.shared.held.send_replace(held);
    }

    /// Returns the number of polls that wait for a result.
    pub(crate) fn waiting(&self) -> usize {
        self.shared.held.receiver_count()
    }
}

async fn serve(listener: TcpListener, shared: Arc<Shared>) {
    let listener = tokio::net::TcpListener::from_std(listener).unwrap();
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        stream.set_nodelay(true).unwrap();
        let shared = Arc::clone(&shared);
        tokio::task::spawn_local(async move {
            let service = service_fn(|request| respond(Arc::clone(&shared), request));
            let builder = hyper::server::conn::http1::Builder::new();
            // The peer closes connections when it ends.
            let _ = builder.serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

async fn respond(
    shared: Arc<Shared>,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
    let path = parts.uri.path().trim_start_matches("/api/v1/").to_owned();
    let (status, kind, bytes) = match (&parts.method, &*path) {
        (&Method::POST, "retrieve_future") => shared.result(&body).await,
        (&Method::DELETE, _) => (204, JSON, Bytes::new()),
        _ => match shared.immediate(&path) {
            Some(value) => (200, JSON, value.to_string().into()),
            None => (404, JSON, Bytes::from_static(b"{\"detail\":\"Not Found\"}")),
        },
    };
    let response = Response::builder().status(status).header("content-type", kind);
    Ok(response.body(Full::new(bytes)).unwrap())
}

impl Shared {
    /// Returns the id of a new request.
    fn submit(&self, kind: Kind) -> String {
        let number = self.next_id.fetch_add(1, Ordering::Relaxed);
        format!("{number}{}", kind as u8)
    }

    fn future(&self, kind: Kind) -> Value {
        let id = self.submit(kind);
        json!({"future_id": id, "status": "pending", "request_id": id})
    }

    /// Returns the response to a request that is not a poll.
    fn immediate(&self, path: &str) -> Option<Value> {
        Some(match path {
            "healthz" => json!({"status": "ok"}),
            "get_server_capabilities" => json!({"supported_models": [{"model_name": MODEL}]}),
            "client/config" => json!({"pjwt_auth_enabled": false}),
            "/openapi.json" => json!({
                "openapi": "3.1.0", "info": {"title": "Tinker API Mock", "version": "0.0.1"},
                "paths": {DELETE_PATH: {"delete": {}}, "/start_profiling": {"post": {}}},
            }),
            "create_session" => json!({"type": "create_session", "session_id": "session_0"}),
            "session_heartbeat" => json!({"type": "session_heartbeat"}),
            "telemetry" => json!({"status": "accepted"}),
            "create_sampling_session" => {
                json!({"type": "create_sampling_session", "sampling_session_id": "sampling_0"})
            }
            "create_model" => json!({
                "model_id": "model_0", "base_model": MODEL, "lora_config": {"rank": 8, "seed": 1},
                "status": "created", "request_id": self.submit(Kind::CreateModel),
            }),
            "unload_model" => {
                json!({"request_id": self.submit(Kind::UnloadModel), "model_id": "model_0"})
            }
            "optim_step" => self.future(Kind::OptimStep),
            "asample" => self.future(Kind::Sample),
            "save_weights" => self.future(Kind::SaveWeights),
            "save_weights_for_sampler" => self.future(Kind::SaveWeightsForSampler),
            "load_weights" => self.future(Kind::LoadWeights),
            _ => return None,
        })
    }

    /// Returns the result that a poll asks for, once it is not held back.
    async fn result(&self, poll: &[u8]) -> (u16, &'static str, Bytes) {
        let poll: Value = serde_json::from_slice(poll).unwrap_or_default();
        let id = poll["request_id"].as_str().unwrap_or_default();
        let kind = id.bytes().last().unwrap_or_default();
        let is = |expected: Kind| kind == b'0' + expected as u8;
        if is(Kind::Sample) {
            if *self.held.borrow() {
                let _ = self.held.subscribe().wait_for(|held| !held).await;
            }
            return (200, PROTO, self.sample.clone());
        }
        let result = if is(Kind::CreateModel) {
            json!({"model_id": "model_0", "base_model": MODEL, "lora_config": {"rank": 8}})
        } else if is(Kind::OptimStep) {
            json!({"metrics": {"skyrl.ai/grad_norm": 0.5, "skyrl.ai/learning_rate": 1e-4}})
        } else if is(Kind::SaveWeights) {
            json!({"path": "tinker://model_0/weights/canned", "type": "save_weights"})
        } else if is(Kind::SaveWeightsForSampler) {
            json!({"path": "tinker://model_0/canned", "type": "save_weights_for_sampler"})
        } else if is(Kind::LoadWeights) {
            json!({"type": "load_weights"})
        } else if is(Kind::UnloadModel) {
            json!({"model_id": "model_0", "status": "unloaded", "type": "unload_model"})
        } else {
            return (404, JSON, Bytes::from_static(b"{\"detail\":\"Future not found\"}"));
        };
        (200, JSON, result.to_string().into())
    }
}
