//! The dashboard over HTTP: the page at `/`, its files and documents under `/ui/`.
//!
//! The paths are not part of the API: they can change in any version, together with the page.

mod folder_server;
mod login_limit;
mod session;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{
    ACCEPT_ENCODING, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_SECURITY_POLICY, CONTENT_TYPE,
    HeaderName, LOCATION, REFERRER_POLICY, SET_COOKIE, VARY, X_CONTENT_TYPE_OPTIONS,
    X_FRAME_OPTIONS,
};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode};
use http_body_util::{Either, Full};
use serde_json::{Value, json};
use tinkex_dashboard::{
    Asset, CODE_LIFETIME, DashboardAccess, DashboardLogin, Documents, FiguresDocument, KeyDigest,
    LimitsDocument, LiveSource, QueryParams, ServerView, UpstreamDocument,
};
use tinkex_store::error::ServerError;
use tinkex_store::executor::Executor;
use tinkex_store::log;
use tinkex_text::Tokenizer;
use tinkex_wire::JSON;

pub use self::folder_server::FolderDashboard;
use self::login_limit::LoginLimit;
pub(super) use self::session::session_key;
use self::session::{authorize, check_origin, cookie, expired_cookie, session_tokens};
use super::body_reader::BodyReader;
use super::client::{RequestClient, server_url};
use super::error::HttpError;
use super::event_body::EventBody;
use super::{
    Caller, IncomingBody, ResponseBody, RouteResult, mark_authenticated, respond, to_json,
    while_valid,
};
use crate::keyring::AcceptedKey;
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
    pub(crate) access: Arc<DashboardAccess>,
    login_limit: LoginLimit,
}

impl Dashboard {
    pub(crate) fn new(access: DashboardAccess) -> Self {
        Self { access: Arc::new(access), login_limit: LoginLimit::default() }
    }

    /// Ends all event streams. Open streams would delay the shutdown of the server.
    pub(crate) fn close(&self) {
        self.access.close();
    }
}

/// A request to a dashboard.
struct DashboardRequest<'a> {
    dashboard: &'a Dashboard,
    /// Documents of run folders; `None` for the dashboard of a server.
    folders: Option<Documents>,
    executor: &'a Executor,
    /// Current time in seconds since the Unix epoch.
    now: u64,
    /// Timeout of request bodies.
    body_timeout: Duration,
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

/// Returns the documents of a server, as the caller may see them.
fn documents(Caller { state, principal }: Caller<'_>) -> Documents {
    let history = Arc::clone(&state.history_reader);
    let view = Arc::clone(state) as _;
    Documents::of_server(LiveSource::new(state.store.clone(), history, view, principal.clone()))
}

/// Returns the key with which a reader has authenticated, if it is valid.
fn key_of(state: &ServerState, login: &DashboardLogin) -> Option<Arc<AcceptedKey>> {
    match login {
        DashboardLogin::Open => Some(state.keyring.administrator()),
        DashboardLogin::Key(key) | DashboardLogin::Session { key, .. } => {
            state.keyring.find_digest(key.as_bytes())
        }
    }
}

impl ServerView for ServerState {
    fn base_models(&self) -> Vec<String> {
        self.models.names()
    }

    fn tokenizer(&self, base_model: &str) -> Option<Tokenizer> {
        self.models.get(base_model).and_then(|base| base.tokenizer())
    }

