//! Admission of requests that save and load weights.

use std::sync::Arc;

use bytes::Bytes;
use tinkex_wire::codec::json;
use tinkex_wire::{
    ApiRequest as _, CheckpointKind, LoadWeights, Metadata, ModelId, OptimizerConfig, RequestId,
    SamplerId, SaveWeights, SaveWeightsExternal, SaveWeightsForSampler, Seq, TinkerPath,
};

use super::training::{ModelRequest, enqueue_restored, random_seed, validate_optimizer};
use super::{
    NextStep, Submission, digest, reject_seq_on_error, require_run, require_session, seq_in_use,
    submit,
};
use crate::error::ServerError;
use crate::operation::{CheckpointSave, ModelOperation, Operation};
use crate::state::ServerState;
use crate::store::{
    CheckpointRecord, LoraSettings, Record, RequestKind, RequestRecord, RunRecord, SequenceScope,
    Store, now,
};

/// Valid times to live in seconds: one hour to ten years.
const TTL_SECONDS: std::ops::RangeInclusive<u64> = 3_600..=315_360_000;

/// Admits saving a checkpoint for further training.
pub(crate) fn save_weights(
    state: &Arc<ServerState>,
    body: Bytes,
) -> Result<RequestId, ServerError> {
    let request: SaveWeights = json::decode(&body)?;
    let save = NamedSave {
        kind: RequestKind::SaveWeights,
        model: request.model_id,
        seq: request.seq_id,
        name: request.path,
        overwrite: request.overwrite,
        ttl_seconds: request.ttl_seconds,
        user_metadata: request.user_metadata,
    };
    save.admit(state, body)
}

/// Admits saving weights for sampling: as a checkpoint, or only for a new sampling session.
pub(crate) fn save_weights_for_sampler(
    state: &Arc<ServerState>,
    body: Bytes,
) -> Result<RequestId, ServerError> {
    let request: SaveWeightsForSampler = json::decode(&body)?;
    let (None, Some(sampler_seq)) = (&request.path, request.sampling_session_seq_id) else {
        let save = NamedSave {
            kind: RequestKind::SaveWeightsForSampler,
            model: request.model_id,
            seq: request.seq_id,
            name: request.path,
            overwrite: false,
            ttl_seconds: request.ttl_seconds,
            user_metadata: request.user_metadata,
        };
        return save.admit(state, body);
    };
    let (model, seq) = (request.model_id.clone(), request.seq_id.map(Seq::get));
    let admitted = submit_unnamed_save(state, request, sampler_seq, body);
    reject_seq_on_error(state, &model, seq, admitted)
}

/// Submits a save without a checkpoint path, for the sampling session with number `sampler_seq`.
fn submit_unnamed_save(
    state: &Arc<ServerState>,
    request: SaveWeightsForSampler,
    sampler_seq: u32,
    body: Bytes,
) -> Result<RequestId, ServerError> {
    let store = state.store();
    let run = require_run(&store, &request.model_id)?;
    let seq = request.seq_id.map(Seq::get);
    // A retry is the same request although it has a new number for the sampling session.
    let without_sampler_number = request.sampling_session_seq_id(None);
    let digest = digest::of_bytes(&json::encode(&without_sampler_number)?);
    let sampler = SamplerId::in_session(&run.session, sampler_seq);
    let scope = SequenceScope::Model(run.id.clone());
    let is_retry = seq.is_some_and(|seq| store.request_at(&scope, seq).is_some());
    if !is_retry && store.samplers.contains_key(&sampler) {
        return Err(ServerError::invalid(format!(
            "sampling_session_seq_id: sampling session {sampler} already exists"
        )));
    }
    let kind = RequestKind::SaveWeightsForSampler;
    let operation = ModelOperation::SaveForSampler(sampler);
    ModelRequest { kind, seq, digest, body, operation }.submit(state, store, &run)
}

