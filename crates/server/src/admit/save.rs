//! Admission of requests that save weights.
//!
//! Three endpoints save weights. Their requests all decode to a [`SaveRequest`], whose target is a
//! checkpoint or a new sampling session:
//!
//! | Request | Target |
//! |---|---|
//! | `save_weights` | checkpoint for further training |
//! | `save_weights_for_sampler` | checkpoint for sampling |
//! | `save_weights_for_sampler` with `sampling_session_seq_id` and no `path` | sampling session |
//! | `save_weights_external` | checkpoint for download |
//!
//! New requests and requests that are restored after a restart become operations in the same way:
//! [`SaveRequest::decode`], then [`SaveRequest::operation`], which checks the name of a checkpoint.
//! The other fields, and conflicts with existing objects, are checked for new requests only.

use std::ops::RangeInclusive;
use std::sync::Arc;

use bytes::Bytes;
use tinkex_backend::operation::{CheckpointSave, CommonOperation};
use tinkex_store::error::ServerError;
use tinkex_store::store::{AdmittedRequest, RequestKind, RequestRecord, SequenceScope, Store};
use tinkex_store::user::Principal;
use tinkex_wire::codec::json;
use tinkex_wire::{
    CheckpointKind, Metadata, ModelId, SamplerId, SaveWeights, SaveWeightsExternal,
    SaveWeightsForSampler, Seq, SessionId, TinkerPath,
};

use super::readmit::restore_common;
use super::training::ModelRequest;
use super::{Admission, NextStep, digest, next_seq, reject_seq_on_error, require_run};
use crate::operation::RunOperation;

/// Valid times to live in seconds: one hour to ten years.
const TTL_SECONDS: RangeInclusive<u64> = 3_600..=315_360_000;

/// Admits saving a checkpoint for further training.
pub(crate) fn save_weights(
    admission: &Arc<Admission>,
    principal: &Principal,
    body: Bytes,
) -> Result<AdmittedRequest, ServerError> {
    admit(admission, principal, RequestKind::SaveWeights, body)
}

/// Admits saving weights for sampling: as a checkpoint, or only for a new sampling session.
pub(crate) fn save_weights_for_sampler(
    admission: &Arc<Admission>,
    principal: &Principal,
    body: Bytes,
) -> Result<AdmittedRequest, ServerError> {
    admit(admission, principal, RequestKind::SaveWeightsForSampler, body)
}

/// Admits saving a checkpoint for download.
pub(crate) fn save_weights_external(
    admission: &Arc<Admission>,
    principal: &Principal,
    body: Bytes,
) -> Result<AdmittedRequest, ServerError> {
    admit(admission, principal, RequestKind::SaveWeightsExternal, body)
}

fn admit(
    admission: &Arc<Admission>,
    principal: &Principal,
    kind: RequestKind,
    body: Bytes,
) -> Result<AdmittedRequest, ServerError> {
    let request = SaveRequest::decode(kind, &body)?;
    let model = request.model.clone();
    let seq = request.seq;
    let admitted = request.submit(admission, principal, kind, body);
    reject_seq_on_error(admission, principal, &model, seq, admitted)
}

/// Decodes a stored request to save weights. Returns the step that enqueues the request again.
pub(super) fn restore(
    admission: &Admission,
    row: &RequestRecord,
    body: &Bytes,
) -> Result<NextStep, ServerError> {
    let request = SaveRequest::decode(row.kind, body)?;
    restore_common(admission, row, request.operation(&row.session, row.seq)?)
}

/// A request to save the weights of a model.
struct SaveRequest {
    model: ModelId,
    /// Sequence number; `None` assigns the next free number.
    seq: Option<u64>,
    target: SaveTarget,
}

/// Object that a save creates.
enum SaveTarget {
    Checkpoint(CheckpointTarget),
    SamplingSession(SamplingSessionTarget),
}

