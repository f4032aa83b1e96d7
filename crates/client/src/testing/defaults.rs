//! Default responses of a [`FakeServer`](super::FakeServer).

use std::collections::HashMap;

use std::time::Duration;

use bytes::Bytes;
use http::{Response, StatusCode};
use parking_lot::{Mutex, MutexGuard};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tinkex_wire::{
    CompletedFuture, CreateModel, CreateSamplingSession, ForwardBackward, ForwardBackwardOutput,
    FuturesRetrieved, LossRecord, ModelId, PollResponse, RequestId, RetrieveFuture,
    RetrieveFutures, Route, SampleRequest, SampleResponse, SampleStreamRequest, SamplerId,
    SessionId, TensorData,
};
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};

use super::call::RecordedCall;
use super::reply::{Action, Reply, ScriptedResponse, ready_proto, sequence_of};
use super::stream::{EVENT_STREAM, token_events};

/// Maximum number of tokens of a default sample.
const MAX_TOKENS: u32 = 4;
/// Longest time that a batch poll waits for a sample.
const MAX_HOLD: Duration = Duration::from_secs(30);

/// Objects that the server has created, and the outcomes of accepted requests.
#[derive(Default)]
pub(super) struct Defaults {
    state: Mutex<DefaultsState>,
    /// Notified when a sample is accepted.
    accepted: Notify,
}

#[derive(Default)]
struct DefaultsState {
    /// Number of sessions created.
    sessions: u32,
    /// Number of clients that joined each sampling session.
    joined: HashMap<SamplerId, u64>,
    /// Number of custom losses created.
    losses: u32,
    /// Number of requests accepted.
    requests: u64,
    /// Name of the base model and LoRA rank of each model.
    models: HashMap<ModelId, (String, Option<u32>)>,
    outcomes: HashMap<RequestId, PollResponse>,
    /// Samples that batch polls have not reported yet.
    unreported: HashMap<SamplerId, Vec<RequestId>>,
}

impl Defaults {
    /// Returns the default response to a request. Submitted work is accepted under `id`, if any.
    pub(super) async fn response(
        &self,
        call: &RecordedCall,
        id: Option<RequestId>,
    ) -> Response<Bytes> {
        let json = call.json();
        let Some(route) = call.route else { return no_default(call) };
        let body = match route {
            Route::DynamicConfig => json!({"sample_cancel_enabled": true}),
            Route::ClientConfig
            | Route::SessionHeartbeat
            | Route::FinishSession
            | Route::CancelFuture
            | Route::CloseSampler => json!({}),
            Route::Telemetry => json!({"status": "accepted"}),
            Route::Health => json!({"status": "ok"}),
            Route::AuthToken => json!({"jwt": "eyJ-fake"}),
            Route::CreateSession => {
                let mut state = self.lock();
                state.sessions += 1;
                json!({"session_id": format!("session-{}", state.sessions)})
            }
            Route::CreateSamplingSession => match decode::<CreateSamplingSession>(call) {
                Some(request) => {
                    let number = request.sampling_session_seq_id;
                    let id = SamplerId::in_session(&request.session_id, number);
                    json!({"sampling_session_id": id})
                }
                None => return undecodable(call),
            },
            Route::JoinSamplingSession => {
                let id = json["sampling_session_id"].as_str().unwrap_or_default();
                let mut state = self.lock();
                let joined = state.joined.entry(id.into()).or_default();
                *joined += 1;
                json!({"client_counter": *joined})
            }
            Route::ServerCapabilities => json!({"supported_models": [{
                "model_name": "fake-model", "max_context_length": 32768,
                "trainable": true, "sampleable": true,
            }]}),
            Route::GetInfo => self.model_info(&json),
            Route::WeightsInfo => json!({
                "base_model": "fake-model", "is_lora": true, "lora_rank": 32,
            }),
            Route::ListTrainingRuns => json!({
                "training_runs": [], "cursor": {"offset": 0, "limit": 20, "total_count": 0},
            }),
            Route::ListCheckpoints | Route::ListUserCheckpoints => json!({
                "checkpoints": [], "cursor": {"offset": 0, "limit": 20, "total_count": 0},
            }),
            Route::ListSessions => json!({"sessions": []}),
            Route::SearchSessions => json!({"sessions": [], "next_cursor": null}),
            Route::Completions => match decode::<SampleStreamRequest>(call) {
                Some(request) => return streamed_sample(&request),
                None => return undecodable(call),
            },
            Route::RetrieveFuture => return self.poll(call),
            Route::RetrieveFutures => return self.poll_many(call).await,
            _ => match self.outcome(route, call, &json) {
                Some(outcome) => return self.accept(call, outcome, id),
                // The outcome of these depends on their bodies.
                None if matches!(
                    route,
                    Route::Sample | Route::ForwardBackward | Route::CreateModel
                ) =>
                {
                    return undecodable(call);
                }
                None => return no_default(call),
            },
        };
        ScriptedResponse::json(StatusCode::OK, &body).to_http()
    }

