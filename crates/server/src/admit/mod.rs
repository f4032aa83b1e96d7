//! Admission: validates a request, persists it and enqueues it, or rejects it without side effects.
//!
//! A request is acknowledged only once it is durable. A retry with the same sequence number and the
//! same body gets the same request id; a request with a used number and another body is rejected.

mod digest;
mod load;
mod loss;
mod loss_inputs;
mod readmit;
pub(crate) mod relay;
mod sampling;
mod save;
mod training;
mod user_limits;

use std::ops::Deref;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::MutexGuard;
use tinkex_autodiff::LossProgram;
use tinkex_backend::context::BackendContext;
use tinkex_backend::outcome::Outcome;
use tinkex_backend::queue::{LateRequest, RequestQueue};
use tinkex_store::error::ServerError;
use tinkex_store::log;
use tinkex_store::store::{
    AdmittedRequest, FailureCategory, ModelRunRecord, Record, RequestEntry, RequestKind,
    RequestPhase, RequestRecord, SequenceScope, Store, UserStore, WriteStatus, cost_of_records,
    cost_of_request,
};
use tinkex_store::user::Principal;
use tinkex_store::weights::WeightsLocation;
use tinkex_wire::{
    CustomLossCreated, LossId, ModelId, RequestId, SequenceId, SessionId, SubmitResponse,
};

pub(crate) use self::load::load_weights;
pub(crate) use self::loss::create_custom_loss;
pub(crate) use self::loss_inputs::IgnoredInputs;
pub(crate) use self::readmit::{
    fail_pending, readmit, restore_loss, stored_losses, waits_for_upstream,
};
pub(crate) use self::sampling::{
    EngineSample, check_tokens, engine_sample, sample, stop_at, stop_conditions,
};
pub(crate) use self::save::{
    save_weights, save_weights_external, save_weights_for_sampler, validate_name, validate_ttl,
};
pub(crate) use self::training::{
    create_model, discard_gradient, forward_backward, optim_step, random_seed,
};
use self::user_limits::{UserDemand, check_user_limits};
pub(crate) use self::user_limits::{check_generation, check_stored_bytes};
use crate::backends::Backends;
use crate::inference::Generations;
use crate::limits::ServerLimits;
use crate::models::{BaseModel, BaseModels};
use crate::operation::Operation;

/// State of the server that the admission of requests uses.
pub(crate) struct Admission {
    pub(crate) context: BackendContext,
    pub(crate) backends: Arc<Backends>,
    pub(crate) models: Arc<BaseModels>,
    /// Parent folder of all adapter folders.
    pub(crate) weights_dir: PathBuf,
    pub(crate) limits: ServerLimits,
    /// Value of [`ServerOptions::raw_logprobs`](crate::ServerOptions::raw_logprobs).
    pub(crate) raw_logprobs: bool,
    pub(crate) ignored_inputs: IgnoredInputs,
    /// Inference requests that are not finished.
    pub(crate) generations: Arc<Generations>,
}

impl Admission {
    pub(crate) fn store(&self) -> MutexGuard<'_, Store> {
        self.context.store.lock()
    }

    /// Locks the store, as a principal may see it.
    pub(crate) fn store_of<'a>(
        &'a self,
        principal: &'a Principal,
    ) -> UserStore<'a, MutexGuard<'a, Store>> {
        UserStore::new(self.store(), principal)
    }

    /// Returns a base model.
    ///
    /// # Errors
    /// The errors of [`BaseModels::require`]; [`ServerError::Unavailable`] if an upstream that may
    /// have the model has not responded yet.
    pub(crate) fn base_model(&self, name: &str) -> Result<Arc<BaseModel>, ServerError> {
        self.models.require(name).map_err(|error| match self.backends.unreached() {
            Some(upstream) => ServerError::Unavailable(format!(
                "base model {name:?} is not known yet: upstream {} has not responded since the \
                 start of the server",
                upstream.name
            )),
            None => error,
        })
    }
}

/// Sequence number of the request that creates a model.
const CREATION_SEQ: u64 = 0;

/// A validated request that is ready to be persisted.
struct Submission {
    kind: RequestKind,
    session: SessionId,
    scope: SequenceScope,
    /// Sequence number; `None` assigns the next free number.
    seq: Option<u64>,
    digest: String,
    seed: u64,
    /// Number of samples that a sampling request asks for; 0 for other kinds of requests.
    samples: u32,
    /// Number of tokens of a training pass; 0 for other kinds of requests.
    tokens: u64,
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
    /// Returns the memory that the request needs in addition to its body, in bytes.
    fn extra_bytes(&self) -> usize {
        match self {
            Self::Enqueue(operation) => operation.extra_bytes(),
            Self::Complete(_) | Self::RegisterLoss(..) => 0,
        }
    }

    /// Returns the queue whose limits apply to the request.
    fn queue<'a>(&'a self, backends: &'a Backends) -> &'a dyn RequestQueue {
        match self {
            Self::Enqueue(operation) => operation.queue(backends),
            Self::Complete(_) | Self::RegisterLoss(..) => backends.engine(),
        }
    }

