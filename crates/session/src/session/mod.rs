//! [`Session`]: a session on the server, with its background tasks and the limits that its clients
//! share.

mod cancel;
mod dynamic;
mod heartbeat;
mod other_key;
mod pending_calls;

use std::collections::HashMap;
use std::fmt;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{Either, join_all, select};
use parking_lot::Mutex;
use tinkex_wire::{
    ClientConfig, CreateSession, FinishDetails, FinishReason, FinishSession, HandleHolder, LossId,
    RequestId, SamplerHandle, SessionId,
};
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

use crate::background::BackgroundTask;
use crate::connection::Connection;
use crate::dispatch::{Admission, Limit};
use crate::error::{Error, Result};
use crate::future::queue_log::QueueObserver;
use crate::settings::ClientSettings;
use crate::telemetry::TelemetryScope;
use crate::transport::{RequestOptions, Transport};

pub use cancel::CancelGuard;
use dynamic::DynamicSettings;
pub use other_key::OtherKeyConnection;
pub use pending_calls::{PendingCall, PendingCalls};

/// Time without any response after which [`Session::drain`] stops waiting for the server. Equal to
/// the default retry timeout, so that the wait outlasts a restart of the server.
const MAX_SILENCE: Duration = Duration::from_secs(300);
/// Maximum time for the request that reports the end of a session to the server.
const FINISH_TIMEOUT: Duration = Duration::from_secs(30);

/// Open session. Heartbeats keep the session alive until this value is closed or dropped.
pub struct Session {
    connection: Arc<Connection>,
    id: SessionId,
    settings: Arc<ClientSettings>,
    dynamic: Arc<DynamicSettings>,
    next_model: AtomicU32,
    next_sampler: AtomicU32,
    next_loss: AtomicU32,
    /// Ids of the losses registered with the server, by fingerprint.
    losses: tokio::sync::Mutex<HashMap<[u8; 32], LossId>>,
    upload_budget: Arc<Limit>,
    download_budget: Arc<Limit>,
    admission: Admission,
    cancellations: mpsc::UnboundedSender<RequestId>,
    tasks: Mutex<Vec<Arc<BackgroundTask>>>,
    /// Pending calls of each model.
    models: Mutex<Vec<Weak<PendingCalls>>>,
    closed: AtomicBool,
}

impl Session {
    /// Creates a session on the server.
    ///
    /// # Errors
    /// If the server cannot be reached or refuses the session.
    pub async fn open(
        settings: &Arc<ClientSettings>,
        connection: Arc<Connection>,
    ) -> Result<Arc<Self>> {
        let request = settings.session_request();
        let created = connection.transport().send(&request, &RequestOptions::default()).await?;
        if let Some(message) = created.info_message {
            tracing::info!("{message}");
        }
        if let Some(message) = created.warning_message {
            tracing::warn!("{message}");
        }
        if let Some(message) = created.error_message {
            tracing::error!("{message}");
        }
        if settings.telemetry {
            connection.start_telemetry(TelemetryScope::Session(&created.session_id));
        }
        Self::start(settings, connection, created.session_id)
    }

    /// Joins a session that another process created, for sampling only. Sends nothing.
    ///
    /// The session has a connection of its own, because the handle contains the server
    /// configuration to use.
    ///
    /// # Errors
    /// If no credential is found, or the server does not accept this kind of credential (API key or
    /// credential command).
    pub fn restore(settings: &Arc<ClientSettings>, handle: &SamplerHandle) -> Result<Arc<Self>> {
        let config = &handle.holder.client_config;
        let dynamic = &handle.holder.client_dynamic_config;
        let connection = Connection::restore(settings, config.clone(), dynamic.clone())?;
        if settings.telemetry {
            connection.start_telemetry(TelemetryScope::RestoredSession(&handle.session_id));
        }
        Self::start(settings, connection, handle.session_id.clone())
    }

