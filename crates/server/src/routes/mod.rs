//! HTTP: authentication, request bodies, one `match` over all routes, and the handlers of requests
//! that no backend executes.
//!
//! Only this module, `server`, `connections` and `stream` refer to HTTP types. All other modules
//! return [`ServerError`], which [`error`] maps to responses.

mod authentication;
mod body;
mod body_reader;
mod checkpoint;
mod client;
mod dashboard;
mod error;
mod event_body;
mod file;
mod future;
mod import;
mod inference;
mod keys;
mod metadata;
mod run;
mod search;
mod session;
mod upload;
mod usage;

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::request::Parts;
use http::{HeaderValue, Request, Response};
use http_body_util::{BodyExt as _, Either, Full};
use hyper::body::Body;
use serde::Serialize;
use tinkex_store::disk::ServerHealth;
use tinkex_store::error::ServerError;
use tinkex_store::log;
use tinkex_store::store::AdmittedRequest;
use tinkex_wire::codec::{json, query};
use tinkex_wire::rest::StartBackup;
use tinkex_wire::{
    ClientConfig, DynamicConfig, Health, JSON, JsonObject, Route, RouteMatch, ServerCapabilities,
    TelemetryBatch, TelemetryResponse, header,
};
use tokio::time::Instant;

use self::authentication::{
    Access, Caller, authenticate, end_with_key, is_local_host, require, sent_key, while_valid,
};
use self::body::{ReceivedBody, admit_large};
use self::client::RequestClient;
use self::error::HttpError;
use crate::admit;
use crate::backup;
use crate::connections::ConnectionId;
use crate::disk_usage;
use crate::drain;
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

pub(crate) use self::authentication::KeyedBody;
pub(crate) use self::client::ConnectionPeer;
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
) -> Response<KeyedBody<ResponseBody>> {
    state.metrics.http_requests.add(1);
    let start = Instant::now();
    let (mut parts, mut body) = request.into_parts();
    RequestClient::identify(&mut parts, &state.options.trusted_proxies);
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
        Err(mut error) => {
            state.metrics.rejected.add(1);
            // Omit a download path from the log: it contains a token that grants access.
            let path = parts.uri.path();
            let path = if path.starts_with(FILES) { FILES } else { path };
            tracing::debug!(
                target: log::REQUEST,
                client = RequestClient::of(&parts).address.map(tracing::field::display),
                method = %parts.method,
                path,
                status = error.status.as_u16(),
                detail = error.detail,
                "request rejected"
            );
            if let Cow::Owned(hidden) = state.hidden_paths.hide(&error.detail) {
                tracing::warn!(
                    target: log::REQUEST, path, error = error.detail, "request rejected"
                );
                error.detail = hidden;
            }
            // Read the rest of the body: a client that is still sending would see a reset
            // connection instead of the response.
            let limit = state.options.timeouts.client_io;
            let _ = tokio::time::timeout(limit, discard_rest(&mut body)).await;
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
    let label = endpoint_label(parts.uri.path(), endpoint.is_some());
    state.metrics.http_seconds.observe(label, start.elapsed());
    end_with_key(response)
}

/// Returns the label of a path in the metrics. Polls have a label of their own, because they wait
/// for results.
fn endpoint_label(path: &str, is_inference: bool) -> &'static str {
    match path {
        _ if is_inference => "inference",
        _ if dashboard::is_path(path) => "dashboard",
        _ if path.starts_with(FILES) => "files",
        "/api/v1/retrieve_future" | "/api/v1/retrieve_futures" => "poll",
        _ => "api",
    }
}

/// Reads and drops the rest of a body, up to [`MAX_DRAIN`] bytes.
async fn discard_rest(body: &mut impl IncomingBody) {
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
        return file::download(state, &path[FILES.len()..], parts).await;
    }
    let found = Route::find(parts.method.as_str(), path);
    if let Some(RouteMatch { route: route @ Route::Health, .. }) = found {
        // Read the body: a client that is still sending would see a reset connection instead of the
        // response.
        let limit = body::size_limit(state, route);
        ReceivedBody::read(state, parts, body, limit, route.body()).await?;
        return health(state);
    }
    let key = authenticate(state, &parts.headers, false)?;
    mark_authenticated(parts);
    let caller = Caller { state, principal: &key.principal };
    let handler = async {
        if path == "/metrics" && parts.method == http::Method::GET {
            return Ok(respond("text/plain; version=0.0.4", usage::metrics(caller).into()));
        }
        let Some(found) = found else { return Err(no_route(parts.method.as_str(), path)) };
        if state.drain.is_active() && drain::starts_work(found.route) {
            return Err(HttpError::draining());
        }
        // Check the role before the body is read.
        require(caller.principal, access(found.route))?;
        // Do not read the body of an import into memory: the adapter is written to disk while it
        // arrives.
        let received = if found.route == Route::ImportAdapter {
            ReceivedBody::default()
        } else {
            let limit = body::size_limit(state, found.route);
            ReceivedBody::read(state, parts, body, limit, found.route.body()).await?
        };
        call_handler(caller, &found, parts, received, body).await
    };
    while_valid(&key, handler).await
}

