//! HTTP: from calls to replies. Nothing below here knows of it.

mod body;
mod checkpoint;
mod file;
mod future;
mod run;
mod session;
mod usage;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HOST, HeaderName, ORIGIN};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use serde::Serialize;
use sha2::{Digest as _, Sha256};
use tinkex_wire::codec::{json, query};
use tinkex_wire::{
    ClientConfig, DynamicConfig, ErrorBody, Health, JSON, JsonObject, RequestId, Route, RouteMatch,
    ServerCapabilities, TelemetryBatch, TelemetryResponse, header,
};

use crate::admit;
use crate::error::ApiError;
use crate::metrics::Gauges;
use crate::state::Shared;

use self::body::{Held, take};

/// A reply's body: bytes, or a file as it is read.
pub(crate) type Body = http_body_util::Either<Full<Bytes>, file::FileBody>;
type Reply = Result<Response<Body>, ApiError>;

/// Where files are downloaded.
const FILES: &str = "/files/";

/// Answers a call.
pub(crate) async fn answer(shared: &Arc<Shared>, request: Request<Incoming>) -> Response<Body> {
    shared.metrics.calls.add(1);
    let (parts, mut body) = request.into_parts();
    match dispatch(shared, &parts, &mut body).await {
        Ok(reply) => reply,
        Err(error) => {
            shared.metrics.refused.add(1);
            // A client that is still sending would see a broken connection in place of the reason.
            let limit = shared.options.timeouts.client_io;
            let _ = tokio::time::timeout(limit, drain(&mut body)).await;
            refuse(&error)
        }
    }
}

/// Reads and drops what is left of a body, within reason and while it comes.
async fn drain(body: &mut Incoming) {
    let mut left: usize = 16 << 20;
    let pause = Duration::from_millis(200);
    while let Ok(Some(Ok(frame))) = tokio::time::timeout(pause, body.frame()).await {
        let read = frame.data_ref().map_or(0, Bytes::len);
        let Some(rest) = left.checked_sub(read) else { return };
        left = rest;
    }
}

async fn dispatch(shared: &Arc<Shared>, parts: &Parts, body: &mut Incoming) -> Reply {
    let path = parts.uri.path();
    if *shared.broken.borrow() {
        let why = "the server made a mistake and has to be started again; nothing promised is lost";
        return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, why));
    }
    if path.starts_with(FILES) && parts.method == http::Method::GET {
        return file::download(shared, &path[FILES.len()..], &parts.headers).await;
    }
    let found = Route::find(parts.method.as_str(), path);
    if found.as_ref().is_none_or(|found| found.route != Route::Health) {
        check_key(shared, &parts.headers)?;
    }
    if path == "/metrics" && parts.method == http::Method::GET {
        return Ok(plain("text/plain; version=0.0.4", metrics(shared).into()));
    }
    let Some(found) = found else { return Err(no_such_route(parts.method.as_str(), path)) };
    let body = Held::read(shared, parts, body, found.route).await?;
    let query = parts.uri.query().unwrap_or_default();
    // Its room is taken until it is dealt with.
    let (body, _room) = body.split();
    route(shared, &found, query, &parts.headers, body).await
}