    /// Creates the value for the session `id`, which exists on the server, and starts its
    /// background tasks: heartbeats, refresh of the dynamic settings, and cancellations. Sends
    /// nothing before it returns.
    ///
    /// # Errors
    /// If no credential is found.
    pub fn start(
        settings: &Arc<ClientSettings>,
        connection: Arc<Connection>,
        id: SessionId,
    ) -> Result<Arc<Self>> {
        let transport = connection.transport();
        let config = connection.config();
        let dynamic = DynamicSettings::new(connection.initial_dynamic_config().clone());
        let (cancellations, queue) = mpsc::unbounded_channel();
        let tasks = background_tasks(transport, &id, &dynamic, queue);
        let backoff = settings.backoff()?;
        Ok(Arc::new(Self {
            admission: Admission::new(config.sample_dispatch_bytes_semaphore_size, backoff),
            settings: Arc::clone(settings),
            dynamic,
            cancellations,
            tasks: Mutex::new(tasks),
            models: Mutex::default(),
            closed: AtomicBool::new(false),
            next_model: AtomicU32::new(0),
            next_sampler: AtomicU32::new(0),
            next_loss: AtomicU32::new(0),
            losses: tokio::sync::Mutex::default(),
            upload_budget: Limit::bytes(config.fwdbwd_dispatch_bytes_semaphore_size),
            download_budget: Limit::bytes(config.inflight_response_bytes_semaphore_size),
            connection,
            id,
        }))
    }

    /// Returns the id of the session.
    pub fn id(&self) -> &SessionId {
        &self.id
    }

    /// Returns the transport of the connection.
    pub fn transport(&self) -> &Arc<Transport> {
        self.connection.transport()
    }

    /// Returns the connection of the session.
    pub fn connection(&self) -> &Connection {
        &self.connection
    }

    /// Returns the callback that the caller has set for changes of the queue state, if any.
    pub fn queue_observer(&self) -> Option<QueueObserver> {
        self.settings.queue_observer.clone()
    }

    /// Returns the settings of the client.
    pub fn settings(&self) -> &ClientSettings {
        &self.settings
    }

    /// Returns the server's address and configuration, for a handle with which another process can
    /// sample in this session.
    pub fn holder(&self) -> HandleHolder {
        let config = self.config().clone();
        let dynamic = self.dynamic.get();
        let mut holder = HandleHolder::new(self.settings.base_url.as_str(), config, dynamic);
        let overrides = &self.settings.header_overrides;
        if !overrides.is_empty() {
            holder.default_headers_overrides = Some(overrides.iter().cloned().collect());
        }
        holder
    }

    /// Returns the server's configuration as of opening the connection.
    pub fn config(&self) -> &ClientConfig {
        self.connection.config()
    }

    /// Returns whether the next poll is delayed when the server responds "not ready" without
    /// holding the poll open.
    pub fn adaptive_polling(&self) -> bool {
        self.settings.adaptive_polling
    }

    /// Assigns the next sequence number to a new model and returns the number.
    pub fn next_model(&self) -> u32 {
        self.next_model.fetch_add(1, Ordering::Relaxed)
    }

    /// Assigns the next sequence number to a new sampling session and returns the number.
    pub fn next_sampler(&self) -> u32 {
        self.next_sampler.fetch_add(1, Ordering::Relaxed)
    }

