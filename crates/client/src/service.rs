//! [`ServiceClient`]: the first thing a program makes.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, SystemTime};

use tinkex_wire::{
    CheckpointKind, FinishReason, JsonObject, SamplerHandle, ServerCapabilities,
    ServerCapabilitiesRequest, SessionId, Timestamp, TinkerPath,
};
use tokio::sync::{OnceCell, watch};

use crate::config::{BaseUrl, Env};
use crate::connection::Connection;
use crate::error::{Error, ErrorKind, Result};
use crate::future::ApiFuture;
use crate::loss::CustomLoss;
use crate::rest_client::{AdminClient, RestClient};
use crate::sampling::{SamplingClient, SamplingWeights};
use crate::session::Session;
use crate::settings::{Given, Settings};
use crate::telemetry::TelemetryScope;
use crate::training::{CreateFromState, CreateLora, RestoreMode};
use crate::transport::http::HttpService;
use crate::transport::retry::RetryPolicy;
use crate::transport::{Identity, RequestOptions, Transport};

/// A server and the right to use it. Cheap to clone; all clones share one connection.
///
/// Making one touches nothing: the first call connects.
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
pub struct ServiceClient(Arc<Inner>);

struct Inner {
    settings: Arc<Settings>,
    connection: OnceCell<Connection>,
    session: OnceCell<Arc<Session>>,
    /// Sessions of other processes that this one samples in.
    restored: Mutex<HashMap<Restored, Weak<Session>>>,
    closed: AtomicBool,
    /// Whether closing has come to its end.
    over: watch::Sender<bool>,
}

/// Which session, and what its server wants of its clients.
type Restored = (SessionId, String);

impl ServiceClient {
    /// A client with settings of its own.
    pub fn builder() -> ServiceClientBuilder {
        ServiceClientBuilder::default()
    }

    /// A client from `TINKER_API_KEY`, `TINKER_BASE_URL` and their like.
    ///
    /// # Errors
    /// If there is no credential, or a variable makes no sense.
    pub fn from_env() -> Result<Self> {
        Self::builder().build()
    }

    /// Which models the server has.
    ///
    /// # Errors
    /// If the server cannot be asked.
    pub async fn server_capabilities(&self) -> Result<ServerCapabilities> {
        let connection = self.connection().await?;
        let options = RequestOptions::default();
        connection
            .record_failure(connection.transport().send(&ServerCapabilitiesRequest, &options).await)
    }

    /// What time it is at the server, to the second, if it says so.
    ///
    /// # Errors
    /// If the server cannot be asked.
    pub async fn server_time(&self) -> Result<Option<Timestamp>> {
        let connection = self.connection().await?;
        let sent = connection
            .transport()
            .send_raw(&ServerCapabilitiesRequest, &RequestOptions::default())
            .await;
        let reply = connection.record_failure(sent)?;
        let date = reply.headers().get(http::header::DATE).and_then(|date| date.to_str().ok());
        let date = date.and_then(|date| httpdate::parse_http_date(date).ok());
        let since = date.and_then(|date| date.duration_since(SystemTime::UNIX_EPOCH).ok());
        let micros = since.and_then(|since| i64::try_from(since.as_micros()).ok());
        Ok(micros.and_then(|micros| Timestamp::from_unix_micros(micros).ok()))
    }

    /// A new adapter of a base model, to be trained.
    ///
    /// ```no_run
    /// # async fn run(service: tinkex::ServiceClient) -> tinkex::Result<()> {
    /// let model = service.create_lora_training_client("Qwen/Qwen3-8B").rank(16).create().await?;
    /// # Ok(()) }
    /// ```
    pub fn create_lora_training_client(&self, base_model: impl Into<String>) -> CreateLora {
        CreateLora::new(self.clone(), base_model.into())
    }

    /// A model that goes on from a saved state.
    ///
    /// ```no_run
    /// # async fn run(service: tinkex::ServiceClient) -> tinkex::Result<()> {
    /// use tinkex::RestoreMode;
    ///
    /// let path = "tinker://run/weights/step-100".parse()?;
    /// let model = service.create_training_client_from(&path, RestoreMode::WithOptimizer).create().await?;
    /// # Ok(()) }
    /// ```
    pub fn create_training_client_from(
        &self,
        path: &TinkerPath,
        restore: RestoreMode,
    ) -> CreateFromState {
        CreateFromState::new(self.clone(), path.clone(), restore)
    }

