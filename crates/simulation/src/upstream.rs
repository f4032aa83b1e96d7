//! [`ScriptedUpstream`]: a simulated server of a legacy protocol, to which the server under test
//! forwards requests as a gateway.
//!
//! The upstream behaves like SkyRL 0.4.0: models occupy slots of the engine process and are lost
//! when the process ends; sessions, futures and checkpoints survive a restart; a slot keeps the
//! gradients of a model that is unloaded; a pass or step with the sequence number of an earlier
//! request is a repetition of that request. The seed determines which requests are lost, delayed,
//! repeated or answered with errors.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fastrand::Rng;
use futures_util::future::BoxFuture;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Method, Request, Response, StatusCode};
use parking_lot::{Mutex, MutexGuard};
use serde_json::{Value, json};
use tinkex::{HttpFailure, HttpService, Lane};
use tinkex_wire::{
    ForwardBackward, ForwardBackwardOutput, OptimStep, SampleRequest, SampleResponse,
    SampledSequence, StopReason,
};
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::scenario::BASE_MODEL;
use crate::task;
use crate::toy_model::ToyModel;
use crate::trace::{EventTrace, event};
use crate::upstream_faults::UpstreamFaults;

/// Number of slots for models.
const SLOTS: usize = 24;
/// Longest time for which a poll is held.
const MAX_HOLD: Duration = Duration::from_secs(20);
/// Time without a heartbeat after which the models of a session are unloaded.
const SESSION_TIMEOUT: Duration = Duration::from_secs(45);

/// Upstream of a simulated gateway. Cheap to clone.
#[derive(Clone)]
pub(crate) struct ScriptedUpstream(Arc<UpstreamInner>);

struct UpstreamInner {
    trace: EventTrace,
    state: Mutex<UpstreamState>,
}

struct UpstreamState {
    faults: UpstreamFaults,
    /// Time at which the faults end.
    calm_at: Instant,
    rng: Rng,
    /// Time of the next restart of the process; `down_until` is the end of the downtime.
    restart_at: Option<Instant>,
    down_until: Instant,
    /// Models in memory, by id.
    models: BTreeMap<String, SlotModel>,
    /// Gradients of the slots. They stay when a model is unloaded.
    gradients: [u64; SLOTS],
    /// Times of the last heartbeats.
    sessions: HashMap<String, Instant>,
    futures: HashMap<String, StoredFuture>,
    checkpoints: HashMap<String, ToyModel>,
    sampling_sessions: HashMap<String, String>,
    /// Bodies and ids of passes and steps, by model and sequence number.
    sequence: HashMap<(String, u64), (Bytes, String)>,
    created: u64,
}

struct SlotModel {
    slot: usize,
    session: String,
    state: ToyModel,
    /// Whether a request has been executed since the creation.
    is_used: bool,
}

struct StoredFuture {
    ready_at: Instant,
    result: FutureResult,
}

#[derive(Clone)]
enum FutureResult {
    Json(Value),
    Proto(Bytes),
    Failed(String),
}

/// A status and a body.
struct UpstreamAnswer(u16, FutureResult);

impl UpstreamAnswer {
    fn ok(value: Value) -> Self {
        Self(200, FutureResult::Json(value))
    }

    fn error(status: u16, detail: &str) -> Self {
        Self(status, FutureResult::Json(json!({ "detail": detail })))
    }

    fn into_response(self) -> Response<Bytes> {
        let Self(status, body) = self;
        let (content_type, body) = match body {
            FutureResult::Json(value) => ("application/json", Bytes::from(value.to_string())),
            FutureResult::Proto(bytes) => ("application/x-protobuf", bytes),
            FutureResult::Failed(text) => ("text/plain", Bytes::from(text)),
        };
        let mut response = Response::new(body);
        *response.status_mut() = StatusCode::from_u16(status).unwrap_or_default();
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        response
    }
}

/// Outcome of the delivery of one request.
#[derive(Clone, Copy, Debug, PartialEq)]
enum DeliveryOutcome {
    Delivered,
    RequestLost,
    ResponseLost,
    Duplicated,
    Refused(u16),
    ErrorAfter(u16),
    Garbage,
}

