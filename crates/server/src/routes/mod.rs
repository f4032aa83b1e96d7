//! HTTP: authentication, request bodies, one `match` over all routes, and the handlers of requests
//! that no backend executes.
//!
//! Only this module, `server`, `connections` and `stream` refer to HTTP types. All other modules
//! return [`ServerError`], which [`error`] maps to responses.

mod body;
mod checkpoint;
mod dashboard;
mod error;
mod event_body;
mod file;
mod future;
mod import;
mod inference;
mod run;
mod session;
mod upload;
mod usage;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST, ORIGIN};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body_util::{BodyExt as _, Either, Full};
use hyper::body::Body;
use serde::Serialize;
use sha2::{Digest as _, Sha256};
use tinkex_store::error::ServerError;
use tinkex_store::log;
use tinkex_wire::codec::{json, query};
use tinkex_wire::{
    ClientConfig, DynamicConfig, Health, JSON, JsonObject, RequestId, Route, RouteMatch,
    ServerCapabilities, TelemetryBatch, TelemetryResponse, header,
};

use self::body::{ReceivedBody, admit_large};
use self::error::HttpError;
use crate::admit;
use crate::metrics::GaugeValues;
use crate::state::ServerState;

/// Body of a response: bytes in memory, a file that is streamed, or events.
pub(crate) type ResponseBody = Either<Full<Bytes>, Either<file::FileBody, event_body::EventBody>>;
/// Body of a request, from a connection or in memory.
pub(crate) trait IncomingBody:
    Body<Data = Bytes, Error: std::fmt::Display + Send> + Unpin + Send
{
}

impl<B: Body<Data = Bytes, Error: std::fmt::Display + Send> + Unpin + Send> IncomingBody for B {}

type RouteResult = Result<Response<ResponseBody>, HttpError>;

pub(crate) use self::dashboard::Dashboard;
pub use self::dashboard::FolderDashboard;

/// Path prefix of file downloads.
const FILES: &str = "/files/";

/// Maximum number of bytes that are read and dropped after a request was rejected.
const MAX_DRAIN: usize = 16 << 20;
/// Time without new data after which draining a rejected request stops.
const DRAIN_IDLE_TIMEOUT: Duration = Duration::from_millis(200);

/// Handles a request.
pub(crate) async fn handle(
    state: &Arc<ServerState>,
    request: Request<impl IncomingBody>,
) -> Response<ResponseBody> {
    state.metrics.http_requests.add(1);
    let (parts, mut body) = request.into_parts();
    let endpoint = inference::Endpoint::find(parts.uri.path());
    let handled = match &endpoint {
        Some(endpoint) => inference::dispatch(state, &parts, &mut body, endpoint).await,
        None if dashboard::is_path(parts.uri.path()) => {
            dashboard::handle(state, &parts, &mut body).await
        }
        None => dispatch(state, &parts, &mut body).await,
    };
    let mut response = match handled {
        Ok(response) => response,
        Err(error) => {
            state.metrics.rejected.add(1);
            // Omit a download path from the log: it contains a token that grants access.
            let path = parts.uri.path();
            let path = if path.starts_with(FILES) { FILES } else { path };
            tracing::debug!(
                target: log::REQUEST,
                method = %parts.method,
                path,
                status = error.status.as_u16(),
                detail = error.detail,
                "request rejected"
            );
            // Read the rest of the body: a client that is still sending would see a reset
            // connection instead of the response.
            let limit = state.options.timeouts.client_io;
            let _ = tokio::time::timeout(limit, drain(&mut body)).await;
            match &endpoint {
                Some(endpoint) => endpoint.error_response(error),
                None => error.into_response(),
            }
        }
    };
    if endpoint.is_none() && dashboard::is_path(parts.uri.path()) {
        dashboard::add_security_headers(response.headers_mut());
    }
    if let Some(endpoint) = &endpoint {
        inference::add_request_id(endpoint, &mut response);
        inference::add_cors(state, &parts.headers, &mut response);
    }
    response
}

/// Reads and drops the rest of a body, up to [`MAX_DRAIN`] bytes.
async fn drain(body: &mut impl IncomingBody) {
    let mut remaining = MAX_DRAIN;
    while let Ok(Some(Ok(frame))) = tokio::time::timeout(DRAIN_IDLE_TIMEOUT, body.frame()).await {
        let read = frame.data_ref().map_or(0, Bytes::len);
        let Some(rest) = remaining.checked_sub(read) else { return };
        remaining = rest;
    }
}

