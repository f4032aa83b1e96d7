//! Requests restored after a restart: finds those that kill the process.
//!
//! A request that needs too much memory, or meets a bug that aborts, would end every process that
//! executes it. Requests that the process had accepted before it died are therefore counted in the
//! database each time they start. One that has started before and has no result is a suspect: it
//! runs alone, so that no other request is blamed if the process dies again. A suspect that has
//! started [`MAX_STARTS`] times is not executed any more. New requests are not counted, because a
//! commit before every start would slow down all of them.

use std::collections::VecDeque;

use tinkex_wire::RequestId;
use tokio::sync::oneshot;

use super::Worker;
use crate::operation::QueuedRequest;
use crate::outcome::{Outcome, record_outcome};
use crate::store::Record;

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
pub(super) struct Suspects(VecDeque<QueuedRequest>);

impl Suspects {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn remove(&mut self, id: &RequestId) -> Option<QueuedRequest> {
        let at = self.0.iter().position(|request| request.id == *id)?;
        self.0.remove(at)
    }
}

impl Worker {
    /// Starts new and restored samples; suspects wait until they can run alone.
    pub(super) async fn begin_samples(&mut self, samples: Vec<QueuedRequest>) {
        let restored = |request: &&QueuedRequest| request.starts == Some(0);
        let ids: Vec<RequestId> = samples.iter().filter(restored).map(|r| r.id.clone()).collect();
        self.count_starts(ids).await;
        for request in samples {
            if request.is_suspect() {
                self.suspects.0.push_back(request);
            } else {
                self.begin_sample(request);
            }
        }
    }

    /// Executes the next suspect sample, alone: first finishes the samples that are running.
    pub(super) async fn run_suspect_sample(&mut self) {
        let Some(request) = self.suspects.0.pop_front() else { return };
        self.finish_samples();
        self.count_starts(vec![request.id.clone()]).await;
        self.begin_sample(request);
        self.finish_samples();
    }

    /// Prepares the execution of a request of a model: counts its start, and first finishes the
    /// running samples if it is a suspect.
    pub(super) async fn prepare_restored(&mut self, request: &QueuedRequest) {
        if request.is_suspect() {
            self.finish_samples();
        }
        if request.starts.is_some() {
            self.count_starts(vec![request.id.clone()]).await;
        }
    }

    /// Cancels a suspect sample that waits. Returns whether there was one.
    pub(super) fn cancel_suspect(&mut self, id: &RequestId) -> bool {
        let Some(request) = self.suspects.remove(id) else { return false };
        self.state.engine_queue().sample_finished(request.bytes);
        record_outcome(&self.state, &mut self.state.store(), id, Outcome::cancelled());
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
        self.state.store().put(vec![Record::RequestsStarted { ids }], on_written);
        // A failed write leaves the start uncounted, which costs one more death of the process at
        // worst. Waiting for a full disk would stop all requests.
        let _ = written.await;
    }
}