impl ScriptedUpstream {
    pub(crate) fn new(faults: UpstreamFaults, seed: u64, trace: EventTrace) -> Self {
        let mut rng = Rng::with_seed(seed);
        let now = Instant::now();
        let restart_at = faults.restart_interval.map(|mean| now + mean.mul_f64(2.0 * rng.f64()));
        // Another program has left gradients in the first slot. Only if creations succeed: a model
        // whose creation is in doubt occupies the slot until its session expires. That expiry may
        // free the slot after the gateway has cleared another slot and before it creates a model,
        // which would then take the slot with the gradients.
        let was_used = faults.never_loses_requests();
        let state = Mutex::new(UpstreamState {
            calm_at: now + faults.duration,
            faults,
            rng,
            restart_at,
            down_until: now,
            models: BTreeMap::new(),
            gradients: std::array::from_fn(|slot| u64::from(slot == 0 && was_used)),
            sessions: HashMap::new(),
            futures: HashMap::new(),
            checkpoints: HashMap::new(),
            sampling_sessions: HashMap::new(),
            sequence: HashMap::new(),
            created: 0,
        });
        Self(Arc::new(UpstreamInner { trace, state }))
    }

    fn lock(&self) -> MutexGuard<'_, UpstreamState> {
        self.0.state.lock()
    }

    /// Handles a request that has arrived; `None` if the process does not run.
    async fn serve(&self, method: &Method, path: &str, body: &Bytes) -> Option<UpstreamAnswer> {
        if path != "retrieve_future" {
            let mut state = self.lock();
            state.run(&self.0.trace).then(|| state.handle(method, path, body))
        } else {
            self.poll(body).await
        }
    }

    /// Waits for the result of a request.
    async fn poll(&self, body: &Bytes) -> Option<UpstreamAnswer> {
        let id = text(&serde_json::from_slice(body).unwrap_or_default(), "request_id");
        let deadline = Instant::now() + MAX_HOLD;
        loop {
            let ready_at = {
                let mut state = self.lock();
                if !state.run(&self.0.trace) {
                    return None;
                }
                match state.futures.get(&id) {
                    None => return Some(UpstreamAnswer::error(404, "Future not found")),
                    Some(future) if future.ready_at <= Instant::now() => {
                        return Some(match future.result.clone() {
                            FutureResult::Failed(error) => UpstreamAnswer::error(400, &error),
                            result => UpstreamAnswer(200, result),
                        });
                    }
                    Some(future) => future.ready_at,
                }
            };
            if ready_at > deadline {
                tokio::time::sleep_until(deadline).await;
                return Some(UpstreamAnswer::error(408, "Timeout waiting for result"));
            }
            tokio::time::sleep_until(ready_at).await;
        }
    }

    /// Delivers a request to the upstream. The request arrives even if the gateway dies before the
    /// response.
    async fn deliver(
        self,
        request: Request<Bytes>,
        timeout: Duration,
    ) -> Result<Response<Bytes>, HttpFailure> {
        let path = request.uri().path().trim_start_matches("/api/v1/").to_owned();
        let (outcome, before, after, again) = self.lock().choose_outcome(&path);
        if outcome != DeliveryOutcome::Delivered {
            event!(self.0.trace, "upstream: {path}: {outcome:?}");
            self.0.trace.count(outcome_name(outcome));
        }
        let method = request.method().clone();
        let body = request.into_body();
        match outcome {
            DeliveryOutcome::RequestLost => {
                tokio::time::sleep(before).await;
                return Err(HttpFailure::connect("request lost (simulated)"));
            }
            DeliveryOutcome::Refused(status) => {
                tokio::time::sleep(before).await;
                return Ok(UpstreamAnswer::error(status, "simulated").into_response());
            }
            DeliveryOutcome::Duplicated => {
                let upstream = self.clone();
                let method = method.clone();
                let path = path.clone();
                let body = body.clone();
                task::spawn(async move {
                    tokio::time::sleep(before + again).await;
                    upstream.serve(&method, &path, &body).await;
                });
            }
            _ => {}
        }
        let (sender, receiver) = oneshot::channel();
        task::spawn(async move {
            tokio::time::sleep(before).await;
            let answer = self.serve(&method, &path, &body).await;
            let status = answer.as_ref().map(|answer| answer.0);
            event!(self.0.trace, "upstream: {path} -> {status:?}");
            tokio::time::sleep(after).await;
            let _ = sender.send(answer);
        });
        let Ok(received) = tokio::time::timeout(timeout, receiver).await else {
            return Err(HttpFailure::timeout("no response in time (simulated)"));
        };
        match (outcome, received.ok().flatten()) {
            (_, None) => Err(HttpFailure::connect("connection closed (simulated)")),
            (DeliveryOutcome::ResponseLost, _) => {
                Err(HttpFailure::connect("response lost (simulated)"))
            }
            (DeliveryOutcome::ErrorAfter(status), _) => {
                Ok(UpstreamAnswer::error(status, "simulated").into_response())
            }
            (DeliveryOutcome::Garbage, Some(UpstreamAnswer(200, _))) => {
                Ok(UpstreamAnswer(200, FutureResult::Failed("{ simulated".to_owned()))
                    .into_response())
            }
            (_, Some(answer)) => Ok(answer.into_response()),
        }
    }
}

