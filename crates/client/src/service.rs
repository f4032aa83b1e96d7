//! [`ServiceClient`]: the first thing a program makes.

use std::fmt;
use std::sync::Arc;

use tinkex_wire::{
    CheckpointKind, FinishReason, JsonObject, ServerCapabilities, ServerCapabilitiesRequest,
    TinkerPath,
};
use tokio::sync::OnceCell;

use crate::config::{BaseUrl, Env};
use crate::engine::Engine;
use crate::error::Result;
use crate::lookup::{AdminClient, RestClient};
use crate::sampling::{SamplingClient, Weights};
use crate::session::Session;
use crate::settings::{Given, Settings};
use crate::training::{CreateFromState, CreateLora, Restore};
use crate::transport::http::HttpService;
use crate::transport::retry::RetryPolicy;
use crate::transport::{Extras, Identity};

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
    settings: Settings,
    engine: OnceCell<Engine>,
    session: OnceCell<Arc<Session>>,
}

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
        let engine = self.engine().await?;
        engine.transport().call(&ServerCapabilitiesRequest, &Extras::default()).await
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
    /// use tinkex::Restore;
    ///
    /// let path = "tinker://run/weights/step-100".parse()?;
    /// let model = service.create_training_client_from(path, Restore::WithOptimizer).create().await?;
    /// # Ok(()) }
    /// ```
    pub fn create_training_client_from(
        &self,
        path: TinkerPath,
        restore: Restore,
    ) -> CreateFromState {
        CreateFromState::new(self.clone(), path, restore)
    }

    /// Samples from a base model.
    ///
    /// # Errors
    /// If the server has no such model.
    pub async fn create_sampling_client(
        &self,
        base_model: impl Into<String>,
    ) -> Result<SamplingClient> {
        self.sampling(Weights::Base(base_model.into())).await
    }

    /// Samples from a checkpoint that was saved for that.
    ///
    /// # Errors
    /// If there is no such checkpoint, or it was saved for something else.
    pub async fn create_sampling_client_from(&self, path: &TinkerPath) -> Result<SamplingClient> {
        if path.kind() != CheckpointKind::Sampler {
            let why = format!("{path} was not saved to sample from");
            let hint = "save it with save_weights_for_sampler";
            return Err(crate::Error::new(crate::ErrorKind::InvalidInput, why).with_hint(hint));
        }
        self.sampling(Weights::Checkpoint(path.to_string())).await
    }

    async fn sampling(&self, weights: Weights) -> Result<SamplingClient> {
        SamplingClient::create(self.session().await?, weights).await
    }

    /// Tells the server how this program's stay ended, if it had one. The first end counts.
    ///
    /// # Errors
    /// If the server cannot be told.
    pub async fn finish(&self, reason: FinishReason, detail: Option<String>) -> Result<()> {
        match self.0.session.get() {
            Some(session) => session.finish(reason, detail).await,
            None => Ok(()),
        }
    }

    /// Looks things up and tidies: runs, checkpoints, sessions.
    #[must_use]
    pub fn rest(&self) -> RestClient {
        RestClient::new(self.clone())
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
        let (token, exchanged) = self.engine().await?.transport().signature().await?;
        Identity::of(&token, exchanged).ok_or_else(|| {
            let why = "the credential is a plain API key, which does not tell whose it is";
            crate::Error::new(crate::ErrorKind::Auth, why)
        })
    }

    /// The server.
    #[must_use]
    pub fn base_url(&self) -> &BaseUrl {
        &self.0.settings.base_url
    }

    pub(crate) fn project_id(&self) -> Option<&str> {
        self.0.settings.project_id.as_deref()
    }

    /// The session, opened by whoever needs it first; a failure is not remembered.
    pub(crate) async fn session(&self) -> Result<Arc<Session>> {
        let session = self.0.session.get_or_try_init(|| Session::open(&self.0.settings)).await?;
        Ok(Arc::clone(session))
    }

    /// The connection, made by whoever needs it first; a failure is not remembered.
    pub(crate) async fn engine(&self) -> Result<&Engine> {
        self.0.engine.get_or_try_init(|| Engine::start(&self.0.settings)).await
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

    /// A header for every request; it wins over our own of that name.
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
            paced: !self.unpaced,
        })?;
        let (engine, session) = (OnceCell::new(), OnceCell::new());
        Ok(ServiceClient(Arc::new(Inner { settings, engine, session })))
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