/// Admits saving a checkpoint for download.
pub(crate) fn save_weights_external(
    state: &Arc<ServerState>,
    body: Bytes,
) -> Result<RequestId, ServerError> {
    let request: SaveWeightsExternal = json::decode(&body)?;
    if request.age_encryption_recipients.as_deref().is_some_and(|keys| !keys.is_empty()) {
        let rejected = Err(ServerError::invalid(
            "age_encryption_recipients: not supported; this server keeps the files unencrypted on \
             its own disk until they are downloaded",
        ));
        let seq = request.seq_id.map(Seq::get);
        return reject_seq_on_error(state, &request.model_id, seq, rejected);
    }
    let save = NamedSave {
        kind: RequestKind::SaveWeightsExternal,
        model: request.model_id,
        seq: request.seq_id,
        name: Some(request.path),
        overwrite: false,
        ttl_seconds: request.ttl_seconds,
        user_metadata: None,
    };
    save.admit(state, body)
}

/// A request that saves a checkpoint under a path.
struct NamedSave {
    kind: RequestKind,
    model: ModelId,
    seq: Option<Seq>,
    /// Name of the checkpoint; `None` uses the sequence number.
    name: Option<String>,
    overwrite: bool,
    ttl_seconds: Option<u64>,
    user_metadata: Option<Metadata>,
}

impl NamedSave {
    fn admit(self, state: &Arc<ServerState>, body: Bytes) -> Result<RequestId, ServerError> {
        let (model, seq) = (self.model.clone(), self.seq.map(Seq::get));
        reject_seq_on_error(state, &model, seq, self.submit(state, body))
    }

    fn submit(self, state: &Arc<ServerState>, body: Bytes) -> Result<RequestId, ServerError> {
        validate_ttl(self.ttl_seconds)?;
        let store = state.store();
        let run = require_run(&store, &self.model)?;
        let scope = SequenceScope::Model(run.id.clone());
        let seq = self.seq.map(Seq::get);
        let seq = seq.unwrap_or_else(|| super::next_seq(state, &store, &scope));
        let kind = self.kind;
        let save = self.into_save(seq)?;
        let is_retry = store.request_at(&scope, seq).is_some();
        if !is_retry && !save.overwrite && store.checkpoint(&save.path).is_some() {
            return Err(ServerError::invalid(format!(
                "checkpoint {} already exists; choose another name, or delete it first",
                save.path
            )));
        }
        let digest = digest::of_bytes(&body);
        let operation = ModelOperation::Save(Box::new(save));
        ModelRequest { kind, seq: Some(seq), digest, body, operation }.submit(state, store, &run)
    }

    fn into_save(self, seq: u64) -> Result<CheckpointSave, ServerError> {
        let kind = match self.kind {
            RequestKind::SaveWeights => CheckpointKind::Training,
            RequestKind::SaveWeightsForSampler => CheckpointKind::Sampler,
            _ => CheckpointKind::External,
        };
        let name = self.name.unwrap_or_else(|| format!("{seq:06}"));
        validate_name(&name)?;
        Ok(CheckpointSave {
            path: TinkerPath::new(self.model, kind, name)?,
            overwrite: self.overwrite,
            ttl_seconds: self.ttl_seconds,
            user_metadata: self.user_metadata,
        })
    }
}

/// Decodes a stored request to save weights. Returns the step that enqueues it again.
pub(super) fn restore_save(row: &RequestRecord, body: &Bytes) -> Result<NextStep, ServerError> {
    let SequenceScope::Model(model) = row.scope.clone() else {
        return Err(ServerError::Internal(
            "the stored request does not refer to a model".to_owned(),
        ));
    };
    let (kind, seq) = (row.kind, Some(Seq::new(row.seq)));
    let save = match kind {
        RequestKind::SaveWeights => {
            let request: SaveWeights = json::decode(body)?;
            let SaveWeights { path: name, ttl_seconds, overwrite, user_metadata, .. } = request;
            NamedSave { kind, model, seq, name, overwrite, ttl_seconds, user_metadata }
        }
        RequestKind::SaveWeightsForSampler => {
            let request: SaveWeightsForSampler = json::decode(body)?;
            if let (None, Some(n)) = (&request.path, request.sampling_session_seq_id) {
                let sampler = SamplerId::in_session(&row.session, n);
                return enqueue_restored(row, ModelOperation::SaveForSampler(sampler));
            }
            let SaveWeightsForSampler { path: name, ttl_seconds, user_metadata, .. } = request;
            NamedSave { kind, model, seq, name, overwrite: false, ttl_seconds, user_metadata }
        }
        _ => {
            let request: SaveWeightsExternal = json::decode(body)?;
            let (name, ttl_seconds) = (Some(request.path), request.ttl_seconds);
            NamedSave { kind, model, seq, name, overwrite: false, ttl_seconds, user_metadata: None }
        }
    };
    enqueue_restored(row, ModelOperation::Save(Box::new(save.into_save(row.seq)?)))
}

