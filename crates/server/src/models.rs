//! Base models that the server offers, and where their files are.
//!
//! Only configurations are read here. The worker loads weights on first use.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use tinkex_engine::builtin;
use tinkex_engine::tokenizer::Vocabulary;
use tinkex_files::{CachedRepo, HubCache};
use tinkex_weights::{ModelConfig, write_file};
use tinkex_wire::SupportedModel;

use crate::error::ServerError;

/// Base models of the server, by name.
#[derive(Debug, Default)]
pub(crate) struct BaseModels(BTreeMap<String, Arc<BaseModel>>);

/// A base model.
#[derive(Debug)]
pub(crate) struct BaseModel {
    pub(crate) name: String,
    /// Folder of its files. For the built-in model it contains only the tokenizer.
    pub(crate) folder: PathBuf,
    pub(crate) built_in: bool,
    pub(crate) config: ModelConfig,
    vocabulary: OnceLock<Result<Arc<Vocabulary>, String>>,
}

impl BaseModels {
    /// Finds the built-in model, the models of a hub cache and the models of `mapped` (name and
    /// folder); later ones replace earlier ones of the same name. Writes the built-in tokenizer to
    /// `tokenizer_dir`, so that other programs can load it.
    ///
    /// # Errors
    /// Fails if the configuration of a mapped folder cannot be read. A model in the hub cache whose
    /// configuration cannot be read is skipped.
    pub(crate) fn find(
        tokenizer_dir: &Path,
        mapped: &[(String, PathBuf)],
        hub_cache: Option<&Path>,
    ) -> Result<Self, tinkex_engine::Error> {
        let mut all = BTreeMap::new();
        all.insert(builtin::NAME.to_owned(), Arc::new(BaseModel::built_in(tokenizer_dir)?));
        for (name, folder) in hub_cache.map(hub_cache_models).unwrap_or_default() {
            if let Ok(model) = BaseModel::read(&name, &folder) {
                all.insert(name, Arc::new(model));
            }
        }
        for (name, folder) in mapped {
            all.insert(name.clone(), Arc::new(BaseModel::read(name, folder)?));
        }
        Ok(Self(all))
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Arc<BaseModel>> {
        self.0.get(name)
    }

    /// Returns a base model.
    ///
    /// # Errors
    /// Returns [`ServerError::NotFound`] with the names of the available models.
    pub(crate) fn require(&self, name: &str) -> Result<&Arc<BaseModel>, ServerError> {
        self.get(name).ok_or_else(|| ServerError::not_found(self.unavailable_message(name)))
    }

    /// Returns the error message for a base model that this server does not have.
    pub(crate) fn unavailable_message(&self, name: &str) -> String {
        let known: Vec<&str> = self.0.keys().map(String::as_str).collect();
        format!(
            "base model {name:?} is not available on this server; available: {}. Start the server \
             with --model {name}=FOLDER to serve a Hugging Face model folder under that name",
            known.join(", ")
        )
    }

    /// Returns the models in the API's form.
    pub(crate) fn supported(&self) -> Vec<SupportedModel> {
        let supported = |model: &Arc<BaseModel>| {
            SupportedModel::default()
                .model_name(Some(model.name.clone()))
                .max_context_length(u64::try_from(model.config.max_positions).ok())
                .trainable(Some(true))
                .sampleable(Some(true))
        };
        self.0.values().map(supported).collect()
    }
}

impl BaseModel {
    fn read(name: &str, folder: &Path) -> Result<Self, tinkex_engine::Error> {
        let config = ModelConfig::read(folder.join("config.json"))?;
        let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
        let vocabulary = OnceLock::new();
        Ok(Self { name: name.to_owned(), folder, built_in: false, config, vocabulary })
    }

    fn built_in(tokenizer_dir: &Path) -> Result<Self, tinkex_engine::Error> {
        let folder =
            std::path::absolute(tokenizer_dir).unwrap_or_else(|_| tokenizer_dir.to_owned());
        write_tokenizer(&folder)?;
        let (name, config) = (builtin::NAME.to_owned(), builtin::config()?);
        Ok(Self { name, folder, built_in: true, config, vocabulary: OnceLock::new() })
    }

    /// Returns the identifier for tokenizer libraries: the folder if it has a tokenizer, so that
    /// no download is needed, and the model's name otherwise.
    pub(crate) fn tokenizer_id(&self) -> String {
        if self.folder.join("tokenizer.json").is_file() {
            self.folder.to_string_lossy().into_owned()
        } else {
            self.name.clone()
        }
    }

    /// Returns the vocabulary, read on first use.
    pub(crate) fn vocabulary(&self) -> Result<Arc<Vocabulary>, String> {
        let path = self.folder.join("tokenizer.json");
        let read = || match Vocabulary::read(path) {
            Ok(vocabulary) => Ok(Arc::new(vocabulary)),
            Err(error) => Err(error.to_string()),
        };
        self.vocabulary.get_or_init(read).clone()
    }
}

/// `tokenizer_config.json` of the built-in model.
const TOKENIZER_CONFIG: &str = r#"{
  "tokenizer_class": "PreTrainedTokenizerFast",
  "eos_token": "<|im_end|>",
  "pad_token": "<|endoftext|>",
  "model_max_length": 2048,
  "chat_template": "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
}
"#;

