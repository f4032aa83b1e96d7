//! Admission: validates a request, persists it and enqueues it, or rejects it without side effects.
//!
//! A request is acknowledged only once it is durable. A retry with the same sequence number and the
//! same body gets the same request id; another body under a used number is rejected.

mod digest;
mod load;
mod loss;
pub(crate) mod relay;
mod sampling;
mod save;
mod training;

use std::sync::{Arc, MutexGuard};

use bytes::Bytes;
use tinkex_autodiff::LossProgram;
use tinkex_wire::{
    CustomLossCreated, LossId, ModelId, RequestId, SequenceId, SessionId, SubmitResponse,
};

use crate::backend::Backend;
use crate::error::ServerError;
use crate::fault::is_transient;
use crate::log;
use crate::operation::{ModelOperation, Operation, QueuedRequest};
use crate::outcome::{Outcome, record_outcome};
use crate::queue::{LateRequest, Queue};
use crate::state::ServerState;
use crate::store::{
    FailureCategory, Record, RequestKind, RequestPhase, RequestRecord, RunRecord, SequenceScope,
    Store, UnfinishedRequest, WriteStatus,
};
use crate::worker::{KILLED_THE_PROCESS, MAX_STARTS};

pub(crate) use self::load::load_weights;
pub(crate) use self::loss::create_custom_loss;
pub(crate) use self::sampling::{EngineSample, check_tokens, engine_sample, sample, stop_at};
pub(crate) use self::save::{
    save_weights, save_weights_external, save_weights_for_sampler, validate_name, validate_ttl,
};
pub(crate) use self::training::{create_model, forward_backward, optim_step, random_seed};

/// Sequence number of the request that creates a model.
const CREATION_SEQ: u64 = 0;

/// A validated request that is ready to be persisted.
struct Submission {
    kind: RequestKind,
    session: SessionId,
    scope: SequenceScope,
    /// Sequence number; `None` assigns the next free one.
    seq: Option<u64>,
    digest: String,
    seed: u64,
    /// Number of samples requested; 0 for other kinds of requests.
    samples: u32,
    body: Bytes,
    /// Records to write in the same transaction, for example the run that the request creates.
    records: Vec<Record>,
    next: NextStep,
}

/// Step that follows once a request is durable.
enum NextStep {
    Enqueue(Operation),
    /// Completes the request without executing anything.
    Complete(Outcome),
    /// Makes a custom loss available to its session, and completes the request.
    RegisterLoss(LossId, Arc<LossProgram>),
}

impl NextStep {
    /// Memory beyond the request body, in bytes.
    fn extra_bytes(&self) -> usize {
        match self {
            Self::Enqueue(operation) => operation.extra_bytes(),
            Self::Complete(_) | Self::RegisterLoss(..) => 0,
        }
    }

    /// Returns the backend that executes the step. `records` are written with the request and may
    /// contain the run that it creates.
    fn backend(&self, store: &Store, records: &[Record]) -> Backend {
        match self {
            Self::Enqueue(Operation::Model { model, .. }) => {
                let new_run = records.iter().find_map(|record| match record {
                    Record::Run(run) if run.id == *model => Some(run.backend()),
                    _ => None,
                });
                let run = store.runs.get(model);
                new_run.or_else(|| run.map(|run| run.row.backend())).unwrap_or(Backend::Engine)
            }
            Self::Enqueue(Operation::Relay(sample)) => {
                Backend::Upstream(Arc::clone(&sample.upstream))
            }
            Self::Enqueue(_) | Self::Complete(_) | Self::RegisterLoss(..) => Backend::Engine,
        }
    }
}