/// Every endpoint there is; a new one in the table does not compile until it stands here.
async fn route(
    shared: &Arc<Shared>,
    found: &RouteMatch,
    query: &str,
    headers: &HeaderMap,
    body: Bytes,
) -> Reply {
    let param = |n: usize| found.params.get(n).map_or("", String::as_str);
    match found.route {
        Route::ClientConfig => {
            let _: JsonObject = json::decode(&body)?;
            to_json(&client_config(shared))
        }
        Route::DynamicConfig => {
            let _: JsonObject = json::decode(&body)?;
            to_json(
                &DynamicConfig::default().sample_cancel_enabled(shared.options.efficient_protocol),
            )
        }
        Route::Health => to_json(&Health::OK),
        Route::ServerCapabilities => to_json(&ServerCapabilities::new(shared.models.supported())),
        Route::Telemetry => {
            let _: TelemetryBatch = json::decode(&body)?;
            to_json(&TelemetryResponse::ACCEPTED)
        }

        Route::CreateSession => session::create(shared, &body).await,
        Route::SessionHeartbeat => session::heartbeat(shared, &body),
        Route::FinishSession => session::finish(shared, param(0), &body).await,
        Route::ListSessions => session::list(shared, query),
        Route::GetSession => session::get(shared, param(0)),
        Route::SearchSessions => session::search(shared, &body),
        Route::AssignSessionProject => session::assign_project(shared, param(0), &body).await,

        Route::CreateModel => ticket(shared, admit::create_model(shared, body)).await,
        Route::ForwardBackward => {
            ticket(shared, take(shared, body, admit::forward_backward).await).await
        }
        Route::OptimStep => ticket(shared, admit::optim_step(shared, body)).await,
        Route::SaveWeights => ticket(shared, admit::save_weights(shared, body)).await,
        Route::SaveWeightsForSampler => {
            ticket(shared, admit::save_weights_for_sampler(shared, body)).await
        }
        Route::SaveWeightsExternal => {
            ticket(shared, admit::save_weights_external(shared, body)).await
        }
        Route::LoadWeights => ticket(shared, admit::load_weights(shared, body)).await,
        Route::CreateCustomLoss => ticket(shared, admit::create_custom_loss(shared, body)).await,
        Route::Sample => ticket(shared, take(shared, body, admit::sample).await).await,
        Route::GetInfo => run::info(shared, &body),

        Route::CreateSamplingSession => run::create_sampler(shared, &body).await,
        Route::JoinSamplingSession => run::join_sampler(shared, &body).await,
        Route::GetSampler => run::sampler(shared, param(0)),

        Route::RetrieveFuture => future::retrieve(shared, &body).await,
        Route::RetrieveFutures => future::retrieve_many(shared, &body).await,
        Route::CancelFuture => future::cancel(shared, &body),

        Route::ListTrainingRuns => run::list(shared, query),
        Route::GetTrainingRun => run::get(shared, param(0)),
        Route::ListCheckpoints => checkpoint::of_run(shared, param(0)),
        Route::ListUserCheckpoints => checkpoint::list(shared, query),
        Route::WeightsInfo => checkpoint::info(shared, &body),
        Route::CopyWeights => checkpoint::copy(shared, &body).await,
        Route::DeleteCheckpoint => checkpoint::delete(shared, param(0), param(1), param(2)).await,
        Route::PublishCheckpoint => {
            checkpoint::publish(shared, param(0), param(1), param(2), true).await
        }
        Route::UnpublishCheckpoint => {
            checkpoint::publish(shared, param(0), param(1), param(2), false).await
        }
        Route::SetCheckpointTtl => {
            checkpoint::set_ttl(shared, param(0), param(1), param(2), &body).await
        }
        Route::ExternalWeightsUrls => {
            let host = headers.get(HOST).and_then(|host| host.to_str().ok());
            checkpoint::urls(shared, param(0), param(1), param(2), host)
        }

        Route::BillingUsage => usage::events(shared, query),
        Route::StorageUsage => usage::storage(shared),
        Route::GetApiKey => usage::key(),
        Route::AuthToken => Err(ApiError::bad(
            "this server takes keys as they are; client/config says so (pjwt_auth_enabled is false)",
        )),
        Route::DeleteApiKey => {
            Err(ApiError::bad("the key of this server is set where it is started"))
        }
        Route::AuditLog => Err(ApiError::bad("this server has one user and keeps no audit log")),
        Route::TraceExport => {
            Err(ApiError::bad("this server records no traces; its log has a line for every job"))
        }
    }
}

