//! A server in a child process: the running program, started again with [`OPTIONS`] set.
//!
//! The program must call [`serve_if_child`] before it does anything else.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tinkex_server::{Server, ServerOptions};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

/// Environment variable with the options of the server as JSON.
const OPTIONS: &str = "TINKEX_TEST_SERVER";

/// Options of a server in a child process.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct ChildOptions {
    pub(crate) data_dir: PathBuf,
    /// Port to listen on; 0 picks a free one.
    pub(crate) port: u16,
    /// Number of compute threads; 0 uses one per core.
    pub(crate) threads: usize,
    pub(crate) models: Vec<(String, PathBuf)>,
    pub(crate) hub_cache: Option<PathBuf>,
    /// Key that clients must send; `None` accepts any.
    pub(crate) api_key: Option<String>,
    /// As [`ServerTimeouts::snapshot_after`](tinkex_server::ServerTimeouts::snapshot_after).
    pub(crate) snapshot_after: Option<Duration>,
    /// As [`ServerLimits::kv_cache_bytes`](tinkex_server::ServerLimits::kv_cache_bytes).
    pub(crate) cache_bytes: Option<usize>,
    /// As [`ServerLimits::training_bytes`](tinkex_server::ServerLimits::training_bytes).
    pub(crate) training_bytes: Option<usize>,
    /// As [`ServerLimits::record_bytes`](tinkex_server::ServerLimits::record_bytes).
    pub(crate) record_bytes: Option<u64>,
    /// Writes the server's events to stderr as JSON, from this level on: `warn`, `info` or `debug`.
    pub(crate) log: Option<String>,
}

impl ChildOptions {
    /// Returns the command that starts the server. `arguments` make the program call
    /// [`serve_if_child`].
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        // Ignore SIGXFSZ, so that a write beyond a limit on the size of files fails instead of
        // ending the process.
        let mut command = Command::new("sh");
        command
            .args(["-c", "trap '' XFSZ; exec \"$0\" \"$@\""])
            .arg(std::env::current_exe().unwrap())
            .args(arguments)
            .env(OPTIONS, serde_json::to_string(self).unwrap())
            .stdout(Stdio::piped());
        command
    }
}

/// Starts a server and returns it with its base URL.
pub(crate) fn start(mut command: Command) -> (Child, String) {
    let mut child = command.spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut lines = lines.map(Result::unwrap);
    let url = lines.find(|line| line.starts_with("http://")).expect("the server does not start");
    (child, url)
}

/// Runs a server and ends the process, if the process is the child of a test.
pub(crate) fn serve_if_child() {
    #[expect(clippy::disallowed_methods, reason = "this variable belongs to this file")]
    let Ok(options) = std::env::var(OPTIONS) else { return };
    let options: ChildOptions = serde_json::from_str(&options).unwrap();
    if let Some(level) = &options.log {
        let filter =
            Targets::new().with_target("tinkex_server", level.parse::<LevelFilter>().unwrap());
        let layer = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
        let layer = layer.json().flatten_event(true);
        tracing_subscriber::registry().with(filter).with(layer).init();
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let succeeded = runtime.block_on(serve(options));
    // Exit here: the test harness would write to stdout, which the parent has closed.
    std::process::exit(i32::from(!succeeded));
}

/// Serves until SIGTERM arrives, and then stops gracefully. Returns whether the server did not fail.
async fn serve(options: ChildOptions) -> bool {
    let mut server_options = ServerOptions::new(&options.data_dir);
    server_options.address.set_port(options.port);
    server_options.threads = options.threads;
    server_options.models = options.models;
    server_options.hub_cache = options.hub_cache;
    server_options.api_key = options.api_key.map(Into::into);
    if let Some(snapshot_after) = options.snapshot_after {
        server_options.timeouts.snapshot_after = snapshot_after;
    }
    if let Some(bytes) = options.cache_bytes {
        server_options.limits.kv_cache_bytes = bytes;
    }
    if let Some(bytes) = options.training_bytes {
        server_options.limits.training_bytes = bytes;
    }
    if let Some(bytes) = options.record_bytes {
        server_options.limits.record_bytes = bytes;
    }
    let server = Server::start(server_options).await.unwrap();
    let mut out = std::io::stdout();
    writeln!(out, "{}", server.base_url()).unwrap();
    out.flush().unwrap();
    tokio::select! {
        () = terminated() => {}
        _ = server.broken() => return false,
    }
    server.stop().await;
    true
}

/// Waits for SIGTERM.
async fn terminated() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        signal(SignalKind::terminate()).unwrap().recv().await;
    }
    #[cfg(not(unix))]
    tokio::signal::ctrl_c().await.unwrap();
}