/// Authorizes a request, finds its route, reads its body and calls the handler.
async fn dispatch(
    state: &Arc<ServerState>,
    parts: &Parts,
    body: &mut impl IncomingBody,
) -> RouteResult {
    let path = parts.uri.path();
    check_worker(state)?;
    if path.starts_with(FILES) && parts.method == http::Method::GET {
        return file::download(state, &path[FILES.len()..], &parts.headers).await;
    }
    let found = Route::find(parts.method.as_str(), path);
    if found.as_ref().is_none_or(|found| found.route != Route::Health) {
        authorize(state, &parts.headers, false)?;
    }
    if path == "/metrics" && parts.method == http::Method::GET {
        return Ok(respond("text/plain; version=0.0.4", metrics(state).into()));
    }
    let Some(found) = found else { return Err(no_route(parts.method.as_str(), path)) };
    // Do not read the body of an import into memory: the adapter is written to disk while it
    // arrives.
    let received = if found.route == Route::ImportAdapter {
        ReceivedBody::default()
    } else {
        let limit = body::size_limit(state, found.route);
        ReceivedBody::read(state, parts, body, limit, found.route.body()).await?
    };
    call_handler(state, &found, parts, received, body).await
}

/// Address of the client of a connection. Each request has it as an extension.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PeerAddress(pub(crate) SocketAddr);

/// Returns whether a request came over a loopback address, and hence from this machine.
fn is_from_this_machine(parts: &Parts) -> bool {
    let peer = parts.extensions.get::<PeerAddress>();
    // Use the canonical address: a socket for IPv6 and IPv4 has addresses such as ::ffff:127.0.0.1.
    peer.is_some_and(|peer| peer.0.ip().to_canonical().is_loopback())
}

