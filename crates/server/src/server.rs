//! [`Server`]: starts, listens, stops.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use tinkex_files::{FileLock, LockError, create_private_folder};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};

use crate::admit;
use crate::models::Models;
use crate::options::ServerOptions;
use crate::routes;
use crate::state::Shared;
use crate::store::Store;
use crate::stream::Patient;
use crate::sweep;
use crate::task;
use crate::worker::Worker;

/// A server that runs until it is stopped or dropped.
///
/// Dropping it stops it as a crash would; nothing that was promised is lost by that either.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    stop: watch::Sender<bool>,
    inside: Inside,
}

struct Inside {
    shared: Arc<Shared>,
    worker: Option<JoinHandle<usize>>,
    listening: tokio::task::JoinHandle<()>,
    sweeping: tokio::task::JoinHandle<()>,
    /// Held so that no second server uses the same folder.
    _lock: FileLock,
}

impl std::fmt::Debug for Inside {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inside").finish_non_exhaustive()
    }
}

/// What a server that stopped has to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShutdownSummary {
    /// Models whose state was written down.
    pub models_saved: usize,
    /// Requests that are carried out after the next start.
    pub requests_waiting: usize,
}

/// Why a server did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The address can be reached by others, and there is no key.
    #[error("{0} can be reached from other machines; give a key, or listen on 127.0.0.1")]
    UnprotectedAddress(SocketAddr),
    /// The key is empty, so everybody has it.
    #[error("the key is empty; give one that nobody guesses, or none on 127.0.0.1")]
    EmptyApiKey,
    /// The data folder or the address cannot be used.
    #[error("cannot {action} {target}: {source}")]
    Io {
        /// What was tried.
        action: StartAction,
        /// On what.
        target: String,
        /// What the system said.
        source: io::Error,
    },
    /// Another server uses the data folder.
    #[error("{} is in use by another server", .0.display())]
    DataDirInUse(PathBuf),
    /// Requests that were promised need a base model that is not there.
    #[error(
        "{requests} requests that were promised wait for {name:?}; start with \
         --model {name}=FOLDER, with --drop-undone to let them fail, or with another data folder"
    )]
    MissingModel {
        /// Its name.
        name: String,
        /// How many wait for it.
        requests: usize,
    },
    /// A base model cannot be used.
    #[error("a base model cannot be used: {0}")]
    InvalidModel(#[from] tinkex_engine::Error),
}

/// Step of the start that an I/O error interrupted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StartAction {
    /// Creating the data directory or a file in it.
    Create,
    /// Locking the data directory.
    Lock,
    /// Reading the data directory.
    Read,
    /// Binding the listening socket.
    Listen,
    /// Spawning the worker thread.
    Spawn,
}

impl std::fmt::Display for StartAction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Create => "create",
            Self::Lock => "lock",
            Self::Read => "read",
            Self::Listen => "listen on",
            Self::Spawn => "start",
        })
    }
}

impl StartError {
    fn io(action: StartAction, target: impl std::fmt::Display) -> impl FnOnce(io::Error) -> Self {
        let target = target.to_string();
        move |source| Self::Io { action, target, source }
    }
}

