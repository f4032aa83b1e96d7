//! Calls of a hub. The token goes to the hub alone.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, ETAG, USER_AGENT};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tinkex_wire::Secret;

use crate::config::BaseUrl;
use crate::error::{Error, ErrorKind, Result};
use crate::tokenizer::Hub;
use crate::transport::delay;
use crate::transport::header::put_secret;
use crate::transport::http::{HttpService, Lane};

pub(super) const JSON: &str = "application/json";
const TIMEOUT: Duration = Duration::from_secs(120);
/// How often a call is made at most.
const MOST_TRIES: u32 = 5;

/// The way to a hub, with the right to write there.
pub(super) struct Door {
    http: Arc<dyn HttpService>,
    endpoint: BaseUrl,
    token: Secret,
}

impl fmt::Debug for Door {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Door").field("endpoint", &self.endpoint).finish_non_exhaustive()
    }
}

impl Door {
    pub(super) fn new(hub: &Hub) -> Result<Self> {
        if hub.is_offline() {
            let why = format!("{} must not be asked (HF_HUB_OFFLINE)", hub.address());
            return Err(Error::new(ErrorKind::Config, why));
        }
        let Some(token) = hub.secret().cloned() else {
            let why = format!("there is no token for {}", hub.address());
            let hint = "log in with the hub's own tool (hf auth login), or set HF_TOKEN";
            return Err(Error::new(ErrorKind::Auth, why).with_hint(hint));
        };
        Ok(Self { http: hub.door()?, endpoint: hub.address().clone(), token })
    }

    /// A call with a document in and out.
    pub(super) async fn json<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<T> {
        let body = body.map_or_else(Bytes::new, |body| Bytes::from(body.to_string()));
        decode(&self.send(method, path, JSON, body).await?)
    }

    /// Whether there is something.
    pub(super) async fn head(&self, path: &str) -> Result<()> {
        self.send(Method::HEAD, path, JSON, Bytes::new()).await.map(drop)
    }

    /// A call of the hub itself.
    pub(super) async fn send(
        &self,
        method: Method,
        path: &str,
        kind: &'static str,
        body: Bytes,
    ) -> Result<Bytes> {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
        if kind.contains("git-lfs") {
            headers.insert(http::header::ACCEPT, HeaderValue::from_static(kind));
        }
        let bearer = Secret::from(format!("Bearer {}", self.token.expose()));
        put_secret(&mut headers, AUTHORIZATION.as_str(), &bearer)?;
        let what = format!("{method} {}{path}", self.endpoint);
        // A change that may have been made already must not be made twice.
        let tries = if path.contains("/commit/") { 1 } else { MOST_TRIES };
        let reply = self.ask(method, &self.endpoint.join(path), &headers, body, tries).await;
        reply.map(Response::into_body).map_err(|error| {
            let error = error.during(what);
            match error.status() {
                Some(401) => error.with_hint("the hub does not know the token: log in again"),
                Some(403) => error.with_hint("the token may not write there: check its rights"),
                _ => error,
            }
        })
    }

    /// Puts bytes where the hub says, with what it says, and without the token. Returns the tag.
    pub(super) async fn put(
        &self,
        url: &str,
        extra: &[(String, String)],
        body: Bytes,
    ) -> Result<Option<String>> {
        let reply = self.elsewhere(Method::PUT, url, extra, body).await?;
        let tag = reply.headers().get(ETAG).and_then(|tag| tag.to_str().ok());
        Ok(tag.map(str::to_owned))
    }

    /// A call to an address that the hub named. It may be anybody's.
    pub(super) async fn elsewhere(
        &self,
        method: Method,
        url: &str,
        extra: &[(String, String)],
        body: Bytes,
    ) -> Result<Response<Bytes>> {
        let wrong = || Error::new(ErrorKind::Decode, "the hub named a header that makes no sense");
        let mut headers = HeaderMap::new();
        for (name, value) in extra {
            let name: HeaderName = name.parse().map_err(|_| wrong())?;
            let mut value = HeaderValue::from_str(value).map_err(|_| wrong())?;
            value.set_sensitive(true);
            headers.insert(name, value);
        }
        // The address is as good as a key: it stays out of the error.
        self.ask(method, url, &headers, body, MOST_TRIES)
            .await
            .map_err(|error| error.during("uploading to where the hub said"))
    }

    /// The one loop that asks a hub again.
    async fn ask(
        &self,
        method: Method,
        url: &str,
        headers: &HeaderMap,
        body: Bytes,
        most: u32,
    ) -> Result<Response<Bytes>> {
        let mut tries = 0;
        loop {
            tries += 1;
            let mut request = Request::new(body.clone());
            *request.method_mut() = method.clone();
            let wrong = |_| Error::new(ErrorKind::Decode, "the address makes no sense");
            *request.uri_mut() = url.parse().map_err(wrong)?;
            *request.headers_mut() = headers.clone();
            let agent = concat!("tinkex/", env!("CARGO_PKG_VERSION"), " (Rust)");
            request.headers_mut().insert(USER_AGENT, HeaderValue::from_static(agent));
            let (error, asked) = match self.http.send(Lane::Hub, request, TIMEOUT).await {
                Ok(reply) if reply.status().is_success() => return Ok(reply),
                Ok(reply) => {
                    let asked = delay::retry_after(reply.headers(), SystemTime::now());
                    let status = reply.status().as_u16();
                    let wait = delay::to_duration(asked);
                    (Error::from_response(status, reply.body(), wait), asked)
                }
                Err(failure) => (Error::from(failure), None),
            };
            if tries >= most || !error.is_retryable() || error.status() == Some(409) {
                return Err(error);
            }
            tracing::debug!(%error, tries, "asking the hub again");
            tokio::time::sleep(delay::before_retry(tries - 1, asked, fastrand::f64())).await;
        }
    }
}

pub(super) fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T> {
    serde_json::from_slice(body).map_err(|why| {
        Error::new(ErrorKind::Decode, "the hub's answer makes no sense").with_source(why)
    })
}
