//! [`Session`]: a program's stay on the server.

mod cancel;
mod custom;
mod dynamic;
mod foreign;
mod heartbeat;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::FutureExt as _;
use futures_util::future::{Either, select};
use tinkex_wire::{
    ClientConfig, CreateSession, Finish, FinishReason, FinishSession, HandleHolder, LossId,
    RequestId, SamplerHandle, SessionId,
};
use tokio::sync::mpsc;

use crate::dispatch::{Gate, Limit};
use crate::engine::Engine;
use crate::error::{Error, ErrorKind, Result};
use crate::settings::Settings;
use crate::task::Task;
use crate::telemetry::Owner;
use crate::transport::pause::Pause;
use crate::transport::{Extras, Transport};

pub(crate) use cancel::Awaited;
use dynamic::Dynamic;
pub(crate) use foreign::Foreign;

/// An open session. It is kept alive until this is closed or dropped.
pub(crate) struct Session {
    engine: Engine,
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
    gate: Gate,
    cancels: mpsc::UnboundedSender<RequestId>,
    tasks: Mutex<Vec<Task>>,
    closed: AtomicBool,
}

impl Session {
    /// Asks the server for a session.
    pub(crate) async fn open(settings: &Arc<Settings>) -> Result<Arc<Self>> {
        let engine = Engine::start(settings).await?;
        let opened = engine.transport().call(&settings.session(), &Extras::default()).await?;
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
            engine.report_for(Owner::Session(&opened.session_id));
        }
        Self::begin(settings, engine, opened.session_id)
    }

    /// A session that another process has opened, for sampling alone. Asks nothing.
    pub(crate) fn restore(settings: &Arc<Settings>, handle: &SamplerHandle) -> Result<Arc<Self>> {
        let (config, dynamic) =
            (&handle.holder.client_config, &handle.holder.client_dynamic_config);
        let engine = Engine::restore(settings, config.clone(), dynamic.clone())?;
        if settings.telemetry {
            engine.report_for(Owner::Guest(&handle.session_id));
        }
        Self::begin(settings, engine, handle.session_id.clone())
    }

    fn begin(settings: &Arc<Settings>, engine: Engine, id: SessionId) -> Result<Arc<Self>> {
        let transport = engine.transport();
        let config = engine.config();
        let dynamic = Dynamic::new(engine.first_dynamic().clone());
        let (cancels, to_cancel) = mpsc::unbounded_channel();
        let tasks = vec![
            Task::spawn(heartbeat::keep_alive(Arc::clone(transport), id.clone())),
            Task::spawn(dynamic::refresh(Arc::clone(transport), Arc::clone(&dynamic))),
            Task::spawn(cancel::drain(Arc::clone(transport), Arc::clone(&dynamic), to_cancel)),
        ];
        let pause = Pause::of(&settings.base_url, &settings.credential(false)?);
        Ok(Arc::new(Self {
            gate: Gate::new(config.sample_dispatch_bytes_semaphore_size, pause),
            settings: Arc::clone(settings),
            dynamic,
            cancels,
            tasks: Mutex::new(tasks),
            closed: AtomicBool::new(false),
            next_model: AtomicU32::new(0),
            next_sampler: AtomicU32::new(0),
            next_loss: AtomicU32::new(0),
            losses: tokio::sync::Mutex::default(),
            uploads: Limit::of_bytes(config.fwdbwd_dispatch_bytes_semaphore_size),
            downloads: Limit::of_bytes(config.inflight_response_bytes_semaphore_size),
            engine,
            id,
        }))
    }

    pub(crate) fn id(&self) -> &SessionId {
        &self.id
    }

    pub(crate) fn transport(&self) -> &Arc<Transport> {
        self.engine.transport()
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.engine
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
        self.engine.config()
    }

    /// Whether to slow down for a server that answers "not yet" without waiting.
    pub(crate) fn paced(&self) -> bool {
        self.settings.paced
    }

    /// Whether the caller wants lost work to be asked for anew.
    pub(crate) fn persists(&self) -> bool {
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
    pub(crate) fn gate(&self) -> &Gate {
        &self.gate
    }

    /// Nobody waits for this answer any more; the server is told if it wants to know.
    pub(crate) fn cancel(&self, request_id: RequestId) {
        if self.dynamic.get().sample_cancel_enabled {
            let _ = self.cancels.send(request_id);
        }
    }

    /// How many bytes of training requests may be on their way.
    pub(crate) fn uploads(&self) -> &Arc<Limit> {
        &self.uploads
    }

    /// How many bytes of large results may be fetched at once.
    pub(crate) fn downloads(&self) -> &Arc<Limit> {
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
        let finish = Finish { reason, detail };
        let call = FinishSession { session_id: self.id.clone(), finish };
        self.transport().close();
        let told = match self.transport().call(&call, &Extras::default()).await {
            // The first protocol has no word for the end.
            Err(error)
                if self.engine.is_first_protocol() && error.kind() == ErrorKind::NotFound =>
            {
                Ok(())
            }
            told => self.engine.noted(told),
        };
        self.leave().await;
        told
    }

    /// Stops without telling the server how it went: it may be another's session.
    pub(crate) async fn leave(&self) {
        self.stop();
        self.engine.close().await;
    }

    fn stop(&self) {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Does some work, unless this is closed first.
    pub(crate) fn unless_closed<'a, T: 'a>(
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
        CreateSession {
            tags: self.tags.clone(),
            user_metadata: Some(self.user_metadata.clone()),
            project_id: self.project_id.clone(),
            display_name: self.display_name.clone(),
            ..CreateSession::default()
        }
    }
}
