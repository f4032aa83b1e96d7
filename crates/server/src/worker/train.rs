//! What is done with a model.

use std::path::Path;

use tinkex_engine::file::HeadName;
use tinkex_wire::{
    CheckpointKind, ExternalWeightsSaved, Mode, ModelCreated, ModelId, OptimStepOutput, RequestId,
    SamplerId, SamplerWeightsSaved, TinkerPath, WeightsLoaded, WeightsSaved,
};

use super::model::{Live, lora_config, optimizer_kind};
use super::{Worker, data};
use crate::settle::Settled;
use crate::store::{Checkpoint, Fault, Record, Run, Sampler, Use, What, now};
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
            Op::Save(save) => self.save(id, &run, *save),
            Op::SaveFor(sampler) => self.save_for(&run, sampler),
            Op::Load { folder, path, optimizer, creates } => {
                self.load(&run, seq, &folder, &path, optimizer, creates)
            }
        };
        done.unwrap_or_else(|failed| failed)
    }

    fn create(&mut self, run: &Run) -> Result<Settled, Settled> {
        let made = self
            .engine(&run.base_model)
            .and_then(|engine| Ok(engine.create(lora_config(&run.lora), optimizer_kind(run))?));
        match made {
            Ok(trainer) => {
                self.live.insert(run.id.clone(), Live::new(trainer));
                Ok(Settled::json(&ModelCreated { model_id: run.id.clone() }))
            }
            Err(failed) => Err(self.close(run, failed)),
        }
    }

    /// A model that could not be made cannot be used.
    fn close(&mut self, run: &Run, failed: Settled) -> Settled {
        let closed = Some("it could not be created".to_owned());
        self.shared.store().note(Record::Run(Run { closed, ..run.clone() }));
        failed
    }

    fn pass(&mut self, run: &Run, pass: &Pass) -> Result<Settled, Settled> {
        let tokens: usize =
            pass.data.iter().filter_map(|datum| datum.model_input().token_count()).sum();
        let live = self.model(run)?;
        let output = data::run(&mut live.trainer, pass)?;
        let backward = pass.mode == Mode::ForwardBackward && !pass.data.is_empty();
        live.pending |= backward;
        let settled = Settled::proto(data::output(pass, output).to_proto());
        let tokens = u64::try_from(tokens).unwrap_or(u64::MAX);
        self.shared.metrics.trained_tokens.add(tokens);
        let settled = settled.used(vec![(self.used(run, What::Training), tokens)]);
        Ok(if backward { settled.changed() } else { settled })
    }

    fn used(&self, run: &Run, what: What) -> Use {
        let (session, base_model) = (run.session.clone(), run.base_model.clone());
        Use { hour: now().div_euclid(3_600_000_000), session, base_model, what }
    }

    fn save(&mut self, id: &RequestId, run: &Run, save: Save) -> Result<Settled, Settled> {
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
        let seconds = |ttl: u64| i64::try_from(ttl).unwrap_or(i64::MAX).saturating_mul(1_000_000);
        let row = Checkpoint {
            path: save.path.clone(),
            folder: folder.clone(),
            request: Some(id.clone()),
            created_at: now(),
            expires_at: save.ttl_seconds.map(|ttl| now().saturating_add(seconds(ttl))),
            size_bytes,
            public: false,
            user_metadata: save.user_metadata,
            base_model: run.base_model.clone(),
            lora: run.lora,
            optimizer: run.optimizer.clone(),
        };
        let mut store = self.shared.store();
        store.note(Record::Checkpoint(row));
        store.making.remove(&folder);
        drop(store);
        Ok(saved(&save.path, size_bytes).used(vec![(self.used(run, What::Checkpoints), 1)]))
    }

    /// Writes an adapter into a folder of its own; whoever gets the name takes it off `making`.
    fn write(
        &mut self,
        run: &Run,
        kind: CheckpointKind,
        name: &str,
    ) -> Result<(String, u64), Settled> {
        let run_name = run.id.as_str().replace(':', "_");
        let unique = uuid::Uuid::new_v4().simple().to_string();
        let folder = format!("{run_name}-{}-{name}-{}", kind.segment(), &unique[..8]);
        let path = self.shared.folders.join(&folder);
        self.model(run)?;
        self.shared.store().making.insert(folder.clone());
        let live = self.model(run)?;
        let written = match kind {
            CheckpointKind::Training => live.trainer.save_all(&path, HeadName::Peft),
            CheckpointKind::Sampler => live.trainer.save(&path, HeadName::Peft),
            CheckpointKind::External => live.trainer.save(&path, HeadName::Service),
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
        let (folder, _) = self.write(run, CheckpointKind::Sampler, "ephemeral")?;
        let engine = self.engine(&run.base_model)?;
        let weights = engine.snapshot(&self.model(run)?.trainer);
        self.running.remember(&id, &run.base_model, weights);
        let mut store = self.shared.store();
        store.note(Record::Sampler(Sampler {
            id: id.clone(),
            session: run.session.clone(),
            base_model: run.base_model.clone(),
            model_path: None,
            folder: Some(folder.clone()),
            clients: 1,
        }));
        store.making.remove(&folder);
        Ok(Settled::json(&SamplerWeightsSaved { path: None, sampling_session_id: Some(id) }))
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
                engine.resume(&folder, kind)?
            } else {
                engine.load(&folder, kind)?
            })
        });
        let trainer = match loaded {
            Ok(trainer) => trainer,
            Err(failed) if creates => return Err(self.close(run, failed)),
            Err(failed) => return Err(failed),
        };
        let before = self.live.insert(run.id.clone(), Live::new(trainer));
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

/// Bytes of the files of a folder.
fn size_of(folder: &Path) -> Result<u64, Settled> {
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