/// A checkpoint to create.
struct CheckpointTarget {
    kind: CheckpointKind,
    /// Name of the checkpoint, which is the last part of its path; `None` uses the sequence number
    /// of the request.
    name: Option<String>,
    overwrite: bool,
    ttl_seconds: Option<u64>,
    user_metadata: Option<Metadata>,
    /// Whether the client asks for encrypted files.
    encrypted: bool,
}

/// A sampling session to create without a checkpoint.
struct SamplingSessionTarget {
    /// Number of the sampling session in the session of the model.
    number: u32,
    /// The request without `number`, for its digest. A retry has the same digest although it may
    /// have another number.
    unnumbered: Box<SaveWeightsForSampler>,
}

impl SaveRequest {
    /// Decodes a request of one of the three kinds that save weights.
    fn decode(kind: RequestKind, body: &Bytes) -> Result<Self, ServerError> {
        match kind {
            RequestKind::SaveWeights => Ok(json::decode::<SaveWeights>(body)?.into()),
            RequestKind::SaveWeightsForSampler => {
                Ok(json::decode::<SaveWeightsForSampler>(body)?.into())
            }
            RequestKind::SaveWeightsExternal => {
                Ok(json::decode::<SaveWeightsExternal>(body)?.into())
            }
            other => Err(ServerError::Internal(format!("{other:?} does not save weights"))),
        }
    }

    /// Returns the operation that executes the request under sequence number `seq`. `session` is
    /// the session of the model.
    fn operation(&self, session: &SessionId, seq: u64) -> Result<CommonOperation, ServerError> {
        match &self.target {
            SaveTarget::Checkpoint(target) => {
                let save = target.checkpoint_save(&self.model, seq)?;
                Ok(CommonOperation::Save(Box::new(save)))
            }
            SaveTarget::SamplingSession(target) => {
                let sampler = SamplerId::in_session(session, target.number);
                Ok(CommonOperation::SaveForSampler(sampler))
            }
        }
    }

    /// Validates a new request and submits it.
    fn submit(
        self,
        admission: &Arc<Admission>,
        principal: &Principal,
        kind: RequestKind,
        body: Bytes,
    ) -> Result<AdmittedRequest, ServerError> {
        if let SaveTarget::Checkpoint(target) = &self.target {
            target.validate()?;
        }
        let store = admission.store_of(principal);
        let run = require_run(&store, &self.model)?;
        let store = store.into_inner();
        let scope = SequenceScope::Model(run.id.clone());
        let seq = self.seq.unwrap_or_else(|| next_seq(admission, &store, &scope));
        let operation = self.operation(&run.session, seq)?;
        // The target of a retry exists if the original request has already been executed.
        let is_retry = store.request_at(&scope, seq).is_some();
        if !is_retry {
            check_target_is_new(&store, &operation)?;
        }
        let digest = self.digest(&body)?;
        let operation = RunOperation::common(admission.backends.of_run(&run)?, operation);
        let tokens = 0;
        ModelRequest { kind, seq: Some(seq), digest, tokens, body, operation }
            .submit(admission, store, &run)
    }

    /// Returns the digest of the request, whose body is `body`. A retry has the same digest.
    fn digest(&self, body: &Bytes) -> Result<String, ServerError> {
        match &self.target {
            SaveTarget::Checkpoint(_) => Ok(digest::of_bytes(body)),
            SaveTarget::SamplingSession(target) => {
                Ok(digest::of_bytes(&json::encode(&target.unnumbered)?))
            }
        }
    }
}

impl From<SaveWeights> for SaveRequest {
    fn from(request: SaveWeights) -> Self {
        Self {
            model: request.model_id,
            seq: request.seq_id.map(Seq::get),
            target: SaveTarget::Checkpoint(CheckpointTarget {
                kind: CheckpointKind::Training,
                name: request.path,
                overwrite: request.overwrite,
                ttl_seconds: request.ttl_seconds,
                user_metadata: request.user_metadata,
                encrypted: false,
            }),
        }
    }
}

