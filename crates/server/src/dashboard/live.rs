//! [`LiveSource`]: the documents of a running server.

use std::collections::HashMap;
use std::sync::Arc;

use serde_json::{Value, json};
use tinkex_wire::ModelId;
use tokio::sync::watch;

use super::samples::{self, read_failed, seconds};
use super::{ChangeCursor, DashboardSource, DocumentResult, QueryParams};
use crate::error::ServerError;
use crate::history::{LoggedRequest, MetricsQuery, RunSummary, folder_prefix};
use crate::record::UnixMicros;
use crate::state::ServerState;
use crate::store::{RunRecord, SequenceScope, Store, Tracked};

/// Time since the last request of a run after which it is idle, in microseconds.
const IDLE_AFTER: UnixMicros = 10_000_000;
/// Maximum number of requests in a timeline.
const TIMELINE: u32 = 2_000;
/// Number of failed requests that are shown.
const FAILURES: u32 = 50;

/// Documents of a running server.
pub(crate) struct LiveSource(pub(crate) Arc<ServerState>);

/// What the list of runs needs from the store, collected in one pass.
struct StoreView<'a> {
    store: &'a Store,
    now: UnixMicros,
    /// Number of unfinished requests of each run.
    queued: HashMap<&'a ModelId, usize>,
    /// Number and size of the checkpoints of each run.
    checkpoints: HashMap<&'a ModelId, (usize, u64)>,
}

impl<'a> StoreView<'a> {
    fn new(store: &'a Store, now: UnixMicros) -> Self {
        let mut queued: HashMap<&ModelId, usize> = HashMap::new();
        for entry in store.requests.values().filter(|entry| entry.finished_at().is_none()) {
            if let SequenceScope::Model(run) = &entry.row.scope {
                *queued.entry(run).or_default() += 1;
            }
        }
        let mut checkpoints: HashMap<&ModelId, (usize, u64)> = HashMap::new();
        for entry in store.checkpoints.values().filter(|entry| !entry.row.is_expired(now)) {
            let (count, bytes) = checkpoints.entry(entry.row.path.run()).or_default();
            (*count, *bytes) = (*count + 1, bytes.saturating_add(entry.row.size_bytes));
        }
        Self { store, now, queued, checkpoints }
    }

    fn status(&self, run: &Tracked<RunRecord>, summary: Option<&RunSummary>) -> &'static str {
        let row = &run.row;
        let session = self.store.sessions.get(&row.session);
        let open = session.is_some_and(|entry| entry.row.end.is_none());
        let queued = self.queued.get(&row.id).copied().unwrap_or(0);
        if row.has_failed() || summary.is_some_and(|summary| summary.error.is_some()) && !open {
            "failed"
        } else if !open {
            "ended"
        } else if queued > 0 || self.now.saturating_sub(run.last_used) < IDLE_AFTER {
            "training"
        } else {
            "idle"
        }
    }

    fn run(&self, run: &Tracked<RunRecord>, summary: Option<&RunSummary>) -> Value {
        let row = &run.row;
        let session = self.store.sessions.get(&row.session);
        let (checkpoints, bytes) = self.checkpoints.get(&row.id).copied().unwrap_or((0, 0));
        json!({
            "id": row.id.as_str(),
            "name": name_of(row, session.and_then(|entry| entry.row.display_name.as_deref())),
            "base_model": row.base_model,
            "rank": row.lora.rank,
            "status": self.status(run, summary),
            "steps": summary.map_or(0, |summary| summary.steps),
            "loss": summary.and_then(|summary| summary.loss).filter(|loss| loss.is_finite()),
            "losses": summary.map(|summary| &*summary.losses).unwrap_or_default(),
            "tokens": summary.map_or(0, |summary| summary.tokens),
            "tokens_per_second": summary.and_then(|summary| summary.tokens_per_second),
            "error": summary.and_then(|summary| summary.error.as_deref()).or(row.closed.as_deref()),
            "queued": self.queued.get(&row.id).copied().unwrap_or(0),
            "created": row.created_at.div_euclid(1_000),
            "last_used": run.last_used.div_euclid(1_000),
            "checkpoints": checkpoints,
            "storage_bytes": bytes,
            "session": row.session.as_str(),
        })
    }
}