/// What clients should do so that everything goes the efficient way.
fn client_config(shared: &Shared) -> ClientConfig {
    let efficient = shared.options.efficient_protocol;
    let defaults = ClientConfig::default();
    let chunk_bytes = u64::try_from(shared.options.limits.body_bytes / 2)
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

/// Waits for the promise of a request that was taken in.
async fn ticket(shared: &Shared, taken: Result<RequestId, ApiError>) -> Reply {
    to_json(&admit::promise(shared, taken?).await?)
}

/// Lets in who may come in.
fn check_key(shared: &Shared, headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(key) = &shared.options.api_key else {
        // Any page that a browser shows may call a port of this machine, also under a name of its
        // own that it lets point here.
        if headers.contains_key(ORIGIN) || !is_here(headers) {
            return Err(ApiError::forbidden(
                "this server has no key, so it takes no calls from web pages and none under a name \
                 but localhost; start it with one",
            ));
        }
        return Ok(());
    };
    let given = headers.get(header::API_KEY).map(HeaderValue::as_bytes).unwrap_or_default();
    // Digests are of one length and tell nothing, so comparing them takes no time to learn from.
    let (given, wanted) = (Sha256::digest(given), Sha256::digest(key.expose()));
    let differences = given.iter().zip(&wanted).fold(0, |all, (a, b)| all | (a ^ b));
    if differences == 0 {
        return Ok(());
    }
    let why = "the key in x-api-key is not the one that this server was started with";
    Err(ApiError::new(StatusCode::UNAUTHORIZED, why))
}

/// Whether a call was made to an address, or to this machine by its usual name.
fn is_here(headers: &HeaderMap) -> bool {
    let Some(host) = headers.get(HOST) else { return true };
    let Ok(authority) = http::uri::Authority::try_from(host.as_bytes()) else { return false };
    let name = authority.host().trim_matches(['[', ']']);
    name.eq_ignore_ascii_case("localhost") || name.parse::<std::net::IpAddr>().is_ok()
}

fn no_such_route(method: &str, path: &str) -> ApiError {
    let other: Vec<&str> = ["GET", "POST", "PUT", "DELETE"]
        .into_iter()
        .filter(|other| Route::find(other, path).is_some())
        .collect();
    let shown: String = path.chars().take(200).collect();
    if !other.is_empty() {
        let why = format!("{shown} takes {}, not {method}", other.join(" and "));
        return ApiError::new(StatusCode::METHOD_NOT_ALLOWED, why);
    }
    let hint = if shown.starts_with("/api/v1/") {
        "this server speaks the protocol of SDK 0.36"
    } else {
        "the API is under /api/v1; a client's base URL is http://HOST:PORT alone"
    };
    ApiError::not_found(format!("there is no {method} {shown}; {hint}"))
}

fn metrics(shared: &Shared) -> String {
    let (queued, queued_bytes) = shared.queue.size();
    let store = shared.store();
    let gauges = Gauges {
        queued,
        queued_bytes,
        sessions: store.sessions.values().filter(|kept| kept.row.end.is_none()).count(),
        answers: store.requests.len(),
        answer_bytes: store.answer_bytes,
        payload_bytes: store.disk.payload_bytes(),
        commits: store.disk.commits(),
    };
    drop(store);
    shared.metrics.text(&gauges)
}

/// A reply in JSON.
fn to_json(value: &impl Serialize) -> Reply {
    Ok(plain(JSON, json::encode(value)?))
}

/// A reply that nobody looks at.
fn done() -> Reply {
    Ok(plain(JSON, Bytes::from_static(b"{}")))
}

fn plain(content_type: &'static str, body: Bytes) -> Response<Body> {
    let mut reply = Response::new(http_body_util::Either::Left(Full::new(body)));
    reply.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    reply
}

fn refuse(error: &ApiError) -> Response<Body> {
    let body = json::encode(&ErrorBody::new(error.detail.clone()));
    let mut reply = plain(JSON, body.unwrap_or_else(|_| Bytes::from_static(b"{\"detail\":\"?\"}")));
    *reply.status_mut() = error.status;
    if let Some(ms) = error.retry_after_ms {
        reply.headers_mut().insert(HeaderName::from_static(header::RETRY_AFTER_MS), ms.into());
    }
    reply
}

/// Reads a query.
fn from_query<T: serde::de::DeserializeOwned>(text: &str) -> Result<T, ApiError> {
    Ok(query::decode(text)?)
}
