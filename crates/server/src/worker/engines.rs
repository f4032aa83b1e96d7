//! Base models in memory: loaded when first used, gone when nobody uses them.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use tinkex_engine::{Engine, Precision, Sampler};

use crate::models::BaseModel;
use crate::options::ServerOptions;

/// Base models in memory.
pub(super) struct Engines {
    loaded: HashMap<String, Loaded>,
    template: tinkex_engine::EngineOptions,
}

/// A base model in memory.
pub(super) struct Loaded {
    pub(super) engine: Engine,
    pub(super) sampler: Sampler,
    pub(super) used: Instant,
}

impl Engines {
    pub(super) fn new(options: &ServerOptions) -> Self {
        let template = tinkex_engine::EngineOptions {
            threads: options.threads,
            precision: if options.bf16 { Precision::Bf16 } else { Precision::F32 },
            training_memory: options.limits.training_bytes,
            cache_memory: options.limits.kv_cache_bytes,
            name: None,
        };
        Self { loaded: HashMap::new(), template }
    }

    /// The model, loaded if it was not.
    pub(super) fn get(&mut self, base: &BaseModel) -> tinkex_engine::Result<&mut Loaded> {
        let slot = match self.loaded.entry(base.name.clone()) {
            Entry::Occupied(slot) => slot.into_mut(),
            Entry::Vacant(slot) => {
                let start = Instant::now();
                let name = Some(base.name.clone());
                let options = tinkex_engine::EngineOptions { name, ..self.template.clone() };
                let engine = match base.built_in {
                    true => Engine::builtin(options)?,
                    false => Engine::open(&base.folder, options)?,
                };
                let sampler = engine.sampler()?;
                crate::log::job(format_args!(
                    "loaded {} ({} MiB) in {:.2} s",
                    base.name,
                    engine.weight_bytes() >> 20,
                    start.elapsed().as_secs_f64()
                ));
                slot.insert(Loaded { engine, sampler, used: start })
            }
        };
        slot.used = Instant::now();
        Ok(slot)
    }

    pub(super) fn loaded(&mut self, name: &str) -> Option<&mut Loaded> {
        self.loaded.get_mut(name)
    }

    /// Whether nothing is being sampled.
    pub(super) fn is_idle(&self) -> bool {
        self.loaded.values().all(|loaded| loaded.sampler.is_idle())
    }

    /// The models that are sampling.
    pub(super) fn busy(&mut self) -> impl Iterator<Item = (&String, &mut Loaded)> {
        self.loaded.iter_mut().filter(|(_, loaded)| !loaded.sampler.is_idle())
    }

    /// Drops a model; what it was sampling is lost to it.
    pub(super) fn drop_model(&mut self, name: &str) {
        self.loaded.remove(name);
    }

    /// How many are loaded.
    pub(super) fn count(&self) -> usize {
        self.loaded.len()
    }

    /// When each was last used.
    pub(super) fn used(&self) -> impl Iterator<Item = Instant> {
        self.loaded.values().map(|loaded| loaded.used)
    }

    /// Drops models that were not used for so long and that nothing `in_use` is made of; says which.
    pub(super) fn drop_idle(&mut self, after: Duration, in_use: &HashSet<String>) -> Vec<String> {
        let idle: Vec<String> = self
            .loaded
            .iter()
            .filter(|(name, _)| !in_use.contains(*name))
            .filter(|(_, loaded)| loaded.sampler.is_idle() && loaded.used.elapsed() >= after)
            .map(|(name, _)| name.clone())
            .collect();
        for name in &idle {
            self.loaded.remove(name);
        }
        idle
    }
}
