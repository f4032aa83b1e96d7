//! [`ScriptedServer`]: sends the responses of a script and records the requests.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{Request, Response};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use tinkex::{HttpFailure, HttpService, Lane};
use tinkex_cli::Interrupt;

/// HTTP service that sends scripted responses and records the requests.
#[derive(Clone)]
pub(crate) struct ScriptedServer {
    replies: Arc<Value>,
    raw: Arc<RawRoutes>,
    state: Arc<Mutex<ScriptState>>,
    /// Pressed when a request for a slow response arrives.
    interrupt: Option<Interrupt>,
}

/// Script with response bodies as raw text, which keeps the order of their keys.
#[derive(Deserialize)]
struct RawRoutes {
    replies: Vec<RawRoute>,
}

#[derive(Deserialize)]
struct RawRoute {
    body: Option<Box<RawValue>>,
    replies: Option<Vec<Self>>,
}

#[derive(Default)]
struct ScriptState {
    requests: Vec<Value>,
    /// Number of requests per route.
    counts: Vec<usize>,
}

/// One response of the script.
pub(crate) struct ScriptedResponse {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Bytes,
    /// Time until the response is sent.
    pub(crate) delay: Duration,
}

impl ScriptedServer {
    /// Creates a server from a script, given as JSON text.
    pub(crate) fn new(replies: &str, interrupt: Option<Interrupt>) -> Self {
        let raw: RawRoutes = serde_json::from_str(replies).unwrap();
        let replies: Value = serde_json::from_str(replies).unwrap();
        let count = replies["replies"].as_array().unwrap().len();
        let state = ScriptState { requests: Vec::new(), counts: vec![0; count] };
        Self {
            replies: Arc::new(replies),
            raw: Arc::new(raw),
            state: Arc::new(Mutex::new(state)),
            interrupt,
        }
    }

    /// Returns the requests in order: method, path, query, body and selected headers.
    pub(crate) fn requests(&self) -> Vec<Value> {
        self.state.lock().unwrap().requests.clone()
    }

    /// Returns the path of the base URL. The routes of the script do not include it.
    pub(crate) fn prefix(&self) -> &str {
        let base = self.replies["base_url"].as_str().unwrap();
        let host = base.find("://").unwrap() + 3;
        base[host..].find('/').map_or("", |at| &base[host + at..])
    }

    pub(crate) fn respond(&self, request: &Request<Bytes>) -> ScriptedResponse {
        let path = request.uri().path();
        let path = path.strip_prefix(self.prefix()).unwrap_or(path);
        let query = request.uri().query().unwrap_or_default();
        let query: serde_json::Map<String, Value> = query
            .split('&')
            .filter_map(|pair| pair.split_once('='))
            .map(|(name, value)| (name.to_owned(), value.replace("%3A", ":").into()))
            .collect();
        let body: Value = serde_json::from_slice(request.body()).unwrap_or_default();
        let header = |name: &str| {
            let value = request.headers().get(name)?;
            Some((name.to_owned(), Value::from(value.to_str().unwrap())))
        };
        let headers = ["x-api-key", "x-sdk-method", "x-sdk-version"];
        let headers: serde_json::Map<_, _> = headers.into_iter().filter_map(header).collect();
        let mut state = self.state.lock().unwrap();
        state.requests.push(json!({
            "method": request.method().as_str(), "path": path, "query": query, "body": body,
            "headers": headers, "host": request.uri().host(),
        }));
        let routes = self.replies["replies"].as_array().unwrap();
        let at = routes.iter().position(|route| {
            let matches = |expected: &Value, actual: &dyn Fn(&str) -> String| {
                let pairs = expected.as_object().into_iter().flatten();
                pairs.into_iter().all(|(name, value)| actual(name) == text(value))
            };
            route["path"] == path
                && route["method"] == request.method().as_str()
                && matches(&route["query"], &|name| query.get(name).map(text).unwrap_or_default())
                && matches(&route["match"], &|name| text(&body[name]))
        });
        let Some(at) = at else {
            let (status, body) = match path {
                "/api/v1/client/config" | "/api/v1/client/dynamic_config" => (200, "{}".to_owned()),
                "/api/v1/telemetry" => (200, r#"{"status":"accepted"}"#.to_owned()),
                _ => (404, format!(r#"{{"detail":"mock: no route {path}"}}"#)),
            };
            return ScriptedResponse {
                status,
                headers: json_type(),
                body: body.into(),
                delay: Duration::ZERO,
            };
        };
        let route = &routes[at];
        let raw = &self.raw.replies[at];
        let (reply, raw) = match (route["replies"].as_array(), &raw.replies) {
            (Some(replies), Some(raw)) => {
                let index = state.counts[at].min(replies.len() - 1);
                (&replies[index], &raw[index])
            }
            _ => (route, raw),
        };
        state.counts[at] += 1;
        let mut headers = json_type();
        if let Some(kind) = reply["content_type"].as_str() {
            headers = vec![("content-type".to_owned(), kind.to_owned())];
        }
        for (name, value) in reply["headers"].as_object().into_iter().flatten() {
            headers.push((name.clone(), text(value)));
        }
        let body = match (reply["text"].as_str(), &raw.body) {
            (Some(text), _) => text.to_owned(),
            (None, body) => body.as_ref().map_or("", |body| body.get()).to_owned(),
        };
        let delay = Duration::from_secs_f64(route["sleep"].as_f64().unwrap_or_default());
        let status = u16::try_from(reply["status"].as_u64().unwrap()).unwrap();
        ScriptedResponse { status, headers, body: body.into(), delay }
    }
}

fn json_type() -> Vec<(String, String)> {
    vec![("content-type".to_owned(), "application/json".to_owned())]
}

/// Formats the value of a query parameter or header, which may be a number in the script.
fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// Waits by the clock that the test pauses, which takes no time.
///
/// # Panics
/// If the clock is not paused.
async fn wait_on_paused_clock(delay: Duration) {
    if !delay.is_zero() {
        // Panics if the clock runs.
        tokio::time::advance(Duration::ZERO).await;
        tokio::time::sleep(delay).await;
    }
}

impl HttpService for ScriptedServer {
    fn send(
        &self,
        _: Lane,
        request: Request<Bytes>,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>> {
        if request.uri().port_u16() == Some(9) {
            // The recordings use port 9 for an unreachable server.
            return Box::pin(async { Err(HttpFailure::connect("connection refused")) });
        }
        let response = self.respond(&request);
        Box::pin(async move {
            if let Some(interrupt) = &self.interrupt
                && !response.delay.is_zero()
            {
                interrupt.press();
            }
            if response.delay > timeout {
                wait_on_paused_clock(timeout).await;
                return Err(HttpFailure::timeout("scripted"));
            }
            wait_on_paused_clock(response.delay).await;
            let mut builder = Response::builder().status(response.status);
            for (name, value) in &response.headers {
                builder = builder.header(name, value);
            }
            Ok(builder.header("content-length", response.body.len()).body(response.body).unwrap())
        })
    }
}
