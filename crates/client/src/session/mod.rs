//! [`Session`]: a program's stay on the server.

mod cancel;
mod custom;
mod dynamic;
mod heartbeat;
mod other_key;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::FutureExt as _;
use futures_util::future::{Either, select};
use tinkex_wire::{
    ClientConfig, CreateSession, FinishDetails, FinishReason, FinishSession, HandleHolder, LossId,
    RequestId, SamplerHandle, SessionId,
};
use tokio::sync::mpsc;

use crate::connection::Connection;
use crate::dispatch::{Admission, Limit};
use crate::error::{Error, ErrorKind, Result};
use crate::settings::Settings;
use crate::task::Task;
use crate::telemetry::TelemetryScope;
use crate::transport::backoff::Backoff;
use crate::transport::{RequestOptions, Transport};

pub(crate) use cancel::CancelGuard;
use dynamic::Dynamic;
pub(crate) use other_key::OtherKeyConnection;

/// An open session. It is kept alive until this is closed or dropped.
pub(crate) struct Session {
    connection: Connection,
    id: SessionId,
    settings: Arc<Settings>,
    dynamic: Arc<Dynamic>,
    next_model: AtomicU32,
    next_sampler: AtomicU32,
    next_loss: AtomicU32,
    /// Losses that the server has, by what they compute.
    losses: tokio::sync::Mutex<HashMap<[u8; 32], LossId>>,
    uploads: Arc<Limit>,
    downloads: Arc<Limit>,
    admission: Admission,
    cancels: mpsc::UnboundedSender<RequestId>,
    tasks: Mutex<Vec<Task>>,
    closed: AtomicBool,
}

impl Session {
    /// Asks the server for a session.
    pub(crate) async fn open(settings: &Arc<Settings>) -> Result<Arc<Self>> {
        let connection = Connection::start(settings).await?;
        let opened =
            connection.transport().send(&settings.session(), &RequestOptions::default()).await?;
        if let Some(message) = opened.info_message {
            tracing::info!("{message}");
        }
        if let Some(message) = opened.warning_message {
            tracing::warn!("{message}");
        }
        if let Some(message) = opened.error_message {
            tracing::error!("{message}");
        }
        if settings.telemetry {
            connection.report_for(TelemetryScope::Session(&opened.session_id));
        }
        Self::begin(settings, connection, opened.session_id)
    }

    /// A session that another process has opened, for sampling alone. Asks nothing.
    pub(crate) fn restore(settings: &Arc<Settings>, handle: &SamplerHandle) -> Result<Arc<Self>> {
        let (config, dynamic) =
            (&handle.holder.client_config, &handle.holder.client_dynamic_config);
        let connection = Connection::restore(settings, config.clone(), dynamic.clone())?;
        if settings.telemetry {
            connection.report_for(TelemetryScope::RestoredSession(&handle.session_id));
        }
        Self::begin(settings, connection, handle.session_id.clone())
    }

