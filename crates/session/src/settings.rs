//! [`ClientSettings`]: the resolved settings of a client.

use std::fmt;
use std::sync::Arc;

use ::http::HeaderMap;
use tinkex_wire::{JsonObject, Secret};
use tokio::runtime::{EnterGuard, Handle};

use crate::clock::WallClock;
use crate::config::{ApiKey, BaseUrl, Credential, Env, is_on};
use crate::error::{Error, ErrorKind, Result};
use crate::future::queue_log::QueueObserver;
use crate::transport::CallOptions;
use crate::transport::Transport;
use crate::transport::http::HttpService;
use crate::transport::http::custom::CustomHttp;
use crate::transport::http::network::Network;
use crate::transport::http::shared_network::shared_network;
use crate::transport::instrument::stats::RequestStats;
use crate::transport::request::header;
use crate::transport::retry::backoff_registry::BackoffRegistry;
use crate::transport::retry::shared_backoff::SharedBackoff;

/// Immutable settings of a service client. Arguments take precedence over environment variables,
/// and environment variables over defaults.
#[derive(Clone)]
pub struct ClientSettings {
    /// Base URL of the server.
    pub base_url: BaseUrl,
    api_key: Option<String>,
    /// Whether `api_key` is the only credential allowed. The credentials of the environment are then
    /// ignored, also if the server requires a credential command.
    key_only: bool,
    env: Env,
    headers: HeaderMap,
    /// Time limits and retries of calls.
    pub options: CallOptions,
    http: Arc<dyn HttpService>,
    backoffs: Arc<BackoffRegistry>,
    /// Request statistics, shared by all transports of the client.
    pub stats: Arc<RequestStats>,
    pub(crate) queue_observer: Option<QueueObserver>,
    /// Project of new sessions and copied checkpoints.
    pub project_id: Option<String>,
    pub(crate) display_name: Option<String>,
    pub(crate) user_metadata: JsonObject,
    pub(crate) tags: Vec<String>,
    /// Names of experimental features, returned to the program. No request depends on them.
    pub feature_gates: Vec<String>,
    pub(crate) adaptive_polling: bool,
    /// Whether telemetry events are reported to the server.
    pub telemetry: bool,
    /// Maximum number of concurrent samples per sampling client; `None` if only the server limits
    /// the samples.
    pub max_concurrent_samples: Option<u32>,
    /// Clock that determines whether tokens and signed URLs have expired.
    pub clock: WallClock,
    /// Runtime that hosts background tasks, and calls outside of a runtime. If `None`, the runtime
    /// of the first call hosts background tasks.
    runtime: Option<Handle>,
    /// Headers set by the caller, which a handle passes on to other processes.
    pub(crate) header_overrides: Vec<(String, String)>,
}

/// Arguments of [`ClientSettings::new`].
pub struct SettingsInput {
    /// Base URL of the server; from the environment if `None`.
    pub base_url: Option<BaseUrl>,
    /// API key; from the environment or the credential store if `None`.
    pub api_key: Option<String>,
    /// Environment variables.
    pub env: Env,
    /// Headers of every request.
    pub headers: Vec<(String, String)>,
    /// Time limits and retries of calls.
    pub options: CallOptions,
    /// Service that sends HTTP requests; the network if `None`.
    pub http: Option<HttpSource>,
    /// Project of new sessions and copied checkpoints; from the environment if `None`.
    pub project_id: Option<String>,
    /// Display name of new sessions.
    pub display_name: Option<String>,
    /// Metadata that the server stores with a session.
    pub user_metadata: JsonObject,
    /// Names of experimental features; from the environment if `None`.
    pub feature_gates: Option<Vec<String>>,
    /// Whether the next poll is delayed when the server responds "not ready" without holding the
    /// poll open.
    pub adaptive_polling: bool,
    /// Whether telemetry events are reported to the server, unless `TINKER_TELEMETRY` disables
    /// telemetry.
    pub telemetry: bool,
    /// Maximum number of concurrent samples per sampling client; `None` if only the server limits
    /// the samples.
    pub max_concurrent_samples: Option<u32>,
    /// Clock that determines whether tokens and signed URLs have expired.
    pub clock: WallClock,
    /// Runtime that hosts background tasks, and calls outside of a runtime. If `None`, the runtime
    /// of the first call hosts background tasks.
    pub runtime: Option<Handle>,
    /// Callback for changes of the queue state.
    pub queue_observer: Option<QueueObserver>,
}

/// Value of `TINKER_FEATURE_GATES` if the variable is not set, as in the Python SDK.
const DEFAULT_FEATURE_GATES: &str = "async_sampling";

/// HTTP service that the caller chose.
#[derive(Clone, Debug)]
pub enum HttpSource {
    /// A service of the caller, with backoffs of its own.
    Custom(CustomHttp),
    /// The network with settings of the caller, with the backoffs of the process.
    Network(Network),
}

/// Splits a comma-separated list, without empty and repeated items.
fn parse_list(text: &str) -> Vec<String> {
    let mut items: Vec<String> = Vec::new();
    for item in text.split(',').filter(|item| !item.is_empty()) {
        if !items.iter().any(|known| known == item) {
            items.push(item.to_owned());
        }
    }
    items
}

/// Checks the maximum number of concurrent samples.
///
/// # Errors
/// [`ErrorKind::Config`] if the maximum is 0, because no sample could ever run.
pub fn validate_concurrency(samples: Option<u32>) -> Result<()> {
    if samples == Some(0) {
        let message = "invalid max_concurrent_samples 0: must be at least 1";
        return Err(Error::new(ErrorKind::Config, message));
    }
    Ok(())
}