impl Server {
    /// Comes back to where the data folder says it was, and listens.
    ///
    /// # Errors
    /// If the address is open to strangers, the key is empty, or the folder, the address or a model cannot be used.
    pub async fn start(options: ServerOptions) -> Result<Self, StartError> {
        if !options.address.ip().is_loopback() && options.api_key.is_none() {
            return Err(StartError::UnprotectedAddress(options.address));
        }
        if options.api_key.as_ref().is_some_and(|key| key.expose().is_empty()) {
            return Err(StartError::EmptyApiKey);
        }
        crate::log::show_jobs(options.log_jobs);
        let data = options.data_dir.clone();
        let place = data.display().to_string();
        let folders = data.join(crate::disk::WEIGHTS);
        create_private_folder(&data)
            .and_then(|()| create_private_folder(&folders))
            .map_err(StartError::io(StartAction::Create, &place))?;
        let lock_path = data.join("lock");
        let lock = match FileLock::acquire(&lock_path) {
            Ok(lock) => lock,
            Err(LockError::InUse) => return Err(StartError::DataDirInUse(data)),
            Err(error) => {
                return Err(StartError::io(StartAction::Lock, lock_path.display())(error.into()));
            }
        };
        let own = data.join("tokenizer");
        std::fs::create_dir_all(&own)
            .map_err(StartError::io(StartAction::Create, own.display()))?;
        let models = Models::find(&own, &options.models, options.hub_cache.as_deref())?;
        let store = Store::open(&data, options.limits.result_bytes)
            .map_err(StartError::io(StartAction::Read, &place))?;
        for (name, requests) in store.needed() {
            if models.get(&name).is_some() {
                continue;
            }
            // They would fail for good, by one wrong start.
            if !options.drop_undone {
                return Err(StartError::MissingModel { name, requests });
            }
            crate::log::warn(format_args!(
                "{requests} requests that were promised fail, since there is no {name:?}"
            ));
        }
        let listener = TcpListener::bind(options.address)
            .await
            .map_err(StartError::io(StartAction::Listen, options.address))?;
        let address =
            listener.local_addr().map_err(StartError::io(StartAction::Listen, options.address))?;
        let shared = Arc::new(Shared::new(options, store, models, folders));
        come_back(&shared);
        let first = Arc::clone(&shared);
        // Files are removed here.
        let _ = tokio::task::spawn_blocking(move || sweep::sweep(&first)).await;
        let worker = Worker::start(Arc::clone(&shared))
            .map_err(StartError::io(StartAction::Spawn, "the worker thread"))?;
        let (stop, stopped) = watch::channel(false);
        let listening = task::spawn(listen(listener, Arc::clone(&shared), stopped.clone()));
        let sweeping = task::spawn(sweep_always(Arc::clone(&shared)));
        let inside = Inside { shared, worker: Some(worker), listening, sweeping, _lock: lock };
        Ok(Self { address, stop, inside })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What to give a client: `http://127.0.0.1:PORT`.
    #[must_use]
    pub fn base_url(&self) -> String {
        let mut address = self.address;
        match address.ip() {
            // Every address is no address to call.
            IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
            IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
            _ => {}
        }
        format!("http://{address}")
    }

    /// The names of the base models.
    #[must_use]
    pub fn models(&self) -> Vec<String> {
        let all = self.inside.shared.models.supported();
        all.into_iter().filter_map(|model| model.model_name).collect()
    }

    /// Waits until the server has made a mistake that it cannot go on after, which none should. It
    /// refuses everything from then on; starting it anew carries out what was promised.
    pub async fn broken(&self) {
        let mut broken = self.inside.shared.broken.subscribe();
        // The sender lives as long as `self`.
        let _ = broken.wait_for(|broken| *broken).await;
    }

    /// Takes nothing more in, finishes what runs right now, and writes the models down. What waits
    /// in line is carried out after the next start.
    pub async fn stop(mut self) -> ShutdownSummary {
        // The listener may have ended by itself.
        let _ = self.stop.send(true);
        self.inside.shared.queue.stop();
        let worker = self.inside.worker.take();
        let saved =
            tokio::task::spawn_blocking(move || worker.and_then(|worker| worker.join().ok()));
        let models_saved = saved.await.ok().flatten().unwrap_or(0);
        let closed = self.inside.shared.close();
        // What was answered so far is on disk before another server may use the folder.
        let _ = tokio::task::spawn_blocking(closed).await;
        let store = self.inside.shared.store();
        let waiting = store.requests.values().filter(|entry| entry.answered_at().is_none());
        let requests_waiting = waiting.count();
        drop(store);
        ShutdownSummary { models_saved, requests_waiting }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.stop.send(true);
        self.inside.shared.queue.stop();
        self.inside.listening.abort();
        self.inside.sweeping.abort();
        // The worker is not waited for: a pass may take long. It finds the disk closed.
        self.inside.shared.close()();
    }
}

/// Lines up what was promised before the restart.
fn come_back(shared: &Arc<Shared>) {
    admit::relearn_losses(shared);
    let undone = {
        let mut store = shared.store();
        for run in store.runs.values() {
            if let Some(last) = run.row.last_seq {
                shared.queue.start_at(&run.row.id, last + 1);
            }
        }
        store.undone()
    };
    for undone in undone {
        admit::readmit(shared, undone);
    }
}

async fn sweep_always(shared: Arc<Shared>) {
    let mut last = sweep::Moment::now();
    loop {
        tokio::time::sleep(shared.options.timeouts.expiry_interval).await;
        let moment = sweep::Moment::now();
        if let Some(gap) = moment.gap_since(last) {
            shared.store().slept(gap);
        }
        last = moment;
        let shared = Arc::clone(&shared);
        // Files are removed here.
        let _ = tokio::task::spawn_blocking(move || sweep::sweep(&shared)).await;
    }
}

async fn listen(listener: TcpListener, shared: Arc<Shared>, mut stopped: watch::Receiver<bool>) {
    let connections = Arc::new(Semaphore::new(shared.options.limits.connections));
    loop {
        let Ok(permit) = Arc::clone(&connections).acquire_owned().await else { return };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = until_stopped(&mut stopped) => return,
        };
        let Ok((stream, _)) = accepted else {
            // Out of file handles, most likely: give others time to close theirs.
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let (shared, mut stopped) = (Arc::clone(&shared), stopped.clone());
        task::spawn(async move {
            // Answers are small and waited for.
            let _ = stream.set_nodelay(true);
            let limit = shared.options.timeouts.client_io;
            let io = hyper_util::rt::TokioIo::new(Patient::new(stream, limit));
            let service = hyper::service::service_fn(move |request| {
                let shared = Arc::clone(&shared);
                async move { Ok::<_, std::convert::Infallible>(routes::answer(&shared, request).await) }
            });
            let connection = hyper::server::conn::http1::Builder::new()
                .timer(hyper_util::rt::TokioTimer::new())
                .header_read_timeout(limit)
                .max_headers(128)
                .max_buf_size(64 << 10)
                .serve_connection(io, service);
            let mut connection = std::pin::pin!(connection);
            // A client that goes away or speaks no HTTP is its own business.
            let ended = tokio::select! {
                _ = connection.as_mut() => true,
                () = until_stopped(&mut stopped) => false,
            };
            if !ended {
                connection.as_mut().graceful_shutdown();
                let _ = tokio::time::timeout(Duration::from_secs(2), connection).await;
            }
            drop(permit);
        });
    }
}

async fn until_stopped(stopped: &mut watch::Receiver<bool>) {
    // An error means that the server is gone, which is the same.
    let _ = stopped.wait_for(|stopped| *stopped).await;
}
