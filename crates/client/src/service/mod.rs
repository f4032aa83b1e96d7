//! [`ServiceClient`]: the entry point of the crate.

mod builder;
mod finish;

use std::collections::HashMap;
use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::SystemTime;

use tinkex_wire::{
    CheckpointKind, FinishReason, SamplerHandle, ServerCapabilities, ServerCapabilitiesRequest,
    SessionId, Timestamp, TinkerPath,
};
use tokio::sync::{OnceCell, watch};

use crate::call_options::CallOptions;
use crate::config::BaseUrl;
use crate::connection::Connection;
use crate::error::{Error, ErrorKind, Result, convert};
use crate::future::ApiFuture;
use crate::loss::CustomLoss;
use crate::rest_client::{AdminClient, RestClient};
use crate::sampling::{SamplingClient, SamplingWeights};
use crate::session::Session;
use crate::settings::ClientSettings;
use crate::task;
use crate::telemetry::TelemetryScope;
use crate::training::{CreateFromState, CreateLora, RestoreMode};
use crate::transport::stats::ClientStats;
use crate::transport::{Identity, Transport};

pub use builder::ServiceClientBuilder;

/// Client of one server with one credential, from which all other clients are made.
///
/// Creating it sends nothing: the first call connects. It is cheap to clone. All clones, and all
/// clients made from them, share one connection: configuration is fetched once, and HTTP
/// connections, tokens and the session are common.
///
/// ```no_run
/// # async fn run() -> tinkex::Result<()> {
/// let service = tinkex::ServiceClient::from_env()?;
/// for model in service.server_capabilities().await?.supported_models {
///     println!("{}", model.model_name.unwrap_or_default());
/// }
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct ServiceClient(Arc<ServiceView>);

/// Shared state and the call options of one [`ServiceClient`] value.
struct ServiceView {
    shared: Arc<ServiceShared>,
    options: CallOptions,
}

impl Deref for ServiceView {
    type Target = ServiceShared;

    fn deref(&self) -> &ServiceShared {
        &self.shared
    }
}

/// State shared by all clones of a [`ServiceClient`].
struct ServiceShared {
    settings: Arc<ClientSettings>,
    connection: OnceCell<Arc<Connection>>,
    session: OnceCell<Arc<Session>>,
    /// Sessions of other processes, in which this client samples through handles.
    restored: Mutex<HashMap<RestoredKey, Weak<Session>>>,
    /// Whether `finish` or `abort` was called.
    closed: AtomicBool,
    /// Whether `abort` was called.
    aborted: AtomicBool,
    /// Whether the `finish` or `abort` that closes the client has ended.
    close_finished: watch::Sender<bool>,
}

/// Session id and server configuration of a handle.
type RestoredKey = (SessionId, String);

impl ServiceClient {
    /// Returns a builder.
    pub fn builder() -> ServiceClientBuilder {
        ServiceClientBuilder::default()
    }

    /// Creates a client from environment variables: `TINKER_API_KEY`, `TINKER_BASE_URL` and the
    /// others that [`ServiceClientBuilder`] names.
    ///
    /// # Errors
    /// If no credential is found or a variable is invalid.
    pub fn from_env() -> Result<Self> {
        Self::builder().build()
    }

    pub(crate) fn new(settings: Arc<ClientSettings>) -> Self {
        let shared = Arc::new(ServiceShared {
            settings,
            connection: OnceCell::new(),
            session: OnceCell::new(),
            restored: Mutex::default(),
            closed: AtomicBool::new(false),
            aborted: AtomicBool::new(false),
            close_finished: watch::channel(false).0,
        });
        Self(Arc::new(ServiceView { shared, options: CallOptions::default() }))
    }

    /// Returns a client that shares everything with this one, and whose calls have these options.
    /// Clients that are created from it inherit the options.
    #[must_use]
    pub fn with_options(&self, options: CallOptions) -> Self {
        Self(Arc::new(ServiceView { shared: Arc::clone(&self.0.shared), options }))
    }

    /// Returns the options of this client's calls.
    pub(crate) fn options(&self) -> &CallOptions {
        &self.0.options
    }

