//! Admission of custom losses.

use std::sync::Arc;

use bytes::Bytes;
use tinkex_autodiff::LossProgram;
use tinkex_store::error::ServerError;
use tinkex_store::store::{AdmittedRequest, RequestKind, RequestRecord, SequenceScope, loss_id};
use tinkex_store::user::Principal;
use tinkex_wire::CreateCustomLoss;
use tinkex_wire::codec::json;

use super::{Admission, NextStep, Submission, digest, submit};

/// Maximum size of an uploaded graph in bytes.
const MAX_GRAPH_BYTES: usize = 1 << 20;

/// Maximum memory of the evaluation of a custom loss for one datum, in bytes.
const MAX_EVALUATION_BYTES: usize = 1 << 30;

/// Admits a custom loss. The graph is validated at admission, so the worker has nothing to execute.
pub(crate) fn create_custom_loss(
    admission: &Arc<Admission>,
    principal: &Principal,
    body: Bytes,
) -> Result<AdmittedRequest, ServerError> {
    if body.len() > MAX_GRAPH_BYTES {
        return Err(ServerError::invalid(format!(
            "graph: {} bytes, the limit is {MAX_GRAPH_BYTES}",
            body.len()
        )));
    }
    let request: CreateCustomLoss = json::decode(&body)?;
    let session = request.session_id.clone();
    let seq = u64::from(request.custom_loss_seq_id);
    let program = Arc::new(compile(admission, request)?);
    let store = admission.store_of(principal);
    store.open_session(&session)?;
    let store = store.into_inner();
    let submission = Submission {
        kind: RequestKind::CreateCustomLoss,
        scope: SequenceScope::CustomLosses(session.clone()),
        seq: Some(seq),
        digest: digest::of_bytes(&body),
        seed: 0,
        samples: 0,
        tokens: 0,
        body,
        records: Vec::new(),
        next: NextStep::RegisterLoss(loss_id(&session, seq), program),
        session,
    };
    submit(admission, store, submission)
}

/// Compiles a stored custom loss. Returns the step that registers the loss again.
pub(super) fn restore(
    admission: &Admission,
    row: &RequestRecord,
    body: &Bytes,
) -> Result<NextStep, ServerError> {
    let request: CreateCustomLoss = json::decode(body)?;
    Ok(NextStep::RegisterLoss(
        loss_id(&row.session, row.seq),
        Arc::new(compile(admission, request)?),
    ))
}

/// Validates an uploaded graph and compiles it to a program. The evaluation of the program may use
/// as much memory as the activations of a training pass, but at most [`MAX_EVALUATION_BYTES`].
fn compile(admission: &Admission, upload: CreateCustomLoss) -> Result<LossProgram, ServerError> {
    let program = LossProgram::new(upload.inputs, upload.graph)
        .map_err(|error| ServerError::invalid(error.to_string()))?;
    let limit = admission.limits.training_bytes.min(MAX_EVALUATION_BYTES);
    Ok(program.memory_limit(limit))
}