    /// Returns the location of the weights that the request loads, if it loads any.
    fn source(&self) -> Option<WeightsLocation> {
        match self {
            Self::Enqueue(operation) => operation.source(),
            Self::Complete(_) | Self::RegisterLoss(..) => None,
        }
    }
}

/// Queues a request for writing and returns its id. If the request is a retry, returns the id of
/// the original request. [`acknowledge`] waits until the request is durable.
///
/// # Errors
/// - [`ServerError::Invalid`] if the sequence number is out of range, was used for another request,
///   or is lower than the next number that the model expects.
/// - [`ServerError::Conflict`] if the model that the request creates already exists.
/// - [`ServerError::Busy`] if the queue is full, or if the user has no budget for records left.
fn submit(
    admission: &Arc<Admission>,
    mut store: MutexGuard<'_, Store>,
    submission: Submission,
) -> Result<AdmittedRequest, ServerError> {
    let Submission {
        kind,
        session,
        scope,
        seq,
        digest,
        seed,
        samples,
        tokens,
        body,
        records,
        next,
    } = submission;
    let seq = match seq {
        Some(seq) => seq,
        None => next_seq(admission, &store, &scope),
    };
    validate_seq(&scope, seq)?;
    if let Some(original) = find_original(&store, &scope, seq, &digest)? {
        return Ok(original);
    }
    if let SequenceScope::Model(model) = &scope {
        let expected = expected_seq(admission, &store, model);
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
    check_capacity(&admission.limits, next.queue(&admission.backends), bytes)?;
    let owner = store.account(&session).owner;
    let demand = UserDemand { kind, samples: samples.into(), tokens };
    check_user_limits(&store, &admission.generations, &owner, demand)?;
    store.reserve_records(&owner, cost_of_records(&records) + cost_of_request(kind, body.len()))?;
    let now = store.clock.now();
    store.touch(&session);
    if let SequenceScope::Model(model) = &scope
        && let Some(run) = store.runs.get_mut(model)
    {
        run.last_used = now;
    }
    let id = RequestId::from(admission.context.random.id());
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
        tokens,
        source: next.source(),
        at: now,
    };
    next.queue(&admission.backends).write_started(bytes);
    let admission = Arc::clone(admission);
    let callback_id = id.clone();
    let on_written = Box::new(move |written: std::io::Result<()>| {
        next.queue(&admission.backends).write_finished(bytes);
        match written {
            Ok(()) => {
                let mut store = admission.store();
                let next = match store.confirm_request(&callback_id) {
                    WriteStatus::Active => next,
                    WriteStatus::Cancelled => NextStep::Complete(Outcome::cancelled()),
                };
                proceed(&admission, &mut store, callback_id, bytes, None, next);
            }
            Err(error) => {
                tracing::warn!(
                    target: log::STORAGE,
                    request_id = %callback_id,
                    %error,
                    "request was rejected because it cannot be persisted"
                );
                revoke(&mut admission.store(), &callback_id);
            }
        }
    });
    store.add_request(row, records, body, on_written);
    Ok(store.admitted(&id).expect("the store has the request that was added"))
}

/// Returns the request that was admitted with the same sequence number and digest: the new request
/// is a retry of that request. Returns `None` if the number is unused.
///
/// # Errors
/// Fails if the number was used for a request with another digest.
fn find_original(
    store: &Store,
    scope: &SequenceScope,
    seq: u64,
    digest: &str,
) -> Result<Option<AdmittedRequest>, ServerError> {
    let Some(id) = store.request_at(scope, seq) else { return Ok(None) };
    match store.admitted(id) {
        Some(original) if original.row.digest == digest => Ok(Some(original)),
        _ => Err(ServerError::invalid(format!(
            "seq_id {seq} was used for another request; use a new number for a new request"
        ))),
    }
}

/// Returns `admitted` unchanged. If `admitted` is a permanent rejection, marks the sequence number
/// as rejected, so that later requests of the model do not wait for this number.
fn reject_seq_on_error(
    admission: &Admission,
    principal: &Principal,
    model: &ModelId,
    seq: Option<u64>,
    admitted: Result<AdmittedRequest, ServerError>,
) -> Result<AdmittedRequest, ServerError> {
    if let (Err(error), Some(seq)) = (&admitted, seq)
        && error.is_permanent()
    {
        // Do not mark the number if an earlier request with this number was admitted: that request
        // must still run in sequence.
        let store = admission.store_of(principal);
        // A user must not be able to reject the numbers of another user's model.
        if store.own_run(model).is_err() {
            return admitted;
        }
        let store = store.into_inner();
        if store.request_at(&SequenceScope::Model(model.clone()), seq).is_none()
            && let Some(queue) = admission.backends.queue_of_model(&store, model)
        {
            queue.reject(model, seq);
        }
    }
    admitted
}