    /// Returns the models that the server offers.
    ///
    /// # Errors
    /// If the request fails.
    pub async fn server_capabilities(&self) -> Result<ServerCapabilities> {
        let call = async {
            let (connection, options) =
                (self.connection().await?, self.options().request_options());
            let request = ServerCapabilitiesRequest;
            connection.record_failure(connection.transport().send(&request, &options).await)
        };
        self.options().limit(call).await
    }

    /// Returns the server's clock, in whole seconds, or `None` if its responses carry no date.
    ///
    /// # Errors
    /// If the request fails.
    pub async fn server_time(&self) -> Result<Option<Timestamp>> {
        let call = async {
            let (connection, options) =
                (self.connection().await?, self.options().request_options());
            let request = ServerCapabilitiesRequest;
            connection.record_failure(connection.transport().send_raw(&request, &options).await)
        };
        let response = self.options().limit(call).await?;
        let date = response.headers().get(http::header::DATE).and_then(|date| date.to_str().ok());
        let date = date.and_then(|date| httpdate::parse_http_date(date).ok());
        let since = date.and_then(|date| date.duration_since(SystemTime::UNIX_EPOCH).ok());
        let micros = since.and_then(|since| i64::try_from(since.as_micros()).ok());
        Ok(micros.and_then(|micros| Timestamp::from_unix_micros(micros).ok()))
    }

    /// Returns a builder of a training client for a new LoRA adapter.
    ///
    /// ```no_run
    /// # async fn run(service: tinkex::ServiceClient) -> tinkex::Result<()> {
    /// let model = service.create_lora_training_client("Qwen/Qwen3-8B").rank(16).await?;
    /// # Ok(()) }
    /// ```
    pub fn create_lora_training_client(&self, base_model: impl Into<String>) -> CreateLora {
        CreateLora::new(self.clone(), base_model.into())
    }

    /// Returns a builder of a training client that continues from a training checkpoint.
    ///
    /// ```no_run
    /// # async fn run(service: tinkex::ServiceClient) -> tinkex::Result<()> {
    /// use tinkex::RestoreMode;
    ///
    /// let path = "tinker://run/weights/step-100";
    /// let model = service.create_training_client_from(path, RestoreMode::WithOptimizer).await?;
    /// # Ok(()) }
    /// ```
    pub fn create_training_client_from(
        &self,
        path: impl TryInto<TinkerPath, Error: Into<Error>>,
        restore: RestoreMode,
    ) -> CreateFromState {
        let path = convert("create_training_client_from", path);
        CreateFromState::new(self.clone(), path, restore)
    }

    /// Creates a sampling client for a base model.
    ///
    /// # Errors
    /// If the server does not have the model.
    pub async fn create_sampling_client(
        &self,
        base_model: impl Into<String>,
    ) -> Result<SamplingClient> {
        self.sampling(SamplingWeights::Base(base_model.into())).await
    }

    /// Creates a sampling client for a sampler checkpoint.
    ///
    /// ```no_run
    /// # async fn run(service: tinkex::ServiceClient) -> tinkex::Result<()> {
    /// let path = "tinker://run/sampler_weights/final";
    /// let sampler = service.create_sampling_client_from(path).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// If the path is invalid, or the checkpoint does not exist or is a training checkpoint.
    pub async fn create_sampling_client_from(
        &self,
        path: impl TryInto<TinkerPath, Error: Into<Error>>,
    ) -> Result<SamplingClient> {
        const CALL: &str = "create_sampling_client_from";
        let path = convert(CALL, path)?;
        if path.kind() != CheckpointKind::Sampler {
            let message = format!("cannot sample from {path}: not a sampler checkpoint");
            return Err(Error::new(ErrorKind::InvalidInput, message)
                .with_hint("Save the weights with save_weights_for_sampler.")
                .during(CALL));
        }
        self.sampling(SamplingWeights::Checkpoint(path.to_string())).await
    }

    async fn sampling(&self, weights: SamplingWeights) -> Result<SamplingClient> {
        let call = async {
            let session = self.session().await?;
            let created =
                SamplingClient::create(Arc::clone(&session), weights, self.options()).await;
            session.connection().record_failure(created)
        };
        self.options().limit(call).await
    }

