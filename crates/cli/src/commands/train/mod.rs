//! `tinkex train`: supervised fine-tuning and preference optimization (DPO) on files.
//!
//! | Module | Contents |
//! |---|---|
//! | `args` | the arguments |
//! | `settings` | method, batch size and lengths of a run |
//! | `examples` | the examples of a run, and the settings that follow from them |
//! | `estimate` | time and cost for `--dry-run` |
//! | `run` | the run |
//! | `samples` | completions during training |

pub(super) mod args;
mod estimate;
mod examples;
mod run;
mod samples;
pub(super) mod settings;

use tinkex_recipes::TrainPlan;

use crate::context::CommandContext;
use crate::error::{CommandError, Exit};

use super::training::data;
use super::training::log::RunLog;
use super::training::source::{DataFile, InputFile};
use super::training::start::{RunStart, TrainingCommand};
pub(crate) use args::TrainArgs;
use estimate::RunEstimate;
use examples::Examples;
use run::ActiveRun;
use samples::TrainingSamples;

pub(super) async fn run(
    context: &mut CommandContext<'_>,
    args: TrainArgs,
) -> Result<Exit, CommandError> {
    let interrupt = context.environment.interrupt.clone();
    let Some((mut run, examples, plan)) =
        interrupt.run_until(1, Box::pin(prepare(context, args))).await?
    else {
        return Ok(Exit::Success);
    };
    let outcome = Box::pin(run.execute(context, examples, plan)).await;
    run.finish(context, outcome).await
}

/// Checks the arguments and the data and creates the model and the run folder. Returns `None` if
/// nothing is left to do: with `--dry-run`, or if the resumed run is finished.
async fn prepare(
    context: &mut CommandContext<'_>,
    mut args: TrainArgs,
) -> Result<Option<(ActiveRun, Examples, TrainPlan)>, CommandError> {
    if let Some(path) = &mut args.examples.sample_prompts {
        let resolved = context.environment.path(path);
        *path = std::path::absolute(&resolved).unwrap_or(resolved);
        InputFile::new(DataFile::SamplePrompts, path).check()?;
    }
    let extends = args.length.is_set();
    let command = TrainingCommand::Train;
    let opened =
        RunStart::open(context, command, &mut args.run, &args.resume, extends, args.dry_run);
    let Some(mut start) = opened.await? else { return Ok(None) };
    let settings = match &start.old {
        Some(record) => record.settings.clone(),
        None => examples::configure(&args, &start).await?,
    };
    let chat = start.tokenizer.chat()?;
    let prompts = match &settings.samples {
        Some(samples) => {
            let file = InputFile::new(DataFile::SamplePrompts, &samples.prompts);
            Some(data::read_prompts(&file, false)?)
        }
        None => None,
    };
    let is_new = start.old.is_none();
    let (examples, settings) = Examples::read(&chat, settings, &start.inputs, &args, is_new)?;
    if start.change_steps(context, settings.steps)? {
        return Ok(None);
    }
    if args.dry_run {
        let from = start.old.as_ref().map_or(0, |record| record.progress.step());
        let estimate =
            RunEstimate::new(context, &start.service, &settings, &examples, args.price, from)
                .await?;
        let (table, json) = examples.describe(&settings, &start.inputs.train, &estimate, from);
        if let Some(warning) = examples.warning() {
            context.notice(&warning);
        }
        context.table(&table, &json)?;
        return Ok(None);
    }

    let plan = examples.settings.plan(&settings, examples.train.len());
    let mut folder = start.folder(context, &args.run, &args.resume, settings).await?;
    // The model is created before the folder: a model that the server rejects leaves nothing behind.
    let service = start.service;
    let name = &*folder.record.name;
    let saved = folder.record.progress.checkpoints.last();
    let settings = &folder.record.settings;
    let model = run::create_model(context, &service, settings, Some(name), saved).await?;
    folder.record.progress.run_id = Some(model.model_id().clone());
    folder.store()?;
    let log = RunLog::open(&folder)?;
    let samples = match prompts {
        Some(prompts) => Some(TrainingSamples::new(prompts, chat, &folder)?),
        None => None,
    };
    let run = ActiveRun { service, model, folder, log, samples };
    Ok(Some((run, examples, plan)))
}
