//! The dashboard over HTTP: the page at `/`, its files and documents under `/ui/`.
//!
//! The paths are not part of the API: they can change in any version, together with the page.

mod folder_server;
mod session;

use std::sync::Arc;

use bytes::Bytes;
use http::header::{
    ACCEPT_ENCODING, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_SECURITY_POLICY, CONTENT_TYPE,
    HeaderName, LOCATION, REFERRER_POLICY, SET_COOKIE, VARY, X_CONTENT_TYPE_OPTIONS,
    X_FRAME_OPTIONS,
};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode};
use http_body_util::{BodyExt as _, Either, Full};
use serde_json::{Value, json};
use tinkex_dashboard::{
    Asset, CODE_LIFETIME, DashboardAccess, Documents, FiguresDocument, LimitsDocument, LiveSource,
    QueryParams, ServerView, UpstreamDocument,
};
use tinkex_store::error::ServerError;
use tinkex_store::executor::Executor;
use tinkex_text::Tokenizer;
use tinkex_wire::JSON;
use tokio::sync::watch;

pub use self::folder_server::FolderDashboard;
pub(super) use self::session::permits_inference;
use self::session::{authorize, check_origin, cookie, expired_cookie};
use super::error::HttpError;
use super::event_body::EventBody;
use super::{IncomingBody, ResponseBody, RouteResult, respond, to_json};
use crate::metrics::GaugeValues;
use crate::state::ServerState;

/// Path of the page.
const PAGE: &str = "/";
/// Prefix of the paths of the page's files and documents.
const PREFIX: &str = "/ui/";
/// Maximum size of a request body in bytes.
const MAX_BODY: usize = 16 << 10;

/// Content security policy: the page loads everything from this server, evaluates no text as code,
/// and must not be embedded in another page.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; \
                      connect-src 'self'; base-uri 'none'; form-action 'none'; \
                      frame-ancestors 'none'";

/// The dashboard of a server or of run folders.
pub(crate) struct Dashboard {
    pub(crate) access: DashboardAccess,
    /// Becomes true when all event streams must end.
    closed: watch::Sender<bool>,
}

impl Dashboard {
    pub(crate) fn new(api_key: Option<String>) -> Self {
        Self { access: DashboardAccess::new(api_key), closed: watch::Sender::new(false) }
    }

    /// Ends all event streams. Open streams would delay the shutdown of the server.
    pub(crate) fn close(&self) {
        self.closed.send_replace(true);
    }
}

/// A request to a dashboard.
struct DashboardRequest<'a> {
    dashboard: &'a Dashboard,
    documents: Documents,
    executor: &'a Executor,
    /// Current time in seconds since the Unix epoch.
    now: u64,
    /// The server; `None` for a dashboard of run folders.
    state: Option<&'a Arc<ServerState>>,
    parts: &'a Parts,
}

/// Returns whether a path belongs to the dashboard.
pub(super) fn is_path(path: &str) -> bool {
    path == PAGE || path == "/favicon.ico" || path.starts_with(PREFIX)
}

/// Returns the current time of a server in seconds since the Unix epoch.
fn now(state: &ServerState) -> u64 {
    u64::try_from(state.clock.now() / 1_000_000).unwrap_or(0)
}

/// Returns the documents of a server.
fn documents(state: &Arc<ServerState>) -> Documents {
    let history = Arc::clone(&state.history_reader);
    Documents::of_server(LiveSource::new(state.store.clone(), history, Arc::clone(state) as _))
}

impl ServerView for ServerState {
    fn base_models(&self) -> Vec<String> {
        self.models.names()
    }

    fn tokenizer(&self, base_model: &str) -> Option<Tokenizer> {
        self.models.get(base_model).and_then(|base| base.tokenizer())
    }

    fn figures(&self) -> FiguresDocument {
        let gauges = GaugeValues::read(&self.backends, &self.store());
        let limits = &self.options.limits;
        let upstreams = self.backends.upstreams().map(|upstream| UpstreamDocument {
            name: upstream.name.to_string(),
            up: upstream.status().down.is_none(),
        });
        FiguresDocument {
            counters: self.metrics.counter_documents(&gauges),
            gauges: self.metrics.gauge_documents(&gauges),
            limits: LimitsDocument {
                memory: limits.memory_limits().into_iter().collect(),
                queued: limits.queued_requests,
            },
            upstreams: upstreams.collect(),
            process_bytes: crate::memory::process_memory(),
            disk_free_bytes: self.options.disk.available(&self.options.data_dir),
            time: self.clock.now().div_euclid(1_000),
        }
    }
}

/// Handles a request to the dashboard of a server.
pub(super) async fn handle(
    state: &Arc<ServerState>,
    parts: &Parts,
    body: &mut impl IncomingBody,
) -> RouteResult {
    let request = DashboardRequest {
        dashboard: &state.dashboard,
        documents: documents(state),
        executor: &state.executor,
        now: now(state),
        state: Some(state),
        parts,
    };
    request.handle(body).await
}

