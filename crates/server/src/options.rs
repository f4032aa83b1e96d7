//! Configuration of a [`Server`](crate::Server).

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use tinkex_backend::upstream::UpstreamDriver;
use tinkex_engine::Quantization;
use tinkex_files::{DiskSpace, HubCache};
use tinkex_store::history::HistoryOptions;
use tinkex_wire::Secret;

use crate::ip_network::IpNetwork;
use crate::limits::ServerLimits;
use crate::public_url::PublicUrl;
use crate::tls::TlsFiles;

/// Configuration of a [`Server`](crate::Server).
///
/// ```
/// use tinkex_server::ServerOptions;
///
/// let options = ServerOptions::new("data").model("Qwen/Qwen3-0.6B", "models/qwen3-0.6b");
/// assert!(options.address.ip().is_loopback());
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ServerOptions {
    /// Folder for the database, payloads and weights. Created if it does not exist; one server
    /// uses it at a time.
    pub data_dir: PathBuf,
    /// Address to listen on (default 127.0.0.1 with a free port). An address that other machines
    /// can reach requires a key: [`api_key`](Self::api_key) or
    /// [`create_api_key`](Self::create_api_key).
    pub address: SocketAddr,
    /// API key that clients must send. `None` accepts any key, unless
    /// [`create_api_key`](Self::create_api_key) is set.
    pub api_key: Option<Secret>,
    /// Requires the key in the file [`key`](crate::api_key_file) of the data folder if
    /// [`api_key`](Self::api_key) is `None` (default false). The start creates the file with a
    /// random key, readable only by its owner, if it does not exist.
    pub create_api_key: bool,
    /// Base models to serve: name, and Hugging Face model folder or GGUF file.
    pub models: Vec<(String, PathBuf)>,
    /// Folders with the tokenizers and chat templates of single models: name of a model of
    /// [`models`](Self::models) or of the hub cache, and folder (default none). The folder has
    /// `tokenizer.json` or `tiktoken.model`. Other models have the tokenizer in their own folder,
    /// or in their GGUF file. If the folder has no chat template, the template of the GGUF file is
    /// used.
    pub tokenizers: Vec<(String, PathBuf)>,
    /// Further names of models for inference requests: alias, and the base model, `tinker://` path
    /// or training run that it stands for.
    pub aliases: Vec<(String, String)>,
    /// Origins of web pages that may use the inference endpoints, such as `http://localhost:3000`
    /// (default none). A server without an API key rejects requests from web pages of other
    /// origins. A server with an API key requires the key, and browsers do not let pages of other
    /// origins read its responses.
    pub allow_origins: Vec<String>,
    /// Certificate and key for HTTPS (default `None`: HTTP without TLS). The server reads the files
    /// again when they change.
    pub tls: Option<TlsFiles>,
    /// URL under which clients reach the server, such as `https://tinkex.example.com` (default
    /// `None`). Download URLs and the URL of the dashboard start with it; without it, download URLs
    /// have the host name of the request.
    pub public_url: Option<PublicUrl>,
    /// Addresses of reverse proxies whose headers `x-forwarded-for`, `x-forwarded-proto` and
    /// `forwarded` name the client of a request (default none). The headers of other clients are
    /// ignored.
    pub trusted_proxies: Vec<IpNetwork>,
    /// Hugging Face hub cache (default `None`). Every model in it that has weights is served under
    /// its repository name.
    pub hub_cache: Option<PathBuf>,
    /// Number of compute threads; 0 (the default) uses one per core.
    pub threads: usize,
    /// Stores frozen weights as bf16 (default false): half the memory, and faster on CPUs with bf16
    /// instructions. The weights of a GGUF file keep their format.
    pub bf16: bool,
    /// Quantizes the frozen weights of all models (default `None`). Weights that are quantized in a
    /// GGUF file keep their format.
    pub quantize: Option<Quantization>,
    /// Quantizes the frozen weights of single models: name and format. Takes precedence over
    /// [`quantize`](Self::quantize).
    pub quantize_models: Vec<(String, Quantization)>,
    /// Reports log-probabilities of sampled tokens before the temperature is applied (default
    /// false).
    pub raw_logprobs: bool,
    /// Enables the protocol features that reduce traffic: one poll for many samples, compressed
    /// bodies, custom losses on the server (default true). If false, the client configuration
    /// disables them, and clients send the requests that they send to older servers.
    pub efficient_protocol: bool,
    /// Saves the unsaved state of a session's models as checkpoint `autosave-N` before the
    /// session expires (default true). `N` is the sequence number of the last request that changed
    /// the model. The checkpoint expires after one day.
    pub autosave_on_expiry: bool,
    /// Number of checkpoints of each run and kind that the server keeps (default `None`: all). The
    /// server deletes older ones, except those that are published, that have a time to live, or that
    /// are copies or imports.
    pub keep_checkpoints: Option<usize>,
    /// Time after which the server deletes a run that is not used, with its checkpoints (default
    /// `None`: never). The session of the run must have ended, and no checkpoint of it may be
    /// published or have a time to live.
    pub run_ttl: Option<Duration>,
    /// Accepted requests without a result that fail when the server starts (default
    /// [`PendingOnStart::None`]).
    pub pending_on_start: PendingOnStart,
    /// Upstreams, whose base models this server also offers: see `ServerOptions::upstream`.
    pub(crate) upstreams: Vec<UpstreamOptions>,
    /// Number of optimizer steps of a run on an upstream after which the state of the run is saved
    /// on the upstream (default 10). If the upstream loses the model, at most about this many steps
    /// are repeated.
    pub checkpoint_every: u32,
    /// Limits of the history that the server records for the dashboard.
    pub history: HistoryOptions,
    /// Memory and queue limits.
    pub limits: ServerLimits,
    /// Timeouts and intervals.
    pub timeouts: ServerTimeouts,
    /// Free space of the disk: see [`free_space`](Self::free_space).
    pub(crate) disk: DiskSpace,
}