    /// Assigns the next sequence number to a new custom loss and returns the number.
    pub fn next_loss(&self) -> u32 {
        self.next_loss.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns the ids of the custom losses that are registered with the server, by fingerprint.
    pub fn losses(&self) -> &tokio::sync::Mutex<HashMap<[u8; 32], LossId>> {
        &self.losses
    }

    /// Returns the admission control for sampling requests.
    pub fn admission(&self) -> &Admission {
        &self.admission
    }

    /// Queues the cancellation of a request, if the server has enabled cancellation.
    pub(crate) fn cancel(&self, request_id: RequestId) {
        if self.dynamic.get().sample_cancel_enabled {
            let _ = self.cancellations.send(request_id);
        }
    }

    /// Returns the limit on bytes of training requests being sent.
    pub fn upload_budget(&self) -> &Arc<Limit> {
        &self.upload_budget
    }

    /// Returns the limit on bytes of large results being received.
    pub(crate) fn download_budget(&self) -> &Arc<Limit> {
        &self.download_budget
    }

    /// Returns a tracker for the calls of a new model. [`drain`](Self::drain) waits for the tracked
    /// calls.
    pub fn track_calls(&self) -> Arc<PendingCalls> {
        let calls = Arc::new(PendingCalls::default());
        let mut models = self.models.lock();
        models.retain(|model| model.strong_count() > 0);
        models.push(Arc::downgrade(&calls));
        calls
    }

    /// Waits until all queued calls of all models have ended, or until the server has not responded
    /// for 300 seconds. A reachable server responds at least to the heartbeats.
    pub async fn drain(&self) {
        let models: Vec<Arc<PendingCalls>> = {
            let models = self.models.lock();
            models.iter().filter_map(Weak::upgrade).collect()
        };
        let ended = join_all(models.iter().map(|calls| calls.ended()));
        let silent = async {
            while let Some(left) = MAX_SILENCE.checked_sub(self.transport().silence()) {
                // `left` can be 0, and the loop must not spin.
                sleep(left.max(Duration::from_millis(1))).await;
            }
        };
        if let Either::Right(_) = select(ended, pin!(silent)).await {
            tracing::warn!("queued requests are dropped: the server does not respond");
        }
    }

    /// Finishes the session on the server and closes the connection. Waits at most 30 seconds for
    /// the server, and closes the connection even if the server does not respond. A second call has
    /// no effect.
    pub async fn close(&self, reason: FinishReason, detail: Option<String>) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        self.stop_tasks();
        let finish = FinishDetails::new(reason, detail);
        let request = FinishSession::new(self.id.clone(), finish);
        // A closed transport still sends `FinishSession`.
        self.transport().close();
        let options = RequestOptions::default();
        match timeout(FINISH_TIMEOUT, self.transport().send(&request, &options)).await {
            Ok(Ok(_)) => {}
            // Minimal servers lack this endpoint. They end a session some time after its last
            // heartbeat.
            Ok(Err(error)) if error.is_missing_endpoint() => {}
            Ok(Err(error)) => {
                tracing::warn!(%error, "cannot report the end of the session");
                let _ = self.connection.record_failure::<()>(Err(error));
            }
            Err(_) => tracing::warn!("cannot report the end of the session in time"),
        }
        self.leave().await;
    }

    /// Closes the connection without finishing the session on the server, so that another process
    /// can continue to use the session.
    pub async fn leave(&self) {
        self.stop_tasks();
        self.connection.close().await;
    }

    fn stop_tasks(&self) {
        self.tasks.lock().clear();
    }

    /// Runs `work`, cancelling it if the session is closed.
    ///
    /// # Errors
    /// An error of kind [`Closed`](tinkex_transport::ErrorKind::Closed) if the session is closed,
    /// else the error of `work`.
    pub fn run_until_closed<'a, T: 'a>(
        &'a self,
        work: impl Future<Output = Result<T>> + Send + 'a,
    ) -> impl Future<Output = Result<T>> + Send + 'a {
        // An async function would store `work` twice: as its argument and as the future that it
        // awaits. With ten thousand pending samples this memory matters, so `work` is boxed.
        let closed = Box::pin(self.transport().until_closed());
        select(Box::pin(work), closed).map(|first| match first {
            Either::Left((result, _)) => result,
            Either::Right(_) => Err(Error::closed()),
        })
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("id", &self.id).finish_non_exhaustive()
    }
}

/// Starts the background tasks of a session.
fn background_tasks(
    transport: &Arc<Transport>,
    id: &SessionId,
    dynamic: &Arc<DynamicSettings>,
    cancellations: mpsc::UnboundedReceiver<RequestId>,
) -> Vec<Arc<BackgroundTask>> {
    let background = transport.background();
    let sender = Arc::clone(transport);
    let id = id.clone();
    let heartbeat =
        background.start(move || heartbeat::keep_alive(Arc::clone(&sender), id.clone()));
    let sender = Arc::clone(transport);
    let settings = Arc::clone(dynamic);
    let refresh =
        background.start(move || dynamic::refresh(Arc::clone(&sender), Arc::clone(&settings)));
    let sender = Arc::clone(transport);
    let settings = Arc::clone(dynamic);
    let queue = Arc::new(tokio::sync::Mutex::new(cancellations));
    let cancel = background.start(move || {
        let settings = Arc::clone(&settings);
        cancel::send_cancellations(Arc::clone(&sender), settings, Arc::clone(&queue))
    });
    vec![heartbeat, refresh, cancel]
}

impl ClientSettings {
    fn session_request(&self) -> CreateSession {
        CreateSession::default()
            .tags(self.tags.clone())
            .user_metadata(Some(self.user_metadata.clone()))
            .project_id(self.project_id.clone())
            .display_name(self.display_name.clone())
    }
}
