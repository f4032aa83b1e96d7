//! [`SampleTasks`]: the tasks of the samples on an upstream.

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use tinkex_backend::outcome::Outcome;
use tinkex_backend::upstream::ResponseSink;
use tinkex_store::error::ServerError;
use tinkex_store::executor::TaskHandle;
use tinkex_store::record::FailureCategory;
use tinkex_wire::RequestId;

use crate::Upstream;

/// Samples of an upstream that have no outcome yet.
#[derive(Default)]
pub(crate) struct SampleTasks(Mutex<HashMap<RequestId, SampleTask>>);

/// A sample that has no outcome yet. The code that removes a sample from the table must record its
/// outcome.
pub(super) struct SampleTask {
    task: Option<TaskHandle>,
    bytes: usize,
    pub(super) sink: Option<Arc<dyn ResponseSink>>,
}

/// Guard that fails a sample whose task panics.
struct SampleGuard {
    upstream: Arc<Upstream>,
    id: RequestId,
}

impl Drop for SampleGuard {
    /// Records a failure if the task is panicking. If the task was aborted because the server
    /// stops, the sample gets no outcome and is executed after the next start.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        let Some(task) = self.upstream.samples.end(&self.upstream, &self.id) else { return };
        let message = "internal error: the task of the sample panicked";
        match task.sink {
            Some(sink) => sink.finish(Err(ServerError::Internal(message.to_owned()))),
            None => {
                let failed = Outcome::failed(FailureCategory::Server, message);
                self.upstream.context.outcomes.record_locking(&self.id, failed);
            }
        }
    }
}

impl SampleTasks {
    fn lock(&self) -> MutexGuard<'_, HashMap<RequestId, SampleTask>> {
        self.0.lock()
    }

    /// Starts the task of a sample of `bytes` bytes.
    pub(crate) fn start(
        &self,
        upstream: &Arc<Upstream>,
        id: &RequestId,
        (bytes, sink): (usize, Option<Arc<dyn ResponseSink>>),
        task: impl Future<Output = ()> + Send + 'static,
    ) {
        self.lock().insert(id.clone(), SampleTask { task: None, bytes, sink });
        let guard = SampleGuard { upstream: Arc::clone(upstream), id: id.clone() };
        // Boxed before it is wrapped: an async block reserves the size of a future that it owns and
        // awaits twice, and the executor wraps the task once more.
        let task = Box::pin(task);
        let guarded = async move {
            task.await;
            drop(guard);
        };
        let task = upstream.context.executor.spawn("upstream sample", guarded);
        // The task may have ended already.
        if let Some(running) = self.lock().get_mut(id) {
            running.task = Some(task);
        }
    }

    /// Removes a sample, and stops counting it in the queue. Returns `None` if the sample already
    /// has an outcome.
    pub(super) fn end(&self, upstream: &Upstream, id: &RequestId) -> Option<SampleTask> {
        let task = self.lock().remove(id)?;
        upstream.handle.queue.sample_finished(task.bytes);
        Some(task)
    }

    /// Cancels a sample. Has no effect if the sample has ended.
    pub(crate) fn cancel(&self, upstream: &Upstream, id: &RequestId) {
        let Some(running) = self.end(upstream, id) else { return };
        if let Some(task) = &running.task {
            task.abort();
        }
        if running.sink.is_none() {
            upstream.context.outcomes.record_locking(id, Outcome::cancelled());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tinkex_backend::context::BackendContext;
    use tinkex_backend::queue::{QueuedSample, RequestQueue as _};
    use tinkex_backend::upstream::{RelayedSample, UpstreamHandle, UpstreamSettings};
    use tinkex_store::clock::OperatingSystem;
    use tinkex_store::durable::SharedStore;
    use tinkex_store::executor::Executor;
    use tinkex_store::history::{HistoryOptions, HistoryRecorder};
    use tinkex_store::random::RandomSource;
    use tinkex_store::store::Store;
    use tinkex_store::user::{Account, UserId};

    use super::*;
    use crate::UpstreamServer;

    #[tokio::test]
    async fn a_sample_whose_task_panics_no_longer_counts() {
        let data = tempfile::tempdir().unwrap();
        let executor = Executor::threads();
        let store = Store::open(data.path(), 1 << 20, &executor, Arc::new(OperatingSystem));
        let store = SharedStore::new(store.unwrap());
        let handle = Arc::new(UpstreamHandle::new(
            "up".into(),
            "http://127.0.0.1:1".to_owned(),
            Duration::from_secs(60),
            store.clock().clone(),
            |_| {},
        ));
        let random = Arc::new(RandomSource::System);
        let history = Arc::new(HistoryRecorder::new(HistoryOptions::off()));
        let context = BackendContext::new(store, history, executor, random);
        let service = UpstreamServer::new("http://127.0.0.1:1", None).service().unwrap();
        let settings = UpstreamSettings { timeout: Duration::from_secs(60), checkpoint_every: 10 };
        let upstream = Upstream::new(service, Arc::clone(&handle), context, settings);
        let request = tinkex_wire::SampleRequest::new(
            tinkex_wire::ModelInput::from(vec![1_u32]),
            tinkex_wire::SamplingParams::new(),
        );
        let account = Account { owner: UserId::default(), session: "s".into() };
        let sample = Box::new(RelayedSample {
            base_model: "m".to_owned(),
            path: None,
            account,
            request,
            sink: None,
        });
        let id = RequestId::from("r");
        let queue = &handle.queue;
        queue.push_sample(QueuedSample { id: id.clone(), bytes: 10, starts: None, sample });
        assert_eq!(queue.take_unordered().samples.len(), 1);
        let (ended, has_ended) = tokio::sync::oneshot::channel::<()>();
        let panics = async move {
            let _ended = ended;
            panic!("the test expects this");
        };
        upstream.samples.start(&upstream, &id, (10, None), panics);
        // The sender is dropped before the guard: wait for the guard, too.
        assert!(has_ended.await.is_err());
        while Arc::strong_count(&upstream) > 1 {
            tokio::task::yield_now().await;
        }
        assert_eq!(queue.size(), (0, 0));
        assert!(upstream.samples.lock().is_empty());
    }
}
