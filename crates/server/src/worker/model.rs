//! Models in training: restored from disk on demand, and saved as snapshots.
//!
//! A model's durable state is its last snapshot and the requests that modified it since; executing
//! these requests again gives bit-identical weights. A snapshot contains the accumulated gradients.
//! It is taken once the compute time since the last snapshot reaches
//! [`snapshot_after`](crate::ServerTimeouts::snapshot_after), and before a changed model is
//! unloaded.

use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;
use std::time::Duration;

use tinkex_backend::outcome::Outcome;
use tinkex_engine::optim::OptimizerKind;
use tinkex_engine::{Engine, LoraConfig, Trainer};
use tinkex_store::error::ServerError;
use tinkex_store::log;
use tinkex_store::store::{
    ChangeRecord, FailureCategory, LoraSettings, ModelRunRecord, Record, RequestKind,
    SnapshotRecord,
};
use tinkex_store::weights::WeightsLocation;
use tinkex_weights::Error as FileError;
use tinkex_wire::codec::json;
use tinkex_wire::{CheckpointKind, ForwardBackward, ModelId, OptimStep};
use tokio::time::Instant;

use super::Worker;
use super::engines::LoadedModel;
use super::pass::RowLimit;
use crate::fault::{engine_failure, is_transient};
use crate::operation::{PassObjective, TrainingPass, step_params};

/// A model in training that is in memory.
pub(super) struct LiveModel {
    pub(super) trainer: Trainer,
    /// Compute time since the last snapshot.
    since_snapshot: Duration,
    /// Whether gradients are pending. A snapshot without gradients is smaller.
    pub(super) gradients_pending: bool,
    /// Maximum number of rows of the next micro-batch.
    pub(super) row_limit: RowLimit,
    last_used: Instant,
}

impl LiveModel {
    pub(super) fn new(trainer: Trainer) -> Self {
        Self {
            trainer,
            since_snapshot: Duration::ZERO,
            gradients_pending: false,
            row_limit: RowLimit::default(),
            last_used: Instant::now(),
        }
    }

    /// Estimates the memory in bytes: adapter, packed copy, gradients, gradients of a running pass,
    /// and two optimizer moments.
    fn bytes(&self) -> usize {
        self.trainer.parameters() * 6 * size_of::<f32>()
    }
}

impl Worker {
    /// Returns a model, restoring it from disk if it is not in memory.
    pub(super) fn model(&mut self, run: &ModelRunRecord) -> Result<&mut LiveModel, Outcome> {
        if !self.models.contains_key(&run.id) {
            let model = self.restore(run)?;
            self.insert(run, model);
        }
        self.touch(&run.id);
        self.models.get_mut(&run.id).ok_or_else(|| {
            Outcome::failed(FailureCategory::Server, "internal error: the model was evicted")
        })
    }

    /// Resets the idle timers of a model and of its base model. Both must be reset together: a base
    /// model that is idle but still in use cannot be unloaded, and the worker would not sleep.
    pub(super) fn touch(&mut self, id: &ModelId) {
        let now = Instant::now();
        let base = self.context.store().runs.get(id).map(|entry| entry.row.base_model.clone());
        if let Some(base) = base.and_then(|base| self.engines.get_loaded(&base)) {
            base.last_used = now;
        }
        if let Some(model) = self.models.get_mut(id) {
            model.last_used = now;
        }
    }

    /// Adds a model and evicts the least recently used models beyond the memory limit. Returns the
    /// previous model of the run.
    pub(super) fn insert(&mut self, run: &ModelRunRecord, model: LiveModel) -> Option<LiveModel> {
        let previous = self.models.insert(run.id.clone(), model);
        let limit = self.context.limits.model_bytes;
        while self.models.values().map(LiveModel::bytes).sum::<usize>() > limit {
            let others = self.models.iter().filter(|(id, _)| **id != run.id);
            // A model with a running pass is needed again at its next turn.
            let oldest = others
                .min_by_key(|(id, model)| (self.passes.has(id), model.last_used))
                .map(|(id, _)| id.clone());
            let Some(oldest) = oldest else { break };
            self.save_if_changed(&oldest);
            self.models.remove(&oldest);
        }
        previous
    }

