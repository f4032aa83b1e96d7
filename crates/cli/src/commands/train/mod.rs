//! Supervised fine-tuning from a file: all of it checked first, saved on the way, gone on with.

mod args;
pub(super) mod data;
mod examples;
pub(super) mod metrics_log;
pub(super) mod pipeline;
pub(super) mod plan;
mod plot;
pub(super) mod progress;
mod run;
mod state;

use std::time::Duration;

use serde_json::json;

use crate::error::{CommandError, Exit};
use crate::output::Shell;

pub(crate) use args::{TrainArgs, hint};
use examples::Examples;
use metrics_log::MetricsLog;
use plan::TrainPlan;
use run::ActiveRun;
use state::RunState;

/// How long a run waits for a server that is gone. Much is lost with a run, and nobody need watch it.
const PATIENCE: Duration = Duration::from_secs(300);

pub(super) async fn run(shell: &mut Shell<'_>, train: TrainArgs) -> Result<Exit, CommandError> {
    shell.settings.be_patient(PATIENCE);
    let interrupt = shell.environment.interrupt.clone();
    let Some((mut run, examples, plan)) = interrupt.stops(1, prepare(shell, train)).await? else {
        return Ok(Exit::Success);
    };
    let ended = run.go(shell, examples, plan).await;
    run.end(shell, ended).await
}

/// Checks everything and makes the run's folder; nothing if that is all.
async fn prepare(
    shell: &mut Shell<'_>,
    train: TrainArgs,
) -> Result<Option<(ActiveRun, Examples, TrainPlan)>, CommandError> {
    let mut wanted = train.wanted;
    for path in [&mut wanted.file, &mut wanted.eval_file, &mut wanted.dir].into_iter().flatten() {
        *path = shell.environment.path(path);
    }
    let plot = train.plot.map(|file| shell.environment.path(&file));
    let resume = train.resume.map(|folder| shell.environment.path(&folder));
    let mut old = resume.as_deref().map(RunState::load).transpose()?;
    let mut lock = None;
    if let Some(folder) = resume.as_deref().filter(|_| !train.dry_run) {
        lock = Some(state::lock(folder)?);
        // Whoever held it may have come further.
        old = Some(RunState::load(folder)?);
    }
    if let Some(state) = old.as_ref().filter(|state| state.finished) {
        let sampler = state.sampler.clone().unwrap_or_default();
        let text = format!("the run is finished; chat with it: {}", chat_line(shell, &sampler));
        shell.text(&text, &json!({ "finished": true, "sampler": sampler }))?;
        return Ok(None);
    }
    match &old {
        Some(state) => state.check_files()?,
        // Before a server is started for it.
        None => {
            for file in [&wanted.file, &wanted.eval_file].into_iter().flatten() {
                data::look_at(file)?;
            }
        }
    }

    let service = shell.client().await?;
    let (model, tokenizer) = match &old {
        Some(state) => (state.settings.model.clone(), state.settings.tokenizer.clone()),
        None => (examples::base_model(shell, wanted.model.as_deref())?, wanted.tokenizer.clone()),
    };
    let tokenizer = examples::find_tokenizer(shell, &service, &model, tokenizer.as_deref()).await?;
    let settings = match &old {
        Some(state) => state.settings.clone(),
        None => examples::settle(shell, &wanted, &service, model).await?,
    };
    let (examples, settings) =
        Examples::read(&tokenizer.chat()?, settings, &wanted, old.is_none())?;
    let plan = settings.plan(examples.train.len());
    if train.dry_run {
        let (table, json) = examples.plan(&settings, old.as_ref().map_or(0, RunState::step));
        shell.table(&table, &json)?;
        return Ok(None);
    }

    let folder = match resume {
        Some(folder) => folder,
        None => state::new_folder(&shell.environment.folder, wanted.dir, &settings.file)?,
    };
    let lock = match lock {
        Some(lock) => lock,
        None => state::lock(&folder)?,
    };
    let mut state = match old {
        Some(state) => state,
        None => RunState::new(settings)?,
    };
    if let Some(plot) = plot {
        state::make_folder(plot.parent().unwrap_or(&plot))?;
        state.plot = Some(plot);
    }
    let record = MetricsLog::open(&folder.join("metrics.jsonl"), state.step())?;
    Ok(Some((ActiveRun { service, folder, _lock: lock, state, record }, examples, plan)))
}

/// The line to type to talk to a checkpoint.
pub(super) fn chat_line(shell: &Shell<'_>, path: &str) -> String {
    format!("tinkex chat {path}{}", shell.server_flags())
}