    /// Creates a sampling client for a sampling session of another process, with this client's own
    /// credential and headers. Sends nothing.
    ///
    /// ```no_run
    /// # fn run(service: tinkex::ServiceClient, text: &str) -> tinkex::Result<()> {
    /// use tinkex::SamplerHandle;
    ///
    /// let sampler = service.restore_sampling_client(&SamplerHandle::from_text(text)?)?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// If the handle is for another server, or outside a tokio runtime.
    pub fn restore_sampling_client(&self, handle: &SamplerHandle) -> Result<SamplingClient> {
        self.check_open()?;
        task::require_runtime()?;
        let server: BaseUrl = handle.holder.base_url.parse()?;
        if server != *self.base_url() {
            let message =
                format!("handle is for {server}, but this client is for {}", self.base_url());
            let hint = "Use SamplingClient::from_handle, or set the base URL.";
            return Err(Error::new(ErrorKind::InvalidInput, message).with_hint(hint));
        }
        let own = self.0.session.get().filter(|session| *session.id() == handle.session_id);
        let session = match own {
            Some(session) => Arc::clone(session),
            None => self.0.restore_session(handle)?,
        };
        Ok(SamplingClient::restore(session, handle).with_options(*self.options()))
    }

    /// Registers a traced loss with the server and returns a loss that the server computes.
    ///
    /// If the server does not compute custom losses, returns the loss unchanged; the client
    /// computes it. Equal losses are registered once.
    ///
    /// # Errors
    /// If the server rejects the loss.
    pub async fn create_custom_loss(&self, loss: &CustomLoss) -> Result<CustomLoss> {
        let (loss, options) = (loss.clone(), *self.options());
        let call = async move {
            let session = self.session().await?;
            // Run in a task of its own: if the caller dropped the future after the request was
            // sent, the id of the registered loss would be lost, and the next call would register
            // it again.
            ApiFuture::start(async move {
                let created = session.create_custom_loss(&loss, &options);
                let created = session.run_until_closed(created).await;
                session.connection().record_failure(created)
            })
            .await
        };
        options.limit(call).await
    }