    /// Returns the engine of a base model, loading it if necessary.
    pub(super) fn engine(&mut self, base: &str) -> Result<Engine, Outcome> {
        let engine = self.loaded_model(base)?.engine.clone();
        self.context.metrics.loaded_models.set(self.engines.count());
        Ok(engine)
    }

    /// Returns a base model of the engine in memory, loading it if necessary.
    pub(super) fn loaded_model(&mut self, name: &str) -> Result<&mut LoadedModel, Outcome> {
        let failed = |error: ServerError| Outcome::failed(FailureCategory::User, error.to_string());
        let base = self.context.models.require_engine(name).map_err(failed)?;
        Ok(self.engines.get(name, &base)?)
    }

    /// Loads a model's snapshot and executes the requests that modified it since.
    fn restore(&mut self, run: &ModelRunRecord) -> Result<LiveModel, Outcome> {
        let engine = self.engine(&run.base_model)?;
        let (reader, changes) = {
            let store = self.context.store();
            let changes = store.runs.get(&run.id).map(|entry| entry.changes.clone());
            (store.reader(), changes.unwrap_or_default())
        };
        let kind = optimizer_kind(run);
        let mut changes = changes;
        let mut model = match &run.snapshot {
            Some(snapshot) => {
                let (folder, seq) = self.recovery_point(run, snapshot, &changes)?;
                changes = changes.split_off(&(seq + 1));
                let trainer = engine.resume_trainer(&folder, kind).map_err(engine_failure)?;
                let mut model = LiveModel::new(trainer);
                model.gradients_pending =
                    model.trainer.load_gradients(&folder).map_err(engine_failure)?;
                model
            }
            None => {
                let trainer = engine.create_trainer(lora_config(&run.lora), kind);
                LiveModel::new(trainer.map_err(engine_failure)?)
            }
        };
        let start = Instant::now();
        let requests = changes.len();
        let failed = |error: &dyn std::fmt::Display| {
            let message = format!("cannot restore model {}: {error}", run.id);
            Outcome::failed(FailureCategory::Server, message)
        };
        for ChangeRecord { kind, body } in changes.into_values() {
            let body = reader
                .payload(body)
                .map_err(|error| failed(&error).with_transient(is_transient(&error)))?;
            match kind {
                RequestKind::ForwardBackward => {
                    let pass = || {
                        let request = ForwardBackward::from_proto(&body)?;
                        let objective =
                            PassObjective::resolve(&self.context.store(), run, &request)?;
                        TrainingPass::new(&self.context.models, run, objective, &request)
                    };
                    let pass = pass().map_err(|error: ServerError| failed(&error))?;
                    let interrupt = || self.context.queue().is_stopping();
                    let output = pass.data.run(&mut model.trainer, pass.mode, &interrupt);
                    if output.map_err(engine_failure)?.is_none() {
                        // The request stays in the queue and is executed after the restart.
                        return Err(failed(&"the server is stopping").with_transient(true));
                    }
                    model.gradients_pending = true;
                }
                RequestKind::OptimStep => {
                    let params = || {
                        let request: OptimStep = json::decode(&body)?;
                        step_params(&request.params)
                    };
                    let params = params().map_err(|error: ServerError| failed(&error))?;
                    model.trainer.optim_step(&params).map_err(engine_failure)?;
                    model.gradients_pending = false;
                }
                RequestKind::DiscardGradient => {
                    model.trainer.discard_gradient();
                    model.gradients_pending = false;
                }
                // Other kinds never modify a model without taking a snapshot.
                _ => {}
            }
        }
        if requests > 0 {
            model.since_snapshot = start.elapsed();
            tracing::info!(
                target: log::MODEL,
                model_id = %run.id,
                session_id = %run.session,
                requests,
                seconds = start.elapsed().as_secs_f64(),
                "restored model by executing its requests since the last snapshot again"
            );
        }
        Ok(model)
    }

