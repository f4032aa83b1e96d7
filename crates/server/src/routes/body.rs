//! Bodies: read within the limits, and counted until they are dealt with.

use std::sync::Arc;

use bytes::Bytes;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, TRANSFER_ENCODING};
use http::request::Parts;
use http::{HeaderValue, StatusCode};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use tinkex_wire::codec::compress;
use tinkex_wire::{BodyCodec, RequestId, Route};
use tokio::sync::SemaphorePermit;
use tokio::time::{Instant, timeout_at};

use crate::error::ApiError;
use crate::state::{BODY_UNIT, Shared};

/// Bodies up to this size are read at once: they wait for no large one, and take no room.
const SMALL: usize = 64 << 10;

/// A body, and the room it takes.
pub(super) struct Held<'a> {
    bytes: Bytes,
    room: Option<SemaphorePermit<'a>>,
}

impl<'a> Held<'a> {
    /// The bytes, and what to keep for as long as they are in use.
    pub(super) fn split(self) -> (Bytes, impl Sized + use<'a>) {
        (self.bytes, self.room)
    }

    /// Reads a body within the limits, decompressed.
    pub(super) async fn read(
        shared: &'a Shared,
        parts: &Parts,
        body: &mut Incoming,
        route: Route,
    ) -> Result<Self, ApiError> {
        let limit = limit(shared, route);
        let announced = announced(parts)?;
        if announced.is_some_and(|length| length > limit) {
            return Err(too_large(limit));
        }
        if route.body() == BodyCodec::Empty && announced == Some(0) {
            return Ok(Self { bytes: Bytes::new(), room: None });
        }
        let zstd = match parts.headers.get(CONTENT_ENCODING).map(HeaderValue::as_bytes) {
            None | Some(b"identity") => false,
            Some(b"zstd") => true,
            Some(_) => {
                let why = "content-encoding: this server understands zstd, and bodies as they are";
                return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, why));
            }
        };
        let patience = shared.options.timeouts.client_io;
        let (mut held, mut room) = (Vec::new(), None);
        let mut until = Instant::now() + patience;
        loop {
            let frame = match timeout_at(until, body.frame()).await {
                Ok(None) => break,
                Ok(Some(Ok(frame))) => frame,
                Ok(Some(Err(why))) => {
                    return Err(ApiError::bad(format!("the body did not arrive: {why}")));
                }
                Err(_) => {
                    let why = "the body did not arrive in time";
                    return Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, why));
                }
            };
            let Ok(data) = frame.into_data() else { continue };
            if held.len() + data.len() > limit {
                return Err(too_large(limit));
            }
            held.extend_from_slice(&data);
            if room.is_none() && held.len() > SMALL {
                // All that it will need, at once: two that each wait for the other's would wait for ever.
                let length = announced.unwrap_or(limit);
                let more = if zstd { claimed(&held, limit) } else { 0 };
                room = Some(make_room(shared, length + more).await?);
                held.reserve_exact(length.saturating_sub(held.len()));
                until = Instant::now() + patience;
            }
        }
        let bytes = Bytes::from(held);
        if !zstd {
            return Ok(Self { bytes, room });
        }
        let size = claimed(&bytes, limit);
        if room.is_none() && size > SMALL {
            room = Some(make_room(shared, size).await?);
        }
        let work = move || Ok(compress::decompress(&bytes, size)?);
        let bytes = beside(shared, size, work).await?;
        Ok(Self { bytes, room })
    }
}

/// How large a body may be. Only two routes take data.
fn limit(shared: &Shared, route: Route) -> usize {
    let limits = &shared.options.limits;
    match route {
        Route::ForwardBackward | Route::Sample => limits.body_bytes,
        _ => limits.body_bytes.min(limits.small_body_bytes),
    }
}

/// How long a body says it is; nothing if it comes in pieces.
fn announced(parts: &Parts) -> Result<Option<usize>, ApiError> {
    match parts.headers.get(CONTENT_LENGTH) {
        None if parts.headers.contains_key(TRANSFER_ENCODING) => Ok(None),
        None => Ok(Some(0)),
        Some(length) => {
            let length = length.to_str().ok().and_then(|length| length.parse().ok());
            length.map(Some).ok_or_else(|| ApiError::bad("content-length: not a number"))
        }
    }
}

/// How large a compressed body will be at most.
fn claimed(body: &[u8], limit: usize) -> usize {
    let claimed = compress::declared_size(body).and_then(|size| usize::try_from(size).ok());
    // One that lies is cut off there; one that claims too much is refused by the first byte more.
    claimed.unwrap_or(limit).min(limit)
}

async fn make_room(shared: &Shared, bytes: usize) -> Result<SemaphorePermit<'_>, ApiError> {
    let most = (shared.options.limits.total_body_bytes / BODY_UNIT).max(1);
    let units = u32::try_from((bytes / BODY_UNIT).clamp(1, most)).unwrap_or(u32::MAX);
    shared.body_room.acquire_many(units).await.map_err(|_| stopping())
}

fn too_large(limit: usize) -> ApiError {
    let why = format!("the body is larger than {limit} bytes");
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, why)
}

fn stopping() -> ApiError {
    ApiError::busy("the server is stopping", 1_000)
}

/// Takes in a request whose body may be large.
pub(super) async fn take(
    shared: &Arc<Shared>,
    body: Bytes,
    admit: fn(&Arc<Shared>, Bytes) -> Result<RequestId, ApiError>,
) -> Result<RequestId, ApiError> {
    let own = Arc::clone(shared);
    beside(shared, body.len(), move || admit(&own, body)).await
}

/// Runs what takes long for large bodies where it holds nobody up; only so many at once.
async fn beside<T: Send + 'static>(
    shared: &Shared,
    size: usize,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    if size < SMALL {
        return work();
    }
    let _turn = shared.heavy.acquire().await.map_err(|_| stopping())?;
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|_| Err(stopping()))
}
