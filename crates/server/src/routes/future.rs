//! Futures: polling one result, polling a clone's results, cancellation.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tinkex_backend::queue::RequestQueue;
use tinkex_store::disk::PayloadReader;
use tinkex_store::error::ServerError;
use tinkex_store::store::{RequestPhase, SequenceScope};
use tinkex_wire::codec::json;
use tinkex_wire::{
    CancelFuture, CompletedFuture, ErrorCategory, FuturesRetrieved, PollResponse, QueueState,
    QueueStatus, RequestFailed, RequestId, ResultPayload, RetrieveFuture, RetrieveFutures,
    SamplerId,
};
use tokio::sync::futures::OwnedNotified;
use tokio::time::Instant;

use super::{RouteResult, empty, respond, to_json};
use crate::state::ServerState;

/// Size of a result in bytes above which the first response has only the size, if the client allows
/// this.
const LARGE_RESULT: usize = 256 << 10;

/// Returns the result of a request. Waits for the result for at most the poll timeout.
pub(super) async fn retrieve(state: &Arc<ServerState>, body: &Bytes) -> RouteResult {
    let request: RetrieveFuture = json::decode(body)?;
    let id = request.request_id;
    let deadline = Instant::now() + state.options.timeouts.poll_hold;
    loop {
        let changed = match future_state(state, &id, request.allow_metadata_only)? {
            FutureState::Available(response) => return poll_response(&response, &id),
            FutureState::OnDisk { proto, number, size, reader } => {
                return read_result(state, &id, proto, (number, size), reader).await;
            }
            FutureState::Pending(changed) => changed,
        };
        if tokio::time::timeout_at(deadline, changed).await.is_err() {
            return poll_response(&PollResponse::TryAgain(queue_status(state, &id)), &id);
        }
    }
}

fn poll_response(response: &PollResponse, id: &RequestId) -> RouteResult {
    let (content_type, body) = response.encode(id);
    Ok(respond(content_type, body))
}

/// State of a future for a poll.
enum FutureState {
    Available(PollResponse),
    OnDisk {
        proto: bool,
        number: u64,
        size: usize,
        reader: PayloadReader,
    },
    /// Resolves when the state may have changed.
    Pending(OwnedNotified),
}

fn future_state(
    state: &ServerState,
    id: &RequestId,
    allow_metadata: bool,
) -> Result<FutureState, ServerError> {
    let store = state.store();
    let Some(entry) = store.requests.get(id) else { return Err(no_result(id)) };
    Ok(match &entry.phase {
        RequestPhase::Failed { failed, .. } => {
            FutureState::Available(PollResponse::Failed(failed.clone()))
        }
        RequestPhase::Ready { size, .. } if allow_metadata && *size > LARGE_RESULT => {
            let response_payload_size = u64::try_from(*size).unwrap_or(u64::MAX);
            FutureState::Available(PollResponse::MetadataOnly { response_payload_size })
        }
        RequestPhase::Ready { payload: Some(payload), .. } => {
            FutureState::Available(PollResponse::Ready(payload.clone()))
        }
        RequestPhase::Ready { payload: None, proto, number, size, .. } => FutureState::OnDisk {
            proto: *proto,
            number: *number,
            size: *size,
            reader: store.reader(),
        },
        RequestPhase::Writing { .. } | RequestPhase::Queued | RequestPhase::Persisting => {
            FutureState::Pending(Arc::clone(&entry.changed).notified_owned())
        }
    })
}

fn no_result(id: &RequestId) -> ServerError {
    ServerError::Gone(format!(
        "no result for request {id}: it was acknowledged, has expired, or the request never existed"
    ))
}

/// Reads a result that was evicted from memory.
async fn read_result(
    state: &ServerState,
    id: &RequestId,
    proto: bool,
    (number, size): (u64, usize),
    reader: PayloadReader,
) -> RouteResult {
    let bytes = match state.result_reads.read(&state.executor, number, size, reader).await? {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(no_result(id).into());
        }
        Err(error) if error.kind() == std::io::ErrorKind::InvalidData => {
            let category = ErrorCategory::Server;
            let failed = RequestFailed::new(error.to_string(), category);
            return poll_response(&PollResponse::Failed(failed), id);
        }
        Err(error) => return Err(ServerError::read_failed(&error).into()),
    };
    let payload = if proto { ResultPayload::Proto(bytes) } else { ResultPayload::Json(bytes) };
    poll_response(&PollResponse::Ready(payload), id)
}

