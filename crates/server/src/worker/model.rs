//! Models in memory: brought back from disk when they are needed, put there now and then.
//!
//! A model's state is its last snapshot and what was done to it since; doing that again gives the
//! same bits. A snapshot is taken after a step, when no gradients are pending, once enough work
//! has gathered that doing it again would hurt.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use tinkex_engine::file::UnembeddingName;
use tinkex_engine::optim::OptimizerKind;
use tinkex_engine::{Engine, LoraConfig, Trainer};
use tinkex_wire::codec::json;
use tinkex_wire::{ForwardBackward, ModelId, OptimStep};

use super::Worker;
use crate::error::ApiError;
use crate::settle::Settled;
use crate::store::{Change, Fact, Fault, Kind, Lora, Run, Snapshot};
use crate::work::{Objective, Pass, step_params};

/// A model in memory.
pub(super) struct Live {
    pub(super) trainer: Trainer,
    /// Work since the last snapshot.
    spent: Duration,
    /// Whether gradients are pending.
    pub(super) pending: bool,
    used: Instant,
}

impl Live {
    pub(super) fn new(trainer: Trainer) -> Self {
        Self { trainer, spent: Duration::ZERO, pending: false, used: Instant::now() }
    }

    /// About what it takes: the adapter, as it is multiplied, its gradients, and the optimizer's two.
    fn bytes(&self) -> usize {
        self.trainer.parameters() * 5 * size_of::<f32>()
    }
}

impl Worker {
    /// The model, brought back if it is not in memory.
    pub(super) fn model(&mut self, run: &Run) -> Result<&mut Live, Settled> {
        if !self.live.contains_key(&run.id) {
            let live = self.bring_back(run)?;
            self.keep(run, live);
        }
        let live = self.live.get_mut(&run.id);
        let live = live.ok_or_else(|| Settled::failed(Fault::Server, "the model was lost"))?;
        live.used = Instant::now();
        Ok(live)
    }

    /// Keeps a model in memory; those that were not used for longest make room.
    pub(super) fn keep(&mut self, run: &Run, live: Live) -> Option<Live> {
        let before = self.live.insert(run.id.clone(), live);
        let most = self.shared.options.limits.model_bytes;
        while self.live.values().map(Live::bytes).sum::<usize>() > most {
            let others = self.live.iter().filter(|(id, _)| **id != run.id);
            let oldest = others.min_by_key(|(_, live)| live.used).map(|(id, _)| id.clone());
            let Some(oldest) = oldest else { break };
            self.save_one(&oldest);
            self.live.remove(&oldest);
        }
        before
    }

    pub(super) fn engine(&mut self, base: &str) -> Result<Engine, Settled> {
        let Some(model) = self.shared.models.get(base) else {
            return Err(Settled::failed(Fault::User, self.shared.models.missing(base)));
        };
        let engine = self.engines.get(model)?.engine.clone();
        self.shared.metrics.loaded.set(self.engines.count());
        Ok(engine)
    }

    fn bring_back(&mut self, run: &Run) -> Result<Live, Settled> {
        let engine = self.engine(&run.base_model)?;
        let (reader, since) = {
            let store = self.shared.store();
            let since = store.runs.get(&run.id).map(|kept| kept.since.clone());
            (store.reader(), since.unwrap_or_default())
        };
        let kind = optimizer_kind(run);
        let trainer = match &run.snapshot {
            Some(snapshot) => {
                engine.resume_trainer(self.shared.folders.join(&snapshot.folder), kind)?
            }
            None => engine.create_trainer(lora_config(&run.lora), kind)?,
        };
        let mut live = Live::new(trainer);
        let start = Instant::now();
        let count = since.len();
        for Change { kind, body } in since.into_values() {
            let lost = |why: std::io::Error| {
                Settled::failed(Fault::Server, format!("{} cannot be brought back: {why}", run.id))
            };
            let body = reader.payload(body).map_err(lost)?;
            let again = |why: ApiError| Settled::failed(Fault::Server, why.detail);
            match kind {
                Kind::ForwardBackward => {
                    let call = ForwardBackward::from_proto(&body).map_err(|e| again(e.into()))?;
                    let objective = Objective::of(&self.shared.store(), run, &call);
                    let objective = objective.map_err(again)?;
                    let pass =
                        Pass::new(&self.shared.models, run, objective, &call).map_err(again)?;
                    pass.batch.run(&mut live.trainer, pass.mode)?;
                    live.pending = true;
                }
                Kind::OptimStep => {
                    let call: OptimStep = json::decode(&body).map_err(|e| again(e.into()))?;
                    let params = step_params(&call.params).map_err(again)?;
                    live.trainer.optim_step(&params)?;
                    live.pending = false;
                }
                _ => {}
            }
        }
        if count > 0 {
            live.spent = start.elapsed();
            crate::log::job(format_args!(
                "brought {} back: {count} requests done again in {:.2} s",
                run.id,
                start.elapsed().as_secs_f64()
            ));
        }
        Ok(live)
    }

