//! [`HubApi`]: requests to a Hugging Face hub, with retries. The token is sent to the hub's own
//! origin only.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, ETAG, USER_AGENT};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tinkex_wire::Secret;
use url::{Origin, Url};

use crate::hub::{Hub, OfflineSource};
use tinkex_transport::config::BaseUrl;
use tinkex_transport::download::attempts::Attempts;
use tinkex_transport::download::resume::{parse_url, to_uri};
use tinkex_transport::error::{Error, ErrorKind, Result, is_retryable_status};
use tinkex_transport::http::{HttpService, Lane};
use tinkex_transport::request::header::{USER_AGENT_VALUE, put_secret};
use tinkex_transport::request::redirect;
use tinkex_transport::retry::failed_attempt::FailedAttempt;

pub(crate) const JSON: &str = "application/json";
/// Timeout of one attempt.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum number of retries of one request.
pub(crate) const MAX_RETRIES: u32 = 4;

/// Client for the HTTP API of a hub.
pub(crate) struct HubApi {
    pub(crate) http: Arc<dyn HttpService>,
    pub(crate) endpoint: BaseUrl,
    token: Option<Secret>,
}

/// Request that is retried after temporary failures.
pub(crate) struct HubRequest<'a> {
    pub(crate) method: Method,
    pub(crate) url: &'a Url,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) max_retries: u32,
    /// Whether to send the token. After a redirect to another origin the token is not sent.
    pub(crate) with_token: bool,
    /// Header that marks a redirect as the final response: a redirect with this header is not
    /// followed.
    pub(crate) stop_at: Option<HeaderName>,
}

impl fmt::Debug for HubApi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HubApi").field("endpoint", &self.endpoint).finish_non_exhaustive()
    }
}

impl HubApi {
    /// Creates a client for a hub. Sends no request.
    ///
    /// # Errors
    /// If the HTTP client cannot be created.
    pub(crate) fn new(hub: &Hub) -> Result<Self> {
        let token = hub.access_token().cloned();
        Ok(Self { http: hub.http_service()?, endpoint: hub.url().clone(), token })
    }

    /// Creates a client for requests that need a token. Sends no request.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] if the hub is in offline mode, [`ErrorKind::Auth`] without a token.
    pub(crate) fn for_writing(hub: &Hub) -> Result<Self> {
        if let Some(source) = hub.offline_source() {
            let message = format!("cannot write to {}: offline mode is set", hub.url());
            let hint = match source {
                OfflineSource::Environment => "Unset HF_HUB_OFFLINE.",
                OfflineSource::Caller => "Remove Hub::offline, or --offline on the command line.",
            };
            return Err(Error::new(ErrorKind::Config, message).with_hint(hint));
        }
        if hub.access_token().is_none() {
            let message = format!("cannot write to {}: no access token", hub.url());
            let hint = "Log in with `hf auth login`, or set HF_TOKEN.";
            return Err(Error::new(ErrorKind::Auth, message).with_hint(hint));
        }
        Self::new(hub)
    }

    pub(crate) fn has_token(&self) -> bool {
        self.token.is_some()
    }

    /// Returns the headers of every request to `origin`, with the token if `origin` is the origin
    /// of the hub.
    pub(crate) fn headers(&self, origin: &Origin) -> Result<HeaderMap> {
        let mut headers = HeaderMap::new();
        headers.insert(USER_AGENT, HeaderValue::from_static(USER_AGENT_VALUE));
        if let Some(token) = self.token.as_ref().filter(|_| *origin == self.endpoint.origin()) {
            let bearer = Secret::from(format!("Bearer {}", token.expose()));
            put_secret(&mut headers, AUTHORIZATION.as_str(), &bearer)?;
        }
        Ok(headers)
    }

    /// Sends a request until its response has a status that is not retryable, and returns the
    /// response. Follows the redirects of GET and HEAD requests. All retries of hub requests happen
    /// here.
    ///
    /// # Errors
    /// The last error, when no retry is left.
    pub(crate) async fn request(&self, request: &HubRequest<'_>) -> Result<Response<Bytes>> {
        let mut attempts = Attempts::new(request.max_retries);
        loop {
            let mut url = request.url.clone();
            let failed = match self.send_once(request, &mut url).await {
                Ok(response) => {
                    let status = response.status().as_u16();
                    // Unlike the Tinker API, the hub responds with 409 if an object already exists,
                    // so a 409 is not retried.
                    if !is_retryable_status(status) || status == 409 {
                        return Ok(response);
                    }
                    FailedAttempt::from_response(&response)
                }
                Err(error) => error.into(),
            };
            attempts.wait_before_retry(failed, Lane::Hub, &url).await?;
        }
    }