/// Queues a request for writing and returns its id, or the id of the original request if this is a
/// retry. [`acknowledge`] waits until the request is durable.
fn submit(
    state: &Arc<ServerState>,
    mut store: MutexGuard<'_, Store>,
    submission: Submission,
) -> Result<RequestId, ServerError> {
    let Submission { kind, session, scope, seq, digest, seed, samples, body, records, next } =
        submission;
    let seq = match seq {
        Some(seq) => seq,
        None => next_seq(state, &store, &scope),
    };
    validate_seq(&scope, seq)?;
    if let Some(original) = find_original(&store, &scope, seq, &digest)? {
        return Ok(original);
    }
    if let SequenceScope::Model(model) = &scope {
        let expected = state.queue_of_model(&store, model).next_of(model);
        if seq < expected {
            return Err(ServerError::invalid(format!(
                "seq_id {seq} of {model} arrived too late: the next seq_id is {expected}"
            )));
        }
    }
    let new_run = records.iter().find_map(|record| match record {
        Record::Run(run) => Some(&run.id),
        _ => None,
    });
    if let Some(id) = new_run.filter(|id| store.runs.contains_key(*id)) {
        return Err(ServerError::Conflict(format!("model_seq_id: model {id} already exists")));
    }
    let bytes = body.len() + next.extra_bytes();
    let backend = next.backend(&store, &records);
    check_capacity(state, state.backends.queue(&backend), bytes)?;
    let now = store.clock.now();
    store.touch(&session);
    if let SequenceScope::Model(model) = &scope
        && let Some(run) = store.runs.get_mut(model)
    {
        run.last_used = now;
    }
    let id = RequestId::from(state.random.id());
    let source_folder = match &next {
        NextStep::Enqueue(Operation::Model {
            operation: ModelOperation::Load { folder, .. },
            ..
        }) => Some(folder.clone()),
        _ => None,
    };
    let row = RequestRecord {
        number: store.disk.next_payload_number(),
        id: id.clone(),
        kind,
        session,
        scope,
        seq,
        digest,
        seed,
        samples,
        source_folder,
        at: now,
    };
    state.backends.queue(&backend).write_started(bytes);
    let (state, callback_id) = (Arc::clone(state), id.clone());
    let on_written = Box::new(move |written: std::io::Result<()>| {
        state.backends.queue(&backend).write_finished(bytes);
        match written {
            Ok(()) => {
                let mut store = state.store();
                let next = match store.confirm_request(&callback_id) {
                    WriteStatus::Active => next,
                    WriteStatus::Cancelled => NextStep::Complete(Outcome::cancelled()),
                };
                proceed(&state, &mut store, callback_id, bytes, None, next);
            }
            Err(error) => {
                tracing::warn!(
                    target: log::STORAGE,
                    request_id = %callback_id,
                    %error,
                    "request was rejected because it cannot be persisted"
                );
                revoke(&mut state.store(), &callback_id);
            }
        }
    });
    store.add_request(row, records, body, on_written);
    Ok(id)
}

/// Returns the id of the request that was admitted with the same sequence number and digest: the
/// new request is a retry of it. Returns `None` if the number is unused.
///
/// # Errors
/// Fails if the number was used for a request with another digest.
fn find_original(
    store: &Store,
    scope: &SequenceScope,
    seq: u64,
    digest: &str,
) -> Result<Option<RequestId>, ServerError> {
    let Some(id) = store.request_at(scope, seq) else { return Ok(None) };
    match store.requests.get(id) {
        Some(original) if original.row.digest == digest => Ok(Some(id.clone())),
        _ => Err(ServerError::invalid(format!(
            "seq_id {seq} was used for another request; use a new number for a new request"
        ))),
    }
}

/// Returns `admitted` unchanged. If it is a permanent rejection, marks the sequence number as
/// rejected, so that later requests of the model do not wait for it.
fn reject_seq_on_error(
    state: &ServerState,
    model: &ModelId,
    seq: Option<u64>,
    admitted: Result<RequestId, ServerError>,
) -> Result<RequestId, ServerError> {
    if let (Err(error), Some(seq)) = (&admitted, seq)
        && error.is_permanent()
    {
        // If an earlier request with this number was admitted, it must still run in sequence.
        let store = state.store();
        if store.request_at(&SequenceScope::Model(model.clone()), seq).is_none() {
            state.queue_of_model(&store, model).reject(model, seq);
        }
    }
    admitted
}

