//! Upstreams: other servers of the Tinker API, which train and sample on behalf of this server.
//!
//! The server admits requests to an upstream through its [`UpstreamHandle`]. The gateway executes
//! them; the server calls it through the trait [`UpstreamDriver`].

use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use tinkex_autodiff::LossProgram;
use tinkex_store::clock::Clock;
use tinkex_store::error::ServerError;
use tinkex_store::user::Account;
use tinkex_store::weights::{RemoteWeights, WeightsLocation};
use tinkex_wire::{SampleRequest, SampleResponse};
use tokio::sync::oneshot;

use crate::context::BackendContext;
use crate::operation::{ModelOperation, TrainingOperation};
use crate::queue::Queue;

/// An operation on a model of an upstream.
pub type UpstreamOperation = ModelOperation<UpstreamTraining, RemoteWeights>;

/// Queue of an upstream.
pub type UpstreamQueue = Queue<UpstreamOperation, Box<RelayedSample>>;

/// A training request to a model on an upstream.
pub enum UpstreamTraining {
    /// Forwards the request unchanged.
    Relay(RelayedTraining),
    CustomLoss(CustomLossTraining),
}

/// A training pass with a custom loss: this process computes the loss from log-probabilities of the
/// upstream, and the upstream accumulates the gradient.
pub struct CustomLossTraining {
    pub body: Bytes,
    pub loss: Arc<LossProgram>,
}

/// A training request that is forwarded unchanged.
#[derive(Clone)]
pub struct RelayedTraining {
    pub kind: RelayedKind,
    pub body: Bytes,
}

/// Kind of a forwarded training request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RelayedKind {
    /// A forward or forward-backward pass.
    Pass,
    OptimStep,
}

impl TrainingOperation for UpstreamTraining {
    fn name(&self) -> &'static str {
        match self {
            Self::Relay(relayed) => relayed.name(),
            Self::CustomLoss(training) => training.name(),
        }
    }

    fn extra_bytes(&self) -> usize {
        match self {
            Self::Relay(relayed) => relayed.body.len(),
            Self::CustomLoss(training) => training.extra_bytes(),
        }
    }
}

impl TrainingOperation for CustomLossTraining {
    fn name(&self) -> &'static str {
        "forward_backward"
    }

    fn extra_bytes(&self) -> usize {
        0
    }
}

impl RelayedTraining {
    /// Returns the name for log events.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self.kind {
            RelayedKind::Pass => "forward_backward",
            RelayedKind::OptimStep => "optim_step",
        }
    }
}

/// A sampling or inference request that an upstream executes.
pub struct RelayedSample {
    pub base_model: String,
    /// Path of the weights on the upstream; `None` samples from the base model.
    pub path: Option<String>,
    /// Account to which the usage of tokens is charged.
    pub account: Account,
    /// The request, with a seed.
    pub request: SampleRequest,
    /// Receives the response to an inference request; `None` for a sample of the Tinker API.
    pub sink: Option<Arc<dyn ResponseSink>>,
}

/// Receives the response to an inference request, which has no stored outcome.
pub trait ResponseSink: Send + Sync {
    /// Delivers the response or the error. Called once.
    fn finish(&self, response: Result<SampleResponse, ServerError>);
}

/// An upstream as the server sees it: the queue of its requests, and its last known status.
pub struct UpstreamHandle {
    pub name: Arc<str>,
    pub queue: UpstreamQueue,
    status: Mutex<UpstreamStatus>,
    /// Jobs, in any order. They are not stored: a job that the process does not finish is lost.
    jobs: Mutex<Vec<UpstreamJob>>,
    on_model: Box<dyn Fn(OfferedModel<'_>) + Send + Sync>,
}

/// A base model that an upstream offers.
pub struct OfferedModel<'a> {
    /// Name of the upstream.
    pub upstream: &'a Arc<str>,
    pub name: &'a str,
    /// Context length in tokens, if the upstream reports it.
    pub context: Option<usize>,
}

/// Work on the checkpoints of an upstream.
pub enum UpstreamJob {
    /// Deletes weights once no durable record refers to them.
    Delete(RemoteWeights),
    /// Copies weights for sampling into a new folder.
    Download(WeightsDownload),
}

/// Copies weights from an upstream into a folder under `weights/`.
pub struct WeightsDownload {
    pub base_model: String,
    /// Path of the weights on the upstream.
    pub path: String,
    pub folder: PathBuf,
    /// Receives the reason if the weights cannot be copied.
    pub done: oneshot::Sender<Result<(), String>>,
}

