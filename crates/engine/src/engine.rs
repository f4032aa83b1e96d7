//! [`Engine`]: a loaded model that creates trainers and samplers.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::Result;
use crate::builtin;
use crate::kernel::{Kernel, Precision};
use crate::lora::{Adapter, LoraConfig, PackedLora};
use crate::model::Model;
use crate::optim::OptimizerKind;
use crate::quantization::{Quantization, WeightStorage};
use crate::sample::{ModelWeights, Sampler};
use crate::train::Trainer;
use tinkex_weights::{AdapterFile, GgufModel, ModelConfig, ModelFolder};

/// Options of an [`Engine`].
#[derive(Clone, Debug, PartialEq)]
pub struct EngineOptions {
    /// Number of compute threads; 0 (the default) means one per core. Does not affect results.
    pub threads: usize,
    /// Storage format of the frozen weights that are not quantized. Defaults to [`Precision::F32`].
    /// The weights of a GGUF file keep the format that they have in the file.
    pub precision: Precision,
    /// Quantization of the frozen weights that their file, including a GGUF file, stores without
    /// quantization. Defaults to `None`.
    pub quantization: Option<Quantization>,
    /// Memory limit in bytes for the activations that a training pass keeps for its backward pass.
    /// A batch that needs more is divided into micro-batches, and activations that still do not fit
    /// are computed twice. Defaults to 4 GiB. Does not affect results.
    pub training_memory: usize,
    /// Memory limit in bytes for the KV cache of a sampler. Defaults to 2 GiB. Does not affect
    /// results.
    pub cache_memory: usize,
    /// Name of the base model that saved adapters contain. Defaults to the name of the model's
    /// folder or of its GGUF file without the extension, or to
    /// [`builtin::NAME`](crate::builtin::NAME) for the built-in model.
    pub name: Option<String>,
}

impl Default for EngineOptions {
    /// Returns one thread per core, f32 weights without quantization, 4 GiB for training and 2 GiB
    /// for the KV cache.
    fn default() -> Self {
        Self {
            threads: 0,
            precision: Precision::F32,
            quantization: None,
            training_memory: 4 << 30,
            cache_memory: 2 << 30,
            name: None,
        }
    }
}

impl EngineOptions {
    fn storage(&self) -> WeightStorage {
        WeightStorage { precision: self.precision, quantization: self.quantization }
    }
}

/// A loaded model.
///
/// Cheap to clone; clones share the weights and the threads.
#[derive(Clone, Debug)]
pub struct Engine {
    model: Arc<Model>,
    name: Arc<str>,
    options: Arc<EngineOptions>,
    /// Identifier of the next adapter snapshot; 0 is the base model.
    next_weights_id: Arc<AtomicU64>,
    warnings: Arc<[String]>,
}

impl Engine {
    /// Loads the model in the GGUF file or the Hugging Face folder `path`.
    ///
    /// A folder contains `config.json` and either `model.safetensors` or
    /// `model.safetensors.index.json` with the files that it names; see [`ModelFolder`].
    ///
    /// # Errors
    /// - [`Error::File`](crate::Error::File) if a file is missing or cannot be read, is damaged, does
    ///   not match the configuration, contains NaN or an infinity, or has an architecture that is
    ///   not supported.
    /// - [`Error::OutOfMemory`](crate::Error::OutOfMemory) if the weights do not fit into memory.
    /// - [`Error::Invalid`](crate::Error::Invalid) if the threads cannot be started.
    pub fn open(path: impl AsRef<Path>, options: EngineOptions) -> Result<Self> {
        let path = path.as_ref();
        let kernel = Kernel::new(options.threads)?;
        let storage = options.storage();
        let (model, warnings) = if path.is_file() {
            let file = GgufModel::open(path)?;
            (Model::load(file.config(), &file, storage, kernel)?, file.warnings().into())
        } else {
            let folder = ModelFolder::open(path)?;
            (Model::load(folder.config(), &folder, storage, kernel)?, folder.warnings().into())
        };
        let default_name = if path.is_file() { path.file_stem() } else { path.file_name() };
        let default_name = default_name.map(|name| name.to_string_lossy().into_owned());
        Ok(Self { warnings, ..Self::with_model(model, options, default_name) })
    }

    /// Loads the built-in model, which needs no files; see [`builtin`](crate::builtin).
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the threads cannot be started.
    pub fn builtin(options: EngineOptions) -> Result<Self> {
        let kernel = Kernel::new(options.threads)?;
        let config = builtin::config()?;
        let tensors = builtin::tensors()?;
        let model = Model::load(&config, &tensors, options.storage(), kernel)?;
        Ok(Self::with_model(model, options, Some(builtin::NAME.to_owned())))
    }

