//! [`ServerState`]: the state shared by connections, the worker and the expiry task.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tinkex_wire::ModelId;
use tokio::sync::{Semaphore, watch};
use tokio::time::Instant;

use crate::backend::{Backend, Backends};
use crate::clock::Clock;
use crate::disk::DATABASE;
use crate::error::ServerError;
use crate::history::History;
use crate::inference::Generations;
use crate::metrics::ServerMetrics;
use crate::models::{BaseModel, BaseModels};
use crate::operation::Operation;
use crate::options::ServerOptions;
use crate::queue::Queue;
use crate::random::RandomSource;
use crate::result_reads::ResultReads;
use crate::routes::Dashboard;
use crate::store::Store;
use crate::task::{DecodeJobs, Executor, LoopHandle};

/// State shared by connections, the worker and the expiry task.
pub(crate) struct ServerState {
    pub(crate) options: ServerOptions,
    pub(crate) clock: Clock,
    pub(crate) executor: Executor,
    pub(crate) random: RandomSource,
    store: Mutex<Store>,
    pub(crate) backends: Backends,
    /// Inference requests that are not finished.
    pub(crate) generations: Generations,
    pub(crate) models: BaseModels,
    pub(crate) history: History,
    pub(crate) dashboard: Dashboard,
    pub(crate) metrics: ServerMetrics,
    /// Parent folder of all adapter folders.
    pub(crate) weights_dir: PathBuf,
    /// Download permissions by token.
    downloads: Mutex<HashMap<String, DownloadGrant>>,
    /// Budget for request bodies being read, in units of [`BODY_UNIT`] bytes.
    pub(crate) body_budget: Arc<Semaphore>,
    /// Results that are being read from disk and sent.
    pub(crate) result_reads: ResultReads,
    /// Serializes changes to existing records: see [`durable`](crate::durable).
    pub(crate) change_lock: Arc<tokio::sync::Mutex<()>>,
    /// Becomes true when the worker thread or the writer thread has panicked.
    pub(crate) broken: watch::Sender<bool>,
    /// Decoding of large bodies on the blocking pool.
    pub(crate) decode_jobs: DecodeJobs,
}

/// Permission to download the files of a folder without an API key.
#[derive(Clone, Debug)]
pub(crate) struct DownloadGrant {
    /// Name of the folder under `weights/`.
    pub(crate) folder: String,
    pub(crate) expires: Instant,
}

/// Number of bytes that one permit of [`ServerState::body_budget`] represents.
pub(crate) const BODY_UNIT: usize = 4_096;

impl ServerState {
    pub(crate) fn new(
        options: ServerOptions,
        store: Store,
        models: BaseModels,
        weights_dir: PathBuf,
        executor: Executor,
        random: RandomSource,
    ) -> Self {
        Self {
            broken: store.disk.broken(),
            clock: store.clock.clone(),
            backends: Backends::new(
                options.timeouts.sequence_gap,
                &store.clock,
                options.upstreams.iter().map(|upstream| (&*upstream.name, upstream.url.clone())),
            ),
            store: Mutex::new(store),
            generations: Generations::default(),
            models,
            dashboard: Dashboard::new(options.api_key.as_ref().map(|key| key.expose().to_owned())),
            history: History::new(options.history.clone(), options.data_dir.join(DATABASE)),
            metrics: ServerMetrics::default(),
            weights_dir,
            downloads: Mutex::default(),
            result_reads: ResultReads::new(options.limits.response_bytes),
            change_lock: Arc::default(),
            body_budget: Arc::new(Semaphore::new(
                (options.limits.total_body_bytes / BODY_UNIT).max(1),
            )),
            decode_jobs: DecodeJobs::new(executor.clone()),
            options,
            executor,
            random,
        }
    }

    pub(crate) fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a base model.
    ///
    /// # Errors
    /// As [`BaseModels::require`]; [`ServerError::Unavailable`] if an upstream has not responded
    /// yet, which may have the model.
    pub(crate) fn base_model(&self, name: &str) -> Result<Arc<BaseModel>, ServerError> {
        self.models.require(name).map_err(|error| match self.backends.unreached() {
            Some(upstream) => ServerError::Unavailable(format!(
                "base model {name:?} is not known yet: upstream {upstream} has not responded since \
                 the start of the server"
            )),
            None => error,
        })
    }

    /// Returns the queue of the engine.
    pub(crate) fn engine_queue(&self) -> &Queue {
        self.backends.engine()
    }

    /// Returns the queue of the backend that executes an operation. The caller holds the store's
    /// lock.
    pub(crate) fn queue_for(&self, store: &Store, operation: &Operation) -> &Queue {
        match operation {
            Operation::Model { model, .. } => self.queue_of_model(store, model),
            Operation::Relay(sample) => {
                self.backends.queue(&Backend::Upstream(Arc::clone(&sample.upstream)))
            }
            Operation::Sample(_) | Operation::Generate(_) => self.engine_queue(),
        }
    }

    /// Returns the queue of the backend that a model is on. The caller holds the store's lock.
    pub(crate) fn queue_of_model(&self, store: &Store, model: &ModelId) -> &Queue {
        let backend = store.runs.get(model).map_or(Backend::Engine, |run| run.row.backend());
        self.backends.queue(&backend)
    }

    /// Rejects further writes and returns the handle of the disk writer; see
    /// [`Disk::close`](crate::disk::Disk::close). Do not wait for it with the store's lock, which
    /// the callbacks of the writes take.
    pub(crate) fn close(&self) -> Option<LoopHandle<()>> {
        self.history.close();
        self.store().disk.close()
    }

    pub(crate) fn downloads(&self) -> MutexGuard<'_, HashMap<String, DownloadGrant>> {
        self.downloads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
