//! Tasks of the samples on an upstream.

use std::collections::HashMap;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tinkex_wire::RequestId;

use crate::error::ServerError;
use crate::inference::TokenSink;
use crate::outcome::{Outcome, record_outcome};
use crate::store::FailureCategory;
use crate::task::TaskHandle;
use crate::upstream::Upstream;

/// Samples of an upstream that have no outcome yet.
#[derive(Default)]
pub(in crate::upstream) struct SampleTasks(Mutex<HashMap<RequestId, SampleTask>>);

/// A sample that has no outcome yet. What removes it from the table records its outcome.
pub(super) struct SampleTask {
    task: Option<TaskHandle>,
    bytes: usize,
    pub(super) sink: Option<TokenSink>,
}

/// Fails a sample whose task panics.
struct SampleGuard {
    upstream: Arc<Upstream>,
    id: RequestId,
}

impl Drop for SampleGuard {
    /// If the server stops, the sample has no outcome and is executed after the next start.
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
                let state = &self.upstream.state;
                record_outcome(state, &mut state.store(), &self.id, failed);
            }
        }
    }
}

impl SampleTasks {
    fn lock(&self) -> MutexGuard<'_, HashMap<RequestId, SampleTask>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the task of a sample of `bytes` bytes.
    pub(in crate::upstream) fn start(
        &self,
        upstream: &Arc<Upstream>,
        id: &RequestId,
        (bytes, sink): (usize, Option<TokenSink>),
        task: impl Future<Output = ()> + Send + 'static,
    ) {
        self.lock().insert(id.clone(), SampleTask { task: None, bytes, sink });
        let guard = SampleGuard { upstream: Arc::clone(upstream), id: id.clone() };
        let guarded = async move {
            task.await;
            drop(guard);
        };
        let task = upstream.state.executor.spawn("upstream sample", guarded);
        // The task may have ended already.
        if let Some(running) = self.lock().get_mut(id) {
            running.task = Some(task);
        }
    }

    /// Removes a sample and ends its count in the queue; `None` if it has an outcome.
    pub(super) fn end(&self, upstream: &Upstream, id: &RequestId) -> Option<SampleTask> {
        let task = self.lock().remove(id)?;
        upstream.queue().sample_finished(task.bytes);
        Some(task)
    }

    /// Cancels a sample; has no effect if it has ended.
    pub(in crate::upstream) fn cancel(&self, upstream: &Upstream, id: &RequestId) {
        let Some(running) = self.end(upstream, id) else { return };
        if let Some(task) = &running.task {
            task.abort();
        }
        if running.sink.is_none() {
            let state = &upstream.state;
            record_outcome(state, &mut state.store(), id, Outcome::cancelled());
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::backend::Backend;
    use crate::clock::OperatingSystem;
    use crate::operation::{Operation, QueuedRequest, RelayedSample};
    use crate::options::ServerOptions;
    use crate::random::RandomSource;
    use crate::server::OpenedServer;
    use crate::task::Executor;

    use super::*;

    #[tokio::test]
    async fn bug_a_sample_whose_task_panicked_counted_for_ever() {
        let data = tempfile::tempdir().unwrap();
        let options = ServerOptions::new(data.path()).upstream("up", "http://127.0.0.1:1", None);
        let clocks = Arc::new(OperatingSystem);
        let opened =
            OpenedServer::open(options, Executor::Threads, RandomSource::System, clocks).unwrap();
        let state = opened.state;
        let upstream = Upstream::new(&state, &state.options.upstreams[0]).unwrap();
        let queue = state.backends.queue(&Backend::Upstream("up".into()));
        let request = tinkex_wire::SampleRequest::new(
            tinkex_wire::ModelInput::from(vec![1_u32]),
            tinkex_wire::SamplingParams::new(),
        );
        let sample = RelayedSample {
            upstream: "up".into(),
            base_model: "m".to_owned(),
            path: None,
            session: "s".into(),
            request,
            sink: None,
        };
        let queued = QueuedRequest::new("r".into(), 10, Operation::Relay(Box::new(sample)));
        assert!(queue.push(queued).is_ok());
        assert_eq!(queue.take_unordered().samples.len(), 1);
        let (ended, has_ended) = tokio::sync::oneshot::channel::<()>();
        let panics = async move {
            let _ended = ended;
            panic!("the test expects this");
        };
        upstream.samples.start(&upstream, &"r".into(), (10, None), panics);
        // The sender is dropped before the guard: wait for the guard, too.
        assert!(has_ended.await.is_err());
        while Arc::strong_count(&upstream) > 1 {
            tokio::task::yield_now().await;
        }
        assert_eq!(queue.size(), (0, 0));
        assert!(upstream.samples.lock().is_empty());
    }
}
