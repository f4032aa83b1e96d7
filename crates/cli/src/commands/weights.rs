//! Arguments that select a model or checkpoint to sample from, and its tokenizer.

use clap::Args;
use clap_complete::ArgValueCandidates;
use tinkex::CheckpointKind;
use tinkex::{Env, Hub, RestoreMode, SamplingClient, ServiceClient, TinkerPath, Tokenizer};

use crate::context::CommandContext;
use crate::error::{CommandError, Exit};
use crate::local;
use crate::reference::{self, CheckpointReference, CheckpointUse, RunReference};

/// Selects the weights to sample from.
#[derive(Clone, Debug, Args)]
pub(crate) struct WeightsArgs {
    /// Base model, training run or checkpoint: NAME, RUN, RUN/NAME or tinker://…; with --local, also
    /// a model folder or GGUF file [default with --local: tinkex/tiny]
    #[arg(value_name = "MODEL", add = ArgValueCandidates::new(reference::weights_candidates))]
    model: Option<String>,
    /// Use the latest checkpoint of this training run: id, name, folder or latest
    #[arg(
        long,
        value_name = "RUN",
        conflicts_with = "model",
        add = ArgValueCandidates::new(reference::run_candidates)
    )]
    run: Option<RunReference>,
    /// Use another tokenizer: a model name on the hub, or a folder
    #[arg(long, value_name = "NAME")]
    pub(crate) tokenizer: Option<String>,
    #[arg(long = "base-model", alias = "model", hide = true, conflicts_with_all = ["model", "run"])]
    base_model: Option<String>,
    #[arg(long, hide = true, conflicts_with_all = ["model", "run", "base_model"])]
    model_path: Option<String>,
}

impl WeightsArgs {
    /// Selects a base model, a run or a checkpoint.
    pub(crate) fn of_name(name: String, tokenizer: Option<String>) -> Self {
        Self { model: Some(name), run: None, tokenizer, base_model: None, model_path: None }
    }

    /// Returns a copy that selects another model and keeps the tokenizer option.
    pub(crate) fn with_model(&self, name: String) -> Self {
        Self::of_name(name, self.tokenizer.clone())
    }

    /// Returns the model name or path on the command line, if there is one.
    fn name(&self) -> Option<&str> {
        [&self.model, &self.base_model, &self.model_path].into_iter().flatten().next().map(|n| &**n)
    }

    /// Creates a client. If the model is a folder or file, starts the local server with it and
    /// replaces the path by the name of the model.
    pub(crate) async fn connect(
        &mut self,
        context: &mut CommandContext<'_>,
    ) -> Result<ServiceClient, CommandError> {
        let models = [&mut self.model, &mut self.base_model];
        for model in models.into_iter().flatten() {
            if let Some(name) = context.serve_model(model).await? {
                *model = name;
            }
        }
        context.client().await
    }

    /// Creates a sampling client. Also returns the name of the model or the path of the checkpoint.
    pub(crate) async fn open(
        &self,
        context: &mut CommandContext<'_>,
        service: &ServiceClient,
    ) -> Result<(SamplingClient, String), CommandError> {
        if let Some(run) = &self.run {
            let latest = CheckpointReference::latest_of(run);
            let path = latest.resolve(context, CheckpointUse::Sample).await?;
            return Ok((sample_checkpoint(context, service, &path).await?, path.to_string()));
        }
        let name = match self.name() {
            Some(name) => name,
            None if context.settings.local => tinkex_server::BUILT_IN,
            None => {
                return Err(CommandError::usage("no model given").hint(
                    "Pass a base model (see `tinkex model list`), a run or checkpoint (see `tinkex \
                     run list`); with --local, the default is the built-in model.",
                ));
            }
        };
        open_weights(context, service, name).await
    }

    /// Returns the tokenizer that `--tokenizer` names, or the tokenizer of the sampled model.
    pub(crate) async fn tokenizer(
        &self,
        env: &Env,
        sampler: &SamplingClient,
    ) -> Result<Tokenizer, CommandError> {
        if let Some(named) = &self.tokenizer {
            return load_tokenizer(env, named, false).await;
        }
        if sampler.get_sampler().await?.base_model == tinkex_server::BUILT_IN {
            return built_in_tokenizer(env);
        }
        Ok(sampler.tokenizer().await?)
    }
}

