//! Execution of operations on a model.

use std::path::Path;

use tinkex_backend::model_outcome::{
    already_saved, checkpoint_metadata, checkpoint_record, close_run, open_run, saved_outcome,
    usage_key,
};
use tinkex_backend::operation::{CheckpointLoad, CheckpointSave, ModelOperation};
use tinkex_backend::outcome::{Outcome, OutcomeHistory};
use tinkex_engine::optim::StepParams;
use tinkex_store::history::OperationHistory;
use tinkex_store::log;
use tinkex_store::store::{
    CheckpointRecord, FailureCategory, ModelRunRecord, Record, ResultKind, SamplerRecord,
    SnapshotRecord, UsageMeter,
};
use tinkex_store::weights::WeightsLocation;
use tinkex_wire::{
    CheckpointKind, GradientDiscarded, ModelCreated, ModelId, OptimStepOutput, RequestId,
    SamplerId, SamplerWeightsSaved, TinkerPath, WeightsLoaded,
};

use super::Worker;
use super::dropped_pass::check_not_dropped;
use super::model::{LiveModel, lora_config, optimizer_kind};
use crate::fault::{engine_failure, is_transient};
use crate::operation::{EngineOperation, EngineTraining, EngineWeights};

/// Time to live of an autosave in seconds: one day.
const AUTOSAVE_TTL_SECONDS: u64 = 24 * 3_600;

impl Worker {
    /// Executes an operation and returns its outcome.
    pub(super) fn run_operation(
        &mut self,
        id: &RequestId,
        model: &ModelId,
        seq: u64,
        operation: &EngineOperation,
    ) -> Outcome {
        let run = match open_run(&self.context.backend.store, model) {
            Ok(run) => run,
            Err(failed) => return failed,
        };
        let result = match operation {
            ModelOperation::Create => self.create(&run),
            ModelOperation::Train(EngineTraining::Pass(_)) => {
                unreachable!("a pass is executed in micro-batches")
            }
            ModelOperation::Train(EngineTraining::OptimStep(params)) => {
                match check_not_dropped(&run) {
                    Ok(()) => self.optim_step(&run, params),
                    Err(failed) => Err(self.fail_step(&run, failed)),
                }
            }
            ModelOperation::Train(EngineTraining::DiscardGradient) => self.discard_gradient(&run),
            ModelOperation::Save(save) => check_not_dropped(&run)
                .and_then(|()| self.save(id, &run, seq, CheckpointSave::clone(save))),
            ModelOperation::SaveForSampler(sampler) => {
                check_not_dropped(&run).and_then(|()| self.save_for_sampler(&run, sampler.clone()))
            }
            ModelOperation::Load(load) => self.load(&run, seq, load),
            ModelOperation::Fail(category, message) => {
                let failed = Outcome::failed(*category, message);
                Err(if seq == 0 { close_run(&run, failed) } else { failed })
            }
        };
        result.unwrap_or_else(|failed| failed)
    }

    fn create(&mut self, run: &ModelRunRecord) -> Result<Outcome, Outcome> {
        let trainer = self.engine(&run.base_model).and_then(|engine| {
            let trainer = engine.create_trainer(lora_config(&run.lora), optimizer_kind(run));
            trainer.map_err(engine_failure)
        });
        match trainer {
            Ok(trainer) => {
                self.insert(run, LiveModel::new(trainer));
                Ok(Outcome::json(&ModelCreated::new(run.id.clone())))
            }
            Err(failed) => Err(close_run(run, failed)),
        }
    }

    fn optim_step(
        &mut self,
        run: &ModelRunRecord,
        params: &StepParams,
    ) -> Result<Outcome, Outcome> {
        let model = self.model(run)?;
        let report = model.trainer.optim_step(params).map_err(engine_failure)?;
        model.gradients_pending = false;
        let metrics = [("unclipped_grad_l2:mean".to_owned(), report.grad_norm)];
        let mut recorded = metrics.to_vec();
        let rate = learning_rate(params);
        recorded.extend(rate.map(|rate| ("learning_rate".to_owned(), rate)));
        let history = OperationHistory { metrics: recorded, ..Default::default() };
        let output = OptimStepOutput::new(metrics.into_iter().collect());
        let outcome = Outcome::json(&output).with_model_changed();
        Ok(outcome.with_history(OutcomeHistory::Operation(history)))
    }

    fn discard_gradient(&mut self, run: &ModelRunRecord) -> Result<Outcome, Outcome> {
        let model = self.model(run)?;
        model.trainer.discard_gradient();
        model.gradients_pending = false;
        // Mark the model as changed so that a restore executes this request again. Otherwise the
        // restored model would keep the discarded gradients.
        let outcome = Outcome::json(&GradientDiscarded::default()).with_model_changed();
        Ok(if run.dropped_pass.is_some() { self.end_mark(&run.id, outcome) } else { outcome })
    }

