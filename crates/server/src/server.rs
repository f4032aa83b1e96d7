//! [`Server`]: start, connections and shutdown.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use http::Request;
use hyper::body::Incoming;
use tinkex_backend::queue::RequestQueue;
use tinkex_backend::upstream::{RunningUpstream, UpstreamSettings};
use tinkex_backoff::Backoff;
use tinkex_files::{FileLock, FolderAccess, create_private_folder};
use tinkex_store::clock;
use tinkex_store::disk::ServerHealth;
use tinkex_store::error::ServerError;
use tinkex_store::executor::{LoopHandle, TaskHandle, spawn};
use tinkex_store::hidden_paths::HiddenPaths;
use tinkex_store::log;
use tinkex_store::store::{NeededBackend, Store, UnfinishedRequest};
use tinkex_store::user::Principal;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;

use crate::admit;
use crate::api_key;
use crate::connections::{ClientAddress, Closing, ConnectionLimits, Connections, OpenConnection};
use crate::data_folder;
use crate::drain;
use crate::environment::Environment;
use crate::file_limit;
use crate::inference::{Inference, NamedModel};
use crate::models::{BaseModels, check_text_files};
use crate::options::{PendingOnStart, ServerOptions};
use crate::routes::{self, ConnectionPeer};
use crate::start_error::{StartAction, StartError};
use crate::state::ServerState;
use crate::stream::WriteTimeoutStream;
use crate::tls::{self, TlsIdentity};
use crate::worker::{Engines, Worker};

/// Time that open connections get to finish their requests when the server stops.
const CONNECTION_GRACE: Duration = Duration::from_secs(2);
/// Interval at which the time is saved for the next start.
const CLOCK_SAVE_INTERVAL: Duration = Duration::from_secs(300);
/// Interval at which the server checks whether the upstreams of restored samples have responded.
const REACHED_INTERVAL: Duration = Duration::from_millis(200);
/// Delays between two attempts to read a stored request at the start.
const READ_BACKOFF: Backoff = Backoff::new(Duration::from_millis(50)).cap(Duration::from_secs(5));
/// Delay after a failed `accept`. The usual cause is that the process has too many open files.
const ACCEPT_RETRY: Duration = Duration::from_millis(50);

/// A running server.
///
/// [`stop`](Self::stop) shuts the server down gracefully. Dropping the value stops the server
/// immediately, like a crash: accepted requests and stored results are durable, and the next start
/// continues with them.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    stop: watch::Sender<bool>,
    accept_task: tokio::task::JoinHandle<()>,
    handles: ServerHandles,
}

/// A running server without its listener.
pub(crate) struct ServerHandles {
    pub(crate) state: Arc<ServerState>,
    worker: Option<LoopHandle<usize>>,
    upstreams: Vec<Box<dyn RunningUpstream>>,
    /// Enqueues restored samples once their upstreams have responded.
    readmit_task: Option<TaskHandle>,
    expiry_task: TaskHandle,
    /// Prevents a second server from using the same data folder.
    _lock: FileLock,
}

impl std::fmt::Debug for ServerHandles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServerHandles").finish_non_exhaustive()
    }
}

/// Summary of a graceful shutdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShutdownSummary {
    /// Number of models whose state was saved.
    pub models_saved: usize,
    /// Number of accepted requests that the next start executes.
    pub requests_waiting: usize,
}

