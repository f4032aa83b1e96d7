//! Arguments that select a model or checkpoint to sample from, and its tokenizer.

use clap::Args;
use tinkex::rest::AccessScope;
use tinkex::wire::CheckpointKind;
use tinkex::{Env, Error, Hub, RestoreMode, SamplingClient, ServiceClient, TinkerPath, Tokenizer};

use crate::context::CommandContext;
use crate::error::{CommandError, Exit};
use crate::local;

/// Selects the weights to sample from.
#[derive(Clone, Debug, Args)]
pub(crate) struct WeightsArgs {
    /// Base model or checkpoint path (tinker://…) [default with --local: tinkex/tiny]
    #[arg(value_name = "MODEL")]
    model: Option<String>,
    /// Use the latest checkpoint of this training run
    #[arg(long, value_name = "RUN_ID", conflicts_with = "model")]
    run: Option<String>,
    /// Use another tokenizer: a model name on the hub, or a folder
    #[arg(long, value_name = "NAME")]
    pub(crate) tokenizer: Option<String>,
    #[arg(long = "base-model", alias = "model", hide = true, conflicts_with_all = ["model", "run"])]
    base_model: Option<String>,
    #[arg(long, hide = true, conflicts_with_all = ["model", "run", "base_model"])]
    model_path: Option<String>,
}

impl WeightsArgs {
    /// Returns a copy that selects another model and keeps the tokenizer option.
    pub(crate) fn with_model(&self, name: String) -> Self {
        let tokenizer = self.tokenizer.clone();
        Self { model: Some(name), run: None, tokenizer, base_model: None, model_path: None }
    }

    /// Returns the model name or path on the command line, if there is one.
    fn name(&self) -> Option<&str> {
        [&self.model, &self.base_model, &self.model_path].into_iter().flatten().next().map(|n| &**n)
    }

    /// Creates a sampling client. Also returns the name of the model or the path of the checkpoint.
    pub(crate) async fn open(
        &self,
        context: &mut CommandContext<'_>,
        service: &ServiceClient,
    ) -> Result<(SamplingClient, String), CommandError> {
        if let Some(run) = &self.run {
            let path = latest_checkpoint(service, run).await?;
            return Ok((sample_checkpoint(context, service, &path).await?, path.to_string()));
        }
        let name = match self.name() {
            Some(name) => name,
            None if context.settings.local => tinkex_server::BUILT_IN,
            None => {
                return Err(CommandError::usage("no model given").hint(
                    "Pass a base model (see `tinkex model list`), a tinker:// path, or --run RUN_ID; \
                     with --local, the default is the built-in model.",
                ));
            }
        };
        let sampler = if name.starts_with("tinker://") {
            sample_checkpoint(context, service, &parse_path(name)?).await?
        } else {
            service.create_sampling_client(name).await?
        };
        Ok((sampler, name.to_owned()))
    }

    /// Returns the tokenizer of the option, or that of the sampled model.
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

/// Parses a tinker:// path.
pub(crate) fn parse_path(text: &str) -> Result<TinkerPath, CommandError> {
    Ok(text.parse().map_err(Error::from)?)
}

/// Returns the latest sampler checkpoint of a run, or its latest checkpoint of another kind.
async fn latest_checkpoint(service: &ServiceClient, run: &str) -> Result<TinkerPath, CommandError> {
    let run = service.rest().get_training_run(run, AccessScope::Accessible).await?;
    let last = run.last_sampler_checkpoint.or(run.last_checkpoint);
    let Some(last) = last else {
        let message = format!("run {} has no checkpoint", run.training_run_id);
        return Err(CommandError::new(Exit::NotFound, message)
            .hint("Save one first; `tinkex train` saves one when it is stopped with Ctrl-C."));
    };
    parse_path(&last.tinker_path)
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
    let model = service.create_training_client_from(path, restore).create().await?;
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
    Ok(hub.tokenizer(name).await?)
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