    fn save(
        &mut self,
        id: &RequestId,
        run: &ModelRunRecord,
        seq: u64,
        save: CheckpointSave,
    ) -> Result<Outcome, Outcome> {
        let kind = save.path.kind();
        if let Some(outcome) = already_saved(&self.context.backend.store, id, &save)? {
            return Ok(outcome);
        }
        let (folder, size_bytes) = self.write_adapter(run, kind, save.path.name())?;
        let path = save.path.clone();
        let metadata = checkpoint_metadata(&save);
        let row = CheckpointRecord {
            request: Some(id.clone()),
            ..checkpoint_record(
                self.context.clock(),
                run,
                seq,
                save,
                WeightsLocation::Local(folder),
                size_bytes,
            )
        };
        let usage = vec![(usage_key(self.context.clock(), run, UsageMeter::Checkpoints), 1)];
        let outcome = saved_outcome(&path, size_bytes);
        let outcome = outcome.with_record(Record::Checkpoint(row));
        Ok(outcome.with_record(Record::Metadata(metadata)).with_usage(usage))
    }

    /// Saves the state of a model that has changed since its last checkpoint, before its session
    /// expires. Returns false if the state could not be saved.
    pub(super) fn autosave(&mut self, model: &ModelId) -> bool {
        let (run, seq) = {
            let store = self.context.store();
            let Some(entry) = store.runs.get(model) else { return true };
            let snapshot = entry.row.snapshot.as_ref().map(|snapshot| snapshot.seq);
            let Some(seq) = entry.changes.keys().next_back().copied().max(snapshot) else {
                return true;
            };
            let checkpoints = store.checkpoints_of(model);
            let mut saved =
                checkpoints.iter().filter(|row| row.path.kind() == CheckpointKind::Training);
            if entry.row.closed.is_some() || saved.any(|row| row.seq.is_some_and(|s| s >= seq)) {
                return true;
            }
            (entry.row.clone(), seq)
        };
        if run.upstream.is_some() {
            self.keep_remote_snapshot(&run);
            return true;
        }
        let name = format!("autosave-{seq}");
        let Ok(path) = TinkerPath::new(model.clone(), CheckpointKind::Training, &*name) else {
            return true;
        };
        match self.write_adapter(&run, CheckpointKind::Training, &name) {
            Ok((folder, size)) => {
                tracing::info!(
                    target: log::MODEL,
                    model_id = %model,
                    session_id = %run.session,
                    checkpoint = %path,
                    "saved unsaved state of an expired session"
                );
                let ttl_seconds = Some(AUTOSAVE_TTL_SECONDS);
                let save =
                    CheckpointSave { path, overwrite: true, ttl_seconds, user_metadata: None };
                let weights = WeightsLocation::Local(folder);
                let row = checkpoint_record(self.context.clock(), &run, seq, save, weights, size);
                self.context.store().put_required(Record::Checkpoint(row));
                true
            }
            Err(failed) => {
                if let ResultKind::Failed { error, .. } = &failed.result {
                    tracing::warn!(
                        target: log::MODEL,
                        model_id = %model,
                        session_id = %run.session,
                        error,
                        "cannot save the model of a silent session"
                    );
                }
                false
            }
        }
    }

    /// Creates a checkpoint from the last recovery checkpoint of a run on its upstream. The run
    /// still refers to the recovery checkpoint, because the session stays open if its end cannot be
    /// written.
    fn keep_remote_snapshot(&self, run: &ModelRunRecord) {
        let Some(snapshot) = run.snapshot.clone() else { return };
        let name = format!("autosave-{}", snapshot.seq);
        let Ok(path) = TinkerPath::new(run.id.clone(), CheckpointKind::Training, &*name) else {
            return;
        };
        let ttl_seconds = Some(AUTOSAVE_TTL_SECONDS);
        let save = CheckpointSave { path, overwrite: true, ttl_seconds, user_metadata: None };
        let SnapshotRecord { seq, weights } = snapshot;
        let row = checkpoint_record(self.context.clock(), run, seq, save, weights, 0);
        self.context.store().put_required(Record::Checkpoint(row));
    }

    /// Writes an adapter to a new folder and returns the folder's name and size in bytes. The
    /// expiry task keeps the folder until a record refers to it, and removes it after a failure.
    fn write_adapter(
        &mut self,
        run: &ModelRunRecord,
        kind: CheckpointKind,
        name: &str,
    ) -> Result<(String, u64), Outcome> {
        let run_name = folder_name(run);
        let unique = self.context.backend.random.id();
        let folder = format!("{run_name}-{}-{name}-{}", kind.segment(), &unique[..8]);
        let path = self.context.weights_dir.join(&folder);
        // Restore the model before registering the folder: a failed restore must not leave an entry
        // in `unfinished_folders`.
        self.model(run)?;
        self.context.store().unfinished_folders.insert(folder.clone());
        let model = self.model(run)?;
        let written = match kind {
            CheckpointKind::Training => model.trainer.save_with_optimizer(&path),
            // Only a training checkpoint needs the state of the optimizer.
            _ => model.trainer.save(&path),
        };
        let size = written.map_err(engine_failure).and_then(|()| folder_size(&path));
        let sealed = size.and_then(|size| {
            let sealed = self.context.seal_folder(&folder).map_err(|error| write_failure(&error));
            Ok((sealed?, size))
        });
        if sealed.is_err() {
            self.context.store().unfinished_folders.remove(&folder);
        }
        sealed
    }