/// Admits loading a checkpoint: into an existing model, or as a new model.
pub(crate) fn load_weights(
    state: &Arc<ServerState>,
    body: Bytes,
) -> Result<RequestId, ServerError> {
    let request: LoadWeights = json::decode(&body)?;
    let seq = request.seq_id.map(Seq::get);
    let admitted = submit_load(state, &request, body);
    match &request.model_id {
        Some(model) => reject_seq_on_error(state, model, seq, admitted),
        None => admitted,
    }
}

fn submit_load(
    state: &Arc<ServerState>,
    request: &LoadWeights,
    body: Bytes,
) -> Result<RequestId, ServerError> {
    request.validate()?;
    let path: TinkerPath = request.path.parse()?;
    if path.kind() != CheckpointKind::Training {
        return Err(ServerError::invalid(format!(
            "path: {path} was saved for {} and cannot be trained further",
            if path.kind() == CheckpointKind::Sampler { "sampling" } else { "download" }
        )));
    }
    let store = state.store();
    let source = store.checkpoint(&path).map(|entry| entry.row.clone());
    let digest = digest::of_bytes(&body);
    if let Some(model) = &request.model_id {
        let run = require_run(&store, model)?;
        let scope = SequenceScope::Model(model.clone());
        let seq = request.seq_id.map(Seq::get);
        let seq = seq.unwrap_or_else(|| super::next_seq(state, &store, &scope));
        if seq != 1 {
            return Err(ServerError::invalid(format!(
                "LoadWeights is not permitted with seq_id {seq}: only the first request of a model \
                 may load"
            )));
        }
        let Some(source) = source else {
            return retried_load(&store, &scope, seq, &digest, &path);
        };
        check_compatible(request, &run, &source)?;
        let operation = load_operation(&source, request.optimizer, false);
        let kind = RequestKind::LoadWeights;
        let model_request = ModelRequest { kind, seq: Some(seq), digest, body, operation };
        return model_request.submit(state, store, &run);
    }
    let (Some(session), Some(n)) = (request.session_id.clone(), request.model_seq_id) else {
        return Err(ServerError::invalid(
            "expected either model_id, or session_id and model_seq_id",
        ));
    };
    require_session(&store, &session)?;
    let model = ModelId::in_session(&session, n);
    let scope = SequenceScope::Model(model.clone());
    let Some(source) = source else {
        return retried_load(&store, &scope, 0, &digest, &path);
    };
    let row = new_run(state, request, &source, &model)?;
    let operation = load_operation(&source, request.optimizer, true);
    let submission = Submission {
        kind: RequestKind::LoadWeights,
        session,
        scope,
        seq: Some(0),
        digest,
        seed: row.lora.seed,
        samples: 0,
        body,
        records: vec![Record::Run(row)],
        next: NextStep::Enqueue(Operation::Model { model, seq: 0, operation }),
    };
    submit(state, store, submission)
}

/// Returns the id of the original request if this is a retry of it: the checkpoint may have been
/// deleted after the original request was admitted. Otherwise returns the error for the missing
/// checkpoint `path`.
fn retried_load(
    store: &Store,
    scope: &SequenceScope,
    seq: u64,
    digest: &str,
    path: &TinkerPath,
) -> Result<RequestId, ServerError> {
    let original = store.request_at(scope, seq).ok_or_else(|| ServerError::no_checkpoint(path))?;
    let entry = store.requests.get(original).filter(|entry| entry.row.digest == digest);
    entry.map(|entry| entry.row.id.clone()).ok_or_else(|| seq_in_use(seq))
}