    /// Returns the folder from which a model is restored, and the sequence number of its state: the
    /// snapshot, or a checkpoint of a later state if the snapshot is damaged.
    fn recovery_point(
        &self,
        run: &ModelRunRecord,
        snapshot: &SnapshotRecord,
        changes: &BTreeMap<u64, ChangeRecord>,
    ) -> Result<(PathBuf, u64), Outcome> {
        let folder = snapshot.weights.local().ok_or_else(|| {
            let message = format!("the snapshot of model {} is on an upstream", run.id);
            Outcome::failed(FailureCategory::Server, message)
        })?;
        let damaged = match self.context.verified_folder(folder) {
            Ok(path) => return Ok((path, snapshot.seq)),
            Err(failed) if failed.transient => return Err(failed),
            Err(failed) => failed,
        };
        // A checkpoint has no gradients. It has the state of the model only if the last request
        // before it has applied or discarded the gradients.
        let is_complete = |seq: u64| {
            let last = changes.range(..=seq).next_back().map(|(_, change)| change.kind);
            matches!(last, Some(RequestKind::OptimStep | RequestKind::DiscardGradient))
        };
        let candidates: Vec<(String, u64)> = {
            let store = self.context.store();
            let rows = store.checkpoints_of(&run.id).into_iter().rev();
            let training = rows.filter(|row| row.path.kind() == CheckpointKind::Training);
            training
                .filter_map(|row| Some((row.weights.local()?.to_owned(), row.seq?)))
                .filter(|(_, seq)| *seq > snapshot.seq && is_complete(*seq))
                .collect()
        };
        for (folder, seq) in candidates {
            if let Ok(path) = self.context.verified_folder(&folder) {
                tracing::warn!(
                    target: log::STORAGE,
                    model_id = %run.id,
                    seq,
                    "the snapshot of a model is damaged; the model is restored from a checkpoint"
                );
                return Ok((path, seq));
            }
        }
        tracing::error!(
            target: log::STORAGE,
            model_id = %run.id,
            "the snapshot of a model is damaged, and no checkpoint has a later state"
        );
        Err(damaged)
    }

    /// Takes a snapshot after request `seq`, which took `elapsed`, if enough compute time has
    /// accumulated since the last snapshot.
    pub(super) fn snapshot_if_due(&mut self, id: &ModelId, seq: u64, elapsed: Duration) {
        let limit = self.context.timeouts.snapshot_after;
        let Some(model) = self.models.get_mut(id) else { return };
        model.since_snapshot += elapsed;
        if model.since_snapshot >= limit {
            self.snapshot(id, seq);
        }
    }

    /// Saves a model's state after request `seq` as its snapshot. Returns whether the save
    /// succeeded; logs the reason if it failed. After a failure, a restart executes the requests
    /// since the previous snapshot again.
    fn snapshot(&mut self, id: &ModelId, seq: u64) -> bool {
        let saved = self.try_snapshot(id, seq);
        if let Err(error) = &saved {
            tracing::warn!(
                target: log::MODEL,
                model_id = %id,
                %error,
                "cannot save a snapshot"
            );
        }
        saved.is_ok()
    }

