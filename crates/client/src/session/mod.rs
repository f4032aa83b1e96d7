//! [`Session`]: a session on the server, with its background tasks and the limits that its clients
//! share.

mod cancel;
mod custom;
mod dynamic;
mod heartbeat;
mod other_key;
mod pending_calls;

use std::collections::HashMap;
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

pub(crate) use cancel::CancelGuard;
use dynamic::DynamicSettings;
pub(crate) use other_key::OtherKeyConnection;
pub(crate) use pending_calls::PendingCalls;

/// Time without any response after which a client that finishes stops waiting for the server. Equal
/// to the default retry timeout, so that finishing outlasts a restart of the server.
const MAX_SILENCE: Duration = Duration::from_secs(300);
/// Longest time that reporting the end of a session takes.
const FINISH_TIMEOUT: Duration = Duration::from_secs(30);

/// Open session. Heartbeats keep it alive until it is closed or dropped.
pub(crate) struct Session {
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
    pub(crate) async fn open(
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
    pub(crate) fn restore(
        settings: &Arc<ClientSettings>,
        handle: &SamplerHandle,
    ) -> Result<Arc<Self>> {
        let config = &handle.holder.client_config;
        let dynamic = &handle.holder.client_dynamic_config;
        let connection = Connection::restore(settings, config.clone(), dynamic.clone())?;
        if settings.telemetry {
            connection.start_telemetry(TelemetryScope::RestoredSession(&handle.session_id));
        }
        Self::start(settings, connection, handle.session_id.clone())
    }

    /// Creates the session value and starts the background tasks: heartbeats, refresh of the
    /// dynamic settings, and cancellations.
    pub(crate) fn start(
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

    pub(crate) fn id(&self) -> &SessionId {
        &self.id
    }

    pub(crate) fn transport(&self) -> &Arc<Transport> {
        self.connection.transport()
    }

    pub(crate) fn connection(&self) -> &Connection {
        &self.connection
    }

    /// Returns the caller's function for changes of the queue state.
    pub(crate) fn queue_observer(&self) -> Option<QueueObserver> {
        self.settings.queue_observer.clone()
    }

    pub(crate) fn settings(&self) -> &ClientSettings {
        &self.settings
    }

    /// Returns the server's address and configuration, for a handle with which another process can
    /// sample in this session.
    pub(crate) fn holder(&self) -> HandleHolder {
        let config = self.config().clone();
        let dynamic = self.dynamic.get();
        let mut holder = HandleHolder::new(self.settings.base_url.as_str(), config, dynamic);
        let overrides = &self.settings.header_overrides;
        if !overrides.is_empty() {
            holder.default_headers_overrides = Some(overrides.iter().cloned().collect());
        }
        holder
    }

    #[cfg(feature = "tokenizer")]
    pub(crate) fn hub(&self) -> Result<crate::tokenizer::Hub> {
        self.settings.hub()
    }

    pub(crate) fn config(&self) -> &ClientConfig {
        self.connection.config()
    }

    /// Returns whether the next poll is delayed when the server responds "not ready" without
    /// holding the poll open.
    pub(crate) fn adaptive_polling(&self) -> bool {
        self.settings.adaptive_polling
    }

    /// Returns the sequence number of the next model.
    pub(crate) fn next_model(&self) -> u32 {
        self.next_model.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns the sequence number of the next sampling session.
    pub(crate) fn next_sampler(&self) -> u32 {
        self.next_sampler.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns the sequence number of the next custom loss.
    fn next_loss(&self) -> u32 {
        self.next_loss.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns the admission control for sampling requests.
    pub(crate) fn admission(&self) -> &Admission {
        &self.admission
    }

    /// Queues the cancellation of a request, if the server has enabled cancellation.
    pub(crate) fn cancel(&self, request_id: RequestId) {
        if self.dynamic.get().sample_cancel_enabled {
            let _ = self.cancellations.send(request_id);
        }
    }

    /// Returns the limit on bytes of training requests being sent.
    pub(crate) fn upload_budget(&self) -> &Arc<Limit> {
        &self.upload_budget
    }

    /// Returns the limit on bytes of large results being received.
    pub(crate) fn download_budget(&self) -> &Arc<Limit> {
        &self.download_budget
    }

    /// Returns a tracker for the calls of a new model. [`drain`](Self::drain) waits for the tracked
    /// calls.
    pub(crate) fn track_calls(&self) -> Arc<PendingCalls> {
        let calls = Arc::new(PendingCalls::default());
        let mut models = self.models.lock();
        models.retain(|model| model.strong_count() > 0);
        models.push(Arc::downgrade(&calls));
        calls
    }

    /// Waits until all queued calls of all models have ended, or until the server has not responded
    /// for [`MAX_SILENCE`]. A reachable server responds at least to the heartbeats.
    pub(crate) async fn drain(&self) {
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

    /// Finishes the session on the server and closes the connection, even if the server does not
    /// respond within [`FINISH_TIMEOUT`]. A second call has no effect.
    pub(crate) async fn close(&self, reason: FinishReason, detail: Option<String>) {
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

    /// Closes the connection without finishing the session, which another process created and may
    /// still use.
    pub(crate) async fn leave(&self) {
        self.stop_tasks();
        self.connection.close().await;
    }

    fn stop_tasks(&self) {
        self.tasks.lock().clear();
    }

    /// Runs `work`, cancelling it if the client is closed.
    pub(crate) fn run_until_closed<'a, T: 'a>(
        &'a self,
        work: impl Future<Output = Result<T>> + Send + 'a,
    ) -> impl Future<Output = Result<T>> + Send + 'a {
        // An async function would store `work` twice: as its argument and as the future it awaits.
        // With ten thousand pending samples this memory matters, so `work` is boxed instead.
        let closed = Box::pin(self.transport().until_closed());
        select(Box::pin(work), closed).map(|first| match first {
            Either::Left((result, _)) => result,
            Either::Right(_) => Err(Error::closed()),
        })
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
