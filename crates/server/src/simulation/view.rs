//! Requests, outcomes and checkpoints of a simulated server, for the checks of a simulation.

use std::io;
use std::sync::Arc;

use bytes::Bytes;
use tinkex_autodiff::LossProgram;
use tinkex_store::store::{ModelRunRecord, RequestPhase, SequenceScope, Store};
use tinkex_store::weights::WeightsLocation;
use tinkex_wire::codec::json;
use tinkex_wire::{LoadWeights, LossId, SamplerId, TinkerPath};

use super::RequestHandler;

/// A request that the server has admitted.
#[derive(Clone, Debug)]
pub struct RequestView {
    /// Id of the request.
    pub id: String,
    /// Name of the request's kind, for example `ForwardBackward`.
    pub kind: String,
    /// Id of the model, sampling session or session in which the sequence number is unique.
    pub scope: String,
    /// Whether the request changes or reads a model in training.
    pub of_model: bool,
    /// Sequence number within the scope.
    pub seq: u64,
    /// Whether the request is durable.
    pub durable: bool,
    /// Seed of a sample; 0 for other requests.
    pub seed: u64,
    /// Number of the payload with the request body.
    pub body: u64,
    /// Outcome of the request, once it is visible to clients.
    pub outcome: Option<OutcomeView>,
}

/// Outcome of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutcomeView {
    /// The request succeeded; the result is the payload with this number.
    Succeeded(u64),
    /// The request failed with this message.
    Failed(String),
}

/// Record of a training run, for a [`Replay`](super::Replay) of its requests.
#[derive(Clone, Debug)]
pub struct RunView(pub(super) ModelRunRecord);

/// A custom loss, for a [`Replay`](super::Replay) of the passes that use it.
#[derive(Clone, Debug)]
pub struct LossView(pub(super) LossId, pub(super) Arc<LossProgram>);

/// A checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointView {
    /// The `tinker://` path of the checkpoint.
    pub path: String,
    /// Location of the weights.
    pub weights: WeightsLocation,
    /// Model and sequence number of the request that saved the checkpoint, if known.
    pub source: Option<(String, u64)>,
}

impl RequestHandler {
    /// Returns all requests, in order of admission.
    #[must_use]
    pub fn requests(&self) -> Vec<RequestView> {
        let store = self.0.store();
        let mut entries: Vec<_> = store.requests.values().collect();
        entries.sort_by_key(|entry| entry.row.number);
        let view = |entry: &tinkex_store::store::RequestEntry| {
            let row = &entry.row;
            let (scope, of_model) = match &row.scope {
                SequenceScope::Model(id) => (id.to_string(), true),
                SequenceScope::Sampler(id) => (id.to_string(), false),
                SequenceScope::CustomLosses(id) => (id.to_string(), false),
            };
            let outcome = match &entry.phase {
                RequestPhase::Ready { number, .. } => Some(OutcomeView::Succeeded(*number)),
                RequestPhase::Failed { failed, .. } => {
                    Some(OutcomeView::Failed(failed.error.clone()))
                }
                _ => None,
            };
            RequestView {
                id: row.id.to_string(),
                kind: format!("{:?}", row.kind),
                scope,
                of_model,
                seq: row.seq,
                seed: row.seed,
                durable: !matches!(entry.phase, RequestPhase::Writing { .. }),
                body: row.number,
                outcome,
            }
        };
        entries.into_iter().map(view).collect()
    }

    /// Reads a payload: the body or the result of a request.
    ///
    /// # Errors
    /// If there is no such payload, or if it is damaged.
    pub fn payload(&self, number: u64) -> io::Result<Bytes> {
        self.0.store().reader().payload(number)
    }

    /// Returns all checkpoints.
    #[must_use]
    pub fn checkpoints(&self) -> Vec<CheckpointView> {
        let store = self.0.store();
        let view = |entry: &tinkex_store::store::Tracked<tinkex_store::store::CheckpointRecord>| {
            CheckpointView {
                path: entry.row.path.to_string(),
                weights: entry.row.weights.clone(),
                source: entry.row.seq.map(|seq| (entry.row.path.run().to_string(), seq)),
            }
        };
        store.checkpoints.values().map(view).collect()
    }

    /// Returns the records of all training runs, by id.
    #[must_use]
    pub fn runs(&self) -> Vec<(String, RunView)> {
        let store = self.0.store();
        let runs = store.runs.values().map(|entry| &entry.row);
        runs.map(|run| (run.id.to_string(), RunView(run.clone()))).collect()
    }

    /// Returns the custom losses of the open sessions, by id.
    #[must_use]
    pub fn losses(&self) -> Vec<(String, LossView)> {
        let store = self.0.store();
        let losses = store.losses.iter();
        losses.map(|(id, loss)| (id.to_string(), LossView(id.clone(), Arc::clone(loss)))).collect()
    }

