//! Outcomes of model operations that are the same for all backends.

use tinkex_store::clock::Clock;
use tinkex_store::durable::SharedStore;
use tinkex_store::record::{
    CheckpointRecord, FailureCategory, ModelRunRecord, Record, UsageKey, UsageMeter,
};
use tinkex_store::weights::WeightsLocation;
use tinkex_wire::{
    CheckpointKind, ExternalWeightsSaved, ModelId, RequestId, SamplerWeightsSaved, TinkerPath,
    WeightsSaved,
};

use crate::operation::CheckpointSave;
use crate::outcome::Outcome;

/// Returns the run of a model that can execute operations.
///
/// # Errors
/// Returns the failed outcome to record if the run does not exist or cannot be used, or if the
/// run's session has ended.
pub fn open_run(store: &SharedStore, model: &ModelId) -> Result<ModelRunRecord, Outcome> {
    let failed = |message: String| Err(Outcome::failed(FailureCategory::User, message));
    let mut store = store.lock();
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

/// Returns the outcome of request `id` if the request saved its checkpoint before a crash that lost
/// its result. Returns `None` if the checkpoint must be saved now.
///
/// # Errors
/// Returns the failed outcome to record if the name of the checkpoint is taken.
pub fn already_saved(
    store: &SharedStore,
    id: &RequestId,
    save: &CheckpointSave,
) -> Result<Option<Outcome>, Outcome> {
    let store = store.lock();
    let Some(existing) = store.checkpoint(&save.path) else { return Ok(None) };
    if existing.row.request.as_ref() == Some(id) {
        return Ok(Some(saved_outcome(&save.path, existing.row.size_bytes)));
    }
    if save.overwrite {
        return Ok(None);
    }
    Err(Outcome::failed(FailureCategory::Conflict, save.name_taken()))
}

/// Adds a record that closes `run` to the failed outcome of the run's creation.
pub fn close_run(run: &ModelRunRecord, failed: Outcome) -> Outcome {
    let closed = Some("its creation failed".to_owned());
    failed.with_record(Record::Run(ModelRunRecord { closed, ..run.clone() }))
}

pub fn usage_key(clock: &Clock, run: &ModelRunRecord, meter: UsageMeter) -> UsageKey {
    UsageKey {
        hour: clock.hour(),
        session: run.session.clone(),
        base_model: run.base_model.clone(),
        meter,
    }
}

pub fn checkpoint_record(
    clock: &Clock,
    run: &ModelRunRecord,
    seq: u64,
    save: CheckpointSave,
    weights: WeightsLocation,
    size_bytes: u64,
) -> CheckpointRecord {
    CheckpointRecord {
        path: save.path,
        weights,
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

/// Returns the outcome of saving a checkpoint of `size` bytes; 0 if the size is not known. The type
/// of the response depends on the checkpoint's kind.
pub fn saved_outcome(path: &TinkerPath, size: u64) -> Outcome {
    let address = path.to_string();
    match path.kind() {
        CheckpointKind::Training => Outcome::json(&WeightsSaved::new(address)),
        CheckpointKind::Sampler => Outcome::json(&SamplerWeightsSaved::named(address)),
        // External weights.
        _ => {
            let mut saved = ExternalWeightsSaved::new(address, size);
            saved.size_bytes = (size > 0).then_some(size);
            Outcome::json(&saved)
        }
    }
}
