//! [`ModelFolder`]: a Hugging Face model folder, with its tensors in one file or several.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::config::{EMBEDDING, UNEMBEDDING};
use crate::json_fields::{JsonFields, read_small};
use crate::{Error, ModelConfig, Result, StoredTensor, TensorFile};

/// Prefix of the names of all tensors except the unembedding. Files of a model without the
/// unembedding omit it.
const PREFIX: &str = "model.";

/// An open model folder. Tensors are read from its files when they are used.
#[derive(Debug)]
pub struct ModelFolder {
    path: PathBuf,
    config: ModelConfig,
    files: Vec<TensorFile>,
    locations: BTreeMap<String, TensorLocation>,
    warnings: Vec<String>,
}

/// Location of a tensor: the index of its file, and its name there.
#[derive(Clone, Debug)]
struct TensorLocation {
    file: usize,
    stored_name: String,
}

impl ModelFolder {
    /// Opens the folder `path` as [`inspect`](Self::inspect) does, and determines whether the
    /// embedding is also the unembedding.
    ///
    /// If `config.json` has `tie_word_embeddings: true` and the files contain both tensors with
    /// different values, both are used and [`warnings`](Self::warnings) says so, as in
    /// `transformers`. To find out, this function reads the two tensors; otherwise it loads no
    /// weights.
    ///
    /// # Errors
    /// As [`inspect`](Self::inspect); [`Error::Io`] if a tensor cannot be read.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let mut folder = Self::inspect(path)?;
        if folder.config.tied
            && folder.locations.contains_key(UNEMBEDDING)
            && !folder.tensor(EMBEDDING)?.has_values_of(&folder.tensor(UNEMBEDDING)?)?
        {
            folder.config.tied = false;
            folder.warnings.push(format!(
                "{} has tie_word_embeddings true, but {UNEMBEDDING} differs from {EMBEDDING}; both \
                 are used; set tie_word_embeddings to false to silence this warning",
                folder.path.join("config.json").display()
            ));
        }
        Ok(folder)
    }

    /// Opens the folder `path`: `config.json`, `generation_config.json` if it exists, then
    /// `model.safetensors`, or `model.safetensors.index.json` and the files that it names.
    ///
    /// Checks that every tensor of the architecture exists, with the right shape and an element
    /// type that can be converted to f32. Reads only headers: [`ModelConfig::tied`] is what
    /// `config.json` states.
    ///
    /// # Errors
    /// As [`ModelConfig::read`] and [`TensorFile::open`]; [`Error::MissingTensor`] or
    /// [`Error::BadFile`] if a tensor is missing or does not match the configuration, or if an
    /// index or the generation configuration is invalid.
    pub fn inspect(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let mut config = ModelConfig::read(path.join("config.json"))?;
        let mut warnings = Vec::new();
        config.eos = all_eos(path, &config, &mut warnings)?;
        let bos = config.bos.into_iter().collect();
        config.bos = known_tokens(path, "bos_token_id", bos, &config, &mut warnings).pop();
        let files = tensor_files(path)?;
        let mut locations = BTreeMap::new();
        for (i, file) in files.iter().enumerate() {
            for name in file.names() {
                let location = TensorLocation { file: i, stored_name: name.to_owned() };
                if locations.insert(name.to_owned(), location).is_some() {
                    let reason = format!("tensor {name} is also in another file of the model");
                    return Err(Error::bad_file(file.path(), reason));
                }
            }
        }
        normalize_names(&mut locations, config.tied);
        let mut folder = Self { path: path.to_owned(), config, files, locations, warnings };
        folder.check()?;
        Ok(folder)
    }

    /// Checks the existence, shape and element type of every tensor of the architecture, and warns
    /// about all others.
    fn check(&mut self) -> Result<()> {
        let mut known = BTreeSet::new();
        for (name, shape) in self.config.tensors() {
            self.tensor(&name)?.with_shape(&shape)?.as_float()?;
            known.insert(name);
        }
        if self.locations.contains_key(UNEMBEDDING) {
            let shape = [self.config.vocab_size, self.config.hidden_size];
            self.tensor(UNEMBEDDING)?.with_shape(&shape)?.as_float()?;
            known.insert(UNEMBEDDING.to_owned());
        }
        // Older files store the rotary frequencies, which the configuration determines.
        let is_unused =
            |name: &&String| !known.contains(*name) && !name.ends_with("rotary_emb.inv_freq");
        let unused: Vec<&String> = self.locations.keys().filter(is_unused).collect();
        if let Some(first) = unused.first() {
            let folder = self.path.display();
            let count = unused.len();
            self.warnings.push(format!(
                "{folder} has tensors that the architecture of config.json does not have, and \
                 which are ignored: {first}{}",
                if count > 1 { format!(" and {} more", count - 1) } else { String::new() }
            ));
        }
        Ok(())
    }

    /// Returns the architecture and dimensions of the model.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns warnings about properties of the folder that do not prevent its use.
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Returns the tensor `name`.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] if no file of the model contains it.
    pub fn tensor(&self, name: &str) -> Result<StoredTensor<'_>> {
        let location = self.locations.get(name);
        let found =
            location.and_then(|location| self.files[location.file].get(&location.stored_name));
        found.ok_or_else(|| Error::MissingTensor { path: self.path.clone(), name: name.to_owned() })
    }
}

