//! Readmission: enqueues the requests that were admitted before a restart and have no outcome.

use std::sync::Arc;

use bytes::Bytes;
use tinkex_backend::operation::CommonOperation;
use tinkex_backend::outcome::Outcome;
use tinkex_store::error::ServerError;
use tinkex_store::log;
use tinkex_store::store::{
    FailureCategory, RequestKind, RequestRecord, SequenceScope, UnfinishedRequest,
};
use tinkex_store::weights::WeightsLocation;
use tinkex_wire::ModelId;

use super::{Admission, NextStep, load, loss, proceed, sampling, save, training};
use crate::backends::RunBackend;
use crate::fault::is_transient;
use crate::operation::{Operation, RunOperation};

/// Returns whether a stored request must wait for an upstream. The models and the protocol of an
/// upstream are not known until the upstream responds; a sample that is restored earlier would
/// fail.
pub(crate) fn waits_for_upstream(admission: &Admission, row: &RequestRecord) -> bool {
    let SequenceScope::Sampler(sampler) = &row.scope else { return false };
    let sampler = admission.store().samplers.get(sampler).map(|entry| entry.row.clone());
    let Some(sampler) = sampler else { return false };
    match &sampler.weights {
        Some(WeightsLocation::Local(_)) => false,
        Some(WeightsLocation::Upstream(remote)) => {
            let upstream = admission.backends.upstream(&remote.upstream);
            upstream.is_some_and(|upstream| !upstream.status().was_reached)
        }
        None => {
            admission.models.get(&sampler.base_model).is_none()
                && admission.backends.unreached().is_some()
        }
    }
}

/// Enqueues a request that was admitted before a restart.
///
/// # Errors
/// Fails if the request cannot be read because of a temporary fault. The caller must not record a
/// failed outcome for the request.
pub(crate) fn readmit(
    admission: &Arc<Admission>,
    unfinished: UnfinishedRequest,
) -> std::io::Result<()> {
    let UnfinishedRequest { row, starts } = unfinished;
    let reader = admission.store().reader();
    let body = reader.payload(row.number);
    let bytes = body.as_ref().map_or(0, Bytes::len);
    let next = match body {
        Ok(body) => restore(admission, &row, &body)
            .map_err(|error| (FailureCategory::User, error.to_string())),
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
    let next =
        next.unwrap_or_else(|(category, message)| failure(admission, &row, category, message));
    let bytes = bytes + next.extra_bytes();
    proceed(admission, &mut admission.store(), row.id.clone(), bytes, Some(starts), next);
    Ok(())
}

/// Fails a request that was admitted before a restart, without reading it.
pub(crate) fn fail_pending(admission: &Arc<Admission>, row: &RequestRecord) {
    let message = "the request was not executed: the server was started with --fail-pending=all";
    let next = failure(admission, row, FailureCategory::Server, message.to_owned());
    proceed(admission, &mut admission.store(), row.id.clone(), 0, None, next);
}

/// Returns the step that fails a stored request. A request of a model fails in sequence, after the
/// earlier requests of the model. If the upstream of the model is no longer configured, the request
/// fails at once.
fn failure(
    admission: &Admission,
    row: &RequestRecord,
    category: FailureCategory,
    message: String,
) -> NextStep {
    let backend = match &row.scope {
        SequenceScope::Model(model) => backend_of(admission, model).ok(),
        SequenceScope::Sampler(_) | SequenceScope::CustomLosses(_) => None,
    };
    match (&row.scope, backend) {
        (SequenceScope::Model(model), Some(backend)) => NextStep::Enqueue(Operation::Model {
            model: model.clone(),
            seq: row.seq,
            operation: RunOperation::common(backend, CommonOperation::Fail(category, message)),
        }),
        _ => NextStep::Complete(Outcome::failed(category, message)),
    }
}

/// Returns the backend of the run of a stored request.
///
/// # Errors
/// If the run no longer exists, or its upstream is no longer configured.
pub(super) fn backend_of(
    admission: &Admission,
    model: &ModelId,
) -> Result<RunBackend, ServerError> {
    let run = admission.store().runs.get(model).map(|entry| entry.row.clone());
    let run =
        run.ok_or_else(|| ServerError::not_found(format!("model {model} no longer exists")))?;
    admission.backends.of_run(&run)
}

/// Decodes and validates a stored request again. Returns the step that follows.
fn restore(
    admission: &Arc<Admission>,
    row: &RequestRecord,
    body: &Bytes,
) -> Result<NextStep, ServerError> {
    match row.kind {
        RequestKind::CreateModel => restore_common(admission, row, CommonOperation::Create),
        RequestKind::ForwardBackward => training::restore_pass(admission, row, body),
        RequestKind::OptimStep => training::restore_step(admission, row, body),
        RequestKind::DiscardGradient => training::restore_discard(admission, row),
        RequestKind::SaveWeights
        | RequestKind::SaveWeightsForSampler
        | RequestKind::SaveWeightsExternal => save::restore(admission, row, body),
        RequestKind::LoadWeights => load::restore(admission, row, body),
        RequestKind::CreateCustomLoss => loss::restore(admission, row, body),
        RequestKind::Sample => sampling::restore(admission, row, body),
    }
}

/// Returns the step that enqueues a stored request again, for an operation that has the same form
/// for all backends.
pub(super) fn restore_common(
    admission: &Admission,
    row: &RequestRecord,
    operation: CommonOperation,
) -> Result<NextStep, ServerError> {
    training::enqueue_restored(row, |model| {
        Ok(RunOperation::common(backend_of(admission, model)?, operation))
    })
}

/// Returns the finished requests that created custom losses.
pub(crate) fn stored_losses(admission: &Admission) -> Vec<Arc<RequestRecord>> {
    let store = admission.store();
    let losses = store.requests.values().filter(|entry| {
        entry.row.kind == RequestKind::CreateCustomLoss && entry.finished_at().is_some()
    });
    losses.map(|entry| Arc::clone(&entry.row)).collect()
}

/// Registers a stored custom loss again after a restart.
///
/// # Errors
/// Fails if the custom loss cannot be read because of a temporary fault.
pub(crate) fn restore_loss(admission: &Admission, row: &RequestRecord) -> std::io::Result<()> {
    let reader = admission.store().reader();
    let body = match reader.payload(row.number) {
        Err(error) if is_transient(&error) => return Err(error),
        body => body.map_err(|error| ServerError::read_failed(&error)),
    };
    match body.and_then(|body| loss::restore(admission, row, &body)) {
        Ok(NextStep::RegisterLoss(id, program)) => {
            admission.store().losses.insert(id, program);
        }
        Ok(_) => {}
        Err(error) => {
            let loss_id = tinkex_store::store::loss_id(&row.session, row.seq);
            tracing::warn!(target: log::STORAGE, %loss_id, %error, "cannot restore a custom loss");
        }
    }
    Ok(())
}
