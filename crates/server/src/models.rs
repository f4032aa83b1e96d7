//! Base models that the server offers, and where their files are.
//!
//! Configurations and the headers of the weights are checked here, before the server starts; a
//! thread checks tokenizers and chat templates while the server runs. The worker loads weights on
//! first use. The models of an upstream are added when the upstream first responds. The server
//! reads only the tokenizer and the configuration of an upstream's model.

mod built_in;
mod text_files;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::{RwLock, RwLockReadGuard};
use tinkex_engine::builtin;
use tinkex_files::HubCache;
use tinkex_store::error::{ServerError, with_causes};
use tinkex_store::log;
use tinkex_text::files::has_tokenizer;
use tinkex_weights::{Error as FileError, ModelConfig, ModelFolder};
use tinkex_wire::SupportedModel;

use crate::gguf;
use crate::options::ServerOptions;
use crate::start_error::StartError;
pub use built_in::{write_built_in_model, write_tokenizer};
use text_files::TextFiles;
pub(crate) use text_files::check_text_files;

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
    /// Tokenizer folder; normally the model folder.
    pub(crate) folder: PathBuf,
    pub(crate) source: ModelSource,
    text_files: TextFiles,
}

/// Backend that computes with a base model.
#[derive(Debug)]
pub(crate) enum ModelSource {
    Engine(Arc<EngineModel>),
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
    /// Names of the upstreams that serve the model.
    pub(crate) upstreams: Vec<Arc<str>>,
    /// Context length in tokens that the upstreams report.
    context: Option<usize>,
    /// Configuration, if its folder is on this machine.
    config: Option<ModelConfig>,
}

impl BaseModels {
    /// Finds the built-in model, the models of the hub cache and the models of
    /// [`ServerOptions::models`]; a later model replaces an earlier model of the same name. Writes
    /// the tokenizers of the built-in model and of GGUF files to `tokenizer_dir`, so that other
    /// programs can load them.
    ///
    /// # Errors
    /// - [`StartError::InvalidModel`] if a folder or file of [`ServerOptions::models`] cannot be
    ///   used. A model in the hub cache that cannot be used is skipped and logged.
    /// - [`StartError::InvalidTokenizer`] if a folder of [`ServerOptions::tokenizers`] has no
    ///   tokenizer, [`StartError::UnknownModel`] if its model does not exist.
    pub(crate) fn find(tokenizer_dir: &Path, options: &ServerOptions) -> Result<Self, StartError> {
        let mut usable = BTreeMap::new();
        let mut skipped = BTreeMap::new();
        for (name, folder) in &options.tokenizers {
            if !has_tokenizer(folder) {
                return Err(StartError::invalid_tokenizer(name, folder));
            }
        }
        let read = |name: &str, path: &Path| {
            BaseModel::read(name, path, options.tokenizer_of(name), tokenizer_dir)
        };
        let hub_cache = options.hub_cache.as_deref();
        for (name, folder) in hub_cache.map(hub_cache_models).unwrap_or_default() {
            match read(&name, &folder) {
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
        for (name, path) in &options.models {
            let model = read(name, path)
                .map_err(|error| StartError::invalid_model(name, path, error.into()))?;
            usable.insert(name.clone(), Arc::new(model));
        }
        for (name, _) in &options.tokenizers {
            if !usable.contains_key(name) {
                let available = usable.keys().cloned().collect::<Vec<_>>().join(", ");
                return Err(StartError::unknown_model("use a tokenizer for", name, available));
            }
        }
        let built_in = BaseModel::built_in(tokenizer_dir)
            .map_err(|error| StartError::invalid_model(builtin::NAME, tokenizer_dir, error))?;
        usable.entry(builtin::NAME.to_owned()).or_insert_with(|| Arc::new(built_in));
        let mapped = options.models.iter().map(|(name, _)| name.clone()).collect();
        let hub_cache = hub_cache.map(Path::to_owned);
        Ok(Self { usable: RwLock::new(usable), skipped, mapped, hub_cache })
    }

    /// Returns the models of the engine.
    pub(crate) fn of_engine(&self) -> Vec<Arc<BaseModel>> {
        let usable = self.usable();
        let is_engine = |model: &&Arc<BaseModel>| matches!(model.source, ModelSource::Engine(_));
        usable.values().filter(is_engine).cloned().collect()
    }

    fn usable(&self) -> RwLockReadGuard<'_, BTreeMap<String, Arc<BaseModel>>> {
        self.usable.read()
    }

    /// Adds a model of an upstream, or registers another provider of the model. Models of `--model`
    /// are not replaced, nor is the built-in model.
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
        let mut usable = self.usable.write();
        // Look up the model again under the lock: another upstream may have added it since the
        // first lookup.
        let mut upstreams = match usable.get(name).map(|model| &model.source) {
            Some(ModelSource::Upstream(model)) => model.upstreams.clone(),
            Some(ModelSource::Engine(_)) | None => Vec::new(),
        };
        upstreams.push(Arc::clone(upstream));
        let source = ModelSource::Upstream(UpstreamModel { upstreams, context, config });
        let model =
            BaseModel { name: name.to_owned(), folder, source, text_files: TextFiles::default() };
        usable.insert(name.to_owned(), Arc::new(model));
    }

