//! [`ServerState`]: the shared state that the routes use.
//!
//! Other modules get only the part of the state that they need: see [`Admission`], [`Inference`],
//! [`Expiry`], [`WorkerContext`](crate::worker::WorkerContext) and [`BackendContext`].

use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::MutexGuard;
use tinkex_backend::context::BackendContext;
use tinkex_backend::upstream::UpstreamHandle;
use tinkex_dashboard::{DashboardAccess, History};
use tinkex_store::clock::Clock;
use tinkex_store::decode_jobs::DecodeJobs;
use tinkex_store::disk::{DASHBOARD_SESSIONS, DATABASE, ServerHealth};
use tinkex_store::durable::SharedStore;
use tinkex_store::error::ServerError;
use tinkex_store::executor::{Executor, LoopHandle};
use tinkex_store::hidden_paths::HiddenPaths;
use tinkex_store::history::HistoryRecorder;
use tinkex_store::random::RandomSource;
use tinkex_store::result_reads::ResultReads;
use tinkex_store::store::Store;
use tokio::sync::{Semaphore, watch};

use crate::admit::{Admission, IgnoredInputs};
use crate::backends::Backends;
use crate::backup::LastBackup;
use crate::downloads::Downloads;
use crate::drain::Drain;
use crate::environment::Environment;
use crate::expiry::Expiry;
use crate::inference::{Generations, Inference, TextMemory};
use crate::keyring::Keyring;
use crate::metrics::{EngineMetrics, ServerMetrics};
use crate::models::{BaseModel, BaseModels};
use crate::options::ServerOptions;
use crate::retention::Retention;
use crate::routes::Dashboard;
use crate::worker::WorkerContext;

/// Shared state of a server, which the routes use.
pub(crate) struct ServerState {
    pub(crate) options: ServerOptions,
    pub(crate) clock: Clock,
    pub(crate) executor: Executor,
    pub(crate) random: Arc<RandomSource>,
    pub(crate) store: SharedStore,
    pub(crate) admission: Arc<Admission>,
    pub(crate) expiry: Arc<Expiry>,
    pub(crate) backends: Arc<Backends>,
    pub(crate) inference: Arc<Inference>,
    pub(crate) models: Arc<BaseModels>,
    pub(crate) history_reader: Arc<History>,
    pub(crate) dashboard: Dashboard,
    pub(crate) keyring: Arc<Keyring>,
    pub(crate) metrics: ServerMetrics,
    /// Parent folder of all adapter folders.
    pub(crate) weights_dir: PathBuf,
    /// Paths that messages for clients do not contain.
    pub(crate) hidden_paths: Arc<HiddenPaths>,
    pub(crate) downloads: Arc<Downloads>,
    pub(crate) drain: Drain,
    pub(crate) last_backup: LastBackup,
    /// Budget for request bodies being read, in units of [`BODY_UNIT`] bytes.
    pub(crate) body_budget: Arc<Semaphore>,
    /// Results that are being read from disk and sent to clients, limited by their total size.
    pub(crate) result_reads: ResultReads,
    /// Whether the server can execute requests.
    pub(crate) health: watch::Sender<ServerHealth>,
    /// Limit on the jobs that decode large bodies on the blocking thread pool.
    pub(crate) decode_jobs: DecodeJobs,
}

/// Number of bytes that one permit of [`ServerState::body_budget`] represents.
pub(crate) const BODY_UNIT: usize = 4_096;