impl DashboardRequest<'_> {
    async fn handle(&self, body: &mut impl IncomingBody) -> RouteResult {
        let path = self.parts.uri.path();
        let method = &self.parts.method;
        let headers = &self.parts.headers;
        let response = match path.strip_prefix("/ui/api/") {
            Some(name) => self.api(method, name, body).await?,
            None if method != Method::GET => {
                return Err(HttpError::method_not_allowed(format!("{path} accepts GET")));
            }
            None if path == PAGE => self.page()?,
            None => {
                let name = path.strip_prefix(PREFIX).unwrap_or("icon.svg");
                let missing = || ServerError::not_found(format!("{PREFIX}{name} does not exist"));
                file(Asset::find(name).ok_or_else(missing)?, headers)
            }
        };
        Ok(response)
    }

    /// Sends the page. If the URL contains a code, exchanges the code for a session and redirects
    /// to the page without the code.
    fn page(&self) -> RouteResult {
        let query = QueryParams::parse(self.parts.uri.query().unwrap_or_default());
        let Some(code) = query.text("code") else {
            return Ok(file(Asset::page(), &self.parts.headers));
        };
        let mut response = respond("text/plain", Bytes::new());
        *response.status_mut() = StatusCode::SEE_OTHER;
        response.headers_mut().insert(LOCATION, HeaderValue::from_static(PAGE));
        let access = &self.dashboard.access;
        if access.redeem_code(code) && access.needs_login() {
            let session = access.create_session(self.now);
            response.headers_mut().insert(SET_COOKIE, cookie(&self.parts.headers, &session)?);
        }
        Ok(response)
    }

    async fn api(&self, method: &Method, name: &str, body: &mut impl IncomingBody) -> RouteResult {
        let headers = &self.parts.headers;
        check_origin(headers, method)?;
        let access = &self.dashboard.access;
        if name == "login" && method == Method::POST {
            let body = read_json(body).await?;
            let key = body["key"].as_str().unwrap_or_default();
            if access.needs_login() && !access.accepts_key(key.trim().as_bytes()) {
                return Err(HttpError::wrong_key());
            }
            return self.with_cookie(cookie(headers, &access.create_session(self.now))?);
        }
        if name == "logout" && method == Method::POST {
            return self.with_cookie(expired_cookie(headers)?);
        }
        authorize(access, headers, self.now)?;
        match (method.as_str(), name, self.state) {
            ("POST", "code", _) => {
                let code = access.create_code();
                to_json(&json!({ "code": code, "lifetime_seconds": CODE_LIFETIME.as_secs() }))
            }
            ("POST", "download", Some(state)) => {
                let body = read_json(body).await?;
                download(state, body["path"].as_str().unwrap_or_default()).await
            }
            ("GET", "events", _) => self.events(),
            ("GET", _, _) => self.document(name).await,
            _ => {
                let detail = format!("{PREFIX}api/{name} does not accept {method}");
                Err(HttpError::method_not_allowed(detail))
            }
        }
    }

    fn with_cookie(&self, cookie: HeaderValue) -> RouteResult {
        let mut response = to_json(&json!({}))?;
        response.headers_mut().insert(SET_COOKIE, cookie);
        Ok(response)
    }

    /// Sends a document, which is read on the blocking pool.
    async fn document(&self, name: &str) -> RouteResult {
        let query = QueryParams::parse(self.parts.uri.query().unwrap_or_default());
        let documents = self.documents.clone();
        let name = name.to_owned();
        let read = move || -> Result<Bytes, ServerError> {
            let missing = || ServerError::not_found(format!("{PREFIX}api/{name} does not exist"));
            documents.read(&name, &query)?.ok_or_else(missing)
        };
        Ok(respond(JSON, self.executor.run_job(read).await??))
    }

    /// Streams the changes since the `Last-Event-ID` of the request, and then every new change.
    fn events(&self) -> RouteResult {
        let query = QueryParams::parse(self.parts.uri.query().unwrap_or_default());
        let header = self.parts.headers.get("last-event-id").and_then(|id| id.to_str().ok());
        let last_event = header.or(query.text("last"));
        let closed = self.dashboard.closed.subscribe();
        let mut events = self.documents.changes(self.executor, last_event, closed);
        let body = EventBody::new(move |context| events.poll_events(context));
        let mut response = Response::new(Either::Right(Either::Right(body)));
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
        let buffering = HeaderName::from_static("x-accel-buffering");
        headers.insert(buffering, HeaderValue::from_static("no"));
        Ok(response)
    }
}

/// Returns relative URLs of the files of a checkpoint.
async fn download(state: &Arc<ServerState>, path: &str) -> RouteResult {
    let path: tinkex_wire::TinkerPath = path.parse().map_err(ServerError::from)?;
    let run = path.run().as_str();
    let kind = path.kind().segment();
    // A relative URL has the host and the scheme of the page, also behind a reverse proxy.
    super::checkpoint::download_urls(state, run, kind, path.name(), None).await
}

/// Reads a JSON object.
async fn read_json(body: &mut impl IncomingBody) -> Result<Value, HttpError> {
    let mut content = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| ServerError::Malformed(error.to_string()))?;
        content.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data));
        if content.len() > MAX_BODY {
            let message = format!("the body is larger than {MAX_BODY} bytes");
            return Err(ServerError::TooLarge(message).into());
        }
    }
    let read = serde_json::from_slice(&content);
    Ok(read.map_err(|error| ServerError::Malformed(format!("invalid JSON: {error}")))?)
}

/// Sends a file of the page.
fn file(asset: Asset, headers: &HeaderMap) -> Response<ResponseBody> {
    let accepted = headers.get(ACCEPT_ENCODING).and_then(|value| value.to_str().ok());
    let gzip = accepted.is_some_and(|accepted| {
        accepted.split(',').any(|coding| coding.trim().split(';').next() == Some("gzip"))
    });
    let content = if gzip { asset.gzip } else { asset.plain };
    let mut response = Response::new(Either::Left(Full::new(Bytes::from_static(content))));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(asset.content_type));
    headers.insert(VARY, HeaderValue::from_static("accept-encoding"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    if gzip {
        headers.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    response
}

/// Adds the headers that every response of the dashboard has, errors included.
pub(super) fn add_security_headers(headers: &mut HeaderMap) {
    for (name, value) in [
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (X_FRAME_OPTIONS, "DENY"),
        (REFERRER_POLICY, "no-referrer"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    headers.entry(CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
}