    /// Samples from a base model.
    ///
    /// # Errors
    /// If the server has no such model.
    pub async fn create_sampling_client(
        &self,
        base_model: impl Into<String>,
    ) -> Result<SamplingClient> {
        self.sampling(SamplingWeights::Base(base_model.into())).await
    }

    /// Samples from a checkpoint that was saved for that.
    ///
    /// # Errors
    /// If there is no such checkpoint, or it was saved for something else.
    pub async fn create_sampling_client_from(&self, path: &TinkerPath) -> Result<SamplingClient> {
        if path.kind() != CheckpointKind::Sampler {
            let why = format!("{path} was not saved to sample from");
            let hint = "save it with save_weights_for_sampler";
            return Err(Error::new(ErrorKind::InvalidInput, why).with_hint(hint));
        }
        self.sampling(SamplingWeights::Checkpoint(path.to_string())).await
    }

    async fn sampling(&self, weights: SamplingWeights) -> Result<SamplingClient> {
        let session = self.session().await?;
        let created = SamplingClient::create(Arc::clone(&session), weights).await;
        session.connection().record_failure(created)
    }

    /// Samples in a session that another process has opened, with this client's own credential and
    /// headers. Nothing is sent yet. It must be called inside a tokio runtime.
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
    /// If the handle is for another server.
    pub fn restore_sampling_client(&self, handle: &SamplerHandle) -> Result<SamplingClient> {
        self.check_open()?;
        if tokio::runtime::Handle::try_current().is_err() {
            let why = "a sampling client needs a tokio runtime, and there is none here";
            return Err(Error::new(ErrorKind::Config, why));
        }
        let theirs: BaseUrl = handle.holder.base_url.parse()?;
        if theirs != *self.base_url() {
            let why = format!("the handle is for {theirs}, this client for {}", self.base_url());
            let hint = "use SamplingClient::from_handle, or set the base URL";
            return Err(Error::new(ErrorKind::InvalidInput, why).with_hint(hint));
        }
        let own = self.0.session.get().filter(|session| *session.id() == handle.session_id);
        let session = match own {
            Some(session) => Arc::clone(session),
            None => {
                let mut all = self.0.restored.lock().unwrap_or_else(PoisonError::into_inner);
                all.retain(|_, session| session.strong_count() > 0);
                let key = (handle.session_id.clone(), format!("{:?}", handle.holder.client_config));
                match all.get(&key).and_then(Weak::upgrade) {
                    Some(session) => session,
                    None => {
                        let session = Session::restore(&self.0.settings, handle)?;
                        all.insert(key, Arc::downgrade(&session));
                        session
                    }
                }
            }
        };
        Ok(SamplingClient::restore(session, handle))
    }

    /// Hands a traced loss to the server, where the server computes such; otherwise it stays as it
    /// is and is computed here. The same loss is handed over once.
    ///
    /// # Errors
    /// If the server refuses it.
    pub async fn create_custom_loss(&self, loss: &CustomLoss) -> Result<CustomLoss> {
        let (session, loss) = (self.session().await?, loss.clone());
        // Work of its own: half handed over, it could not be handed over again.
        ApiFuture::start(async move {
            let created = session.run_until_closed(session.create_custom_loss(&loss)).await;
            session.connection().record_failure(created)
        })
        .await
    }

    /// Tells the server how this program's stay ended, and stops. Calls of this client, and of
    /// every client made from it, fail from now on. The first end counts; a second call does
    /// nothing.
    ///
    /// Dropping all clients without this stops as well, but the server does not learn how it went.
    ///
    /// # Errors
    /// If the server cannot be told; the client is closed all the same.
    pub async fn close(&self, reason: FinishReason, detail: Option<String>) -> Result<()> {
        if self.0.closed.swap(true, Ordering::AcqRel) {
            let _ = self.0.over.subscribe().wait_for(|over| *over).await;
            return Ok(());
        }
        let inner = Arc::clone(&self.0);
        // Work of its own: a caller that stops waiting must not leave it half done.
        ApiFuture::start(async move {
            let told = inner.end(reason, detail).await;
            inner.over.send_replace(true);
            told
        })
        .await
    }

