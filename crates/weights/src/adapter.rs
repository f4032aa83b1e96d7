//! [`AdapterFile`]: a PEFT adapter folder with a configuration and pairs of LoRA matrices.

use std::collections::BTreeMap;
use std::path::Path;

use crate::{
    Error, NamedTensor, PeftConfig, Result, StoredTensor, TensorFile, TensorSlice, write_tensors,
};

const CONFIG: &str = "adapter_config.json";
const TENSORS: &str = "adapter_model.safetensors";
/// Prefix of the tensor names.
const PREFIX: &str = "base_model.model.";
/// Module name of the unembedding in the engine and in `peft`.
const HEAD: &str = "lm_head";
/// Module name of the unembedding in the service's archives.
const SERVICE_HEAD: &str = "model.unembed_tokens";

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

/// Name of the unembedding's pair in an adapter file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnembeddingName {
    /// `lm_head`, the name that `peft` loads.
    #[default]
    Peft,
    /// `model.unembed_tokens`, the name in the hosted service's archives.
    Service,
}

impl AdapterFile {
    /// Reads the adapter folder `path`. Accepts both names of the unembedding.
    ///
    /// The files must not be modified while this function runs.
    ///
    /// # Errors
    /// - [`Error::Io`] if a file cannot be read.
    /// - [`Error::BadFile`] if a file is damaged, contains a tensor that is not a LoRA matrix or
    ///   does not have the configured rank, or contains a value that is not finite.
    /// - [`Error::MissingTensor`] if A or B of a module is missing.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let config = PeftConfig::read(path.join(CONFIG))?;
        let file = TensorFile::open(path.join(TENSORS))?;
        let mut matrices: BTreeMap<&str, [Option<StoredTensor<'_>>; 2]> = BTreeMap::new();
        for tensor in file.tensors() {
            let Some((module, matrix)) = parse_name(tensor.name()) else {
                let reason = format!("tensor {} is not a LoRA matrix", tensor.name());
                return Err(Error::bad_file(file.path(), reason));
            };
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
            let a = finite(file.path(), a.with_shape(&[config.rank, inputs])?)?;
            let b = finite(file.path(), b.with_shape(&[outputs, config.rank])?)?;
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
        head: UnembeddingName,
    ) -> Result<()> {
        let path = path.as_ref();
        let names: Vec<[String; 2]> = pairs
            .iter()
            .map(|pair| {
                let module = match (pair.module, head) {
                    (HEAD, UnembeddingName::Service) => SERVICE_HEAD,
                    (module, _) => module,
                };
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

/// Returns the module and the matrix (0 for A, 1 for B) of a tensor name.
fn parse_name(name: &str) -> Option<(&str, usize)> {
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
fn finite(path: &Path, tensor: StoredTensor<'_>) -> Result<Vec<f32>> {
    let values = tensor.to_f32()?;
    match values.iter().position(|value| !value.is_finite()) {
        None => Ok(values),
        Some(at) => {
            let reason = format!("tensor {} is {} at index {at}", tensor.name(), values[at]);
            Err(Error::bad_file(path, reason))
        }
    }
}