impl Server {
    /// Restores the state of the data folder, enqueues its unfinished requests and starts to
    /// listen.
    ///
    /// # Errors
    /// See [`StartError`] for the possible causes.
    pub async fn start(options: ServerOptions) -> Result<Self, StartError> {
        let has_key = options.api_key.is_some() || options.create_api_key;
        if !options.address.ip().is_loopback() && !has_key {
            return Err(StartError::UnprotectedAddress(options.address));
        }
        if options.api_key.as_ref().is_some_and(|key| key.expose().is_empty()) {
            return Err(StartError::EmptyApiKey);
        }
        if let Some(origin) = options.allow_origins.iter().find(|origin| !is_origin(origin)) {
            return Err(StartError::InvalidOrigin(origin.clone()));
        }
        let address = options.address;
        let mut options = options;
        let connections = options.limits.connections.min(file_limit::max_connections());
        options.limits.connections = connections;
        options.limits.log();
        let opened = OpenedServer::open(options, Environment::of_this_machine())?;
        let listener = listen(address).map_err(StartError::io(StartAction::Listen, address))?;
        let address =
            listener.local_addr().map_err(StartError::io(StartAction::Listen, address))?;
        let files = opened.state.options.tls.clone();
        let clock = opened.state.clock.clone();
        let tls = files.map(|files| TlsIdentity::load(files, clock)).transpose()?;
        let handles = opened.start().await?;
        check_text_files(&handles.state.models);
        let (stop, stopped) = watch::channel(false);
        let state = Arc::clone(&handles.state);
        let accept_task = spawn(accept_connections(listener, state, tls.map(Arc::new), stopped));
        Ok(Self { address, stop, accept_task, handles })
    }

    /// Returns the address that the server listens on.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the base URL for clients on this machine, for example `http://127.0.0.1:8080`. A
    /// server with TLS and a public URL returns the public URL, because the certificate is valid for
    /// its host name.
    #[must_use]
    pub fn base_url(&self) -> String {
        let options = &self.handles.state.options;
        let has_tls = options.tls.is_some();
        if let Some(url) = options.public_url.as_ref().filter(|_| has_tls) {
            return url.to_string();
        }
        let scheme = if has_tls { "https" } else { "http" };
        let mut address = self.address;
        match address.ip() {
            // A client cannot connect to an unspecified address.
            IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
            IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
            _ => {}
        }
        format!("{scheme}://{address}")
    }

    /// Returns the URL under which clients reach the server: the
    /// [public URL](ServerOptions::public_url), or else the base URL.
    #[must_use]
    pub fn public_url(&self) -> String {
        let public = self.handles.state.options.public_url.as_ref();
        public.map_or_else(|| self.base_url(), ToString::to_string)
    }

    /// Returns the URL of the dashboard with a code that gives one browser access for an hour after
    /// the call.
    #[must_use]
    pub fn dashboard_url(&self) -> String {
        let access = &self.handles.state.dashboard.access;
        match access.own_key() {
            Some(key) => format!("{}/?code={}", self.public_url(), access.create_code(key)),
            None => self.public_url(),
        }
    }

    /// Returns the names of the base models.
    #[must_use]
    pub fn models(&self) -> Vec<String> {
        self.handles.state.models.names()
    }

    /// Waits until the server cannot execute requests any more, and returns the reason: the worker
    /// thread or the writer thread has panicked, which is a bug, or another server has claimed the
    /// data folder. From then on the server rejects every request with 503 and must be dropped;
    /// accepted requests are durable.
    pub async fn broken(&self) -> ServerHealth {
        let mut health = self.handles.state.health.subscribe();
        let broken = health.wait_for(|health| *health != ServerHealth::Working).await;
        // Waiting cannot fail, because the sender lives as long as `self`.
        broken.map_or(ServerHealth::Panicked, |health| *health)
    }

    /// Shuts the server down: refuses new work, waits up to [`ServerTimeouts::drain`] for running
    /// inference requests, rejects new connections, finishes the running operation, saves the
    /// models, and waits until all results are durable. Requests that are still queued are executed
    /// after the next start.
    ///
    /// [`ServerTimeouts::drain`]: crate::ServerTimeouts::drain
    pub async fn stop(mut self) -> ShutdownSummary {
        let state = &self.handles.state;
        drain::drain(state, state.options.timeouts.drain).await;
        // Sending fails if the accept task has already ended. Then the server accepts no
        // connections anyway.
        let _ = self.stop.send(true);
        self.handles.stop().await
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.stop.send(true);
        self.accept_task.abort();
    }
}

