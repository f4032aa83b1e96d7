//! [`AdapterFile`]: a PEFT adapter folder with a configuration and pairs of LoRA matrices.

use std::path::Path;

#[cfg(doc)]
use crate::Error;
use crate::{NamedTensor, PeftConfig, Result, StoredAdapter, TensorSlice, write_tensors};

pub(crate) const CONFIG: &str = "adapter_config.json";
pub(crate) const TENSORS: &str = "adapter_model.safetensors";
/// Prefix of the tensor names in an adapter file.
pub(crate) const PREFIX: &str = "base_model.model.";
/// Module name of the unembedding in the engine and in `peft`.
pub(crate) const HEAD: &str = "lm_head";
/// Module name of the unembedding in the service's archives.
pub(crate) const SERVICE_HEAD: &str = "model.unembed_tokens";

/// The contents of an adapter folder.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterFile {
    /// Rank, scale and base model.
    pub config: PeftConfig,
    /// Pairs of matrices, in the order of their module names.
    pub pairs: Vec<LoraPair>,
}

/// The LoRA matrices of one module, which add `alpha / rank · B · A` to its weights.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraPair {
    /// Module name, for example `model.layers.0.self_attn.q_proj`, or `lm_head` for the
    /// unembedding.
    pub module: String,
    /// Number of inputs of the module.
    pub inputs: usize,
    /// Number of outputs of the module.
    pub outputs: usize,
    /// Row-major A, `rank × inputs`.
    pub a: Vec<f32>,
    /// Row-major B, `outputs × rank`, not scaled.
    pub b: Vec<f32>,
}

/// A [`LoraPair`] to write, with borrowed contents.
#[derive(Clone, Copy, Debug)]
pub struct LoraPairRef<'a> {
    /// Module name, as in [`LoraPair::module`].
    pub module: &'a str,
    /// Number of inputs of the module.
    pub inputs: usize,
    /// Number of outputs of the module.
    pub outputs: usize,
    /// Row-major A, `rank × inputs`.
    pub a: &'a [f32],
    /// Row-major B, `outputs × rank`, not scaled.
    pub b: &'a [f32],
}

impl AdapterFile {
    /// Reads the adapter folder `path`. Accepts the name that the hosted service gives to the
    /// unembedding, `model.unembed_tokens`, besides `lm_head`.
    ///
    /// The files must not be modified while this function runs.
    ///
    /// # Errors
    /// - [`Error::Io`] if a file cannot be read.
    /// - [`Error::BadFile`] if a file is damaged, contains a tensor that is not a LoRA matrix, does
    ///   not have the configured rank or is not among the configured modules, or contains a value
    ///   that is not finite.
    /// - [`Error::MissingTensor`] if A or B of a module is missing.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        let adapter = StoredAdapter::open(path)?;
        Ok(Self { config: adapter.config().clone(), pairs: adapter.read_pairs()? })
    }

    /// Writes `config` and `pairs` into the existing folder `path`.
    ///
    /// Each of the two files is replaced atomically. To replace both together, call this function
    /// inside [`write_folder`](super::write_folder).
    ///
    /// # Errors
    /// [`Error::InvalidTensor`] if a matrix does not have the size that its pair states;
    /// [`Error::Io`] if a file cannot be written.
    pub fn save(
        path: impl AsRef<Path>,
        config: &PeftConfig,
        pairs: &[LoraPairRef<'_>],
    ) -> Result<()> {
        let path = path.as_ref();
        let names: Vec<[String; 2]> = pairs
            .iter()
            .map(|pair| [0, 1].map(|matrix| matrix_name(pair.module, matrix)))
            .collect();
        let shapes: Vec<[[usize; 2]; 2]> = pairs
            .iter()
            .map(|pair| [[config.rank, pair.inputs], [pair.outputs, config.rank]])
            .collect();
        let tensors: Vec<NamedTensor<'_>> = pairs
            .iter()
            .zip(names.iter().zip(&shapes))
            .flat_map(|(pair, (names, shapes))| {
                let tensor = |i: usize, values| NamedTensor {
                    name: &names[i],
                    shape: &shapes[i],
                    values: TensorSlice::F32(values),
                };
                [tensor(0, pair.a), tensor(1, pair.b)]
            })
            .collect();
        write_tensors(path.join(TENSORS), &tensors, &[("format", "pt")])?;
        config.write(path.join(CONFIG))
    }
}

/// Describes a tensor that is not a LoRA matrix of a linear layer, for errors.
pub(crate) fn unsupported_part(name: &str) -> &'static str {
    let parts = [
        ("lora_embedding_", "an adapter of an embedding, which is not supported"),
        ("lora_magnitude_vector", "a DoRA magnitude, which is not supported"),
        ("modules_to_save", "a fully trained module, which is not supported"),
        ("bias", "a bias, which is not supported"),
    ];
    let found = parts.iter().find(|(part, _)| name.contains(part));
    found.map_or("not a LoRA matrix", |(_, description)| description)
}

/// Returns the name of a module's tensor A (0) or B (1).
pub(crate) fn matrix_name(module: &str, matrix: usize) -> String {
    format!("{PREFIX}{module}.lora_{}.weight", ["A", "B"][matrix])
}

/// Returns the module of a tensor name that `peft` gives to the frozen weights of the base model
/// below LoRA matrices, or `None` for other names. By default `peft` stores these weights for an
/// adapted `lm_head`.
pub(crate) fn frozen_module(name: &str) -> Option<&str> {
    name.strip_prefix(PREFIX)?.strip_suffix(".base_layer.weight")
}

/// Returns the module and the matrix (0 for A, 1 for B) of a tensor name, or `None` if it does not
/// name a LoRA matrix. The module of the unembedding is [`HEAD`] under either of its names.
pub(crate) fn parse_name(name: &str) -> Option<(&str, usize)> {
    let name = name.strip_prefix(PREFIX)?;
    let name = name.strip_suffix(".weight")?;
    let name = name.strip_suffix(".default").unwrap_or(name);
    let (module, matrix) = match name.strip_suffix(".lora_A") {
        Some(module) => (module, 0),
        None => (name.strip_suffix(".lora_B")?, 1),
    };
    Some((if module == SERVICE_HEAD { HEAD } else { module }, matrix))
}
