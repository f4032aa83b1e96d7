//! [`LiveSource`]: the documents of a running server.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::MutexGuard;
use serde_json::json;
use tinkex_store::durable::SharedStore;
use tinkex_store::history::folder_prefix;
use tinkex_store::user::Principal;
use tinkex_text::Tokenizer;
use tinkex_wire::rest::KeyRole;
use tinkex_wire::{JsonObject, ModelId};
use tokio::sync::watch;

use crate::document::{
    ChangesDocument, CheckpointDocument, FailureDocument, FiguresDocument, InfoDocument,
    MetricsDocument, RequestRow, RequestsDocument, RunDetails, RunDocument, RunListDocument,
    SampleListDocument, ServerDocument, SettingsDocument,
};
use crate::error::ServerError;
use crate::history::{History, LoggedRequest, MetricsQuery, RunSummary};
use crate::query::QueryParams;
use crate::record::UnixMicros;
use crate::samples::{self, read_failed, seconds};
use crate::source::{ChangeCursor, DashboardSource, DocumentResult};
use crate::store::{ModelRunRecord, SequenceScope, Store, Tracked, UserStore};

/// Time since the last request of a run after which it is idle, in microseconds.
const IDLE_AFTER: UnixMicros = 10_000_000;
/// Maximum number of requests in a timeline.
const TIMELINE: u32 = 2_000;
/// Number of failed requests that are shown.
const FAILURES: u32 = 50;

/// Data of a server for the dashboard that is neither in its records nor in its history.
pub trait ServerView: Send + Sync {
    /// Returns the names of the base models, in alphabetical order.
    fn base_models(&self) -> Vec<String>;

    /// Returns the tokenizer of a base model; `None` if the model has no readable tokenizer. May
    /// block.
    fn tokenizer(&self, base_model: &str) -> Option<Tokenizer>;

    /// Returns counters, gauges and limits of the server.
    fn figures(&self) -> FiguresDocument;
}

/// A running server, whose documents are read from its store and its history.
pub struct LiveSource {
    pub(crate) store: SharedStore,
    pub(crate) history: Arc<History>,
    pub(crate) view: Arc<dyn ServerView>,
    /// The reader, whose objects the documents show.
    pub(crate) principal: Principal,
}

/// Data of the store for the list of runs, collected in one pass over the store.
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
            *count += 1;
            *bytes = bytes.saturating_add(entry.row.size_bytes);
        }
        Self { store, now, queued, checkpoints }
    }

    fn status(&self, run: &Tracked<ModelRunRecord>, summary: Option<&RunSummary>) -> &'static str {
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

    fn run(&self, run: &Tracked<ModelRunRecord>, summary: Option<&RunSummary>) -> RunDocument {
        let row = &run.row;
        let session = self.store.sessions.get(&row.session);
        let (checkpoints, bytes) = self.checkpoints.get(&row.id).copied().unwrap_or((0, 0));
        let finite = |value: Option<f64>| value.filter(|value| value.is_finite());
        let error = summary.and_then(|summary| summary.error.as_ref());
        let losses = summary.map(|summary| &*summary.losses).unwrap_or_default();
        RunDocument {
            id: row.id.to_string(),
            name: name_of(row, session.and_then(|entry| entry.row.display_name.as_deref())),
            base_model: Some(row.base_model.clone()),
            rank: Some(row.lora.rank.into()),
            status: self.status(run, summary),
            steps: summary.map_or(0, |summary| summary.steps),
            total_steps: None,
            loss: finite(summary.and_then(|summary| summary.loss)),
            losses: losses.iter().map(|loss| Some(*loss).filter(|loss| loss.is_finite())).collect(),
            tokens: summary.map_or(0, |summary| summary.tokens),
            tokens_per_second: finite(summary.and_then(|summary| summary.tokens_per_second)),
            error: error.or(row.closed.as_ref()).cloned(),
            queued: self.queued.get(&row.id).copied().unwrap_or(0),
            created: Some(row.created_at.div_euclid(1_000)),
            last_used: Some(run.last_used.div_euclid(1_000)),
            checkpoints,
            storage_bytes: Some(bytes),
            session: Some(row.session.to_string()),
        }
    }
}

/// Returns the name that a program gave its run or its session.
fn name_of(run: &ModelRunRecord, session: Option<&str>) -> Option<String> {
    run.name.as_deref().or(session).filter(|name| !name.trim().is_empty()).map(str::to_owned)
}

impl LiveSource {
    /// Creates the source of a server.
    #[must_use]
    pub fn new(
        store: SharedStore,
        history: Arc<History>,
        view: Arc<dyn ServerView>,
        principal: Principal,
    ) -> Self {
        Self { store, history, view, principal }
    }

