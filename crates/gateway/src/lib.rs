//! The gateway of the Tinkex server: sends requests to upstreams, which are other servers of the
//! Tinker API that train and sample on behalf of this server.
//!
//! The program that starts a server passes an [`UpstreamServer`] for each upstream, which the
//! server uses as an [`UpstreamDriver`]. Each upstream has a dispatcher, which takes requests from
//! the upstream's queue. Each model has its own task (`RunTask`), which sends the requests of the
//! model to the upstream in order, each at most once, and stores the results like the results of
//! the engine. If the upstream has lost a model, or if the state of a model is in doubt, the task
//! creates the model again from its last checkpoint on the upstream and repeats the requests since
//! that checkpoint. `remote_model` has the requests to one model. Samples need no order and may be
//! repeated (`sampling`).
//!
//! A *legacy* upstream, such as SkyRL, implements an older version of the protocol and has no
//! dynamic configuration. Legacy upstreams execute a repeated request again. SkyRL also keeps each
//! loaded model in one of a few slots (`slots`).

#![forbid(unsafe_code)]

mod custom_loss_pass;
mod dispatch;
mod download;
mod fault;
mod health;
mod remote_model;
mod remote_weights;
mod run;
mod sampling;
mod slots;
mod upstream_session;

use std::sync::Arc;
use std::time::Duration;

use tinkex::{CallOptions, Env, HttpService, Network, ServiceClient};
use tinkex_backend::context::BackendContext;
use tinkex_backend::upstream::{
    BoxFuture, RunningUpstream, UpstreamDriver, UpstreamHandle, UpstreamSettings,
};
use tinkex_store::executor::TaskHandle;
use tinkex_store::weights::{RemoteWeights, WeightsLocation};
use tinkex_wire::Secret;
use tokio::sync::oneshot;
use tokio::time::Instant;

use self::fault::Fault;

/// Time for which the client retries a request that is safe to retry. After this time, the task
/// that sent the request decides whether to wait longer.
const CALL_TIMEOUT: Duration = Duration::from_secs(20);

/// Maximum number of unused connections of each HTTP client of an upstream: as many as the requests
/// that a client serves at a time. With fewer, a gateway under load would open and close connections
/// all the time, which costs a fifth of its CPU time.
const MAX_IDLE_CONNECTIONS: usize = 50;

/// Names of the losses that legacy servers compute, such as SkyRL with its JAX backend.
const LEGACY_LOSSES: &[&str] = &["cross_entropy", "importance_sampling", "ppo", "cispo"];

/// A server of the Tinker API that executes requests on behalf of this server.
#[derive(Clone)]
pub struct UpstreamServer {
    url: String,
    api_key: Option<Secret>,
    http: Option<Arc<dyn HttpService>>,
}

impl std::fmt::Debug for UpstreamServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UpstreamServer").field("url", &self.url).finish_non_exhaustive()
    }
}

impl UpstreamServer {
    /// Describes the server at the base URL `url`. The gateway authenticates its requests to this
    /// server with `api_key`; `None` is for servers that require no key.
    pub fn new(url: impl Into<String>, api_key: Option<Secret>) -> Self {
        Self { url: url.into(), api_key, http: None }
    }

    /// Sends the requests to the server through `http` instead of the network.
    #[must_use]
    pub fn http(mut self, http: Arc<dyn HttpService>) -> Self {
        self.http = Some(http);
        self
    }

    /// Creates the client of the upstream. Sends nothing.
    fn service(&self) -> tinkex::Result<ServiceClient> {
        // A server that requires no key accepts any key.
        let key = self.api_key.as_ref().map_or("tml-none", |key| key.expose());
        let options = CallOptions::new()
            .give_up_after(CALL_TIMEOUT)
            .unreached_timeout(Duration::ZERO)
            .retry_rejected_polls(false);
        let builder = match &self.http {
            Some(http) => ServiceClient::builder().http(Arc::clone(http)),
            None => {
                let network = Network::builder().env(Env::empty());
                let network = network.max_idle_connections(MAX_IDLE_CONNECTIONS).build()?;
                ServiceClient::builder().network(network)
            }
        };
        builder
            .base_url(self.url.as_str())
            .api_key(key)
            .env(Env::empty())
            .options(options)
            .poll_immediately()
            .without_telemetry()
            .max_concurrent_samples(sampling::MAX_IN_FLIGHT)
            .build()
    }

