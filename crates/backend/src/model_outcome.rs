//! Outcomes of model operations that are the same for all backends.

use tinkex_store::clock::Clock;
use tinkex_store::durable::SharedStore;
use tinkex_store::record::{
    CheckpointRecord, FailureCategory, MetadataRecord, ModelRunRecord, Record, UsageKey, UsageMeter,
};
use tinkex_store::store::Store;
use tinkex_store::user::Account;
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
    let Some(existing) = store.checkpoint(&save.path) else {
        return within_quota(&store, &save.path).map(|()| None);
    };
    if existing.row.request.as_ref() == Some(id) {
        return Ok(Some(saved_outcome(&save.path, existing.row.size_bytes)));
    }
    if save.overwrite {
        return within_quota(&store, &save.path).map(|()| None);
    }
    Err(Outcome::failed(FailureCategory::Conflict, save.name_taken()))
}

/// Checks the storage quota of the owner of a run again: saves that were admitted before this one
/// may have spent it.
fn within_quota(store: &Store, path: &TinkerPath) -> Result<(), Outcome> {
    let owner = store.runs.get(path.run()).map(|run| &run.row.owner);
    let spent = owner.and_then(|owner| store.stored_bytes_spent(owner, 0));
    spent.map_or(Ok(()), |reason| Err(Outcome::failed(FailureCategory::User, reason)))
}

/// Adds a record that closes `run` to the failed outcome of the run's creation.
pub fn close_run(run: &ModelRunRecord, failed: Outcome) -> Outcome {
    let closed = Some("its creation failed".to_owned());
    failed.with_record(Record::Run(ModelRunRecord { closed, ..run.clone() }))
}

pub fn usage_key(clock: &Clock, run: &ModelRunRecord, meter: UsageMeter) -> UsageKey {
    let account = Account { owner: run.owner.clone(), session: run.session.clone() };
    UsageKey::new(clock.hour(), &account, &run.base_model, meter)
}

/// Returns the metadata to write with the record of a saved checkpoint. A checkpoint that replaces
/// another one does not keep its metadata.
#[must_use]
pub fn checkpoint_metadata(save: &CheckpointSave) -> MetadataRecord {
    MetadataRecord::new(&save.path, save.user_metadata.as_ref())
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
        metadata_bytes: checkpoint_metadata(&save).bytes(),
        path: save.path,
        weights,
        request: None,
        seq: Some(seq),
        created_at: clock.now(),
        expires_at: save.ttl_seconds.map(|ttl| clock.in_seconds(ttl)),
        size_bytes,
        public: false,
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
