//! Base models that the server offers, and where their files are.
//!
//! Configurations, the headers of the weights and tokenizers are checked here, when the server
//! starts. The worker loads weights on first use. The models of an upstream are added when it first
//! responds; of those, only the tokenizer is read here.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockReadGuard};

use tinkex_engine::builtin;
use tinkex_engine::tokenizer::Vocabulary;
use tinkex_files::HubCache;
use tinkex_text::Tokenizer;
use tinkex_weights::{Error as FileError, ModelConfig, ModelFolder, write_file};
use tinkex_wire::SupportedModel;

use crate::error::{ServerError, with_causes};
use crate::inference::ChatModel;
use crate::start_error::StartError;
use crate::{gguf, log};

/// Base models of the server, by name.
#[derive(Debug, Default)]
pub(crate) struct BaseModels {
    usable: RwLock<BTreeMap<String, Arc<BaseModel>>>,
    /// Models of the hub cache that cannot be used, with the reason.
    skipped: BTreeMap<String, String>,
    /// Names of the models of `--model`, which upstreams do not replace.
    mapped: Vec<String>,
    hub_cache: Option<PathBuf>,
}

/// A base model.
#[derive(Debug)]
pub(crate) struct BaseModel {
    pub(crate) name: String,
    /// Folder of its tokenizer, and of its other files unless they are a GGUF file.
    pub(crate) folder: PathBuf,
    pub(crate) source: ModelSource,
    on_first_use: LazyFiles,
}

/// What computes with a base model.
#[derive(Debug)]
pub(crate) enum ModelSource {
    Engine(EngineModel),
    Upstream(UpstreamModel),
}

/// A base model of the engine.
#[derive(Debug)]
pub(crate) struct EngineModel {
    /// Folder or GGUF file of its weights.
    pub(crate) weights: PathBuf,
    pub(crate) built_in: bool,
    /// Configuration at the start of the server, with the end-of-sequence tokens of all files.
    /// [`ModelConfig::tied`] is known only after the weights are loaded.
    pub(crate) config: ModelConfig,
    /// Warnings about the files that were logged at the start.
    pub(crate) warnings: Vec<String>,
}

/// A base model of one or more upstreams.
#[derive(Debug)]
pub(crate) struct UpstreamModel {
    /// Names of the upstreams that serve it.
    pub(crate) upstreams: Vec<Arc<str>>,
    /// Context length that they report.
    context: Option<usize>,
    /// Configuration, if its folder is on this machine.
    config: Option<ModelConfig>,
}

/// Files of a base model that are read on first use.
#[derive(Debug, Default)]
struct LazyFiles {
    vocabulary: OnceLock<Result<Arc<Vocabulary>, String>>,
    tokenizer: OnceLock<Option<Tokenizer>>,
    chat: OnceLock<Result<ChatModel, String>>,
}

impl BaseModels {
    /// Finds the built-in model, the models of a hub cache and the models of `mapped` (name, and
    /// folder or GGUF file); later ones replace earlier ones of the same name. Writes the
    /// tokenizers of the built-in model and of GGUF files to `tokenizer_dir`, so that other
    /// programs can load them.
    ///
    /// # Errors
    /// [`StartError::InvalidModel`] if a mapped folder or file cannot be used. A model in the hub
    /// cache that cannot be used is skipped and logged.
    pub(crate) fn find(
        tokenizer_dir: &Path,
        mapped: &[(String, PathBuf)],
        hub_cache: Option<&Path>,
    ) -> Result<Self, StartError> {
        let mut usable = BTreeMap::new();
        let mut skipped = BTreeMap::new();
        let built_in = BaseModel::built_in(tokenizer_dir)
            .map_err(|error| StartError::invalid_model(builtin::NAME, tokenizer_dir, error))?;
        usable.insert(builtin::NAME.to_owned(), Arc::new(built_in));
        for (name, folder) in hub_cache.map(hub_cache_models).unwrap_or_default() {
            match BaseModel::read(&name, &folder, tokenizer_dir) {
                Ok(model) => {
                    usable.insert(name, Arc::new(model));
                }
                Err(error) => {
                    let reason = with_causes(&error);
                    // A cache usually has models for other programs, too.
                    if matches!(error, FileError::UnknownArchitecture { .. }) {
                        tracing::info!(
                            target: log::MODEL, base_model = %name, reason,
                            "model of the hub cache is not supported"
                        );
                    } else {
                        tracing::warn!(
                            target: log::MODEL, base_model = %name, reason,
                            "model of the hub cache is skipped"
                        );
                    }
                    skipped.insert(name, reason);
                }
            }
        }
        for (name, path) in mapped {
            let model = BaseModel::read(name, path, tokenizer_dir)
                .map_err(|error| StartError::invalid_model(name, path, error.into()))?;
            model.check_tokenizer();
            usable.insert(name.clone(), Arc::new(model));
        }
        let mapped = mapped.iter().map(|(name, _)| name.clone()).collect();
        let hub_cache = hub_cache.map(Path::to_owned);
        Ok(Self { usable: RwLock::new(usable), skipped, mapped, hub_cache })
    }

