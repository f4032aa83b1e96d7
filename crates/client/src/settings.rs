//! Everything a client was told, put in order once.

use std::sync::Arc;
use std::time::Duration;

use ::http::HeaderMap;
use tinkex_wire::{JsonObject, Secret};

use crate::config::{BaseUrl, Credential, Env};
use crate::error::Result;
use crate::transport::http::HttpService;
use crate::transport::network::Network;
use crate::transport::retry::RetryPolicy;
use crate::transport::{Transport, header};

/// What a service client is made of; nothing of it changes.
#[derive(Clone)]
pub(crate) struct Settings {
    pub(crate) base_url: BaseUrl,
    api_key: Option<String>,
    /// Whether a credential command is out of the question.
    key_only: bool,
    env: Env,
    headers: HeaderMap,
    pub(crate) retry: RetryPolicy,
    http: Arc<dyn HttpService>,
    pub(crate) project_id: Option<String>,
    pub(crate) display_name: Option<String>,
    pub(crate) user_metadata: JsonObject,
    pub(crate) tags: Vec<String>,
    pub(crate) adaptive_polling: bool,
    pub(crate) telemetry: bool,
    pub(crate) max_samples: Option<u32>,
    pub(crate) progress_timeout: Option<Duration>,
    pub(crate) poll_timeout: Option<Duration>,
    /// Headers that the caller set, as they were given.
    pub(crate) overrides: Vec<(String, String)>,
}

/// The same, as it was given.
pub(crate) struct Given {
    pub(crate) base_url: Option<BaseUrl>,
    pub(crate) api_key: Option<String>,
    pub(crate) env: Env,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) retry: RetryPolicy,
    pub(crate) http: Option<Arc<dyn HttpService>>,
    pub(crate) project_id: Option<String>,
    pub(crate) display_name: Option<String>,
    pub(crate) user_metadata: JsonObject,
    pub(crate) adaptive_polling: bool,
    pub(crate) telemetry: bool,
    pub(crate) max_samples: Option<u32>,
    pub(crate) progress_timeout: Option<Duration>,
    pub(crate) poll_timeout: Option<Duration>,
}

/// A list with commas, without empty items and without repeats.
fn tags(text: &str) -> Vec<String> {
    let mut tags: Vec<String> = Vec::new();
    for tag in text.split(',').filter(|tag| !tag.is_empty()) {
        if !tags.iter().any(|seen| seen == tag) {
            tags.push(tag.to_owned());
        }
    }
    tags
}

/// On unless a variable says otherwise; an empty one does.
fn telemetry_wanted(variable: Option<&str>) -> bool {
    let on = ["1", "true", "yes", "on"];
    variable.is_none_or(|value| on.contains(&value.to_ascii_lowercase().as_str()))
}

impl Settings {
    /// Puts what was given in order. Touches neither the network nor a credential command.
    pub(crate) fn new(given: Given) -> Result<Self> {
        let http = match given.http {
            Some(http) => http,
            None => Arc::new(Network::new(&given.env)?),
        };
        let project = given.env.get("TINKER_PROJECT_ID").map(str::to_owned);
        let settings = Self {
            base_url: BaseUrl::resolve(given.base_url, &given.env)?,
            api_key: given.api_key,
            key_only: false,
            headers: header::fixed(&given.env, &given.headers)?,
            project_id: given.project_id.or(project),
            display_name: given.display_name,
            user_metadata: given.user_metadata,
            tags: tags(given.env.get("TINKER_TAGS").unwrap_or_default()),
            adaptive_polling: given.adaptive_polling,
            telemetry: given.telemetry && telemetry_wanted(given.env.raw("TINKER_TELEMETRY")),
            overrides: given.headers,
            max_samples: given.max_samples,
            progress_timeout: given.progress_timeout,
            poll_timeout: given.poll_timeout,
            env: given.env,
            retry: given.retry,
            http,
        };
        settings.credential(false)?;
        Ok(settings)
    }

    /// The same with another key, and no other credential.
    pub(crate) fn with_key(&self, key: &Secret) -> Self {
        Self { api_key: Some(key.expose().to_owned()), key_only: true, ..self.clone() }
    }

    pub(crate) fn credential(&self, command_only: bool) -> Result<Credential> {
        let command_only = command_only && !self.key_only;
        Credential::find(self.api_key.as_deref(), &self.env, command_only)
    }

    /// Where tokenizers come from, through the same door to the network.
    #[cfg(feature = "tokenizer")]
    pub(crate) fn hub(&self) -> Result<crate::tokenizer::Hub> {
        Ok(crate::tokenizer::Hub::from_env(&self.env)?.shared_http(Arc::clone(&self.http)))
    }

    /// The door to the network, for files that need no credential.
    pub(crate) fn http(&self) -> &dyn HttpService {
        &*self.http
    }

    pub(crate) fn transport(&self) -> Result<Arc<Transport>> {
        Ok(Transport::new(
            Arc::clone(&self.http),
            self.base_url.clone(),
            self.credential(false)?,
            self.headers.clone(),
            self.retry,
        ))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fixture;

    #[test]
    fn telemetry_is_switched_as_in_the_reference() {
        for case in fixture::cases("telemetry_env.json") {
            let wanted = telemetry_wanted(case["TINKER_TELEMETRY"].as_str());
            assert_eq!(json!(wanted), case["enabled"], "{case}");
        }
    }
}
