//! [`ServiceClient`]: the entry point of the crate.

mod builder;
mod custom_loss;
mod finish;

use std::collections::HashMap;
use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::SystemTime;

use futures_util::future::BoxFuture;
use http::HeaderMap;
use parking_lot::Mutex;
use tinkex_session::{SamplingWeights, SessionSettings};
use tinkex_wire::{
    CheckpointKind, FinishReason, SamplerHandle, ServerCapabilities, ServerCapabilitiesRequest,
    SessionId, Timestamp, TinkerPath,
};
use tokio::sync::{OnceCell, watch};

use crate::call_options::ApplyOptions as _;
use crate::config::BaseUrl;
use crate::connection::Connection;
use crate::error::{Error, ErrorKind, Result, convert};
use crate::future::{ApiFuture, RequestFuture};
use crate::loss::CustomLoss;
use crate::rest_client::{AdminClient, RestClient};
use crate::sampling::SamplingClient;
use crate::session::Session;
use crate::settings::ClientSettings;
use crate::task;
use crate::telemetry::TelemetryScope;
use crate::transport::CallOptions;
use crate::transport::instrument::stats::ClientStats;
use crate::transport::{Identity, Transport};

pub use builder::ServiceClientBuilder;
use custom_loss::create_custom_loss;

/// Client of one server with one credential, from which all other clients are made.
///
/// Creating a client sends nothing: the first call connects. Clients are cheap to clone. All
/// clones, and all clients made from them, share one connection: the configuration is fetched once,
/// and they use the same HTTP connections, tokens and session.
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
    /// Sessions that other processes created and in which this client samples through handles.
    restored: Mutex<HashMap<RestoredKey, Weak<Session>>>,
    /// Whether `finish` or `abort` was called.
    closed: AtomicBool,
    /// Whether `abort` was called.
    aborted: AtomicBool,
    /// Set to true when the task of `finish` or `abort` that closes the client has ended.
    close_finished: watch::Sender<bool>,
}

/// Session id and server configuration of a handle. Two handles with different configurations need
/// different connections.
type RestoredKey = (SessionId, String);

impl ServiceClient {
    /// Returns a builder.
    pub fn builder() -> ServiceClientBuilder {
        ServiceClientBuilder::default()
    }

