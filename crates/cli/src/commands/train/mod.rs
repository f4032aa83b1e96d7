//! `tinkex train`: supervised fine-tuning and preference optimization (DPO) on files.
//!
//! | Module | Contents |
//! |---|---|
//! | `args` | the arguments |
//! | `source`, `records`, `example_format` | files, the JSON values in them, and the formats of these |
//! | `estimate` | time and cost for `--dry-run` |
//! | `data`, `examples` | reading and checking the training data |
//! | `run`, `state`, `metrics_log` | the run and its files, from which it can be resumed |
//! | `progress`, `samples` | the progress bar, and answers during training |
//! | `event_log` | the metrics for TensorBoard |

pub(super) mod args;
pub(super) mod data;
mod estimate;
mod event_log;
mod example_format;
pub(super) mod examples;
mod metrics_log;
pub(super) mod progress;
mod records;
mod run;
mod samples;
pub(super) mod source;
pub(super) mod state;

use std::time::Duration;

use serde_json::json;
use tinkex::recipes::TrainPlan;

use crate::context::CommandContext;
use crate::error::{CommandError, Exit};
use crate::format;
use crate::reference::{CheckpointReference, CheckpointUse, RunFolderKind, find_folder};

pub(crate) use args::{TrainArgs, usage_hint};
use estimate::RunEstimate;
use examples::Examples;
use metrics_log::MetricsLog;
use run::ActiveRun;
use samples::{SAMPLES_FILE, TrainingSamples};
use source::{DataFile, InputFile, RunInputs};
use state::{LogTarget, RunState};

/// Default time to retry temporary failures of `tinkex train` and `tinkex rl` for. It is longer than
/// for other commands, because a run is often unattended and expensive to repeat.
pub(super) const RETRY_FOR: Duration = Duration::from_secs(300);

pub(super) async fn run(
    context: &mut CommandContext<'_>,
    args: TrainArgs,
) -> Result<Exit, CommandError> {
    context.settings.default_retry_for(RETRY_FOR);
    let interrupt = context.environment.interrupt.clone();
    let Some((mut run, examples, plan)) =
        interrupt.run_until(1, Box::pin(prepare(context, args))).await?
    else {
        return Ok(Exit::Success);
    };
    let outcome = Box::pin(run.execute(context, examples, plan)).await;
    run.finish(context, outcome).await
}

