//! [`Oracle`]: checks the invariants of the server.
//!
//! While a scenario runs, the oracle inspects the server after every step of the worker and of the
//! disk writer, and every response. It records acknowledged requests and visible outcomes, and
//! reports a violation as soon as the server contradicts them. At the end it executes the accepted
//! requests one after the other and compares their results.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use http::Response;
use serde_json::Value;
use tinkex_server::simulation::{OutcomeView, Replay, RequestHandler};

use crate::trace::{EventTrace, event};

/// Checks the server. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Oracle(Arc<OracleInner>);

struct OracleInner {
    trace: EventTrace,
    state: Mutex<OracleState>,
}

#[derive(Default)]
struct OracleState {
    /// Durable requests that the server has had, by id.
    requests: BTreeMap<String, SeenRequest>,
    /// Model and sequence number of the request that wrote a folder of weights.
    folders: HashMap<String, (String, u64)>,
    /// Folder that a request to load weights must read, by id of the request.
    loads: HashMap<String, String>,
    /// Results that clients have received, by id of the request.
    delivered: HashMap<String, Bytes>,
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
    body: Bytes,
    outcome: Option<SeenOutcome>,
}

#[derive(Clone, PartialEq)]
enum SeenOutcome {
    Succeeded(Bytes),
    Failed(String),
}

impl Oracle {
    pub(crate) fn new(trace: EventTrace) -> Self {
        Self(Arc::new(OracleInner { trace, state: Mutex::default() }))
    }

