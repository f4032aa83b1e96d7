//! [`LocalModels`]: model folders and GGUF files that the local server serves because a command
//! named their paths.
//!
//! The file `models.json` of the data folder keeps them, so that a run of such a model can be
//! resumed and sampled later without naming the path again.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tinkex_files::AtomicWrite;
use tinkex_runs::RunFolder;
use tinkex_server::{Server, ServerOptions, StartError};

use crate::environment::Environment;
use crate::error::{CommandError, Exit};

/// Paths of models by the names under which they are served.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct LocalModels(BTreeMap<String, PathBuf>);

impl LocalModels {
    fn file(data: &Path) -> PathBuf {
        data.join("models.json")
    }

    /// Reads the models of a data folder. A missing or invalid file has none.
    pub(crate) fn read(data: &Path) -> Self {
        let bytes = std::fs::read(Self::file(data)).unwrap_or_default();
        serde_json::from_slice(&bytes).unwrap_or_default()
    }

    /// Adds models to the list of a data folder.
    pub(crate) fn store(data: &Path, models: &[(String, PathBuf)]) -> Result<(), CommandError> {
        let mut all = Self::read(data);
        all.0.extend(models.iter().cloned());
        let text = serde_json::to_vec_pretty(&all).unwrap_or_default();
        let file = Self::file(data);
        let written = AtomicWrite::new(&file).write(text);
        written.map_err(|error| CommandError::file("write", file.display(), &error))
    }

    /// Returns the models whose files exist.
    pub(crate) fn existing(&self) -> Vec<(String, PathBuf)> {
        let existing = self.0.iter().filter(|(_, path)| path.exists());
        existing.map(|(name, path)| (name.clone(), path.clone())).collect()
    }

    /// Returns the name of a model: the one it has, or a new one after its folder or file.
    pub(crate) fn name_for(&self, path: &Path) -> String {
        let known = self.0.iter().find(|(_, known)| *known == path);
        if let Some((name, _)) = known {
            return name.clone();
        }
        let last = match path.extension() {
            Some(extension) if extension.eq_ignore_ascii_case("gguf") => path.file_stem(),
            _ => path.file_name(),
        };
        let last = last.unwrap_or_default().to_string_lossy();
        // Names of runs contain no slash, so a model and a run never have the same name.
        let base = format!("local/{}", if last.is_empty() { "model" } else { &*last });
        let numbered = |number: u32| match number {
            1 => base.clone(),
            _ => format!("{base}-{number}"),
        };
        (1..).map(numbered).find(|name| !self.0.contains_key(name)).unwrap_or(base)
    }
}

/// Server, and the models that it was started with.
pub(crate) struct StartedServer {
    pub(crate) server: Server,
    /// Models that the server serves from paths, by name.
    pub(crate) models: Vec<(String, PathBuf)>,
    /// Names of models that earlier commands used and that are no longer usable.
    pub(crate) skipped: Vec<String>,
}

/// Starts a server with the models of `options` and the usable models of `kept`.
pub(crate) async fn start_server(
    options: &ServerOptions,
    mut kept: Vec<(String, PathBuf)>,
) -> Result<StartedServer, StartError> {
    kept.retain(|(name, _)| options.models.iter().all(|(other, _)| other != name));
    let mut skipped = Vec::new();
    loop {
        let mut options = options.clone();
        options.models.extend(kept.iter().cloned());
        let models = options.models.clone();
        match Server::start(options).await {
            Ok(server) => return Ok(StartedServer { server, models, skipped }),
            // A model of an earlier command must not keep this command from its own.
            Err(StartError::InvalidModel { name, .. })
                if kept.iter().any(|(known, _)| *known == name) =>
            {
                kept.retain(|(known, _)| *known != name);
                skipped.push(name);
            }
            Err(error) => return Err(error),
        }
    }
}

/// Returns the path of the model that `text` names; `None` if `text` is the name of a model.
///
/// # Errors
///
/// Returns an error if `text` can only be a path, and there is no model.
pub(crate) fn model_path(
    environment: &Environment,
    text: &str,
) -> Result<Option<PathBuf>, CommandError> {
    let path = environment.path(text.as_ref());
    let is_gguf = Path::new(text).extension().is_some_and(|one| one.eq_ignore_ascii_case("gguf"));
    if path.join("config.json").is_file() || (is_gguf && path.is_file()) {
        let absolute = std::fs::canonicalize(&path);
        return absolute
            .map(Some)
            .map_err(|error| CommandError::file("open", format!("model {text}"), &error));
    }
    let is_run = RunFolder::contains_run(&path);
    let is_path = is_gguf || text.starts_with(['.', '/', '~', '\\']);
    if !is_path || is_run {
        return Ok(None);
    }
    let message = if path.is_dir() {
        format!("{text} contains no model: config.json is missing")
    } else {
        format!("model {text} does not exist")
    };
    Err(CommandError::new(Exit::NotFound, message).hint(
        "Pass a Hugging Face model folder, with config.json and safetensors files, or a GGUF file.",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_are_named_after_their_paths() {
        let data = tempfile::tempdir().unwrap();
        let folder = data.path().join("Qwen3-0.6B");
        let models = LocalModels::default();
        let name = "local/Qwen3-0.6B";
        assert_eq!(models.name_for(&folder), name);
        let file = Path::new("/models/qwen3-0.6b-q4_k_m.gguf");
        assert_eq!(models.name_for(file), "local/qwen3-0.6b-q4_k_m");
        LocalModels::store(data.path(), &[(name.to_owned(), folder.clone())]).unwrap();
        let stored = LocalModels::read(data.path());
        assert_eq!(stored.name_for(&folder), name);
        assert_eq!(stored.name_for(Path::new("/other/Qwen3-0.6B")), "local/Qwen3-0.6B-2");
        assert!(stored.existing().is_empty());
        std::fs::create_dir(&folder).unwrap();
        assert_eq!(stored.existing().len(), 1);
        std::fs::write(LocalModels::file(data.path()), "{").unwrap();
        assert_eq!(LocalModels::read(data.path()), LocalModels::default());
    }
}