/// A server that has restored its state and does not execute requests yet.
pub(crate) struct OpenedServer {
    pub(crate) state: Arc<ServerState>,
    lock: FileLock,
}

impl OpenedServer {
    /// Locks the data folder and restores its state.
    pub(crate) fn open(
        mut options: ServerOptions,
        environment: Environment,
    ) -> Result<Self, StartError> {
        let data_dir = options.data_dir.clone();
        let weights_dir = data_dir.join(tinkex_store::disk::WEIGHTS);
        create_private_folder(&data_dir)
            .and_then(|()| create_private_folder(&weights_dir))
            .map_err(StartError::io(StartAction::Create, data_dir.display()))?;
        check_access(&data_dir)?;
        let lock = data_folder::lock(&data_dir)?;
        if options.create_api_key && options.api_key.is_none() {
            options.api_key = Some(api_key::read_or_create(&data_dir)?);
        }
        let tokenizer_dir = data_dir.join("tokenizer");
        std::fs::create_dir_all(&tokenizer_dir)
            .map_err(StartError::io(StartAction::Create, tokenizer_dir.display()))?;
        let models = BaseModels::find(&tokenizer_dir, &options)?;
        let Environment { executor, clocks, .. } = &environment;
        let result_bytes = options.limits.result_bytes;
        let mut store = Store::open(&data_dir, result_bytes, executor, Arc::clone(clocks))
            .map_err(StartError::io(StartAction::Read, data_dir.display()))?;
        store.hidden_paths = Arc::new(hidden_paths(&options));
        store.limit_records(options.limits.record_bytes);
        check_needed_backends(&options, &store, &models)?;
        for (name, _) in &options.quantize_models {
            models.check_quantized(name)?;
        }
        let state = ServerState::new(options, store, models, weights_dir, environment);
        Ok(Self { state: Arc::new(state), lock })
    }

    /// Enqueues the unfinished requests, removes expired objects and starts the worker.
    pub(crate) async fn start(self) -> Result<ServerHandles, StartError> {
        let Self { state, lock } = self;
        let data_dir = state.options.data_dir.display().to_string();
        let restored = restore_requests(&state).await;
        let waiting = restored.map_err(StartError::io(StartAction::Read, data_dir))?;
        check_aliases(&state.inference);
        state.expiry.remove_expired().await;
        let engines = Engines::new(&state.options);
        let worker = Worker::start(state.worker_context(), engines)
            .map_err(StartError::io(StartAction::Spawn, "the worker thread"))?;
        let upstreams = start_upstreams(&state).await?;
        let readmit_task = (!waiting.is_empty()).then(|| {
            let readmit = readmit_when_reached(Arc::clone(&state), waiting);
            state.executor.spawn("restored samples", readmit)
        });
        let expiry_task = state.executor.spawn("expiry", expire_periodically(Arc::clone(&state)));
        let worker = Some(worker);
        Ok(ServerHandles { state, worker, upstreams, readmit_task, expiry_task, _lock: lock })
    }
}

/// Maximum time for which the start waits for the upstreams.
const FIRST_RESPONSE_TIMEOUT: Duration = Duration::from_secs(3);

/// Starts the tasks of the upstreams. Waits at most [`FIRST_RESPONSE_TIMEOUT`] for the first
/// responses, from which the server learns the models of the upstreams.
async fn start_upstreams(state: &ServerState) -> Result<Vec<Box<dyn RunningUpstream>>, StartError> {
    let settings = UpstreamSettings {
        timeout: state.options.timeouts.upstream,
        checkpoint_every: state.options.checkpoint_every,
    };
    let deadline = tokio::time::Instant::now() + FIRST_RESPONSE_TIMEOUT;
    let mut running = Vec::new();
    for options in &state.options.upstreams {
        let Some(handle) = state.backends.upstream(&options.name) else { continue };
        let context = state.admission.context.clone();
        let started = options.driver.start(Arc::clone(handle), context, settings, deadline).await;
        running.push(started.map_err(StartError::InvalidUpstream)?);
    }
    Ok(running)
}