    fn lock(&self) -> MutexGuard<'_, OracleState> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the requests, outcomes and checkpoints of the running server, and checks that none
    /// has changed.
    pub(crate) fn observe(&self, handler: &RequestHandler) {
        let mut state = self.lock();
        let state = &mut *state;
        for view in handler.requests().into_iter().filter(|view| view.durable) {
            let known = state.requests.contains_key(&view.id);
            if !known {
                let body = match handler.payload(view.body) {
                    Ok(body) => body,
                    Err(error) if view.outcome.is_none() => {
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
                    body,
                    outcome: None,
                };
                state.requests.insert(view.id.clone(), seen);
            }
            let Some(outcome) = &view.outcome else { continue };
            let Some(seen) = state.requests.get_mut(&view.id) else { continue };
            let outcome = match outcome {
                OutcomeView::Failed(message) => SeenOutcome::Failed(message.clone()),
                OutcomeView::Succeeded(number) => match handler.payload(*number) {
                    Ok(payload) => SeenOutcome::Succeeded(payload),
                    Err(error) => {
                        self.0.trace.fail(format!("result of request {}: {error}", view.id));
                        continue;
                    }
                },
            };
            match &seen.outcome {
                None => {
                    if let SeenOutcome::Failed(message) = &outcome {
                        event!(self.0.trace, "{} {} failed: {message}", view.kind, view.seq);
                    }
                    seen.outcome = Some(outcome);
                }
                Some(before) if *before != outcome => {
                    let (kind, seq) = (&view.kind, view.seq);
                    self.0.trace.fail(format!("the outcome of {kind} {seq} changed"));
                }
                Some(_) => {}
            }
        }
        for checkpoint in handler.checkpoints() {
            if let Some(source) = checkpoint.source {
                state.folders.entry(checkpoint.folder).or_insert(source);
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
            for (id, seen) in &state.requests {
                let (kind, seq) = (&seen.kind, seen.seq);
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

    /// Counts a failed start. The server must start within 50 further attempts.
    pub(crate) fn start_failed(&self, error: &str) {
        let mut state = self.lock();
        state.failed_starts += 1;
        if state.failed_starts > 50 {
            self.0.trace.fail(format!("the server does not start: {error}"));
        }
    }

    pub(crate) fn check_references(&self, handler: &RequestHandler) {
        if let Err(failure) = handler.check_references() {
            self.0.trace.fail(failure);
        }
    }

    /// Records which folder a request to load weights must read, when it is admitted.
    pub(crate) fn load_admitted(&self, handler: &RequestHandler, body: &Bytes) {
        let mut state = self.lock();
        let Some(folder) = handler.folder_to_load(body) else { return };
        for view in handler.requests() {
            if view.kind == "LoadWeights" && !view.durable && !state.loads.contains_key(&view.id) {
                state.loads.insert(view.id, folder.clone());
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
        let before = state.delivered.entry(id.to_owned()).or_insert_with(|| result.clone());
        if *before != result {
            self.0.trace.fail("a client received two different results of a request".to_owned());
        }
    }

    /// Counts a call that copies a checkpoint, however often its request is sent.
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

    /// Executes the accepted requests of all models one after the other, and compares results and
    /// saved weights.
    pub(crate) fn check_replay(
        &self,
        handler: &RequestHandler,
        (base_name, base_folder): (&str, &Path),
        data_dir: &Path,
        scratch: &Path,
    ) {
        let state = self.lock();
        let mut models: BTreeMap<&str, Vec<(u64, &str, &SeenRequest)>> = BTreeMap::new();
        for (id, seen) in &state.requests {
            match &seen.outcome {
                None => {
                    let (kind, seq) = (&seen.kind, seen.seq);
                    self.0.trace.fail(format!("request {kind} {seq} has no outcome"));
                }
                Some(SeenOutcome::Failed(message)) => {
                    if message.contains("internal error") || message.contains("cannot restore") {
                        self.0.trace.fail(format!("{} {} failed: {message}", seen.kind, seen.seq));
                    }
                }
                Some(SeenOutcome::Succeeded(_)) if seen.of_model => {
                    models.entry(&seen.scope).or_default().push((seen.seq, id, seen));
                }
                Some(SeenOutcome::Succeeded(_)) => {}
            }
        }
        let mut replay = match Replay::new(handler.clone(), base_name, base_folder) {
            Ok(replay) => replay,
            Err(error) => return self.0.trace.fail(format!("cannot load the model: {error}")),
        };
        let mut pending: Vec<_> = models
            .into_iter()
            .map(|(model, mut requests)| {
                requests.sort_by_key(|(seq, ..)| *seq);
                (model, requests.into_iter())
            })
            .collect();
        let folder_of = |model: &str, seq: u64| {
            scratch.join(format!("{}-{seq}", model.replace([':', '/'], "_")))
        };
        // A model may load weights of another one, which must be saved first.
        loop {
            let mut progress = false;
            for (model, requests) in &mut pending {
                while let Some((seq, id, seen)) = requests.as_slice().first() {
                    let source = match seen.kind.as_str() {
                        "LoadWeights" => {
                            let source = state.loads.get(*id).and_then(|f| state.folders.get(f));
                            let Some((source, saved_at)) = source else {
                                let failure = format!("load {seq} of {model} has no known source");
                                return self.0.trace.fail(failure);
                            };
                            let folder = folder_of(source, *saved_at);
                            if !folder.is_dir() {
                                break;
                            }
                            Some(folder)
                        }
                        _ => None,
                    };
                    if let Err(failure) =
                        self.replay_request(&mut replay, model, *seq, seen, source.as_deref())
                    {
                        return self.0.trace.fail(failure);
                    }
                    if seen.kind.starts_with("SaveWeights") {
                        let saved = replay.save(model, &folder_of(model, *seq));
                        if let Err(error) = saved {
                            return self.0.trace.fail(format!("cannot save: {error}"));
                        }
                    }
                    progress = true;
                    requests.next();
                }
            }
            if !progress {
                break;
            }
        }
        if let Some((model, _)) = pending.iter().find(|(_, rest)| !rest.as_slice().is_empty()) {
            return self.0.trace.fail(format!("{model} loads weights that were never saved"));
        }
        for (folder, (model, seq)) in &state.folders {
            let expected = folder_of(model, *seq);
            let found = data_dir.join("weights").join(folder);
            if found.is_dir() && expected.is_dir() {
                self.compare_folders(&found, &expected, model, *seq);
            }
        }
    }

    fn replay_request(
        &self,
        replay: &mut Replay,
        model: &str,
        seq: u64,
        seen: &SeenRequest,
        source: Option<&Path>,
    ) -> Result<(), String> {
        if let Some(folder) = source {
            return replay.load(model, &seen.body, folder);
        }
        let expected = replay
            .execute(model, &seen.kind, &seen.body)
            .map_err(|error| format!("replay of {} {seq} of {model}: {error}", seen.kind))?;
        match (&seen.outcome, expected) {
            (Some(SeenOutcome::Succeeded(found)), Some(expected)) if *found != expected => {
                Err(format!("result of {} {seq} of {model} differs from its replay", seen.kind))
            }
            _ => Ok(()),
        }
    }

    fn compare_folders(&self, found: &Path, expected: &Path, model: &str, seq: u64) {
        for entry in std::fs::read_dir(found).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let (found, expected) =
                (std::fs::read(entry.path()), std::fs::read(expected.join(&name)));
            if let (Ok(found), Ok(expected)) = (found, expected)
                && found != expected
            {
                let name = name.to_string_lossy();
                self.0.trace.fail(format!("weights {name} saved by {model} {seq} differ"));
            }
        }
    }
}