    /// Writes a failure of the program into the telemetry, if that is on.
    pub fn report(&self, error: &(dyn std::error::Error + 'static)) {
        if let Some(events) = self.reporting().and_then(Connection::events) {
            events.failure(error);
        }
    }

    /// The same before the program ends: the session ends with it, and this waits up to half a
    /// minute for the news to leave.
    pub async fn report_fatal(&self, error: &(dyn std::error::Error + 'static)) {
        let Some(connection) = self.reporting() else { return };
        if let Some(events) = connection.events() {
            events.fatal(error);
            connection.drain().await;
        }
    }

    fn reporting(&self) -> Option<&Connection> {
        self.0.session.get().map(|session| session.connection()).or(self.0.connection.get())
    }

    /// Looks things up and tidies: runs, checkpoints, sessions.
    #[must_use]
    pub fn rest(&self) -> RestClient {
        RestClient::new(self.clone())
    }

    /// The model hub that the environment names, reached the same way as the server.
    ///
    /// # Errors
    /// If `HF_ENDPOINT` is not an address.
    #[cfg(feature = "tokenizer")]
    pub fn hub(&self) -> Result<crate::tokenizer::Hub> {
        self.0.settings.hub()
    }

    /// Usage, storage and the audit log of an organization.
    #[must_use]
    pub fn admin(&self) -> AdminClient {
        AdminClient::new(self.clone())
    }

    /// Who the credential speaks for, read from its token without asking the server.
    ///
    /// # Errors
    /// If the server uses plain keys: those do not tell.
    pub async fn whoami(&self) -> Result<Identity> {
        let (token, exchanged) = self.connection().await?.transport().signature().await?;
        Identity::of(&token, exchanged).ok_or_else(|| {
            let why = "the credential is a plain API key, which does not tell whose it is";
            Error::new(ErrorKind::Auth, why)
        })
    }

    /// The server.
    #[must_use]
    pub fn base_url(&self) -> &BaseUrl {
        &self.0.settings.base_url
    }

    pub(crate) fn settings(&self) -> &Settings {
        &self.0.settings
    }

    fn of(settings: Arc<Settings>) -> Self {
        Self(Arc::new(Inner {
            settings,
            connection: OnceCell::new(),
            session: OnceCell::new(),
            restored: Mutex::default(),
            closed: AtomicBool::new(false),
            over: watch::channel(false).0,
        }))
    }

    /// A client with the same settings and a stay of its own.
    pub(crate) fn anew(&self) -> Self {
        Self::of(Arc::clone(&self.0.settings))
    }

    pub(crate) fn project_id(&self) -> Option<&str> {
        self.0.settings.project_id.as_deref()
    }

    /// The session, opened by whoever needs it first; a failure is not remembered.
    pub(crate) async fn session(&self) -> Result<Arc<Session>> {
        self.check_open()?;
        let session = self.0.session.get_or_try_init(|| Session::open(&self.0.settings)).await?;
        if let Err(closed) = self.check_open() {
            // It was closed while this was being opened, and did not know of it.
            let _ = session.close(FinishReason::Interrupted, None).await;
            return Err(closed);
        }
        Ok(Arc::clone(session))
    }

    /// The connection, made by whoever needs it first; a failure is not remembered.
    pub(crate) async fn connection(&self) -> Result<&Connection> {
        self.check_open()?;
        let start = async || {
            let connection = Connection::start(&self.0.settings).await?;
            if self.0.settings.telemetry {
                connection.report_for(TelemetryScope::NoSession);
            }
            Ok::<_, Error>(connection)
        };
        let connection = self.0.connection.get_or_try_init(start).await?;
        if let Err(closed) = self.check_open() {
            connection.close().await;
            return Err(closed);
        }
        Ok(connection)
    }

    /// The way to the server before anything was asked of it.
    pub(crate) fn bare_transport(&self) -> Result<Arc<Transport>> {
        self.check_open()?;
        self.0.settings.transport()
    }

    fn check_open(&self) -> Result<()> {
        if self.0.closed.load(Ordering::Acquire) { Err(Error::closed()) } else { Ok(()) }
    }
}

impl Inner {
    async fn end(&self, reason: FinishReason, detail: Option<String>) -> Result<()> {
        let told = match self.session.get() {
            Some(session) => session.close(reason, detail).await,
            None => Ok(()),
        };
        let restored: Vec<_> = {
            let all = self.restored.lock().unwrap_or_else(PoisonError::into_inner);
            all.values().filter_map(Weak::upgrade).collect()
        };
        for session in restored {
            session.leave().await;
        }
        if let Some(connection) = self.connection.get() {
            connection.close().await;
        }
        told
    }
}

impl fmt::Debug for ServiceClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServiceClient").field("base_url", self.base_url()).finish_non_exhaustive()
    }
}

