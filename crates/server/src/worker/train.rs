//! What is done with a model.

use std::path::Path;

use tinkex_engine::file::UnembeddingName;
use tinkex_wire::{
    CheckpointKind, ExternalWeightsSaved, ModelCreated, ModelId, OptimStepOutput, PassMode,
    RequestId, SamplerId, SamplerWeightsSaved, TinkerPath, WeightsLoaded, WeightsSaved,
};

use super::Worker;
use super::model::{Live, lora_config, optimizer_kind};
use crate::settle::Settled;
use crate::store::{Checkpoint, Fact, Fault, Run, Sampler, Use, What, now};
use crate::work::{Op, Pass, Save};

impl Worker {
    /// Does it, and says what came of it.
    pub(super) fn train(&mut self, id: &RequestId, model: &ModelId, seq: u64, op: Op) -> Settled {
        let run = self.shared.store().runs.get(model).map(|kept| kept.row.clone());
        let Some(run) = run else {
            return Settled::failed(Fault::User, format!("{model} is gone"));
        };
        if let Some(why) = &run.closed {
            return Settled::failed(Fault::User, format!("{model} cannot be used: {why}"));
        }
        if self.shared.store().open_session(&run.session).is_none() {
            return Settled::failed(Fault::User, format!("session {} is over", run.session));
        }
        let done = match op {
            Op::Create => self.create(&run),
            Op::Pass(pass) => self.pass(&run, &pass),
            Op::Step(params) => self.model(&run).and_then(|live| {
                let report = live.trainer.optim_step(&params)?;
                live.pending = false;
                let metrics = [("unclipped_grad_l2:mean".to_owned(), report.grad_norm)];
                let output = OptimStepOutput { metrics: Some(metrics.into_iter().collect()) };
                Ok(Settled::json(&output).changed())
            }),
            Op::Save(save) => self.save(id, &run, seq, *save),
            Op::SaveFor(sampler) => self.save_for(&run, sampler),
            Op::Load { folder, path, optimizer, creates } => {
                self.load(&run, seq, &folder, &path, optimizer, creates)
            }
            Op::Fail(fault, why) => {
                let failed = Settled::failed(fault, why);
                Err(if seq == 0 { closed(&run, failed) } else { failed })
            }
        };
        done.unwrap_or_else(|failed| failed)
    }

    fn create(&mut self, run: &Run) -> Result<Settled, Settled> {
        let made = self.engine(&run.base_model).and_then(|engine| {
            Ok(engine.create_trainer(lora_config(&run.lora), optimizer_kind(run))?)
        });
        match made {
            Ok(trainer) => {
                self.keep(run, Live::new(trainer));
                Ok(Settled::json(&ModelCreated { model_id: run.id.clone() }))
            }
            Err(failed) => Err(closed(run, failed)),
        }
    }

    fn pass(&mut self, run: &Run, pass: &Pass) -> Result<Settled, Settled> {
        let live = self.model(run)?;
        let output = pass.batch.run(&mut live.trainer, pass.mode)?;
        let backward = pass.mode == PassMode::ForwardBackward && !pass.batch.is_empty();
        live.pending |= backward;
        let settled = Settled::proto(pass.batch.output(output).to_proto());
        let tokens = u64::try_from(pass.batch.tokens()).unwrap_or(u64::MAX);
        self.shared.metrics.trained_tokens.add(tokens);
        let settled = settled.used(vec![(self.used(run, What::Training), tokens)]);
        Ok(if backward { settled.changed() } else { settled })
    }

    fn used(&self, run: &Run, what: What) -> Use {
        let (session, base_model) = (run.session.clone(), run.base_model.clone());
        Use { hour: now().div_euclid(3_600_000_000), session, base_model, what }
    }

