//! [`Backends`]: the queues of the engine and of the upstreams.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tinkex_backend::queue::{Queue, RequestQueue};
use tinkex_backend::upstream::UpstreamHandle;
use tinkex_store::clock::Clock;
use tinkex_store::error::ServerError;
use tinkex_store::record::ModelRunRecord;
use tinkex_store::store::Store;
use tinkex_store::weights::{Backend, WeightsLocation};
use tinkex_wire::ModelId;

use crate::operation::EngineQueue;

/// Queues of all backends.
pub(crate) struct Backends {
    engine: EngineQueue,
    upstreams: BTreeMap<Arc<str>, Arc<UpstreamHandle>>,
}

/// The backend of a run, which is configured.
pub(crate) enum RunBackend {
    Engine,
    Upstream(Arc<UpstreamHandle>),
}

impl Backends {
    pub(crate) fn new(
        gap_timeout: Duration,
        clock: &Clock,
        upstreams: impl Iterator<Item = UpstreamHandle>,
    ) -> Self {
        let named = |handle: UpstreamHandle| (Arc::clone(&handle.name), Arc::new(handle));
        Self {
            engine: Queue::new(gap_timeout, clock.clone()),
            upstreams: upstreams.map(named).collect(),
        }
    }

    /// Returns the queue of the engine.
    pub(crate) fn engine(&self) -> &EngineQueue {
        &self.engine
    }

    /// Returns the backend of a run.
    ///
    /// # Errors
    /// If the upstream of the run is not configured any more.
    pub(crate) fn of_run(&self, run: &ModelRunRecord) -> Result<RunBackend, ServerError> {
        match run.backend() {
            Backend::Engine => Ok(RunBackend::Engine),
            Backend::Upstream(name) => Ok(RunBackend::Upstream(self.require_upstream(&name)?)),
        }
    }

    /// Returns an upstream that is configured.
    ///
    /// # Errors
    /// [`ServerError::Invalid`] if no upstream of this name is configured.
    pub(crate) fn require_upstream(&self, name: &str) -> Result<Arc<UpstreamHandle>, ServerError> {
        self.upstreams.get(name).cloned().ok_or_else(|| {
            ServerError::invalid(format!(
                "upstream {name:?} is not configured; start the server with --upstream {name}=URL"
            ))
        })
    }

    /// Returns the queue of a model; `None` if its upstream is not configured any more, so no
    /// request of the model can be queued. The caller holds the store's lock.
    pub(crate) fn queue_of_model(
        &self,
        store: &Store,
        model: &ModelId,
    ) -> Option<&dyn RequestQueue> {
        match store.runs.get(model).map_or(Backend::Engine, |run| run.row.backend()) {
            Backend::Engine => Some(&self.engine),
            Backend::Upstream(name) => {
                self.upstreams.get(&name).map(|upstream| &upstream.queue as &dyn RequestQueue)
            }
        }
    }

    /// Returns all queues.
    pub(crate) fn queues(&self) -> impl Iterator<Item = &dyn RequestQueue> {
        let upstreams = self.upstreams.values();
        let upstreams = upstreams.map(|upstream| &upstream.queue as &dyn RequestQueue);
        std::iter::once(&self.engine as &dyn RequestQueue).chain(upstreams)
    }

    /// Deletes weights on an upstream to which no record refers any more. Has no effect on weights
    /// in a folder, which the expiry task removes.
    pub(crate) fn discard(&self, weights: WeightsLocation) {
        let name = weights.remote().map(|remote| remote.upstream.clone());
        if let Some(upstream) = name.and_then(|name| self.upstreams.get(&*name)) {
            upstream.discard(weights);
        }
    }

    pub(crate) fn upstream(&self, name: &str) -> Option<&Arc<UpstreamHandle>> {
        self.upstreams.get(name)
    }

    /// Returns all upstreams, in order of their names.
    pub(crate) fn upstreams(&self) -> impl Iterator<Item = &Arc<UpstreamHandle>> {
        self.upstreams.values()
    }

    /// Returns an upstream that has not responded yet, so that its models are not known.
    pub(crate) fn unreached(&self) -> Option<&Arc<UpstreamHandle>> {
        self.upstreams.values().find(|upstream| !upstream.status().was_reached)
    }

    /// Returns the upstream that a new run of a base model is assigned to: the upstream with the
    /// fewest open runs among the upstreams in `names` that respond. If no upstream responds,
    /// chooses among all of `names`.
    pub(crate) fn choose(&self, store: &Store, names: &[Arc<str>]) -> Option<Arc<UpstreamHandle>> {
        let open_runs = |name: &str| {
            let runs = store.runs.values().map(|entry| &entry.row);
            let assigned = runs.filter(|run| {
                run.upstream.as_ref().is_some_and(|upstream| upstream.name == name)
                    && run.closed.is_none()
            });
            let is_open =
                |id| store.sessions.get(id).is_some_and(|session| session.row.end.is_none());
            assigned.filter(|run| is_open(&run.session)).count()
        };
        let handles = names.iter().filter_map(|name| self.upstreams.get(name));
        let chosen =
            handles.min_by_key(|handle| (handle.status().down.is_some(), open_runs(&handle.name)));
        chosen.cloned()
    }
}
