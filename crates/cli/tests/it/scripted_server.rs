//! The server of a capture: answers as it was told, and remembers what it was asked.

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

/// Answers as it was told.
#[derive(Clone)]
pub(crate) struct ScriptedServer {
    replies: Arc<Value>,
    raw: Arc<RawRoutes>,
    state: Arc<Mutex<ScriptState>>,
    /// Pressed when somebody asks for what takes long.
    interrupt: Option<Interrupt>,
}

/// The same with bodies as they are written: in their order.
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
    seen: Vec<Value>,
    /// How often each route was asked.
    asked: Vec<usize>,
}

/// What it answers.
pub(crate) struct ScriptedResponse {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Bytes,
    /// How long it takes.
    pub(crate) after: Duration,
}

impl ScriptedServer {
    /// `replies` is the text of a capture's file.
    pub(crate) fn new(replies: &str, interrupt: Option<Interrupt>) -> Self {
        let raw: RawRoutes = serde_json::from_str(replies).unwrap();
        let replies: Value = serde_json::from_str(replies).unwrap();
        let count = replies["replies"].as_array().unwrap().len();
        let state = ScriptState { seen: Vec::new(), asked: vec![0; count] };
        Self {
            replies: Arc::new(replies),
            raw: Arc::new(raw),
            state: Arc::new(Mutex::new(state)),
            interrupt,
        }
    }

    /// What it was asked, in order: method, path, query, body and some headers.
    pub(crate) fn seen(&self) -> Vec<Value> {
        self.state.lock().unwrap().seen.clone()
    }

    /// The path of the base URL, which the routes do not have.
    pub(crate) fn prefix(&self) -> &str {
        let base = self.replies["base_url"].as_str().unwrap();
        let host = base.find("://").unwrap() + 3;
        base[host..].find('/').map_or("", |at| &base[host + at..])
    }

    pub(crate) fn answer(&self, request: &Request<Bytes>) -> ScriptedResponse {
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
        state.seen.push(json!({
            "method": request.method().as_str(), "path": path, "query": query, "body": body,
            "headers": headers, "host": request.uri().host(),
        }));
        let routes = self.replies["replies"].as_array().unwrap();
        let at = routes.iter().position(|route| {
            let all = |wanted: &Value, has: &dyn Fn(&str) -> String| {
                let pairs = wanted.as_object().into_iter().flatten();
                pairs.into_iter().all(|(name, value)| has(name) == text(value))
            };
            route["path"] == path
                && route["method"] == request.method().as_str()
                && all(&route["query"], &|name| query.get(name).map(text).unwrap_or_default())
                && all(&route["match"], &|name| text(&body[name]))
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
                after: Duration::ZERO,
            };
        };
        let route = &routes[at];
        let raw = &self.raw.replies[at];
        let (reply, raw) = match (route["replies"].as_array(), &raw.replies) {
            (Some(replies), Some(raw)) => {
                let turn = state.asked[at].min(replies.len() - 1);
                (&replies[turn], &raw[turn])
            }
            _ => (route, raw),
        };
        state.asked[at] += 1;
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
        let after = Duration::from_secs_f64(route["sleep"].as_f64().unwrap_or_default());
        let status = u16::try_from(reply["status"].as_u64().unwrap()).unwrap();
        ScriptedResponse { status, headers, body: body.into(), after }
    }
}

fn json_type() -> Vec<(String, String)> {
    vec![("content-type".to_owned(), "application/json".to_owned())]
}

/// A value of a query or a header, which may be written as a number.
fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// Waits as its answers say, by tokio's clock, which tests pause.
impl HttpService for ScriptedServer {
    fn send(
        &self,
        _: Lane,
        request: Request<Bytes>,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Response<Bytes>, HttpFailure>> {
        if request.uri().port_u16() == Some(9) {
            // Nobody listens there.
            return Box::pin(async { Err(HttpFailure::connect("connection refused")) });
        }
        let answer = self.answer(&request);
        Box::pin(async move {
            if let (Some(interrupt), false) = (&self.interrupt, answer.after.is_zero()) {
                interrupt.press();
            }
            if answer.after > timeout {
                tokio::time::sleep(timeout).await;
                return Err(HttpFailure::timeout("scripted"));
            }
            tokio::time::sleep(answer.after).await;
            let mut reply = Response::builder().status(answer.status);
            for (name, value) in &answer.headers {
                reply = reply.header(name, value);
            }
            Ok(reply.header("content-length", answer.body.len()).body(answer.body).unwrap())
        })
    }
}
