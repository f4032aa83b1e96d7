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
//! * Without an API key the server accepts connections from this machine only, but from all of its
//!   users: see [`ServerOptions::create_api_key`].
//!
//! # Life of a request
//!
//! 1. **Validate**: `routes` authenticates the request and reads its body; `admit` decodes it and
//!    checks everything that can be checked without executing it.
//! 2. **Admit**: `admit` checks the sequence number and the queue limits. A retry gets the id of
//!    the original request.
//! 3. **Persist**: `disk` writes the body and a record. The client then receives the request id.
//! 4. **Enqueue** and **dispatch**: `queue` holds requests until their sequence number is due and
//!    hands them to the worker.
//! 5. **Execute**: `worker`, the thread that owns the engine, runs the operation.
//! 6. **Persist** and **notify**: `outcome` writes the result with the records that belong to it,
//!    and wakes the polls that wait for it in `routes::future`.
//!
//! `store` is the in-memory copy of the durable state, `durable` writes the records of requests
//! that need no worker, `expiry` ends sessions whose clients are silent and removes expired
//! objects, and `models` lists the base models. HTTP is confined to `routes`, `server` and
//! `stream`; all other modules report a `ServerError`, which `routes::error` maps to a response.
//!
//! # Logging
//!
//! The server emits [`tracing`] events and installs no subscriber; see [`log`] for the targets.

#![forbid(unsafe_code)]
#![cfg_attr(
    not(feature = "upstream"),
    expect(dead_code, reason = "without upstreams, nothing executes the operations for them")
)]

mod admit;
mod api_key;
mod backend;
mod clock;
mod dashboard;
mod disk;
mod durable;
mod error;
mod expiry;
mod fault;
mod file_limit;
mod gguf;
mod history;
mod inference;
mod limits;
pub mod log;
mod memory;
mod memory_size;
mod metrics;
mod model_outcome;
mod models;
mod operation;
mod options;
mod outcome;
mod queue;
mod random;
mod record;
mod result_reads;
mod routes;
mod server;
#[doc(hidden)]
pub mod simulation;
mod start_error;
mod state;
mod store;
mod stream;
mod task;
mod training_data;
#[cfg(feature = "upstream")]
mod upstream;
mod worker;

pub use api_key::{api_key_file, read_api_key};
pub use history::HistoryOptions;
pub use limits::ServerLimits;
pub use memory::process_memory;
pub use memory_size::MemorySize;
pub use models::{write_built_in_model, write_tokenizer};
pub use options::{DropUndone, QuantizeRule, ServerOptions, ServerTimeouts, local_hub_cache};
pub use routes::FolderDashboard;
pub use server::{Server, ShutdownSummary};
pub use start_error::{StartAction, StartError};
pub use tinkex_engine::Quantization;
pub use tinkex_engine::builtin::NAME as BUILT_IN;

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    /// Modules that may refer to HTTP types.
    const HTTP_MODULES: [&str; 5] = ["routes", "server.rs", "simulation", "stream.rs", "main.rs"];

    fn rust_files(folder: &Path, files: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                rust_files(&path, files);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }

    #[test]
    fn only_the_http_modules_name_http_types() {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let mut files = Vec::new();
        rust_files(&source, &mut files);
        let mut checked = 0;
        for file in files {
            let relative = file.strip_prefix(&source).unwrap();
            // Skip this file: the list below contains the forbidden names.
            if relative == "lib.rs"
                || HTTP_MODULES.iter().any(|module| relative.starts_with(module))
            {
                continue;
            }
            let text = std::fs::read_to_string(&file).unwrap();
            for name in ["http::", "hyper::", "http_body_util", "StatusCode"] {
                assert!(!text.contains(name), "{} refers to {name}", relative.display());
            }
            checked += 1;
        }
        assert!(checked > 20, "only {checked} files were checked");
    }

    /// Simulated time and a wall clock that is set have no effect on other clocks.
    #[test]
    fn only_the_clock_module_reads_the_clocks_of_the_system() {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let mut files = Vec::new();
        rust_files(&source, &mut files);
        for file in files {
            let relative = file.strip_prefix(&source).unwrap();
            if relative == "lib.rs" || relative.starts_with("clock") {
                continue;
            }
            let text = std::fs::read_to_string(&file).unwrap();
            let reads = |line: &str| {
                line.contains("SystemTime::now")
                    || line.contains("Timestamp::now")
                    || (line.contains("std::time::") && line.contains("Instant"))
            };
            let found = text.lines().find(|line| reads(line));
            assert_eq!(found, None, "{}", relative.display());
        }
    }
}