impl ServerState {
    pub(crate) fn new(
        options: ServerOptions,
        store: Store,
        models: BaseModels,
        weights_dir: PathBuf,
        environment: Environment,
    ) -> Self {
        let Environment { executor, random, clocks: _, decode } = environment;
        let health = store.disk.server_health();
        let clock = store.clock.clone();
        let hidden_paths = Arc::clone(&store.hidden_paths);
        let keyring = Keyring::new(&clock, options.api_key.as_ref(), store.keys.values());
        let keyring = Arc::new(keyring);
        let store = SharedStore::new(store);
        let models = Arc::new(models);
        let random = Arc::new(random);
        let history = Arc::new(HistoryRecorder::new(options.history.clone()));
        let history_reader =
            Arc::new(History::new(Arc::clone(&history), options.data_dir.join(DATABASE)));
        let context =
            BackendContext::new(store.clone(), history, executor.clone(), Arc::clone(&random));
        let backends = Arc::new(new_backends(&options, &clock, &models));
        let downloads = Arc::new(Downloads::default());
        let generations = Arc::<Generations>::default();
        let admission = Arc::new(Admission {
            context: context.clone(),
            backends: Arc::clone(&backends),
            models: Arc::clone(&models),
            weights_dir: weights_dir.clone(),
            limits: options.limits.clone(),
            raw_logprobs: options.raw_logprobs,
            ignored_inputs: IgnoredInputs::default(),
            generations: Arc::clone(&generations),
        });
        let inference = Arc::new(Inference {
            admission: Arc::clone(&admission),
            generations,
            aliases: options.aliases.clone(),
            text_memory: TextMemory::new(options.limits.text_bytes),
        });
        let expiry = Arc::new(Expiry {
            context: context.clone(),
            backends: Arc::clone(&backends),
            history: Arc::clone(&history_reader),
            downloads: Arc::clone(&downloads),
            weights_dir: weights_dir.clone(),
            timeouts: options.timeouts.clone(),
            payload_bytes: options.limits.payload_bytes,
            retention: Retention::new(&options),
            files: Arc::default(),
        });
        let access = DashboardAccess::with_file(
            options.api_key.as_ref().map(tinkex_wire::Secret::expose),
            options.data_dir.join(DASHBOARD_SESSIONS),
        );
        let access = access.further_keys(Arc::clone(&keyring) as _);
        let body_units = (options.limits.total_body_bytes / BODY_UNIT).max(1);
        Self {
            clock,
            random,
            store,
            admission,
            expiry,
            backends,
            inference,
            models,
            dashboard: Dashboard::new(access),
            keyring,
            history_reader,
            metrics: ServerMetrics::new(context.metrics),
            weights_dir,
            hidden_paths,
            downloads,
            drain: Drain::default(),
            last_backup: LastBackup::default(),
            body_budget: Arc::new(Semaphore::new(body_units)),
            result_reads: ResultReads::new(options.limits.response_bytes),
            health,
            decode_jobs: DecodeJobs::new(decode, executor.clone()),
            options,
            executor,
        }
    }

    /// Returns the context of the worker.
    pub(crate) fn worker_context(&self) -> WorkerContext {
        WorkerContext {
            backend: self.admission.context.clone(),
            backends: Arc::clone(&self.backends),
            models: Arc::clone(&self.models),
            generations: Arc::clone(&self.inference.generations),
            expiry: Arc::clone(&self.expiry),
            metrics: Arc::<EngineMetrics>::clone(&self.metrics.engine),
            weights_dir: self.weights_dir.clone(),
            passes_dir: self.options.data_dir.join(PASSES),
            limits: self.options.limits.clone(),
            timeouts: self.options.timeouts.clone(),
            autosave_on_expiry: self.options.autosave_on_expiry,
            health: self.health.clone(),
        }
    }

    pub(crate) fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock()
    }

    /// Returns a base model; see [`Admission::base_model`].
    pub(crate) fn base_model(&self, name: &str) -> Result<Arc<BaseModel>, ServerError> {
        self.admission.base_model(name)
    }

    /// Rejects further writes and returns the handle of the disk writer; see
    /// [`Disk::close`](tinkex_store::disk::Disk::close). Do not wait for the handle while holding
    /// the store's lock: the callbacks of pending writes take the lock, so the wait would deadlock.
    pub(crate) fn close(&self) -> Option<LoopHandle<()>> {
        self.history_reader.close();
        self.store().disk.close()
    }
}

/// Name of the folder of the progress of running passes in the data folder.
const PASSES: &str = "passes";

/// Creates the queues of all backends. Base models that an upstream offers are added to `models`.
fn new_backends(options: &ServerOptions, clock: &Clock, models: &Arc<BaseModels>) -> Backends {
    let gap_timeout = options.timeouts.sequence_gap;
    let handles = options.upstreams.iter().map(|upstream| {
        let models = Arc::clone(models);
        let name = Arc::clone(&upstream.name);
        let url = upstream.driver.url().to_owned();
        UpstreamHandle::new(name, url, gap_timeout, clock.clone(), move |offered| {
            models.add_upstream(offered.upstream, offered.name, offered.context);
        })
    });
    Backends::new(gap_timeout, clock, handles)
}