impl From<SaveWeightsForSampler> for SaveRequest {
    fn from(request: SaveWeightsForSampler) -> Self {
        let model = request.model_id.clone();
        let seq = request.seq_id.map(Seq::get);
        let target = match (&request.path, request.sampling_session_seq_id) {
            (None, Some(number)) => {
                let unnumbered = Box::new(request.sampling_session_seq_id(None));
                SaveTarget::SamplingSession(SamplingSessionTarget { number, unnumbered })
            }
            _ => SaveTarget::Checkpoint(CheckpointTarget {
                kind: CheckpointKind::Sampler,
                name: request.path,
                overwrite: false,
                ttl_seconds: request.ttl_seconds,
                user_metadata: request.user_metadata,
                encrypted: false,
            }),
        };
        Self { model, seq, target }
    }
}

impl From<SaveWeightsExternal> for SaveRequest {
    fn from(request: SaveWeightsExternal) -> Self {
        let recipients = request.age_encryption_recipients.unwrap_or_default();
        Self {
            model: request.model_id,
            seq: request.seq_id.map(Seq::get),
            target: SaveTarget::Checkpoint(CheckpointTarget {
                kind: CheckpointKind::External,
                name: Some(request.path),
                overwrite: false,
                ttl_seconds: request.ttl_seconds,
                user_metadata: None,
                encrypted: !recipients.is_empty(),
            }),
        }
    }
}

impl CheckpointTarget {
    /// Checks all fields except the name, which [`checkpoint_save`](Self::checkpoint_save) checks.
    fn validate(&self) -> Result<(), ServerError> {
        if self.encrypted {
            return Err(ServerError::invalid(
                "age_encryption_recipients: not supported; this server keeps the files \
                 unencrypted on its own disk until they are downloaded",
            ));
        }
        validate_ttl(self.ttl_seconds)
    }

    /// Returns the description of the checkpoint that the request with sequence number `seq` saves.
    /// Without a name, the checkpoint is named after `seq`, for example `000012`.
    fn checkpoint_save(&self, model: &ModelId, seq: u64) -> Result<CheckpointSave, ServerError> {
        let name = self.name.clone().unwrap_or_else(|| format!("{seq:06}"));
        validate_name(&name)?;
        Ok(CheckpointSave {
            path: TinkerPath::new(model.clone(), self.kind, name)?,
            overwrite: self.overwrite,
            ttl_seconds: self.ttl_seconds,
            user_metadata: self.user_metadata.clone(),
        })
    }
}

/// Checks that the checkpoint or sampling session that a save creates does not exist yet.
fn check_target_is_new(store: &Store, operation: &CommonOperation) -> Result<(), ServerError> {
    match operation {
        CommonOperation::Save(save)
            if !save.overwrite && store.checkpoint(&save.path).is_some() =>
        {
            Err(ServerError::Conflict(save.name_taken()))
        }
        CommonOperation::SaveForSampler(sampler) if store.samplers.contains_key(sampler) => {
            Err(ServerError::Conflict(format!(
                "sampling_session_seq_id: sampling session {sampler} already exists"
            )))
        }
        _ => Ok(()),
    }
}

/// Checks a checkpoint name, which becomes part of a path: letters, digits, `.`, `_` and `-`.
pub(crate) fn validate_name(name: &str) -> Result<(), ServerError> {
    let allowed = |c: u8| c.is_ascii_alphanumeric() || b"._-".contains(&c);
    if (1..=128).contains(&name.len()) && name.bytes().all(allowed) && !matches!(name, "." | "..") {
        return Ok(());
    }
    let truncated: String = name.chars().take(150).collect();
    Err(ServerError::invalid(format!(
        "path: invalid name {truncated:?}; expected 1 to 128 letters, digits, dots, dashes and \
         underscores"
    )))
}

/// Checks that a time to live is within [`TTL_SECONDS`].
pub(crate) fn validate_ttl(seconds: Option<u64>) -> Result<(), ServerError> {
    match seconds {
        Some(seconds) if !TTL_SECONDS.contains(&seconds) => Err(ServerError::invalid(format!(
            "ttl_seconds: {seconds} is outside of {} to {}",
            TTL_SECONDS.start(),
            TTL_SECONDS.end()
        ))),
        _ => Ok(()),
    }
}