    /// Returns the folder with the tokenizer and the configuration of an upstream's model: the name
    /// may be a folder of this machine, or the name of a model in the hub cache. Its weights need
    /// not be cached.
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

    /// Returns a base model of the engine.
    ///
    /// # Errors
    /// The errors of [`require`](Self::require); [`ServerError::Invalid`] if the model is on an
    /// upstream.
    pub(crate) fn require_engine(&self, name: &str) -> Result<Arc<EngineModel>, ServerError> {
        let model = self.require(name)?;
        match &model.source {
            ModelSource::Engine(engine) => Ok(Arc::clone(engine)),
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
        Err(StartError::unknown_model("quantize", name, self.names().join(", ")))
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

    /// Returns the models in the API's form. `is_up` returns whether an upstream responds. A model
    /// none of whose upstreams responds can currently be neither trained nor sampled.
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
    /// Checks the folder or GGUF file of a model and logs warnings about its files. `tokenizer` is
    /// the folder of the model's tokenizer, if the options set it.
    fn read(
        name: &str,
        path: &Path,
        tokenizer: Option<&Path>,
        tokenizer_dir: &Path,
    ) -> Result<Self, FileError> {
        let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let weights = absolute(path);
        let (config, warnings, folder) = if path.is_file() {
            let file = gguf::open(name, path, tokenizer, tokenizer_dir)?;
            (file.config, file.warnings, absolute(&file.tokenizer))
        } else {
            let files = ModelFolder::inspect(path)?;
            let folder = tokenizer.map_or_else(|| weights.clone(), absolute);
            (files.config().clone(), files.warnings().to_vec(), folder)
        };
        warnings.iter().for_each(|warning| warn(name, warning));
        let engine = EngineModel { weights, built_in: false, config, warnings };
        Ok(Self::of_engine(name.to_owned(), folder, engine))
    }

    fn of_engine(name: String, folder: PathBuf, engine: EngineModel) -> Self {
        let source = ModelSource::Engine(Arc::new(engine));
        Self { name, folder, source, text_files: TextFiles::default() }
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

    fn built_in(tokenizer_dir: &Path) -> Result<Self, tinkex_engine::Error> {
        let folder =
            std::path::absolute(tokenizer_dir).unwrap_or_else(|_| tokenizer_dir.to_owned());
        write_tokenizer(&folder)?;
        let engine = EngineModel {
            weights: folder.clone(),
            built_in: true,
            config: builtin::config()?,
            warnings: Vec::new(),
        };
        Ok(Self::of_engine(builtin::NAME.to_owned(), folder, engine))
    }

    /// Returns the folder or GGUF file of the weights, if they are on this machine.
    pub(crate) fn weights_path(&self) -> Option<&Path> {
        match &self.source {
            ModelSource::Engine(engine) if !engine.built_in => Some(&engine.weights),
            ModelSource::Engine(_) | ModelSource::Upstream(_) => None,
        }
    }
}

/// Logs a warning about the files of a base model.
pub(crate) fn warn(base_model: &str, message: &str) {
    tracing::warn!(target: log::MODEL, base_model, "{message}");
}

/// Lists the models in a hub cache with the folder of their files. Repositories without weights are
/// skipped.
fn hub_cache_models(hub: &Path) -> Vec<(String, PathBuf)> {
    let models = HubCache::new(hub).models().into_iter();
    models.filter_map(|(name, repo)| Some((name, repo.model_folder()?))).collect()
}

#[cfg(test)]
mod tests;