    /// Locks the store, as the reader may see it.
    pub(crate) fn user_store(&self) -> UserStore<'_, MutexGuard<'_, Store>> {
        UserStore::new(self.store.lock(), &self.principal)
    }

    /// Returns whether the reader sees the objects of all users.
    fn sees_all(&self) -> bool {
        self.principal.role == KeyRole::Admin
    }

    /// Returns the user whose samples the documents show; `None` for the samples of all users.
    pub(crate) fn sampled_by(&self) -> Option<&str> {
        (!self.sees_all()).then(|| self.principal.user.as_str())
    }

    /// Calls `read` with the summaries of all runs. `read` may lock the store: this cannot
    /// deadlock, because no thread waits for the history while it holds the store's lock.
    fn with_summaries<T>(
        &self,
        read: impl FnOnce(&HashMap<ModelId, RunSummary>) -> T,
    ) -> Result<T, ServerError> {
        self.history.read(|reader| Ok(read(reader.summaries()?))).map_err(read_failed)
    }

    /// Returns the id of a run that exists.
    fn find(&self, id: &str) -> Result<ModelId, ServerError> {
        let id = ModelId::from(id);
        self.user_store().run(&id)?;
        Ok(id)
    }
}

/// Metadata of a run and of its session.
#[derive(Default)]
struct RunMetadata {
    of_run: JsonObject,
    of_session: JsonObject,
}

impl LiveSource {
    /// Reads the metadata of a run and of its session, without holding the store's lock.
    fn metadata_of(&self, id: &ModelId) -> Result<RunMetadata, ServerError> {
        let (run_bytes, session, session_bytes) = {
            let store = self.store.lock();
            let Some(run) = store.runs.get(id).map(|entry| &entry.row) else {
                return Ok(RunMetadata::default());
            };
            let session = store.sessions.get(&run.session).map(|entry| &entry.row);
            let session_bytes = session.map_or(0, |row| row.metadata_bytes);
            (run.metadata_bytes, run.session.clone(), session_bytes)
        };
        let get = |object: &str, bytes| {
            let metadata = self.store.metadata().get(object, bytes);
            metadata
                .map(Option::unwrap_or_default)
                .map_err(|error| ServerError::read_failed(&error))
        };
        let of_run = get(id.as_str(), run_bytes)?;
        let of_session = get(session.as_str(), session_bytes)?;
        Ok(RunMetadata { of_run, of_session })
    }
}

impl std::fmt::Debug for LiveSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LiveSource").field("history", &self.history).finish_non_exhaustive()
    }
}

impl DashboardSource for LiveSource {
    fn info(&self) -> DocumentResult<InfoDocument> {
        let history = self.history.options();
        let read = self.history.read(|reader| reader.last_ids());
        let (point, sample) = read.map_err(read_failed)?;
        let cursor = ChangeCursor { point, sample, ..ChangeCursor::default() };
        Ok(InfoDocument {
            kind: "server",
            version: env!("CARGO_PKG_VERSION"),
            models: self.view.base_models(),
            folders: Vec::new(),
            history: history.requests > 0,
            samples: history.requests > 0 && history.samples > 0,
            views: match self.sees_all() {
                true => vec!["runs", "samples", "playground", "server"],
                false => vec!["runs", "samples", "playground"],
            },
            // The stream of changes continues from this cursor: the page reads the other documents
            // after this one.
            cursor: Some(cursor.event_id()),
            time: Some(self.store.clock().now().div_euclid(1_000)),
        })
    }

    fn runs(&self) -> DocumentResult<RunListDocument> {
        let mut runs: Vec<RunDocument> = self.with_summaries(|summaries| {
            let store = self.user_store();
            let view = StoreView::new(store.all(), self.store.clock().now());
            store.runs().map(|run| view.run(run, summaries.get(&run.row.id))).collect()
        })?;
        runs.sort_by_key(|run| std::cmp::Reverse(run.created));
        Ok(RunListDocument { runs })
    }

