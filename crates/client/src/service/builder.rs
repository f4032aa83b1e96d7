//! [`ServiceClientBuilder`]: the settings of a [`ServiceClient`].

use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use tinkex_wire::JsonObject;
use tokio::runtime::Handle;

use crate::clock::WallClock;
use crate::config::{BaseUrl, Env};
use crate::error::{Error, Result};
use crate::future::queue_log::{QueueObserver, QueueStateChange};
use crate::settings::{ClientSettings, HttpSource, SettingsInput};
use crate::transport::CallOptions;
use crate::transport::http::HttpService;
use crate::transport::http::custom::CustomHttp;
use crate::transport::http::network::Network;

use super::ServiceClient;

/// Builder of a [`ServiceClient`].
///
/// Settings that are not set come from environment variables, which are read once, in
/// [`build`](Self::build). Clone a builder to create several clients with common settings.
///
/// ```
/// use std::time::Duration;
/// use tinkex::{CallOptions, ServiceClient};
///
/// let service = ServiceClient::builder()
///     .base_url("http://localhost:8000")
///     .api_key("tml-example")
///     .options(CallOptions::new().give_up_after(Duration::from_secs(30)))
///     .build()?;
/// # Ok::<_, tinkex::Error>(())
/// ```
#[derive(Clone, Default)]
#[must_use = "a builder does nothing until `build` is called"]
pub struct ServiceClientBuilder {
    base_url: Option<Result<BaseUrl>>,
    api_key: Option<String>,
    env: Option<Env>,
    headers: Vec<(String, String)>,
    options: CallOptions,
    http: Option<HttpSource>,
    project_id: Option<String>,
    display_name: Option<String>,
    user_metadata: JsonObject,
    feature_gates: Option<Vec<String>>,
    poll_immediately: bool,
    without_telemetry: bool,
    max_concurrent_samples: Option<u32>,
    clock: WallClock,
    runtime: Option<Handle>,
    queue_observer: Option<QueueObserver>,
}

impl ServiceClientBuilder {
    /// Sets the server's base URL. Defaults to `TINKER_BASE_URL`, else the hosted service.
    /// [`build`](Self::build) reports an invalid URL.
    pub fn base_url(mut self, url: impl TryInto<BaseUrl, Error: Into<Error>>) -> Self {
        self.base_url = Some(url.try_into().map_err(Into::into));
        self
    }

    /// Sets the API key. Defaults to `TINKER_API_KEY`, else the output of the command in
    /// `TINKER_CREDENTIAL_CMD`, else the key stored by `tinkex auth login`.
    pub fn api_key(mut self, key: impl Into<String>) -> Self {
        self.api_key = Some(key.into());
        self
    }

    /// Sets the environment variables to read. Defaults to the environment of the process.
    pub fn env(mut self, env: Env) -> Self {
        self.env = Some(env);
        self
    }

    /// Adds a header to every request. The header replaces a default header of the same name,
    /// except authentication, retry and idempotency headers, which cannot be replaced.
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// Sets time limits and retries of all calls. Defaults to [`CallOptions::default`].
    pub fn options(mut self, options: CallOptions) -> Self {
        self.options = options;
        self
    }

    /// Sets the service that sends HTTP requests, for example a recorder or a fake. Defaults to a
    /// [`Network`] with default settings, which a service of your own can wrap. Replaces
    /// [`network`](Self::network).
    ///
    /// Clients of this builder and its clones share the backoff after a 429 with each other only,
    /// not with other clients of the same server and key: a fake with the same URL is another
    /// server. A panic of the service becomes an error of kind
    /// [`ErrorKind::Panicked`](crate::ErrorKind::Panicked).
    pub fn http(mut self, service: impl HttpService) -> Self {
        self.http = Some(HttpSource::Custom(CustomHttp::new(service)));
        self
    }

    /// Sets the network that sends HTTP requests, for settings of its connections such as
    /// certificate authorities and the proxy; see [`Network::builder`]. All clients of one network
    /// share its connections. Replaces [`http`](Self::http).
    pub fn network(mut self, network: Network) -> Self {
        self.http = Some(HttpSource::Network(network));
        self
    }

    /// Sets the project of new sessions and copied checkpoints. Defaults to `TINKER_PROJECT_ID`.
    pub fn project_id(mut self, project: impl Into<String>) -> Self {
        self.project_id = Some(project.into());
        self
    }

    /// Sets the display name of the session.
    pub fn display_name(mut self, name: impl Into<String>) -> Self {
        self.display_name = Some(name.into());
        self
    }

    /// Sets metadata that the server stores with the session.
    pub fn user_metadata(mut self, metadata: JsonObject) -> Self {
        self.user_metadata = metadata;
        self
    }

