//! Backends: what executes the operations of a model. The engine of this process is one; each
//! upstream is another.
//!
//! A request is validated, persisted and enqueued in the same way for every backend, and its outcome
//! is persisted and published in the same way. A backend takes [operations](crate::operation) from
//! its own queue and returns [outcomes](crate::outcome).

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;

use crate::clock::Clock;
use crate::queue::Queue;
use crate::store::Store;

/// What executes the requests of a run or of a sampling session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Backend {
    /// The engine of this process.
    Engine,
    /// The upstream with this name.
    Upstream(Arc<str>),
}

impl Backend {
    /// Returns the backend of the weights `folder`, as records store it; the engine if the weights
    /// are in a folder.
    pub(crate) fn of_weights(folder: &str) -> Self {
        match folder.parse::<RemoteWeights>() {
            Ok(remote) => Self::Upstream(remote.upstream.into()),
            Err(_) => Self::Engine,
        }
    }
}

/// Saved weights on an upstream. Records store them as text in the field `folder`: no folder name
/// contains the separator.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RemoteWeights {
    /// Name of the upstream.
    pub(crate) upstream: String,
    /// Path of the checkpoint on the upstream.
    pub(crate) path: String,
}

/// Separates the name of an upstream from a path.
const SEPARATOR: char = '>';

#[cfg(feature = "upstream")]
impl RemoteWeights {
    /// Returns the path on the upstream of the weights `folder`, as records store it; `None` if the
    /// weights are in a folder.
    pub(crate) fn path_in(folder: &str) -> Option<&str> {
        folder.split_once(SEPARATOR).map(|(_, path)| path)
    }
}

impl fmt::Display for RemoteWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{SEPARATOR}{}", self.upstream, self.path)
    }
}

impl FromStr for RemoteWeights {
    type Err = NotRemote;

    fn from_str(text: &str) -> Result<Self, NotRemote> {
        let (upstream, path) = text.split_once(SEPARATOR).ok_or(NotRemote)?;
        Ok(Self { upstream: upstream.to_owned(), path: path.to_owned() })
    }
}

/// Error of a text that names a folder of this server, not weights on an upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NotRemote;

/// Queues of all backends, and what is known about the upstreams.
pub(crate) struct Backends {
    engine: Queue,
    upstreams: BTreeMap<Arc<str>, UpstreamEntry>,
}

/// An upstream as the request handlers see it.
pub(crate) struct UpstreamEntry {
    pub(crate) queue: Queue,
    status: Mutex<UpstreamStatus>,
    /// Work that needs no order and is not stored: a job that the process does not finish is lost.
    jobs: Mutex<Vec<UpstreamJob>>,
}

/// Work on the checkpoints of an upstream.
pub(crate) enum UpstreamJob {
    /// Deletes weights, given as records store them, once no durable record refers to them.
    Delete(String),
    /// Copies weights for sampling into a new folder.
    Download(WeightsDownload),
}

/// Copies weights from an upstream into a folder under `weights/`.
pub(crate) struct WeightsDownload {
    pub(crate) base_model: String,
    /// Path of the weights on the upstream.
    pub(crate) path: String,
    pub(crate) folder: PathBuf,
    /// Receives the reason if the weights cannot be copied.
    pub(crate) done: oneshot::Sender<Result<(), String>>,
}

/// What is known about an upstream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct UpstreamStatus {
    /// Base URL.
    pub(crate) url: String,
    /// Why the upstream cannot be used now; `None` if it responds.
    pub(crate) down: Option<String>,
    /// Whether it has ever responded. Until then, its protocol and its models are not known.
    pub(crate) was_reached: bool,
    /// Losses that it computes, if it has an older protocol; `None` if it has the current protocol,
    /// with all losses.
    pub(crate) losses: Option<&'static [&'static str]>,
}

