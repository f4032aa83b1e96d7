//! Execution of requests that were restored after a restart. Finds the requests that kill the
//! process.
//!
//! A request that needs too much memory, or meets a bug that aborts, would end every process that
//! executes it. Requests that the process had accepted before it died are therefore counted in the
//! database each time they start. A request that has started before and has no result is a suspect.
//! A suspect runs alone, so that no other request is suspected if the process dies again. A suspect
//! that has started [`MAX_STARTS`] times is not executed any more. New requests are not counted,
//! because a commit before every start would slow down all requests.

use std::collections::VecDeque;

use tinkex_backend::outcome::Outcome;
use tinkex_backend::queue::{QueuedOperation, QueuedSample, is_suspect};
use tinkex_store::store::Record;
use tinkex_wire::RequestId;
use tokio::sync::oneshot;

use super::Worker;
use crate::operation::{EngineOperation, EngineSampling};

/// Number of starts after restarts, all without a result, after which a request fails. The process
/// has then died three times: when it first executed the request, and after each of these starts.
pub(crate) const MAX_STARTS: u32 = 2;

/// Failure message of a request that has started [`MAX_STARTS`] times.
pub(crate) const KILLED_THE_PROCESS: &str = concat!(
    "the server process ended three times while it executed this request; it may need more ",
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
        self.finish_samples();
        self.count_starts(vec![request.id.clone()]).await;
        self.begin_sample(request);
        self.finish_samples();
    }

    /// Prepares the execution of a request of a model: counts its start, and first finishes the
    /// running samples if it is a suspect.
    pub(super) async fn prepare_restored(&mut self, request: &QueuedOperation<EngineOperation>) {
        if is_suspect(request.starts) {
            self.finish_samples();
        }
        if request.starts.is_some() {
            self.count_starts(vec![request.id.clone()]).await;
        }
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