/// Returns the access that a route needs. The match is exhaustive: a route added to the table does
/// not compile until it is decided who may use it.
fn access(route: Route) -> Access {
    match route {
        Route::ClientConfig
        | Route::DynamicConfig
        | Route::AuthToken
        | Route::Health
        | Route::ServerCapabilities
        | Route::Telemetry
        | Route::ListSessions
        | Route::GetSession
        | Route::SearchSessions
        | Route::TraceExport
        | Route::GetInfo
        | Route::GetSampler
        | Route::RetrieveFuture
        | Route::RetrieveFutures
        | Route::ListTrainingRuns
        | Route::GetTrainingRun
        | Route::ListCheckpoints
        | Route::ListUserCheckpoints
        | Route::WeightsInfo
        | Route::ExternalWeightsUrls
        | Route::BillingUsage
        | Route::StorageUsage
        | Route::AuditLog
        | Route::GetApiKey
        // Every key may revoke itself.
        | Route::DeleteApiKey => Access::Read,
        Route::CreateSession
        | Route::SessionHeartbeat
        | Route::FinishSession
        | Route::AssignSessionProject
        | Route::CreateModel
        | Route::ForwardBackward
        | Route::OptimStep
        | Route::DiscardGradient
        | Route::SaveWeights
        | Route::SaveWeightsForSampler
        | Route::SaveWeightsExternal
        | Route::LoadWeights
        | Route::CreateCustomLoss
        | Route::Sample
        | Route::CreateSamplingSession
        | Route::JoinSamplingSession
        | Route::CloseSampler
        | Route::CancelFuture
        | Route::DeleteTrainingRun
        | Route::CopyWeights
        | Route::DeleteCheckpoint
        | Route::PublishCheckpoint
        | Route::UnpublishCheckpoint
        | Route::SetCheckpointTtl
        | Route::ImportAdapter
        | Route::Completions
        | Route::UnloadModel
        | Route::ShareRun
        | Route::UnshareRun => Access::Write,
        Route::ListKeys
        | Route::CreateKey
        | Route::RevokeKey
        | Route::RotateKey
        | Route::ListUsers
        | Route::SetUserLimits
        | Route::StartDrain
        | Route::CancelDrain
        | Route::GetDrainStatus
        | Route::StartBackup
        | Route::GetBackupStatus
        | Route::GetDiskUsage => Access::Admin,
    }
}

/// Marks the connection of a request as authenticated, because the request was authorized. A request
/// of a simulation has no connection.
fn mark_authenticated(parts: &Parts) {
    if let Some(connection) = parts.extensions.get::<ConnectionId>() {
        connection.mark_authenticated();
    }
}