impl ServerHandles {
    /// Finishes the running operation, saves the models, and waits until all results are durable.
    pub(crate) async fn stop(&mut self) -> ShutdownSummary {
        self.state.dashboard.close();
        self.state.backends.queues().for_each(RequestQueue::stop);
        self.state.inference.generations.fail_all(&ServerError::shutting_down());
        let mut models_saved = match self.worker.take() {
            Some(worker) => worker.finished().await.unwrap_or(0),
            None => 0,
        };
        for upstream in &mut self.upstreams {
            models_saved += upstream.stopped().await;
        }
        self.state.store().save_clock();
        // Wait for the writer before the lock on the data folder is released: after the release,
        // another server may open the folder.
        let writer = self.state.close();
        if let Some(writer) = writer {
            writer.finished().await;
        }
        let store = self.state.store();
        let waiting = store.requests.values().filter(|entry| entry.finished_at().is_none());
        ShutdownSummary { models_saved, requests_waiting: waiting.count() }
    }
}

impl Drop for ServerHandles {
    fn drop(&mut self) {
        self.state.dashboard.close();
        self.state.backends.queues().for_each(RequestQueue::stop);
        self.state.inference.generations.fail_all(&ServerError::shutting_down());
        self.expiry_task.abort();
        self.upstreams.clear();
        self.readmit_task.iter().for_each(TaskHandle::abort);
        // Wait for the disk but not for the worker: a training pass may take minutes. The worker's
        // later writes are rejected.
        let writer = self.state.close();
        if let Some(writer) = writer {
            writer.block();
        }
    }
}

/// Returns the paths that messages for clients do not contain: the folders and files of the options.
fn hidden_paths(options: &ServerOptions) -> HiddenPaths {
    let of_model = |(name, path): &(String, PathBuf)| (path.clone(), name.clone());
    let named = options.models.iter().chain(&options.tokenizers).map(of_model);
    let hub_cache = options.hub_cache.iter().map(|cache| (cache.clone(), "HUB_CACHE".to_owned()));
    let data = (options.data_dir.clone(), "DATA".to_owned());
    HiddenPaths::new(named.chain(hub_cache).chain([data]))
}

/// Checks that this user owns the data folder and that not all users can change it. Warns if the
/// folder's group or all users can access it.
fn check_access(data_dir: &Path) -> Result<(), StartError> {
    let access = tinkex_files::folder_access(data_dir)
        .map_err(StartError::io(StartAction::Use, data_dir.display()))?;
    if let FolderAccess::Shared { mode } = access {
        tracing::warn!(
            target: log::STORAGE,
            data_dir = %data_dir.display(),
            mode = format!("{mode:o}"),
            "other users of this machine can access the data folder; run `chmod 700` on it"
        );
    }
    Ok(())
}

/// Checks that the base models of unfinished requests are available, and that the upstreams of open
/// runs are configured. Without the check, a start without the right `--model` or `--upstream`
/// would permanently fail the unfinished requests.
fn check_needed_backends(
    options: &ServerOptions,
    store: &Store,
    models: &BaseModels,
) -> Result<(), StartError> {
    for (backend, need) in store.needed_backends() {
        let run = need.run.map(|run| run.to_string());
        let requests = need.requests;
        let error = match backend {
            NeededBackend::EngineModel(name) if models.get(&name).is_none() => {
                StartError::MissingModel { name, run, requests }
            }
            // The models of an upstream are known once it responds.
            NeededBackend::BaseModel(name)
                if models.get(&name).is_none() && options.upstreams.is_empty() =>
            {
                StartError::MissingModel { name, run, requests }
            }
            NeededBackend::Upstream(name)
                if options.upstreams.iter().all(|upstream| *upstream.name != *name) =>
            {
                StartError::MissingUpstream { name, run, runs: need.runs, requests }
            }
            _ => continue,
        };
        if options.pending_on_start == PendingOnStart::None {
            return Err(error);
        }
        tracing::warn!(target: log::MODEL, %error, "requests fail because they cannot be executed");
    }
    Ok(())
}

