//! [`RunStart`]: a run that is about to be started or resumed.
//!
//! Runs of all methods start in the same way: [`RunStart::open`] finds the run to resume or opens the
//! files of a new one, connects, and determines base model and tokenizer. The command then reads its
//! data and completes the settings, and [`RunStart::folder`] returns the run folder.

use std::time::Duration;

use tinkex::{ServiceClient, TinkerPath, Tokenizer};
use tinkex_runs::{DataSettings, RunError, RunFolder, RunMethod, RunRecord, RunSettings};

use crate::commands::weights;
use crate::context::CommandContext;
use crate::error::{CommandError, Exit};
use crate::reference::{CheckpointReference, CheckpointUse, find_folder};
use crate::settings::is_loopback;

use super::args::{ResumeArgs, RunArgs, check_unused};
use super::data;
use super::report;
use super::source::{DataFile, InputFile, RunInputs, STDIN_COPY};

/// Default time to retry temporary failures of `tinkex train` and `tinkex rl` for. It is longer than
/// for other commands, because a run is often unattended and expensive to repeat.
pub(crate) const RETRY_FOR: Duration = Duration::from_secs(300);

/// Command that starts and resumes runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TrainingCommand {
    Train,
    Rl,
}

impl TrainingCommand {
    /// Returns whether the command resumes runs of the method.
    pub(crate) fn accepts(self, method: RunMethod) -> bool {
        match self {
            Self::Train => matches!(method, RunMethod::Sft | RunMethod::Dpo),
            Self::Rl => method == RunMethod::Rl,
        }
    }

    fn data(self) -> DataFile {
        match self {
            Self::Train => DataFile::Training,
            Self::Rl => DataFile::Prompts,
        }
    }
}

/// Run that is about to be started or resumed.
pub(crate) struct RunStart {
    pub(crate) service: ServiceClient,
    pub(crate) inputs: RunInputs,
    pub(crate) base_model: String,
    pub(crate) tokenizer: Tokenizer,
    /// Rank of a new run.
    pub(crate) rank: u32,
    /// Checkpoint that a new run starts from.
    pub(crate) from: Option<TinkerPath>,
    /// Settings and progress of the run that is resumed.
    pub(crate) old: Option<RunRecord>,
    /// Folder of the run that is resumed, locked; `None` also for a dry run.
    old_folder: Option<RunFolder>,
}

impl RunStart {
    /// Checks the arguments, finds the run to resume or opens the files of a new run, and connects.
    ///
    /// Returns `None` if the run to resume is finished and `extends` is not set, after reporting so.
    /// A dry run does not lock the run folder.
    pub(crate) async fn open(
        context: &mut CommandContext<'_>,
        command: TrainingCommand,
        args: &mut RunArgs,
        resume: &ResumeArgs,
        extends: bool,
        dry_run: bool,
    ) -> Result<Option<Self>, CommandError> {
        context.settings.default_retry_for(RETRY_FOR);
        if let Some(dir) = &mut args.folder.dir {
            let resolved = context.environment.path(dir);
            *dir = std::path::absolute(&resolved).unwrap_or(resolved);
            check_unused(dir)?;
        }
        let mut old = None;
        let mut old_folder = None;
        if let Some(text) = &resume.resume {
            let environment = &*context.environment;
            let path = find_folder(&environment.variables, &environment.folder, text, command)?;
            let record = RunFolder::read(&path)?;
            let method = record.settings.method.method();
            if !command.accepts(method) {
                return Err(RunError::OtherMethod { folder: path, method }.into());
            }
            if dry_run {
                old = Some(record);
            } else {
                let folder = RunFolder::open(path)?;
                old = Some(folder.record.clone());
                old_folder = Some(folder);
            }
        }
        if let Some(record) = old.as_ref().filter(|record| record.progress.finished && !extends) {
            report::report_finished(context, record)?;
            return Ok(None);
        }
        let inputs = match &old {
            Some(record) => {
                check_files(&record.settings)?;
                let evaluation = record.settings.evaluation.as_ref();
                let eval_file = evaluation.and_then(|evaluation| evaluation.file.as_deref());
                RunInputs::of_paths(command.data(), &record.settings.data.files, eval_file)
            }
            // Checked now, because starting a local server takes longer than reporting a missing
            // file.
            None => {
                let eval_file = args.eval_file.as_mut();
                RunInputs::open(context, command.data(), &mut args.files, eval_file).await?
            }
        };
        if old.is_none() {
            args.model.serve_path(context).await?;
        }
        let service = context.client().await?;
        let mut rank = args.model.rank;
        let mut from = None;
        let base_model = if let Some(record) = &old {
            record.settings.base_model.clone()
        } else if let Some(reference) = &args.model.from {
            let path = reference.resolve(context, CheckpointUse::Train).await?;
            let info = service.rest().get_weights_info(&path).await?;
            args.model.from = Some(CheckpointReference::Path(path.clone()));
            from = Some(path);
            rank = info.lora_rank.unwrap_or(rank);
            info.base_model
        } else {
            base_model(context, args.model.model.as_deref())?
        };
        let named = match &old {
            Some(record) => record.settings.tokenizer.as_deref(),
            None => args.model.tokenizer.as_deref(),
        };
        let tokenizer = find_tokenizer(context, &service, &base_model, named).await?;
        Ok(Some(Self { service, inputs, base_model, tokenizer, rank, from, old, old_folder }))
    }

    /// Changes the total number of steps of a resumed run. Returns whether no step is left, after
    /// reporting so.
    pub(crate) fn change_steps(
        &mut self,
        context: &mut CommandContext<'_>,
        steps: u64,
    ) -> Result<bool, CommandError> {
        let Some(record) = &mut self.old else { return Ok(false) };
        if let Some(before) = record.change_steps(steps)? {
            context.notice(&format!("changing the run from {before} to {steps} steps"));
        }
        if record.progress.finished {
            report::report_finished(context, record)?;
            return Ok(true);
        }
        Ok(false)
    }

