//! [`Drain`]: refusal of new work before the server stops.

use std::time::Duration;

use tinkex_store::log;
use tinkex_wire::Route;
use tinkex_wire::rest::DrainStatus;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::state::ServerState;

/// Time after which a client should retry a request that was refused because of a drain: by then
/// another process may serve the address.
pub(crate) const DRAIN_RETRY: Duration = Duration::from_secs(5);

/// Whether the server refuses new work. Not durable: a restarted server accepts work.
pub(crate) struct Drain(watch::Sender<bool>);

impl Default for Drain {
    fn default() -> Self {
        Self(watch::Sender::new(false))
    }
}

impl Drain {
    /// Refuses new work from now on, or accepts it again.
    pub(crate) fn set(&self, draining: bool) {
        if self.0.send_replace(draining) != draining {
            let state = if draining { "refuses new work" } else { "accepts new work again" };
            tracing::info!(target: log::REQUEST, "the server {state}");
        }
    }

    pub(crate) fn is_active(&self) -> bool {
        *self.0.borrow()
    }
}

/// Returns whether a route starts work, which a draining server refuses. Clients can still poll
/// results, keep their sessions, download, list, delete and finish.
pub(crate) fn starts_work(route: Route) -> bool {
    matches!(
        route,
        Route::CreateSession
            | Route::CreateModel
            | Route::ForwardBackward
            | Route::OptimStep
            | Route::DiscardGradient
            | Route::SaveWeights
            | Route::SaveWeightsForSampler
            | Route::SaveWeightsExternal
            | Route::LoadWeights
            | Route::CreateCustomLoss
            | Route::CreateSamplingSession
            | Route::JoinSamplingSession
            | Route::Sample
            | Route::CopyWeights
            | Route::ImportAdapter
    )
}

/// Returns whether the server refuses new work, and what it still executes.
pub(crate) fn status(state: &ServerState) -> DrainStatus {
    let store = state.store();
    let unfinished = store.requests.values().filter(|entry| entry.finished_at().is_none()).count();
    drop(store);
    let to_u64 = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
    let generations = state.inference.generations.count();
    DrainStatus::new(state.drain.is_active(), to_u64(unfinished), to_u64(generations))
}

/// Refuses new work, and waits until no inference request is running, for at most `limit`. Only
/// inference requests are waited for: other requests are durable, and continue after a restart.
pub(crate) async fn drain(state: &ServerState, limit: Duration) {
    state.drain.set(true);
    // Requests that still run when the time has passed fail when the server stops.
    let _ = timeout(limit, state.inference.generations.finished()).await;
}