    /// Records an error of the application in telemetry, if enabled.
    pub fn report(&self, error: &(dyn std::error::Error + 'static)) {
        if let Some(events) = self.existing_connection().and_then(Connection::events) {
            events.failure(error);
        }
    }

    /// Records an error that ends the program, and the end of the session, in telemetry if enabled.
    /// Waits up to 30 seconds until the events are sent.
    pub async fn report_fatal(&self, error: &(dyn std::error::Error + 'static)) {
        let Some(connection) = self.existing_connection() else { return };
        if let Some(events) = connection.events() {
            events.fatal(error);
            connection.drain().await;
        }
    }

    /// Returns a client for training runs, checkpoints and sessions.
    #[must_use]
    pub fn rest(&self) -> RestClient {
        RestClient::new(self.clone())
    }

    /// Returns a client for usage, storage and the audit log of an organization.
    #[must_use]
    pub fn admin(&self) -> AdminClient {
        AdminClient::new(self.clone())
    }

    /// Returns the model hub that the environment names (`HF_ENDPOINT`), reached through the same
    /// HTTP service as the server.
    ///
    /// # Errors
    /// If `HF_ENDPOINT` is not a URL.
    #[cfg(feature = "tokenizer")]
    pub fn hub(&self) -> Result<crate::tokenizer::Hub> {
        self.0.settings.hub()
    }

    /// Returns the user and organization of the credential, read from its token.
    ///
    /// # Errors
    /// If the server uses plain API keys, which do not name their owner.
    pub async fn whoami(&self) -> Result<Identity> {
        let credential = async { self.connection().await?.transport().credential().await };
        let (token, exchanged) = self.options().limit(credential).await?;
        Identity::of(&token, exchanged).ok_or_else(|| {
            let message =
                "cannot determine the owner of a plain API key: only a token names its owner";
            Error::new(ErrorKind::Auth, message)
        })
    }

    /// Returns counts, outcomes and latency percentiles of the requests of this client and of all
    /// clients made from it, by lane.
    ///
    /// ```
    /// use tinkex::{Lane, ServiceClient};
    ///
    /// let service = ServiceClient::builder().api_key("tml-example").build()?;
    /// if let Some(samples) = service.stats().lane(Lane::Sample) {
    ///     println!("{} requests, median {:?}", samples.requests(), samples.p50);
    /// }
    /// # Ok::<_, tinkex::Error>(())
    /// ```
    #[must_use]
    pub fn stats(&self) -> ClientStats {
        self.0.settings.stats.snapshot()
    }

    /// Returns the server's base URL.
    #[must_use]
    pub fn base_url(&self) -> &BaseUrl {
        &self.0.settings.base_url
    }

    pub(crate) fn settings(&self) -> &ClientSettings {
        &self.0.settings
    }

    pub(crate) fn project_id(&self) -> Option<&str> {
        self.0.settings.project_id.as_deref()
    }

    /// Creates a client with the same settings and a connection and session of its own.
    pub(crate) fn with_new_session(&self) -> Self {
        Self::new(Arc::clone(&self.0.settings))
    }

    /// Returns the session, creating it on first use. A failure is not cached.
    pub(crate) async fn session(&self) -> Result<Arc<Session>> {
        self.check_open()?;
        let open = async || {
            let connection = self.0.connect().await?;
            Session::open(&self.0.settings, Arc::clone(connection)).await
        };
        let session = self.0.session.get_or_try_init(open).await?;
        if let Err(closed) = self.check_open() {
            // `finish` or `abort` ran while the session was being created, and did not close it.
            session.close(FinishReason::Interrupted, None).await;
            return Err(closed);
        }
        Ok(Arc::clone(session))
    }

    /// Continues the session `id`, which another process created, as the session of this client.
    #[cfg(feature = "upstream")]
    pub(crate) async fn adopt_session(&self, id: SessionId) -> Result<Arc<Session>> {
        let connection = self.0.connect().await?;
        let start = async || Session::start(&self.0.settings, Arc::clone(connection), id.clone());
        Ok(Arc::clone(self.0.session.get_or_try_init(start).await?))
    }

    /// Returns the connection, opening it on first use. A failure is not cached.
    pub(crate) async fn connection(&self) -> Result<&Connection> {
        self.check_open()?;
        let connection = self.0.connect().await?;
        if let Err(closed) = self.check_open() {
            connection.close().await;
            return Err(closed);
        }
        if self.0.settings.telemetry {
            connection.start_telemetry(TelemetryScope::NoSession);
        }
        Ok(connection)
    }

    /// Returns the connection if a call has opened it.
    fn existing_connection(&self) -> Option<&Connection> {
        self.0.connection.get().map(|connection| &**connection)
    }

    /// Returns a transport for a single request that must not be preceded by others.
    pub(crate) fn bare_transport(&self) -> Result<Arc<Transport>> {
        self.check_open()?;
        self.0.settings.transport()
    }

    fn check_open(&self) -> Result<()> {
        if self.0.closed.load(Ordering::Acquire) { Err(Error::closed()) } else { Ok(()) }
    }
}

impl ServiceShared {
    async fn connect(&self) -> Result<&Arc<Connection>> {
        self.connection.get_or_try_init(|| Connection::open(&self.settings)).await
    }

    /// Returns the session of a handle, shared by all handles with the same session and
    /// configuration.
    fn restore_session(&self, handle: &SamplerHandle) -> Result<Arc<Session>> {
        let mut restored = self.restored.lock().unwrap_or_else(PoisonError::into_inner);
        restored.retain(|_, session| session.strong_count() > 0);
        let key = (handle.session_id.clone(), format!("{:?}", handle.holder.client_config));
        if let Some(session) = restored.get(&key).and_then(Weak::upgrade) {
            return Ok(session);
        }
        let session = Session::restore(&self.settings, handle)?;
        restored.insert(key, Arc::downgrade(&session));
        Ok(session)
    }
}

impl fmt::Debug for ServiceClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServiceClient").field("base_url", self.base_url()).finish_non_exhaustive()
    }
}
