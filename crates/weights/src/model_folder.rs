//! [`ModelFolder`]: a Hugging Face model folder, with its tensors in one file or several.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::config::{ModelConfig, OneOrMany, read_small};
use crate::{Error, Result, StoredTensor, TensorFile};

/// An open model folder. Tensors are read from its files when they are used.
#[derive(Debug)]
pub struct ModelFolder {
    path: PathBuf,
    config: ModelConfig,
    files: Vec<TensorFile>,
    /// File index of each tensor.
    file_of: BTreeMap<String, usize>,
}

impl ModelFolder {
    /// Opens the folder `path`: `config.json`, then `model.safetensors`, or
    /// `model.safetensors.index.json` and the files that it names.
    ///
    /// Checks that every tensor of the architecture exists, with the right shape and an element
    /// type that can be converted to f32. Loads no weights.
    ///
    /// # Errors
    /// As [`ModelConfig::read`] and [`TensorFile::open`]; [`Error::MissingTensor`] or
    /// [`Error::BadFile`] if a tensor is missing or does not match the configuration.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let mut config = ModelConfig::read(path.join("config.json"))?;
        config.eos = all_eos(path, config.eos)?;
        let single = path.join("model.safetensors");
        let index = path.join("model.safetensors.index.json");
        let files = if single.exists() || !index.exists() {
            vec![TensorFile::open(single)?]
        } else {
            shards(path, &index)?
        };
        let mut file_of = BTreeMap::new();
        for (i, file) in files.iter().enumerate() {
            for name in file.names() {
                if file_of.insert(name.to_owned(), i).is_some() {
                    let reason = format!("tensor {name} is also in another file of the model");
                    return Err(Error::bad_file(file.path(), reason));
                }
            }
        }
        let folder = Self { path: path.to_owned(), config, files, file_of };
        folder.check()?;
        Ok(folder)
    }

    /// Checks the existence, shape and element type of every tensor of the architecture.
    fn check(&self) -> Result<()> {
        for (name, shape) in self.config.tensors() {
            self.tensor(&name)?.with_shape(&shape)?.as_float()?;
        }
        Ok(())
    }

    /// Returns the architecture and dimensions of the model.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns the tensor `name`.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] if no file of the model contains it.
    pub fn tensor(&self, name: &str) -> Result<StoredTensor<'_>> {
        let found = self.file_of.get(name).and_then(|&i| self.files[i].get(name));
        found.ok_or_else(|| Error::MissingTensor { path: self.path.clone(), name: name.to_owned() })
    }
}

#[derive(Deserialize)]
struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

/// Opens the files that an index names. All of them must be in the folder itself.
fn shards(folder: &Path, index: &Path) -> Result<Vec<TensorFile>> {
    let ShardIndex { weight_map } = serde_json::from_slice(&read_small(index)?)
        .map_err(|e| Error::bad_file(index, format!("not an index of tensor files: {e}")))?;
    let mut names: Vec<&String> = weight_map.values().collect();
    names.sort();
    names.dedup();
    let mut files = Vec::with_capacity(names.len());
    for name in names {
        // A path could make the engine read files outside the model folder.
        if Path::new(name).file_name() != Some(name.as_ref()) {
            return Err(Error::bad_file(index, format!("{name:?} is not a plain file name")));
        }
        files.push(TensorFile::open(folder.join(name))?);
    }
    for (tensor, file) in &weight_map {
        let shard = files.iter().find(|shard| shard.path().file_name() == Some(file.as_ref()));
        if shard.is_none_or(|shard| shard.get(tensor).is_none()) {
            return Err(Error::MissingTensor { path: folder.join(file), name: tensor.clone() });
        }
    }
    Ok(files)
}

/// Returns the end-of-sequence tokens of `config.json`, given as `eos`, and of
/// `generation_config.json`.
fn all_eos(folder: &Path, mut eos: Vec<u32>) -> Result<Vec<u32>> {
    #[derive(Deserialize)]
    struct GenerationConfig {
        eos_token_id: Option<OneOrMany>,
    }
    let path = folder.join("generation_config.json");
    if path.exists() {
        let generation: GenerationConfig = serde_json::from_slice(&read_small(&path)?)
            .map_err(|e| Error::bad_file(&path, format!("not a generation configuration: {e}")))?;
        for id in generation.eos_token_id.map(OneOrMany::all).unwrap_or_default() {
            if !eos.contains(&id) {
                eos.push(id);
            }
        }
    }
    Ok(eos)
}