/// Calls the handler of a route. The match is exhaustive: a route added to the table does not
/// compile until it has a handler.
async fn call_handler(
    state: &Arc<ServerState>,
    found: &RouteMatch,
    parts: &Parts,
    received: ReceivedBody,
    unread: &mut impl IncomingBody,
) -> RouteResult {
    let headers = &parts.headers;
    let query = parts.uri.query().unwrap_or_default();
    let body = received.bytes.clone();
    let param = |n: usize| found.params.get(n).map_or("", String::as_str);
    let unsupported = |message: &str| Err(ServerError::invalid(message).into());
    match found.route {
        Route::ClientConfig => {
            let _: JsonObject = json::decode(&body)?;
            to_json(&client_config(state))
        }
        Route::DynamicConfig => {
            let _: JsonObject = json::decode(&body)?;
            to_json(
                &DynamicConfig::default().sample_cancel_enabled(state.options.efficient_protocol),
            )
        }
        Route::Health => health(state),
        Route::ServerCapabilities => {
            let is_up = |name: &str| {
                let upstream = state.backends.upstream(name);
                upstream.is_some_and(|upstream| upstream.status().down.is_none())
            };
            to_json(&ServerCapabilities::new(state.models.supported(is_up)))
        }
        Route::Telemetry => {
            let _: TelemetryBatch = json::decode(&body)?;
            to_json(&TelemetryResponse::ACCEPTED)
        }

        Route::CreateSession => session::create(state, &body).await,
        Route::SessionHeartbeat => session::heartbeat(state, &body),
        Route::FinishSession => session::finish(state, param(0), &body).await,
        Route::ListSessions => session::list(state, query),
        Route::GetSession => session::get(state, param(0)),
        Route::SearchSessions => session::search(state, &body),
        Route::AssignSessionProject => session::assign_project(state, param(0), &body).await,

        Route::CreateModel => acknowledge(state, admit::create_model(&state.admission, body)).await,
        Route::ForwardBackward => {
            acknowledge(state, admit_large(state, received, admit::forward_backward).await).await
        }
        Route::OptimStep => acknowledge(state, admit::optim_step(&state.admission, body)).await,
        Route::DiscardGradient => {
            acknowledge(state, admit::discard_gradient(&state.admission, body)).await
        }
        Route::SaveWeights => acknowledge(state, admit::save_weights(&state.admission, body)).await,
        Route::SaveWeightsForSampler => {
            acknowledge(state, admit::save_weights_for_sampler(&state.admission, body)).await
        }
        Route::SaveWeightsExternal => {
            acknowledge(state, admit::save_weights_external(&state.admission, body)).await
        }
        Route::LoadWeights => acknowledge(state, admit::load_weights(&state.admission, body)).await,
        Route::CreateCustomLoss => {
            acknowledge(state, admit::create_custom_loss(&state.admission, body)).await
        }
        Route::Sample => {
            acknowledge(state, admit_large(state, received, admit::sample).await).await
        }
        Route::GetInfo => run::info(state, &body),

        Route::CreateSamplingSession => run::create_sampler(state, &body).await,
        Route::JoinSamplingSession => run::join_sampler(state, &body).await,
        Route::CloseSampler => run::close_sampler(state, param(0)).await,
        Route::GetSampler => run::sampler(state, param(0), is_from_this_machine(parts)),

        Route::RetrieveFuture => future::retrieve(state, &body).await,
        Route::RetrieveFutures => future::retrieve_many(state, &body).await,
        Route::CancelFuture => future::cancel(state, &body),

        Route::ListTrainingRuns => run::list(state, query),
        Route::GetTrainingRun => run::get(state, param(0)),
        Route::DeleteTrainingRun => run::delete(state, param(0)).await,
        Route::ListCheckpoints => checkpoint::list_of_run(state, param(0)),
        Route::ListUserCheckpoints => checkpoint::list(state, query),
        Route::WeightsInfo => checkpoint::info(state, &body),
        Route::CopyWeights => {
            let key = headers.get(header::IDEMPOTENCY_KEY).and_then(|key| key.to_str().ok());
            checkpoint::copy(state, &body, key).await
        }
        Route::DeleteCheckpoint => checkpoint::delete(state, param(0), param(1), param(2)).await,
        Route::PublishCheckpoint => {
            checkpoint::set_public(state, param(0), param(1), param(2), true).await
        }
        Route::UnpublishCheckpoint => {
            checkpoint::set_public(state, param(0), param(1), param(2), false).await
        }
        Route::SetCheckpointTtl => {
            checkpoint::set_ttl(state, param(0), param(1), param(2), &body).await
        }
        Route::ExternalWeightsUrls => {
            let host = headers.get(HOST).and_then(|host| host.to_str().ok());
            checkpoint::download_urls(state, param(0), param(1), param(2), host).await
        }

        Route::ImportAdapter => import::import(state, parts, unread, param(0)).await,
        // `handle` passes the path of this route to the inference endpoints before it looks up
        // routes.
        Route::Completions => Err(no_route(parts.method.as_str(), parts.uri.path())),

        Route::BillingUsage => usage::events(state, query),
        Route::StorageUsage => usage::storage(state),
        Route::GetApiKey => usage::key(),
        Route::AuthToken => unsupported(
            "this server accepts API keys directly; client/config has pjwt_auth_enabled = false",
        ),
        Route::UnloadModel => unsupported(
            "models leave memory when they are not used, and end with their session; finish the \
             session instead",
        ),
        Route::DeleteApiKey => unsupported(
            "the API key of this server is set when it is started and cannot be deleted",
        ),
        Route::AuditLog => unsupported("this server has one user and keeps no audit log"),
        Route::TraceExport => {
            unsupported("this server records no traces; its log has an event for every request")
        }
    }
}

/// Returns the client configuration, which enables or disables the efficient protocol features.
fn client_config(state: &ServerState) -> ClientConfig {
    let efficient = state.options.efficient_protocol;
    let defaults = ClientConfig::default();
    let chunk_bytes = u64::try_from(state.options.limits.body_bytes / 2)
        .unwrap_or(u64::MAX)
        .min(defaults.fwdbwd_max_chunk_bytes_count);
    defaults
        .proto_compress_fwdbwd(efficient)
        .create_model_via_load_weights(efficient)
        .sample_use_retrieve_futures(efficient)
        .custom_loss_server_side(efficient)
        .sample_join_sampling_session(efficient)
        .fwdbwd_max_chunk_bytes_count(chunk_bytes)
}

/// Responds that the server runs, and with the status of each upstream. The server itself is
/// healthy even if no upstream responds.
fn health(state: &ServerState) -> RouteResult {
    let upstreams: serde_json::Map<String, serde_json::Value> = state
        .backends
        .upstreams()
        .map(|upstream| {
            let status = if upstream.status().down.is_none() { "up" } else { "down" };
            (upstream.name.to_string(), status.into())
        })
        .collect();
    if upstreams.is_empty() {
        return to_json(&Health::OK);
    }
    to_json(&serde_json::json!({"status": "ok", "upstreams": upstreams}))
}

/// Waits until an admitted request is durable, and responds with its id.
async fn acknowledge(state: &ServerState, admitted: Result<RequestId, ServerError>) -> RouteResult {
    to_json(&admit::acknowledge(&state.admission, admitted?).await?)
}