/// Checks that a sequence number is in the range of the protocol. Samples use all 64 bits, because
/// each clone has its own range; the maximum is excluded because it has no successor.
fn validate_seq(scope: &SequenceScope, seq: u64) -> Result<(), ServerError> {
    let max = match scope {
        SequenceScope::Model(_) => i32::MAX.unsigned_abs().into(),
        SequenceScope::Sampler(_) | SequenceScope::CustomLosses(_) => u64::MAX - 1,
    };
    if seq > max {
        return Err(ServerError::invalid(format!("seq_id: {seq} exceeds the maximum {max}")));
    }
    Ok(())
}

/// Returns the sequence number after the last one in a scope.
fn next_seq(state: &ServerState, store: &Store, scope: &SequenceScope) -> u64 {
    let sequence = store.sequences.get(scope);
    let last = sequence.and_then(|sequence| sequence.keys().next_back().copied());
    let next = last.map_or(0, |last| last.saturating_add(1));
    match scope {
        SequenceScope::Model(model) => next.max(state.queue_of_model(store, model).next_of(model)),
        SequenceScope::Sampler(_) | SequenceScope::CustomLosses(_) => next,
    }
}

/// Checks that a queue has space for a request of `bytes` bytes. An empty queue accepts a request
/// of any size: otherwise a request above the byte limit would be retried forever.
pub(crate) fn check_capacity(
    state: &ServerState,
    queue: &Queue,
    bytes: usize,
) -> Result<(), ServerError> {
    let limits = &state.options.limits;
    let (count, queued) = queue.size();
    if count >= limits.queued_requests {
        return Err(ServerError::busy(format!(
            "queue is full: {count} requests, the limit is {}",
            limits.queued_requests
        )));
    }
    if queued > 0 && queued.saturating_add(bytes) > limits.queued_bytes {
        return Err(ServerError::busy(format!(
            "queue is full: {queued} bytes are queued, this request needs {bytes} more, the limit \
             is {}",
            limits.queued_bytes
        )));
    }
    Ok(())
}

/// Continues with a request that is durable. The caller holds the store's lock, so that a
/// cancellation takes effect either before the request is enqueued or after.
fn proceed(
    state: &Arc<ServerState>,
    store: &mut Store,
    id: RequestId,
    bytes: usize,
    starts: Option<u32>,
    next: NextStep,
) {
    // The session may have ended while the request was being written. Its models and losses are
    // removed then, and nothing would remove what is added afterwards.
    if matches!(next, NextStep::Enqueue(Operation::Model { .. }) | NextStep::RegisterLoss(..))
        && let Some(session) = ended_session(store, &id)
    {
        let message = format!("session {session} has ended");
        let failed = Outcome::failed(FailureCategory::User, message);
        return record_outcome(state, store, &id, failed);
    }
    let operation = match next {
        NextStep::Enqueue(operation) => operation,
        NextStep::Complete(outcome) => return record_outcome(state, store, &id, outcome),
        NextStep::RegisterLoss(loss, program) => {
            store.losses.insert(loss.clone(), program);
            let outcome = Outcome::json(&CustomLossCreated { loss_id: loss });
            return record_outcome(state, store, &id, outcome);
        }
    };
    let queue = state.queue_for(store, &operation);
    let request = QueuedRequest { starts, ..QueuedRequest::new(id, bytes, operation) };
    if let Err(LateRequest(id)) = queue.push(request) {
        let message = "the request arrived too late: the model continued with a later seq_id while \
                       the request was being persisted";
        let failed = Outcome::failed(FailureCategory::User, message);
        record_outcome(state, store, &id, failed);
    }
}

/// Returns the session of a request if it has ended.
fn ended_session(store: &Store, id: &RequestId) -> Option<SessionId> {
    let session = &store.requests.get(id)?.row.session;
    let ended = store.sessions.get(session).is_none_or(|entry| entry.row.end.is_some());
    ended.then(|| session.clone())
}

