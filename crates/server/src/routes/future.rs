//! Answers: one, many, or none any more.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use tinkex_wire::codec::json;
use tinkex_wire::{
    CancelFuture, CompletedFuture, ErrorCategory, FuturesRetrieved, PollResponse, QueueState,
    QueueStatus, RequestFailed, RequestId, ResultPayload, RetrieveFuture, RetrieveFutures,
    SamplerId,
};
use tokio::sync::futures::OwnedNotified;
use tokio::time::Instant;

use super::{Reply, done, plain, to_json};
use crate::disk::Reader;
use crate::error::ApiError;
use crate::state::Shared;
use crate::store::{Line, Phase};

/// Answers larger than this are announced first, if the client lets us.
const LARGE: usize = 256 << 10;

/// The answer behind a ticket, waited for a while.
pub(super) async fn retrieve(shared: &Arc<Shared>, body: &Bytes) -> Reply {
    let call: RetrieveFuture = json::decode(body)?;
    let id = call.request_id;
    let until = Instant::now() + shared.options.timeouts.poll_hold;
    loop {
        let changed = match look(shared, &id, call.allow_metadata_only)? {
            Look::Answer(outcome) => {
                let (kind, body) = outcome.encode(&id);
                return Ok(plain(kind, body));
            }
            Look::OnDisk { proto, number, reader } => {
                return from_disk(&id, proto, number, reader).await;
            }
            Look::Wait(changed) => changed,
        };
        if tokio::time::timeout_at(until, changed).await.is_err() {
            let (kind, body) = PollResponse::TryAgain(pending(shared, &id)).encode(&id);
            return Ok(plain(kind, body));
        }
    }
}

/// What there is behind a ticket.
enum Look {
    Answer(PollResponse),
    OnDisk { proto: bool, number: u64, reader: Reader },
    Wait(OwnedNotified),
}

fn look(shared: &Shared, id: &RequestId, allow_metadata: bool) -> Result<Look, ApiError> {
    let store = shared.store();
    let Some(entry) = store.requests.get(id) else { return Err(expired(id)) };
    Ok(match &entry.phase {
        Phase::Failed { failed, .. } => Look::Answer(PollResponse::Failed(failed.clone())),
        Phase::Ready { size, .. } if allow_metadata && *size > LARGE => {
            let response_payload_size = u64::try_from(*size).unwrap_or(u64::MAX);
            Look::Answer(PollResponse::MetadataOnly { response_payload_size })
        }
        Phase::Ready { payload: Some(payload), .. } => {
            Look::Answer(PollResponse::Ready(payload.clone()))
        }
        Phase::Ready { payload: None, proto, number, .. } => {
            Look::OnDisk { proto: *proto, number: *number, reader: store.reader() }
        }
        Phase::Writing { .. } | Phase::Waiting | Phase::Settling => {
            Look::Wait(Arc::clone(&entry.changed).notified_owned())
        }
    })
}

fn expired(id: &RequestId) -> ApiError {
    let why = format!(
        "there is no answer for {id}: it was fetched before, it expired, or there was no such request"
    );
    ApiError::new(StatusCode::GONE, why)
}

/// An answer that memory had no room for.
async fn from_disk(id: &RequestId, proto: bool, number: u64, reader: Reader) -> Reply {
    let read = tokio::task::spawn_blocking(move || reader.payload(number)).await;
    let bytes = match read {
        Ok(Ok(bytes)) => bytes,
        Ok(Err(why)) if why.kind() == std::io::ErrorKind::NotFound => return Err(expired(id)),
        Ok(Err(why)) if why.kind() == std::io::ErrorKind::InvalidData => {
            let failed = RequestFailed { error: why.to_string(), category: ErrorCategory::Server };
            let (kind, body) = PollResponse::Failed(failed).encode(id);
            return Ok(plain(kind, body));
        }
        Ok(Err(why)) => return Err(ApiError::disk(&why)),
        Err(why) => return Err(ApiError::disk(&std::io::Error::other(why))),
    };
    let payload = if proto { ResultPayload::Proto(bytes) } else { ResultPayload::Json(bytes) };
    let (kind, body) = PollResponse::Ready(payload).encode(id);
    Ok(plain(kind, body))
}

