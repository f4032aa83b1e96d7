//! A PEFT adapter folder: a configuration and pairs of thin matrices.

use std::collections::BTreeMap;
use std::path::Path;

use super::peft::PeftConfig;
use super::safetensors::{NamedTensor, TensorFile, TensorSlice, TensorView, write_tensors};
use crate::{Error, Result};

const CONFIG: &str = "adapter_config.json";
const TENSORS: &str = "adapter_model.safetensors";
const PREFIX: &str = "base_model.model.";
/// What the pair on the unembedding is called inside the engine, and by `peft`.
const HEAD: &str = "lm_head";
const SERVICE_HEAD: &str = "model.unembed_tokens";

/// An adapter on disk.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterFile {
    /// Its rank and scale.
    pub config: PeftConfig,
    /// Its pairs, by name of the module.
    pub pairs: Vec<LoraPair>,
}

/// What is added to one module: `scale · B · A`.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraPair {
    /// Which module: `model.layers.0.self_attn.q_proj`, …, or `lm_head` for the unembedding.
    pub module: String,
    /// Width of what goes in.
    pub inputs: usize,
    /// Width of what comes out.
    pub outputs: usize,
    /// `rank` rows of `inputs`.
    pub a: Vec<f32>,
    /// `outputs` rows of `rank`; not scaled.
    pub b: Vec<f32>,
}

/// A [`LoraPair`] to be written.
#[derive(Clone, Copy, Debug)]
pub struct LoraPairRef<'a> {
    /// Which module, as in [`LoraPair::module`].
    pub module: &'a str,
    /// Width of what goes in.
    pub inputs: usize,
    /// Width of what comes out.
    pub outputs: usize,
    /// `rank` rows of `inputs`.
    pub a: &'a [f32],
    /// `outputs` rows of `rank`; not scaled.
    pub b: &'a [f32],
}

/// What the pair on the unembedding is called in the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnembeddingName {
    /// `lm_head`, which `peft` loads.
    #[default]
    Peft,
    /// `model.unembed_tokens`, as the service's archives call it.
    Service,
}

impl AdapterFile {
    /// Reads the folder `path`.
    ///
    /// Both names of the unembedding are understood.
    ///
    /// # Errors
    /// [`Error::Io`] and [`Error::BadFile`]; [`Error::MissingTensor`] if half of a pair is missing;
    /// [`Error::Shape`] if a matrix does not have the rank that the configuration says.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let config = PeftConfig::read(path.join(CONFIG))?;
        let file = TensorFile::open(path.join(TENSORS))?;
        let mut halves: BTreeMap<&str, [Option<TensorView<'_>>; 2]> = BTreeMap::new();
        for tensor in file.tensors() {
            let Some((module, half)) = parse(tensor.name()) else {
                let why = format!("tensor {} is not half of a LoRA pair", tensor.name());
                return Err(Error::bad_file(file.path(), why));
            };
            if halves.entry(module).or_default()[half].replace(tensor).is_some() {
                let why = format!("there are two tensors {} for {module}", ["A", "B"][half]);
                return Err(Error::bad_file(file.path(), why));
            }
        }
        let mut pairs = Vec::with_capacity(halves.len());
        for (module, [a, b]) in halves {
            let missing = |half| Error::MissingTensor {
                path: file.path().to_owned(),
                name: format!("{PREFIX}{module}.lora_{half}.weight"),
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

    /// Writes `config` and `pairs` into the folder `path`, which must exist.
    ///
    /// Each of the two files appears whole; to have both appear together, and with others, call
    /// this inside [`write_folder`](super::write_folder).
    ///
    /// # Errors
    /// [`Error::Shape`] if a matrix does not have the size that its pair says, [`Error::Io`].
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
                ["A", "B"].map(|half| format!("{PREFIX}{module}.lora_{half}.weight"))
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
                let half = |i: usize, values| NamedTensor {
                    name: &names[i],
                    shape: &shapes[i],
                    values: TensorSlice::F32(values),
                };
                [half(0, pair.a), half(1, pair.b)]
            })
            .collect();
        write_tensors(path.join(TENSORS), &tensors, &[("format", "pt")])?;
        config.write(path.join(CONFIG))
    }
}

/// The module and the half (0 for A, 1 for B) that a tensor's name means.
fn parse(name: &str) -> Option<(&str, usize)> {
    let name = name.strip_prefix(PREFIX)?;
    let name = name.strip_suffix(".weight")?;
    let name = name.strip_suffix(".default").unwrap_or(name);
    let (module, half) = match name.strip_suffix(".lora_A") {
        Some(module) => (module, 0),
        None => (name.strip_suffix(".lora_B")?, 1),
    };
    Some((if module == SERVICE_HEAD { HEAD } else { module }, half))
}

/// Its numbers, all of which a model can be run with.
fn finite(path: &Path, tensor: TensorView<'_>) -> Result<Vec<f32>> {
    let values = tensor.to_f32()?.into_owned();
    match values.iter().position(|value| !value.is_finite()) {
        None => Ok(values),
        Some(at) => {
            let why = format!("tensor {} holds {} at {at}", tensor.name(), values[at]);
            Err(Error::bad_file(path, why))
        }
    }
}