/// Returns the name that a program gave its run or its session.
fn name_of(run: &RunRecord, session: Option<&str>) -> Option<String> {
    let metadata = run.user_metadata.as_ref();
    let named = metadata.and_then(|metadata| {
        ["name", "run_name", "display_name"].iter().find_map(|key| metadata.get(*key)?.as_str())
    });
    named.or(session).filter(|name| !name.trim().is_empty()).map(str::to_owned)
}

impl LiveSource {
    /// Calls `read` with the summaries of all runs. It may lock the store: no thread that holds the
    /// store's lock waits for the history.
    fn with_summaries<T>(
        &self,
        read: impl FnOnce(&HashMap<ModelId, RunSummary>) -> T,
    ) -> Result<T, ServerError> {
        self.0.history.read(|reader| Ok(read(reader.summaries()?))).map_err(read_failed)
    }

    /// Returns the id of a run that exists.
    fn find(&self, id: &str) -> Result<ModelId, ServerError> {
        let id = ModelId::from(id);
        match self.0.store().runs.contains_key(&id) {
            true => Ok(id),
            false => Err(ServerError::not_found(format!("training run {id} does not exist"))),
        }
    }
}

impl DashboardSource for LiveSource {
    fn info(&self) -> DocumentResult {
        let history = self.0.history.options();
        let read = self.0.history.read(|reader| reader.last_ids());
        let (point, sample) = read.map_err(read_failed)?;
        let cursor = ChangeCursor { point, sample, ..ChangeCursor::default() };
        Ok(json!({
            "kind": "server",
            "version": env!("CARGO_PKG_VERSION"),
            "models": self.0.models.names(),
            "history": history.requests > 0,
            "samples": history.requests > 0 && history.samples > 0,
            "views": ["runs", "samples", "playground", "server"],
            // The stream of changes continues from here: the page reads the rest after this.
            "cursor": cursor.event_id(),
            "time": self.0.clock.now().div_euclid(1_000),
        }))
    }

    fn runs(&self) -> DocumentResult {
        let mut runs: Vec<Value> = self.with_summaries(|summaries| {
            let store = self.0.store();
            let view = StoreView::new(&store, self.0.clock.now());
            let runs = store.runs.values();
            runs.map(|run| view.run(run, summaries.get(&run.row.id))).collect()
        })?;
        runs.sort_by_key(|run| std::cmp::Reverse(run["created"].as_i64()));
        Ok(json!({ "runs": runs }))
    }

    fn run(&self, id: &str) -> DocumentResult {
        let id = self.find(id)?;
        let summary = self.with_summaries(|summaries| summaries.get(&id).cloned())?;
        let now = self.0.clock.now();
        let store = self.0.store();
        let Some(run) = store.runs.get(&id) else {
            return Err(ServerError::not_found(format!("training run {id} does not exist")));
        };
        let mut document = StoreView::new(&store, now).run(run, summary.as_ref());
        let row = &run.row;
        let session = store.sessions.get(&row.session).map(|entry| &entry.row);
        document["settings"] = json!({
            "rank": row.lora.rank,
            "seed": row.lora.seed.to_string(),
            "train_mlp": row.lora.train_mlp,
            "train_attn": row.lora.train_attn,
            "train_unembed": row.lora.train_unembed,
            "optimizer": row.optimizer,
        });
        document["metadata"] = json!(row.user_metadata);
        document["session_metadata"] = json!(session.and_then(|row| row.user_metadata.as_ref()));
        document["tags"] = json!(session.map(|row| &row.tags));
        let checkpoints = store.checkpoints_of(&id);
        let live = checkpoints.into_iter().filter(|row| !row.is_expired(now));
        let mut checkpoints: Vec<_> = live.collect();
        checkpoints.sort_by_key(|row| std::cmp::Reverse(row.created_at));
        document["saved"] = checkpoints
            .into_iter()
            .map(|row| {
                json!({
                    "path": row.path.to_string(),
                    "name": row.path.name(),
                    "kind": row.path.kind().segment(),
                    "seq": row.seq,
                    "created": row.created_at.div_euclid(1_000),
                    "expires": row.expires_at.map(|at| at.div_euclid(1_000)),
                    "size_bytes": row.size_bytes,
                    "public": row.public,
                })
            })
            .collect();
        Ok(document)
    }