    fn usable(&self) -> RwLockReadGuard<'_, BTreeMap<String, Arc<BaseModel>>> {
        self.usable.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a model of an upstream, or adds the upstream to those of the model. Models of `--model`
    /// are not replaced, nor is the built-in model.
    #[cfg(feature = "upstream")]
    pub(crate) fn add_upstream(&self, upstream: &Arc<str>, name: &str, context: Option<usize>) {
        let known = self.get(name);
        match known.as_ref().map(|model| &model.source) {
            Some(ModelSource::Engine(engine))
                if engine.built_in || self.mapped.iter().any(|mapped| mapped == name) =>
            {
                return;
            }
            Some(ModelSource::Upstream(model)) if model.upstreams.contains(upstream) => return,
            Some(_) | None => {}
        }
        let folder = self.tokenizer_folder(name);
        let config = ModelConfig::read(folder.join("config.json")).ok();
        let mut usable = self.usable.write().unwrap_or_else(PoisonError::into_inner);
        // Look again with the lock: another upstream may have added the model meanwhile.
        let mut upstreams = match usable.get(name).map(|model| &model.source) {
            Some(ModelSource::Upstream(model)) => model.upstreams.clone(),
            Some(ModelSource::Engine(_)) | None => Vec::new(),
        };
        upstreams.push(Arc::clone(upstream));
        let source = ModelSource::Upstream(UpstreamModel { upstreams, context, config });
        let model =
            BaseModel { name: name.to_owned(), folder, source, on_first_use: LazyFiles::default() };
        usable.insert(name.to_owned(), Arc::new(model));
    }

    /// Returns the folder with the tokenizer and the configuration of an upstream's model: the name
    /// may be a folder of this machine, or the name of a model in the hub cache. Its weights need
    /// not be cached.
    #[cfg(feature = "upstream")]
    fn tokenizer_folder(&self, name: &str) -> PathBuf {
        let cached = self.hub_cache.as_deref().and_then(|hub| {
            let mut models = HubCache::new(hub).models().into_iter();
            let (_, repo) = models.find(|(cached, _)| cached == name)?;
            let main = || repo.commit("main").map(|commit| repo.snapshot(&commit));
            repo.model_folder().or_else(|| main().filter(|folder| folder.is_dir()))
        });
        cached.unwrap_or_else(|| PathBuf::from(name))
    }

    /// Returns the names of the usable models, in alphabetical order.
    pub(crate) fn names(&self) -> Vec<String> {
        self.usable().keys().cloned().collect()
    }

    pub(crate) fn get(&self, name: &str) -> Option<Arc<BaseModel>> {
        self.usable().get(name).cloned()
    }

    /// Returns a base model.
    ///
    /// # Errors
    /// Returns [`ServerError::NotFound`] with the names of the available models.
    pub(crate) fn require(&self, name: &str) -> Result<Arc<BaseModel>, ServerError> {
        self.get(name).ok_or_else(|| ServerError::not_found(self.unavailable_message(name)))
    }