    /// Sends a request to `url` once. After redirects, `url` is the URL of the last request.
    async fn send_once(&self, request: &HubRequest<'_>, url: &mut Url) -> Result<Response<Bytes>> {
        let send = |url: Url| -> BoxFuture<'_, Result<Response<Bytes>>> {
            Box::pin(async move {
                let mut sent = Request::new(request.body.clone());
                *sent.method_mut() = request.method.clone();
                *sent.uri_mut() = to_uri(&url)?;
                let mut headers = self.headers(&url.origin())?;
                if !request.with_token {
                    headers.remove(AUTHORIZATION);
                }
                headers.extend(request.headers.clone());
                *sent.headers_mut() = headers;
                self.http.send(Lane::Hub, sent, TIMEOUT).await.map_err(Error::from)
            })
        };
        let is_read = matches!(request.method, Method::GET | Method::HEAD);
        let is_final = |response: &Response<Bytes>| {
            let stop = request.stop_at.as_ref();
            !is_read || stop.is_some_and(|name| response.headers().contains_key(name))
        };
        redirect::follow(url, send, is_final).await
    }

    /// Sends a JSON document to a path of the hub and decodes the response.
    pub(crate) async fn json<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<T> {
        let body = body.map_or_else(Bytes::new, |body| Bytes::from(body.to_string()));
        decode(&self.send(method, path, JSON, body).await?)
    }

    /// Sends a HEAD request to a path of the hub.
    pub(crate) async fn head(&self, path: &str) -> Result<()> {
        self.send(Method::HEAD, path, JSON, Bytes::new()).await.map(drop)
    }

    /// Sends a request to a path of the hub and returns the body of the response.
    pub(crate) async fn send(
        &self,
        method: Method,
        path: &str,
        content_type: &'static str,
        body: Bytes,
    ) -> Result<Bytes> {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        if content_type.contains("git-lfs") {
            headers.insert(ACCEPT, HeaderValue::from_static(content_type));
        }
        let operation = format!("{method} {}{path}", self.endpoint);
        // Do not retry a commit: the hub may have made the commit although its response was lost.
        let max_retries = if path.contains("/commit/") { 0 } else { MAX_RETRIES };
        let url = parse_url(&self.endpoint.join(path))?;
        let request = HubRequest {
            method,
            url: &url,
            headers,
            body,
            max_retries,
            with_token: true,
            stop_at: None,
        };
        let response = self.request(&request).await.and_then(success);
        response.map(Response::into_body).map_err(|error| {
            let error = error.during(operation);
            match error.status() {
                Some(401) => {
                    error.with_hint("Log in again with `hf auth login`: the token is not valid.")
                }
                Some(403) => {
                    error.with_hint("Use a token that has write permission for this repository.")
                }
                _ => error,
            }
        })
    }

    /// Uploads bytes to a URL that the hub returned. Returns the entity tag of the response.
    pub(crate) async fn put(
        &self,
        url: &str,
        headers: &[(String, String)],
        body: Bytes,
    ) -> Result<Option<String>> {
        let response = self.send_to_storage(Method::PUT, url, headers, body).await?;
        let etag = response.headers().get(ETAG).and_then(|etag| etag.to_str().ok());
        Ok(etag.map(str::to_owned))
    }

    /// Sends a request, without the token, to a URL that the hub returned.
    pub(crate) async fn send_to_storage(
        &self,
        method: Method,
        url: &str,
        extra: &[(String, String)],
        body: Bytes,
    ) -> Result<Response<Bytes>> {
        let invalid =
            || Error::new(ErrorKind::Decode, "the hub returned an invalid header for the upload");
        let mut headers = HeaderMap::new();
        for (name, value) in extra {
            let name: HeaderName = name.parse().map_err(|_| invalid())?;
            let mut value = HeaderValue::from_str(value).map_err(|_| invalid())?;
            value.set_sensitive(true);
            headers.insert(name, value);
        }
        let url = &parse_url(url)?;
        let request = HubRequest {
            method,
            url,
            headers,
            body,
            max_retries: MAX_RETRIES,
            with_token: false,
            stop_at: None,
        };
        // The error does not contain the URL: a signed URL grants access like a credential.
        let response = self.request(&request).await.and_then(success);
        response.map_err(|error| error.during("upload to the hub's storage"))
    }
}

/// Converts a response with an error status to an error.
fn success(response: Response<Bytes>) -> Result<Response<Bytes>> {
    if response.status().is_success() {
        return Ok(response);
    }
    Err(FailedAttempt::from_response(&response).error)
}

pub(crate) fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T> {
    serde_json::from_slice(body).map_err(|error| {
        let message = format!("cannot decode the hub's response: {error}");
        Error::new(ErrorKind::Decode, message).with_source(error)
    })
}
