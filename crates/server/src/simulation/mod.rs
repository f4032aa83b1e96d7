//! A server in a simulation: without listener and threads, driven from one thread by a scheduler.
//!
//! Not part of the public API: only the crate `tinkex-simulation` uses this module, and it can
//! change in any version. [`SimulatedServer`] runs the code of [`Server`](crate::Server) with four
//! differences: requests are passed to [`RequestHandler::handle`] instead of arriving on a
//! connection, the [`Scheduler`] runs the loops of worker and disk writer, ids derive from a seed,
//! and the [clocks of the machine](SystemClocks) are simulated.

mod replay;
mod view;

use std::sync::Arc;

use bytes::Bytes;
use http::{Request, Response};
use hyper::body::Body;
pub use tinkex_store::clock::SystemClocks;
use tinkex_store::decode_jobs::DecodePolicy;
use tinkex_store::executor::Executor;
pub use tinkex_store::executor::{ScheduledTask as SimulatedTask, Scheduler};
use tinkex_store::random::RandomSource;

pub use self::replay::Replay;
pub use self::view::{CheckpointView, LossView, OutcomeView, RequestView, RunView};
use crate::ServerOptions;
use crate::environment::Environment;
use crate::routes;
use crate::server::{OpenedServer, ServerHandles, ShutdownSummary};
use crate::start_error::StartError;
use crate::state::ServerState;

/// Number of cores of a simulated machine: the maximum number of tasks named `decode` at a time.
pub const SIMULATED_CORES: usize = 2;

/// Requests of a simulation are small. The low value of `inline_bytes` makes most requests run as
/// decode jobs.
const DECODE_POLICY: DecodePolicy = DecodePolicy { concurrent: SIMULATED_CORES, inline_bytes: 128 };

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
    /// Restores the state of the data folder and starts the tasks. `clocks` are the clocks of the
    /// machine. `seed` determines the ids that the server chooses; use another seed for each start.
    ///
    /// # Errors
    /// The errors of [`Server::start`](crate::Server::start).
    pub async fn start(
        options: ServerOptions,
        scheduler: Arc<dyn Scheduler>,
        clocks: Arc<dyn SystemClocks>,
        seed: u64,
    ) -> Result<Self, StartError> {
        let environment = Environment {
            executor: Executor::new(scheduler),
            random: RandomSource::seeded(seed),
            clocks,
            decode: DECODE_POLICY,
        };
        let opened = OpenedServer::open(options, environment)?;
        Ok(Self { handles: opened.start().await? })
    }

    /// Returns a handler of requests. Like a connection, the handler may outlive this value.
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
    /// Handles one request. Dropping the future simulates that the client disconnects.
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