    /// Accepts a request under `id`, by default a new one. Its future resolves to `outcome`.
    pub(super) fn accept(
        &self,
        call: &RecordedCall,
        outcome: PollResponse,
        id: Option<RequestId>,
    ) -> Response<Bytes> {
        let mut state = self.lock();
        state.requests += 1;
        let id = id.unwrap_or_else(|| format!("request-{}", state.requests).into());
        state.outcomes.insert(id.clone(), outcome);
        let mut body = json!({"request_id": id});
        if let Some(sample) = decode_route::<SampleRequest>(call, Route::Sample) {
            let sequence_ids: Vec<_> =
                (0..sample.num_samples).map(|n| format!("{id}:{n}")).collect();
            body["sample_sequence_ids"] = json!(sequence_ids);
            if let Some(sampler) = sample.sampling_session_id {
                state.unreported.entry(sampler).or_default().push(id);
                self.accepted.notify_waiters();
            }
        }
        drop(state);
        ScriptedResponse::json(StatusCode::OK, &body).to_http()
    }

    /// Returns the outcome of a request that submits work, or `None` for any other request.
    fn outcome(&self, route: Route, call: &RecordedCall, json: &Value) -> Option<PollResponse> {
        let model = json["model_id"].as_str().unwrap_or_default();
        let saved = |kind: &str, name: &str| json!(format!("tinker://{model}/{kind}/{name}"));
        let name = json["path"].as_str().unwrap_or_default();
        let result = match route {
            Route::Sample => return decode(call).map(|request| sample_result(&request)),
            Route::ForwardBackward => {
                return Some(pass_result(&call.forward_backward()?));
            }
            Route::OptimStep => json!({"metrics": {}}),
            Route::DiscardGradient => json!({"type": "discard_gradient"}),
            Route::CreateModel => {
                let request: CreateModel = decode(call)?;
                let id = ModelId::in_session(&request.session_id, request.model_seq_id);
                let rank = request.lora_config.map(|lora| lora.rank);
                self.lock().models.insert(id.clone(), (request.base_model, rank));
                json!({"type": "create_model", "model_id": id})
            }
            Route::CreateCustomLoss => {
                let mut state = self.lock();
                state.losses += 1;
                json!({"type": "create_custom_loss", "loss_id": format!("loss-{}", state.losses)})
            }
            Route::SaveWeights => json!({"type": "save_weights", "path": saved("weights", name)}),
            Route::SaveWeightsExternal => json!({
                "type": "save_weights_external",
                "path": saved("external_weights", name), "size_bytes": 1024,
            }),
            Route::SaveWeightsForSampler => match json["sampling_session_seq_id"].as_u64() {
                // Weights without a name are saved as a sampling session.
                Some(number) if name.is_empty() => {
                    let (session, _) = model.split_once(':').unwrap_or((model, ""));
                    let number = u32::try_from(number).ok()?;
                    let id = SamplerId::in_session(&SessionId::from(session), number);
                    json!({"type": "save_weights_for_sampler", "sampling_session_id": id})
                }
                _ => json!({
                    "type": "save_weights_for_sampler", "path": saved("sampler_weights", name),
                }),
            },
            Route::LoadWeights => json!({"type": "load_weights"}),
            _ => return None,
        };
        match Reply::result(result).action {
            Action::Outcome(outcome) => Some(outcome),
            _ => None,
        }
    }

    fn model_info(&self, json: &Value) -> Value {
        let id = ModelId::from(json["model_id"].as_str().unwrap_or_default());
        let (name, rank) = match self.lock().models.get(&id) {
            Some((name, rank)) => (name.clone(), *rank),
            None => ("fake-model".to_owned(), None),
        };
        json!({
            "type": "get_info", "model_id": id, "model_name": name,
            "is_lora": rank.is_some(), "lora_rank": rank, "model_data": {"model_name": name},
        })
    }

    fn poll(&self, call: &RecordedCall) -> Response<Bytes> {
        let Some(RetrieveFuture { request_id, .. }) = decode(call) else {
            return undecodable(call);
        };
        match self.lock().outcomes.get(&request_id) {
            Some(outcome) => {
                let (content_type, body) = outcome.encode(&request_id);
                ScriptedResponse::with_content_type(StatusCode::OK, content_type, body).to_http()
            }
            None => error(StatusCode::NOT_FOUND, &format!("no request {request_id}")),
        }
    }