impl HttpService for ScriptedUpstream {
    fn send(
        &self,
        _lane: Lane,
        request: Request<Bytes>,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>> {
        Box::pin(self.clone().deliver(request, timeout))
    }
}

impl UpstreamState {
    fn choose_outcome(&mut self, path: &str) -> (DeliveryOutcome, Duration, Duration, Duration) {
        let calm = Instant::now() >= self.calm_at;
        let faults = self.faults.clone();
        let rng = &mut self.rng;
        let most = if calm { Duration::from_millis(3) } else { faults.max_delay };
        let before = most.mul_f64(rng.f64());
        let after = most.mul_f64(rng.f64());
        let again = most.mul_f64(rng.f64() * 3.0);
        let mut draw = rng.f64();
        let mut hit = |probability: f64| {
            draw -= probability;
            draw < 0.0
        };
        let outcome = if calm {
            DeliveryOutcome::Delivered
        } else if hit(faults.lost_request) {
            DeliveryOutcome::RequestLost
        } else if hit(faults.lost_response) {
            DeliveryOutcome::ResponseLost
        } else if hit(faults.duplicate) {
            DeliveryOutcome::Duplicated
        } else if hit(faults.refused) {
            DeliveryOutcome::Refused([408, 425, 429, 502, 503, 504][rng.usize(0..6)])
        } else if hit(faults.error_after) {
            DeliveryOutcome::ErrorAfter([500, 502, 504][rng.usize(0..3)])
        } else if path == "retrieve_future" && hit(faults.garbage) {
            DeliveryOutcome::Garbage
        } else {
            DeliveryOutcome::Delivered
        };
        (outcome, before, after, again)
    }

    /// Advances the process: restarts it if a restart is due, and unloads the models of expired
    /// sessions. Returns whether the process is running.
    fn run(&mut self, trace: &EventTrace) -> bool {
        let now = Instant::now();
        if let Some(at) = self.restart_at.filter(|at| *at <= now) {
            event!(trace, "upstream restarts");
            trace.count("upstream restarted");
            for future in self.futures.values_mut().filter(|future| future.ready_at > at) {
                future.result = FutureResult::Failed("Model not loaded".to_owned());
            }
            self.models.clear();
            self.gradients = [0; SLOTS];
            self.down_until = at + Duration::from_secs(self.rng.u64(0..60));
            let mean = self.faults.restart_interval.unwrap_or_default();
            let next = self.down_until + mean.mul_f64(2.0 * self.rng.f64());
            self.restart_at = Some(next).filter(|next| *next < self.calm_at);
        }
        let silent = |session: &str| {
            self.sessions.get(session).is_none_or(|heard| *heard + SESSION_TIMEOUT <= now)
        };
        let before = self.models.len();
        self.models.retain(|_, model| !silent(&model.session));
        if self.models.len() < before {
            event!(trace, "upstream unloads models of silent sessions");
            trace.count("upstream session expired");
        }
        now >= self.down_until
    }