/// Last known status of an upstream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpstreamStatus {
    /// Base URL.
    pub url: String,
    /// Why the upstream cannot be used now; `None` if it responds.
    pub down: Option<String>,
    /// Whether the upstream has ever responded. Until the first response, the protocol and the
    /// models of the upstream are not known.
    pub was_reached: bool,
    /// Supported losses of a legacy server; `None` = all.
    pub losses: Option<&'static [&'static str]>,
}

impl UpstreamStatus {
    /// Returns whether the upstream has a legacy protocol: checkpoints are sampled with models of
    /// their own, and models are unloaded on request. False until the upstream was reached.
    #[must_use]
    pub fn is_legacy(&self) -> bool {
        self.losses.is_some()
    }
}

impl UpstreamHandle {
    /// Creates the handle of an upstream that has not responded yet. `on_model` is called for each
    /// base model that the upstream offers.
    pub fn new(
        name: Arc<str>,
        url: String,
        gap_timeout: Duration,
        clock: Clock,
        on_model: impl Fn(OfferedModel<'_>) + Send + Sync + 'static,
    ) -> Self {
        let down = Some("it has not been reached yet".to_owned());
        Self {
            name,
            queue: Queue::new(gap_timeout, clock),
            status: Mutex::new(UpstreamStatus { url, down, was_reached: false, losses: None }),
            jobs: Mutex::default(),
            on_model: Box::new(on_model),
        }
    }

    /// Locks the status.
    pub fn status(&self) -> MutexGuard<'_, UpstreamStatus> {
        self.status.lock()
    }

    /// Asks the tasks of the upstream to do `job`.
    pub fn add_job(&self, job: UpstreamJob) {
        self.jobs.lock().push(job);
        self.queue.wake();
    }

    /// Takes the jobs that were added.
    pub fn take_jobs(&self) -> Vec<UpstreamJob> {
        std::mem::take(&mut self.jobs.lock())
    }

    /// Deletes weights to which no record refers any more. Ignores weights that are not on this
    /// upstream.
    pub fn discard(&self, weights: WeightsLocation) {
        match weights {
            WeightsLocation::Upstream(remote) if *remote.upstream == *self.name => {
                self.add_job(UpstreamJob::Delete(remote));
            }
            WeightsLocation::Upstream(_) | WeightsLocation::Local(_) => {}
        }
    }

    /// Tells the server that the upstream offers a base model.
    pub fn offer_model(&self, name: &str, context: Option<usize>) {
        (self.on_model)(OfferedModel { upstream: &self.name, name, context });
    }
}

/// Settings of all upstreams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpstreamSettings {
    /// Maximum time for which a request waits while its upstream is down or does not execute the
    /// request.
    pub timeout: Duration,
    /// Number of optimizer steps of a run after which its state is saved on the upstream.
    pub checkpoint_every: u32,
}

/// A boxed future that can be sent to another thread.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Executes the requests of an upstream. The crate `tinkex-gateway` implements the trait.
pub trait UpstreamDriver: Send + Sync + std::fmt::Debug {
    /// Returns the base URL, for status messages.
    fn url(&self) -> &str;

    /// Starts the tasks that execute the requests of `upstream`. Waits until `deadline` for its
    /// first response, so that the server knows its models.
    ///
    /// # Errors
    /// If the base URL or the key is invalid.
    fn start(
        &self,
        upstream: Arc<UpstreamHandle>,
        context: BackendContext,
        settings: UpstreamSettings,
        deadline: tokio::time::Instant,
    ) -> BoxFuture<'_, Result<Box<dyn RunningUpstream>, String>>;
}

/// Running tasks of an upstream. Dropping them aborts the tasks.
pub trait RunningUpstream: Send + Sync {
    /// Waits until the tasks have saved their models, once the queue of the upstream is stopped.
    /// Returns the number of saved models.
    fn stopped(&mut self) -> BoxFuture<'_, usize>;
}

/// Largest seed that is sent to a legacy server. SkyRL computes with signed 32-bit seeds and adds
/// the index of the sample.
const MAX_LEGACY_SEED: u64 = (1 << 30) - 1;

/// Returns the seed for a legacy server: small seeds as they are, others folded.
#[must_use]
pub fn legacy_seed(seed: u64) -> u64 {
    match seed {
        0..=MAX_LEGACY_SEED => seed,
        _ => (seed ^ (seed >> 30) ^ (seed >> 60)) & MAX_LEGACY_SEED,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_for_legacy_servers_are_small() {
        assert_eq!(legacy_seed(7), 7);
        assert_eq!(legacy_seed(MAX_LEGACY_SEED), MAX_LEGACY_SEED);
        let seeds = [u64::MAX, 1 << 30, 1 << 62].map(legacy_seed);
        assert!(seeds.iter().all(|seed| *seed <= MAX_LEGACY_SEED));
        assert_ne!(legacy_seed(1 << 40), legacy_seed(1 << 41));
    }
}
