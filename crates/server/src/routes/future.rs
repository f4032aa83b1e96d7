//! Futures: polling one result, polling a clone's results, cancellation.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tinkex_backend::queue::RequestQueue;
use tinkex_store::disk::PayloadReader;
use tinkex_store::error::ServerError;
use tinkex_store::log;
use tinkex_store::store::{RequestPhase, SequenceScope};
use tinkex_wire::codec::json;
use tinkex_wire::{
    CancelFuture, CompletedFuture, ErrorCategory, FuturesRetrieved, PollResponse, QueueState,
    QueueStatus, RequestFailed, RequestId, ResultPayload, RetrieveFuture, RetrieveFutures,
    SamplerId,
};
use tokio::sync::futures::OwnedNotified;
use tokio::time::Instant;

use super::{Caller, RouteResult, empty, respond, to_json};
use crate::state::ServerState;

/// Size of a result in bytes above which the first response has only the size, if the client allows
/// this.
const LARGE_RESULT: usize = 256 << 10;

/// Returns the result of a request. Waits for the result for at most the poll timeout.
pub(super) async fn retrieve(caller: Caller<'_>, body: &Bytes) -> RouteResult {
    let state = caller.state;
    let request: RetrieveFuture = json::decode(body)?;
    let id = request.request_id;
    let deadline = Instant::now() + state.options.timeouts.poll_hold;
    loop {
        let changed = match future_state(caller, &id, request.allow_metadata_only)? {
            FutureState::Size(response_payload_size) => {
                return poll_response(&PollResponse::MetadataOnly { response_payload_size }, &id);
            }
            FutureState::Available(response) => {
                mark_delivered(caller, &id);
                return poll_response(&response, &id);
            }
            FutureState::OnDisk { proto, number, size, reader } => {
                let response = read_result(state, &id, proto, (number, size), reader).await?;
                mark_delivered(caller, &id);
                return Ok(response);
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
    /// The outcome.
    Available(PollResponse),
    /// Size of a large result in bytes. The client polls again for the result itself.
    Size(u64),
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
    caller: Caller<'_>,
    id: &RequestId,
    allow_metadata: bool,
) -> Result<FutureState, ServerError> {
    let store = caller.store();
    let reader = store.all().reader();
    let Some(entry) = store.request(id) else { return Err(no_result(id)) };
    Ok(match &entry.phase {
        RequestPhase::Failed { failed, .. } => {
            FutureState::Available(PollResponse::Failed(failed.clone()))
        }
        RequestPhase::Ready { size, .. } if allow_metadata && *size > LARGE_RESULT => {
            FutureState::Size(u64::try_from(*size).unwrap_or(u64::MAX))
        }
        RequestPhase::Ready { payload: Some(payload), .. } => {
            FutureState::Available(PollResponse::Ready(payload.clone()))
        }
        RequestPhase::Ready { payload: None, proto, number, size, .. } => {
            FutureState::OnDisk { proto: *proto, number: *number, size: *size, reader }
        }
        RequestPhase::Writing { .. } | RequestPhase::Queued | RequestPhase::Persisting => {
            FutureState::Pending(Arc::clone(&entry.changed).notified_owned())
        }
    })
}

/// Records that a client receives the outcome of a request.
fn mark_delivered(caller: Caller<'_>, id: &RequestId) {
    // A key that may only read leaves the retention of the result to the client that waits for it.
    if caller.require_write().is_err() {
        return;
    }
    let mut store = caller.store();
    let store = store.all_mut();
    let now = store.clock.running();
    if let Some(entry) = store.requests.get_mut(id) {
        entry.delivered = Some(now);
    }
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
            tracing::warn!(target: log::STORAGE, request_id = %id, %error, "cannot read a result");
            let message = state.hidden_paths.hide(&error.to_string()).into_owned();
            let failed = RequestFailed::new(message, category);
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
    let status = |queue_state, reason: Option<String>| {
        let reason = reason.map(|reason| state.hidden_paths.hide(&reason).into_owned());
        QueueStatus::new(queue_state, reason)
    };
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
pub(super) async fn retrieve_many(caller: Caller<'_>, body: &Bytes) -> RouteResult {
    let state = caller.state;
    // A key that may only read leaves the results to the client that sampled.
    let acknowledges = caller.require_write().is_ok();
    let request: RetrieveFutures = json::decode(body)?;
    let key = (request.target.sampling_session_id, request.target.cloned_sampler_id);
    {
        let mut store = caller.store();
        store.sampler(&key.0)?;
        // Ignore acknowledgements of results that belong to other sampling sessions.
        let scope = SequenceScope::Sampler(key.0.clone());
        let mut ids = request.retrieved_request_ids;
        ids.retain(|id| store.request(id).is_some_and(|entry| entry.row.scope == scope));
        if acknowledges {
            store.all_mut().remove_results(ids);
        }
    }
    let _guard = FeedGuard { state, key: &key };
    let max = state.options.timeouts.poll_hold;
    let timeout = request.timeout.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let deadline = Instant::now() + timeout.unwrap_or(max).min(max);
    loop {
        let changed = {
            let mut store = state.store();
            let feed = store.feeds.entry(key.clone()).or_default();
            let is_known = |at: u64| at <= request.prev_cursor;
            while acknowledges && feed.completions.front().is_some_and(|(at, _)| is_known(*at)) {
                feed.completions.pop_front();
            }
            let new = feed.completions.iter().filter(|(at, _)| !is_known(*at));
            let completions: Vec<CompletedFuture> =
                new.map(|(_, completion)| completion.clone()).collect();
            if !completions.is_empty() {
                let cursor = feed.completions.back().map_or(0, |(at, _)| *at);
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
pub(super) fn cancel(caller: Caller<'_>, body: &Bytes) -> RouteResult {
    let request: CancelFuture = json::decode(body)?;
    let state = caller.state;
    let mut store = caller.store();
    if store.request(&request.request_id).is_some()
        && let Some(entry) = store.all_mut().requests.get_mut(&request.request_id)
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