fn load_operation(source: &CheckpointRecord, optimizer: bool, creates: bool) -> ModelOperation {
    let (folder, path) = (source.folder.clone(), source.path.clone());
    ModelOperation::Load { folder, path, optimizer, creates }
}

/// Returns the run that loading a checkpoint creates.
fn new_run(
    state: &ServerState,
    request: &LoadWeights,
    source: &CheckpointRecord,
    model: &ModelId,
) -> Result<RunRecord, ServerError> {
    let base = request.base_model.clone().unwrap_or_else(|| source.base_model.clone());
    state.models.require(&base)?;
    if base != source.base_model {
        return Err(ServerError::invalid(format!(
            "base_model: {} was trained from {}, not from {base}",
            source.path, source.base_model
        )));
    }
    let optimizer = match &request.optimizer_config {
        Some(config) if request.optimizer && *config != source.optimizer => {
            return Err(ServerError::invalid(
                "optimizer_config: differs from the saved optimizer; omit it, or load without the \
                 optimizer state",
            ));
        }
        Some(config) => config.clone(),
        None if request.optimizer => source.optimizer.clone(),
        None => OptimizerConfig::default(),
    };
    validate_optimizer(&optimizer)?;
    Ok(RunRecord {
        id: model.clone(),
        session: request.session_id.clone().unwrap_or_else(|| "".into()),
        number: request.model_seq_id.unwrap_or_default(),
        base_model: base,
        lora: LoraSettings { seed: random_seed(), ..source.lora },
        optimizer,
        user_metadata: request.user_metadata.clone(),
        created_at: now(),
        closed: None,
        snapshot: None,
        last_seq: None,
        project_id: None,
    })
}

/// Checks that a checkpoint can be loaded into an existing model.
fn check_compatible(
    request: &LoadWeights,
    run: &RunRecord,
    source: &CheckpointRecord,
) -> Result<(), ServerError> {
    if source.base_model != run.base_model {
        return Err(ServerError::invalid(format!(
            "path: {} was trained from {}, the model from {}",
            source.path, source.base_model, run.base_model
        )));
    }
    let shape =
        |lora: &LoraSettings| (lora.rank, lora.train_attn, lora.train_mlp, lora.train_unembed);
    if shape(&source.lora) != shape(&run.lora) {
        return Err(ServerError::invalid(format!(
            "path: (rank, train_attn, train_mlp, train_unembed) is {:?} in {} and {:?} in the \
             model",
            shape(&source.lora),
            source.path,
            shape(&run.lora)
        )));
    }
    if request.optimizer && source.optimizer.kind != run.optimizer.kind {
        return Err(ServerError::invalid(format!(
            "optimizer: {} was saved with {}, the model uses {}",
            source.path, source.optimizer.kind, run.optimizer.kind
        )));
    }
    match &request.optimizer_config {
        Some(config) if *config != run.optimizer => Err(ServerError::invalid(
            "optimizer_config: differs from the optimizer that the model was created with",
        )),
        _ => Ok(()),
    }
}

/// Decodes a stored request to load weights and finds its checkpoint. Returns the step that
/// enqueues it again.
pub(super) fn restore_load(
    store: &Store,
    row: &RequestRecord,
    body: &Bytes,
) -> Result<NextStep, ServerError> {
    let request: LoadWeights = json::decode(body)?;
    let path: TinkerPath = request.path.parse()?;
    let source = store.checkpoint(&path).ok_or_else(|| ServerError::no_checkpoint(&path))?;
    enqueue_restored(row, load_operation(&source.row, request.optimizer, row.seq == 0))
}

/// Checks a checkpoint name, which becomes part of a path: letters, digits, `.`, `_` and `-`.
fn validate_name(name: &str) -> Result<(), ServerError> {
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
