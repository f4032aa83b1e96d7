//! [`Engine`]: a model, and what can be done with it.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::Result;
use crate::builtin;
use crate::file::{AdapterFile, ModelConfig, ModelFolder};
use crate::kernel::{Kernel, Precision};
use crate::lora::{Adapter, LoraConfig, PackedLora};
use crate::model::Model;
use crate::optim::OptimizerKind;
use crate::sample::{Sampler, SamplingWeights};
use crate::train::Trainer;

/// How a model is run.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineOptions {
    /// Threads that compute; 0 for one on each core. No result depends on it.
    pub threads: usize,
    /// In what form the frozen weights are kept.
    pub precision: Precision,
    /// Bytes that a training pass may keep for its way back; what does not fit is computed again.
    pub training_memory: usize,
    /// Bytes of keys and values that a sampler may keep.
    pub cache_memory: usize,
    /// What the model is called in files that are written.
    pub name: Option<String>,
}

impl Default for EngineOptions {
    /// All cores, f32, 4 GiB for training and 2 GiB for sampling.
    fn default() -> Self {
        Self {
            threads: 0,
            precision: Precision::F32,
            training_memory: 4 << 30,
            cache_memory: 2 << 30,
            name: None,
        }
    }
}

/// A model, ready to train adapters on and to sample from.
///
/// Cheap to clone; clones share the weights.
#[derive(Clone, Debug)]
pub struct Engine {
    model: Arc<Model>,
    name: Arc<str>,
    options: Arc<EngineOptions>,
    /// The number of the next weights to sample from.
    next: Arc<AtomicU64>,
}

impl Engine {
    /// Loads the Hugging Face folder `path`.
    ///
    /// # Errors
    /// If a file is missing, damaged, or of a model that the engine does not know.
    pub fn open(path: impl AsRef<Path>, options: EngineOptions) -> Result<Self> {
        let path = path.as_ref();
        let folder = ModelFolder::open(path)?;
        let kernel = Kernel::new(options.threads)?;
        let model = Model::load(folder.config(), &folder, options.precision, kernel)?;
        let own = path.file_name().map(|name| name.to_string_lossy().into_owned());
        Ok(Self::with_model(model, options, own))
    }

    /// The built-in model, which needs no files: see [`builtin`](crate::builtin).
    ///
    /// # Errors
    /// If threads cannot be started.
    pub fn builtin(options: EngineOptions) -> Result<Self> {
        let kernel = Kernel::new(options.threads)?;
        let (config, tensors) = (builtin::config()?, builtin::tensors()?);
        let model = Model::load(&config, &tensors, options.precision, kernel)?;
        Ok(Self::with_model(model, options, Some(builtin::NAME.to_owned())))
    }

    pub(crate) fn with_model(model: Model, options: EngineOptions, own: Option<String>) -> Self {
        let name = options.name.clone().or(own).unwrap_or_else(|| "model".to_owned());
        Self {
            model: Arc::new(model),
            name: name.into(),
            options: Arc::new(options),
            next: Arc::new(AtomicU64::new(1)),
        }
    }

    /// What kind of model it is, and how large.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.model.config
    }

    /// Bytes that the weights take.
    #[must_use]
    pub fn weight_bytes(&self) -> usize {
        self.model.bytes()
    }

    /// A fresh adapter, which changes nothing until it is trained.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for a rank out of range, or if nothing would be trained.
    pub fn create_trainer(&self, config: LoraConfig, kind: OptimizerKind) -> Result<Trainer> {
        let adapter = Adapter::new(&self.model.config, config)?;
        Ok(self.trainer(adapter, kind))
    }

    fn trainer(&self, adapter: Adapter, kind: OptimizerKind) -> Trainer {
        let (model, name) = (self.model.clone(), self.name.clone());
        Trainer::new(model, name, self.options.training_memory, adapter, kind)
    }

    /// A sampler with a cache of its own.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory) if the cache could not hold anything,
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory) if the system does not have that much.
    pub fn sampler(&self) -> Result<Sampler> {
        Sampler::new(self.model.clone(), self.options.cache_memory)
    }

    /// The model as it is, to sample from.
    #[must_use]
    pub fn base_weights(&self) -> SamplingWeights {
        SamplingWeights::new(0, None)
    }

    /// An adapter as it is now, to sample from; training it further changes nothing there.
    #[must_use]
    pub fn snapshot(&self, trainer: &Trainer) -> SamplingWeights {
        self.weights(trainer.packed())
    }

    /// An adapter from a PEFT folder, to sample from.
    ///
    /// # Errors
    /// As [`load_trainer`](Self::load_trainer).
    pub fn load_weights(&self, folder: impl AsRef<Path>) -> Result<SamplingWeights> {
        let file = AdapterFile::load(folder)?;
        let adapter = Adapter::from_file(&self.model.config, file, 0)?;
        Ok(self.weights(Arc::new(adapter.packed(&self.model.config))))
    }

    fn weights(&self, lora: Arc<PackedLora>) -> SamplingWeights {
        SamplingWeights::new(self.next.fetch_add(1, Ordering::Relaxed), Some(lora))
    }

    /// An adapter from a PEFT folder; the optimizer begins anew.
    ///
    /// # Errors
    /// If the folder is damaged, or of an adapter for another model.
    pub fn load_trainer(&self, folder: impl AsRef<Path>, kind: OptimizerKind) -> Result<Trainer> {
        let (model, name) = (self.model.clone(), self.name.clone());
        Trainer::load(model, name, self.options.training_memory, folder.as_ref(), kind)
    }

    /// The same with the optimizer's memory: training goes on as if it had never stopped.
    ///
    /// # Errors
    /// As [`load_trainer`](Self::load_trainer), and if the folder holds no memory of that optimizer.
    pub fn resume_trainer(&self, folder: impl AsRef<Path>, kind: OptimizerKind) -> Result<Trainer> {
        let mut trainer = self.load_trainer(folder.as_ref(), kind)?;
        trainer.load_optimizer(folder.as_ref())?;
        Ok(trainer)
    }
}