    fn begin(settings: &Arc<Settings>, connection: Connection, id: SessionId) -> Result<Arc<Self>> {
        let transport = connection.transport();
        let config = connection.config();
        let dynamic = Dynamic::new(connection.first_dynamic().clone());
        let (cancels, to_cancel) = mpsc::unbounded_channel();
        let tasks = vec![
            Task::spawn(heartbeat::keep_alive(Arc::clone(transport), id.clone())),
            Task::spawn(dynamic::refresh(Arc::clone(transport), Arc::clone(&dynamic))),
            Task::spawn(cancel::drain(Arc::clone(transport), Arc::clone(&dynamic), to_cancel)),
        ];
        let backoff = Backoff::of(&settings.base_url, &settings.credential(false)?);
        Ok(Arc::new(Self {
            admission: Admission::new(config.sample_dispatch_bytes_semaphore_size, backoff),
            settings: Arc::clone(settings),
            dynamic,
            cancels,
            tasks: Mutex::new(tasks),
            closed: AtomicBool::new(false),
            next_model: AtomicU32::new(0),
            next_sampler: AtomicU32::new(0),
            next_loss: AtomicU32::new(0),
            losses: tokio::sync::Mutex::default(),
            uploads: Limit::bytes(config.fwdbwd_dispatch_bytes_semaphore_size),
            downloads: Limit::bytes(config.inflight_response_bytes_semaphore_size),
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

    pub(crate) fn settings(&self) -> &Settings {
        &self.settings
    }

    /// What another process needs to sample in this session.
    pub(crate) fn holder(&self) -> HandleHolder {
        let (config, dynamic) = (self.config().clone(), self.dynamic.get());
        let mut holder = HandleHolder::new(self.settings.base_url.as_str(), config, dynamic);
        let overrides = &self.settings.overrides;
        if !overrides.is_empty() {
            holder.default_headers_overrides = Some(overrides.iter().cloned().collect());
        }
        holder
    }

    /// Where tokenizers come from.
    #[cfg(feature = "tokenizer")]
    pub(crate) fn hub(&self) -> Result<crate::tokenizer::Hub> {
        self.settings.hub()
    }

    pub(crate) fn config(&self) -> &ClientConfig {
        self.connection.config()
    }

    /// Whether to slow down for a server that answers "not yet" without waiting.
    pub(crate) fn adaptive_polling(&self) -> bool {
        self.settings.adaptive_polling
    }

    /// Whether the caller wants lost work to be asked for anew.
    pub(crate) fn resubmits(&self) -> bool {
        self.settings.retry.persists()
    }

    /// The number of the next model.
    pub(crate) fn next_model(&self) -> u32 {
        self.next_model.fetch_add(1, Ordering::Relaxed)
    }

    /// The number of the next sampling session.
    pub(crate) fn next_sampler(&self) -> u32 {
        self.next_sampler.fetch_add(1, Ordering::Relaxed)
    }

    /// When a sample may leave.
    pub(crate) fn admission(&self) -> &Admission {
        &self.admission
    }

    /// Nobody waits for this answer any more; the server is told if it wants to know.
    pub(crate) fn cancel(&self, request_id: RequestId) {
        if self.dynamic.get().sample_cancel_enabled {
            let _ = self.cancels.send(request_id);
        }
    }

    /// How many bytes of training requests may be on their way.
    pub(crate) fn upload_budget(&self) -> &Arc<Limit> {
        &self.uploads
    }

    /// How many bytes of large results may be fetched at once.
    pub(crate) fn download_budget(&self) -> &Arc<Limit> {
        &self.downloads
    }

    /// The number of the next custom loss.
    fn next_loss(&self) -> u32 {
        self.next_loss.fetch_add(1, Ordering::Relaxed)
    }

    /// Tells the server how it ended, and sends nothing more after that. The end is told even if
    /// the server does not hear it.
    pub(crate) async fn close(&self, reason: FinishReason, detail: Option<String>) -> Result<()> {
        if self.closed.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        self.stop();
        let finish = FinishDetails::new(reason, detail);
        let call = FinishSession::new(self.id.clone(), finish);
        self.transport().close();
        let told = match self.transport().send(&call, &RequestOptions::default()).await {
            // The first protocol has no word for the end.
            Err(error)
                if self.connection.is_first_protocol() && error.kind() == ErrorKind::NotFound =>
            {
                Ok(())
            }
            told => self.connection.record_failure(told),
        };
        self.leave().await;
        told
    }

    /// Stops without telling the server how it went: it may be another's session.
    pub(crate) async fn leave(&self) {
        self.stop();
        self.connection.close().await;
    }

    fn stop(&self) {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Does some work, unless this is closed first.
    pub(crate) fn run_until_closed<'a, T: 'a>(
        &'a self,
        work: impl Future<Output = Result<T>> + Send + 'a,
    ) -> impl Future<Output = Result<T>> + Send + 'a {
        // On the heap: an async function would hold the work twice, as argument and as awaited, and
        // ten thousand samples may wait here.
        let closed = Box::pin(self.transport().until_closed());
        select(Box::pin(work), closed).map(|first| match first {
            Either::Left((result, _)) => result,
            Either::Right(_) => Err(Error::closed()),
        })
    }
}

impl Settings {
    fn session(&self) -> CreateSession {
        CreateSession::default()
            .tags(self.tags.clone())
            .user_metadata(Some(self.user_metadata.clone()))
            .project_id(self.project_id.clone())
            .display_name(self.display_name.clone())
    }
}
