//! Models in training: restored from disk on demand, and saved as snapshots.
//!
//! A model's durable state is its last snapshot and the requests that modified it since; executing
//! these requests again gives bit-identical weights. A snapshot is taken after an optimizer step,
//! when no gradients are pending, once the compute time since the last snapshot reaches
//! [`snapshot_after`](crate::ServerTimeouts::snapshot_after).

use std::collections::HashSet;
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
use tinkex_wire::codec::json;
use tinkex_wire::{ForwardBackward, ModelId, OptimStep};
use tokio::time::Instant;

use super::Worker;
use super::engines::LoadedModel;
use crate::fault::{engine_failure, is_transient};
use crate::operation::{PassObjective, TrainingPass, step_params};

/// A model in training that is in memory.
pub(super) struct LiveModel {
    pub(super) trainer: Trainer,
    /// Compute time since the last snapshot.
    since_snapshot: Duration,
    /// Whether gradients are pending. They are not part of a snapshot.
    pub(super) gradients_pending: bool,
    last_used: Instant,
}

impl LiveModel {
    pub(super) fn new(trainer: Trainer) -> Self {
        Self {
            trainer,
            since_snapshot: Duration::ZERO,
            gradients_pending: false,
            last_used: Instant::now(),
        }
    }

    /// Estimates the memory in bytes: adapter, packed copy, gradients, and two optimizer moments.
    fn bytes(&self) -> usize {
        self.trainer.parameters() * 5 * size_of::<f32>()
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
            let oldest = others.min_by_key(|(_, model)| model.last_used).map(|(id, _)| id.clone());
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
        let trainer = match &run.snapshot {
            Some(SnapshotRecord { weights, .. }) => {
                let folder = weights.local().ok_or_else(|| {
                    let message = format!("the snapshot of model {} is on an upstream", run.id);
                    Outcome::failed(FailureCategory::Server, message)
                })?;
                engine.resume_trainer(self.context.weights_dir.join(folder), kind)
            }
            None => engine.create_trainer(lora_config(&run.lora), kind),
        };
        let trainer = trainer.map_err(engine_failure)?;
        let mut model = LiveModel::new(trainer);
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
                    pass.data.run(&mut model.trainer, pass.mode).map_err(engine_failure)?;
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

    /// Takes a snapshot after request `seq`, which took `elapsed`, if enough compute time has
    /// accumulated since the last snapshot.
    pub(super) fn snapshot_if_due(&mut self, id: &ModelId, seq: u64, elapsed: Duration) {
        let limit = self.context.timeouts.snapshot_after;
        let Some(model) = self.models.get_mut(id) else { return };
        model.since_snapshot += elapsed;
        if model.since_snapshot >= limit && !model.gradients_pending {
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
        let saved = model.trainer.save_with_optimizer(&path);
        let mut store = self.context.store();
        if let Err(error) = saved {
            store.unfinished_folders.remove(&folder);
            return Err(error);
        }
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
        let ids: Vec<ModelId> = self.models.keys().cloned().collect();
        ids.into_iter().filter(|id| self.save_if_changed(id)).count()
    }

    /// Takes a snapshot of a model if it has changed since its last snapshot and has no pending
    /// gradients. Returns whether it took a snapshot.
    fn save_if_changed(&mut self, id: &ModelId) -> bool {
        if self.models.get(id).is_none_or(|model| model.gradients_pending) {
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
        self.models.retain(|_, model| model.last_used.elapsed() < idle);
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