    /// Takes a snapshot if enough has been done since the last one.
    pub(super) fn snapshot_if_due(&mut self, model: &ModelId, seq: u64, took: Duration) {
        let limit = self.shared.options.timeouts.snapshot_after;
        let Some(live) = self.live.get_mut(model) else { return };
        live.spent += took;
        if live.spent >= limit && !live.pending {
            self.snapshot(model, seq);
        }
    }

    /// Writes a model's state down. If that fails there is only more to do again after a crash.
    pub(super) fn snapshot(&mut self, model: &ModelId, seq: u64) -> bool {
        let Some(live) = self.live.get_mut(model) else { return false };
        let folder = format!("snapshot-{}", uuid::Uuid::new_v4().simple());
        self.shared.store().making.insert(folder.clone());
        let saved = live
            .trainer
            .save_with_optimizer(&self.shared.folders.join(&folder), UnembeddingName::Peft);
        let mut store = self.shared.store();
        match saved {
            Ok(()) => {
                live.spent = Duration::ZERO;
                let row = store.runs.get(model).map(|kept| kept.row.clone());
                // Of a session that ended meanwhile nobody would ever remove it.
                if let Some(row) = row.filter(|row| store.open_session(&row.session).is_some()) {
                    let snapshot = Some(Snapshot { seq, folder: folder.clone() });
                    // Later facts build on it.
                    store.owe(Fact::Run(Run { snapshot, ..row }));
                } else {
                    store.making.remove(&folder);
                }
                true
            }
            Err(why) => {
                store.making.remove(&folder);
                crate::log::warn(format_args!("no snapshot of {model}: {why}"));
                false
            }
        }
    }

    /// Writes down every model that would have to be computed again.
    pub(super) fn save_all(&mut self) -> usize {
        let all: Vec<ModelId> = self.live.keys().cloned().collect();
        all.into_iter().filter(|model| self.save_one(model)).count()
    }

    /// Writes a model down if it would have to be computed again; whether that was so.
    fn save_one(&mut self, model: &ModelId) -> bool {
        if self.live.get(model).is_none_or(|live| live.pending) {
            return false;
        }
        let last = {
            let store = self.shared.store();
            store.runs.get(model).and_then(|run| run.since.keys().next_back().copied())
        };
        last.is_some_and(|seq| self.snapshot(model, seq))
    }

    /// Frees what was not used for long; it comes back when it is needed.
    pub(super) fn unload_idle(&mut self) {
        let after = self.shared.options.timeouts.idle_model;
        let idle: Vec<ModelId> = self
            .live
            .iter()
            .filter(|(_, live)| live.used.elapsed() >= after)
            .map(|(model, _)| model.clone())
            .collect();
        for model in idle {
            self.live.remove(&model);
        }
        self.forget_weights();
        let store = self.shared.store();
        let in_use: HashSet<String> = self
            .live
            .keys()
            .filter_map(|model| Some(store.runs.get(model)?.row.base_model.clone()))
            .collect();
        drop(store);
        for name in self.engines.drop_idle(after, &in_use) {
            self.running.forget_weights_of(&name);
            crate::log::job(format_args!("unloaded {name}"));
        }
        self.shared.metrics.loaded.set(self.engines.count());
    }

    /// When something may be idle for long enough to go.
    pub(super) fn next_idle(&self) -> Option<Instant> {
        let live = self.live.values().map(|live| live.used);
        let first = live.chain(self.engines.used()).min()?;
        first.checked_add(self.shared.options.timeouts.idle_model)
    }
}

pub(super) fn lora_config(lora: &Lora) -> LoraConfig {
    LoraConfig {
        rank: usize::try_from(lora.rank).unwrap_or(usize::MAX),
        seed: lora.seed,
        attention: lora.train_attn,
        mlp: lora.train_mlp,
        unembedding: lora.train_unembed,
        ..LoraConfig::default()
    }
}

pub(super) fn optimizer_kind(run: &Run) -> OptimizerKind {
    match &*run.optimizer.kind {
        "dimuon" => OptimizerKind::Dimuon { rank: usize::try_from(run.lora.rank).unwrap_or(1) },
        _ => OptimizerKind::Adam,
    }
}
