//! [`AdapterConversion`]: makes adapters of the hosted service loadable by `peft`.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::adapter::{
    CONFIG, HEAD, PREFIX, SERVICE_HEAD, TENSORS, frozen_module, matrix_name, parse_name,
};
use crate::atomic::write_file;
use crate::json_fields::read_small;
use crate::peft::selects;
use crate::{Error, Result, StoredTensor, TensorFile};

/// Field of the configuration with the name of the base model.
const BASE_MODEL: &str = "base_model_name_or_path";
/// Field of the configuration with the adapted modules.
const TARGET_MODULES: &str = "target_modules";

/// An adapter folder whose two files were checked, with the changes that `peft` needs to load it.
///
/// The hosted service names the unembedding `model.unembed_tokens`, and its configurations have
/// `"target_modules": "all-linear"`, with which `peft` leaves out the unembedding. The conversion
/// names the unembedding `lm_head`, lists the modules that the tensors adapt, and adds settings
/// that `peft` requires. It removes frozen weights of the base model, which `peft` stores beside the
/// LoRA matrices of `lm_head`. Other settings and the data of the tensors stay as they are. A
/// converted folder needs no further conversion.
#[derive(Debug)]
pub struct AdapterConversion {
    folder: PathBuf,
    config: Map<String, Value>,
    tensors: TensorFile,
    /// Whether a tensor has a name of the hosted service, or is a frozen weight.
    changes_tensors: bool,
    /// Whether the configuration changes, apart from the base model.
    changes_config: bool,
}

impl AdapterConversion {
    /// Names of the two files of an adapter folder.
    pub const FILES: [&str; 2] = [CONFIG, TENSORS];

    /// Checks the adapter in `folder`. Returns `None` if one of its two files does not exist.
    ///
    /// # Errors
    /// - [`Error::Io`] if a file cannot be read.
    /// - [`Error::BadFile`] if a file is damaged, the configuration does not state rank and alpha,
    ///   or a LoRA matrix has another rank.
    /// - [`Error::MissingTensor`] if A or B of a module is missing.
    pub fn open(folder: impl AsRef<Path>) -> Result<Option<Self>> {
        let folder = folder.as_ref();
        if !Self::FILES.iter().all(|name| folder.join(name).is_file()) {
            return Ok(None);
        }
        let path = folder.join(CONFIG);
        let mut config: Map<String, Value> = serde_json::from_slice(&read_small(&path)?)
            .map_err(|e| Error::bad_file(&path, format!("not an adapter configuration: {e}")))?;
        let rank = config.get("r").and_then(Value::as_u64).and_then(|r| usize::try_from(r).ok());
        let rank = rank.ok_or_else(|| {
            Error::bad_file(&path, "r is missing or not an integer, expected the adapter's rank")
        })?;
        if !config.get("lora_alpha").is_some_and(Value::is_number) {
            return Err(Error::bad_file(&path, "lora_alpha is missing or not a number"));
        }
        let has_rank_pattern =
            matches!(config.get("rank_pattern"), Some(Value::Object(ranks)) if !ranks.is_empty());
        let tensors = TensorFile::open(folder.join(TENSORS))?;
        let modules = check_pairs(&tensors, (!has_rank_pattern).then_some(rank))?;
        let renames = tensors.names().any(|name| matches!(renamed(name), Some(Cow::Owned(_))));
        let changes_tensors = renames || tensors.names().any(|name| renamed(name).is_none());
        let changes_config = complete(&mut config, &modules, renames);
        let folder = folder.to_owned();
        Ok(Some(Self { folder, config, tensors, changes_tensors, changes_config }))
    }

    /// Returns whether the configuration names the base model.
    #[must_use]
    pub fn has_base_model(&self) -> bool {
        self.config.get(BASE_MODEL).and_then(Value::as_str).is_some_and(|name| !name.is_empty())
    }

    /// Returns whether [`apply`](Self::apply) with this base model would change a file.
    #[must_use]
    pub fn is_needed(&self, base_model: Option<&str>) -> bool {
        self.changes_tensors
            || self.changes_config
            || (base_model.is_some() && !self.has_base_model())
    }

    /// Returns the bytes of disk space that [`apply`](Self::apply) needs while it replaces the
    /// tensors; 0 if they stay as they are. The configuration is negligible.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read.
    pub fn space_needed(&self) -> Result<u64> {
        if !self.changes_tensors {
            return Ok(0);
        }
        let path = self.tensors.path();
        Ok(std::fs::metadata(path).map_err(Error::io("read", path))?.len())
    }