    fn save(
        &mut self,
        id: &RequestId,
        run: &Run,
        seq: u64,
        save: Save,
    ) -> Result<Settled, Settled> {
        let kind = save.path.kind();
        {
            let store = self.shared.store();
            if let Some(before) = store.checkpoint(&save.path) {
                if before.row.request.as_ref() == Some(id) {
                    // Done before a crash, which came before it was said so.
                    return Ok(saved(&save.path, before.row.size_bytes));
                }
                if !save.overwrite {
                    let why = format!("{} exists already; choose another name", save.path);
                    return Err(Settled::failed(Fault::User, why));
                }
            }
        }
        let (folder, size_bytes) = self.write(run, kind, save.path.name())?;
        let path = save.path.clone();
        let row = Checkpoint {
            request: Some(id.clone()),
            ..checkpoint(run, seq, save, folder, size_bytes)
        };
        let used = vec![(self.used(run, What::Checkpoints), 1)];
        Ok(saved(&path, size_bytes).fact(Fact::Checkpoint(row)).used(used))
    }

    /// Saves what a model learned since it was last saved, before its session goes; whether nothing
    /// is left to save.
    pub(super) fn autosave(&mut self, model: &ModelId) -> bool {
        let (run, seq) = {
            let store = self.shared.store();
            let Some(kept) = store.runs.get(model) else { return true };
            let snapshot = kept.row.snapshot.as_ref().map(|snapshot| snapshot.seq);
            let Some(seq) = kept.since.keys().next_back().copied().max(snapshot) else {
                return true;
            };
            let saved = store.checkpoints_of(model);
            let mut saved = saved.iter().filter(|row| row.path.kind() == CheckpointKind::Training);
            if kept.row.closed.is_some() || saved.any(|row| row.seq.is_some_and(|s| s >= seq)) {
                return true;
            }
            (kept.row.clone(), seq)
        };
        let name = format!("autosave-{seq}");
        let Ok(path) = TinkerPath::new(model.clone(), CheckpointKind::Training, &*name) else {
            return true;
        };
        match self.write(&run, CheckpointKind::Training, &name) {
            Ok((folder, size)) => {
                let ttl_seconds = Some(24 * 3_600);
                let save = Save { path, overwrite: true, ttl_seconds, user_metadata: None };
                crate::log::job(format_args!("saved {}, its session is over", save.path));
                let row = checkpoint(&run, seq, save, folder, size);
                self.shared.store().owe(Fact::Checkpoint(row));
                true
            }
            Err(failed) => {
                crate::log::warn(format_args!("{model} could not be saved: {:?}", failed.answer));
                false
            }
        }
    }

    /// Writes an adapter into a folder of its own, which stays if a fact says so.
    fn write(
        &mut self,
        run: &Run,
        kind: CheckpointKind,
        name: &str,
    ) -> Result<(String, u64), Settled> {
        let run_name = folder_name(run);
        let unique = uuid::Uuid::new_v4().simple().to_string();
        let folder = format!("{run_name}-{}-{name}-{}", kind.segment(), &unique[..8]);
        let path = self.shared.folders.join(&folder);
        self.model(run)?;
        self.shared.store().making.insert(folder.clone());
        let live = self.model(run)?;
        let written = match kind {
            CheckpointKind::Training => {
                live.trainer.save_with_optimizer(&path, UnembeddingName::Peft)
            }
            CheckpointKind::Sampler => live.trainer.save(&path, UnembeddingName::Peft),
            CheckpointKind::External => live.trainer.save(&path, UnembeddingName::Service),
        };
        let size = written.map_err(Settled::from).and_then(|()| size_of(&path));
        match size {
            Ok(size) => Ok((folder, size)),
            Err(failed) => {
                self.shared.store().making.remove(&folder);
                Err(failed)
            }
        }
    }