/// An upstream: another server of the Tinker API, which executes requests on behalf of this server.
#[derive(Clone, Debug)]
pub(crate) struct UpstreamOptions {
    pub(crate) name: Arc<str>,
    pub(crate) driver: Arc<dyn UpstreamDriver>,
}

/// Accepted requests without a result that fail when a server starts, instead of being executed.
/// The failures are durable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum PendingOnStart {
    /// No request: the server does not start while a base model that requests need is missing.
    #[default]
    None,
    /// Requests whose base model is missing.
    Missing,
    /// All requests.
    All,
}

impl FromStr for PendingOnStart {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "missing" => Ok(Self::Missing),
            "all" => Ok(Self::All),
            _ => Err("expected missing or all".to_owned()),
        }
    }
}

/// Value of the option `--quantize`: `q8` or `q4` for all models, `NAME=q8` or `NAME=q4` for one
/// model.
///
/// ```
/// use tinkex_server::{Quantization, QuantizeRule};
///
/// let rule: QuantizeRule = "Qwen/Qwen3-0.6B=q4".parse()?;
/// assert_eq!(rule.model.as_deref(), Some("Qwen/Qwen3-0.6B"));
/// assert_eq!(rule.format, Quantization::Q4);
/// # Ok::<_, String>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct QuantizeRule {
    /// Name of the model, or `None` for all models.
    pub model: Option<String>,
    /// Format of the weights.
    pub format: Quantization,
}

impl FromStr for QuantizeRule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // Names may contain `=`, formats do not.
        let (model, format) = match text.rsplit_once('=') {
            Some((name, format)) => (Some(name), format),
            None => (None, text),
        };
        let format = match format {
            "q8" => Quantization::Q8,
            "q4" => Quantization::Q4,
            _ => return Err("expected q8, q4, NAME=q8 or NAME=q4".to_owned()),
        };
        if model == Some("") {
            return Err("expected the name of a model before =".to_owned());
        }
        Ok(Self { model: model.map(str::to_owned), format })
    }
}

