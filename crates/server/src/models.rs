//! Base models: which there are, and where.
//!
//! Only their configurations are read here; weights are loaded by the worker when first used.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use tinkex_engine::builtin;
use tinkex_engine::file::{ModelConfig, write_file};
use tinkex_engine::tokenizer::Vocabulary;
use tinkex_files::{CachedRepo, HubCache};
use tinkex_wire::SupportedModel;

/// The base models of a server, by name.
#[derive(Debug, Default)]
pub(crate) struct Models(BTreeMap<String, Arc<BaseModel>>);

/// A base model.
#[derive(Debug)]
pub(crate) struct BaseModel {
    pub(crate) name: String,
    /// Where its files are. Of the built-in model these are only the tokenizer's.
    pub(crate) folder: PathBuf,
    pub(crate) built_in: bool,
    pub(crate) config: ModelConfig,
    vocabulary: OnceLock<Result<Arc<Vocabulary>, String>>,
}

impl Models {
    /// The built-in model, those of a hub cache, and the mapped folders. A mapped folder that cannot
    /// be read is an error; one in the cache is left out. `own` gets the built-in tokenizer, so that
    /// other programs can load it.
    pub(crate) fn find(
        own: &Path,
        mapped: &[(String, PathBuf)],
        hub_cache: Option<&Path>,
    ) -> Result<Self, tinkex_engine::Error> {
        let mut all = BTreeMap::new();
        all.insert(builtin::NAME.to_owned(), Arc::new(BaseModel::built_in(own)?));
        for (name, folder) in hub_cache.map(cached).unwrap_or_default() {
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

    /// Why there is no such model.
    pub(crate) fn missing(&self, name: &str) -> String {
        let known: Vec<&str> = self.0.keys().map(String::as_str).collect();
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        format!(
            "this server has no base model {name:?}; it has: {known}. \
             Start it with --model {name}=FOLDER to serve a Hugging Face folder under that name"
        )
    }

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

    fn built_in(own: &Path) -> Result<Self, tinkex_engine::Error> {
        let folder = std::path::absolute(own).unwrap_or_else(|_| own.to_owned());
        write_tokenizer(&folder)?;
        let (name, config) = (builtin::NAME.to_owned(), builtin::config()?);
        Ok(Self { name, folder, built_in: true, config, vocabulary: OnceLock::new() })
    }

    /// What to give a tokenizer library: the folder if it has one, which works without a network.
    pub(crate) fn tokenizer_id(&self) -> String {
        if self.folder.join("tokenizer.json").is_file() {
            self.folder.to_string_lossy().into_owned()
        } else {
            self.name.clone()
        }
    }

    /// The bytes of its tokens, read when first asked for.
    pub(crate) fn vocabulary(&self) -> Result<Arc<Vocabulary>, String> {
        let path = self.folder.join("tokenizer.json");
        let read = || match Vocabulary::read(path) {
            Ok(vocabulary) => Ok(Arc::new(vocabulary)),
            Err(why) => Err(why.to_string()),
        };
        self.vocabulary.get_or_init(read).clone()
    }
}

/// What tokenizer libraries read beside the built-in `tokenizer.json`.
const TOKENIZER_CONFIG: &str = r#"{
  "tokenizer_class": "PreTrainedTokenizerFast",
  "eos_token": "<|im_end|>",
  "pad_token": "<|endoftext|>",
  "model_max_length": 2048,
  "chat_template": "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
}
"#;

/// Writes the tokenizer of the built-in model into a folder, as tokenizer libraries read it. Files
/// that are right already are left alone.
///
/// # Errors
/// If the folder cannot be written to.
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

/// Lists the models in a hub cache with the folder of the revision that `main` stands for, or of
/// the newest one. Repositories without weights are left out: programs that only need a tokenizer
/// download nothing else.
fn cached(hub: &Path) -> Vec<(String, PathBuf)> {
    let modified = |path: &PathBuf| std::fs::metadata(path).and_then(|about| about.modified()).ok();
    let chosen = |repo: &CachedRepo| {
        let main = repo.commit("main").map(|commit| repo.snapshot(&commit));
        let mut snapshots: Vec<PathBuf> =
            repo.snapshots().into_iter().filter(|path| is_whole(path)).collect();
        snapshots.sort_by_key(|path| (Some(path) == main.as_ref(), modified(path)));
        snapshots.pop()
    };
    let models = HubCache::new(hub).models().into_iter();
    models.filter_map(|(name, repo)| Some((name, chosen(&repo)?))).collect()
}

/// Whether a folder has what a model needs.
fn is_whole(folder: &Path) -> bool {
    let has = |name: &str| folder.join(name).is_file();
    has("config.json") && (has("model.safetensors") || has("model.safetensors.index.json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A revision of a model in a cache, with these files of the golden one.
    fn revision(hub: &Path, model: &str, hash: &str, files: &[&str]) -> PathBuf {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/golden/qwen3");
        let folder = hub.join(model).join("snapshots").join(hash);
        std::fs::create_dir_all(&folder).unwrap();
        for file in files {
            std::fs::copy(golden.join(file), folder.join(file)).unwrap();
        }
        folder
    }

    const WHOLE: &[&str] = &["config.json", "model.safetensors"];

    #[test]
    fn the_models_of_a_hub_cache_are_found_by_name() {
        let hub = tempfile::tempdir().unwrap();
        let main = revision(hub.path(), "models--Qwen--Qwen3-0.6B", "aaa", WHOLE);
        revision(hub.path(), "models--Qwen--Qwen3-0.6B", "bbb", WHOLE);
        std::fs::create_dir(hub.path().join("models--Qwen--Qwen3-0.6B/refs")).unwrap();
        std::fs::write(hub.path().join("models--Qwen--Qwen3-0.6B/refs/main"), "aaa\n").unwrap();
        let only = revision(hub.path(), "models--plain", "ccc", WHOLE);
        revision(hub.path(), "models--org--tokenizer-only", "ddd", &["config.json"]);
        let strange = revision(hub.path(), "models--org--strange", "eee", WHOLE);
        std::fs::write(strange.join("config.json"), "{\"model_type\": \"strange\"}").unwrap();
        std::fs::create_dir(hub.path().join(".locks")).unwrap();
        std::fs::write(hub.path().join("version.txt"), "1").unwrap();

        let own = tempfile::tempdir().unwrap();
        let models = Models::find(own.path(), &[], Some(hub.path())).unwrap();
        let names: Vec<&str> = models.0.keys().map(String::as_str).collect();
        assert_eq!(names, ["Qwen/Qwen3-0.6B", "plain", builtin::NAME]);
        assert_eq!(models.get("Qwen/Qwen3-0.6B").unwrap().folder, main);
        assert_eq!(models.get("plain").unwrap().folder, only);

        // A folder that the user names stands above what lies around.
        let mapped = [("Qwen/Qwen3-0.6B".to_owned(), only.clone())];
        let models = Models::find(own.path(), &mapped, Some(hub.path())).unwrap();
        assert_eq!(models.get("Qwen/Qwen3-0.6B").unwrap().folder, only);
        let missing = [("x".to_owned(), hub.path().join("nowhere"))];
        let error = Models::find(own.path(), &missing, None).unwrap_err();
        assert!(error.to_string().contains("nowhere"), "{error}");
    }
}