    /// Creates a client from environment variables: `TINKER_API_KEY`, `TINKER_BASE_URL` and the
    /// others that the methods of [`ServiceClientBuilder`] document.
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
        let options = shared.settings.options;
        Self(Arc::new(ServiceView { shared, options }))
    }

    /// Returns a client that shares the connection and session with this one, and whose calls have
    /// these options. Clients that are created from the returned client inherit the options.
    /// Options that are not set keep the value of this client.
    ///
    /// ```no_run
    /// # async fn run(service: tinkex::ServiceClient) -> tinkex::Result<()> {
    /// use std::time::Duration;
    /// use tinkex::CallOptions;
    ///
    /// let hurried = CallOptions::without_retries().timeout(Duration::from_secs(5));
    /// let capabilities = service.with_options(hurried).server_capabilities().await?;
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn with_options(&self, options: CallOptions) -> Self {
        let options = options.or(self.options());
        Self(Arc::new(ServiceView { shared: Arc::clone(&self.0.shared), options }))
    }

    /// Returns the options of this client's calls.
    pub(crate) fn options(&self) -> &CallOptions {
        &self.0.options
    }

    /// Runs `work` in a task of its own, within the maximum duration of this client's calls. The
    /// task is aborted if the future is dropped.
    pub(crate) fn start<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T>> + Send + 'static,
    ) -> RequestFuture<T> {
        let options = *self.options();
        let _entered = self.0.settings.enter_runtime();
        RequestFuture::start(async move { options.limit(Box::pin(work)).await })
    }

    /// Runs the transfer `work` in the runtime of the caller or, outside of one, in the runtime that
    /// the builder set.
    pub(crate) fn transfer<T: Send + 'static>(
        &self,
        work: BoxFuture<'static, Result<T>>,
    ) -> BoxFuture<'static, Result<T>> {
        let settings = Arc::clone(&self.0.settings);
        Box::pin(async move {
            if task::require_runtime().is_ok() {
                return work.await;
            }
            let started = {
                let _entered = settings.enter_runtime();
                RequestFuture::start(work)
            };
            started.await
        })
    }

    /// Returns the models that the server offers.
    ///
    /// # Errors
    /// If the request fails.
    pub fn server_capabilities(&self) -> RequestFuture<ServerCapabilities> {
        let service = self.clone();
        self.start(async move {
            let connection = service.connection().await?;
            let options = service.options().request_options();
            let sent = connection.transport().send(&ServerCapabilitiesRequest, &options).await;
            connection.record_failure(sent)
        })
    }

    /// Returns the server's clock, in whole seconds, or `None` if its responses carry no date.
    ///
    /// # Errors
    /// If the request fails.
    pub fn server_time(&self) -> RequestFuture<Option<Timestamp>> {
        let service = self.clone();
        self.start(async move {
            let connection = service.connection().await?;
            let options = service.options().request_options();
            let sent = connection.transport().send_raw(&ServerCapabilitiesRequest, &options).await;
            let response = connection.record_failure(sent)?;
            Ok(response_time(response.headers()))
        })
    }

    /// Creates a sampling client for a base model.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if the server does not serve the base model.
    pub fn create_sampling_client(
        &self,
        base_model: impl Into<String>,
    ) -> RequestFuture<SamplingClient> {
        self.sampling(SamplingWeights::Base(base_model.into()))
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
    /// [`ErrorKind::InvalidInput`] if the path is invalid or is that of a training checkpoint;
    /// [`ErrorKind::NotFound`] if the checkpoint does not exist.
    pub fn create_sampling_client_from(
        &self,
        path: impl TryInto<TinkerPath, Error: Into<Error>>,
    ) -> RequestFuture<SamplingClient> {
        const CALL: &str = "create_sampling_client_from";
        let path = match convert(CALL, path) {
            Ok(path) => path,
            Err(error) => return RequestFuture::failed(error),
        };
        if path.kind() != CheckpointKind::Sampler {
            let message = format!("cannot sample from {path}: not a sampler checkpoint");
            let error = Error::new(ErrorKind::InvalidInput, message)
                .with_hint("Save the weights with save_weights_for_sampler.")
                .during(CALL);
            return RequestFuture::failed(error);
        }
        self.sampling(SamplingWeights::Checkpoint(path.to_string()))
    }

    fn sampling(&self, weights: SamplingWeights) -> RequestFuture<SamplingClient> {
        let service = self.clone();
        self.start(async move {
            let session = service.session().await?;
            let created =
                SamplingClient::create(Arc::clone(&session), weights, service.options()).await;
            session.connection().record_failure(created)
        })
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
    /// If the handle is for another server, or outside a tokio runtime if the builder set none.
    pub fn restore_sampling_client(&self, handle: &SamplerHandle) -> Result<SamplingClient> {
        self.check_open()?;
        let _entered = self.0.settings.enter_runtime();
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
    pub fn create_custom_loss(&self, loss: &CustomLoss) -> RequestFuture<CustomLoss> {
        let service = self.clone();
        let loss = loss.clone();
        self.start(async move {
            let session = service.session().await?;
            let options = *service.options();
            // Run in a task of its own: if the caller dropped the future after the request was
            // sent, the id of the registered loss would be lost, and the next call would register
            // it again.
            ApiFuture::start(async move {
                let created = create_custom_loss(&session, &loss, &options);
                let created = session.run_until_closed(created).await;
                session.connection().record_failure(created)
            })
            .await
        })
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
        let Some(events) = self.existing_connection().and_then(Connection::events) else { return };
        events.fatal(error);
        let service = self.clone();
        let drain = Box::pin(async move {
            if let Some(connection) = service.existing_connection() {
                connection.drain().await;
            }
            Ok(())
        });
        // Fails only outside of a runtime, where nothing can be sent.
        let _ = self.transfer(drain).await;
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

    /// Returns the model hub at the URL in the environment variable `HF_ENDPOINT` (default: the
    /// public Hugging Face hub). Requests to the hub use the same HTTP service as requests to the
    /// server.
    ///
    /// # Errors
    /// If `HF_ENDPOINT` is not a URL.
    #[cfg(feature = "tokenizer")]
    pub fn hub(&self) -> Result<crate::tokenizer::Hub> {
        crate::tokenizer::hub(&self.0.settings)
    }

    /// Returns the user and organization of the credential, read from its token.
    ///
    /// # Errors
    /// If the server uses plain API keys, which do not contain the user or the organization.
    pub fn whoami(&self) -> RequestFuture<Identity> {
        let service = self.clone();
        self.start(async move {
            let identity = service.connection().await?.transport().identity().await?;
            identity.ok_or_else(|| {
                let message =
                    "cannot determine the owner of a plain API key: only a token names its owner";
                Error::new(ErrorKind::Auth, message)
            })
        })
    }

    /// Returns request counts, outcomes and latency percentiles by [`Lane`](crate::Lane), a traffic
    /// class, for the requests of this client and of all clients made from it.
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

    /// Returns the feature gates of the environment or of the builder, for programs that switch
    /// their own experiments with `TINKER_FEATURE_GATES`. No call of this crate depends on them.
    ///
    /// ```
    /// use tinkex::{Env, ServiceClient};
    ///
    /// let env = Env::from_pairs([
    ///     ("TINKER_API_KEY", "tml-example"),
    ///     ("TINKER_FEATURE_GATES", "async_sampling,mine"),
    /// ]);
    /// let service = ServiceClient::builder().env(env).build()?;
    /// assert!(service.feature_gates().iter().any(|gate| gate == "mine"));
    /// # Ok::<_, tinkex::Error>(())
    /// ```
    #[must_use]
    pub fn feature_gates(&self) -> &[String] {
        &self.0.settings.feature_gates
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
            // `finish` or `abort` ran while the session was being created, so it did not close this
            // session.
            session.close(FinishReason::Interrupted, None).await;
            return Err(closed);
        }
        Ok(Arc::clone(session))
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

    /// Returns a transport for a single request. Unlike [`connection`](Self::connection), sends no
    /// request for the server's configuration first.
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
        let mut restored = self.restored.lock();
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

/// Returns the time in the `date` header of a response.
fn response_time(headers: &HeaderMap) -> Option<Timestamp> {
    let date = headers.get(http::header::DATE)?.to_str().ok()?;
    let date = httpdate::parse_http_date(date).ok()?;
    let since_epoch = date.duration_since(SystemTime::UNIX_EPOCH).ok()?;
    let micros = i64::try_from(since_epoch.as_micros()).ok()?;
    Timestamp::from_unix_micros(micros).ok()
}

#[doc(hidden)]
impl SessionSettings for ServiceClient {
    fn session_settings(&self) -> &Arc<ClientSettings> {
        &self.0.settings
    }
}

impl fmt::Debug for ServiceClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServiceClient").field("base_url", self.base_url()).finish_non_exhaustive()
    }
}
