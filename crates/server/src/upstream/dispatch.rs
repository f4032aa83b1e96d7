//! Takes requests from the queue of an upstream and starts a task for each of them, or wakes the
//! task of its model.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tinkex_wire::ModelId;
use tokio::sync::{Notify, oneshot, watch};
use tokio::time::Instant;

use super::Upstream;
use super::remote_weights::delete_unreferenced;
use super::run::RunTask;
use crate::backend::{UpstreamEntry, UpstreamJob};
use crate::operation::{Operation, QueuedRequest};
use crate::task::TaskHandle;

/// Maximum time between two checks of the queue: no notification tells that a request has waited
/// long enough for missing sequence numbers.
const MAX_WAIT: Duration = Duration::from_secs(1);

/// Maximum time for which the stop of the server waits until the models are saved.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Task that drives a model. Dropping it aborts the task.
struct ModelTask {
    wake: Arc<Notify>,
    /// Asks the task to save the model and to end.
    stop: watch::Sender<bool>,
    /// Receives whether the task has saved the model when it ended.
    saved: oneshot::Receiver<bool>,
    task: TaskHandle,
}

impl Drop for ModelTask {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Dispatches requests until the server stops. Returns the number of models that were saved because
/// of it. The tasks of the models end with this one: a stopped server must send nothing to models
/// that the next one continues with.
pub(super) async fn run(upstream: Arc<Upstream>) -> usize {
    let mut models: BTreeMap<ModelId, ModelTask> = BTreeMap::new();
    clean_up_ended_runs(&upstream);
    loop {
        let work = upstream.queue().take_unordered();
        for sample in work.samples {
            start_sample(&upstream, sample);
        }
        for id in work.cancelled {
            upstream.samples.cancel(&upstream, &id);
        }
        // In an order that does not depend on the maps of the store.
        for model in work.dropped.into_iter().collect::<BTreeSet<ModelId>>() {
            drop(models.remove(&model));
            let cleanup = RunTask::clean_up(Arc::clone(&upstream), model);
            upstream.state.executor.spawn("upstream cleanup", cleanup);
        }
        for job in upstream.entry().map(UpstreamEntry::take_jobs).unwrap_or_default() {
            let owner = Arc::clone(&upstream);
            let work = async move {
                match job {
                    UpstreamJob::Delete(folder) => delete_unreferenced(&owner, &folder).await,
                    UpstreamJob::Download(download) => owner.download(download).await,
                }
            };
            upstream.state.executor.spawn("upstream job", work);
        }
        if work.stopping {
            return save_models(models).await;
        }
        for model in upstream.queue().waiting_models() {
            wake(&upstream, &mut models, model);
        }
        upstream.queue().changed(MAX_WAIT).await;
    }
}

/// Ends the tasks of the models, which save the models that are idle. Returns the number of saved
/// models.
async fn save_models(mut models: BTreeMap<ModelId, ModelTask>) -> usize {
    let deadline = Instant::now() + STOP_TIMEOUT;
    for model in models.values() {
        // Sending fails if the task has panicked.
        let _ = model.stop.send(true);
    }
    let mut saved = 0;
    for model in models.values_mut() {
        let result = tokio::time::timeout_at(deadline, &mut model.saved).await;
        saved += usize::from(matches!(result, Ok(Ok(true))));
    }
    saved
}

/// Removes what the runs of ended sessions have left on the upstream.
fn clean_up_ended_runs(upstream: &Arc<Upstream>) {
    let leftovers: Vec<ModelId> = {
        let store = upstream.state.store();
        let ended = |id| store.sessions.get(id).is_none_or(|session| session.row.end.is_some());
        let runs = store.runs.values().map(|entry| &entry.row);
        let leftovers = runs.filter(|run| {
            run.upstream.as_ref().is_some_and(|remote| {
                *remote.name == *upstream.name && (remote.model.is_some() || run.snapshot.is_some())
            }) && ended(&run.session)
        });
        let mut leftovers: Vec<ModelId> = leftovers.map(|run| run.id.clone()).collect();
        // The order of the requests to the upstream does not depend on the map.
        leftovers.sort();
        leftovers
    };
    for model in leftovers {
        let cleanup = RunTask::clean_up(Arc::clone(upstream), model);
        upstream.state.executor.spawn("upstream cleanup", cleanup);
    }
}

/// Tells the task of a model that there are requests, and starts it if there is none.
fn wake(upstream: &Arc<Upstream>, models: &mut BTreeMap<ModelId, ModelTask>, model: ModelId) {
    // A task ends by itself only if it panics, which is a bug.
    if models.get(&model).is_some_and(|model| model.task.is_finished()) {
        models.remove(&model);
    }
    let task = models.entry(model.clone()).or_insert_with(|| {
        let (wake, (stop, stopped)) = (Arc::new(Notify::new()), watch::channel(false));
        let (sender, saved) = oneshot::channel();
        let run = RunTask::new(Arc::clone(upstream), model, Arc::clone(&wake), stopped).run();
        let run = async move {
            // Sending fails if the dispatcher does not wait any more.
            let _ = sender.send(run.await);
        };
        let task = upstream.state.executor.spawn("upstream run", run);
        ModelTask { wake, stop, saved, task }
    });
    task.wake.notify_one();
}

fn start_sample(upstream: &Arc<Upstream>, request: QueuedRequest) {
    let QueuedRequest { id, bytes, operation, .. } = request;
    let Operation::Relay(sample) = operation else { return };
    let held = (bytes, sample.sink.clone());
    let task = super::sampling::run(Arc::clone(upstream), id.clone(), *sample);
    upstream.samples.start(upstream, &id, held, task);
}