    fn figures(&self) -> FiguresDocument {
        let gauges = GaugeValues::read(&self.backends, &self.store(), self.drain.is_active());
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
        folders: None,
        executor: &state.executor,
        now: now(state),
        body_timeout: state.options.timeouts.client_io,
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
            None if path == PAGE => self.page().await?,
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
    async fn page(&self) -> RouteResult {
        let query = QueryParams::parse(self.parts.uri.query().unwrap_or_default());
        let Some(code) = query.text("code") else {
            return Ok(file(Asset::page(), &self.parts.headers));
        };
        let mut response = respond("text/plain", Bytes::new());
        *response.status_mut() = StatusCode::SEE_OTHER;
        response.headers_mut().insert(LOCATION, HeaderValue::from_static(PAGE));
        if let Some(key) = self.dashboard.access.redeem_code(code) {
            response.headers_mut().insert(SET_COOKIE, self.new_session(key).await?);
        }
        Ok(response)
    }

    /// Starts a session of a key, and returns its cookie.
    async fn new_session(&self, key: KeyDigest) -> Result<HeaderValue, HttpError> {
        let access = Arc::clone(&self.dashboard.access);
        let now = self.now;
        let session = self.executor.run_job(move || access.create_session(key, now)).await?;
        cookie(self.parts, &session)
    }

    /// Logs in with the API key in the body.
    async fn log_in(&self, body: &mut impl IncomingBody) -> RouteResult {
        let access = &self.dashboard.access;
        if !access.needs_login() {
            return to_json(&json!({}));
        }
        let client = RequestClient::of(self.parts).address;
        let limit = &self.dashboard.login_limit;
        // Check the limit before the body is read, and before the key is compared.
        let attempt = limit.begin(client).map_err(HttpError::too_many_logins)?;
        let body = self.read_json(body).await?;
        let key = body["key"].as_str().unwrap_or_default();
        let Some(key) = access.accept_key(key.trim().as_bytes()) else {
            let client = client.map(tracing::field::display);
            tracing::warn!(target: log::REQUEST, client, "wrong key in a login to the dashboard");
            return Err(HttpError::wrong_key());
        };
        limit.succeeded(&attempt);
        mark_authenticated(self.parts);
        self.with_cookie(self.new_session(key).await?)
    }

    /// Ends the session of the request on the server, and removes the cookie.
    async fn log_out(&self) -> RouteResult {
        let access = Arc::clone(&self.dashboard.access);
        let tokens: Vec<String> = session_tokens(&self.parts.headers).map(str::to_owned).collect();
        let end = move || tokens.iter().try_for_each(|token| access.end_session(token));
        let ended = self.executor.run_job(end).await?;
        ended.map_err(|error| {
            ServerError::StorageUnavailable(format!(
                "the session has ended, but is valid again if the server restarts: cannot write to \
                 the server's disk: {error}"
            ))
        })?;
        self.with_cookie(expired_cookie(self.parts)?)
    }

    async fn api(&self, method: &Method, name: &str, body: &mut impl IncomingBody) -> RouteResult {
        let headers = &self.parts.headers;
        check_origin(headers, method)?;
        let access = &self.dashboard.access;
        match (method, name) {
            (&Method::POST, "login") => return self.log_in(body).await,
            (&Method::POST, "logout") => return self.log_out().await,
            _ => {}
        }
        let login = authorize(access, headers, self.now)?;
        mark_authenticated(self.parts);
        let Some(state) = self.state else {
            let documents = self.folders.clone().unwrap_or_else(|| Documents::of_folders(vec![]));
            return self.answer(name, body, login, &documents, None).await;
        };
        let key = key_of(state, &login).ok_or_else(HttpError::login_required)?;
        let caller = Caller { state, principal: &key.principal };
        let documents = documents(caller);
        while_valid(&key, self.answer(name, body, login, &documents, Some(caller))).await
    }

    /// Answers an authenticated request. `caller` is `None` for a dashboard of run folders.
    async fn answer(
        &self,
        name: &str,
        body: &mut impl IncomingBody,
        login: DashboardLogin,
        documents: &Documents,
        caller: Option<Caller<'_>>,
    ) -> RouteResult {
        let method = &self.parts.method;
        let access = &self.dashboard.access;
        match (method.as_str(), name, caller) {
            ("POST", "code", _) => {
                // A code starts a session. A session must not create sessions: it could last
                // forever.
                let DashboardLogin::Key(key) = login else {
                    let message = "a code needs the API key in x-api-key or authorization";
                    return Err(ServerError::forbidden(message).into());
                };
                let code = access.create_code(key);
                to_json(&json!({ "code": code, "lifetime_seconds": CODE_LIFETIME.as_secs() }))
            }
            ("POST", "download", Some(caller)) => {
                let body = self.read_json(body).await?;
                self.download(caller, body["path"].as_str().unwrap_or_default()).await
            }
            ("GET", "events", _) => self.events(login, documents),
            ("GET", _, _) => self.document(name, documents).await,
            _ => {
                let detail = format!("{PREFIX}api/{name} does not accept {method}");
                Err(HttpError::method_not_allowed(detail))
            }
        }
    }

    /// Reads a JSON object.
    async fn read_json(&self, body: &mut impl IncomingBody) -> Result<Value, HttpError> {
        let content = BodyReader::new(body, self.body_timeout).read_to_end(MAX_BODY).await?;
        let read = serde_json::from_slice(&content);
        Ok(read.map_err(|error| ServerError::Malformed(format!("invalid JSON: {error}")))?)
    }

    fn with_cookie(&self, cookie: HeaderValue) -> RouteResult {
        let mut response = to_json(&json!({}))?;
        response.headers_mut().insert(SET_COOKIE, cookie);
        Ok(response)
    }

    /// Returns URLs of the files of a checkpoint.
    async fn download(&self, caller: Caller<'_>, path: &str) -> RouteResult {
        let path: tinkex_wire::TinkerPath = path.parse().map_err(ServerError::from)?;
        let run = path.run().as_str();
        let kind = path.kind().segment();
        let base = server_url(self.parts, caller.state.options.public_url.as_ref());
        super::checkpoint::download_urls(caller, run, kind, path.name(), &base).await
    }

    /// Sends a document, which is read on the blocking pool.
    async fn document(&self, name: &str, documents: &Documents) -> RouteResult {
        let query = QueryParams::parse(self.parts.uri.query().unwrap_or_default());
        let documents = documents.clone();
        let name = name.to_owned();
        let read = move || -> Result<Bytes, ServerError> {
            let missing = || ServerError::not_found(format!("{PREFIX}api/{name} does not exist"));
            documents.read(&name, &query)?.ok_or_else(missing)
        };
        Ok(respond(JSON, self.executor.run_job(read).await??))
    }

    /// Streams the changes since the `Last-Event-ID` of the request, and then every new change.
    fn events(&self, login: DashboardLogin, documents: &Documents) -> RouteResult {
        let query = QueryParams::parse(self.parts.uri.query().unwrap_or_default());
        let header = self.parts.headers.get("last-event-id").and_then(|id| id.to_str().ok());
        let last_event = header.or(query.text("last"));
        let permit = self.dashboard.access.stream_permit(login);
        let mut events = documents.changes(self.executor, last_event, permit);
        let body = EventBody::new(move |context| events.poll_events(context));
        let mut response = Response::new(Either::Right(Either::Right(body)));
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
        let buffering = HeaderName::from_static("x-accel-buffering");
        headers.insert(buffering, HeaderValue::from_static("no"));
        Ok(response)
    }
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
