//! Outcomes of operations on models that all backends share.

use tinkex_wire::{
    CheckpointKind, ExternalWeightsSaved, ModelId, RequestId, SamplerWeightsSaved, TinkerPath,
    WeightsSaved,
};

use crate::clock::Clock;
use crate::operation::CheckpointSave;
use crate::outcome::Outcome;
use crate::state::ServerState;
use crate::store::{CheckpointRecord, FailureCategory, Record, RunRecord, UsageKey, UsageMeter};

/// Returns the run of a model that can execute operations.
///
/// # Errors
/// The failed outcome if the run does not exist, cannot be used, or its session has ended.
pub(crate) fn open_run(state: &ServerState, model: &ModelId) -> Result<RunRecord, Outcome> {
    let failed = |message: String| Err(Outcome::failed(FailureCategory::User, message));
    let mut store = state.store();
    let Some(run) = store.runs.get(model).map(|entry| entry.row.clone()) else {
        return failed(format!("model {model} no longer exists"));
    };
    if let Some(reason) = &run.closed {
        return failed(format!("model {model} cannot be used: {reason}"));
    }
    if store.open_session(&run.session).is_none() {
        return failed(format!("session {} has ended", run.session));
    }
    Ok(run)
}

/// Returns the outcome of a save that request `id` made before a crash that lost its result; `None`
/// if the checkpoint must be saved now.
///
/// # Errors
/// The failed outcome if the name of the checkpoint is taken.
pub(crate) fn already_saved(
    state: &ServerState,
    id: &RequestId,
    save: &CheckpointSave,
) -> Result<Option<Outcome>, Outcome> {
    let store = state.store();
    let Some(existing) = store.checkpoint(&save.path) else { return Ok(None) };
    if existing.row.request.as_ref() == Some(id) {
        return Ok(Some(saved_outcome(&save.path, existing.row.size_bytes)));
    }
    if save.overwrite {
        return Ok(None);
    }
    Err(Outcome::failed(FailureCategory::Conflict, save.name_taken()))
}

/// Adds a record to a failed outcome that closes the run, because its creation failed.
pub(crate) fn close_run(run: &RunRecord, failed: Outcome) -> Outcome {
    let closed = Some("its creation failed".to_owned());
    failed.with_record(Record::Run(RunRecord { closed, ..run.clone() }))
}

pub(crate) fn usage_key(clock: &Clock, run: &RunRecord, meter: UsageMeter) -> UsageKey {
    let (session, base_model) = (run.session.clone(), run.base_model.clone());
    UsageKey { hour: clock.hour(), session, base_model, meter }
}

pub(crate) fn checkpoint_record(
    clock: &Clock,
    run: &RunRecord,
    seq: u64,
    save: CheckpointSave,
    folder: String,
    size_bytes: u64,
) -> CheckpointRecord {
    CheckpointRecord {
        path: save.path,
        folder,
        request: None,
        seq: Some(seq),
        created_at: clock.now(),
        expires_at: save.ttl_seconds.map(|ttl| clock.in_seconds(ttl)),
        size_bytes,
        public: false,
        user_metadata: save.user_metadata,
        base_model: run.base_model.clone(),
        lora: run.lora,
        optimizer: run.optimizer.clone(),
    }
}

/// Returns the outcome of saving a checkpoint of `size` bytes, 0 if that is not known. The response
/// type depends on its kind.
pub(crate) fn saved_outcome(path: &TinkerPath, size: u64) -> Outcome {
    let address = path.to_string();
    match path.kind() {
        CheckpointKind::Training => Outcome::json(&WeightsSaved::new(address)),
        CheckpointKind::Sampler => Outcome::json(&SamplerWeightsSaved::named(address)),
        CheckpointKind::External => {
            let mut saved = ExternalWeightsSaved::new(address, size);
            saved.size_bytes = (size > 0).then_some(size);
            Outcome::json(&saved)
        }
    }
}