/// Creates a sampling client for a base model, a run or a checkpoint. Also returns the name of the
/// model or the path of the checkpoint.
pub(crate) async fn open_weights(
    context: &mut CommandContext<'_>,
    service: &ServiceClient,
    name: &str,
) -> Result<(SamplingClient, String), CommandError> {
    let reference: CheckpointReference = name.parse().map_err(CommandError::usage)?;
    let is_path = matches!(reference, CheckpointReference::Path(_));
    if !is_path && is_base_model(context, service, name).await? {
        return Ok((service.create_sampling_client(name).await?, name.to_owned()));
    }
    let rest = service.rest();
    let found = reference.look_up(context, &rest, CheckpointUse::Sample);
    let unknown = match Box::pin(found).await? {
        Ok(path) => {
            return Ok((sample_checkpoint(context, service, &path).await?, path.to_string()));
        }
        Err(unknown) => unknown,
    };
    let flags = context.server_flags();
    let list = || format!("See `tinkex model list{flags}` and `tinkex run list{flags}`.");
    // A name with a slash is probably the name of a base model; the server's error says more.
    let suggestion = unknown.suggestion().or_else(|| (!name.contains('/')).then(list));
    // A server may have models that it does not list.
    let sampler = service.create_sampling_client(name).await.map_err(|error| {
        let error = CommandError::from(error);
        match suggestion {
            Some(suggestion) if error.is_rejected_request() => {
                let message =
                    format!("no base model, training run or checkpoint has the name {name:?}");
                CommandError::new(Exit::NotFound, message).hint(suggestion)
            }
            _ => error,
        }
    })?;
    Ok((sampler, name.to_owned()))
}

/// Returns whether the server lists a base model with this name.
async fn is_base_model(
    context: &CommandContext<'_>,
    service: &ServiceClient,
    name: &str,
) -> Result<bool, CommandError> {
    let models = service.server_capabilities().await?.supported_models;
    let names: Vec<String> = models.into_iter().filter_map(|model| model.model_name).collect();
    let found = names.iter().any(|known| known == name);
    let variables = &context.environment.variables;
    crate::id_cache::store(variables, crate::id_cache::IdKind::Model, names.into_iter());
    Ok(found)
}

/// Creates a sampling client for a checkpoint. A training checkpoint is loaded into a new training
/// run first, because only sampler checkpoints can be sampled directly.
async fn sample_checkpoint(
    context: &mut CommandContext<'_>,
    service: &ServiceClient,
    path: &TinkerPath,
) -> Result<SamplingClient, CommandError> {
    if path.kind() != CheckpointKind::Training {
        return Ok(service.create_sampling_client_from(path).await?);
    }
    context.notice(&format!("loading training checkpoint {path} for sampling"));
    let restore = RestoreMode::WeightsOnly;
    let model = service.create_training_client_from(path, restore).await?;
    Ok(model.save_weights_and_get_sampling_client().await?)
}

/// Loads a tokenizer by model name or from a folder.
pub(crate) async fn load_tokenizer(
    env: &Env,
    name: &str,
    offline: bool,
) -> Result<Tokenizer, CommandError> {
    if name == tinkex_server::BUILT_IN {
        return built_in_tokenizer(env);
    }
    let hub = Hub::from_env(env)?;
    let hub = if offline { hub.offline(true) } else { hub };
    Ok(Tokenizer::from_hub(&hub, name).await?)
}

/// Loads the tokenizer of the built-in model, which is part of the program.
fn built_in_tokenizer(env: &Env) -> Result<Tokenizer, CommandError> {
    let folder = local::data_folder(env)?.join("tokenizer");
    let shown = folder.display();
    std::fs::create_dir_all(&folder)
        .map_err(|error| CommandError::file("create", &shown, &error))?;
    let written = tinkex_server::write_tokenizer(&folder);
    written.map_err(|error| {
        CommandError::new(Exit::Failed, format!("cannot write {shown}: {error}"))
    })?;
    Ok(Tokenizer::from_folder(&folder)?)
}
