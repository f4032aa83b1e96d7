//! Everything a client was told, put in order once.

use std::sync::Arc;

use ::http::HeaderMap;

use crate::config::{BaseUrl, Credential, Env};
use crate::error::Result;
use crate::transport::http::{HttpService, Network};
use crate::transport::retry::RetryPolicy;
use crate::transport::{Transport, header};

/// What a service client is made of; nothing of it changes.
pub(crate) struct Settings {
    pub(crate) base_url: BaseUrl,
    api_key: Option<String>,
    env: Env,
    headers: HeaderMap,
    retry: RetryPolicy,
    http: Arc<dyn HttpService>,
    pub(crate) project_id: Option<String>,
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
}

impl Settings {
    /// Puts what was given in order. Touches neither the network nor a credential command.
    pub(crate) fn new(given: Given) -> Result<Self> {
        let http = match given.http {
            Some(http) => http,
            None => Arc::new(Network::new()?),
        };
        let project = given.env.get("TINKER_PROJECT_ID").map(str::to_owned);
        let settings = Self {
            base_url: BaseUrl::resolve(given.base_url, &given.env)?,
            api_key: given.api_key,
            headers: header::fixed(&given.env, &given.headers)?,
            project_id: given.project_id.or(project),
            env: given.env,
            retry: given.retry,
            http,
        };
        settings.credential(false)?;
        Ok(settings)
    }

    pub(crate) fn credential(&self, command_only: bool) -> Result<Credential> {
        Credential::find(self.api_key.as_deref(), &self.env, command_only)
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
