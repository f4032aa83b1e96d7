//! What every client of one server shares: the way to it, and what it wants of its clients.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tinkex_wire::{
    ApiRequest, ClientConfig, ClientConfigRequest, DynamicConfig, DynamicConfigRequest,
};

use crate::config::Credential;
use crate::error::{Error, ErrorKind, Result};
use crate::settings::Settings;
use crate::telemetry::{EventQueue, Reporter, TelemetryScope};
use crate::transport::{RequestOptions, Transport};

/// A connection to a server.
pub(crate) struct Connection {
    transport: Arc<Transport>,
    config: ClientConfig,
    first_dynamic: DynamicConfig,
    first_protocol: bool,
    reporter: OnceLock<Reporter>,
}

impl Connection {
    /// Asks the server what it wants, then signs requests that way.
    pub(crate) async fn start(settings: &Settings) -> Result<Self> {
        let transport = settings.transport()?;
        let config = if_there(&transport, &ClientConfigRequest::default()).await?;
        let config: ClientConfig = config.unwrap_or_default();
        prepare(&transport, settings, &config)?;
        let dynamic = if_there(&transport, &DynamicConfigRequest::default()).await?;
        let first_protocol = dynamic.is_none();
        let first_dynamic = dynamic.unwrap_or_default();
        let reporter = OnceLock::new();
        Ok(Self { transport, config, first_dynamic, first_protocol, reporter })
    }

    /// The same with what another process was told. Asks nothing.
    pub(crate) fn restore(
        settings: &Settings,
        config: ClientConfig,
        first_dynamic: DynamicConfig,
    ) -> Result<Self> {
        let transport = settings.transport()?;
        prepare(&transport, settings, &config)?;
        let (first_protocol, reporter) = (false, OnceLock::new());
        Ok(Self { transport, config, first_dynamic, first_protocol, reporter })
    }

    /// Begins to report.
    pub(crate) fn report_for(&self, owner: TelemetryScope<'_>) {
        self.reporter.get_or_init(|| Reporter::start(&self.transport, owner));
    }

    pub(crate) fn transport(&self) -> &Arc<Transport> {
        &self.transport
    }

    /// What the server wanted at the start, and may want otherwise later.
    pub(crate) fn first_dynamic(&self) -> &DynamicConfig {
        &self.first_dynamic
    }

    /// Whether the server is of the first protocol, which has no protobuf. Both came later than
    /// it: settings that change, and passes that are not JSON.
    pub(crate) fn is_first_protocol(&self) -> bool {
        self.first_protocol
    }

    /// What the server wants of its clients.
    pub(crate) fn config(&self) -> &ClientConfig {
        &self.config
    }

    /// Where things are written down, if anywhere.
    pub(crate) fn events(&self) -> Option<&EventQueue> {
        self.reporter.get().map(Reporter::events)
    }

    /// Passes a result on, and writes a failure down.
    pub(crate) fn record_failure<T>(&self, result: Result<T>) -> Result<T> {
        if let (Err(error), Some(events)) = (&result, self.events()) {
            events.failure(error);
        }
        result
    }

    /// Waits until what was written down has left.
    pub(crate) async fn drain(&self) {
        if let Some(reporter) = self.reporter.get() {
            reporter.drain().await;
        }
    }

    /// Sends last words, and nothing more after that.
    pub(crate) async fn close(&self) {
        self.transport.close();
        if let Some(reporter) = self.reporter.get() {
            reporter.close().await;
        }
    }
}

/// Does as the server wants about billing and signatures.
fn prepare(transport: &Transport, settings: &Settings, config: &ClientConfig) -> Result<()> {
    transport.set_longest_billing_pause(Duration::from_secs(
        config.billing_exception_max_pause_duration_sec,
    ));
    if config.pjwt_auth_enabled {
        let command_only = config.credential_default_source == "credential_cmd";
        transport.exchange_tokens(settings.credential(command_only)?);
    } else if let Credential::Command(_) = settings.credential(false)? {
        let why = "this server takes API keys only, and only a credential command is set";
        return Err(Error::new(ErrorKind::Auth, why).with_hint("set TINKER_API_KEY"));
    }
    Ok(())
}

/// Settings, or nothing from a server without them: simple ones lack the call.
async fn if_there<C: ApiRequest>(transport: &Transport, call: &C) -> Result<Option<C::Response>> {
    match transport.send(call, &RequestOptions::default()).await {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}