    /// Converts the files. Adds `base_model` to the configuration if it does not name a base model.
    ///
    /// Each file is replaced atomically. An interrupted conversion can be repeated.
    ///
    /// # Errors
    /// [`Error::Io`] if a file cannot be read or written.
    pub fn apply(mut self, base_model: Option<&str>) -> Result<()> {
        if self.changes_tensors {
            self.tensors.write_renamed(self.folder.join(TENSORS), renamed)?;
        }
        if let Some(base_model) = base_model.filter(|_| !self.has_base_model()) {
            self.config.insert(BASE_MODEL.to_owned(), base_model.into());
            self.changes_config = true;
        }
        if !self.changes_config {
            return Ok(());
        }
        write_file(&self.folder.join(CONFIG), |out| out.write_all(&self.config_text()))
    }

    /// Returns the text of the configuration that `peft` needs, or `None` if the stored configuration
    /// needs no change.
    pub(crate) fn changed_config(&self) -> Option<Vec<u8>> {
        self.changes_config.then(|| self.config_text())
    }

    fn config_text(&self) -> Vec<u8> {
        serde_json::to_vec_pretty(&self.config).expect("a JSON value serializes")
    }
}

/// Returns the name that `peft` reads for a tensor, or `None` for frozen weights of the base model.
fn renamed(name: &str) -> Option<Cow<'_, str>> {
    if frozen_module(name).is_some() {
        return None;
    }
    let rest = name.strip_prefix(PREFIX).and_then(|name| name.strip_prefix(SERVICE_HEAD));
    Some(match rest {
        Some(rest) if rest.starts_with('.') => format!("{PREFIX}{HEAD}{rest}").into(),
        _ => name.into(),
    })
}

/// Checks that every adapted module has a pair of LoRA matrices, of rank `rank` if it is given.
/// Returns the names of the modules. The rank of matrices of experts, which have three dimensions,
/// is not checked.
fn check_pairs(tensors: &TensorFile, rank: Option<usize>) -> Result<BTreeSet<&str>> {
    let mut found: BTreeMap<&str, [bool; 2]> = BTreeMap::new();
    for tensor in tensors.tensors() {
        let Some((module, matrix)) = parse_name(tensor.name()) else { continue };
        if let Some(rank) = rank {
            check_rank(tensors.path(), &tensor, matrix, rank)?;
        }
        let pair = found.entry(module).or_default();
        if std::mem::replace(&mut pair[matrix], true) {
            let reason = format!("{module} has two tensors lora_{}", ["A", "B"][matrix]);
            return Err(Error::bad_file(tensors.path(), reason));
        }
    }
    for (module, pair) in &found {
        if let Some(matrix) = pair.iter().position(|exists| !exists) {
            let path = tensors.path().to_owned();
            let name = matrix_name(module, matrix);
            return Err(Error::MissingTensor { path, name });
        }
    }
    Ok(found.into_keys().collect())
}

/// Checks the rank of a matrix: `rank × inputs` for A (0), `outputs × rank` for B (1).
fn check_rank(path: &Path, tensor: &StoredTensor<'_>, matrix: usize, rank: usize) -> Result<()> {
    match *tensor.shape() {
        [rows, columns] if [rows, columns][matrix] != rank => {
            let reason = format!(
                "tensor {} has shape {:?}, but r in {CONFIG} is {rank}",
                tensor.name(),
                tensor.shape()
            );
            Err(Error::bad_file(path, reason))
        }
        _ => Ok(()),
    }
}

/// Adds the settings that `peft` needs to load tensors of `modules`. Returns whether any changed.
fn complete(config: &mut Map<String, Value>, modules: &BTreeSet<&str>, renames: bool) -> bool {
    let mut changed = false;
    let required = [("peft_type", "LORA"), ("task_type", "CAUSAL_LM"), ("bias", "none")];
    for (name, value) in required {
        if config.get(name).is_none_or(Value::is_null) {
            config.insert(name.to_owned(), value.into());
            changed = true;
        }
    }
    let lists_all = match config.get(TARGET_MODULES) {
        Some(Value::Array(targets)) => {
            let selected = |module: &&str| {
                targets.iter().filter_map(Value::as_str).any(|target| selects(target, module))
            };
            modules.iter().all(selected)
        }
        // A regular expression, written for the names that the tensors had before renaming.
        Some(Value::String(pattern)) => pattern != "all-linear" && !renames,
        _ => false,
    };
    if !lists_all {
        let names: BTreeSet<&str> =
            modules.iter().filter_map(|module| module.rsplit('.').next()).collect();
        config.insert(TARGET_MODULES.to_owned(), json!(names));
        changed = true;
    }
    changed
}