    fn save_for(&mut self, run: &Run, id: SamplerId) -> Result<Settled, Settled> {
        let (folder, size) = self.write(run, CheckpointKind::Sampler, "ephemeral")?;
        let engine = self.engine(&run.base_model)?;
        let weights = engine.snapshot(&self.model(run)?.trainer);
        self.remember(&id, &run.base_model, weights, size);
        let sampler = Fact::Sampler(Sampler {
            id: id.clone(),
            session: run.session.clone(),
            base_model: run.base_model.clone(),
            model_path: None,
            folder: Some(folder),
            clients: 1,
        });
        let saved = SamplerWeightsSaved { path: None, sampling_session_id: Some(id) };
        Ok(Settled::json(&saved).fact(sampler))
    }

    fn load(
        &mut self,
        run: &Run,
        seq: u64,
        folder: &str,
        path: &TinkerPath,
        optimizer: bool,
        creates: bool,
    ) -> Result<Settled, Settled> {
        let folder = self.shared.folders.join(folder);
        let loaded = self.engine(&run.base_model).and_then(|engine| {
            let kind = optimizer_kind(run);
            Ok(if optimizer {
                engine.resume_trainer(&folder, kind)?
            } else {
                engine.load_trainer(&folder, kind)?
            })
        });
        let trainer = match loaded {
            Ok(trainer) => trainer,
            Err(failed) if creates => return Err(closed(run, failed)),
            Err(failed) => return Err(failed),
        };
        let before = self.keep(run, Live::new(trainer));
        // The checkpoint may be deleted; the model must come back without it.
        if !self.snapshot(&run.id, seq) {
            self.live.remove(&run.id);
            self.live.extend(before.map(|live| (run.id.clone(), live)));
            let why = "the loaded state could not be written down; is the disk full?";
            return Err(Settled::failed(Fault::Server, why));
        }
        let (path, model_id) = (Some(path.to_string()), Some(run.id.clone()));
        Ok(Settled::json(&WeightsLoaded { path, model_id }))
    }
}

/// A model that could not be made cannot be used.
fn closed(run: &Run, failed: Settled) -> Settled {
    let closed = Some("it could not be created".to_owned());
    failed.fact(Fact::Run(Run { closed, ..run.clone() }))
}

fn checkpoint(run: &Run, seq: u64, save: Save, folder: String, size_bytes: u64) -> Checkpoint {
    let seconds = |ttl: u64| i64::try_from(ttl).unwrap_or(i64::MAX).saturating_mul(1_000_000);
    Checkpoint {
        path: save.path,
        folder,
        request: None,
        seq: Some(seq),
        created_at: now(),
        expires_at: save.ttl_seconds.map(|ttl| now().saturating_add(seconds(ttl))),
        size_bytes,
        public: false,
        user_metadata: save.user_metadata,
        base_model: run.base_model.clone(),
        lora: run.lora,
        optimizer: run.optimizer.clone(),
    }
}

fn saved(path: &TinkerPath, size: u64) -> Settled {
    let address = path.to_string();
    match path.kind() {
        CheckpointKind::Training => Settled::json(&WeightsSaved { path: address }),
        CheckpointKind::Sampler => {
            Settled::json(&SamplerWeightsSaved { path: Some(address), sampling_session_id: None })
        }
        CheckpointKind::External => {
            Settled::json(&ExternalWeightsSaved { path: Some(address), size_bytes: Some(size) })
        }
    }
}

/// A run as part of a folder's name; whoever copies a checkpoint can choose the id.
fn folder_name(run: &Run) -> String {
    run.id.as_str().replace(|c: char| !c.is_ascii_alphanumeric() && c != '-', "_")
}

/// Bytes of the files of a folder.
pub(super) fn size_of(folder: &Path) -> Result<u64, Settled> {
    let measure = || -> std::io::Result<u64> {
        let mut size = 0;
        for entry in std::fs::read_dir(folder)? {
            size += entry?.metadata()?.len();
        }
        Ok(size)
    };
    measure()
        .map_err(|why| Settled::failed(Fault::Server, format!("the checkpoint vanished: {why}")))
}
