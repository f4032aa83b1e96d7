//! A server in a simulation: without listener and threads, driven from one thread by a scheduler.
//!
//! Not part of the public API: only the crate `tinkex-simulation` uses it, and it can change in any
//! version. [`SimulatedServer`] runs the code of [`Server`](crate::Server) with four differences:
//! requests are passed to [`RequestHandler::handle`] instead of arriving on a connection, the
//! [`Scheduler`] runs the loops of worker and disk writer, ids derive from a seed, and the
//! [clocks of the machine](SystemClocks) are simulated.

mod replay;
mod view;

use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use http::{Request, Response};
use hyper::body::Body;

pub use self::replay::Replay;
pub use self::view::{CheckpointView, OutcomeView, RequestView};
use crate::ServerOptions;
pub use crate::clock::SystemClocks;
use crate::random::RandomSource;
use crate::routes;
use crate::server::{OpenedServer, ServerHandles, ShutdownSummary};
use crate::start_error::StartError;
use crate::state::ServerState;
use crate::task::Executor;
pub use crate::task::SIMULATED_CORES;

/// Task of a simulated server.
pub type SimulatedTask = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Runs the tasks of a simulated server.
pub trait Scheduler: Send + Sync {
    /// Runs `task` to its end, or until the simulated process dies. `name` is `worker`, `disk`,
    /// `expiry`, `decode` (at most [`SIMULATED_CORES`] at a time), `job` or `deferred`.
    fn spawn(&self, name: &'static str, task: SimulatedTask);
}

/// Adds an upstream whose requests `http` carries.
#[cfg(feature = "upstream")]
#[must_use]
pub fn with_upstream(
    options: ServerOptions,
    name: &str,
    http: Arc<dyn tinkex::HttpService>,
) -> ServerOptions {
    let mut options = options.upstream(name, "http://127.0.0.1:1", None);
    if let Some(upstream) = options.upstreams.last_mut() {
        upstream.http = Some(crate::options::UpstreamHttp(http));
    }
    options
}

/// A running server without listener and threads.
///
/// To simulate the death of the process, drop the tasks of the scheduler and then this value.
pub struct SimulatedServer {
    handles: ServerHandles,
}

impl std::fmt::Debug for SimulatedServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SimulatedServer").finish_non_exhaustive()
    }
}

impl SimulatedServer {
    /// Restores the state of the data folder and starts the tasks. `clocks` are those of the
    /// machine. `seed` determines the ids that the server chooses; use another one for each start.
    ///
    /// # Errors
    /// As [`Server::start`](crate::Server::start).
    pub async fn start(
        options: ServerOptions,
        scheduler: Arc<dyn Scheduler>,
        clocks: Arc<dyn SystemClocks>,
        seed: u64,
    ) -> Result<Self, StartError> {
        let executor = Executor::Simulated(scheduler);
        let opened = OpenedServer::open(options, executor, RandomSource::seeded(seed), clocks)?;
        Ok(Self { handles: opened.start().await? })
    }

    /// Returns a handler of requests, which outlives this value as a connection does.
    #[must_use]
    pub fn handler(&self) -> RequestHandler {
        RequestHandler(Arc::clone(&self.handles.state))
    }

    /// Shuts down gracefully; see [`Server::stop`](crate::Server::stop).
    pub async fn stop(mut self) -> ShutdownSummary {
        self.handles.stop().await
    }
}

/// Handles requests of a [`SimulatedServer`].
#[derive(Clone)]
pub struct RequestHandler(Arc<ServerState>);

impl std::fmt::Debug for RequestHandler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RequestHandler").finish_non_exhaustive()
    }
}

impl RequestHandler {
    /// Handles one request. Dropping the future is a disconnection of the client.
    pub async fn handle<B>(
        &self,
        request: Request<B>,
    ) -> Response<impl Body<Data = Bytes, Error: std::fmt::Debug> + Send + use<B>>
    where
        B: Body<Data = Bytes, Error: std::fmt::Display + Send> + Unpin + Send,
    {
        routes::handle(&self.0, request).await
    }
}
