//! [`Engines`]: base models in memory, loaded on first use and unloaded when idle.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::io;
use std::time::Duration;

use tinkex_backend::outcome::Outcome;
use tinkex_engine::{Engine, EngineOptions, Error as EngineError, ErrorKind, Precision, Sampler};
use tinkex_store::error::with_causes;
use tinkex_store::log;
use tinkex_store::store::FailureCategory;
use tinkex_weights::{Error as FileError, ModelConfig};
use tokio::time::Instant;

use crate::fault::is_transient_in_engine;
use crate::models::{EngineModel, warn};
use crate::options::ServerOptions;

/// Base models in memory, by name.
pub(crate) struct Engines {
    loaded: HashMap<String, LoadedModel>,
    options: ServerOptions,
}

/// A base model in memory.
pub(super) struct LoadedModel {
    pub(super) engine: Engine,
    pub(super) sampler: Sampler,
    pub(super) last_used: Instant,
}

impl Engines {
    pub(crate) fn new(options: &ServerOptions) -> Self {
        Self { loaded: HashMap::new(), options: options.clone() }
    }

    /// Returns the options for loading a model.
    fn engine_options(&self, name: &str) -> EngineOptions {
        let options = &self.options;
        EngineOptions {
            threads: options.threads,
            precision: if options.bf16 { Precision::Bf16 } else { Precision::F32 },
            quantization: options.quantization_of(name),
            training_memory: options.limits.training_bytes,
            cache_memory: options.limits.kv_cache_bytes,
            name: Some(name.to_owned()),
        }
    }

    /// Returns a model, loading it first if necessary.
    pub(super) fn get(
        &mut self,
        name: &str,
        base: &EngineModel,
    ) -> Result<&mut LoadedModel, LoadError> {
        let failed = |error| LoadError { name: name.to_owned(), error };
        let options = self.engine_options(name);
        let model = match self.loaded.entry(name.to_owned()) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let start = Instant::now();
                let engine = if base.built_in {
                    Engine::builtin(options)
                } else {
                    open(name, base, options)
                };
                let engine = engine.map_err(failed)?;
                let sampler = engine.sampler().map_err(failed)?;
                tracing::info!(
                    target: log::MODEL,
                    base_model = %name,
                    mebibytes = engine.weight_bytes() >> 20,
                    seconds = start.elapsed().as_secs_f64(),
                    "loaded base model"
                );
                entry.insert(LoadedModel { engine, sampler, last_used: start })
            }
        };
        model.last_used = Instant::now();
        Ok(model)
    }

    /// Returns a model if it is in memory.
    pub(super) fn get_loaded(&mut self, name: &str) -> Option<&mut LoadedModel> {
        self.loaded.get_mut(name)
    }

    /// Returns whether no model is sampling.
    pub(super) fn is_idle(&self) -> bool {
        self.loaded.values().all(|model| model.sampler.is_idle())
    }

    /// Returns the models that are sampling.
    pub(super) fn sampling(&mut self) -> impl Iterator<Item = (&String, &mut LoadedModel)> {
        self.loaded.iter_mut().filter(|(_, model)| !model.sampler.is_idle())
    }

    /// Unloads a model, which drops its unfinished samples.
    pub(super) fn unload(&mut self, name: &str) {
        self.loaded.remove(name);
    }

    /// Returns the number of models in memory.
    pub(super) fn count(&self) -> usize {
        self.loaded.len()
    }

    /// Returns the number of pages of all KV caches that hold running samples.
    pub(super) fn pages_in_use(&self) -> usize {
        self.loaded.values().map(|model| model.sampler.pages_in_use()).sum()
    }

    /// Returns when each model was last used.
    pub(super) fn last_used(&self) -> impl Iterator<Item = Instant> {
        self.loaded.values().map(|model| model.last_used)
    }

    /// Unloads the models that were not used for `idle` and are not in `in_use`. Returns their
    /// names.
    pub(super) fn unload_idle(&mut self, idle: Duration, in_use: &HashSet<String>) -> Vec<String> {
        let names: Vec<String> = self
            .loaded
            .iter()
            .filter(|(name, _)| !in_use.contains(*name))
            .filter(|(_, model)| model.sampler.is_idle() && model.last_used.elapsed() >= idle)
            .map(|(name, _)| name.clone())
            .collect();
        for name in &names {
            self.loaded.remove(name);
        }
        names
    }
}

/// Why a base model cannot be loaded.
pub(super) struct LoadError {
    /// Name of the base model.
    name: String,
    error: EngineError,
}

impl LoadError {
    /// Returns whether every further attempt fails until a person changes the files. Clients should
    /// then show the reason instead of sending the request again.
    fn is_permanent(&self) -> bool {
        match &self.error {
            EngineError::File(FileError::Io { source, .. }) => matches!(
                source.kind(),
                io::ErrorKind::NotFound
                    | io::ErrorKind::NotADirectory
                    | io::ErrorKind::PermissionDenied
                    | io::ErrorKind::UnexpectedEof
            ),
            EngineError::File(_) => true,
            other => matches!(other.kind(), ErrorKind::Input | ErrorKind::Numeric),
        }
    }
}

impl From<LoadError> for Outcome {
    fn from(failed: LoadError) -> Self {
        let category =
            if failed.is_permanent() { FailureCategory::User } else { FailureCategory::Server };
        let LoadError { name, error } = failed;
        let transient = is_transient_in_engine(&error);
        // The other errors contain their causes.
        let reason = match &error {
            EngineError::File(_) => with_causes(&error),
            _ => error.to_string(),
        };
        Self::failed(category, format!("cannot load base model {name:?}: {reason}"))
            .with_transient(transient)
    }
}

/// Loads the weights of a base model from its folder or GGUF file.
///
/// # Errors
/// The errors of [`Engine::open`]. Also fails if the configuration has changed since the server
/// started, because admitted requests were validated against the earlier configuration.
fn open(name: &str, base: &EngineModel, options: EngineOptions) -> tinkex_engine::Result<Engine> {
    let engine = Engine::open(&base.weights, options)?;
    let found = ModelConfig { tied: base.config.tied, ..engine.config().clone() };
    if found != base.config {
        let reason = "the model has changed since the server started; start the server again";
        let path = if base.weights.is_file() {
            base.weights.clone()
        } else {
            base.weights.join("config.json")
        };
        return Err(FileError::bad_file(path, reason).into());
    }
    let new = |warning: &&String| !base.warnings.contains(warning);
    engine.warnings().iter().filter(new).for_each(|warning| warn(name, warning));
    Ok(engine)
}
