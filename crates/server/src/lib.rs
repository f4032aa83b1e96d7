//! The Tinker API on your own machine: the engine behind the real protocol.
//!
//! ```no_run
//! use tinkex_server::{ServerOptions, Server};
//!
//! # async fn run() -> Result<(), tinkex_server::StartError> {
//! let options = ServerOptions::new("data").model("Qwen/Qwen3-0.6B", "models/qwen3-0.6b");
//! let server = Server::start(options).await?;
//! println!("{}", server.base_url());
//! server.stop().await;
//! # Ok(()) }
//! ```
//!
//! # What it promises
//!
//! * Requests of a model run in the order of their numbers, however they arrive.
//! * What was promised survives a crash: a request is answered with a ticket only once it is on
//!   disk, and after a restart it is carried out with the same bits.
//! * Memory for bodies, queues, answers and caches has limits: see [`ServerLimits`].
//! * Only this machine can reach it, unless it is given a key.
//!
//! # Map
//!
//! `routes` decodes calls, `admit` turns them into work and writes them down (`disk`), `queue`
//! orders them, `worker` owns the engine and carries them out, `settle` writes the answers down,
//! and `routes::future` hands them over. `store` is what the server knows; `models` are the base
//! models it can load. Nothing below `routes` knows HTTP.

#![forbid(unsafe_code)]

mod admit;
mod batch;
mod commit;
mod disk;
mod error;
mod fact;
mod log;
mod metrics;
mod models;
mod options;
mod queue;
mod routes;
mod server;
mod settle;
mod state;
mod store;
mod stream;
mod sweep;
mod task;
mod work;
mod worker;

pub use models::write_tokenizer;
pub use options::{ServerLimits, ServerOptions, ServerTimeouts, local_hub_cache};
pub use server::{Server, ShutdownSummary, StartAction, StartError};
pub use tinkex_engine::builtin::NAME as BUILT_IN;