    /// Returns a base model of the engine with its configuration.
    ///
    /// # Errors
    /// As [`require`](Self::require); [`ServerError::Invalid`] if the model is on an upstream.
    pub(crate) fn require_engine(&self, name: &str) -> Result<Arc<BaseModel>, ServerError> {
        let model = self.require(name)?;
        match &model.source {
            ModelSource::Engine(_) => Ok(model),
            ModelSource::Upstream(_) => Err(ServerError::invalid(format!(
                "base model {name:?} is on an upstream, which this request cannot use"
            ))),
        }
    }

    /// Checks that a model that is to be quantized exists.
    ///
    /// # Errors
    /// [`StartError::UnknownModel`] otherwise.
    pub(crate) fn check_quantized(&self, name: &str) -> Result<(), StartError> {
        if self.usable().contains_key(name) {
            return Ok(());
        }
        let available = self.names().join(", ");
        Err(StartError::UnknownModel { name: name.to_owned(), available })
    }

    /// Returns the error message for a base model that this server does not have.
    pub(crate) fn unavailable_message(&self, name: &str) -> String {
        let known = self.names();
        if let Some(reason) = self.skipped.get(name) {
            return format!(
                "base model {name:?} of the Hugging Face cache cannot be used: {reason}; \
                 available: {}. Download the model again, or start the server with --model \
                 {name}=FOLDER",
                known.join(", ")
            );
        }
        format!(
            "base model {name:?} is not available on this server; available: {}. Start the server \
             with --model {name}=FOLDER to serve a Hugging Face model folder under that name",
            known.join(", ")
        )
    }

    /// Returns the models in the API's form. `is_up` tells whether an upstream responds: a model
    /// without one can be neither trained nor sampled now.
    pub(crate) fn supported(&self, is_up: impl Fn(&str) -> bool) -> Vec<SupportedModel> {
        let supported = |model: &Arc<BaseModel>| {
            let context = model.known_context();
            let usable = match &model.source {
                ModelSource::Engine(_) => true,
                ModelSource::Upstream(model) => model.upstreams.iter().any(|name| is_up(name)),
            };
            SupportedModel::default()
                .model_name(Some(model.name.clone()))
                .max_context_length(context.and_then(|context| u64::try_from(context).ok()))
                .trainable(Some(usable))
                .sampleable(Some(usable))
        };
        self.usable().values().map(supported).collect()
    }
}

impl BaseModel {
    /// Checks the folder or GGUF file of a model and logs what is unusual about it.
    fn read(name: &str, path: &Path, tokenizer_dir: &Path) -> Result<Self, FileError> {
        let weights = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let (config, warnings, folder) = if path.is_file() {
            let file = gguf::open(name, path, tokenizer_dir)?;
            (file.config, file.warnings, file.tokenizer)
        } else {
            let files = ModelFolder::inspect(path)?;
            (files.config().clone(), files.warnings().to_vec(), weights.clone())
        };
        warnings.iter().for_each(|warning| warn(name, warning));
        let engine = EngineModel { weights, built_in: false, config, warnings };
        Ok(Self::of_engine(name.to_owned(), folder, engine))
    }

    fn of_engine(name: String, folder: PathBuf, engine: EngineModel) -> Self {
        let source = ModelSource::Engine(engine);
        Self { name, folder, source, on_first_use: LazyFiles::default() }
    }

    /// Returns the configuration, if it is known. It is known for every model of the engine.
    pub(crate) fn config(&self) -> Option<&ModelConfig> {
        match &self.source {
            ModelSource::Engine(engine) => Some(&engine.config),
            ModelSource::Upstream(upstream) => upstream.config.as_ref(),
        }
    }

    /// Returns the number of tokens in the vocabulary; the maximum if it is not known.
    pub(crate) fn vocab_size(&self) -> usize {
        self.config().map_or(usize::MAX, |config| config.vocab_size)
    }

    /// Returns the context length in tokens, if it is known.
    pub(crate) fn known_context(&self) -> Option<usize> {
        match &self.source {
            ModelSource::Engine(engine) => Some(engine.config.max_positions),
            ModelSource::Upstream(upstream) => upstream
                .context
                .or_else(|| upstream.config.as_ref().map(|config| config.max_positions)),
        }
    }

    /// Returns the context length in tokens; the maximum if it is not known.
    pub(crate) fn context(&self) -> usize {
        self.known_context().unwrap_or(usize::MAX)
    }

