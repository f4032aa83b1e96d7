//! A Hugging Face model folder: a configuration and its tensors, in one file or several.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::config::{ModelConfig, OneOrMany, read_small};
use super::safetensors::{TensorFile, TensorView};
use crate::{Error, Result};

/// A model on disk, mapped into memory.
///
/// Opening checks that every tensor of the architecture is there, with the right shape and a
/// type that can be read; nothing is loaded yet.
#[derive(Debug)]
pub struct ModelFolder {
    path: PathBuf,
    config: ModelConfig,
    files: Vec<TensorFile>,
    /// Which file has which tensor.
    places: BTreeMap<String, usize>,
}

impl ModelFolder {
    /// Opens the folder `path`: `config.json`, then `model.safetensors`, or
    /// `model.safetensors.index.json` and the files it names.
    ///
    /// # Errors
    /// As [`ModelConfig::read`] and [`TensorFile::open`]; [`Error::MissingTensor`] or
    /// [`Error::Shape`] if a tensor is not there or not as the configuration says.
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
        let mut places = BTreeMap::new();
        for (i, file) in files.iter().enumerate() {
            for name in file.names() {
                if places.insert(name.to_owned(), i).is_some() {
                    let why = format!("tensor {name} is in two files of the model");
                    return Err(Error::bad_file(file.path(), why));
                }
            }
        }
        let folder = Self { path: path.to_owned(), config, files, places };
        folder.check()?;
        Ok(folder)
    }

    fn check(&self) -> Result<()> {
        for (name, shape) in self.config.tensors() {
            self.tensor(&name)?.with_shape(&shape)?.as_float()?;
        }
        Ok(())
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What kind of model, and how large.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The tensor `name`.
    ///
    /// # Errors
    /// [`Error::MissingTensor`].
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>> {
        let found = self.places.get(name).and_then(|&i| self.files[i].get(name));
        found.ok_or_else(|| Error::MissingTensor { path: self.path.clone(), name: name.to_owned() })
    }

    /// Whether there is a tensor `name`.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.places.contains_key(name)
    }
}

#[derive(Deserialize)]
struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

/// The files that an index names, each once, all of them in the folder itself.
fn shards(folder: &Path, index: &Path) -> Result<Vec<TensorFile>> {
    let ShardIndex { weight_map } = serde_json::from_slice(&read_small(index)?)
        .map_err(|e| Error::bad_file(index, format!("is not an index of tensors: {e}")))?;
    let mut names: Vec<&String> = weight_map.values().collect();
    names.sort();
    names.dedup();
    let mut files = Vec::with_capacity(names.len());
    for name in names {
        // A model may not make us read files elsewhere.
        if Path::new(name).file_name() != Some(name.as_ref()) {
            return Err(Error::bad_file(index, format!("{name:?} is not the name of a file")));
        }
        files.push(TensorFile::open(folder.join(name))?);
    }
    for (tensor, file) in &weight_map {
        let holder = files.iter().find(|open| open.path().file_name() == Some(file.as_ref()));
        if holder.is_none_or(|holder| holder.get(tensor).is_none()) {
            return Err(Error::MissingTensor { path: folder.join(file), name: tensor.clone() });
        }
    }
    Ok(files)
}

/// What ends a sequence, by both files that may say so.
fn all_eos(folder: &Path, mut eos: Vec<u32>) -> Result<Vec<u32>> {
    #[derive(Deserialize)]
    struct GenerationConfig {
        eos_token_id: Option<OneOrMany>,
    }
    let path = folder.join("generation_config.json");
    if path.exists() {
        let generation: GenerationConfig = serde_json::from_slice(&read_small(&path)?)
            .map_err(|e| Error::bad_file(&path, format!("is not a configuration: {e}")))?;
        for id in generation.eos_token_id.map(OneOrMany::all).unwrap_or_default() {
            if !eos.contains(&id) {
                eos.push(id);
            }
        }
    }
    Ok(eos)
}
