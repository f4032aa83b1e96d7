//! Base models: which there are, and where.
//!
//! Only their configurations are read here; weights are loaded by the worker when first used.

mod vocabulary;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use tinkex_engine::file::ModelConfig;
use tinkex_engine::sample::Vocabulary;
use tinkex_wire::SupportedModel;

use self::vocabulary::Table;

/// The base models of a server, by name.
#[derive(Debug, Default)]
pub(crate) struct Models(BTreeMap<String, Arc<BaseModel>>);

/// A base model.
#[derive(Debug)]
pub(crate) struct BaseModel {
    pub(crate) name: String,
    pub(crate) folder: PathBuf,
    pub(crate) config: ModelConfig,
    vocabulary: OnceLock<Result<Arc<Table>, String>>,
}

impl Models {
    /// Reads the configurations of the mapped folders and of those in a hub cache. A mapped folder
    /// that cannot be read is an error; one in the cache is left out.
    pub(crate) fn find(
        mapped: &[(String, PathBuf)],
        hub_cache: Option<&Path>,
    ) -> Result<Self, tinkex_engine::Error> {
        let mut all = BTreeMap::new();
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
        let supported = |model: &Arc<BaseModel>| SupportedModel {
            model_name: Some(model.name.clone()),
            max_context_length: u64::try_from(model.config.max_positions).ok(),
            trainable: Some(true),
            sampleable: Some(true),
        };
        self.0.values().map(supported).collect()
    }
}

impl BaseModel {
    fn read(name: &str, folder: &Path) -> Result<Self, tinkex_engine::Error> {
        let config = ModelConfig::read(folder.join("config.json"))?;
        let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
        Ok(Self { name: name.to_owned(), folder, config, vocabulary: OnceLock::new() })
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
    pub(crate) fn vocabulary(&self) -> Result<Arc<dyn Vocabulary>, String> {
        let read = || Table::read(&self.folder.join("tokenizer.json")).map(Arc::new);
        match self.vocabulary.get_or_init(read) {
            Ok(table) => Ok(Arc::clone(table) as Arc<dyn Vocabulary>),
            Err(why) => Err(why.clone()),
        }
    }

    /// The token that a text is, if it is exactly one special token.
    pub(crate) fn special(&self, text: &str) -> Option<u32> {
        self.vocabulary().ok()?;
        self.vocabulary.get()?.as_ref().ok()?.special(text)
    }
}

/// The models of a hub cache: `models--ORG--NAME/snapshots/REVISION`, the newest revision of each.
fn cached(hub: &Path) -> Vec<(String, PathBuf)> {
    let list = |path: &Path| {
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect::<Vec<_>>()
    };
    let mut found = Vec::new();
    for folder in list(hub) {
        let name = folder
            .file_name()
            .and_then(|name| name.to_str())
            .and_then(|name| name.strip_prefix("models--"));
        let Some(name) = name else { continue };
        let newest = list(&folder.join("snapshots"))
            .into_iter()
            .filter(|revision| revision.join("config.json").is_file())
            .max_by_key(|revision| {
                std::fs::metadata(revision).and_then(|about| about.modified()).ok()
            });
        found.extend(newest.map(|revision| (name.replacen("--", "/", 1), revision)));
    }
    found
}