    /// Returns the end-of-sequence tokens that are known.
    pub(crate) fn eos(&self) -> &[u32] {
        self.config().map_or(&[], |config| &config.eos)
    }

    /// Logs a warning if the tokenizer cannot be read, or has tokens that the model does not have.
    fn check_tokenizer(&self) {
        let consequence = "requests with stop strings are rejected";
        match self.vocabulary() {
            Err(error) => warn(&self.name, &format!("{error}; {consequence}")),
            Ok(vocabulary) if vocabulary.len() > self.vocab_size() => {
                let message = format!(
                    "{} has {} tokens, but the model has {size}; requests with the tokens from \
                     {size} on are rejected",
                    self.folder.join("tokenizer.json").display(),
                    vocabulary.len(),
                    size = self.vocab_size(),
                );
                warn(&self.name, &message);
            }
            Ok(_) => {}
        }
    }

    fn built_in(tokenizer_dir: &Path) -> Result<Self, tinkex_engine::Error> {
        let folder =
            std::path::absolute(tokenizer_dir).unwrap_or_else(|_| tokenizer_dir.to_owned());
        write_tokenizer(&folder)?;
        let (weights, warnings, config) = (folder.clone(), Vec::new(), builtin::config()?);
        let engine = EngineModel { weights, built_in: true, config, warnings };
        Ok(Self::of_engine(builtin::NAME.to_owned(), folder, engine))
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

    /// Returns the tokenizer if it is in memory, or that there is none; `None` if it was not read
    /// yet.
    pub(crate) fn loaded_tokenizer(&self) -> Option<Option<Tokenizer>> {
        self.on_first_use.tokenizer.get().cloned()
    }

    /// Returns the tokenizer, read on first use, which blocks. If it cannot be read, logs the reason
    /// once and returns `None`.
    pub(crate) fn tokenizer(&self) -> Option<Tokenizer> {
        let read = || {
            let tokenizer = Tokenizer::from_folder(&self.folder);
            let tokenizer = tokenizer.map_err(|error| {
                let consequence = "inference requests must send token ids and receive no text";
                warn(&self.name, &format!("{error}; {consequence}"));
            });
            tokenizer.ok()
        };
        self.on_first_use.tokenizer.get_or_init(read).clone()
    }

    /// Returns the chat template or the reason why it cannot be used, if it has been read; `None`
    /// if it has not been read yet.
    pub(crate) fn loaded_chat(&self) -> Option<Result<ChatModel, String>> {
        self.on_first_use.chat.get().cloned()
    }

    /// Returns the chat template, read on first use, which blocks. The error is the reason why it
    /// cannot be used.
    pub(crate) fn chat(&self) -> Result<ChatModel, String> {
        self.on_first_use.chat.get_or_init(|| ChatModel::read(self)).clone()
    }

    /// Returns the vocabulary, read on first use.
    pub(crate) fn vocabulary(&self) -> Result<Arc<Vocabulary>, String> {
        let path = self.folder.join("tokenizer.json");
        let read = || match Vocabulary::read(path) {
            Ok(vocabulary) => Ok(Arc::new(vocabulary)),
            Err(error) => Err(with_causes(&error)),
        };
        self.on_first_use.vocabulary.get_or_init(read).clone()
    }
}

/// Logs a warning about the files of a base model.
pub(crate) fn warn(base_model: &str, message: &str) {
    tracing::warn!(target: log::MODEL, base_model, "{message}");
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

/// Writes the files of the built-in model to `folder`, in the layout of Hugging Face model folders.
///
/// # Errors
/// Fails if a file cannot be written.
pub fn write_built_in_model(folder: &Path) -> Result<(), tinkex_engine::Error> {
    write_tokenizer(folder)?;
    let path = folder.join("model.safetensors");
    Ok(write_file(&path, |out| out.write_all(builtin::WEIGHTS))?)
}

/// Lists the models in a hub cache with the folder of their files. Repositories without weights are
/// skipped.
fn hub_cache_models(hub: &Path) -> Vec<(String, PathBuf)> {
    let models = HubCache::new(hub).models().into_iter();
    models.filter_map(|(name, repo)| Some((name, repo.model_folder()?))).collect()
}

#[cfg(test)]
mod tests;