/// Timeouts and intervals of a server.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ServerTimeouts {
    /// Maximum time for which a poll waits for a result before the response is `try_again` (default
    /// 30 s).
    pub poll_hold: Duration,
    /// Time a request waits for missing earlier sequence numbers before they are skipped (default
    /// 60 s).
    pub sequence_gap: Duration,
    /// Time a result is kept if its client does not acknowledge it (default 1 h). The time starts
    /// again when the server is restarted.
    pub result_retention: Duration,
    /// Time a result is kept after its client has finished the session (default 1 min): the client
    /// will not poll for the result any more.
    pub finished_session_retention: Duration,
    /// Time without a request or heartbeat after which a session expires (default 15 min). Zero
    /// disables expiry.
    pub session_expiry: Duration,
    /// Time after which an unused sampling session with weights without a name ends (default 6 h).
    /// Its weights are deleted then. Zero keeps it until its session ends or a client closes it.
    pub unused_sampler: Duration,
    /// Time for which an ended session without training runs is listed (default 30 days). Zero
    /// lists it forever.
    pub ended_session_retention: Duration,
    /// Time for which usage is counted by hour and session (default 90 days). Older usage is merged
    /// to one counter per day, user and base model. Zero merges nothing.
    pub usage_detail: Duration,
    /// Maximum time a client may take to send headers or a body, or to read a response (default
    /// 30 s). A body gets a further second for each 64 KiB that have arrived.
    pub client_io: Duration,
    /// Time that a connection has for its first authorized request, before the server may close the
    /// connection for another one (default 500 ms). See
    /// [`unauthenticated_connections`](ServerLimits::unauthenticated_connections).
    pub authentication: Duration,
    /// Interval at which the server checks whether the files of its TLS certificate have changed
    /// (default 10 s).
    pub tls_reload: Duration,
    /// Compute time on a model after which the server saves a snapshot of the model (default 20 s).
    /// After a restart, the server repeats at most about this much compute time per model.
    pub snapshot_after: Duration,
    /// Interval at which expired sessions, results, checkpoints and files are removed (default
    /// 30 s).
    pub expiry_interval: Duration,
    /// Time after which an unused model is unloaded from memory (default 10 min).
    pub idle_model: Duration,
    /// Time for which the server retries a model's request after temporary faults, such as I/O
    /// errors and a lack of memory, before the request fails (default 1 min). The model's later
    /// requests wait until the request has an outcome.
    pub fault_retry: Duration,
    /// Time for which the requests of a run wait for an upstream that does not respond, before they
    /// fail (default 10 min).
    pub upstream: Duration,
    /// Maximum time for which a stopping server waits for running inference requests, which are not
    /// durable (default 0). Meanwhile it refuses new work, and clients can poll their results.
    pub drain: Duration,
}

impl ServerOptions {
    /// Creates the options of a server on a free loopback port that stores its data in `data_dir`.
    #[must_use]
    pub fn new(data_dir: impl Into<PathBuf>) -> Self {
        Self {
            data_dir: data_dir.into(),
            address: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            api_key: None,
            create_api_key: false,
            models: Vec::new(),
            tokenizers: Vec::new(),
            aliases: Vec::new(),
            allow_origins: Vec::new(),
            tls: None,
            public_url: None,
            trusted_proxies: Vec::new(),
            hub_cache: None,
            threads: 0,
            bf16: false,
            quantize: None,
            quantize_models: Vec::new(),
            raw_logprobs: false,
            efficient_protocol: true,
            autosave_on_expiry: true,
            keep_checkpoints: None,
            run_ttl: None,
            pending_on_start: PendingOnStart::None,
            upstreams: Vec::new(),
            checkpoint_every: 10,
            history: HistoryOptions::default(),
            limits: ServerLimits::default(),
            timeouts: ServerTimeouts::default(),
            disk: DiskSpace::default(),
        }
    }

    /// Sets the function that returns the number of free bytes on the file system of a folder, or
    /// `None` if it is not known. By default, the server uses the free space that the system
    /// reports, which ignores some quotas.
    #[must_use]
    pub fn free_space(
        mut self,
        free_space: impl Fn(&Path) -> Option<u64> + Send + Sync + 'static,
    ) -> Self {
        self.disk = DiskSpace::new(free_space);
        self
    }

    /// Serves the Hugging Face model folder or GGUF file `path` under `name`.
    #[must_use]
    pub fn model(mut self, name: impl Into<String>, path: impl Into<PathBuf>) -> Self {
        self.models.push((name.into(), path.into()));
        self
    }

    /// Uses the tokenizer in `folder` for the model `name`; see [`tokenizers`](Self::tokenizers).
    #[must_use]
    pub fn tokenizer(mut self, name: impl Into<String>, folder: impl Into<PathBuf>) -> Self {
        self.tokenizers.push((name.into(), folder.into()));
        self
    }

    /// Returns the folder of the tokenizer that was given for a model.
    pub(crate) fn tokenizer_of(&self, model: &str) -> Option<&Path> {
        let given = self.tokenizers.iter().rev().find(|(name, _)| name == model);
        given.map(|(_, folder)| folder.as_path())
    }