/// Removes a request whose write failed, and the run that it would have created.
fn revoke(store: &mut Store, id: &RequestId) {
    let entry = store.requests.get(id);
    let created = entry.and_then(|entry| match (&entry.row.scope, entry.row.seq) {
        (SequenceScope::Model(model), CREATION_SEQ) => Some(model.clone()),
        _ => None,
    });
    if let Some(model) = created {
        store.runs.remove(&model);
    }
    store.revoke_request(id);
}

/// Waits until a request is durable and returns its acknowledgement.
///
/// # Errors
/// Returns [`ServerError::StorageUnavailable`] if the write failed.
pub(crate) async fn acknowledge(
    state: &ServerState,
    id: RequestId,
) -> Result<SubmitResponse, ServerError> {
    loop {
        let changed = {
            let store = state.store();
            let Some(entry) = store.requests.get(&id) else {
                let cause = "the disk may be full; the server's log has the cause";
                let error = std::io::Error::other(cause);
                return Err(ServerError::write_failed(&error));
            };
            if !matches!(entry.phase, RequestPhase::Writing { .. }) {
                return Ok(submit_response(&entry.row));
            }
            Arc::clone(&entry.changed).notified_owned()
        };
        changed.await;
    }
}

fn submit_response(row: &RequestRecord) -> SubmitResponse {
    let model_id = match &row.scope {
        SequenceScope::Model(model) => Some(model.clone()),
        SequenceScope::Sampler(_) | SequenceScope::CustomLosses(_) => None,
    };
    let sequence_id = |index| {
        SequenceId::from(match &row.scope {
            SequenceScope::Sampler(sampler) => format!("{sampler}:{}:{index}", row.seq),
            SequenceScope::Model(_) | SequenceScope::CustomLosses(_) => {
                format!("{}:{index}", row.id)
            }
        })
    };
    let sample_sequence_ids =
        (row.kind == RequestKind::Sample).then(|| (0..row.samples).map(sequence_id).collect());
    SubmitResponse::new(row.id.clone()).model_id(model_id).sample_sequence_ids(sample_sequence_ids)
}

/// Returns whether a stored request must wait for an upstream: the models and the protocol of an
/// upstream are not known until it responds, and a sample would fail because of it.
pub(crate) fn waits_for_upstream(state: &ServerState, row: &RequestRecord) -> bool {
    let SequenceScope::Sampler(sampler) = &row.scope else { return false };
    let sampler = state.store().samplers.get(sampler).map(|entry| entry.row.clone());
    let Some(sampler) = sampler else { return false };
    match sampler.folder.as_deref().map(Backend::of_weights) {
        Some(Backend::Engine) => false,
        Some(Backend::Upstream(name)) => {
            let upstream = state.backends.upstream(&name);
            upstream.is_some_and(|upstream| !upstream.status().was_reached)
        }
        None => {
            let mut upstreams = state.backends.upstreams();
            state.models.get(&sampler.base_model).is_none()
                && upstreams.any(|(_, upstream)| !upstream.status().was_reached)
        }
    }
}

/// Enqueues a request that was admitted before a restart.
///
/// # Errors
/// Fails if the request cannot be read because of a fault that may pass: it must not fail for good.
pub(crate) fn readmit(
    state: &Arc<ServerState>,
    unfinished: UnfinishedRequest,
) -> std::io::Result<()> {
    let UnfinishedRequest { row, starts } = unfinished;
    let reader = state.store().reader();
    let body = reader.payload(row.number);
    let bytes = body.as_ref().map_or(0, Bytes::len);
    let next = match body {
        Ok(_) if starts >= MAX_STARTS => {
            tracing::error!(
                target: log::REQUEST,
                request_id = %row.id,
                "a request fails because the process ended each time it was executed"
            );
            Err((FailureCategory::Server, KILLED_THE_PROCESS.to_owned()))
        }
        Ok(body) => {
            restore(state, &row, &body).map_err(|error| (FailureCategory::User, error.to_string()))
        }
        Err(error) if is_transient(&error) => return Err(error),
        Err(error) => {
            tracing::warn!(
                target: log::STORAGE,
                request_id = %row.id,
                %error,
                "cannot read the body of an unfinished request; the request fails"
            );
            let message = format!("cannot read the stored request: {error}");
            Err((FailureCategory::Server, message))
        }
    };
    let next = next.unwrap_or_else(|(category, message)| failure(&row, category, message));
    let bytes = bytes + next.extra_bytes();
    proceed(state, &mut state.store(), row.id.clone(), bytes, Some(starts), next);
    Ok(())
}

