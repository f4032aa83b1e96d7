//! What every client of one server shares: the way to it, and what it wants of its clients.

use std::sync::Arc;
use std::time::Duration;

use tinkex_wire::{Call, ClientConfig, ClientConfigRequest, DynamicConfig, DynamicConfigRequest};

use crate::config::Credential;
use crate::error::{Error, ErrorKind, Result};
use crate::settings::Settings;
use crate::transport::{Extras, Transport};

/// A connection to a server.
pub(crate) struct Engine {
    transport: Arc<Transport>,
    config: ClientConfig,
    first_dynamic: DynamicConfig,
}

impl Engine {
    /// Asks the server what it wants, then signs requests that way.
    pub(crate) async fn start(settings: &Settings) -> Result<Self> {
        let transport = settings.transport()?;
        let config: ClientConfig = or_default(&transport, &ClientConfigRequest::default()).await?;
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
        let first_dynamic = or_default(&transport, &DynamicConfigRequest::default()).await?;
        Ok(Self { transport, config, first_dynamic })
    }

    pub(crate) fn transport(&self) -> &Arc<Transport> {
        &self.transport
    }

    /// What the server wanted at the start, and may want otherwise later.
    pub(crate) fn first_dynamic(&self) -> &DynamicConfig {
        &self.first_dynamic
    }

    /// What the server wants of its clients.
    pub(crate) fn config(&self) -> &ClientConfig {
        &self.config
    }
}

/// Settings that a server does not have are the defaults: simple servers lack the call.
async fn or_default<C>(transport: &Transport, call: &C) -> Result<C::Reply>
where
    C: Call<Reply: Default>,
{
    match transport.call(call, &Extras::default()).await {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(C::Reply::default()),
        other => other,
    }
}