    /// Quantizes frozen weights according to `rule`, the value of a command-line option.
    #[must_use]
    pub fn quantize_rule(mut self, rule: QuantizeRule) -> Self {
        match rule.model {
            None => self.quantize = Some(rule.format),
            Some(name) => self.quantize_models.push((name, rule.format)),
        }
        self
    }

    /// Returns the format in which the frozen weights of a model are quantized.
    pub(crate) fn quantization_of(&self, model: &str) -> Option<Quantization> {
        let own = self.quantize_models.iter().rev().find(|(name, _)| name == model);
        own.map(|(_, format)| *format).or(self.quantize)
    }

    /// Serves `target`, a base model, `tinker://` path or training run, as `alias` to inference
    /// requests.
    #[must_use]
    pub fn alias(mut self, alias: impl Into<String>, target: impl Into<String>) -> Self {
        self.aliases.push((alias.into(), target.into()));
        self
    }

    /// Lets web pages of `origin`, such as `http://localhost:3000`, use the inference endpoints.
    #[must_use]
    pub fn allow_origin(mut self, origin: impl Into<String>) -> Self {
        self.allow_origins.push(origin.into());
        self
    }

    /// Offers the base models of an upstream. The upstream trains and samples the runs of these
    /// models; the runs are as durable as the runs of the engine. `driver` sends the requests to
    /// the upstream; the crate `tinkex-gateway` implements a driver. Stored runs refer to the
    /// upstream by `name`.
    #[must_use]
    pub fn upstream(mut self, name: impl Into<String>, driver: Arc<dyn UpstreamDriver>) -> Self {
        self.upstreams.push(UpstreamOptions { name: name.into().into(), driver });
        self
    }

    /// Sets the address to listen on.
    #[must_use]
    pub fn address(mut self, address: SocketAddr) -> Self {
        self.address = address;
        self
    }

    /// Requires clients to send `key` in `x-api-key`.
    #[must_use]
    pub fn api_key(mut self, key: impl Into<String>) -> Self {
        self.api_key = Some(Secret::from(key.into()));
        self
    }
}

/// Returns the user's Hugging Face hub cache, if the folder exists. See [`HubCache::locate`] for
/// the environment variables that set its path.
#[must_use]
pub fn local_hub_cache() -> Option<PathBuf> {
    #[expect(clippy::disallowed_methods, reason = "read once, when a program starts a server")]
    let variable = |name: &str| match name {
        "HOME" => std::env::home_dir().map(Into::into),
        _ => std::env::var_os(name),
    };
    let cache = HubCache::locate(variable)?;
    cache.folder().is_dir().then(|| cache.folder().to_owned())
}

impl Default for ServerTimeouts {
    fn default() -> Self {
        Self {
            poll_hold: Duration::from_secs(30),
            sequence_gap: Duration::from_secs(60),
            result_retention: Duration::from_secs(3_600),
            finished_session_retention: Duration::from_secs(60),
            session_expiry: Duration::from_secs(900),
            unused_sampler: Duration::from_secs(6 * 3_600),
            ended_session_retention: Duration::from_secs(30 * 24 * 3_600),
            usage_detail: Duration::from_secs(90 * 24 * 3_600),
            client_io: Duration::from_secs(30),
            authentication: Duration::from_millis(500),
            tls_reload: Duration::from_secs(10),
            snapshot_after: Duration::from_secs(20),
            expiry_interval: Duration::from_secs(30),
            idle_model: Duration::from_secs(600),
            fault_retry: Duration::from_secs(60),
            upstream: Duration::from_secs(600),
            drain: Duration::ZERO,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rule_of_a_model_takes_precedence() {
        let rule = |text: &str| text.parse::<QuantizeRule>();
        let mut options = ServerOptions::new("data");
        assert_eq!(options.quantization_of("a"), None);
        for text in ["q8", "a=b=q4", "c=q4", "c=q8"] {
            options = options.quantize_rule(rule(text).unwrap());
        }
        for (name, want) in
            [("a", Quantization::Q8), ("a=b", Quantization::Q4), ("c", Quantization::Q8)]
        {
            assert_eq!(options.quantization_of(name), Some(want), "{name}");
        }
        for text in ["", "q5", "a=", "=q8", "a=q8 "] {
            assert!(rule(text).is_err(), "{text}");
        }
    }
}