    /// Returns the folder of the run. The folder of a new run is created when it is stored for the
    /// first time, so that a run that the server rejects leaves nothing behind.
    pub(crate) async fn folder(
        &mut self,
        context: &CommandContext<'_>,
        args: &RunArgs,
        resume: &ResumeArgs,
        settings: RunSettings,
    ) -> Result<RunFolder, CommandError> {
        let mut folder = match (self.old_folder.take(), self.old.take()) {
            (Some(mut folder), Some(record)) => {
                folder.record = record;
                folder
            }
            _ => self.new_folder(context, args, settings).await?,
        };
        if let Some(plot) = &resume.plot {
            let plot = context.environment.path(plot);
            let parent = plot.parent().unwrap_or(&plot);
            std::fs::create_dir_all(parent)
                .map_err(|error| CommandError::file("create", parent.display(), &error))?;
            folder.record.settings.plot = Some(plot);
        }
        Ok(folder)
    }

    async fn new_folder(
        &self,
        context: &CommandContext<'_>,
        args: &RunArgs,
        mut settings: RunSettings,
    ) -> Result<RunFolder, CommandError> {
        let first = self.inputs.first_path();
        let (name, path) = args.folder.choose(context, &self.service, &first).await?;
        let path = std::path::absolute(&path).unwrap_or(path);
        let copy = path.join(STDIN_COPY);
        let stored_path = |file: &InputFile| {
            if self.inputs.is_stdin(file) { copy.clone() } else { file.path.clone() }
        };
        settings.data = DataSettings {
            files: self.inputs.train.iter().map(stored_path).collect(),
            digest: data::digest(&self.inputs.train)?,
        };
        if let (Some(evaluation), Some(file)) = (&mut settings.evaluation, &self.inputs.eval) {
            evaluation.file = Some(stored_path(file));
            evaluation.digest = Some(data::digest(std::slice::from_ref(file))?);
        }
        let mut folder = RunFolder::new(path, RunRecord::new(name.as_str(), settings))?;
        if let Some(stdin) = self.inputs.stdin_copy() {
            folder.attach(STDIN_COPY, stdin);
        }
        Ok(folder)
    }
}

/// Checks that the files of a resumed run have not changed since the run started.
fn check_files(settings: &RunSettings) -> Result<(), CommandError> {
    data::check_unchanged(&settings.data.files, &settings.data.digest)?;
    let evaluation = settings.evaluation.as_ref();
    let file = evaluation.and_then(|evaluation| evaluation.file.as_ref());
    let digest = evaluation.and_then(|evaluation| evaluation.digest.as_ref());
    match (file, digest) {
        (Some(file), Some(digest)) => data::check_unchanged(std::slice::from_ref(file), digest),
        _ => Ok(()),
    }
}

/// Returns the named base model or, with `--local`, the built-in one.
fn base_model(context: &CommandContext<'_>, named: Option<&str>) -> Result<String, CommandError> {
    match named {
        Some(name) => Ok(name.to_owned()),
        None if context.settings.local => Ok(tinkex_server::BUILT_IN.to_owned()),
        None => Err(CommandError::usage("no model given").hint(
            "Pass --model NAME (see `tinkex model list`), or --local for the built-in model.",
        )),
    }
}

/// Loads the tokenizer of a base model. A server on this machine provides it; otherwise it comes from
/// the hub.
async fn find_tokenizer(
    context: &CommandContext<'_>,
    service: &ServiceClient,
    model: &str,
    named: Option<&str>,
) -> Result<Tokenizer, CommandError> {
    let env = &context.environment.variables;
    let url = service.base_url().as_str();
    match named {
        Some(name) => weights::load_tokenizer(env, name, false).await,
        None if model == tinkex_server::BUILT_IN => {
            weights::load_tokenizer(env, model, false).await
        }
        None if is_loopback(url) => {
            Ok(service.create_sampling_client(model).await?.tokenizer().await?)
        }
        None => weights::load_tokenizer(env, model, false).await,
    }
}

/// Returns the context length of a base model in tokens, if the server reports it.
pub(crate) async fn context_length(
    service: &ServiceClient,
    model: &str,
) -> Result<Option<usize>, CommandError> {
    let models = service.server_capabilities().await?.supported_models;
    let supported = models.iter().find(|one| one.model_name.as_deref() == Some(model));
    let tokens = supported.and_then(|one| one.max_context_length);
    Ok(tokens.and_then(|tokens| usize::try_from(tokens).ok()))
}

/// Adds a hint to the error of a server that rejects the rank of a new model.
pub(crate) fn explain_rank(error: CommandError) -> CommandError {
    if error.to_string().starts_with("lora_config.rank") {
        return error.hint("Pass a rank that the message allows, such as --rank 16.");
    }
    error
}

impl From<RunError> for CommandError {
    fn from(error: RunError) -> Self {
        let exit = match &error {
            RunError::Missing { .. } => Exit::NotFound,
            RunError::Exists { .. }
            | RunError::OtherSettings { .. }
            | RunError::OtherMethod { .. }
            | RunError::TooFewSteps { .. } => Exit::Usage,
            _ => Exit::Failed,
        };
        let report = match &error {
            RunError::Io { action, path, source } => Self::file(action, path.display(), source),
            _ => Self::new(exit, error.to_string()),
        };
        match error.hint() {
            Some(hint) => report.hint(hint.into_owned()),
            None => report,
        }
    }
}
