//! [`Oracle`]: checks the invariants of the server.
//!
//! While a scenario runs, the oracle inspects the server after every step of the worker and of the
//! disk writer, and every response. The oracle records acknowledged requests and visible outcomes,
//! and reports a violation as soon as the server contradicts a recorded request or outcome. At the
//! end, the oracle compares the recorded outcomes with a sequential execution of the requests
//! (`replay`).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use bytes::Bytes;
use http::Response;
use parking_lot::{Mutex, MutexGuard};
use serde_json::Value;
use tinkex_server::simulation::{LossView, OutcomeView, RequestHandler, RunView};
use tinkex_store::weights::WeightsLocation;

use crate::replay::{ReplayedRequest, ReplayedSample, SavePoint};
use crate::trace::{EventTrace, event};

/// Result of a request whose result is not compared.
static NO_RESULT: Bytes = Bytes::new();

/// Checks the server. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Oracle(Arc<OracleInner>);

struct OracleInner {
    trace: EventTrace,
    state: Mutex<OracleState>,
}

#[derive(Default)]
struct OracleState {
    /// All requests that the server has made durable, by id.
    requests: BTreeMap<String, SeenRequest>,
    /// Model state that each folder of weights contains.
    folders: BTreeMap<WeightsLocation, SavePoint>,
    /// Folder that a request to load weights must read, by id of the request.
    loads: HashMap<String, WeightsLocation>,
    /// Results that clients have received, by id of the request.
    delivered: HashMap<String, Bytes>,
    /// Records of all training runs, by id.
    runs: BTreeMap<String, RunView>,
    /// All custom losses, by id.
    losses: BTreeMap<String, LossView>,
    /// Tokens of completions from the base model, by request.
    completions: BTreeMap<String, Value>,
    /// Whether a byte of the data folder was damaged.
    damaged: bool,
    failed_starts: u32,
    /// Number of calls that copy a checkpoint.
    copies: usize,
}

/// A request that the server has accepted.
struct SeenRequest {
    kind: String,
    scope: String,
    of_model: bool,
    seq: u64,
    seed: u64,
    body: Bytes,
    /// Weights of a sample: `None` if they are not known, `Some(None)` for the base model.
    weights: Option<Option<WeightsLocation>>,
    outcome: Option<SeenOutcome>,
    /// Outcome as the server described it when it was last read.
    last_view: Option<OutcomeView>,
}

#[derive(Clone, PartialEq)]
enum SeenOutcome {
    Succeeded(Bytes),
    Failed(String),
}

impl OracleState {
    /// Returns whether damaged bytes explain an error.
    fn explains(&self, error: &dyn std::fmt::Display) -> bool {
        self.damaged && is_damage(error)
    }
}

/// Returns whether an error says that stored bytes are damaged, or that a custom loss is missing, whose
/// bytes may be damaged.
fn is_damage(error: &dyn std::fmt::Display) -> bool {
    let message = error.to_string();
    message.contains("damaged") || message.contains("has no custom loss")
}

impl Oracle {
    pub(crate) fn new(trace: EventTrace) -> Self {
        Self(Arc::new(OracleInner { trace, state: Mutex::default() }))
    }