/// Returns why a result is not available yet.
fn queue_status(state: &ServerState, id: &RequestId) -> QueueStatus {
    let (request, write_error, queue) = {
        let store = state.store();
        let request = store.requests.get(id).map(|entry| Arc::clone(&entry.row));
        let queue = match request.as_ref().map(|request| &request.scope) {
            Some(SequenceScope::Model(model)) => state.backends.queue_of_model(&store, model),
            _ => Some(state.backends.engine() as &dyn RequestQueue),
        };
        (request, store.disk.write_error(), queue)
    };
    let status = QueueStatus::new;
    if let Some(error) = write_error {
        let reason = format!("the server cannot write results to its disk: {error}");
        return status(QueueState::PausedCapacity, Some(reason));
    }
    let Some(queue) = queue else { return status(QueueState::Active, None) };
    if let Some(request) = &request
        && let SequenceScope::Model(model) = &request.scope
        && let Some(missing) = queue.missing(model, request.seq)
    {
        let reason = format!("seq_id {} waits for missing seq_id {missing}", request.seq);
        return status(QueueState::PausedCapacity, Some(reason));
    }
    if let Some(request) = request
        && let SequenceScope::Model(model) = &request.scope
        && let Some(fault) = queue.fault(model)
    {
        let reason = format!("the server retries after a fault: {fault}");
        return status(QueueState::PausedCapacity, Some(reason));
    }
    let (queued, _) = queue.size();
    let reason = (queued > 0).then(|| format!("{queued} requests are queued or being sampled"));
    status(QueueState::Active, reason)
}

/// Drops the feed of a poll when the poll ends, if the feed is idle then. The guard does this on
/// drop, because the client may disconnect at any time.
struct FeedGuard<'a> {
    state: &'a ServerState,
    key: &'a (SamplerId, u64),
}

impl Drop for FeedGuard<'_> {
    fn drop(&mut self) {
        self.state.store().drop_idle_feed(self.key);
    }
}

/// Returns the completed futures of one clone of a sampling client.
pub(super) async fn retrieve_many(state: &Arc<ServerState>, body: &Bytes) -> RouteResult {
    let request: RetrieveFutures = json::decode(body)?;
    let key = (request.target.sampling_session_id, request.target.cloned_sampler_id);
    {
        let mut store = state.store();
        if !store.samplers.contains_key(&key.0) {
            return Err(ServerError::no_sampling_session(&key.0).into());
        }
        // Ignore acknowledgements of results that belong to other sampling sessions.
        let scope = SequenceScope::Sampler(key.0.clone());
        let mut ids = request.retrieved_request_ids;
        ids.retain(|id| store.requests.get(id).is_some_and(|entry| entry.row.scope == scope));
        store.remove_results(ids);
    }
    let _guard = FeedGuard { state, key: &key };
    let max = state.options.timeouts.poll_hold;
    let timeout = request.timeout.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let deadline = Instant::now() + timeout.unwrap_or(max).min(max);
    loop {
        let changed = {
            let mut store = state.store();
            let feed = store.feeds.entry(key.clone()).or_default();
            while feed.completions.front().is_some_and(|(at, _)| *at <= request.prev_cursor) {
                feed.completions.pop_front();
            }
            if !feed.completions.is_empty() {
                let cursor = feed.completions.back().map_or(0, |(at, _)| *at);
                let completions: Vec<CompletedFuture> =
                    feed.completions.iter().map(|(_, completion)| completion.clone()).collect();
                return to_json(&FuturesRetrieved::new(completions, cursor));
            }
            Arc::clone(&feed.changed).notified_owned()
        };
        if tokio::time::timeout_at(deadline, changed).await.is_err() {
            let cursor = request.prev_cursor;
            return to_json(&FuturesRetrieved::new(Vec::new(), cursor));
        }
    }
}

/// Cancels a sample. Has no effect on requests of models, because later requests of the model
/// depend on them.
pub(super) fn cancel(state: &ServerState, body: &Bytes) -> RouteResult {
    let request: CancelFuture = json::decode(body)?;
    let mut store = state.store();
    if let Some(entry) = store.requests.get_mut(&request.request_id)
        && matches!(entry.row.scope, SequenceScope::Sampler(_))
    {
        match &mut entry.phase {
            RequestPhase::Writing { cancelled } => *cancelled = true,
            RequestPhase::Queued => {
                let queues = state.backends.queues();
                queues.for_each(|queue| queue.cancel(request.request_id.clone()));
            }
            RequestPhase::Persisting | RequestPhase::Ready { .. } | RequestPhase::Failed { .. } => {
            }
        }
    }
    drop(store);
    empty()
}