/// Checks that a sequence number is in the range of the protocol. Samples use all 64 bits, because
/// each clone has its own sequence range. `u64::MAX` is excluded because it has no successor.
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

/// Returns the next free sequence number in a scope.
fn next_seq(admission: &Admission, store: &Store, scope: &SequenceScope) -> u64 {
    let sequence = store.sequences.get(scope);
    let last = sequence.and_then(|sequence| sequence.keys().next_back().copied());
    let next = last.map_or(0, |last| last.saturating_add(1));
    match scope {
        SequenceScope::Model(model) => next.max(expected_seq(admission, store, model)),
        SequenceScope::Sampler(_) | SequenceScope::CustomLosses(_) => next,
    }
}

/// Returns the next sequence number that the queue of a model expects; 0 if the model has no queue.
fn expected_seq(admission: &Admission, store: &Store, model: &ModelId) -> u64 {
    let queue = admission.backends.queue_of_model(store, model);
    queue.map_or(0, |queue| queue.next_of(model))
}

/// Checks that a queue has space for a request of `bytes` bytes. An empty queue accepts a request
/// of any size: otherwise the client would retry a request above the byte limit forever.
pub(crate) fn check_capacity(
    limits: &ServerLimits,
    queue: &dyn RequestQueue,
    bytes: usize,
) -> Result<(), ServerError> {
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

/// Enqueues or completes a request that is durable. `starts` is the number of times that execution
/// of the request was started before a restart; `None` if the request is new or fails. The caller
/// holds the store's lock, so that a cancellation takes effect either before or after the request
/// is enqueued.
fn proceed(
    admission: &Arc<Admission>,
    store: &mut Store,
    id: RequestId,
    bytes: usize,
    starts: Option<u32>,
    next: NextStep,
) {
    // The session may have ended while the request was being written. The end of a session removes
    // its models and losses; nothing would remove a model or loss that is added afterwards.
    if matches!(next, NextStep::Enqueue(Operation::Model { .. }) | NextStep::RegisterLoss(..))
        && let Some(session) = ended_session(store, &id)
    {
        let message = format!("session {session} has ended");
        let failed = Outcome::failed(FailureCategory::User, message);
        return admission.context.outcomes.record(store, &id, failed);
    }
    let operation = match next {
        NextStep::Enqueue(operation) => operation,
        NextStep::Complete(outcome) => {
            return admission.context.outcomes.record(store, &id, outcome);
        }
        NextStep::RegisterLoss(loss, program) => {
            store.losses.insert(loss.clone(), program);
            let outcome = Outcome::json(&CustomLossCreated { loss_id: loss });
            return admission.context.outcomes.record(store, &id, outcome);
        }
    };
    let session = store.requests.get(&id).map(|request| request.row.session.clone());
    let account = store.account(&session.unwrap_or_else(|| SessionId::from("")));
    let enqueued = operation.enqueue(&admission.backends, id, account, bytes, starts);
    if let Err(LateRequest(id)) = enqueued {
        let message = "the request arrived too late: the model continued with a later seq_id while \
                       the request was being persisted";
        let failed = Outcome::failed(FailureCategory::User, message);
        admission.context.outcomes.record(store, &id, failed);
    }
}

/// Returns the session of a request if the session has ended.
fn ended_session(store: &Store, id: &RequestId) -> Option<SessionId> {
    let session = &store.requests.get(id)?.row.session;
    let ended = store.sessions.get(session).is_none_or(|entry| entry.row.end.is_some());
    ended.then(|| session.clone())
}

/// Removes a request whose write failed, and the run that the request would have created.
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
    admission: &Admission,
    admitted: AdmittedRequest,
) -> Result<SubmitResponse, ServerError> {
    loop {
        let changed = {
            let store = admission.store();
            // A request that is not in the store was executed and has expired, or was not written.
            match store.requests.get(&admitted.row.id) {
                Some(RequestEntry { phase: RequestPhase::Writing { .. }, changed, .. }) => {
                    Arc::clone(changed).notified_owned()
                }
                _ => break,
            }
        };
        changed.await;
    }
    if admitted.write_failed() {
        let cause = "the disk may be full; the server's log has the cause";
        return Err(ServerError::write_failed(&std::io::Error::other(cause)));
    }
    Ok(submit_response(&admitted.row))
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

/// Returns the run of a model that the principal may train.
///
/// # Errors
/// If the model does not exist for the principal, cannot be used, or belongs to a session that has
/// ended.
fn require_run<S: Deref<Target = Store>>(
    store: &UserStore<'_, S>,
    id: &ModelId,
) -> Result<ModelRunRecord, ServerError> {
    let run = match store.own_run(id) {
        Err(ServerError::NotFound(_)) => {
            Err(ServerError::not_found(format!("model {id} does not exist")))
        }
        run => run,
    };
    let run = run?.row.clone();
    if let Some(reason) = &run.closed {
        return Err(ServerError::invalid(format!("model {id} cannot be used: {reason}")));
    }
    store.open_session(&run.session)?;
    Ok(run)
}
