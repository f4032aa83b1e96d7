//! [`BackendContext`]: handles of the server that every backend uses.

use std::sync::Arc;

use tinkex_store::clock::Clock;
use tinkex_store::durable::SharedStore;
use tinkex_store::executor::Executor;
use tinkex_store::history::HistoryRecorder;
use tinkex_store::random::RandomSource;

use crate::metrics::WorkMetrics;
use crate::outcome::Outcomes;

/// Handles of the server that every backend uses. Cheap to clone.
#[derive(Clone)]
pub struct BackendContext {
    pub store: SharedStore,
    pub outcomes: Outcomes,
    pub history: Arc<HistoryRecorder>,
    pub metrics: Arc<WorkMetrics>,
    pub executor: Executor,
    pub random: Arc<RandomSource>,
}

impl BackendContext {
    /// Creates the context for the backends of one server.
    #[must_use]
    pub fn new(
        store: SharedStore,
        history: Arc<HistoryRecorder>,
        executor: Executor,
        random: Arc<RandomSource>,
    ) -> Self {
        let metrics = Arc::new(WorkMetrics::default());
        let outcomes = Outcomes::new(store.clone(), Arc::clone(&history), Arc::clone(&metrics));
        Self { store, outcomes, history, metrics, executor, random }
    }

    /// Returns the clock of the server.
    #[must_use]
    pub fn clock(&self) -> &Clock {
        self.store.clock()
    }
}
