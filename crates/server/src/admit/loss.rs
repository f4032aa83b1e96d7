//! Losses of the caller's own.

use std::sync::Arc;

use bytes::Bytes;
use tinkex_autodiff::LossProgram;
use tinkex_wire::codec::json;
use tinkex_wire::{CreateCustomLoss, RequestId};

use super::{Intake, Next, digest, session, submit};
use crate::error::ApiError;
use crate::state::Shared;
use crate::store::{Kind, Line, Request, loss_id};

const MOST_BYTES: usize = 1 << 20;

/// Takes a loss in: it is checked here, and there is nothing to run.
pub(crate) fn create_custom_loss(shared: &Arc<Shared>, body: Bytes) -> Result<RequestId, ApiError> {
    if body.len() > MOST_BYTES {
        return Err(ApiError::bad(format!(
            "graph: {} bytes are more than {MOST_BYTES}",
            body.len()
        )));
    }
    let call: CreateCustomLoss = json::decode(&body)?;
    let (session_id, seq) = (call.session_id.clone(), u64::from(call.custom_loss_seq_id));
    let program = Arc::new(program(call)?);
    let mut store = shared.store();
    session(&mut store, &session_id)?;
    let id = loss_id(&session_id, seq);
    let line = Line::Losses(session_id.clone());
    let intake = Intake {
        kind: Kind::CreateCustomLoss,
        session: session_id,
        line,
        seq: Some(seq),
        digest: digest::of_bytes(&body),
        seed: 0,
        samples: 0,
        body,
        facts: Vec::new(),
        next: Next::Learn(id, program),
    };
    submit(shared, store, intake)
}

pub(super) fn again(row: &Request, body: &Bytes) -> Result<Next, ApiError> {
    let call: CreateCustomLoss = json::decode(body)?;
    Ok(Next::Learn(loss_id(&row.session, row.seq), Arc::new(program(call)?)))
}

/// Validates the graph of an upload.
fn program(upload: CreateCustomLoss) -> Result<LossProgram, ApiError> {
    LossProgram::new(upload.inputs, upload.graph).map_err(|error| ApiError::bad(error.to_string()))
}
