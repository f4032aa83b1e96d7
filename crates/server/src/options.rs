//! [`Options`]: how a server is to run.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use tinkex_wire::Secret;

/// How a server is to run.
///
/// ```
/// use tinkex_server::Options;
///
/// let options = Options::new("data").model("Qwen/Qwen3-0.6B", "models/qwen3-0.6b");
/// assert!(options.address.ip().is_loopback());
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// Where everything is kept.
    pub data: PathBuf,
    /// Where to listen. An address that others can reach needs a [`key`](Self::key).
    pub address: SocketAddr,
    /// What clients must send; anything is taken if there is none.
    pub key: Option<Secret>,
    /// Names and Hugging Face folders.
    pub models: Vec<(String, PathBuf)>,
    /// A Hugging Face hub cache, whose models are served under their names.
    pub hub_cache: Option<PathBuf>,
    /// Threads that compute; 0 for one on each core.
    pub threads: usize,
    /// Keep frozen weights in bf16: half the memory, and faster where the CPU can.
    pub bf16: bool,
    /// Report log-probabilities of sampled tokens without the temperature.
    pub raw_logprobs: bool,
    /// Ask clients to do everything the efficient way: one poll for many samples, compressed bodies,
    /// losses on the server. Without it they do what they do with an old server.
    pub efficient: bool,
    /// When a session is given up because nothing is heard of it, save what its models learned since
    /// they were last saved: as `autosave-N`, for a day.
    pub autosave_on_expiry: bool,
    /// Start although requests that were promised need a base model that is not there: they fail.
    pub drop_undone: bool,
    /// Print a line for every finished job.
    pub log_jobs: bool,
    /// What may be asked at once.
    pub limits: Limits,
    /// How long things wait.
    pub times: Times,
}

/// What may be asked at once. Beyond it callers wait, or are told when to come back.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Limits {
    /// Open connections.
    pub connections: usize,
    /// Bytes of one body, also when decompressed.
    pub body: usize,
    /// Bytes of one body where no data is expected.
    pub plain_body: usize,
    /// Bytes of all bodies being read.
    pub bodies: usize,
    /// Requests in line.
    pub queued: usize,
    /// Bytes of requests in line.
    pub queued_bytes: usize,
    /// Bytes of answers kept in memory; the others stay on disk until they are fetched.
    pub answers: usize,
    /// Bytes of requests and answers on disk from which on those of no use are dropped.
    pub payloads: u64,
    /// Bytes of models in training that stay in memory; the others come back from disk.
    pub models: usize,
    /// Bytes of adapters that stay ready to be sampled from; the others come back from disk.
    pub weights: usize,
    /// Bytes that a training pass may keep.
    pub training_memory: usize,
    /// Bytes of keys and values that sampling may keep for one model.
    pub cache_memory: usize,
}

/// How long things wait.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Times {
    /// A poll without an answer is held this long.
    pub poll: Duration,
    /// A request waits this long for the ones numbered before it.
    pub gap: Duration,
    /// An answer that nobody fetches is kept this long.
    pub answer: Duration,
    /// A session that says nothing lives this long; zero for ever.
    pub session: Duration,
    /// A session that is over, and of which there is no run, is listed this long; zero for ever.
    pub ended_session: Duration,
    /// Headers and bodies must arrive within this.
    pub slow_client: Duration,
    /// Work on a model since its last snapshot, which a crash would mean doing again.
    pub snapshot: Duration,
    /// How often what expired is removed.
    pub sweep: Duration,
    /// A base model that nobody uses is unloaded after this.
    pub idle_model: Duration,
}

impl Options {
    /// A server on a free loopback port that keeps everything in `data`.
    #[must_use]
    pub fn new(data: impl Into<PathBuf>) -> Self {
        Self {
            data: data.into(),
            address: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            key: None,
            models: Vec::new(),
            hub_cache: None,
            threads: 0,
            bf16: false,
            raw_logprobs: false,
            efficient: true,
            autosave_on_expiry: true,
            drop_undone: false,
            log_jobs: false,
            limits: Limits::default(),
            times: Times::default(),
        }
    }

    /// Serves the Hugging Face folder `folder` as `name`.
    #[must_use]
    pub fn model(mut self, name: impl Into<String>, folder: impl Into<PathBuf>) -> Self {
        self.models.push((name.into(), folder.into()));
        self
    }

    /// Listens on `address`.
    #[must_use]
    pub fn address(mut self, address: SocketAddr) -> Self {
        self.address = address;
        self
    }

    /// Lets in only who sends `key`.
    #[must_use]
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.key = Some(Secret::from(key.into()));
        self
    }
}

/// This user's Hugging Face hub cache, if there is one: `HF_HUB_CACHE`, `HF_HOME/hub`, or
/// `~/.cache/huggingface/hub`.
#[must_use]
pub fn local_hub_cache() -> Option<PathBuf> {
    #[expect(clippy::disallowed_methods, reason = "asked once, by whoever starts a server")]
    let read = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let folder = read("HF_HUB_CACHE")
        .or_else(|| Some(read("HF_HOME")?.join("hub")))
        .or_else(|| Some(read("XDG_CACHE_HOME")?.join("huggingface/hub")))
        .or_else(|| Some(std::env::home_dir()?.join(".cache/huggingface/hub")))?;
    folder.is_dir().then_some(folder)
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 4_096,
            body: 64 << 20,
            plain_body: 1 << 20,
            bodies: 1 << 30,
            queued: 50_000,
            queued_bytes: 1 << 30,
            answers: 256 << 20,
            payloads: 32 << 20,
            models: 4 << 30,
            weights: 1 << 30,
            training_memory: 4 << 30,
            cache_memory: 2 << 30,
        }
    }
}

impl Default for Times {
    fn default() -> Self {
        Self {
            poll: Duration::from_secs(30),
            gap: Duration::from_secs(60),
            answer: Duration::from_secs(3_600),
            session: Duration::from_secs(900),
            ended_session: Duration::from_secs(30 * 24 * 3_600),
            slow_client: Duration::from_secs(30),
            snapshot: Duration::from_secs(20),
            sweep: Duration::from_secs(30),
            idle_model: Duration::from_secs(600),
        }
    }
}