impl UpstreamEntry {
    pub(crate) fn status(&self) -> MutexGuard<'_, UpstreamStatus> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the tasks of the upstream to do `job`.
    pub(crate) fn add_job(&self, job: UpstreamJob) {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner).push(job);
        self.queue.wake();
    }

    #[cfg(feature = "upstream")]
    pub(crate) fn take_jobs(&self) -> Vec<UpstreamJob> {
        std::mem::take(&mut self.jobs.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Backends {
    /// Creates the queues of the engine and of the upstreams, given by name and base URL.
    pub(crate) fn new<'a>(
        gap_timeout: Duration,
        clock: &Clock,
        upstreams: impl Iterator<Item = (&'a str, String)>,
    ) -> Self {
        let queue = || Queue::new(gap_timeout, clock.clone());
        let entry = |(name, url): (&str, String)| {
            let down = Some("it has not been reached yet".to_owned());
            let status = Mutex::new(UpstreamStatus { url, down, was_reached: false, losses: None });
            (Arc::from(name), UpstreamEntry { queue: queue(), status, jobs: Mutex::default() })
        };
        Self { engine: queue(), upstreams: upstreams.map(entry).collect() }
    }

    /// Returns the queue of the engine.
    pub(crate) fn engine(&self) -> &Queue {
        &self.engine
    }

    /// Returns the queue of a backend. An upstream that is not configured any more has the queue of
    /// the engine, which fails the requests with the reason.
    pub(crate) fn queue(&self, backend: &Backend) -> &Queue {
        match backend {
            Backend::Engine => &self.engine,
            Backend::Upstream(name) => {
                self.upstreams.get(name).map_or(&self.engine, |entry| &entry.queue)
            }
        }
    }

    /// Returns all queues.
    pub(crate) fn queues(&self) -> impl Iterator<Item = &Queue> {
        std::iter::once(&self.engine).chain(self.upstreams.values().map(|entry| &entry.queue))
    }

    /// Deletes weights on an upstream to which no record refers any more. Has no effect on weights
    /// in a folder, which the expiry task removes.
    pub(crate) fn discard(&self, folder: String) {
        if let Backend::Upstream(name) = Backend::of_weights(&folder)
            && let Some(entry) = self.upstreams.get(&name)
        {
            entry.add_job(UpstreamJob::Delete(folder));
        }
    }

    pub(crate) fn upstream(&self, name: &str) -> Option<&UpstreamEntry> {
        self.upstreams.get(name)
    }

    /// Returns all upstreams by name.
    pub(crate) fn upstreams(&self) -> impl Iterator<Item = (&Arc<str>, &UpstreamEntry)> {
        self.upstreams.iter()
    }

    /// Returns an upstream that has not responded yet, so that its models are not known.
    pub(crate) fn unreached(&self) -> Option<&Arc<str>> {
        let mut upstreams = self.upstreams.iter();
        upstreams.find(|(_, entry)| !entry.status().was_reached).map(|(name, _)| name)
    }

    /// Returns the upstream that a new run of a base model is assigned to: among those of `names`
    /// that respond, or among all if none does, the one with the fewest open runs.
    pub(crate) fn choose(&self, store: &Store, names: &[Arc<str>]) -> Option<Arc<str>> {
        let open_runs = |name: &str| {
            let runs = store.runs.values().map(|entry| &entry.row);
            let assigned = runs.filter(|run| {
                run.upstream.as_ref().is_some_and(|upstream| upstream.name == name)
                    && run.closed.is_none()
            });
            let is_open =
                |id| store.sessions.get(id).is_some_and(|session| session.row.end.is_none());
            assigned.filter(|run| is_open(&run.session)).count()
        };
        let is_down =
            |name: &str| self.upstreams.get(name).is_none_or(|entry| entry.status().down.is_some());
        names.iter().min_by_key(|name| (is_down(name), open_runs(name))).cloned()
    }
}

/// Largest seed that is sent to a server of an older protocol. SkyRL computes with signed 32-bit
/// seeds and adds the index of the sample.
const MAX_OLDER_SEED: u64 = (1 << 30) - 1;

/// Returns the seed for a server of an older protocol: small seeds as they are, others folded.
pub(crate) fn older_seed(seed: u64) -> u64 {
    match seed {
        0..=MAX_OLDER_SEED => seed,
        _ => (seed ^ (seed >> 30) ^ (seed >> 60)) & MAX_OLDER_SEED,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_for_older_servers_are_small() {
        assert_eq!(older_seed(7), 7);
        assert_eq!(older_seed(MAX_OLDER_SEED), MAX_OLDER_SEED);
        assert!([u64::MAX, 1 << 30, 1 << 62].map(older_seed).iter().all(|s| *s <= MAX_OLDER_SEED));
        assert_ne!(older_seed(1 << 40), older_seed(1 << 41));
    }

    #[test]
    fn weights_on_an_upstream_are_stored_as_text() {
        let remote =
            RemoteWeights { upstream: "gpu".to_owned(), path: "tinker://m/weights/a".to_owned() };
        assert_eq!(remote.to_string().parse(), Ok(remote.clone()));
        assert_eq!("m-weights-a-12".parse::<RemoteWeights>(), Err(NotRemote));
        let backend = Backend::of_weights(&remote.to_string());
        assert_eq!(backend, Backend::Upstream("gpu".into()));
        assert_eq!(Backend::of_weights("m-weights-a-12"), Backend::Engine);
    }
}