    /// Reports the samples that were accepted since the last poll. Holds the poll while there are
    /// none.
    async fn poll_many(&self, call: &RecordedCall) -> Response<Bytes> {
        let Some(RetrieveFutures { target, prev_cursor, .. }) = decode(call) else {
            return undecodable(call);
        };
        let deadline = Instant::now() + MAX_HOLD;
        let reported = loop {
            // Registered before the check, so that no sample is missed between the two.
            let mut accepted = std::pin::pin!(self.accepted.notified());
            accepted.as_mut().enable();
            let unreported = self.lock().unreported.remove(&target.sampling_session_id);
            if let Some(reported) = unreported {
                break reported;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if timeout(left, accepted).await.is_err() {
                break Vec::new();
            }
        };
        let cursor = prev_cursor + reported.len() as u64;
        let state = self.lock();
        let finished = |request_id: RequestId| {
            let outcome = state.outcomes.get(&request_id);
            let size = outcome.map(|outcome| outcome.encode(&request_id).1.len() as u64);
            CompletedFuture::Finished { request_id, response_payload_uncompressed_size: size }
        };
        let completions = reported.into_iter().map(finished).collect();
        drop(state);
        let body = FuturesRetrieved::new(completions, cursor);
        ScriptedResponse::json(StatusCode::OK, &body).to_http()
    }

    fn lock(&self) -> MutexGuard<'_, DefaultsState> {
        self.state.lock()
    }
}

fn decode<T: DeserializeOwned>(call: &RecordedCall) -> Option<T> {
    serde_json::from_slice(&call.body).ok()
}

fn decode_route<T: DeserializeOwned>(call: &RecordedCall, route: Route) -> Option<T> {
    (call.route == Some(route)).then(|| decode(call))?
}

/// Returns the default result of a sample.
fn sample_result(request: &SampleRequest) -> PollResponse {
    let count = request.sampling_params.max_tokens.unwrap_or(MAX_TOKENS).min(MAX_TOKENS);
    let sequence = sequence_of((1..=count).collect());
    let mut response =
        SampleResponse::default().sequences(vec![sequence; request.num_samples as usize]);
    if request.prompt_logprobs == Some(true) {
        let length = request.prompt.token_count().unwrap_or_default();
        let computed = match request.prompt_logprobs_last_n {
            Some(last) => (last as usize).min(length.saturating_sub(1)),
            None => length.saturating_sub(1),
        };
        let missing = std::iter::repeat_n(f32::NAN, length - computed);
        let logprobs: Vec<f32> = missing.chain(std::iter::repeat_n(-0.5, computed)).collect();
        response.prompt_logprobs = Some(logprobs.into());
    }
    ready_proto(response.to_proto())
}

/// Returns the default response to a request for a streamed sample.
fn streamed_sample(request: &SampleStreamRequest) -> Response<Bytes> {
    let count = request.max_tokens.unwrap_or(MAX_TOKENS).min(MAX_TOKENS);
    let events = token_events(&(1..=count).collect::<Vec<_>>()).concat();
    ScriptedResponse::with_content_type(StatusCode::OK, EVENT_STREAM, events).to_http()
}

/// Returns the default result of a pass: a log-probability of −0.5 for every target token.
fn pass_result(pass: &ForwardBackward) -> PollResponse {
    let lengths: Vec<usize> = pass
        .data
        .iter()
        .map(|datum| {
            let targets = datum.loss_input("target_tokens").and_then(TensorData::as_i64);
            targets.map_or(1, <[i64]>::len)
        })
        .collect();
    let values = vec![-0.5_f32; lengths.iter().sum()];
    #[expect(clippy::cast_precision_loss, reason = "test data is small")]
    let loss = 0.5 * values.len() as f64;
    let record = LossRecord::new(lengths.len()).field("logprobs", values, lengths);
    let record = record.unwrap_or_else(|_| LossRecord::new(pass.data.len()));
    let output = ForwardBackwardOutput::default()
        .loss_fn_outputs(record)
        .metrics([("loss:sum".to_owned(), loss)].into());
    ready_proto(output.to_proto())
}

fn no_default(call: &RecordedCall) -> Response<Bytes> {
    let request = format!("{} {}", call.method, call.path);
    let detail = match call.route {
        Some(route) => {
            let name = route.name();
            format!("FakeServer has no default response to {request}: script Route::{name}")
        }
        None => format!("{request} is not a route of the API"),
    };
    error(StatusCode::NOT_FOUND, &detail)
}

fn undecodable(call: &RecordedCall) -> Response<Bytes> {
    let detail = format!("FakeServer cannot decode the body of {} {}", call.method, call.path);
    error(StatusCode::UNPROCESSABLE_ENTITY, &detail)
}

fn error(status: StatusCode, detail: &str) -> Response<Bytes> {
    ScriptedResponse::json(status, &json!({"detail": detail})).to_http()
}