    async fn start(
        &self,
        handle: Arc<UpstreamHandle>,
        context: BackendContext,
        settings: UpstreamSettings,
        deadline: Instant,
    ) -> tinkex::Result<UpstreamTasks> {
        let executor = context.executor.clone();
        let upstream = Upstream::new(self.service()?, handle, context, settings);
        let _ = tokio::time::timeout_at(deadline, health::check_once(&upstream)).await;
        let health = executor.spawn("upstream health", health::watch(Arc::clone(&upstream)));
        let (sender, stopped) = oneshot::channel();
        let dispatch = async move {
            // Sending fails if the server stops without waiting until the models are saved.
            let _ = sender.send(dispatch::run(upstream).await);
        };
        let dispatch = executor.spawn("upstream", dispatch);
        Ok(UpstreamTasks { health, dispatch, stopped: Some(stopped) })
    }
}

impl UpstreamDriver for UpstreamServer {
    fn url(&self) -> &str {
        &self.url
    }

    fn start(
        &self,
        upstream: Arc<UpstreamHandle>,
        context: BackendContext,
        settings: UpstreamSettings,
        deadline: Instant,
    ) -> BoxFuture<'_, Result<Box<dyn RunningUpstream>, String>> {
        Box::pin(async move {
            let started = Self::start(self, upstream, context, settings, deadline).await;
            let tasks = started.map_err(|error| error.to_string())?;
            Ok(Box::new(tasks) as Box<dyn RunningUpstream>)
        })
    }
}

/// An upstream and the client for it.
pub(crate) struct Upstream {
    handle: Arc<UpstreamHandle>,
    service: ServiceClient,
    context: BackendContext,
    settings: UpstreamSettings,
    samplers: sampling::SamplerPool,
    samples: sampling::SampleTasks,
    slots: slots::Slots,
}

impl Upstream {
    fn new(
        service: ServiceClient,
        handle: Arc<UpstreamHandle>,
        context: BackendContext,
        settings: UpstreamSettings,
    ) -> Arc<Self> {
        Arc::new(Self {
            handle,
            service,
            context,
            settings,
            samplers: Default::default(),
            samples: Default::default(),
            slots: Default::default(),
        })
    }

    /// Checks that the upstream has responded, so that its protocol is known.
    ///
    /// # Errors
    /// [`Fault::Unavailable`] if the upstream has not responded yet.
    fn require_reached(&self) -> Result<(), Fault> {
        if self.handle.status().was_reached {
            return Ok(());
        }
        Err(Fault::Unavailable("the upstream has not responded yet".to_owned()))
    }

    /// Returns whether the upstream is a legacy server: the gateway creates a separate model for
    /// each checkpoint that is sampled from, and unloads models by request. False until the
    /// upstream was reached.
    fn is_legacy(&self) -> bool {
        self.handle.status().is_legacy()
    }

    /// Returns the location of the weights at `path` on this upstream.
    fn weights_at(&self, path: String) -> WeightsLocation {
        WeightsLocation::Upstream(RemoteWeights { upstream: self.handle.name.to_string(), path })
    }
}

/// Running tasks of an upstream.
struct UpstreamTasks {
    health: TaskHandle,
    dispatch: TaskHandle,
    /// Receives the number of saved models when the dispatcher has stopped.
    stopped: Option<oneshot::Receiver<usize>>,
}

impl RunningUpstream for UpstreamTasks {
    fn stopped(&mut self) -> BoxFuture<'_, usize> {
        let stopped = self.stopped.take();
        Box::pin(async move {
            match stopped {
                Some(stopped) => stopped.await.unwrap_or(0),
                None => 0,
            }
        })
    }
}

impl Drop for UpstreamTasks {
    fn drop(&mut self) {
        self.health.abort();
        self.dispatch.abort();
    }
}