/// Returns whether a text is an origin in the form in which browsers send it: scheme, host, and
/// port if it is not the default port. Rejects a wildcard: it would allow any web page to use a
/// server without a key.
fn is_origin(text: &str) -> bool {
    let host = text.strip_prefix("http://").or_else(|| text.strip_prefix("https://"));
    host.is_some_and(|host| {
        let allowed = |byte: u8| byte.is_ascii_graphic() && !b"/?#@*".contains(&byte);
        !host.is_empty() && host.bytes().all(allowed)
    })
}

/// Logs a warning about aliases that name no model. Not an error, because the checkpoint of an
/// alias may be saved later.
fn check_aliases(inference: &Inference) {
    let administrator = Principal::administrator();
    for (alias, target) in &inference.aliases {
        if let Err(error) = NamedModel::resolve(inference, &administrator, alias) {
            tracing::warn!(target: log::MODEL, alias, model = target, %error, "alias has no model");
        }
    }
}

/// Enqueues the requests that were accepted before the restart and have no result. Returns the
/// requests that must wait until an upstream has responded.
async fn restore_requests(state: &Arc<ServerState>) -> io::Result<Vec<UnfinishedRequest>> {
    let admission = &state.admission;
    for row in admit::stored_losses(admission) {
        retry_reading(state, || admit::restore_loss(admission, &row)).await?;
    }
    let fail_all = state.options.pending_on_start == PendingOnStart::All;
    let unfinished = {
        let mut store = state.store();
        for run in store.runs.values() {
            if let Some(last) = run.row.last_seq {
                let id = &run.row.id;
                if let Some(queue) = state.backends.queue_of_model(&store, id) {
                    queue.start_at(id, last + 1);
                }
            }
        }
        store.requeue_unfinished()
    };
    if fail_all && !unfinished.is_empty() {
        tracing::warn!(
            target: log::REQUEST,
            requests = unfinished.len(),
            "all unfinished requests fail because the server was started with --fail-pending=all"
        );
    }
    let mut waiting = Vec::new();
    for request in unfinished {
        if fail_all {
            admit::fail_pending(admission, &request.row);
        } else if admit::waits_for_upstream(admission, &request.row) {
            waiting.push(request);
        } else {
            retry_reading(state, || admit::readmit(admission, request.clone())).await?;
        }
    }
    Ok(waiting)
}

/// Repeats `read` until it succeeds or has failed for
/// [`ServerTimeouts::fault_retry`](crate::ServerTimeouts::fault_retry). `read` fails only because of
/// a temporary fault of the disk.
async fn retry_reading(state: &ServerState, read: impl Fn() -> io::Result<()>) -> io::Result<()> {
    let start = tokio::time::Instant::now();
    let mut backoff = READ_BACKOFF;
    while let Err(error) = read() {
        if start.elapsed() >= state.options.timeouts.fault_retry {
            return Err(error);
        }
        tracing::warn!(target: log::STORAGE, %error, "cannot read a stored request; retrying");
        tokio::time::sleep(backoff.next_delay()).await;
    }
    Ok(())
}

