//! Upstreams: other servers of the Tinker API, which train and sample for this one.
//!
//! Each upstream has a [dispatcher](dispatch), which takes requests from the upstream's queue. A
//! model is driven by a task of its own ([`RunTask`](run::RunTask)): its requests are sent to the
//! upstream in order, each at most once, and their results are stored like those of the engine. A
//! model that the upstream has lost, or whose state is in doubt, is created again from its last
//! checkpoint there, and the requests since are repeated ([`remote_model`]). Samples need no order
//! and may be repeated ([`sampling`]).

mod dispatch;
mod download;
mod fault;
mod health;
mod remote_model;
mod remote_weights;
mod run;
mod sampling;
mod slots;

use std::sync::Arc;
use std::time::Duration;

use tinkex::{RetryPolicy, ServiceClient};
use tokio::sync::oneshot;
use tokio::time::Instant;

use self::fault::Fault;
use crate::backend::{Backend, UpstreamEntry};
use crate::options::UpstreamOptions;
use crate::queue::Queue;
use crate::state::ServerState;
use crate::task::TaskHandle;

/// Time for which the client repeats a request that may be repeated. Then the task that made it
/// decides whether to wait longer.
const CALL_PATIENCE: Duration = Duration::from_secs(20);

/// Maximum time for which the start waits for the upstreams.
const FIRST_CONTACT: Duration = Duration::from_secs(3);

/// Losses of servers of older protocols, such as SkyRL with its JAX backend.
const OLDER_LOSSES: &[&str] = &["cross_entropy", "importance_sampling", "ppo", "cispo"];

/// An upstream and the client for it.
pub(crate) struct Upstream {
    name: Arc<str>,
    service: ServiceClient,
    state: Arc<ServerState>,
    samplers: sampling::SamplerPool,
    samples: sampling::SampleTasks,
    slots: slots::Slots,
}

impl Upstream {
    /// Creates the client. Sends nothing.
    fn new(state: &Arc<ServerState>, options: &UpstreamOptions) -> tinkex::Result<Arc<Self>> {
        // A server without keys accepts any.
        let key = options.api_key.as_ref().map_or("tml-none", |key| key.expose());
        let retry = RetryPolicy::default()
            .give_up_after(CALL_PATIENCE)
            .first_contact_timeout(Duration::ZERO)
            .retry_rejected_polls(false);
        let builder = match &options.http {
            Some(http) => ServiceClient::builder().http(Arc::clone(&http.0)),
            None => ServiceClient::builder(),
        };
        let service = builder
            .base_url(options.url.as_str())
            .api_key(key)
            .env(tinkex::Env::empty())
            .retry(retry)
            .poll_immediately()
            .without_telemetry()
            .max_concurrent_samples(sampling::MAX_IN_FLIGHT)
            .build()?;
        let (name, state) = (Arc::clone(&options.name), Arc::clone(state));
        let (samplers, samples, slots) = Default::default();
        Ok(Arc::new(Self { name, service, state, samplers, samples, slots }))
    }

    fn queue(&self) -> &Queue {
        self.state.backends.queue(&Backend::Upstream(Arc::clone(&self.name)))
    }

    fn entry(&self) -> Option<&UpstreamEntry> {
        self.state.backends.upstream(&self.name)
    }

    /// Checks that the upstream has responded, so that its protocol is known.
    ///
    /// # Errors
    /// [`Fault::Unavailable`] if it has not.
    fn require_reached(&self) -> Result<(), Fault> {
        match self.entry().is_some_and(|entry| entry.status().was_reached) {
            true => Ok(()),
            false => Err(Fault::Unavailable("it has not responded yet".to_owned())),
        }
    }

    /// Returns whether the upstream has an older protocol: checkpoints are sampled with models of
    /// their own, and models are unloaded on request. False until the upstream was reached.
    fn is_older(&self) -> bool {
        self.entry().is_some_and(|entry| entry.status().losses.is_some())
    }
}

/// Running tasks of an upstream.
pub(crate) struct UpstreamTasks {
    health: TaskHandle,
    dispatch: TaskHandle,
    /// Receives the number of saved models when the dispatcher has stopped.
    stopped: Option<oneshot::Receiver<usize>>,
}

impl UpstreamTasks {
    /// Waits until the tasks have saved their models, once the queue of the upstream is stopped.
    /// Returns the number of saved models.
    pub(crate) async fn stopped(&mut self) -> usize {
        match self.stopped.take() {
            Some(stopped) => stopped.await.unwrap_or(0),
            None => 0,
        }
    }
}

impl Drop for UpstreamTasks {
    fn drop(&mut self) {
        self.health.abort();
        self.dispatch.abort();
    }
}

/// Starts the tasks of all upstreams. Waits for their first responses, so that the server knows
/// their models, for up to [`FIRST_CONTACT`].
///
/// # Errors
/// If the base URL or the key of an upstream is invalid.
pub(crate) async fn start(state: &Arc<ServerState>) -> tinkex::Result<Vec<UpstreamTasks>> {
    let mut tasks = Vec::new();
    let deadline = Instant::now() + FIRST_CONTACT;
    for options in &state.options.upstreams {
        let upstream = Upstream::new(state, options)?;
        let _ = tokio::time::timeout_at(deadline, health::check_once(&upstream)).await;
        let health = health::watch(Arc::clone(&upstream));
        let health = state.executor.spawn("upstream health", health);
        let (sender, stopped) = oneshot::channel();
        let dispatch = async move {
            // Sending fails if the server does not wait for the models to be saved.
            let _ = sender.send(dispatch::run(upstream).await);
        };
        let dispatch = state.executor.spawn("upstream", dispatch);
        tasks.push(UpstreamTasks { health, dispatch, stopped: Some(stopped) });
    }
    Ok(tasks)
}