    fn handle(&mut self, method: &Method, path: &str, body: &Bytes) -> UpstreamAnswer {
        let json: Value = serde_json::from_slice(body).unwrap_or_default();
        let model = text(&json, "model_id");
        let session = text(&json, "session_id");
        match path {
            "get_server_capabilities" => {
                UpstreamAnswer::ok(json!({"supported_models": [{"model_name": BASE_MODEL}]}))
            }
            "client/config" => UpstreamAnswer::ok(json!({"pjwt_auth_enabled": false})),
            "create_session" => {
                let id = self.new_id("session");
                self.sessions.insert(id.clone(), Instant::now());
                UpstreamAnswer::ok(json!({"type": "create_session", "session_id": id}))
            }
            "session_heartbeat" => match self.sessions.get_mut(&session) {
                Some(heard) => {
                    *heard = Instant::now();
                    UpstreamAnswer::ok(json!({"type": "session_heartbeat"}))
                }
                None => UpstreamAnswer::error(404, "Session not found"),
            },
            "create_model" => {
                let seed = json["lora_config"]["seed"].as_u64().unwrap_or(0);
                self.create_model(&session, seed)
            }
            "unload_model" => {
                self.models.remove(&model);
                self.submit(FutureResult::Json(json!({"type": "unload_model", "model_id": model})))
            }
            "forward_backward" => match ForwardBackward::from_proto(body) {
                Ok(pass) if pass.model_id.as_str().is_empty() => {
                    UpstreamAnswer::error(404, "Model not found")
                }
                Ok(pass) => self.pass(&pass, body),
                Err(_) => UpstreamAnswer::error(422, "cannot decode the pass"),
            },
            "optim_step" => match serde_json::from_slice::<OptimStep>(body) {
                Ok(step) => self.step(&step, body),
                Err(_) => UpstreamAnswer::error(422, "cannot decode the step"),
            },
            "save_weights" | "save_weights_for_sampler" => {
                self.save(&model, path, &text(&json, "path"))
            }
            "load_weights" => {
                let optimizer = json["optimizer"].as_bool().unwrap_or(false);
                self.load(&model, &text(&json, "path"), optimizer)
            }
            "create_sampling_session" => {
                let id = self.new_id("sampling");
                self.sampling_sessions.insert(id.clone(), text(&json, "model_path"));
                UpstreamAnswer::ok(
                    json!({"type": "create_sampling_session", "sampling_session_id": id}),
                )
            }
            "asample" => match serde_json::from_slice::<SampleRequest>(body) {
                Ok(request) => self.sample(&text(&json, "sampling_session_id"), &request),
                Err(_) => UpstreamAnswer::error(422, "cannot decode the sample"),
            },
            _ if *method == Method::DELETE => self.delete(path),
            _ => UpstreamAnswer::error(404, "Not Found"),
        }
    }

    fn new_id(&mut self, kind: &str) -> String {
        self.created += 1;
        format!("{kind}_{}", self.created)
    }

    /// Accepts a request whose result is `result` after some time.
    fn submit(&mut self, result: FutureResult) -> UpstreamAnswer {
        let id = self.new_id("request");
        let delay = self.faults.max_delay.mul_f64(2.0 * self.rng.f64());
        let ready_at = Instant::now() + delay;
        self.futures.insert(id.clone(), StoredFuture { ready_at, result });
        UpstreamAnswer::ok(json!({"request_id": id, "future_id": id, "status": "pending"}))
    }

    fn create_model(&mut self, session: &str, seed: u64) -> UpstreamAnswer {
        let is_used = |slot: &usize| self.models.values().any(|model| model.slot == *slot);
        let Some(slot) = (0..SLOTS).find(|slot| !is_used(slot)) else {
            let error = format!("Maximum number of LoRA adapters ({SLOTS}) reached");
            return self.submit(FutureResult::Failed(error));
        };
        let id = self.new_id("model");
        let session = session.to_owned();
        let state = ToyModel::new(seed);
        let model = SlotModel { slot, session, state, is_used: false };
        self.models.insert(id.clone(), model);
        self.submit(FutureResult::Json(json!({"type": "create_model", "model_id": id})))
    }

    /// Executes a request with a sequence number, unless it repeats an earlier request.
    fn execute_once(
        &mut self,
        model: &str,
        seq: Option<u64>,
        body: &Bytes,
        work: impl FnOnce(&mut ToyModel, &mut u64) -> FutureResult,
    ) -> UpstreamAnswer {
        let Some(seq) = seq else { return self.execute(model, work) };
        let key = (model.to_owned(), seq);
        match self.sequence.get(&key) {
            Some((known, id)) if known == body => {
                return UpstreamAnswer::ok(json!({"request_id": id}));
            }
            Some(_) => {
                let error = "Training request sequence number was reused";
                return UpstreamAnswer::error(409, error);
            }
            None => {}
        }
        let answer = self.execute(model, work);
        if let FutureResult::Json(accepted) = &answer.1 {
            self.sequence.insert(key, (body.clone(), text(accepted, "request_id")));
        }
        answer
    }

    /// Executes `work` on a model.
    fn execute(
        &mut self,
        model: &str,
        work: impl FnOnce(&mut ToyModel, &mut u64) -> FutureResult,
    ) -> UpstreamAnswer {
        let result = match self.models.get_mut(model) {
            Some(loaded) => {
                loaded.is_used = true;
                work(&mut loaded.state, &mut self.gradients[loaded.slot])
            }
            None => FutureResult::Failed(format!("Model {model} not loaded")),
        };
        self.submit(result)
    }