/// Opens the files of the folder that contain tensors.
fn tensor_files(folder: &Path) -> Result<Vec<TensorFile>> {
    let single = folder.join("model.safetensors");
    let index = folder.join("model.safetensors.index.json");
    if single.exists() {
        return Ok(vec![TensorFile::open(single)?]);
    }
    if index.exists() {
        return shards(folder, &index);
    }
    let other = ["pytorch_model.bin", "pytorch_model.bin.index.json"];
    let other = other.iter().find(|name| folder.join(name).exists());
    Err(Error::bad_file(
        folder,
        match other {
            Some(other) => format!(
                "it has no model.safetensors, only {other}; convert the weights with \
                 save_pretrained of transformers"
            ),
            None => "it has no model.safetensors and no model.safetensors.index.json".to_owned(),
        },
    ))
}

#[derive(Deserialize)]
struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

/// Opens the files that an index names. All files must be in the folder itself.
fn shards(folder: &Path, index: &Path) -> Result<Vec<TensorFile>> {
    let ShardIndex { weight_map } = serde_json::from_slice(&read_small(index)?)
        .map_err(|e| Error::bad_file(index, format!("not an index of tensor files: {e}")))?;
    let mut names: Vec<&String> = weight_map.values().collect();
    names.sort();
    names.dedup();
    let mut files = Vec::with_capacity(names.len());
    for name in names {
        // A path could name a file outside the model folder.
        if Path::new(name).file_name() != Some(name.as_ref()) {
            let reason = format!("{name:?} is a path, expected the name of a file in the folder");
            return Err(Error::bad_file(index, reason));
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

/// Gives the tensors the names that they have in a complete model, as `transformers` does.
fn normalize_names(locations: &mut BTreeMap<String, TensorLocation>, tied: bool) {
    if !locations.contains_key(EMBEDDING)
        && locations.contains_key(EMBEDDING.strip_prefix(PREFIX).unwrap_or(EMBEDDING))
    {
        *locations = std::mem::take(locations)
            .into_iter()
            .map(|(name, location)| match name.as_str() {
                UNEMBEDDING => (name, location),
                _ => (format!("{PREFIX}{name}"), location),
            })
            .collect();
    }
    // A tied matrix may be stored under either name.
    if tied
        && !locations.contains_key(EMBEDDING)
        && let Some(location) = locations.get(UNEMBEDDING).cloned()
    {
        locations.insert(EMBEDDING.to_owned(), location);
        locations.remove(UNEMBEDDING);
    }
}

/// Returns the end-of-sequence tokens of `config.json` and of `generation_config.json`.
fn all_eos(folder: &Path, config: &ModelConfig, warnings: &mut Vec<String>) -> Result<Vec<u32>> {
    let mut eos = config.eos.clone();
    let path = folder.join("generation_config.json");
    if path.exists() {
        let generation: Map<String, Value> = serde_json::from_slice(&read_small(&path)?)
            .map_err(|e| Error::bad_file(&path, format!("not a generation configuration: {e}")))?;
        let ids = JsonFields::new(&generation).token_ids("eos_token_id");
        for id in ids.map_err(|reason| Error::bad_file(&path, reason))? {
            if !eos.contains(&id) {
                eos.push(id);
            }
        }
    }
    Ok(known_tokens(folder, "eos_token_id", eos, config, warnings))
}

/// Removes the tokens that the model does not have, with a warning for each. `field` is the name of
/// the setting that has the tokens.
fn known_tokens(
    folder: &Path,
    field: &str,
    mut ids: Vec<u32>,
    config: &ModelConfig,
    warnings: &mut Vec<String>,
) -> Vec<u32> {
    let vocab = config.vocab_size;
    ids.retain(|id| {
        let known = (*id as usize) < vocab;
        if !known {
            warnings.push(format!(
                "{} has the {field} {id}, but the model has {vocab} tokens; it is ignored",
                folder.display()
            ));
        }
        known
    });
    ids
}
