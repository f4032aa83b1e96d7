//! [`Server`]: start, connections and shutdown.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use http::Request;
use hyper::body::Incoming;
use tinkex_backend::queue::RequestQueue;
use tinkex_backend::upstream::{RunningUpstream, UpstreamSettings};
use tinkex_files::{FileLock, FolderAccess, LockError, create_private_folder};
use tinkex_store::clock;
use tinkex_store::error::ServerError;
use tinkex_store::executor::{LoopHandle, TaskHandle, spawn};
use tinkex_store::log;
use tinkex_store::store::{NeededBackend, Store, UnfinishedRequest};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::admit;
use crate::api_key;
use crate::connections::{Connections, OpenConnection};
use crate::environment::Environment;
use crate::file_limit;
use crate::inference::{Inference, NamedModel};
use crate::models::{BaseModels, check_text_files};
use crate::options::{PendingOnStart, ServerOptions};
use crate::routes;
use crate::start_error::{StartAction, StartError};
use crate::state::ServerState;
use crate::stream::WriteTimeoutStream;
use crate::worker::{Engines, Worker};

/// Time that open connections get to finish their requests when the server stops.
const CONNECTION_GRACE: Duration = Duration::from_secs(2);
/// Interval at which the time is saved for the next start.
const CLOCK_SAVE_INTERVAL: Duration = Duration::from_secs(300);
/// Interval at which the server checks whether the upstreams of restored samples have responded.
const REACHED_INTERVAL: Duration = Duration::from_millis(200);
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
        let listener = TcpListener::bind(address)
            .await
            .map_err(StartError::io(StartAction::Listen, address))?;
        let address =
            listener.local_addr().map_err(StartError::io(StartAction::Listen, address))?;
        let handles = opened.start().await?;
        check_text_files(&handles.state.models);
        let (stop, stopped) = watch::channel(false);
        let state = Arc::clone(&handles.state);
        let accept_task = spawn(accept_connections(listener, state, stopped));
        Ok(Self { address, stop, accept_task, handles })
    }

    /// Returns the address that the server listens on.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the base URL for clients on this machine, for example `http://127.0.0.1:8080`.
    #[must_use]
    pub fn base_url(&self) -> String {
        let mut address = self.address;
        match address.ip() {
            // A client cannot connect to an unspecified address.
            IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
            IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
            _ => {}
        }
        format!("http://{address}")
    }

    /// Returns the URL of the dashboard with a code that gives one browser access for an hour after
    /// the call.
    #[must_use]
    pub fn dashboard_url(&self) -> String {
        let access = &self.handles.state.dashboard.access;
        if access.needs_login() {
            format!("{}/?code={}", self.base_url(), access.create_code())
        } else {
            self.base_url()
        }
    }

    /// Returns the names of the base models.
    #[must_use]
    pub fn models(&self) -> Vec<String> {
        self.handles.state.models.names()
    }

    /// Waits until the worker thread or the writer thread has panicked, which is a bug. From then
    /// on the server rejects every request with 503 and must be started again; accepted requests
    /// are durable.
    pub async fn broken(&self) {
        let mut broken = self.handles.state.broken.subscribe();
        // Waiting cannot fail, because the sender lives as long as `self`.
        let _ = broken.wait_for(|broken| *broken).await;
    }

    /// Shuts the server down: rejects new connections, finishes the running operation, saves the
    /// models, and waits until all results are durable. Requests that are still queued are executed
    /// after the next start.
    pub async fn stop(mut self) -> ShutdownSummary {
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
        let lock_path = data_dir.join("lock");
        let lock = match FileLock::acquire(&lock_path) {
            Ok(lock) => lock,
            Err(LockError::InUse) => return Err(StartError::DataDirInUse(data_dir)),
            Err(error) => {
                return Err(StartError::io(StartAction::Lock, lock_path.display())(error.into()));
            }
        };
        if options.create_api_key && options.api_key.is_none() {
            options.api_key = Some(api_key::read_or_create(&data_dir)?);
        }
        let tokenizer_dir = data_dir.join("tokenizer");
        std::fs::create_dir_all(&tokenizer_dir)
            .map_err(StartError::io(StartAction::Create, tokenizer_dir.display()))?;
        let models = BaseModels::find(&tokenizer_dir, &options)?;
        let Environment { executor, clocks, .. } = &environment;
        let result_bytes = options.limits.result_bytes;
        let store = Store::open(&data_dir, result_bytes, executor, Arc::clone(clocks))
            .map_err(StartError::io(StartAction::Read, data_dir.display()))?;
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
        let waiting =
            restore_requests(&state).map_err(StartError::io(StartAction::Read, data_dir))?;
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
    for (alias, target) in &inference.aliases {
        if let Err(error) = NamedModel::resolve(inference, alias) {
            tracing::warn!(target: log::MODEL, alias, model = target, %error, "alias has no model");
        }
    }
}

/// Enqueues the requests that were accepted before the restart and have no result. Returns the
/// requests that must wait until an upstream has responded.
fn restore_requests(state: &Arc<ServerState>) -> io::Result<Vec<UnfinishedRequest>> {
    let admission = &state.admission;
    admit::restore_losses(admission);
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
            admit::readmit(admission, request)?;
        }
    }
    Ok(waiting)
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

async fn accept_connections(
    listener: TcpListener,
    state: Arc<ServerState>,
    mut stopped: watch::Receiver<bool>,
) {
    let connections = Connections::new(state.options.limits.connections);
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
            connection = connections.add() => connection,
            () = until_stopped(&mut stopped) => return,
        };
        spawn(serve_connection(stream, peer, Arc::clone(&state), connection, stopped.clone()));
    }
}

async fn serve_connection(
    stream: TcpStream,
    peer: SocketAddr,
    state: Arc<ServerState>,
    open: OpenConnection,
    mut stopped: watch::Receiver<bool>,
) {
    // Disable Nagle's algorithm: responses are small and clients wait for them. A failure only
    // increases the latency.
    let _ = stream.set_nodelay(true);
    let timeout = state.options.timeouts.client_io;
    let io = hyper_util::rt::TokioIo::new(WriteTimeoutStream::new(stream, timeout));
    let service = hyper::service::service_fn(|mut request: Request<Incoming>| {
        request.extensions_mut().insert(routes::PeerAddress(peer));
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
        () = open.closing() => {
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