    fn lock(&self) -> MutexGuard<'_, OracleState> {
        self.0.state.lock()
    }

    /// Records the requests, outcomes and checkpoints of the running server, and checks that no
    /// recorded outcome has changed. Does not read the payloads of known outcomes again.
    pub(crate) fn observe(&self, handler: &RequestHandler) {
        let mut state = self.lock();
        let state = &mut *state;
        for view in handler.requests().into_iter().filter(|view| view.durable) {
            let known = state.requests.contains_key(&view.id);
            if !known {
                let body = match handler.payload(view.body) {
                    Ok(body) => body,
                    Err(error) if view.outcome.is_none() && !state.explains(&error) => {
                        let failure = format!("body of request {}: {error}", view.id);
                        self.0.trace.fail(failure);
                        continue;
                    }
                    Err(_) => Bytes::new(),
                };
                event!(self.0.trace, "accepted {} {} {}", view.kind, view.scope, view.seq);
                let seen = SeenRequest {
                    kind: view.kind.clone(),
                    scope: view.scope.clone(),
                    of_model: view.of_model,
                    seq: view.seq,
                    seed: view.seed,
                    body,
                    weights: handler.sampler_weights(&view.scope),
                    outcome: None,
                    last_view: None,
                };
                state.requests.insert(view.id.clone(), seen);
            }
            let Some(outcome) = &view.outcome else { continue };
            let Some(seen) = state.requests.get_mut(&view.id) else { continue };
            if seen.last_view.as_ref() == Some(outcome) {
                continue;
            }
            seen.last_view = Some(outcome.clone());
            let outcome = match outcome {
                OutcomeView::Failed(message) => SeenOutcome::Failed(message.clone()),
                OutcomeView::Succeeded(number) => match handler.payload(*number) {
                    Ok(payload) => SeenOutcome::Succeeded(payload),
                    Err(error) if state.damaged && is_damage(&error) => continue,
                    Err(error) => {
                        self.0.trace.fail(format!("result of request {}: {error}", view.id));
                        continue;
                    }
                },
            };
            match &seen.outcome {
                None => {
                    // Weights without a name belong to the sampling session that they were saved for.
                    if let SeenOutcome::Succeeded(result) = &outcome
                        && seen.kind == "SaveWeightsForSampler"
                        && let Some(weights) = saved_for_sampler(handler, result)
                    {
                        let saved = (seen.scope.clone(), seen.seq);
                        state.folders.entry(weights).or_insert(saved);
                    }
                    if let SeenOutcome::Failed(message) = &outcome {
                        event!(self.0.trace, "{} {} failed: {message}", view.kind, view.seq);
                    }
                    seen.outcome = Some(outcome);
                }
                Some(before) if *before != outcome => {
                    let kind = &view.kind;
                    let seq = view.seq;
                    self.0.trace.fail(format!("the outcome of {kind} {seq} changed"));
                }
                Some(_) => {}
            }
        }
        for (id, run) in handler.runs() {
            state.runs.entry(id).or_insert(run);
        }
        for (id, loss) in handler.losses() {
            state.losses.entry(id).or_insert(loss);
        }
        for checkpoint in handler.checkpoints() {
            if let Some(source) = checkpoint.source {
                state.folders.entry(checkpoint.weights).or_insert(source);
            }
        }
    }

    /// Checks a server that has just been started.
    pub(crate) fn server_started(&self, handler: &RequestHandler) {
        let requests = handler.requests().into_iter();
        let present: HashMap<String, bool> =
            requests.map(|view| (view.id, view.outcome.is_some())).collect();
        {
            let mut state = self.lock();
            state.failed_starts = 0;
            for (id, seen) in &mut state.requests {
                // Read all outcomes again: the restart may have damaged their payloads.
                seen.last_view = None;
                let kind = &seen.kind;
                let seq = seen.seq;
                match present.get(id) {
                    None if seen.outcome.is_none() => {
                        self.0.trace.fail(format!("accepted request {kind} {seq} is lost"));
                    }
                    Some(false) if seen.outcome.is_some() => {
                        self.0.trace.fail(format!("the visible outcome of {kind} {seq} is lost"));
                    }
                    _ => {}
                }
            }
        }
        self.check_references(handler);
        self.observe(handler);
    }

    /// Records that a byte of the data folder is damaged. From now on, errors that say so are
    /// explained.
    pub(crate) fn damaged(&self) {
        self.lock().damaged = true;
    }

    /// Returns whether damaged bytes explain an error.
    pub(crate) fn explains(&self, error: &dyn std::fmt::Display) -> bool {
        self.lock().explains(error)
    }

    /// Returns whether a byte of the data folder was damaged.
    pub(crate) fn is_damaged(&self) -> bool {
        self.lock().damaged
    }

    /// Counts a failed start. The server must start within 50 further attempts. Attempts that fail
    /// because of an injected disk fault do not count.
    pub(crate) fn start_failed(&self, error: &str) {
        if error.contains("simulated") {
            return;
        }
        let mut state = self.lock();
        state.failed_starts += 1;
        if state.failed_starts > 50 {
            self.0.trace.fail(format!("the server does not start: {error}"));
        }
    }

    pub(crate) fn check_references(&self, handler: &RequestHandler) {
        if let Err(failure) = handler.check_references()
            && !self.lock().explains(&failure)
        {
            self.0.trace.fail(failure);
        }
    }

    /// Records which folder a request to load weights must read, when it is admitted.
    pub(crate) fn load_admitted(&self, handler: &RequestHandler, body: &Bytes) {
        let mut state = self.lock();
        let Some(weights) = handler.weights_to_load(body) else { return };
        for view in handler.requests() {
            if view.kind == "LoadWeights" && !view.durable && !state.loads.contains_key(&view.id) {
                state.loads.insert(view.id, weights.clone());
            }
        }
    }

    /// Checks a response of the server.
    pub(crate) fn responded(&self, path: &str, body: &Bytes, response: &Response<Bytes>) {
        if !response.status().is_success() {
            return;
        }
        if path.ends_with("/retrieve_future") {
            return self.result_delivered(body, response);
        }
        let Ok(Value::Object(answer)) = serde_json::from_slice(response.body()) else { return };
        let Some(id) = answer.get("request_id").and_then(Value::as_str) else { return };
        if !self.lock().requests.contains_key(id) {
            self.0.trace.fail(format!("{path} was acknowledged before it was durable"));
        }
    }

    fn result_delivered(&self, body: &Bytes, response: &Response<Bytes>) {
        let Ok(request) = serde_json::from_slice::<Value>(body) else { return };
        let Some(id) = request.get("request_id").and_then(Value::as_str) else { return };
        if let Ok(answer) = serde_json::from_slice::<Value>(response.body())
            && answer.get("type").and_then(Value::as_str) == Some("try_again")
        {
            return;
        }
        let mut state = self.lock();
        let result = response.body().clone();
        if state.explains(&String::from_utf8_lossy(&result)) {
            return;
        }
        let before = state.delivered.entry(id.to_owned()).or_insert_with(|| result.clone());
        if *before != result {
            self.0.trace.fail("a client received two different results of a request".to_owned());
        }
    }

    /// Checks that a completion of the base model has the same tokens as before.
    pub(crate) fn completed(&self, request: &str, tokens: &Value) {
        let mut state = self.lock();
        let before = state.completions.entry(request.to_owned()).or_insert_with(|| tokens.clone());
        if before != tokens {
            self.0.trace.fail(format!("a completion has other tokens than before: {request}"));
        }
    }

    /// Returns the records of all training runs, also of the runs that were deleted.
    pub(crate) fn runs(&self) -> BTreeMap<String, RunView> {
        self.lock().runs.clone()
    }

    /// Returns all custom losses, also of the sessions that have ended.
    pub(crate) fn losses(&self) -> BTreeMap<String, LossView> {
        self.lock().losses.clone()
    }

    /// Counts a call that copies a checkpoint. A call counts once, however often the client sends
    /// its request.
    pub(crate) fn copy_called(&self) {
        self.lock().copies += 1;
    }

    /// Checks that repeated requests have not created more copies than there were calls.
    pub(crate) fn check_copies(&self, handler: &RequestHandler) {
        let checkpoints = handler.checkpoints().into_iter();
        let found = checkpoints.filter(|c| c.path.starts_with("tinker://copy-")).count();
        let called = self.lock().copies;
        if found > called {
            self.0.trace.fail(format!("{called} calls have created {found} copies"));
        }
    }

    /// Returns whether an accepted request has no outcome yet.
    pub(crate) fn has_unfinished(&self) -> bool {
        self.lock().requests.values().any(|seen| seen.outcome.is_none())
    }

    /// Returns the models with unsaved training: optimizer steps have succeeded since the last
    /// save.
    pub(crate) fn unsaved_models(&self) -> BTreeSet<String> {
        let state = self.lock();
        let mut changed: BTreeMap<&str, u64> = BTreeMap::new();
        for seen in state.requests.values() {
            let succeeded = matches!(seen.outcome, Some(SeenOutcome::Succeeded(_)));
            if succeeded && ["OptimStep", "LoadWeights"].contains(&&*seen.kind) {
                let last = changed.entry(&seen.scope).or_default();
                *last = seen.seq.max(*last);
            }
        }
        for (model, saved_at) in state.folders.values() {
            if changed.get(&**model).is_some_and(|changed_at| changed_at <= saved_at) {
                changed.remove(&**model);
            }
        }
        changed.into_keys().map(str::to_owned).collect()
    }

    /// Checks that every request has an outcome, that a fault explains every failure, and that a
    /// sequential execution of the accepted requests gives the same results and the same saved
    /// weights.
    pub(crate) fn check_outcomes(
        &self,
        replay: impl FnOnce(
            Vec<ReplayedRequest<'_>>,
            Vec<ReplayedSample<'_>>,
            &BTreeMap<WeightsLocation, SavePoint>,
        ) -> Result<(), String>,
    ) {
        let state = self.lock();
        let mut requests = Vec::new();
        let mut samples = Vec::new();
        for (id, seen) in &state.requests {
            let kind = &seen.kind;
            let seq = seen.seq;
            match &seen.outcome {
                None => self.0.trace.fail(format!("request {kind} {seq} has no outcome")),
                Some(SeenOutcome::Failed(message)) => {
                    // The server discards the gradients of a step that it does not apply.
                    if *kind == "OptimStep" && message.contains("an earlier pass are missing") {
                        requests.push(ReplayedRequest {
                            model: &seen.scope,
                            seq,
                            kind: "DiscardGradient",
                            body: &seen.body,
                            result: &NO_RESULT,
                            loads: None,
                        });
                    }
                    // A model cannot be restored if reads fail for a minute.
                    let restore = message.contains("cannot restore");
                    let explained = message.contains("simulated") || state.explains(message);
                    if message.contains("internal error") || (restore && !explained) {
                        self.0.trace.fail(format!("{kind} {seq} failed: {message}"));
                    }
                }
                Some(SeenOutcome::Succeeded(result)) if seen.of_model => {
                    let folder = state.loads.get(id);
                    requests.push(ReplayedRequest {
                        model: &seen.scope,
                        seq,
                        kind,
                        body: &seen.body,
                        result,
                        loads: folder.and_then(|folder| state.folders.get(folder)),
                    });
                }
                Some(SeenOutcome::Succeeded(result)) if seen.kind == "Sample" => {
                    let weights = match &seen.weights {
                        Some(Some(folder)) => match state.folders.get(folder) {
                            Some(point) => Some(point),
                            // The weights of a copy or of an import have no request.
                            None => continue,
                        },
                        Some(None) => None,
                        None => continue,
                    };
                    samples.push(ReplayedSample {
                        sampler: &seen.scope,
                        seq,
                        seed: seen.seed,
                        body: &seen.body,
                        result,
                        weights,
                    });
                }
                Some(SeenOutcome::Succeeded(_)) => {}
            }
        }
        if let Err(failure) = replay(requests, samples, &state.folders) {
            self.0.trace.fail(failure);
        }
    }
}

/// Returns the weights of the sampling session that a request to save weights has created; `None` if
/// the weights have a name.
fn saved_for_sampler(handler: &RequestHandler, result: &Bytes) -> Option<WeightsLocation> {
    let result: Value = serde_json::from_slice(result).ok()?;
    handler.sampler_weights(result.get("sampling_session_id")?.as_str()?)?
}