    fn metrics(&self, id: &str, query: &MetricsQuery) -> DocumentResult {
        let id = self.find(id)?;
        let read = self.0.history.read(|reader| Ok(reader.columns(&id)?.curves(query)));
        Ok(json!({ "metrics": read.map_err(read_failed)? }))
    }

    fn requests(&self, id: &str) -> DocumentResult {
        let id = self.find(id)?;
        let prefix = folder_prefix(id.as_str());
        let read = self.0.history.read(|reader| {
            let training = reader.requests(&id, TIMELINE)?;
            let since = training.first().map_or(0, |request| request.finished_at);
            let samples = reader.sample_times(&prefix, since, TIMELINE)?;
            Ok((training, samples))
        });
        let (training, samples) = read.map_err(read_failed)?;
        let document = |request: &LoggedRequest| {
            json!([
                request.kind,
                request.seq,
                request.finished_at.div_euclid(1_000),
                seconds(request.queued),
                seconds(request.computed),
                request.tokens,
                request.error,
            ])
        };
        let now = self.0.clock.now();
        let store = self.0.store();
        let view = StoreView::new(&store, now);
        Ok(json!({
            "columns":
                ["kind", "seq", "time", "queued_seconds", "compute_seconds", "tokens", "error"],
            "training": training.iter().map(document).collect::<Vec<_>>(),
            "sampling": samples.iter().rev().map(document).collect::<Vec<_>>(),
            "queued": view.queued.get(&id).copied().unwrap_or(0),
            "now": now.div_euclid(1_000),
        }))
    }

    fn samples(&self, query: &QueryParams) -> DocumentResult {
        samples::samples(&self.0, query)
    }

    fn server(&self) -> DocumentResult {
        let figures = crate::metrics::figures(&self.0);
        let errors =
            self.0.history.read(|reader| reader.failures(FAILURES)).map_err(read_failed)?;
        let errors: Vec<Value> = errors
            .iter()
            .map(|failure| {
                json!({
                    "run": failure.run.as_ref().map(|run| run.as_str()),
                    "kind": failure.kind,
                    "time": failure.at.div_euclid(1_000),
                    "error": failure.error,
                })
            })
            .collect();
        Ok(json!({ "figures": figures, "errors": errors }))
    }

    fn changes(&self, cursor: &mut ChangeCursor) -> Result<Option<Value>, ServerError> {
        let last_sample =
            self.0.history.read(|reader| reader.last_sample()).map_err(read_failed)?;
        // A page that continues has read the statuses itself.
        let continues = cursor.statuses.is_empty();
        let known_point = cursor.point;
        let changed = self.with_summaries(|summaries| {
            let store = self.0.store();
            let view = StoreView::new(&store, self.0.clock.now());
            let mut changed = Vec::new();
            for run in store.runs.values() {
                let summary = summaries.get(&run.row.id);
                let point = summary.map_or(0, |summary| summary.last_point);
                cursor.point = cursor.point.max(point);
                let status = view.status(run, summary);
                let is_other = match cursor.statuses.get_mut(run.row.id.as_str()) {
                    Some(known) if known == status => false,
                    Some(known) => {
                        status.clone_into(known);
                        true
                    }
                    None => {
                        cursor.statuses.insert(run.row.id.to_string(), status.to_owned());
                        !continues
                    }
                };
                if point > known_point || is_other {
                    changed.push(view.run(run, summary));
                }
            }
            changed
        })?;
        let has_samples = last_sample > cursor.sample;
        cursor.sample = last_sample.max(cursor.sample);
        let changes = json!({ "runs": changed, "last_sample": cursor.sample });
        Ok((has_samples || !changed.is_empty()).then_some(changes))
    }

    fn subscribe(&self) -> Option<watch::Receiver<u64>> {
        Some(self.0.history.subscribe())
    }
}