    fn run(&self, id: &str) -> DocumentResult<RunDetails> {
        let id = self.find(id)?;
        let summary = self.with_summaries(|summaries| summaries.get(&id).cloned())?;
        let metadata = self.metadata_of(&id)?;
        let now = self.store.clock().now();
        let store = self.user_store();
        let run = store.run(&id)?;
        let store = store.all();
        let base = StoreView::new(store, now).run(run, summary.as_ref());
        let row = &run.row;
        let session = store.sessions.get(&row.session).map(|entry| &entry.row);
        let settings = [
            ("rank", json!(row.lora.rank)),
            ("seed", json!(row.lora.seed.to_string())),
            ("train_mlp", json!(row.lora.train_mlp)),
            ("train_attn", json!(row.lora.train_attn)),
            ("train_unembed", json!(row.lora.train_unembed)),
            ("optimizer", json!(row.optimizer)),
        ];
        let settings: JsonObject =
            settings.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        let checkpoints = store.checkpoints_of(&id);
        let live = checkpoints.into_iter().filter(|row| !row.is_expired(now));
        let mut checkpoints: Vec<_> = live.collect();
        checkpoints.sort_by_key(|row| std::cmp::Reverse(row.created_at));
        let saved = checkpoints.into_iter().map(|row| CheckpointDocument {
            path: row.path.to_string(),
            name: row.path.name().to_owned(),
            kind: row.path.kind().segment().to_owned(),
            step: None,
            seq: row.seq,
            created: Some(row.created_at.div_euclid(1_000)),
            expires: row.expires_at.map(|at| at.div_euclid(1_000)),
            size_bytes: Some(row.size_bytes),
            public: row.public,
        });
        Ok(RunDetails {
            base,
            settings: SettingsDocument::Server(settings),
            metadata: metadata.of_run,
            session_metadata: metadata.of_session,
            tags: session.map(|row| row.tags.clone()).unwrap_or_default(),
            saved: saved.collect(),
        })
    }

    fn metrics(&self, id: &str, query: &MetricsQuery) -> DocumentResult<MetricsDocument> {
        let id = self.find(id)?;
        let read = self.history.read(|reader| Ok(reader.columns(&id)?.curves(query)));
        Ok(MetricsDocument::new(read.map_err(read_failed)?))
    }

    fn requests(&self, id: &str) -> DocumentResult<RequestsDocument> {
        let id = self.find(id)?;
        let prefix = folder_prefix(id.as_str());
        let read = self.history.read(|reader| {
            let training = reader.requests(&id, TIMELINE)?;
            let since = training.first().map_or(0, |request| request.finished_at);
            let owner = self.sampled_by();
            let samples = reader.sample_times(&prefix, owner, since, TIMELINE)?;
            Ok((training, samples))
        });
        let (training, samples) = read.map_err(read_failed)?;
        let row = |request: LoggedRequest| -> RequestRow {
            (
                request.kind,
                request.seq,
                request.finished_at.div_euclid(1_000),
                seconds(request.queued),
                seconds(request.computed),
                request.tokens,
                request.error,
            )
        };
        let now = self.store.clock().now();
        let store = self.store.lock();
        let view = StoreView::new(&store, now);
        Ok(RequestsDocument {
            columns: [
                "kind",
                "seq",
                "time",
                "queued_seconds",
                "compute_seconds",
                "tokens",
                "error",
            ],
            training: training.into_iter().map(row).collect(),
            sampling: samples.into_iter().rev().map(row).collect(),
            queued: view.queued.get(&id).copied().unwrap_or(0),
            now: now.div_euclid(1_000),
        })
    }

    fn samples(&self, query: &QueryParams) -> DocumentResult<SampleListDocument> {
        samples::samples(self, query)
    }

    fn server(&self) -> DocumentResult<ServerDocument> {
        if !self.sees_all() {
            return Err(ServerError::not_found("/ui/api/server is for administrators"));
        }
        let figures = self.view.figures();
        let errors = self.history.read(|reader| reader.failures(FAILURES)).map_err(read_failed)?;
        let errors = errors.into_iter().map(|failure| FailureDocument {
            run: failure.run.map(|run| run.to_string()),
            kind: failure.kind,
            time: failure.at.div_euclid(1_000),
            error: failure.error,
        });
        Ok(ServerDocument { figures, errors: errors.collect() })
    }

    fn changes(&self, cursor: &mut ChangeCursor) -> DocumentResult<Option<ChangesDocument>> {
        let owner = self.sampled_by();
        let last_sample = self.history.read(|reader| reader.last_sample(owner));
        let last_sample = last_sample.map_err(read_failed)?;
        // A page that continues a stream has already read the statuses of the runs.
        let continues = cursor.statuses.is_empty();
        let known_point = cursor.point;
        let (runs, deleted) = self.with_summaries(|summaries| {
            let store = self.user_store();
            let view = StoreView::new(store.all(), self.store.clock().now());
            let mut changed = Vec::new();
            for run in store.runs() {
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
            let deleted = cursor.remove_deleted(|id| store.run(&ModelId::from(id)).is_ok());
            (changed, deleted)
        })?;
        let has_samples = last_sample > cursor.sample;
        cursor.sample = last_sample.max(cursor.sample);
        let is_change = has_samples || !runs.is_empty() || !deleted.is_empty();
        let changes =
            ChangesDocument { runs, deleted, last_sample: has_samples.then_some(cursor.sample) };
        Ok(is_change.then_some(changes))
    }

    fn subscribe(&self) -> Option<watch::Receiver<u64>> {
        Some(self.history.subscribe())
    }
}