/// Checks that neither the worker thread nor the writer thread has panicked.
fn check_worker(state: &ServerState) -> Result<(), HttpError> {
    if *state.broken.borrow() { Err(ServerError::worker_panicked().into()) } else { Ok(()) }
}

/// Checks the API key in `x-api-key` or `authorization: Bearer`, or the origin of the request if
/// the server has no key. `from_allowed_page` is true if the request comes from a web page of an
/// allowed origin.
fn authorize(
    state: &ServerState,
    headers: &HeaderMap,
    from_allowed_page: bool,
) -> Result<(), HttpError> {
    let Some(key) = &state.options.api_key else {
        // A web page can send requests to a local port, also through a domain name that its owner
        // makes resolve to this machine (DNS rebinding).
        let from_page = headers.contains_key(ORIGIN) && !from_allowed_page;
        if from_page || !is_local_host(headers) {
            return Err(ServerError::forbidden(
                "this server has no API key and rejects requests from web pages and for host names \
                 other than localhost; start it with an API key, or with --allow-origin for \
                 inference requests from a web page",
            )
            .into());
        }
        return Ok(());
    };
    let sent = sent_key(headers).unwrap_or_default();
    // Compare digests without an early exit, so that the response time reveals nothing about the
    // key.
    let sent = Sha256::digest(sent);
    let expected = Sha256::digest(key.expose());
    let differences = sent.iter().zip(&expected).fold(0, |all, (a, b)| all | (a ^ b));
    if differences == 0 { Ok(()) } else { Err(HttpError::unauthorized()) }
}

/// Returns the API key of a request.
fn sent_key(headers: &HeaderMap) -> Option<&[u8]> {
    if let Some(key) = headers.get(header::API_KEY) {
        return Some(key.as_bytes());
    }
    let (scheme, key) = headers.get(AUTHORIZATION)?.as_bytes().split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
}

/// Returns whether the `host` header is absent, an IP address or `localhost`.
fn is_local_host(headers: &HeaderMap) -> bool {
    let Some(host) = headers.get(HOST) else { return true };
    let Ok(authority) = http::uri::Authority::try_from(host.as_bytes()) else { return false };
    let name = authority.host().trim_matches(['[', ']']);
    name.eq_ignore_ascii_case("localhost") || name.parse::<std::net::IpAddr>().is_ok()
}

/// Returns the error for a path without a route, or for a route with another method.
fn no_route(method: &str, path: &str) -> HttpError {
    let others: Vec<&str> = ["GET", "POST", "PUT", "DELETE"]
        .into_iter()
        .filter(|other| Route::find(other, path).is_some())
        .collect();
    let truncated: String = path.chars().take(200).collect();
    if !others.is_empty() {
        let detail = format!("{truncated} accepts {}, not {method}", others.join(" and "));
        return HttpError::method_not_allowed(detail);
    }
    let hint = if truncated.starts_with("/api/v1/") {
        "this server implements the protocol of SDK 0.36"
    } else {
        "the API is under /api/v1; the base URL of a client is http://HOST:PORT"
    };
    ServerError::not_found(format!("{method} {truncated} does not exist; {hint}")).into()
}

fn metrics(state: &ServerState) -> String {
    let gauges = GaugeValues::read(&state.backends, &state.store());
    let mut text = state.metrics.to_text(&gauges, &state.options.limits);
    let upstreams: Vec<_> = state.backends.upstreams().collect();
    if !upstreams.is_empty() {
        text.push_str(
            "# HELP tinkex_upstream_up whether an upstream responds\n\
             # TYPE tinkex_upstream_up gauge\n",
        );
        for upstream in upstreams {
            let name = &upstream.name;
            let up = u8::from(upstream.status().down.is_none());
            text.push_str(&format!("tinkex_upstream_up{{upstream=\"{name}\"}} {up}\n"));
        }
    }
    text
}

fn to_json(value: &impl Serialize) -> RouteResult {
    Ok(respond(JSON, json::encode(value)?))
}

/// Returns an empty JSON object.
fn empty() -> RouteResult {
    Ok(respond(JSON, Bytes::from_static(b"{}")))
}

fn respond(content_type: &'static str, body: Bytes) -> Response<ResponseBody> {
    let mut response = Response::new(Either::Left(Full::new(body)));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

/// Decodes a query string.
fn from_query<T: serde::de::DeserializeOwned>(text: &str) -> Result<T, ServerError> {
    Ok(query::decode(text)?)
}