/// Checks the arguments and the data and creates the run folder. Returns `None` if nothing is left
/// to do: with `--dry-run`, or if the resumed run is finished.
async fn prepare(
    context: &mut CommandContext<'_>,
    args: TrainArgs,
) -> Result<Option<(ActiveRun, Examples, TrainPlan)>, CommandError> {
    let mut run_args = args.run;
    if let Some(dir) = &mut run_args.folder.dir {
        *dir = context.environment.path(dir);
        state::check_unused(dir)?;
    }
    let plot = args.plot.map(|file| context.environment.path(&file));
    let find = |text: &String| {
        let (variables, here) = (&context.environment.variables, &context.environment.folder);
        find_folder(variables, here, text, RunFolderKind::Train)
    };
    let resume = args.resume.as_ref().map(find).transpose()?;
    let mut old = resume.as_deref().map(RunState::load).transpose()?;
    let mut lock = None;
    if let Some(folder) = resume.as_deref().filter(|_| !args.dry_run) {
        lock = Some(state::lock(folder)?);
        // The previous holder of the lock may have changed the state.
        old = Some(RunState::load(folder)?);
    }
    if let Some(state) = old.as_ref().filter(|state| state.finished && !args.length.is_set()) {
        report_finished(context, state)?;
        return Ok(None);
    }
    let inputs = match &old {
        Some(state) => {
            state.check_files()?;
            let eval = state.settings.eval_file.as_deref();
            RunInputs::of_paths(DataFile::Training, &state.settings.files, eval)
        }
        // Checked now, because starting a local server takes longer than reporting a missing file.
        None => {
            if let Some(path) = &mut run_args.sample_prompts {
                let resolved = context.environment.path(path);
                *path = std::path::absolute(&resolved).unwrap_or(resolved);
                InputFile::new(DataFile::SamplePrompts, path).check()?;
            }
            let eval = run_args.eval_file.as_mut();
            RunInputs::open(context, DataFile::Training, &mut run_args.files, eval).await?
        }
    };

    if old.is_none() {
        run_args.model.serve_path(context).await?;
    }
    let service = context.client().await?;
    let start = match &mut run_args.model.from {
        Some(from) if old.is_none() => {
            let path = from.resolve(context, CheckpointUse::Train).await?;
            let info = service.rest().get_weights_info(&path).await?;
            *from = CheckpointReference::Path(path);
            Some(info)
        }
        _ => None,
    };
    let named = &run_args.model;
    let (model, tokenizer) = match (&old, &start) {
        (Some(state), _) => (state.settings.model.clone(), state.settings.tokenizer.clone()),
        (None, Some(start)) => (start.base_model.clone(), named.tokenizer.clone()),
        (None, None) => {
            (examples::base_model(context, named.model.as_deref())?, named.tokenizer.clone())
        }
    };
    let tokenizer =
        examples::find_tokenizer(context, &service, &model, tokenizer.as_deref()).await?;
    let config = match &old {
        Some(state) => state.settings.clone(),
        None => {
            let rank = start.and_then(|start| start.lora_rank).unwrap_or(run_args.model.rank);
            examples::configure(&run_args, &service, model, rank).await?
        }
    };
    let chat = tokenizer.chat()?;
    let prompts = match &config.sample_prompts {
        Some(file) => {
            Some(data::read_prompts(&InputFile::new(DataFile::SamplePrompts, file), false)?)
        }
        None => None,
    };
    let is_new = old.is_none();
    let (examples, mut config) =
        Examples::read(&chat, config, &inputs, &run_args, args.length, is_new)?;
    if let Some(state) = &mut old {
        let before = state.settings.steps;
        state.change_steps(config.steps)?;
        if before != config.steps {
            context.notice(&format!("changing the run from {before} to {} steps", config.steps));
        }
        if state.finished {
            report_finished(context, state)?;
            return Ok(None);
        }
    }
    let plan = config.plan(examples.train.len());
    if args.dry_run {
        let from = old.as_ref().map_or(0, RunState::step);
        let estimate =
            RunEstimate::new(context, &service, &config, &examples, args.price, from).await?;
        let (table, json) = examples.describe(&config, &estimate, from);
        if let Some(warning) = examples.warning(&config) {
            context.notice(&warning);
        }
        context.table(&table, &json)?;
        return Ok(None);
    }

    if let Some(plot) = &plot {
        state::create_folder(plot.parent().unwrap_or(plot))?;
    }
    // The model is created before the folder: one that the server rejects leaves nothing behind.
    let (folder, model, mut state) = match (resume, old) {
        (Some(folder), Some(state)) => {
            let (name, saved) = (state.name.as_deref(), state.saved.last());
            let model = run::create_model(context, &service, &config, name, saved).await?;
            (folder, model, state)
        }
        _ => {
            let file = inputs.first_path();
            let (name, folder) = run_args.folder.choose(context, &service, &file).await?;
            let text = name.to_string();
            let model = run::create_model(context, &service, &config, Some(&text), None).await?;
            state::new_folder(&folder)?;
            inputs.keep_stdin(&folder, config.files.iter_mut().chain(&mut config.eval_file))?;
            (folder, model, RunState::new(&name, config)?)
        }
    };
    let lock = match lock {
        Some(lock) => lock,
        None => state::lock(&folder)?,
    };
    if let Some(plot) = plot {
        state.plot = Some(plot);
    }
    let from = state.step();
    let mut metrics = MetricsLog::open(&folder.join("metrics.jsonl"), from)?;
    if let Some(LogTarget::Tensorboard) = state.settings.log_to {
        metrics = metrics.with_events(&folder, from)?;
    }
    let samples = match prompts {
        Some(prompts) => {
            Some(TrainingSamples::new(prompts, chat, &folder.join(SAMPLES_FILE), from)?)
        }
        None => None,
    };
    let run = ActiveRun { service, model, folder, _lock: lock, state, metrics, samples };
    Ok(Some((run, examples, plan)))
}

/// Reports that a run has no steps left.
fn report_finished(context: &mut CommandContext<'_>, state: &RunState) -> Result<(), CommandError> {
    let text = format!(
        "The run is already finished: {} steps. Pass --steps or --epochs to extend it.\n\n{}",
        state.settings.steps,
        next_commands(context, state)
    );
    let sampler = state.sampler.clone().unwrap_or_default();
    context.text(&text, &json!({ "finished": true, "name": state.name, "sampler": sampler }))
}

/// Returns the command lines that chat with the trained model, download its adapter and export it.
fn next_commands(context: &CommandContext<'_>, state: &RunState) -> String {
    let flags = context.server_flags();
    let sampler = state.sampler.as_deref().unwrap_or_default();
    // Every server can export a training checkpoint. The hosted service offers no sampler weights
    // for download.
    let adapter = state.saved.last().map(|saved| saved.path.to_string());
    // A run of an older version has no name.
    let name = state.name.as_deref().map(format::shell_quote);
    let sampler = name.as_deref().unwrap_or(sampler);
    let adapter = name.as_deref().or(adapter.as_deref()).unwrap_or(sampler);
    // llama.cpp has no pre-tokenizer for the tokenizer of the built-in model.
    let is_built_in = state.settings.model == tinkex_server::BUILT_IN;
    let gguf = if is_built_in { "" } else { "; add --format gguf for llama.cpp and ollama" };
    format!(
        "Chat with the model:\n  tinkex chat {sampler}{flags}\n\
         Download the adapter, for PEFT, vLLM and llama.cpp:\n  \
         tinkex checkpoint download {adapter}{flags}\n\
         Export the merged model{gguf}:\n  \
         tinkex export {adapter} --to my-model{flags}"
    )
}