    fn pass(&mut self, pass: &ForwardBackward, body: &Bytes) -> UpstreamAnswer {
        let seq = pass.seq_id.map(tinkex_wire::Seq::get);
        self.execute_once(pass.model_id.as_str(), seq, body, |model, gradients| {
            let loss = model.pass(pass, gradients);
            let output =
                ForwardBackwardOutput::default().metrics([("loss:sum".to_owned(), loss)].into());
            FutureResult::Proto(output.to_proto())
        })
    }

    fn step(&mut self, step: &OptimStep, body: &Bytes) -> UpstreamAnswer {
        let seq = step.seq_id.map(tinkex_wire::Seq::get);
        self.execute_once(step.model_id.as_str(), seq, body, |model, gradients| {
            let metric = model.step(step, gradients);
            FutureResult::Json(json!({"metrics": {"grad": metric}}))
        })
    }

    fn save(&mut self, model: &str, kind: &str, name: &str) -> UpstreamAnswer {
        let is_sampler = kind == "save_weights_for_sampler";
        let segment = if is_sampler { "sampler_weights" } else { "weights" };
        let path = format!("tinker://{model}/{segment}/{name}");
        if self.checkpoints.contains_key(&path) {
            return UpstreamAnswer::error(409, "Checkpoint already exists");
        }
        let state = self.models.get(model).map(|model| model.state);
        self.checkpoints.extend(state.map(|state| (path.clone(), state)));
        self.execute(model, |_, _| FutureResult::Json(json!({"type": kind, "path": path})))
    }

    fn load(&mut self, model: &str, path: &str, optimizer: bool) -> UpstreamAnswer {
        let Some(saved) = self.checkpoints.get(path).copied() else {
            return UpstreamAnswer::error(404, "Checkpoint not found");
        };
        if self.models.get(model).is_some_and(|model| model.is_used) {
            return UpstreamAnswer::error(400, "LoadWeights is not permitted with this seq_id");
        }
        self.execute(model, |state, _| {
            *state = saved;
            if !optimizer {
                state.moments = 0;
            }
            FutureResult::Json(json!({"type": "load_weights"}))
        })
    }

    fn sample(&mut self, session: &str, request: &SampleRequest) -> UpstreamAnswer {
        let Some(path) = self.sampling_sessions.get(session).cloned() else {
            return UpstreamAnswer::error(404, "Sampling session not found");
        };
        let owner = path.trim_start_matches("tinker://").split('/').next().unwrap_or_default();
        let model = match self.models.get(owner) {
            _ if path.is_empty() => ToyModel::new(0),
            Some(model) => model.state,
            None => {
                let error = format!("Model {owner} not loaded");
                return self.submit(FutureResult::Failed(error));
            }
        };
        let count = u64::from(request.sampling_params.max_tokens.unwrap_or(1));
        let seed = request.sampling_params.seed.unwrap_or(0);
        let tokens: Vec<u32> = (0..count).map(|at| model.token(at, seed)).collect();
        let sequence = SampledSequence::default().tokens(tokens).stop_reason(StopReason::Length);
        let response = SampleResponse::default().sequences(vec![sequence]);
        self.submit(FutureResult::Proto(response.to_proto()))
    }

    /// Deletes the checkpoint `training_runs/MODEL/checkpoints/KIND/NAME`.
    fn delete(&mut self, path: &str) -> UpstreamAnswer {
        let parts: Vec<&str> = path.split('/').collect();
        let ["training_runs", model, "checkpoints", kind, name] = parts[..] else {
            return UpstreamAnswer::error(404, "Not Found");
        };
        match self.checkpoints.remove(&format!("tinker://{model}/{kind}/{name}")) {
            Some(_) => UpstreamAnswer::ok(json!({})),
            None => UpstreamAnswer::error(404, "Checkpoint not found"),
        }
    }
}

fn text(json: &Value, field: &str) -> String {
    json[field].as_str().unwrap_or_default().to_owned()
}

fn outcome_name(outcome: DeliveryOutcome) -> &'static str {
    match outcome {
        DeliveryOutcome::Delivered => "upstream: delivered",
        DeliveryOutcome::RequestLost => "upstream: request lost",
        DeliveryOutcome::ResponseLost => "upstream: response lost",
        DeliveryOutcome::Duplicated => "upstream: request duplicated",
        DeliveryOutcome::Refused(_) => "upstream: refused by a proxy",
        DeliveryOutcome::ErrorAfter(_) => "upstream: error after execution",
        DeliveryOutcome::Garbage => "upstream: unreadable result",
    }
}
