//! [`RecordedCall`]: a request that a [`FakeServer`](super::FakeServer) received.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, Request, header};
use serde_json::Value;
use tinkex_wire::codec::compress;
use tinkex_wire::{ForwardBackward, JsonForwardBackward, PROTO, Route};

use crate::transport::http::Lane;

/// Largest request body that is decompressed, in bytes.
const MAX_BODY_BYTES: usize = 1 << 30;

/// Request that a [`FakeServer`](super::FakeServer) received.
#[derive(Clone)]
#[non_exhaustive]
pub struct RecordedCall {
    /// Route, or `None` if the API has no such route.
    pub route: Option<Route>,
    /// Traffic class.
    pub lane: Lane,
    /// HTTP method.
    pub method: Method,
    /// Path and query, for example `/api/v1/training_runs?limit=20`.
    pub path: String,
    /// URL with the server, for example `http://fake-0.test/api/v1/training_runs?limit=20`.
    pub url: String,
    /// Headers. Credentials are marked as sensitive: `Debug` does not print them.
    pub headers: HeaderMap,
    /// Body, decompressed.
    pub body: Bytes,
    /// Time of arrival since the server was created, by the clock of tokio.
    pub at: Duration,
    /// Time that the client allows for the response.
    pub timeout: Duration,
}

impl RecordedCall {
    pub(super) fn new(
        lane: Lane,
        request: Request<Bytes>,
        timeout: Duration,
        at: Duration,
    ) -> Self {
        let (parts, body) = request.into_parts();
        let url = parts.uri.to_string();
        let path = parts.uri.path_and_query().map_or("/", |path| path.as_str()).to_owned();
        // A base URL may have a path of its own before the routes.
        let api_path = ["/oai/api/v1", "/api/v1"].iter().find_map(|prefix| path.find(prefix));
        let api_path = api_path.map_or(&*path, |start| &path[start..]);
        let route = Route::find(parts.method.as_str(), api_path).map(|found| found.route);
        let mut headers = parts.headers;
        for name in [header::AUTHORIZATION.as_str(), "x-api-key"] {
            if let Some(value) = headers.get_mut(name) {
                value.set_sensitive(true);
            }
        }
        let compressed =
            headers.get(header::CONTENT_ENCODING).is_some_and(|encoding| encoding == "zstd");
        let body = if compressed {
            compress::decompress(&body, MAX_BODY_BYTES).unwrap_or(body)
        } else {
            body
        };
        Self { route, lane, method: parts.method, path, url, headers, body, at, timeout }
    }

    /// Returns the value of a header, if it is present and readable text.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// Returns the body as JSON; null if it is empty or has another format. The protobuf body of a
    /// training pass is returned in the JSON form of the API.
    #[must_use]
    pub fn json(&self) -> Value {
        match self.forward_backward() {
            Some(pass) => serde_json::to_value(JsonForwardBackward(&pass)).unwrap_or_default(),
            None => serde_json::from_slice(&self.body).unwrap_or_default(),
        }
    }

    /// Returns the training pass of a protobuf body.
    #[must_use]
    pub fn forward_backward(&self) -> Option<ForwardBackward> {
        let is_proto = self.headers.get(header::CONTENT_TYPE).is_some_and(|kind| kind == PROTO);
        (is_proto && self.route == Some(Route::ForwardBackward))
            .then(|| ForwardBackward::from_proto(&self.body).ok())?
    }
}

impl fmt::Debug for RecordedCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecordedCall")
            .field("at", &self.at)
            .field("method", &self.method)
            .field("path", &self.path)
            .field("headers", &self.headers)
            .field("body", &self.json())
            .finish_non_exhaustive()
    }
}
