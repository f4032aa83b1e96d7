//! [`ServerState`]: the state shared by connections, the worker and the expiry task.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Semaphore, watch};
use tokio::time::Instant;

use crate::clock::Clock;
use crate::inference::Generations;
use crate::metrics::ServerMetrics;
use crate::models::BaseModels;
use crate::options::ServerOptions;
use crate::queue::Queue;
use crate::random::RandomSource;
use crate::result_reads::ResultReads;
use crate::store::Store;
use crate::task::{DecodeJobs, Executor, LoopHandle};

/// State shared by connections, the worker and the expiry task.
pub(crate) struct ServerState {
    pub(crate) options: ServerOptions,
    pub(crate) clock: Clock,
    pub(crate) executor: Executor,
    pub(crate) random: RandomSource,
    store: Mutex<Store>,
    pub(crate) queue: Queue,
    /// Inference requests that are not finished.
    pub(crate) generations: Generations,
    pub(crate) models: BaseModels,
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
            queue: Queue::new(options.timeouts.sequence_gap, store.clock.clone()),
            store: Mutex::new(store),
            generations: Generations::default(),
            models,
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

    /// Rejects further writes and returns the handle of the disk writer; see
    /// [`Disk::close`](crate::disk::Disk::close). Do not wait for it with the store's lock, which
    /// the callbacks of the writes take.
    pub(crate) fn close(&self) -> Option<LoopHandle<()>> {
        self.store().disk.close()
    }

    pub(crate) fn downloads(&self) -> MutexGuard<'_, HashMap<String, DownloadGrant>> {
        self.downloads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
