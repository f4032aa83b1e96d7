//! A local server for the Tinker API that trains and samples on the CPU.
//!
//! ```no_run
//! use tinkex_server::{Server, ServerOptions};
//!
//! # async fn run() -> Result<(), tinkex_server::StartError> {
//! let options = ServerOptions::new("data").model("Qwen/Qwen3-0.6B", "models/qwen3-0.6b");
//! let server = Server::start(options).await?;
//! println!("{}", server.base_url());
//! server.stop().await;
//! # Ok(()) }
//! ```
//!
//! # Guarantees
//!
//! * Requests of a model are executed in order of their sequence numbers, regardless of the order
//!   in which they arrive.
//! * An acknowledged request survives a crash: the server acknowledges it only once it is durable,
//!   and executes it after a restart with bit-identical results.
//! * A result is visible to clients only once it is durable.
//! * Bodies, queues, results and caches have memory limits: see [`ServerLimits`].
//! * Without an API key the server accepts connections only from its own machine, but from all
//!   users of the machine: see [`ServerOptions::create_api_key`].
//!
//! # Life of a request
//!
//! 1. **Validate**: `routes` authenticates the request and reads its body; `admit` decodes it and
//!    checks everything that can be checked without executing it.
//! 2. **Admit**: `admit` checks the sequence number and the queue limits. A retry gets the id of
//!    the original request.
//! 3. **Persist**: the store writes the body and a record. The client then receives the request id.
//! 4. **Enqueue** and **dispatch**: the queue of the backend holds requests until their sequence
//!    number is due and hands them to the backend.
//! 5. **Execute**: `worker`, the thread that owns the engine, or an upstream runs the operation.
//! 6. **Persist** and **notify**: the backend writes the result with the records that belong to it,
//!    and wakes the polls that wait for it in `routes::future`.
//!
//! `expiry` ends sessions whose clients are silent and removes expired objects, and `models` lists
//! the base models. HTTP is confined to `routes`, `server`, `connections`, `stream` and `tls`; all other
//! modules report a `ServerError`, which `routes::error` maps to a response.
//!
//! # Crates
//!
//! This crate connects the parts of the server to routes and owns the engine. `tinkex-store` has
//! the durable state, and `tinkex-backend` the queues and outcomes that the engine's worker and the
//! upstreams share. `tinkex-gateway` sends requests to upstreams, and `tinkex-inference` implements
//! the OpenAI and Anthropic APIs.
//!
//! # Logging
//!
//! The server emits [`tracing`] events and installs no subscriber; see [`log`] for the targets.

#![forbid(unsafe_code)]

mod admit;
mod api_key;
mod backends;
mod backup;
mod connections;
mod data_folder;
mod disk_usage;
mod downloads;
mod drain;
mod environment;
mod expiry;
mod fault;
mod file_limit;
mod gguf;
mod history;
mod inference;
mod ip_network;
mod keyring;
mod limits;
mod memory;
mod memory_size;
mod metrics;
mod models;
mod operation;
mod options;
mod public_url;
mod retention;
mod routes;
mod server;
#[doc(hidden)]
pub mod simulation;
mod start_error;
mod state;
mod stream;
mod tls;
mod training_data;
mod worker;
pub use tinkex_engine::Quantization;
pub use tinkex_engine::builtin::NAME as BUILT_IN;
pub use tinkex_store::backup::{RestoreReport, restore as restore_backup};
pub use tinkex_store::history::HistoryOptions;
pub use tinkex_store::log;

pub use tinkex_store::disk::ServerHealth;
pub use tinkex_store::disk::check::{
    DataFolderReport, FileReport, FileState, LostObject, WeightsReport, WeightsState,
};

pub use api_key::{api_key_file, read_api_key};
pub use data_folder::check_data_folder;
pub use ip_network::IpNetwork;
pub use limits::ServerLimits;
pub use memory::process_memory;
pub use memory_size::MemorySize;
pub use models::{write_built_in_model, write_tokenizer};
pub use options::{PendingOnStart, QuantizeRule, ServerOptions, ServerTimeouts, local_hub_cache};
pub use public_url::PublicUrl;
pub use routes::FolderDashboard;
pub use server::{Server, ShutdownSummary};
pub use start_error::{StartAction, StartError};
pub use tls::{TlsError, TlsFiles};