/// Fails a request that was admitted before a restart, without reading it.
pub(crate) fn drop_undone(state: &Arc<ServerState>, row: &RequestRecord) {
    let message = "the request was dropped: the server was started with --drop-undone=all";
    let next = failure(row, FailureCategory::Server, message.to_owned());
    proceed(state, &mut state.store(), row.id.clone(), 0, None, next);
}

/// Returns the step that fails a stored request. A request of a model fails in sequence, after the
/// requests before it.
fn failure(row: &RequestRecord, category: FailureCategory, message: String) -> NextStep {
    match &row.scope {
        SequenceScope::Model(model) => NextStep::Enqueue(Operation::Model {
            model: model.clone(),
            seq: row.seq,
            operation: ModelOperation::Fail(category, message),
        }),
        SequenceScope::Sampler(_) | SequenceScope::CustomLosses(_) => {
            NextStep::Complete(Outcome::failed(category, message))
        }
    }
}

/// Decodes and validates a stored request again.
fn restore(
    state: &Arc<ServerState>,
    row: &RequestRecord,
    body: &Bytes,
) -> Result<NextStep, ServerError> {
    match row.kind {
        RequestKind::CreateModel => training::enqueue_restored(row, ModelOperation::Create),
        RequestKind::ForwardBackward => training::restore_pass(state, row, body),
        RequestKind::OptimStep => training::restore_step(state, row, body),
        RequestKind::SaveWeights
        | RequestKind::SaveWeightsForSampler
        | RequestKind::SaveWeightsExternal => save::restore(row, body),
        RequestKind::LoadWeights => load::restore(&state.store(), row, body),
        RequestKind::CreateCustomLoss => loss::restore(state, row, body),
        RequestKind::Sample => sampling::restore(state, row, body),
    }
}

/// Registers the stored custom losses again after a restart.
pub(crate) fn restore_losses(state: &ServerState) {
    let mut store = state.store();
    let reader = store.reader();
    let stored: Vec<_> = store
        .requests
        .values()
        .filter(|entry| {
            entry.row.kind == RequestKind::CreateCustomLoss && entry.finished_at().is_some()
        })
        .map(|entry| Arc::clone(&entry.row))
        .collect();
    for row in stored {
        let body = reader.payload(row.number).map_err(|error| ServerError::read_failed(&error));
        match body.and_then(|body| loss::restore(state, &row, &body)) {
            Ok(NextStep::RegisterLoss(id, program)) => drop(store.losses.insert(id, program)),
            Ok(_) => {}
            Err(error) => {
                let loss_id = crate::store::loss_id(&row.session, row.seq);
                tracing::warn!(
                    target: log::STORAGE,
                    %loss_id,
                    %error,
                    "cannot restore a custom loss"
                );
            }
        }
    }
}

/// Checks that a session exists and is open.
pub(crate) fn require_session(store: &Store, id: &SessionId) -> Result<(), ServerError> {
    match store.sessions.get(id) {
        None => Err(ServerError::no_session(id)),
        Some(entry) if entry.row.end.is_some() => {
            Err(ServerError::forbidden(format!("session {id} has ended; create a new session")))
        }
        Some(_) => Ok(()),
    }
}

/// Returns a model that exists, is usable and belongs to an open session.
fn require_run(store: &Store, id: &ModelId) -> Result<RunRecord, ServerError> {
    let run = store.runs.get(id).map(|entry| entry.row.clone());
    let run = run.ok_or_else(|| ServerError::not_found(format!("model {id} does not exist")))?;
    if let Some(reason) = &run.closed {
        return Err(ServerError::invalid(format!("model {id} cannot be used: {reason}")));
    }
    require_session(store, &run.session)?;
    Ok(run)
}