/// Enqueues requests once their upstreams have responded, or when
/// [`ServerTimeouts::upstream`](crate::ServerTimeouts::upstream) has passed.
async fn readmit_when_reached(state: Arc<ServerState>, mut waiting: Vec<UnfinishedRequest>) {
    let start = tokio::time::Instant::now();
    while !waiting.is_empty() {
        tokio::time::sleep(REACHED_INTERVAL).await;
        let is_over = start.elapsed() >= state.options.timeouts.upstream;
        let waits = |request: &UnfinishedRequest| {
            !is_over && admit::waits_for_upstream(&state.admission, &request.row)
        };
        let (still_waiting, ready): (Vec<_>, Vec<_>) = waiting.into_iter().partition(waits);
        waiting = still_waiting;
        for request in ready {
            let admission = Arc::clone(&state.admission);
            let retried = request.clone();
            let readmit = move || admit::readmit(&admission, request);
            if let Ok(Err(error)) = state.executor.run_job(readmit).await {
                tracing::warn!(
                    target: log::STORAGE,
                    request_id = %retried.row.id,
                    %error,
                    "cannot read an unfinished request; the server reads it again"
                );
                // The fault is transient, and the client polls until the request has an outcome.
                waiting.push(retried);
            }
        }
    }
}

/// Removes expired objects at the expiry interval, and ticks the clock.
async fn expire_periodically(state: Arc<ServerState>) {
    let remove = async {
        loop {
            tokio::time::sleep(state.options.timeouts.expiry_interval).await;
            state.expiry.remove_expired().await;
        }
    };
    tokio::join!(remove, keep_clock(&state));
}

/// Ticks the clock, and saves the time for the next start.
async fn keep_clock(state: &ServerState) {
    loop {
        let save_at = tokio::time::Instant::now() + CLOCK_SAVE_INTERVAL;
        while tokio::time::Instant::now() < save_at {
            tokio::time::sleep(clock::TICK).await;
            if let Some(gap) = state.clock.tick() {
                tracing::info!(
                    target: log::STORAGE,
                    seconds = gap.as_secs(),
                    "the process was stopped or the machine was suspended; sessions and results \
                     do not expire because of it"
                );
            }
        }
        state.store().save_clock();
    }
}

/// Number of connections that wait to be accepted. When more arrive at once, the system drops the
/// first packet of a connection, and its client waits a second before it sends another.
const BACKLOG: u32 = 4_096;

/// Listens on an address.
fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // Connections of an earlier process must not prevent the start. On Windows, the option would let
    // two processes listen on the same port.
    #[cfg(not(windows))]
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

async fn accept_connections(
    listener: TcpListener,
    state: Arc<ServerState>,
    tls: Option<Arc<TlsIdentity>>,
    mut stopped: watch::Receiver<bool>,
) {
    let connections = Connections::new(connection_limits(&state.options));
    if let Some(tls) = &tls {
        let reload = reload_certificate(Arc::clone(&state), Arc::clone(tls), stopped.clone());
        spawn(reload);
    }
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = until_stopped(&mut stopped) => return,
        };
        let Ok((stream, peer)) = accepted else {
            tokio::time::sleep(ACCEPT_RETRY).await;
            continue;
        };
        // Accept first: idle connections are closed only for a client that waits.
        let connection = tokio::select! {
            connection = connections.add(client_address(&state.options, peer)) => connection,
            () = until_stopped(&mut stopped) => return,
        };
        let Some(connection) = connection else { continue };
        let acceptor = tls.as_ref().map(|tls| tls.acceptor());
        let state = Arc::clone(&state);
        spawn(serve_connection(stream, peer, acceptor, state, connection, stopped.clone()));
    }
}

/// Returns the limits on connections. Unauthenticated connections never use all connections.
fn connection_limits(options: &ServerOptions) -> ConnectionLimits {
    let limits = &options.limits;
    let share = limits.connections - limits.connections / 4;
    ConnectionLimits {
        total: limits.connections,
        unauthenticated: limits.unauthenticated_connections.min(share).max(1),
        per_address: limits.unauthenticated_connections_per_address.max(1),
        grace: options.timeouts.authentication,
    }
}

