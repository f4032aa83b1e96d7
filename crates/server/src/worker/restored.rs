//! Execution of requests that were restored after a restart. Finds the requests that kill the
//! process.
//!
//! A request that needs too much memory, or meets a bug that aborts, would end every process that
//! executes it. Requests that the process had accepted before it died are therefore counted in the
//! database each time they start. A request that has started before and has no result is a suspect.
//! A suspect runs alone, and the [`CrashRecord`](super::crash_record::CrashRecord) says whether the
//! process died meanwhile: only such a death is attributed to the request. A pass runs alone for one
//! micro-batch, whose progress is then persisted. A request to which several deaths are attributed
//! is not executed any more. New requests are not counted, because a commit before every start
//! would slow down all requests.

use std::collections::VecDeque;

use tinkex_backend::operation::ModelOperation;
use tinkex_backend::outcome::Outcome;
use tinkex_backend::queue::{QueuedOperation, QueuedSample, is_suspect};
use tinkex_store::log;
use tinkex_store::store::{FailureCategory, Record};
use tinkex_wire::RequestId;
use tokio::sync::oneshot;

use super::Worker;
use crate::operation::{EngineOperation, EngineSampling};

/// Failure message of a request that is not executed any more.
const KILLED_THE_PROCESS: &str = concat!(
    "the server process ended each time it executed this request alone; the request may need more ",
    "memory than the machine has, or trigger a bug. Send a smaller request",
);

/// Suspect samples that wait until they can run alone, oldest first.
#[derive(Default)]
pub(super) struct CrashSuspectSamples(VecDeque<QueuedSample<EngineSampling>>);

impl CrashSuspectSamples {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn remove(&mut self, id: &RequestId) -> Option<QueuedSample<EngineSampling>> {
        let at = self.0.iter().position(|request| request.id == *id)?;
        self.0.remove(at)
    }
}

impl Worker {
    /// Starts new and restored samples; suspects wait until they can run alone.
    pub(super) async fn begin_samples(&mut self, samples: Vec<QueuedSample<EngineSampling>>) {
        let restored = |request: &&QueuedSample<EngineSampling>| request.starts == Some(0);
        let ids: Vec<RequestId> = samples.iter().filter(restored).map(|r| r.id.clone()).collect();
        self.count_starts(ids).await;
        for request in samples {
            if is_suspect(request.starts) {
                self.suspects.0.push_back(request);
            } else {
                self.begin_sample(request);
            }
        }
    }

    /// Executes the next suspect sample alone, after it has finished the running samples.
    pub(super) async fn run_suspect_sample(&mut self) {
        let Some(request) = self.suspects.0.pop_front() else { return };
        let id = request.id.clone();
        if self.is_fatal(&id) {
            self.context.queue().sample_finished(request.bytes);
            let failed = Outcome::failed(FailureCategory::Server, KILLED_THE_PROCESS);
            return self.context.backend.outcomes.record_locking(&id, failed);
        }
        self.finish_samples();
        self.count_starts(vec![id.clone()]).await;
        self.crashes.begin(&id, 0);
        self.begin_sample(request);
        self.finish_samples();
        self.crashes.survived(&id);
    }

    /// Prepares the execution of a request of a model: counts its start, and first finishes the
    /// running samples if it is a suspect. Makes a request fail that must not be executed again.
    pub(super) async fn prepare_restored(
        &mut self,
        request: &mut QueuedOperation<EngineOperation>,
    ) {
        if is_suspect(request.starts) {
            if self.is_fatal(&request.id) {
                let message = KILLED_THE_PROCESS.to_owned();
                request.operation = ModelOperation::Fail(FailureCategory::Server, message);
                request.starts = None;
                return;
            }
            self.finish_samples();
        }
        if request.starts.is_some() {
            self.count_starts(vec![request.id.clone()]).await;
        }
    }

    /// Records that the execution of a suspect has ended. A transient fault says nothing about the
    /// request, which remains a suspect.
    pub(super) fn end_suspect(&mut self, id: &RequestId, outcome: &Outcome) {
        if outcome.transient {
            self.crashes.interrupted(id);
        } else {
            self.crashes.survived(id);
        }
    }

    /// Returns whether a request must not be executed again.
    fn is_fatal(&self, id: &RequestId) -> bool {
        let is_fatal = self.crashes.is_fatal(id);
        if is_fatal {
            tracing::error!(
                target: log::REQUEST,
                request_id = %id,
                "a request fails because the process ended each time it was executed alone"
            );
        }
        is_fatal
    }

    /// Cancels a waiting suspect sample. Returns whether the request was a waiting suspect.
    pub(super) fn cancel_suspect(&mut self, id: &RequestId) -> bool {
        let Some(request) = self.suspects.remove(id) else { return false };
        self.context.queue().sample_finished(request.bytes);
        self.context.backend.outcomes.record_locking(id, Outcome::cancelled());
        true
    }

    fn finish_samples(&mut self) {
        while !self.engines.is_idle() {
            self.step_samples();
        }
    }

    /// Counts a start of each request and waits until the count is durable.
    async fn count_starts(&mut self, ids: Vec<RequestId>) {
        if ids.is_empty() {
            return;
        }
        let (sender, written) = oneshot::channel();
        let on_written = Box::new(move |result| drop(sender.send(result)));
        self.context.store().put(vec![Record::RequestsStarted { ids }], on_written);
        // Continue after a failed write. The start is then not counted, so the process may die one
        // more time because of the request. Waiting for a full disk would stop all requests.
        let _ = written.await;
    }
}
