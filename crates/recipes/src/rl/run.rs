//! [`RlRun`]: a run in progress, and its outcome.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_util::Stream;
use tinkex::Result;
use tinkex_transport::task::Task;
use tinkex_wire::TinkerPath;
use tokio::sync::{mpsc, watch};

use super::report::RlReport;
use crate::stop::StopHandle;

/// Run in progress: a stream of step reports.
///
/// The run continues only while the program reads the stream: the run waits until each report has
/// been received. The stream ends after the last step, after [`StopHandle::stop`] or after an
/// error.
///
/// # Cancel safety
/// Dropping the value stops the run at once, without a new checkpoint. The run folder still refers
/// to the last checkpoint, from which the run can be resumed.
pub struct RlRun {
    pub(super) reports: mpsc::Receiver<Result<RlReport>>,
    pub(super) outcome: watch::Receiver<Option<RlOutcome>>,
    pub(super) stop: StopHandle,
    pub(super) model_id: String,
    pub(super) from: u64,
    pub(super) _task: Task,
}

/// Final state of a run that has ended without an error.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct RlOutcome {
    /// Number of finished steps.
    pub step: u64,
    /// Whether all steps are finished.
    pub finished: bool,
    /// Last training checkpoint.
    pub checkpoint: Option<TinkerPath>,
    /// Sampler checkpoint of the last weights.
    pub sampler: Option<TinkerPath>,
    /// Checkpoint with the highest mean reward.
    pub best: Option<BestCheckpoint>,
}

/// Checkpoint with the highest mean reward of a run.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct BestCheckpoint {
    /// Number of steps after which the checkpoint was saved.
    pub step: u64,
    /// Mean reward of the evaluation prompts. Without evaluation prompts, mean reward of the batch
    /// that the weights of the checkpoint sampled.
    pub reward: f64,
    /// Path of the training checkpoint.
    pub path: TinkerPath,
}

impl RlRun {
    /// Waits for the report of the next step. Returns `None` at the end of the run.
    ///
    /// # Errors
    /// The first error ends the run.
    ///
    /// # Cancel safety
    /// Cancel safe: no report is lost.
    pub async fn next(&mut self) -> Option<Result<RlReport>> {
        self.reports.recv().await
    }

    /// Returns a handle that stops the run, for example after Ctrl-C.
    #[must_use]
    pub fn stop_handle(&self) -> StopHandle {
        self.stop.clone()
    }

    /// Returns the id of the training run on the server.
    #[must_use]
    pub fn run_id(&self) -> &str {
        &self.model_id
    }

    /// Returns the number of steps that were finished when this process resumed the run; 0 for a
    /// new run.
    #[must_use]
    pub fn resumed_from(&self) -> u64 {
        self.from
    }

    /// Returns the outcome, once the stream has ended without an error.
    #[must_use]
    pub fn outcome(&self) -> Option<RlOutcome> {
        self.outcome.borrow().clone()
    }
}

impl Stream for RlRun {
    type Item = Result<RlReport>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.reports.poll_recv(context)
    }
}

impl fmt::Debug for RlRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RlRun").field("run_id", &self.model_id).finish_non_exhaustive()
    }
}
