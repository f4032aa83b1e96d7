//! [`AdapterFile`]: a PEFT adapter folder with a configuration and pairs of LoRA matrices.

use std::collections::BTreeMap;
use std::path::Path;

use crate::{
    Error, NamedTensor, PeftConfig, Result, StoredTensor, TensorFile, TensorSlice, write_tensors,
};

pub(crate) const CONFIG: &str = "adapter_config.json";
pub(crate) const TENSORS: &str = "adapter_model.safetensors";
/// Prefix of the tensor names.
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
        let path = path.as_ref();
        let config = PeftConfig::read(path.join(CONFIG))?;
        let file = TensorFile::open(path.join(TENSORS))?;
        let mut matrices: BTreeMap<&str, [Option<StoredTensor<'_>>; 2]> = BTreeMap::new();
        for tensor in file.tensors() {
            let Some((module, matrix)) = parse_name(tensor.name()) else {
                let (name, part) = (tensor.name(), unsupported_part(tensor.name()));
                return Err(Error::bad_file(file.path(), format!("tensor {name} is {part}")));
            };
            // The service's name of the unembedding is in no configuration.
            let is_service_name = tensor.name()[PREFIX.len()..].starts_with(SERVICE_HEAD);
            if !is_service_name && !config.targets(module) {
                let name = tensor.name();
                let reason = format!("target_modules in {CONFIG} does not select tensor {name}");
                return Err(Error::bad_file(file.path(), reason));
            }
            if matrices.entry(module).or_default()[matrix].replace(tensor).is_some() {
                let reason = format!("{module} has two tensors lora_{}", ["A", "B"][matrix]);
                return Err(Error::bad_file(file.path(), reason));
            }
        }
        let mut pairs = Vec::with_capacity(matrices.len());
        for (module, [a, b]) in matrices {
            let missing = |matrix| Error::MissingTensor {
                path: file.path().to_owned(),
                name: format!("{PREFIX}{module}.lora_{matrix}.weight"),
            };
            let (a, b) = (a.ok_or_else(|| missing("A"))?, b.ok_or_else(|| missing("B"))?);
            let inputs = a.shape().last().copied().unwrap_or(0);
            let outputs = b.shape().first().copied().unwrap_or(0);
            let a = finite(a.with_shape(&[config.rank, inputs])?)?;
            let b = finite(b.with_shape(&[outputs, config.rank])?)?;
            pairs.push(LoraPair { module: module.to_owned(), inputs, outputs, a, b });
        }
        Ok(Self { config, pairs })
    }

    /// Writes `config` and `pairs` into the existing folder `path`.
    ///
    /// Each of the two files is replaced atomically. To replace both together, call this function
    /// inside [`write_folder`](super::write_folder).
    ///
    /// # Errors
    /// [`Error::InvalidTensor`] if a matrix does not have the size that its pair states; [`Error::Io`] if a
    /// file cannot be written.
    pub fn save(
        path: impl AsRef<Path>,
        config: &PeftConfig,
        pairs: &[LoraPairRef<'_>],
    ) -> Result<()> {
        let path = path.as_ref();
        let names: Vec<[String; 2]> = pairs
            .iter()
            .map(|pair| {
                let module = pair.module;
                ["A", "B"].map(|matrix| format!("{PREFIX}{module}.lora_{matrix}.weight"))
            })
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

/// Describes a tensor that is not a LoRA matrix of a linear layer.
fn unsupported_part(name: &str) -> &'static str {
    let parts = [
        ("lora_embedding_", "an adapter of an embedding, which is not supported"),
        ("lora_magnitude_vector", "a DoRA magnitude, which is not supported"),
        ("modules_to_save", "a fully trained module, which is not supported"),
        ("bias", "a bias, which is not supported"),
    ];
    let found = parts.iter().find(|(part, _)| name.contains(part));
    found.map_or("not a LoRA matrix", |(_, description)| description)
}

/// Returns the module and the matrix (0 for A, 1 for B) of a tensor name.
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

/// Returns the elements of a tensor, all of which must be finite.
fn finite(tensor: StoredTensor<'_>) -> Result<Vec<f32>> {
    let values = tensor.to_f32()?;
    tensor.check_finite(0, &values)?;
    Ok(values)
}