    /// Creates an engine for a loaded model. `default_name` is its name if the options contain
    /// none.
    pub(crate) fn with_model(
        model: Model,
        options: EngineOptions,
        default_name: Option<String>,
    ) -> Self {
        let name = options.name.clone().or(default_name).unwrap_or_else(|| "model".to_owned());
        Self {
            model: Arc::new(model),
            name: name.into(),
            options: Arc::new(options),
            next_weights_id: Arc::new(AtomicU64::new(1)),
            warnings: Arc::default(),
        }
    }

    /// Returns the architecture and dimensions of the model.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.model.config
    }

    /// Returns warnings about the files of the model: what is unusual but does not prevent its use.
    /// See [`ModelFolder::warnings`] and [`GgufModel::warnings`].
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Returns the memory that the weight matrices occupy, in bytes.
    #[must_use]
    pub fn weight_bytes(&self) -> usize {
        self.model.bytes()
    }

    /// Creates a trainer with a new adapter, which does not change the model's output until it is
    /// trained.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the rank or alpha is out of range, or if no
    /// module would be trained.
    pub fn create_trainer(&self, config: LoraConfig, kind: OptimizerKind) -> Result<Trainer> {
        let adapter = Adapter::new(&self.model.config, config)?;
        Ok(self.trainer(adapter, kind))
    }

    fn trainer(&self, adapter: Adapter, kind: OptimizerKind) -> Trainer {
        let model = self.model.clone();
        let name = self.name.clone();
        Trainer::new(model, name, self.options.training_memory, adapter, kind)
    }

    /// Creates a sampler with its own KV cache of [`EngineOptions::cache_memory`] bytes.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory) if the limit is smaller than one page of the cache;
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory) if the system cannot provide the memory.
    pub fn sampler(&self) -> Result<Sampler> {
        Sampler::new(self.model.clone(), self.options.cache_memory)
    }

    /// Returns the weights of the base model, to sample from.
    #[must_use]
    pub fn base_weights(&self) -> ModelWeights {
        ModelWeights::new(0, None)
    }

    /// Returns a snapshot of an adapter's current weights, to sample from. Later training does not
    /// change it.
    #[must_use]
    pub fn snapshot(&self, trainer: &Trainer) -> ModelWeights {
        self.weights(trainer.packed())
    }

    /// Loads an adapter from a PEFT folder, to sample from.
    ///
    /// # Errors
    /// As [`load_trainer`](Self::load_trainer).
    pub fn load_weights(&self, folder: impl AsRef<Path>) -> Result<ModelWeights> {
        let file = AdapterFile::load(folder)?;
        let adapter = Adapter::from_file(&self.model.config, file, 0)?;
        Ok(self.weights(Arc::new(adapter.packed(&self.model.config))))
    }

    /// Returns an adapter as weights to sample from, with a new identifier.
    fn weights(&self, lora: Arc<PackedLora>) -> ModelWeights {
        ModelWeights::new(self.next_weights_id.fetch_add(1, Ordering::Relaxed), Some(lora))
    }

    /// Creates a trainer with the adapter in a PEFT folder and a new optimizer. The rank of
    /// [`OptimizerKind::Dimuon`] is replaced by the rank of the adapter.
    ///
    /// # Errors
    /// As [`AdapterFile::load`]; [`Error::Invalid`](crate::Error::Invalid) or
    /// [`Error::Shape`](crate::Error::Shape) if the adapter belongs to another model.
    pub fn load_trainer(&self, folder: impl AsRef<Path>, kind: OptimizerKind) -> Result<Trainer> {
        let model = self.model.clone();
        let name = self.name.clone();
        Trainer::load(model, name, self.options.training_memory, folder.as_ref(), kind)
    }

    /// Creates a trainer with the adapter and the optimizer state in a folder that
    /// [`Trainer::save_with_optimizer`] wrote. Training continues with the same bits as without the
    /// interruption. `kind` must be the kind of optimizer that was saved.
    ///
    /// # Errors
    /// As [`load_trainer`](Self::load_trainer) and
    /// [`Optimizer::load`](crate::optim::Optimizer::load).
    pub fn resume_trainer(&self, folder: impl AsRef<Path>, kind: OptimizerKind) -> Result<Trainer> {
        let mut trainer = self.load_trainer(folder.as_ref(), kind)?;
        trainer.load_optimizer(folder.as_ref())?;
        Ok(trainer)
    }
}
