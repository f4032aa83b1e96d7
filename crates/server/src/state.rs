//! [`Shared`]: what every part of the server points to; fields, hardly any behaviour.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::{Semaphore, watch};

use crate::metrics::Metrics;
use crate::models::Models;
use crate::options::ServerOptions;
use crate::queue::Queue;
use crate::store::Store;

/// What every part of the server points to.
pub(crate) struct Shared {
    pub(crate) options: ServerOptions,
    store: Mutex<Store>,
    pub(crate) queue: Queue,
    pub(crate) models: Models,
    pub(crate) metrics: Metrics,
    /// Where adapters lie, each in a folder of its own.
    pub(crate) folders: PathBuf,
    /// Who may download which folder without a key, and until when.
    pub(crate) downloads: Mutex<HashMap<String, Download>>,
    /// Room for bodies, in units of [`BODY_UNIT`].
    pub(crate) body_room: Semaphore,
    /// The turn to change facts: see [`commit`](crate::commit).
    pub(crate) changes: Arc<tokio::sync::Mutex<()>>,
    /// Whether the worker made a mistake that it cannot go on after.
    pub(crate) broken: watch::Sender<bool>,
    /// Turns for reading large bodies: as many as cores, so that calls are answered meanwhile.
    pub(crate) heavy: Semaphore,
}

/// A folder that may be downloaded.
#[derive(Clone, Debug)]
pub(crate) struct Download {
    pub(crate) folder: String,
    pub(crate) until: Instant,
}

/// Bytes that one permit of the room for bodies stands for.
pub(crate) const BODY_UNIT: usize = 4_096;

impl Shared {
    pub(crate) fn new(
        options: ServerOptions,
        store: Store,
        models: Models,
        folders: PathBuf,
    ) -> Self {
        Self {
            store: Mutex::new(store),
            queue: Queue::new(options.timeouts.sequence_gap),
            models,
            metrics: Metrics::default(),
            folders,
            downloads: Mutex::default(),
            changes: Arc::default(),
            broken: watch::Sender::new(false),
            body_room: Semaphore::new((options.limits.total_body_bytes / BODY_UNIT).max(1)),
            heavy: Semaphore::new(
                std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            ),
            options,
        }
    }

    pub(crate) fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets nothing more be written; what is returned waits until what was said before is on disk.
    pub(crate) fn close(&self) -> impl FnOnce() + Send + 'static {
        let thread = self.store().disk.close();
        let own = std::thread::current().id();
        move || {
            if let Some(thread) = thread.filter(|thread| thread.thread().id() != own) {
                // A panic there has been printed already.
                let _ = thread.join();
            }
        }
    }

    pub(crate) fn downloads(&self) -> MutexGuard<'_, HashMap<String, Download>> {
        self.downloads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