    /// Returns the weights of a sampling session: `None` if the session does not exist, and
    /// `Some(None)` if it samples from the base model.
    #[must_use]
    pub fn sampler_weights(&self, sampler: &str) -> Option<Option<WeightsLocation>> {
        let id = SamplerId::from(sampler);
        Some(self.0.store().samplers.get(&id)?.row.weights.clone())
    }

    /// Returns the ids of the models whose sessions are open, sorted.
    #[must_use]
    pub fn models_in_open_sessions(&self) -> Vec<String> {
        let store = self.0.store();
        let is_open = |run: &ModelRunRecord| {
            let session = store.sessions.get(&run.session);
            run.closed.is_none() && session.is_some_and(|session| session.row.end.is_none())
        };
        let runs = store.runs.values().map(|entry| &entry.row).filter(|run| is_open(run));
        let mut ids: Vec<String> = runs.map(|run| run.id.to_string()).collect();
        ids.sort();
        ids
    }

    /// Returns the weights that a request to load weights must read: the weights that its
    /// checkpoint has now. Call it when the request is admitted.
    #[must_use]
    pub fn weights_to_load(&self, body: &[u8]) -> Option<WeightsLocation> {
        let request: LoadWeights = json::decode(body).ok()?;
        let path: TinkerPath = request.path.as_str().parse().ok()?;
        Some(self.0.store().checkpoint(&path)?.row.weights.clone())
    }

    /// Checks that every record refers to files that exist.
    ///
    /// # Errors
    /// Describes the first reference to a missing folder or payload.
    pub fn check_references(&self) -> Result<(), String> {
        let store = self.0.store();
        let folders = referenced_folders(&store);
        let payloads = needed_payloads(&store);
        drop(store);
        for (owner, folder) in folders {
            if !self.0.weights_dir.join(&folder).is_dir() {
                return Err(format!("{owner} refers to the missing folder {folder}"));
            }
        }
        for (owner, number) in payloads {
            if let Err(error) = self.payload(number) {
                return Err(format!("{owner} refers to a missing payload: {error}"));
            }
        }
        Ok(())
    }

    /// Describes the durable state, one line per object, in a fixed order. A server that is
    /// restarted without a fault has the same description, except for expired objects.
    #[must_use]
    pub fn describe(&self) -> Vec<String> {
        let store = self.0.store();
        let mut lines = Vec::new();
        for entry in store.sessions.values() {
            lines.push(format!("session {} {:?}", entry.row.id, entry.row.end));
        }
        for entry in store.runs.values() {
            let row = &entry.row;
            let changes: Vec<_> = entry.changes.keys().collect();
            lines.push(format!(
                "run {} last {:?} closed {:?} snapshot {:?} changes {changes:?}",
                row.id, row.last_seq, row.closed, row.snapshot
            ));
        }
        for entry in store.samplers.values() {
            lines.push(format!("sampler {:?}", entry.row));
        }
        for entry in store.checkpoints.values() {
            lines.push(format!("checkpoint {:?}", entry.row));
        }
        for entry in store.requests.values() {
            let outcome = match &entry.phase {
                RequestPhase::Ready { number, .. } => format!("result {number}"),
                RequestPhase::Failed { failed, .. } => format!("failed {failed:?}"),
                _ => "unfinished".to_owned(),
            };
            lines.push(format!("request {:?} {outcome}", entry.row));
        }
        for loss in store.losses.keys() {
            lines.push(format!("loss {loss}"));
        }
        lines.extend(store.usage.iter().map(|(key, count)| format!("usage {key:?} {count}")));
        lines.sort();
        lines
    }
}

/// Returns the folders that records refer to, each with a name of the record.
fn referenced_folders(store: &Store) -> Vec<(String, String)> {
    let mut all = Vec::new();
    for entry in store.checkpoints.values() {
        all.push((format!("checkpoint {}", entry.row.path), entry.row.weights.clone()));
    }
    for entry in store.samplers.values() {
        let weights = entry.row.needed_weights().cloned();
        all.extend(weights.map(|weights| (format!("sampler {}", entry.row.id), weights)));
    }
    for entry in store.runs.values() {
        let snapshot = entry.row.snapshot.as_ref();
        all.extend(snapshot.map(|s| (format!("run {}", entry.row.id), s.weights.clone())));
    }
    let local = |(owner, weights): (String, WeightsLocation)| Some((owner, weights.into_local()?));
    all.into_iter().filter_map(local).collect()
}

/// Returns the payloads that durable records need, each with a name of the record.
fn needed_payloads(store: &Store) -> Vec<(String, u64)> {
    let mut all = Vec::new();
    for entry in store.requests.values() {
        let name = || format!("request {}", entry.row.id);
        match &entry.phase {
            RequestPhase::Ready { number, .. } => all.push((name(), *number)),
            RequestPhase::Queued => all.push((name(), entry.row.number)),
            _ => {}
        }
    }
    for entry in store.runs.values() {
        let changes = entry.changes.values();
        all.extend(changes.map(|change| (format!("run {}", entry.row.id), change.body)));
    }
    all.sort();
    all
}