    fn save_for_sampler(
        &mut self,
        run: &ModelRunRecord,
        id: SamplerId,
    ) -> Result<Outcome, Outcome> {
        let engine = self.engine(&run.base_model)?;
        let weights = engine.snapshot(&self.model(run)?.trainer);
        // Write the adapter last: nothing may fail between the save and the outcome, whose record
        // refers to the folder.
        let (folder, size) = self.write_adapter(run, CheckpointKind::Sampler, "ephemeral")?;
        let key =
            EngineWeights { base_model: run.base_model.clone(), folder: Some(folder.clone()) };
        self.cache_weights(&key, weights, size);
        let sampler = Record::Sampler(SamplerRecord {
            id: id.clone(),
            session: run.session.clone(),
            base_model: run.base_model.clone(),
            model_path: None,
            weights: Some(WeightsLocation::Local(folder)),
            run: Some(run.id.clone()),
            clients: 1,
            end: None,
            weights_released: false,
        });
        let saved = SamplerWeightsSaved::ephemeral(id);
        Ok(Outcome::json(&saved).with_record(sampler))
    }

    /// Replaces a model by a checkpoint. `creates` is true if the load creates the model.
    fn load(
        &mut self,
        run: &ModelRunRecord,
        seq: u64,
        load: &CheckpointLoad<String>,
    ) -> Result<Outcome, Outcome> {
        let CheckpointLoad { weights, path, optimizer, creates } = load;
        let loaded = self.engine(&run.base_model).and_then(|engine| {
            let folder = self.context.verified_folder(weights)?;
            let kind = optimizer_kind(run);
            let trainer = if *optimizer {
                engine.resume_trainer(&folder, kind)
            } else {
                engine.load_trainer(&folder, kind)
            };
            trainer.map_err(engine_failure)
        });
        let trainer = match loaded {
            Ok(trainer) => trainer,
            Err(failed) if *creates => return Err(close_run(run, failed)),
            Err(failed) => return Err(failed),
        };
        let previous = self.insert(run, LiveModel::new(trainer));
        // Take a snapshot immediately: the checkpoint may be deleted before the next restart.
        if let Err(error) = self.try_snapshot(&run.id, seq) {
            self.models.remove(&run.id);
            self.models.extend(previous.map(|model| (run.id.clone(), model)));
            let failed = engine_failure(error);
            // Without a snapshot, later requests would train a new adapter instead.
            return Err(if *creates { close_run(run, failed) } else { failed });
        }
        let loaded = WeightsLoaded::default().path(Some(path.to_string()));
        let outcome = Outcome::json(&loaded.model_id(Some(run.id.clone())));
        Ok(if run.dropped_pass.is_some() { self.end_mark(&run.id, outcome) } else { outcome })
    }
}

/// Returns the learning rate of an optimizer step; `None` for an unknown optimizer.
fn learning_rate(params: &StepParams) -> Option<f64> {
    match params {
        StepParams::Adam(adam) => Some(adam.learning_rate),
        StepParams::Dimuon(dimuon) => Some(dimuon.learning_rate),
        _ => None,
    }
}

/// Returns the run's id as part of a folder name. All characters except letters, digits and dashes
/// are replaced, because clients choose part of the id.
fn folder_name(run: &ModelRunRecord) -> String {
    run.id.as_str().replace(|c: char| !c.is_ascii_alphanumeric() && c != '-', "_")
}

/// Returns the outcome of a request whose files could not be written.
fn write_failure(error: &std::io::Error) -> Outcome {
    let message = format!("cannot write the checkpoint folder: {error}");
    Outcome::failed(FailureCategory::Server, message).with_transient(is_transient(error))
}

/// Returns the total size of the files in a folder, in bytes.
pub(super) fn folder_size(folder: &Path) -> Result<u64, Outcome> {
    let measure = || -> std::io::Result<u64> {
        let mut size = 0;
        for entry in std::fs::read_dir(folder)? {
            size += entry?.metadata()?.len();
        }
        Ok(size)
    };
    measure().map_err(|error| {
        let message = format!("cannot read the checkpoint folder: {error}");
        Outcome::failed(FailureCategory::Server, message).with_transient(is_transient(&error))
    })
}
