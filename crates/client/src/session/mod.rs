//! [`Session`]: a program's stay on the server.

mod cancel;
mod dynamic;
mod heartbeat;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use tinkex_wire::{
    ClientConfig, CreateSession, Finish, FinishReason, FinishSession, RequestId, SessionId,
};
use tokio::sync::mpsc;

use crate::dispatch::{ByteBudget, Gate};
use crate::engine::Engine;
use crate::error::Result;
use crate::settings::Settings;
use crate::task::Task;
use crate::transport::pause::Pause;
use crate::transport::{Extras, Transport};

pub(crate) use cancel::Awaited;
use dynamic::Dynamic;

/// An open session. It is kept alive until this is dropped.
pub(crate) struct Session {
    engine: Engine,
    id: SessionId,
    dynamic: Arc<Dynamic>,
    next_model: AtomicU32,
    next_sampler: AtomicU32,
    uploads: Arc<ByteBudget>,
    downloads: Arc<ByteBudget>,
    gate: Gate,
    cancels: mpsc::UnboundedSender<RequestId>,
    paced: bool,
    persists: bool,
    #[cfg(feature = "tokenizer")]
    hub: crate::tokenizer::HubSettings,
    _tasks: [Task; 3],
}

impl Session {
    pub(crate) async fn open(settings: &Settings) -> Result<Arc<Self>> {
        let engine = Engine::start(settings).await?;
        let transport = Arc::clone(engine.transport());
        let opened = transport.call(&settings.session(), &Extras::default()).await?;
        if let Some(message) = opened.info_message {
            tracing::info!("{message}");
        }
        if let Some(message) = opened.warning_message {
            tracing::warn!("{message}");
        }
        if let Some(message) = opened.error_message {
            tracing::error!("{message}");
        }
        let id = opened.session_id;
        let config = engine.config();
        let dynamic = Dynamic::new(engine.first_dynamic().clone());
        let (cancels, to_cancel) = mpsc::unbounded_channel();
        let tasks = [
            Task::spawn(heartbeat::keep_alive(Arc::clone(&transport), id.clone())),
            Task::spawn(dynamic::refresh(Arc::clone(&transport), Arc::clone(&dynamic))),
            Task::spawn(cancel::drain(transport, Arc::clone(&dynamic), to_cancel)),
        ];
        let pause = Pause::of(&settings.base_url, &settings.credential(false)?);
        Ok(Arc::new(Self {
            gate: Gate::new(config.sample_dispatch_bytes_semaphore_size, pause),
            dynamic,
            cancels,
            paced: settings.paced,
            persists: settings.retry.persists(),
            #[cfg(feature = "tokenizer")]
            hub: settings.hub(),
            _tasks: tasks,
            next_model: AtomicU32::new(0),
            next_sampler: AtomicU32::new(0),
            uploads: ByteBudget::new(config.fwdbwd_dispatch_bytes_semaphore_size),
            downloads: ByteBudget::new(config.inflight_response_bytes_semaphore_size),
            engine,
            id,
        }))
    }

    pub(crate) fn id(&self) -> &SessionId {
        &self.id
    }

    pub(crate) fn transport(&self) -> &Transport {
        self.engine.transport()
    }

    /// Where tokenizers come from.
    #[cfg(feature = "tokenizer")]
    pub(crate) fn hub(&self) -> Result<crate::tokenizer::Hub> {
        self.hub.hub()
    }

    pub(crate) fn config(&self) -> &ClientConfig {
        self.engine.config()
    }

    /// Whether to slow down for a server that answers "not yet" without waiting.
    pub(crate) fn paced(&self) -> bool {
        self.paced
    }

    /// Whether the caller wants lost work to be asked for anew.
    pub(crate) fn persists(&self) -> bool {
        self.persists
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
    pub(crate) fn uploads(&self) -> &Arc<ByteBudget> {
        &self.uploads
    }

    /// How many bytes of large results may be fetched at once.
    pub(crate) fn downloads(&self) -> &Arc<ByteBudget> {
        &self.downloads
    }

    /// Tells the server how it ended.
    pub(crate) async fn finish(&self, reason: FinishReason, detail: Option<String>) -> Result<()> {
        let finish = Finish { reason, detail };
        let call = FinishSession { session_id: self.id.clone(), finish };
        self.transport().call(&call, &Extras::default()).await
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