    /// Saves a model's state after request `seq` as its snapshot. Does nothing if the model is not
    /// in memory.
    pub(super) fn try_snapshot(&mut self, id: &ModelId, seq: u64) -> tinkex_engine::Result<()> {
        let Some(model) = self.models.get_mut(id) else { return Ok(()) };
        let folder = format!("snapshot-{}", self.context.backend.random.id());
        self.context.store().unfinished_folders.insert(folder.clone());
        let path = self.context.weights_dir.join(&folder);
        let saved = if model.gradients_pending {
            model.trainer.save_with_gradients(&path)
        } else {
            model.trainer.save_with_optimizer(&path)
        };
        let saved = saved.and_then(|()| {
            let sealed = self.context.seal_folder(&folder);
            Ok(sealed.map_err(FileError::io("write", &path))?)
        });
        let mut store = self.context.store();
        let folder = match saved {
            Ok(sealed) => sealed,
            Err(error) => {
                store.unfinished_folders.remove(&folder);
                return Err(error);
            }
        };
        model.since_snapshot = Duration::ZERO;
        let row = store.runs.get(id).map(|entry| entry.row.clone());
        // Do not record the snapshot of an ended session: no later event would remove it.
        if let Some(row) = row.filter(|row| store.open_session(&row.session).is_some()) {
            let snapshot = Some(SnapshotRecord { seq, weights: WeightsLocation::Local(folder) });
            // Required: the records of later requests assume this snapshot.
            store.put_required(Record::Run(ModelRunRecord { snapshot, ..row }));
        } else {
            store.unfinished_folders.remove(&folder);
        }
        Ok(())
    }

    /// Takes a snapshot of every model that has changed since its last snapshot. Returns the number
    /// of snapshots.
    pub(super) fn save_all(&mut self) -> usize {
        let mut ids: Vec<ModelId> = self.models.keys().cloned().collect();
        ids.sort();
        ids.into_iter().filter(|id| self.save_if_changed(id)).count()
    }

    /// Takes a snapshot of a model if it has changed since its last snapshot. Returns whether it
    /// took a snapshot.
    fn save_if_changed(&mut self, id: &ModelId) -> bool {
        if !self.models.contains_key(id) {
            return false;
        }
        let last = {
            let store = self.context.store();
            store.runs.get(id).and_then(|run| run.changes.keys().next_back().copied())
        };
        last.is_some_and(|seq| self.snapshot(id, seq))
    }

    /// Unloads models and base models that were not used for the idle timeout, and the sampling
    /// weights of unloaded base models. They are loaded again on demand.
    pub(super) fn unload_idle(&mut self) {
        let idle = self.context.timeouts.idle_model;
        let mut unloaded: Vec<ModelId> = self
            .models
            .iter()
            .filter(|(id, model)| model.last_used.elapsed() >= idle && !self.passes.has(id))
            .map(|(id, _)| id.clone())
            .collect();
        // Sort the ids: the order of the records must not depend on the hash map.
        unloaded.sort();
        for id in unloaded {
            self.save_if_changed(&id);
            self.models.remove(&id);
        }
        self.drop_removed_weights();
        let store = self.context.store();
        let in_use: HashSet<String> = self
            .models
            .keys()
            .filter_map(|id| Some(store.runs.get(id)?.row.base_model.clone()))
            .collect();
        drop(store);
        for name in self.engines.unload_idle(idle, &in_use) {
            self.samples.weights.drop_base(&name);
            tracing::info!(target: log::MODEL, base_model = %name, "unloaded base model");
        }
        self.context.metrics.loaded_models.set(self.engines.count());
    }

    /// Returns the earliest time at which a model may become idle.
    pub(super) fn next_idle(&self) -> Option<Instant> {
        let models = self.models.values().map(|model| model.last_used);
        let first = models.chain(self.engines.last_used()).min()?;
        first.checked_add(self.context.timeouts.idle_model)
    }
}

pub(crate) fn lora_config(lora: &LoraSettings) -> LoraConfig {
    LoraConfig {
        rank: usize::try_from(lora.rank).unwrap_or(usize::MAX),
        seed: lora.seed,
        attention: lora.train_attn,
        mlp: lora.train_mlp,
        unembedding: lora.train_unembed,
        ..LoraConfig::default()
    }
}

pub(crate) fn optimizer_kind(run: &ModelRunRecord) -> OptimizerKind {
    match &*run.optimizer.kind {
        "dimuon" => OptimizerKind::Dimuon { rank: usize::try_from(run.lora.rank).unwrap_or(1) },
        _ => OptimizerKind::Adam,
    }
}
