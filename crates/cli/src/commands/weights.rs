//! Which weights to sample from, and the tokenizer that goes with them.

use clap::Args;
use tinkex::rest::AccessScope;
use tinkex::wire::CheckpointKind;
use tinkex::{Env, Error, Hub, RestoreMode, SamplingClient, ServiceClient, TinkerPath, Tokenizer};

use crate::error::{CommandError, Exit};
use crate::local;
use crate::output::Shell;

/// Which weights to sample from.
#[derive(Clone, Debug, Args)]
pub(crate) struct WeightsArgs {
    /// A base model, or a checkpoint (tinker://…); with --local the built-in model if left out
    #[arg(value_name = "MODEL")]
    model: Option<String>,
    /// The latest checkpoint of a training run
    #[arg(long, value_name = "RUN_ID", conflicts_with = "model")]
    run: Option<String>,
    /// A tokenizer in place of the model's own: a name on the hub, or a folder
    #[arg(long, value_name = "NAME")]
    pub(crate) tokenizer: Option<String>,
    #[arg(long = "base-model", alias = "model", hide = true, conflicts_with_all = ["model", "run"])]
    base_model: Option<String>,
    #[arg(long, hide = true, conflicts_with_all = ["model", "run", "base_model"])]
    model_path: Option<String>,
}

impl WeightsArgs {
    /// Other weights with the same tokenizer option.
    pub(crate) fn named(&self, name: String) -> Self {
        let tokenizer = self.tokenizer.clone();
        Self { model: Some(name), run: None, tokenizer, base_model: None, model_path: None }
    }

    /// The name that was typed, if one was.
    fn name(&self) -> Option<&str> {
        [&self.model, &self.base_model, &self.model_path].into_iter().flatten().next().map(|n| &**n)
    }

    /// Opens them. The name is the one to show: of the model, or of the checkpoint.
    pub(crate) async fn open(
        &self,
        shell: &mut Shell<'_>,
        service: &ServiceClient,
    ) -> Result<(SamplingClient, String), CommandError> {
        if let Some(run) = &self.run {
            let path = latest(service, run).await?;
            return Ok((of_checkpoint(shell, service, &path).await?, path.to_string()));
        }
        let name = match self.name() {
            Some(name) => name,
            None if shell.settings.local => tinkex_server::BUILT_IN,
            None => {
                return Err(CommandError::usage("which model? none is named").hint(
                    "name a base model (see tinkex model list), a tinker:// path, or --run RUN_ID; \
                     --local has a small model of its own",
                ));
            }
        };
        let sampler = if name.starts_with("tinker://") {
            of_checkpoint(shell, service, &path(name)?).await?
        } else {
            service.create_sampling_client(name).await?
        };
        Ok((sampler, name.to_owned()))
    }

    /// Their tokenizer.
    pub(crate) async fn tokenizer(
        &self,
        env: &Env,
        sampler: &SamplingClient,
    ) -> Result<Tokenizer, CommandError> {
        if let Some(named) = &self.tokenizer {
            return tokenizer(env, named, false).await;
        }
        if sampler.get_sampler().await?.base_model == tinkex_server::BUILT_IN {
            return built_in(env);
        }
        Ok(sampler.tokenizer().await?)
    }
}

/// A checkpoint's address.
pub(crate) fn path(text: &str) -> Result<TinkerPath, CommandError> {
    Ok(text.parse().map_err(Error::from)?)
}

/// The latest checkpoint of a run, one to sample from if it has any.
async fn latest(service: &ServiceClient, run: &str) -> Result<TinkerPath, CommandError> {
    let run = service.rest().get_training_run(run, AccessScope::Accessible).await?;
    let last = run.last_sampler_checkpoint.or(run.last_checkpoint);
    let Some(last) = last else {
        let why = format!("the run {} has no checkpoint yet", run.training_run_id);
        return Err(CommandError::new(Exit::NotFound, why)
            .hint("save one first; tinkex train does so when it is stopped with Ctrl-C"));
    };
    path(&last.tinker_path)
}

/// A checkpoint that was saved to go on training from is loaded, and its weights sampled from.
async fn of_checkpoint(
    shell: &mut Shell<'_>,
    service: &ServiceClient,
    path: &TinkerPath,
) -> Result<SamplingClient, CommandError> {
    if path.kind() != CheckpointKind::Training {
        return Ok(service.create_sampling_client_from(path).await?);
    }
    shell.notice(&format!("{path} was saved to train on; loading it to sample from"));
    let restore = RestoreMode::WeightsOnly;
    let model = service.create_training_client_from(path, restore).create().await?;
    Ok(model.save_weights_and_get_sampling_client().await?)
}

/// A tokenizer by its name or folder.
pub(crate) async fn tokenizer(
    env: &Env,
    name: &str,
    offline: bool,
) -> Result<Tokenizer, CommandError> {
    if name == tinkex_server::BUILT_IN {
        return built_in(env);
    }
    let hub = Hub::from_env(env)?;
    let hub = if offline { hub.offline(true) } else { hub };
    Ok(hub.tokenizer(name).await?)
}

/// The built-in model's tokenizer, which is part of this program.
fn built_in(env: &Env) -> Result<Tokenizer, CommandError> {
    let folder = local::data_folder(env)?.join("tokenizer");
    let shown = folder.display().to_string();
    std::fs::create_dir_all(&folder).map_err(|why| CommandError::file("created", &shown, &why))?;
    let written = tinkex_server::write_tokenizer(&folder);
    written.map_err(|why| {
        CommandError::new(Exit::Failed, format!("{shown} cannot be written: {why}"))
    })?;
    Ok(Tokenizer::from_folder(&folder)?)
}