    /// Sets the names that [`ServiceClient::feature_gates`] returns. Defaults to
    /// `TINKER_FEATURE_GATES`, a comma-separated list, else `async_sampling`.
    pub fn feature_gates<T: Into<String>>(mut self, gates: impl IntoIterator<Item = T>) -> Self {
        self.feature_gates = Some(gates.into_iter().map(Into::into).collect());
        self
    }

    /// Makes the client poll again at once when the server responds "not ready" without holding the
    /// poll open. By default the next poll is then delayed by up to 5 seconds.
    pub fn poll_immediately(mut self) -> Self {
        self.poll_immediately = true;
        self
    }

    /// Sets the maximum number of concurrent samples per sampling client, at least 1. The server
    /// may set a limit too, usually 2000; the lower limit applies. By default only the limit of the
    /// server applies.
    pub fn max_concurrent_samples(mut self, samples: u32) -> Self {
        self.max_concurrent_samples = Some(samples);
        self
    }

    /// Sets the wall clock that the expiry of tokens and signed URLs is compared with. Defaults to
    /// the clock of the system; tests with paused time replace it.
    ///
    /// ```
    /// use std::time::SystemTime;
    /// use tinkex::ServiceClient;
    /// use tokio::time::Instant;
    ///
    /// // A wall clock that follows the clock of a paused runtime.
    /// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
    /// let started = SystemTime::now();
    /// let start = Instant::now();
    /// let builder = ServiceClient::builder().wall_clock(move || started + start.elapsed());
    /// # })
    /// ```
    pub fn wall_clock(mut self, now: impl Fn() -> SystemTime + Send + Sync + 'static) -> Self {
        self.clock = WallClock::new(now);
        self
    }

    /// Sets the tokio runtime that hosts the client's background tasks (heartbeats, batch polls,
    /// token renewal, cancellations and telemetry) and the calls that are made outside of a tokio
    /// runtime, for example in another async runtime. By default the runtime of the first call hosts
    /// background tasks, and calls outside of a runtime return an error.
    ///
    /// Inside a tokio runtime, calls run in the runtime of their caller. If the host ends while the
    /// client is in use, the next call restarts the background tasks in its own runtime.
    ///
    /// ```
    /// use tinkex::ServiceClient;
    ///
    /// let runtime = tokio::runtime::Runtime::new()?;
    /// let builder = ServiceClient::builder().runtime(runtime.handle().clone());
    /// # Ok::<_, std::io::Error>(())
    /// ```
    pub fn runtime(mut self, runtime: Handle) -> Self {
        self.runtime = Some(runtime);
        self
    }

    /// Sets a function that is called when the server pauses or resumes pending work of this
    /// client.
    ///
    /// The function is called once per change and client, from the task that polls for the result;
    /// a blocking function delays that result. A panic is logged. The same changes are events of
    /// the target [`targets::QUEUE`](crate::targets::QUEUE).
    ///
    /// ```
    /// use tinkex::ServiceClient;
    ///
    /// let builder = ServiceClient::builder().on_queue_state(|change| {
    ///     println!("{} {}: {:?}", change.work, change.id, change.state);
    /// });
    /// ```
    pub fn on_queue_state(
        mut self,
        callback: impl Fn(&QueueStateChange) + Send + Sync + 'static,
    ) -> Self {
        self.queue_observer = Some(QueueObserver::new(callback));
        self
    }

    /// Disables telemetry, like `TINKER_TELEMETRY=0`.
    pub fn without_telemetry(mut self) -> Self {
        self.without_telemetry = true;
        self
    }

    /// Builds the client. Sends nothing; the first call connects.
    ///
    /// # Errors
    /// If no credential is found or a setting is invalid.
    pub fn build(self) -> Result<ServiceClient> {
        let settings = ClientSettings::new(SettingsInput {
            base_url: self.base_url.transpose()?,
            api_key: self.api_key,
            env: self.env.unwrap_or_else(Env::from_process),
            headers: self.headers,
            options: self.options,
            http: self.http,
            project_id: self.project_id,
            display_name: self.display_name,
            user_metadata: self.user_metadata,
            feature_gates: self.feature_gates,
            adaptive_polling: !self.poll_immediately,
            telemetry: !self.without_telemetry,
            max_concurrent_samples: self.max_concurrent_samples,
            clock: self.clock,
            runtime: self.runtime,
            queue_observer: self.queue_observer,
        })?;
        Ok(ServiceClient::new(Arc::new(settings)))
    }
}

impl fmt::Debug for ServiceClientBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServiceClientBuilder")
            .field("base_url", &self.base_url)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}