/// Returns the address for which the connections of a peer are counted. All clients of a reverse
/// proxy share its address.
fn client_address(options: &ServerOptions, peer: SocketAddr) -> ClientAddress {
    let is_proxy = options.trusted_proxies.iter().any(|proxies| proxies.contains(peer.ip()));
    if is_proxy { ClientAddress::shared(peer.ip()) } else { ClientAddress::new(peer.ip()) }
}

/// Reads the certificate again when its files have changed.
async fn reload_certificate(
    state: Arc<ServerState>,
    tls: Arc<TlsIdentity>,
    mut stopped: watch::Receiver<bool>,
) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(state.options.timeouts.tls_reload) => {}
            () = until_stopped(&mut stopped) => return,
        }
        let tls = Arc::clone(&tls);
        // If the job cannot run, for example without memory for a thread, the next one reads the
        // files.
        let _ = state.executor.run_job(move || tls.reload()).await;
    }
}

/// Serves a connection. With TLS, the connection counts as unauthenticated during the handshake,
/// which has a deadline.
async fn serve_connection(
    stream: TcpStream,
    peer: SocketAddr,
    tls: Option<TlsAcceptor>,
    state: Arc<ServerState>,
    open: OpenConnection,
    mut stopped: watch::Receiver<bool>,
) {
    // Disable Nagle's algorithm: responses are small and clients wait for them. A failure only
    // increases the latency.
    let _ = stream.set_nodelay(true);
    let timeout = state.options.timeouts.client_io;
    let Some(acceptor) = tls else {
        let peer = ConnectionPeer { address: peer, tls: false };
        let stream = WriteTimeoutStream::new(stream, timeout);
        return serve_http(stream, peer, state, open, stopped).await;
    };
    let handshake = tokio::time::timeout(timeout, tls::accept(stream, &acceptor, timeout));
    let accepted = tokio::select! {
        accepted = handshake => accepted.ok().flatten(),
        _ = open.closing() => None,
        () = until_stopped(&mut stopped) => None,
    };
    if let Some(stream) = accepted {
        let peer = ConnectionPeer { address: peer, tls: true };
        serve_http(stream, peer, state, open, stopped).await;
    }
}

async fn serve_http(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send,
    peer: ConnectionPeer,
    state: Arc<ServerState>,
    open: OpenConnection,
    mut stopped: watch::Receiver<bool>,
) {
    let timeout = state.options.timeouts.client_io;
    let io = hyper_util::rt::TokioIo::new(stream);
    let service = hyper::service::service_fn(|mut request: Request<Incoming>| {
        request.extensions_mut().insert(peer);
        request.extensions_mut().insert(open.id());
        let state = Arc::clone(&state);
        let active = open.begin_request();
        async move {
            let response = routes::handle(&state, request).await;
            Ok::<_, std::convert::Infallible>(response.map(|body| active.hold_in(body)))
        }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(hyper_util::rt::TokioTimer::new())
        .header_read_timeout(timeout)
        .max_headers(128)
        .max_buf_size(64 << 10)
        .serve_connection(io, service);
    let mut connection = std::pin::pin!(connection);
    // Ignore errors of a connection: the client disconnected or does not speak HTTP.
    tokio::select! {
        _ = connection.as_mut() => return,
        () = until_stopped(&mut stopped) => {}
        closing = open.closing() => {
            if closing == Closing::Now {
                return;
            }
            // An idle connection closes at once. A request that arrived in the meantime gets its
            // response first.
            connection.as_mut().graceful_shutdown();
            tokio::select! {
                _ = connection.as_mut() => return,
                () = until_stopped(&mut stopped) => {}
            }
        }
    }
    connection.as_mut().graceful_shutdown();
    let _ = tokio::time::timeout(CONNECTION_GRACE, connection).await;
}

async fn until_stopped(stopped: &mut watch::Receiver<bool>) {
    // An error means that the sender was dropped with the server.
    let _ = stopped.wait_for(|stopped| *stopped).await;
}
