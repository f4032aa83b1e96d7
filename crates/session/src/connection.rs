//! [`Connection`]: the state that all clients of one service share.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tinkex_wire::{
    ApiRequest, ClientConfig, ClientConfigRequest, DynamicConfig, DynamicConfigRequest,
};

use crate::config::Credential;
use crate::error::{Error, ErrorKind, Result};
use crate::settings::ClientSettings;
use crate::telemetry::{EventQueue, Reporter, TelemetryScope};
use crate::transport::{RequestOptions, Transport};

/// Transport, server configuration and telemetry of one service.
///
/// A `ServiceClient` opens one connection and shares it with every client made from it, so that
/// configuration is fetched once and token exchange, billing state and HTTP connections are common
/// to all.
pub struct Connection {
    transport: Arc<Transport>,
    config: ClientConfig,
    initial_dynamic_config: DynamicConfig,
    has_dynamic_config: bool,
    /// Set by the first training pass or by the probe before it: the response shows which encoding
    /// the server accepts.
    pass_encoding: OnceLock<PassEncoding>,
    /// Set after a response which shows that the server cannot stream the tokens of a sample.
    no_sample_streams: AtomicBool,
    reporter: OnceLock<Reporter>,
}

/// Encoding in which a server accepts training passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassEncoding {
    /// Protobuf.
    Proto,
    /// JSON, for servers of the first protocol version.
    Json,
}

impl Connection {
    /// Fetches the server's configuration and applies its billing and authentication settings to
    /// the transport.
    ///
    /// # Errors
    /// If no credential is found, the server cannot be reached, or the server does not accept this
    /// kind of credential (API key or credential command).
    pub async fn open(settings: &ClientSettings) -> Result<Arc<Self>> {
        let transport = settings.transport()?;
        let config = fetch_optional(&transport, &ClientConfigRequest::default()).await?;
        let config: ClientConfig = config.unwrap_or_default();
        configure(&transport, settings, &config)?;
        let dynamic = fetch_optional(&transport, &DynamicConfigRequest::default()).await?;
        Ok(Self::new(transport, config, dynamic))
    }

    fn new(
        transport: Arc<Transport>,
        config: ClientConfig,
        dynamic: Option<DynamicConfig>,
    ) -> Arc<Self> {
        Arc::new(Self {
            transport,
            config,
            has_dynamic_config: dynamic.is_some(),
            initial_dynamic_config: dynamic.unwrap_or_default(),
            pass_encoding: OnceLock::new(),
            no_sample_streams: AtomicBool::new(false),
            reporter: OnceLock::new(),
        })
    }

    /// Creates a connection with a configuration that another connection fetched. Sends nothing.
    ///
    /// # Errors
    /// If no credential is found, or the server does not accept this kind of credential.
    pub(crate) fn restore(
        settings: &ClientSettings,
        config: ClientConfig,
        initial_dynamic_config: DynamicConfig,
    ) -> Result<Arc<Self>> {
        let transport = settings.transport()?;
        configure(&transport, settings, &config)?;
        Ok(Self::new(transport, config, Some(initial_dynamic_config)))
    }

    /// Starts telemetry if it is not running, and assigns later events to `scope`.
    pub fn start_telemetry(&self, scope: TelemetryScope<'_>) {
        let reporter = self
            .reporter
            .get_or_init(|| Reporter::start(&self.transport, TelemetryScope::NoSession));
        reporter.events().begin_session(scope);
    }

    /// Returns the transport.
    pub fn transport(&self) -> &Arc<Transport> {
        &self.transport
    }

    /// Returns the dynamic configuration as of opening the connection.
    pub(crate) fn initial_dynamic_config(&self) -> &DynamicConfig {
        &self.initial_dynamic_config
    }

    /// Returns whether the server has a dynamic configuration. Servers without one implement only a
    /// part of the protocol.
    pub fn has_dynamic_config(&self) -> bool {
        self.has_dynamic_config
    }

    /// Returns the encoding of training passes that the server accepts, if known.
    pub fn pass_encoding(&self) -> Option<PassEncoding> {
        self.pass_encoding.get().copied()
    }

    /// Records which encoding of training passes the server accepts. Only the first call has an
    /// effect.
    pub fn set_pass_encoding(&self, encoding: PassEncoding) {
        let _ = self.pass_encoding.set(encoding);
    }

    /// Returns whether the server may be able to stream the tokens of a sample: true until a
    /// response shows the contrary.
    pub fn may_stream_samples(&self) -> bool {
        !self.no_sample_streams.load(Ordering::Relaxed)
    }

    /// Records that the server cannot stream the tokens of a sample.
    pub fn set_cannot_stream_samples(&self) {
        self.no_sample_streams.store(true, Ordering::Relaxed);
    }

    /// Returns the server's configuration as of opening the connection.
    pub fn config(&self) -> &ClientConfig {
        &self.config
    }

    /// Returns the queue of telemetry events, if telemetry is enabled.
    pub fn events(&self) -> Option<&EventQueue> {
        self.reporter.get().map(Reporter::events)
    }

    /// Records a failed result in telemetry and returns the result unchanged.
    ///
    /// # Errors
    /// Returns the error of `result`.
    pub fn record_failure<T>(&self, result: Result<T>) -> Result<T> {
        if let (Err(error), Some(events)) = (&result, self.events()) {
            events.failure(error);
        }
        result
    }

    /// Waits until all recorded telemetry events have been sent, at most 30 seconds.
    pub async fn drain(&self) {
        if let Some(reporter) = self.reporter.get() {
            reporter.drain().await;
        }
    }

    /// Rejects new requests and sends the remaining telemetry events. Idempotent.
    pub async fn close(&self) {
        self.transport.close();
        if let Some(reporter) = self.reporter.get() {
            reporter.close().await;
        }
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("config", &self.config)
            .field("pass_encoding", &self.pass_encoding)
            .finish_non_exhaustive()
    }
}

/// Applies the server's billing and authentication settings to the transport.
fn configure(
    transport: &Transport,
    settings: &ClientSettings,
    config: &ClientConfig,
) -> Result<()> {
    transport
        .set_max_billing_wait(Duration::from_secs(config.billing_exception_max_pause_duration_sec));
    if config.pjwt_auth_enabled {
        let command_only = config.credential_default_source == "credential_cmd";
        transport.exchange_tokens(settings.credential(command_only)?, settings.clock.clone());
    } else if let Credential::Command(_) = settings.credential(false)? {
        let message = "server accepts API keys only, but only a credential command is set";
        return Err(Error::new(ErrorKind::Auth, message).with_hint("Set TINKER_API_KEY."));
    }
    Ok(())
}

/// Sends `request`. Returns `None` if the server lacks the endpoint: minimal servers have no
/// configuration endpoints.
async fn fetch_optional<R: ApiRequest>(
    transport: &Transport,
    request: &R,
) -> Result<Option<R::Response>> {
    match transport.send(request, &RequestOptions::default()).await {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}
