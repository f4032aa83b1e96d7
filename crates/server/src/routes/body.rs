//! Request bodies: read within size, time and memory limits.

use std::sync::Arc;

use bytes::Bytes;
use http::HeaderValue;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, TRANSFER_ENCODING};
use http::request::Parts;
use tinkex_store::decode_jobs::SMALL;
use tinkex_store::error::ServerError;
use tinkex_store::store::AdmittedRequest;
use tinkex_store::user::Principal;
use tinkex_wire::codec::compress;
use tinkex_wire::{BodyCodec, Route};
use tokio::sync::OwnedSemaphorePermit;

use super::body_reader::BodyReader;
use super::error::HttpError;
use super::{Caller, IncomingBody};
use crate::admit::Admission;
use crate::state::{BODY_UNIT, ServerState};

/// A body and its permit of the body budget.
#[derive(Default)]
pub(super) struct ReceivedBody {
    pub(super) bytes: Bytes,
    pub(super) permit: BodyPermit,
}

/// Permit of the body budget. Hold the permit while the body is in use. `None` for a small body,
/// which needs no permit.
pub(super) type BodyPermit = Option<OwnedSemaphorePermit>;

impl AsRef<[u8]> for ReceivedBody {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl ReceivedBody {
    /// Returns the bytes of the body. The permit is released when the last clone of the bytes is
    /// dropped.
    pub(super) fn into_bytes(self) -> Bytes {
        Bytes::from_owner(self)
    }

    /// Reads a body of at most `limit` bytes, before and after decompression, and decompresses it.
    pub(super) async fn read(
        state: &ServerState,
        parts: &Parts,
        body: &mut impl IncomingBody,
        limit: usize,
        codec: BodyCodec,
    ) -> Result<Self, HttpError> {
        let announced = announced_length(parts)?;
        if announced.is_some_and(|length| length > limit) {
            return Err(too_large(limit).into());
        }
        if codec == BodyCodec::Empty && announced == Some(0) {
            return Ok(Self { bytes: Bytes::new(), permit: None });
        }
        let zstd = match parts.headers.get(CONTENT_ENCODING).map(HeaderValue::as_bytes) {
            None | Some(b"identity") => false,
            Some(b"zstd") => true,
            Some(_) => return Err(HttpError::unsupported_encoding()),
        };
        let mut reader = BodyReader::new(body, state.options.timeouts.client_io);
        let mut received = Vec::new();
        let mut permit = None;
        while let Some(data) = reader.next().await? {
            if received.len() + data.len() > limit {
                return Err(too_large(limit).into());
            }
            received.extend_from_slice(&data);
            if permit.is_none() && received.len() > SMALL {
                // Acquire the budget for the whole body at once: two bodies that each wait for
                // the other's share would deadlock.
                let length = announced.unwrap_or(limit);
                let decompressed = if zstd { declared_size(&received, limit) } else { 0 };
                let budget = acquire_budget(state, length + decompressed);
                permit = Some(reader.pause(budget).await?);
                received.reserve_exact(length.saturating_sub(received.len()));
            }
        }
        let bytes = Bytes::from(received);
        if !zstd {
            return Ok(Self { bytes, permit });
        }
        let size = declared_size(&bytes, limit);
        if permit.is_none() && size > SMALL {
            permit = Some(acquire_budget(state, size).await?);
        }
        // The job holds the permit, because it continues if the client disconnects.
        let decompress =
            move || Ok::<_, ServerError>((compress::decompress(&bytes, size)?, permit));
        let (bytes, permit) = state.decode_jobs.run(size, decompress).await?;
        Ok(Self { bytes, permit })
    }
}

/// Returns the maximum size of a body in bytes. The limit is larger for the two routes that carry
/// training or sampling data.
pub(super) fn size_limit(state: &ServerState, route: Route) -> usize {
    let limits = &state.options.limits;
    match route {
        Route::ForwardBackward | Route::Sample => limits.body_bytes,
        _ => limits.body_bytes.min(limits.small_body_bytes),
    }
}

/// Returns the length in the `content-length` header; `None` for a chunked body.
pub(super) fn announced_length(parts: &Parts) -> Result<Option<usize>, ServerError> {
    match parts.headers.get(CONTENT_LENGTH) {
        None if parts.headers.contains_key(TRANSFER_ENCODING) => Ok(None),
        None => Ok(Some(0)),
        Some(length) => {
            let length = length.to_str().ok().and_then(|length| length.parse().ok());
            length.map(Some).ok_or_else(|| ServerError::invalid("content-length: not a number"))
        }
    }
}

/// Returns the decompressed size in bytes that a zstd frame declares, at most `limit`.
/// Decompression fails beyond this size, so the memory that it needs is known in advance.
fn declared_size(body: &[u8], limit: usize) -> usize {
    let declared = compress::declared_size(body).and_then(|size| usize::try_from(size).ok());
    declared.unwrap_or(limit).min(limit)
}

async fn acquire_budget(
    state: &ServerState,
    bytes: usize,
) -> Result<OwnedSemaphorePermit, ServerError> {
    let max = (state.options.limits.total_body_bytes / BODY_UNIT).max(1);
    let units = u32::try_from((bytes / BODY_UNIT).clamp(1, max)).unwrap_or(u32::MAX);
    let budget = Arc::clone(&state.body_budget);
    budget.acquire_many_owned(units).await.map_err(|_| ServerError::shutting_down())
}

pub(super) fn too_large(limit: impl std::fmt::Display) -> ServerError {
    ServerError::TooLarge(format!("the body exceeds the limit of {limit} bytes"))
}

/// Runs an admission function, on the blocking pool if the body is large. The permit of the body is
/// held until the request is admitted, also if the client disconnects before; from then on, the
/// request counts towards the limits of the queue.
pub(super) async fn admit_large(
    Caller { state, principal }: Caller<'_>,
    body: ReceivedBody,
    admit: fn(&Arc<Admission>, &Principal, Bytes) -> Result<AdmittedRequest, ServerError>,
) -> Result<AdmittedRequest, ServerError> {
    let admission = Arc::clone(&state.admission);
    let principal = principal.clone();
    let size = body.bytes.len();
    let ReceivedBody { bytes, permit } = body;
    let admit = move || {
        let admitted = admit(&admission, &principal, bytes);
        drop(permit);
        admitted
    };
    state.decode_jobs.run(size, admit).await
}