/// Collects the settings of a [`ServiceClient`].
///
/// What is not set comes from the environment, read once when the client is built.
#[derive(Default)]
#[must_use]
pub struct ServiceClientBuilder {
    base_url: Option<BaseUrl>,
    api_key: Option<String>,
    env: Option<Env>,
    headers: Vec<(String, String)>,
    retry: RetryPolicy,
    http: Option<Arc<dyn HttpService>>,
    project_id: Option<String>,
    display_name: Option<String>,
    user_metadata: JsonObject,
    unpaced: bool,
    silent: bool,
    max_samples: Option<u32>,
    progress_timeout: Option<Duration>,
    poll_timeout: Option<Duration>,
}

impl ServiceClientBuilder {
    /// The server; without it `TINKER_BASE_URL`, or else the hosted service.
    pub fn base_url(mut self, url: BaseUrl) -> Self {
        self.base_url = Some(url);
        self
    }

    /// The credential; without it `TINKER_API_KEY`, `TINKER_CREDENTIAL_CMD` or the stored one.
    pub fn api_key(mut self, key: impl Into<String>) -> Self {
        self.api_key = Some(key.into());
        self
    }

    /// These variables in place of the process's own.
    pub fn env(mut self, env: Env) -> Self {
        self.env = Some(env);
        self
    }

    /// A header for every request. It wins over our own of that name, but not over those that sign
    /// and number requests.
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// How failed requests are sent again.
    pub fn retry(mut self, policy: RetryPolicy) -> Self {
        self.retry = policy;
        self
    }

    /// Another way to send requests: a proxy, a recorder, a fake.
    pub fn http(mut self, service: impl HttpService) -> Self {
        self.http = Some(Arc::new(service));
        self
    }

    /// The project that new things belong to; without it `TINKER_PROJECT_ID`.
    pub fn project_id(mut self, project: impl Into<String>) -> Self {
        self.project_id = Some(project.into());
        self
    }

    /// A name of the session for people.
    pub fn display_name(mut self, name: impl Into<String>) -> Self {
        self.display_name = Some(name.into());
        self
    }

    /// Anything to remember with the session.
    pub fn user_metadata(mut self, metadata: JsonObject) -> Self {
        self.user_metadata = metadata;
        self
    }

    /// Polls a server that answers "not yet" as fast as it does so. By default such a server is
    /// given time.
    pub fn poll_without_pauses(mut self) -> Self {
        self.unpaced = true;
        self
    }

    /// At most so many samples of one sampling client under way, fewer if the server wants that.
    pub fn max_concurrent_samples(mut self, samples: u32) -> Self {
        self.max_samples = Some(samples.max(1));
        self
    }

    /// Samples are given up when none has succeeded for this long; two hours if nothing is said.
    pub fn progress_timeout(mut self, timeout: Duration) -> Self {
        self.progress_timeout = Some(timeout);
        self
    }

    /// The answer to one request is waited for at most this long; for ever if nothing is said. The
    /// work itself goes on.
    pub fn poll_timeout(mut self, timeout: Duration) -> Self {
        self.poll_timeout = Some(timeout);
        self
    }

    /// Tells the server nothing about how the client is doing, as `TINKER_TELEMETRY=0` does.
    pub fn without_telemetry(mut self) -> Self {
        self.silent = true;
        self
    }

    /// The client. Nothing is sent yet.
    ///
    /// # Errors
    /// If there is no credential, or a setting makes no sense.
    pub fn build(self) -> Result<ServiceClient> {
        let settings = Settings::new(Given {
            base_url: self.base_url,
            api_key: self.api_key,
            env: self.env.unwrap_or_else(Env::of_process),
            headers: self.headers,
            retry: self.retry,
            http: self.http,
            project_id: self.project_id,
            display_name: self.display_name,
            user_metadata: self.user_metadata,
            adaptive_polling: !self.unpaced,
            telemetry: !self.silent,
            max_samples: self.max_samples,
            progress_timeout: self.progress_timeout,
            poll_timeout: self.poll_timeout,
        })?;
        Ok(ServiceClient::of(Arc::new(settings)))
    }
}

impl fmt::Debug for ServiceClientBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServiceClientBuilder")
            .field("base_url", &self.base_url)
            .field("retry", &self.retry)
            .finish_non_exhaustive()
    }
}