/// Writes the tokenizer files of the built-in model to `folder`, in the layout of Hugging Face
/// tokenizer libraries. Files that already have this content are not rewritten.
///
/// # Errors
/// Fails if a file cannot be written.
pub fn write_tokenizer(folder: &Path) -> Result<(), tinkex_engine::Error> {
    let files: [(&str, &[u8]); 3] = [
        ("config.json", builtin::CONFIG),
        ("tokenizer.json", builtin::TOKENIZER),
        ("tokenizer_config.json", TOKENIZER_CONFIG.as_bytes()),
    ];
    for (name, content) in files {
        let path = folder.join(name);
        if std::fs::read(&path).ok().as_deref() != Some(content) {
            write_file(&path, |out| out.write_all(content))?;
        }
    }
    Ok(())
}

/// Lists the models in a hub cache with the folder of the revision that `main` refers to, or of the
/// newest complete revision. Repositories without weights are skipped: programs that need only a
/// tokenizer download no weights.
fn hub_cache_models(hub: &Path) -> Vec<(String, PathBuf)> {
    let modified = |path: &PathBuf| std::fs::metadata(path).and_then(|file| file.modified()).ok();
    let best_snapshot = |repo: &CachedRepo| {
        let main = repo.commit("main").map(|commit| repo.snapshot(&commit));
        let mut snapshots: Vec<PathBuf> =
            repo.snapshots().into_iter().filter(|path| is_complete(path)).collect();
        snapshots.sort_by_key(|path| (Some(path) == main.as_ref(), modified(path)));
        snapshots.pop()
    };
    let models = HubCache::new(hub).models().into_iter();
    models.filter_map(|(name, repo)| Some((name, best_snapshot(&repo)?))).collect()
}

/// Returns whether a folder has a configuration and weights.
fn is_complete(folder: &Path) -> bool {
    let has = |name: &str| folder.join(name).is_file();
    has("config.json") && (has("model.safetensors") || has("model.safetensors.index.json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a revision of a model in a hub cache with the given files of the golden model.
    fn revision(hub: &Path, model: &str, hash: &str, files: &[&str]) -> PathBuf {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/golden/qwen3");
        let folder = hub.join(model).join("snapshots").join(hash);
        std::fs::create_dir_all(&folder).unwrap();
        for file in files {
            std::fs::copy(golden.join(file), folder.join(file)).unwrap();
        }
        folder
    }

    const COMPLETE: &[&str] = &["config.json", "model.safetensors"];

    #[test]
    fn hub_cache_models_are_found_by_repository_name() {
        let hub = tempfile::tempdir().unwrap();
        let main = revision(hub.path(), "models--Qwen--Qwen3-0.6B", "aaa", COMPLETE);
        revision(hub.path(), "models--Qwen--Qwen3-0.6B", "bbb", COMPLETE);
        std::fs::create_dir(hub.path().join("models--Qwen--Qwen3-0.6B/refs")).unwrap();
        std::fs::write(hub.path().join("models--Qwen--Qwen3-0.6B/refs/main"), "aaa\n").unwrap();
        let only = revision(hub.path(), "models--plain", "ccc", COMPLETE);
        revision(hub.path(), "models--org--tokenizer-only", "ddd", &["config.json"]);
        let unknown = revision(hub.path(), "models--org--unknown", "eee", COMPLETE);
        std::fs::write(unknown.join("config.json"), "{\"model_type\": \"unknown\"}").unwrap();
        std::fs::create_dir(hub.path().join(".locks")).unwrap();
        std::fs::write(hub.path().join("version.txt"), "1").unwrap();

        let tokenizer = tempfile::tempdir().unwrap();
        let models = BaseModels::find(tokenizer.path(), &[], Some(hub.path())).unwrap();
        let names: Vec<&str> = models.0.keys().map(String::as_str).collect();
        assert_eq!(names, ["Qwen/Qwen3-0.6B", "plain", builtin::NAME]);
        assert_eq!(models.get("Qwen/Qwen3-0.6B").unwrap().folder, main);
        assert_eq!(models.get("plain").unwrap().folder, only);

        // A mapped folder replaces a cached model of the same name.
        let mapped = [("Qwen/Qwen3-0.6B".to_owned(), only.clone())];
        let models = BaseModels::find(tokenizer.path(), &mapped, Some(hub.path())).unwrap();
        assert_eq!(models.get("Qwen/Qwen3-0.6B").unwrap().folder, only);
        let missing = [("x".to_owned(), hub.path().join("missing"))];
        let error = BaseModels::find(tokenizer.path(), &missing, None).unwrap_err();
        assert!(error.to_string().contains("missing"), "{error}");
    }
}
