//! Arguments of a training run that `tinkex train` and `tinkex rl` share.

use std::path::{Path, PathBuf};

use clap::Args;
use clap_complete::ArgValueCandidates;
use serde::{Deserialize, Serialize};
use tinkex::ServiceClient;
use tinkex::wire::CheckpointKind;

use crate::args::positive;
use crate::context::CommandContext;
use crate::error::CommandError;
use crate::format;
use crate::id_cache;
use crate::reference::{
    self, CheckpointReference, RunFolderKind, RunName, choose_name, find_folder,
};

use super::train::state;

/// Model to train.
#[derive(Clone, Debug, Args, Serialize, Deserialize)]
pub(crate) struct ModelArgs {
    /// Base model; with --local, also a model folder or GGUF file [default with --local: tinkex/tiny]
    #[arg(
        short,
        long,
        alias = "base-model",
        value_name = "NAME",
        help_heading = "Model",
        add = ArgValueCandidates::new(id_cache::models)
    )]
    pub(crate) model: Option<String>,
    /// Start from the weights of a checkpoint: tinker://RUN/weights/NAME, RUN/NAME or RUN
    #[arg(
        long,
        value_name = "CHECKPOINT",
        value_parser = training_checkpoint,
        conflicts_with_all = ["model", "rank"],
        help_heading = "Model",
        add = ArgValueCandidates::new(reference::checkpoint_candidates)
    )]
    pub(crate) from: Option<CheckpointReference>,
    /// Use another tokenizer: a model name on the hub, or a folder
    #[arg(long, value_name = "NAME", help_heading = "Model")]
    pub(crate) tokenizer: Option<String>,
    /// LoRA rank
    #[arg(
        long,
        value_name = "N",
        default_value_t = 16,
        value_parser = positive::<u32>,
        help_heading = "Model"
    )]
    pub(crate) rank: u32,
}

/// Parses a reference to a checkpoint that can be trained further.
fn training_checkpoint(text: &str) -> Result<CheckpointReference, String> {
    match text.parse()? {
        CheckpointReference::Path(path) if path.kind() != CheckpointKind::Training => {
            Err("expected a training checkpoint: tinker://RUN/weights/NAME".to_owned())
        }
        reference => Ok(reference),
    }
}

impl ModelArgs {
    /// If the model is a folder or file, starts the local server with it and replaces the path by the
    /// name of the model. Call it before the client is created.
    pub(crate) async fn serve_path(
        &mut self,
        context: &mut CommandContext<'_>,
    ) -> Result<(), CommandError> {
        if let Some(model) = &mut self.model
            && let Some(name) = context.serve_model(model).await?
        {
            *model = name;
        }
        Ok(())
    }
}

/// Name and folder of a new run.
#[derive(Clone, Debug, Args, Serialize, Deserialize)]
pub(crate) struct RunFolderArgs {
    /// Name of the run [default: from FILE, made unique: animals, animals-2]
    // Not serialized: `run.json` has the name beside the settings, also if it is the default one.
    #[serde(skip)]
    #[arg(long, value_name = "NAME", help_heading = "Run")]
    pub(crate) name: Option<RunName>,
    /// Run folder [default: NAME-run]
    #[arg(long, value_name = "DIR", help_heading = "Run")]
    pub(crate) dir: Option<PathBuf>,
}

impl RunFolderArgs {
    /// Chooses the name and the folder of a new run on `file`. Creates nothing.
    pub(crate) async fn choose(
        &self,
        context: &CommandContext<'_>,
        service: &ServiceClient,
        file: &Path,
    ) -> Result<(RunName, PathBuf), CommandError> {
        let folder_of = |name: &RunName| match &self.dir {
            Some(folder) => context.environment.path(folder),
            None => context.environment.folder.join(format!("{name}-run")),
        };
        let is_taken = |name: &RunName| self.dir.is_none() && folder_of(name).exists();
        let default = RunName::of_file(file);
        let name = choose_name(context, service, self.name.as_ref(), &default, is_taken).await?;
        let folder = folder_of(&name);
        state::check_unused(&folder)?;
        Ok((name, folder))
    }
}

/// Returns the text by which `--resume` finds a run of `kind`: its name, or the path of its
/// folder if several runs have the name.
pub(crate) fn resume_text(
    context: &CommandContext<'_>,
    kind: RunFolderKind,
    folder: &Path,
    name: Option<&str>,
) -> String {
    let environment = &*context.environment;
    let find = |name: &str| find_folder(&environment.variables, &environment.folder, name, kind);
    let is_found = |name: &&str| find(name).is_ok_and(|found| found == folder);
    match name.filter(is_found) {
        Some(name) => format::shell_quote(name),
        None => format::shell_quote(&folder.display().to_string()),
    }
}
