//! Takes requests from the queue of an upstream. Starts a task for each sample, and wakes the task
//! of a model that has requests.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tinkex_backend::queue::QueuedSample;
use tinkex_backend::upstream::{RelayedSample, UpstreamJob};
use tinkex_store::executor::TaskHandle;
use tinkex_wire::ModelId;
use tokio::sync::{Notify, oneshot, watch};
use tokio::time::Instant;

use super::Upstream;
use super::remote_weights::delete_unreferenced;
use super::run::RunTask;

/// Maximum time between two checks of the queue. The queue does not notify the dispatcher when a
/// request has waited long enough for a missing sequence number (the gap timeout), so the
/// dispatcher must check regularly.
const MAX_WAIT: Duration = Duration::from_secs(1);

/// Maximum time for which a stopping server waits until the models are saved.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Handle of the task that executes the requests of a model. Dropping the handle aborts the task.
struct ModelTask {
    wake: Arc<Notify>,
    /// Set to true to make the task save the model and end.
    stop: watch::Sender<bool>,
    /// Receives whether the task has saved the model, once the task has ended.
    saved: oneshot::Receiver<bool>,
    task: TaskHandle,
}

impl Drop for ModelTask {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Dispatches requests until the server stops. Returns the number of models that were saved because
/// the server stops. Dropping this future aborts the tasks of the models: a stopped server must not
/// send requests to models that the next server process continues with.
pub(super) async fn run(upstream: Arc<Upstream>) -> usize {
    let mut models: BTreeMap<ModelId, ModelTask> = BTreeMap::new();
    clean_up_ended_runs(&upstream);
    loop {
        let work = upstream.handle.queue.take_unordered();
        for sample in work.samples {
            start_sample(&upstream, sample);
        }
        for id in work.cancelled {
            upstream.samples.cancel(&upstream, &id);
        }
        // Sort the models: the order of requests to the upstream must not depend on the store's
        // hash maps, so that simulations can be repeated.
        for model in work.dropped.into_iter().collect::<BTreeSet<ModelId>>() {
            drop(models.remove(&model));
            let cleanup = RunTask::clean_up(Arc::clone(&upstream), model);
            upstream.context.executor.spawn("upstream cleanup", cleanup);
        }
        for job in upstream.handle.take_jobs() {
            let owner = Arc::clone(&upstream);
            let work = async move {
                match job {
                    UpstreamJob::Delete(weights) => delete_unreferenced(&owner, weights).await,
                    UpstreamJob::Download(download) => owner.download(download).await,
                }
            };
            upstream.context.executor.spawn("upstream job", work);
        }
        if work.stopping {
            return save_models(models).await;
        }
        for model in upstream.handle.queue.waiting_models() {
            wake(&upstream, &mut models, model);
        }
        upstream.handle.queue.changed(MAX_WAIT).await;
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

/// Removes the models and recovery checkpoints of the runs of ended sessions from the upstream.
fn clean_up_ended_runs(upstream: &Arc<Upstream>) {
    let leftovers: Vec<ModelId> = {
        let store = upstream.context.store.lock();
        let ended = |id| store.sessions.get(id).is_none_or(|session| session.row.end.is_some());
        let runs = store.runs.values().map(|entry| &entry.row);
        let leftovers = runs.filter(|run| {
            run.upstream.as_ref().is_some_and(|remote| {
                *remote.name == *upstream.handle.name
                    && (remote.model.is_some() || run.snapshot.is_some())
            }) && ended(&run.session)
        });
        let mut leftovers: Vec<ModelId> = leftovers.map(|run| run.id.clone()).collect();
        // Sort the runs: the order of requests to the upstream must not depend on the hash map.
        leftovers.sort();
        leftovers
    };
    for model in leftovers {
        let cleanup = RunTask::clean_up(Arc::clone(upstream), model);
        upstream.context.executor.spawn("upstream cleanup", cleanup);
    }
}

/// Notifies the task of a model that the queue has requests for the model. Starts the task if it is
/// not running.
fn wake(upstream: &Arc<Upstream>, models: &mut BTreeMap<ModelId, ModelTask>, model: ModelId) {
    // A task ends by itself only if it panics, which is a bug.
    if models.get(&model).is_some_and(|model| model.task.is_finished()) {
        models.remove(&model);
    }
    let task = models.entry(model.clone()).or_insert_with(|| {
        let wake = Arc::new(Notify::new());
        let (stop, stopped) = watch::channel(false);
        let (sender, saved) = oneshot::channel();
        let run = RunTask::new(Arc::clone(upstream), model, Arc::clone(&wake), stopped).run();
        let run = async move {
            // Sending fails if the dispatcher has stopped waiting.
            let _ = sender.send(run.await);
        };
        let task = upstream.context.executor.spawn("upstream run", run);
        ModelTask { wake, stop, saved, task }
    });
    task.wake.notify_one();
}

fn start_sample(upstream: &Arc<Upstream>, request: QueuedSample<Box<RelayedSample>>) {
    let QueuedSample { id, bytes, sample, .. } = request;
    let held = (bytes, sample.sink.clone());
    let task = super::sampling::run(Arc::clone(upstream), id.clone(), *sample);
    upstream.samples.start(upstream, &id, held, task);
}