/// Why there is no answer yet.
fn pending(shared: &Shared, id: &RequestId) -> QueueStatus {
    let line = {
        let store = shared.store();
        store.requests.get(id).map(|entry| (entry.row.line.clone(), entry.row.seq))
    };
    let (queued, _) = shared.queue.size();
    let trouble = shared.store().disk.trouble();
    let missing = match &line {
        Some((Line::Model(model), seq)) => shared.queue.missing(model, *seq).map(|n| (n, *seq)),
        _ => None,
    };
    if let Some(why) = trouble {
        let reason = format!("the server's disk takes no answers at present: {why}");
        return QueueStatus {
            queue_state: Some(QueueState::PausedCapacity),
            queue_state_reason: Some(reason),
        };
    }
    match missing {
        Some((missing, seq)) => QueueStatus {
            queue_state: Some(QueueState::PausedCapacity),
            queue_state_reason: Some(format!(
                "seq_id {seq} waits for {missing}, which has not come"
            )),
        },
        None if queued > 0 => QueueStatus {
            queue_state: Some(QueueState::Active),
            queue_state_reason: Some(format!("{queued} requests are in line or being sampled")),
        },
        None => QueueStatus { queue_state: Some(QueueState::Active), queue_state_reason: None },
    }
}

/// Somebody who listens to a feed, until it is answered or goes away.
struct Listener<'a> {
    shared: &'a Shared,
    key: &'a (SamplerId, u64),
}

impl Drop for Listener<'_> {
    fn drop(&mut self) {
        self.shared.store().drop_feed(self.key);
    }
}

/// Which tickets of one client of a sampling session have answers.
pub(super) async fn retrieve_many(shared: &Arc<Shared>, body: &Bytes) -> Reply {
    let call: RetrieveFutures = json::decode(body)?;
    let key = (call.target.sampling_session_id, call.target.cloned_sampler_id);
    {
        let mut store = shared.store();
        if !store.samplers.contains_key(&key.0) {
            return Err(ApiError::not_found(format!("there is no sampling session {}", key.0)));
        }
        // Nobody acknowledges what is somebody else's.
        let line = Line::Sampler(key.0.clone());
        let mut ids = call.retrieved_request_ids;
        ids.retain(|id| store.requests.get(id).is_some_and(|entry| entry.row.line == line));
        store.forget(ids);
    }
    let _listener = Listener { shared, key: &key };
    let most = shared.options.timeouts.poll_hold;
    let asked = call.timeout.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let until = Instant::now() + asked.unwrap_or(most).min(most);
    loop {
        let changed = {
            let mut store = shared.store();
            let feed = store.feeds.entry(key.clone()).or_default();
            while feed.completions.front().is_some_and(|(place, _)| *place <= call.prev_cursor) {
                feed.completions.pop_front();
            }
            if !feed.completions.is_empty() {
                let cursor = feed.completions.back().map_or(0, |(place, _)| *place);
                let completions: Vec<CompletedFuture> =
                    feed.completions.iter().map(|(_, completion)| completion.clone()).collect();
                return to_json(&FuturesRetrieved { completions, cursor });
            }
            Arc::clone(&feed.changed).notified_owned()
        };
        if tokio::time::timeout_at(until, changed).await.is_err() {
            let cursor = call.prev_cursor;
            return to_json(&FuturesRetrieved { completions: Vec::new(), cursor });
        }
    }
}

/// Nobody waits for a ticket any more. Only samples are stopped by that.
pub(super) fn cancel(shared: &Shared, body: &Bytes) -> Reply {
    let call: CancelFuture = json::decode(body)?;
    let mut store = shared.store();
    if let Some(entry) = store.requests.get_mut(&call.request_id)
        && matches!(entry.row.line, Line::Sampler(_))
    {
        match &mut entry.phase {
            Phase::Writing { cancelled } => *cancelled = true,
            Phase::Waiting => shared.queue.cancel(call.request_id),
            Phase::Settling | Phase::Ready { .. } | Phase::Failed { .. } => {}
        }
    }
    drop(store);
    done()
}