/// Calls the handler of a route. The match is exhaustive: a route added to the table does not
/// compile until it has a handler.
async fn call_handler(
    caller: Caller<'_>,
    found: &RouteMatch,
    parts: &Parts,
    received: ReceivedBody,
    unread: &mut impl IncomingBody,
) -> RouteResult {
    let Caller { state, principal } = caller;
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

        Route::CreateSession => session::create(caller, &body).await,
        Route::SessionHeartbeat => session::heartbeat(caller, &body),
        Route::FinishSession => session::finish(caller, param(0), &body).await,
        Route::ListSessions => session::list(caller, query),
        Route::GetSession => session::get(caller, param(0)).await,
        Route::SearchSessions => search::search(caller, &body).await,
        Route::AssignSessionProject => session::assign_project(caller, param(0), &body).await,

        Route::CreateModel => {
            acknowledge(state, admit::create_model(&state.admission, principal, body)).await
        }
        Route::ForwardBackward => {
            acknowledge(state, admit_large(caller, received, admit::forward_backward).await).await
        }
        Route::OptimStep => {
            acknowledge(state, admit::optim_step(&state.admission, principal, body)).await
        }
        Route::DiscardGradient => {
            acknowledge(state, admit::discard_gradient(&state.admission, principal, body)).await
        }
        Route::SaveWeights => {
            acknowledge(state, admit::save_weights(&state.admission, principal, body)).await
        }
        Route::SaveWeightsForSampler => {
            acknowledge(state, admit::save_weights_for_sampler(&state.admission, principal, body))
                .await
        }
        Route::SaveWeightsExternal => {
            acknowledge(state, admit::save_weights_external(&state.admission, principal, body))
                .await
        }
        Route::LoadWeights => {
            acknowledge(state, admit::load_weights(&state.admission, principal, body)).await
        }
        Route::CreateCustomLoss => {
            acknowledge(state, admit::create_custom_loss(&state.admission, principal, body)).await
        }
        Route::Sample => {
            acknowledge(state, admit_large(caller, received, admit::sample).await).await
        }
        Route::GetInfo => run::info(caller, &body),

        Route::CreateSamplingSession => run::create_sampler(caller, &body).await,
        Route::JoinSamplingSession => run::join_sampler(caller, &body).await,
        Route::CloseSampler => run::close_sampler(caller, param(0)).await,
        Route::GetSampler => run::sampler(caller, param(0), RequestClient::of(parts).is_local),

        Route::RetrieveFuture => future::retrieve(caller, &body).await,
        Route::RetrieveFutures => future::retrieve_many(caller, &body).await,
        Route::CancelFuture => future::cancel(caller, &body),

        Route::ListTrainingRuns => run::list(caller, query).await,
        Route::GetTrainingRun => run::get(caller, param(0)).await,
        Route::DeleteTrainingRun => run::delete(caller, param(0)).await,
        Route::ListCheckpoints => checkpoint::list_of_run(caller, param(0)).await,
        Route::ListUserCheckpoints => checkpoint::list(caller, query).await,
        Route::WeightsInfo => checkpoint::info(caller, &body),
        Route::CopyWeights => {
            let key = headers.get(header::IDEMPOTENCY_KEY).and_then(|key| key.to_str().ok());
            checkpoint::copy(caller, &body, key).await
        }
        Route::DeleteCheckpoint => checkpoint::delete(caller, param(0), param(1), param(2)).await,
        Route::PublishCheckpoint => {
            checkpoint::set_public(caller, param(0), param(1), param(2), true).await
        }
        Route::UnpublishCheckpoint => {
            checkpoint::set_public(caller, param(0), param(1), param(2), false).await
        }
        Route::SetCheckpointTtl => {
            checkpoint::set_ttl(caller, param(0), param(1), param(2), &body).await
        }
        Route::ExternalWeightsUrls => {
            let base = client::server_url(parts, state.options.public_url.as_ref());
            checkpoint::download_urls(caller, param(0), param(1), param(2), &base).await
        }

        Route::ImportAdapter => import::import(caller, parts, unread, param(0)).await,
        // `handle` passes the path of this route to the inference endpoints before it looks up
        // routes.
        Route::Completions => Err(no_route(parts.method.as_str(), parts.uri.path())),

        Route::StartDrain => {
            state.drain.set(true);
            to_json(&drain::status(state))
        }
        Route::CancelDrain => {
            state.drain.set(false);
            to_json(&drain::status(state))
        }
        Route::GetDrainStatus => to_json(&drain::status(state)),
        Route::StartBackup => {
            let request: StartBackup = json::decode(&body)?;
            if !RequestClient::of(parts).is_local {
                let message = "a backup can be started only on the machine of the server";
                return Err(ServerError::forbidden(message).into());
            }
            backup::start(state, &request)?;
            to_json(&state.last_backup.status())
        }
        Route::GetBackupStatus => to_json(&state.last_backup.status()),
        Route::GetDiskUsage => to_json(&disk_usage::measure(state).await?),

        Route::BillingUsage => usage::events(caller, query).await,
        Route::StorageUsage => usage::storage(caller),
        Route::GetApiKey => keys::current(caller),
        Route::AuthToken => unsupported(
            "this server accepts API keys directly; client/config has pjwt_auth_enabled = false",
        ),
        Route::UnloadModel => unsupported(
            "models leave memory when they are not used, and end with their session; finish the \
             session instead",
        ),
        Route::DeleteApiKey => keys::revoke_current(caller).await,
        Route::AuditLog => usage::audit_log(caller, query),
        Route::ListKeys => keys::list(caller),
        Route::CreateKey => keys::create(caller, &body).await,
        Route::RevokeKey => keys::revoke(caller, param(0)).await,
        Route::RotateKey => keys::rotate(caller, param(0)).await,
        Route::ListUsers => keys::users(caller),
        Route::SetUserLimits => keys::set_limits(caller, param(0), &body).await,
        Route::ShareRun => run::share(caller, param(0), query).await,
        Route::UnshareRun => run::unshare(caller, param(0), query).await,
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

/// Responds that the server runs, whether it is drained, and with the status of each upstream. The
/// server itself is healthy even if no upstream responds.
fn health(state: &ServerState) -> RouteResult {
    let upstreams: serde_json::Map<String, serde_json::Value> = state
        .backends
        .upstreams()
        .map(|upstream| {
            let status = if upstream.status().down.is_none() { "up" } else { "down" };
            (upstream.name.to_string(), status.into())
        })
        .collect();
    let draining = state.drain.is_active();
    if upstreams.is_empty() && !draining {
        return to_json(&Health::OK);
    }
    let mut health = serde_json::json!({"status": "ok"});
    if draining {
        health["draining"] = true.into();
    }
    if !upstreams.is_empty() {
        health["upstreams"] = upstreams.into();
    }
    to_json(&health)
}

/// Waits until an admitted request is durable, and responds with its id.
async fn acknowledge(
    state: &ServerState,
    admitted: Result<AdmittedRequest, ServerError>,
) -> RouteResult {
    to_json(&admit::acknowledge(&state.admission, admitted?).await?)
}

/// Checks that neither the worker thread nor the writer thread has panicked, and that no other
/// server has claimed the data folder.
fn check_worker(state: &ServerState) -> Result<(), HttpError> {
    match *state.health.borrow() {
        ServerHealth::Working => Ok(()),
        ServerHealth::Superseded => Err(ServerError::superseded().into()),
        _ => Err(ServerError::worker_panicked().into()),
    }
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