/// Returns whether `TINKER_TELEMETRY`, whose value is `variable`, enables telemetry: if it is
/// unset, or is 1, true, yes or on. An empty variable disables telemetry.
fn telemetry_enabled(variable: Option<&str>) -> bool {
    variable.is_none_or(is_on)
}

impl ClientSettings {
    /// Resolves the settings. Neither sends a request nor runs a credential command.
    ///
    /// # Errors
    /// If no credential is found or a setting is invalid.
    pub fn new(input: SettingsInput) -> Result<Self> {
        input.options.validate()?;
        validate_concurrency(input.max_concurrent_samples)?;
        let base_url = BaseUrl::resolve(input.base_url, &input.env)?;
        let (http, backoffs): (Arc<dyn HttpService>, _) = match input.http {
            Some(HttpSource::Custom(custom)) => (custom.service, custom.backoffs),
            Some(HttpSource::Network(network)) => {
                (Arc::new(network), BackoffRegistry::of_process())
            }
            None => {
                let network = shared_network(&base_url, &input.env, input.runtime.as_ref())?;
                (network, BackoffRegistry::of_process())
            }
        };
        let project = input.env.get("TINKER_PROJECT_ID").map(str::to_owned);
        let settings = Self {
            base_url,
            api_key: input.api_key,
            key_only: false,
            headers: header::default_headers(&input.env, &input.headers)?,
            project_id: input.project_id.or(project),
            display_name: input.display_name,
            user_metadata: input.user_metadata,
            tags: parse_list(input.env.get("TINKER_TAGS").unwrap_or_default()),
            feature_gates: input.feature_gates.unwrap_or_else(|| {
                let gates = input.env.raw("TINKER_FEATURE_GATES");
                parse_list(gates.unwrap_or(DEFAULT_FEATURE_GATES))
            }),
            adaptive_polling: input.adaptive_polling,
            telemetry: input.telemetry && telemetry_enabled(input.env.raw("TINKER_TELEMETRY")),
            header_overrides: input.headers,
            max_concurrent_samples: input.max_concurrent_samples,
            clock: input.clock,
            runtime: input.runtime,
            env: input.env,
            options: input.options,
            http,
            backoffs,
            stats: Arc::default(),
            queue_observer: input.queue_observer,
        };
        settings.credential(false)?;
        Ok(settings)
    }

    /// Returns a copy that authenticates with `key` only.
    pub(crate) fn with_key(&self, key: &Secret) -> Self {
        Self { api_key: Some(key.expose().to_owned()), key_only: true, ..self.clone() }
    }

    /// Returns the credential. If `command_only` is true, only a credential command or a token is
    /// accepted, because the server requires short-lived credentials.
    ///
    /// # Errors
    /// If no acceptable credential is found.
    pub(crate) fn credential(&self, command_only: bool) -> Result<Credential> {
        if self.key_only {
            let key = self.api_key.as_deref().unwrap_or_default();
            return ApiKey::new(key).map(Credential::Key);
        }
        Credential::find(self.api_key.as_deref(), &self.env, command_only)
    }

    /// Returns the backoff after a 429, which all clients of this server and credential share.
    pub(crate) fn backoff(&self) -> Result<Arc<SharedBackoff>> {
        Ok(self.backoffs.get(&self.base_url, &self.credential(false)?))
    }

    /// Enters the runtime that the caller configured if the current thread has no runtime, so that
    /// a call of this thread starts there. The guard must be held while the call starts.
    #[must_use]
    pub fn enter_runtime(&self) -> Option<EnterGuard<'_>> {
        let outside = Handle::try_current().is_err();
        self.runtime.as_ref().filter(|_| outside).map(Handle::enter)
    }

    /// Returns the environment variables.
    pub fn env(&self) -> &Env {
        &self.env
    }

    /// Returns the HTTP service, for requests without a credential.
    pub fn http(&self) -> &Arc<dyn HttpService> {
        &self.http
    }

    /// Creates a transport with its own billing and token state.
    ///
    /// # Errors
    /// If no credential is found.
    pub fn transport(&self) -> Result<Arc<Transport>> {
        let transport = Transport::new(
            Arc::clone(&self.http),
            self.base_url.clone(),
            self.credential(false)?,
            self.headers.clone(),
            self.options,
            Arc::clone(&self.stats),
        );
        if let Some(runtime) = &self.runtime {
            transport.background().choose_host(runtime.clone());
        }
        Ok(transport)
    }
}

/// Omits the API key and the headers, which may hold secrets.
impl fmt::Debug for ClientSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientSettings")
            .field("base_url", &self.base_url)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

/// Omits the API key and the headers, which may hold secrets.
impl fmt::Debug for SettingsInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SettingsInput")
            .field("base_url", &self.base_url)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fixture;

    #[test]
    fn the_limit_of_concurrent_samples_is_checked_as_in_the_python_sdk() {
        let file = fixture::load("retry_handler_delay.json");
        // The Python SDK replaces its default of 1000 by the limit that the server sets; here the
        // server's limit applies without a default.
        assert_eq!(file["defaults"]["max_connections"], 1000);
        for case in file["config_validation"].as_array().unwrap() {
            let limit = &case["max_connections"];
            // A negative number cannot be expressed here.
            let Some(limit) =
                limit.as_i64().map_or(Some(None), |n| u32::try_from(n).ok().map(Some))
            else {
                continue;
            };
            assert_eq!(case["ok"], validate_concurrency(limit).is_ok(), "{case}");
        }
    }

    #[test]
    fn telemetry_is_enabled_as_in_the_python_sdk() {
        for case in fixture::cases("telemetry_env.json") {
            let enabled = telemetry_enabled(case["TINKER_TELEMETRY"].as_str());
            assert_eq!(json!(enabled), case["enabled"], "{case}");
        }
    }
}
