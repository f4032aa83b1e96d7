//! Takes requests from the queue of an upstream and starts a task for each of them, or wakes the
//! task of its model.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tinkex_wire::ModelId;
use tokio::sync::Notify;

use super::Upstream;
use super::run::{RunTask, delete_unreferenced};
use crate::backend::{UpstreamEntry, UpstreamJob};
use crate::operation::{Operation, QueuedRequest};
use crate::task::TaskHandle;

/// Maximum time between two looks at the queue: a request may have waited long enough for missing
/// sequence numbers.
const MAX_WAIT: Duration = Duration::from_secs(1);

/// Task that drives a model. Dropping it aborts the task.
struct ModelTask {
    wake: Arc<Notify>,
    task: TaskHandle,
}

impl Drop for ModelTask {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Dispatches requests until the server stops. The tasks of the models end with it: a stopped
/// server must send nothing to models that the next one continues with.
pub(super) async fn run(upstream: Arc<Upstream>) {
    let mut models: HashMap<ModelId, ModelTask> = HashMap::new();
    clean_up_ended_runs(&upstream);
    loop {
        let work = upstream.queue().take_unordered();
        for sample in work.samples {
            start_sample(&upstream, sample);
        }
        for id in work.cancelled {
            upstream.samplers.cancel(&upstream, &id);
        }
        for model in work.dropped {
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
            return;
        }
        for model in upstream.queue().waiting_models() {
            wake(&upstream, &mut models, model);
        }
        upstream.queue().changed(MAX_WAIT).await;
    }
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
        leftovers.map(|run| run.id.clone()).collect()
    };
    for model in leftovers {
        let cleanup = RunTask::clean_up(Arc::clone(upstream), model);
        upstream.state.executor.spawn("upstream cleanup", cleanup);
    }
}

/// Tells the task of a model that there are requests, and starts it if there is none.
fn wake(upstream: &Arc<Upstream>, models: &mut HashMap<ModelId, ModelTask>, model: ModelId) {
    // A task ends by itself only if it panics, which is a bug.
    if models.get(&model).is_some_and(|model| model.task.is_finished()) {
        models.remove(&model);
    }
    let task = models.entry(model.clone()).or_insert_with(|| {
        let wake = Arc::new(Notify::new());
        let run = RunTask::new(Arc::clone(upstream), model, Arc::clone(&wake)).run();
        ModelTask { wake, task: upstream.state.executor.spawn("upstream run", run) }
    });
    task.wake.notify_one();
}

fn start_sample(upstream: &Arc<Upstream>, request: QueuedRequest) {
    let QueuedRequest { id, bytes, operation, .. } = request;
    let Operation::Relay(sample) = operation else { return };
    let held = (bytes, sample.sink.clone());
    let task = super::sampling::run(Arc::clone(upstream), id.clone(), *sample);
    upstream.samplers.start(upstream, &id, held, task);
}
