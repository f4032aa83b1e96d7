//! Supervised fine-tuning from a file: all of it checked first, saved on the way, gone on with.

mod args;
pub(super) mod data;
mod examples;
pub(super) mod plan;
mod plot;
mod pulse;
pub(super) mod record;
mod run;
pub(super) mod show;
mod state;
pub(super) mod work;

use std::path::Path;

use serde_json::json;

use crate::failure::{Exit, Failure};
use crate::output::Shell;

pub(crate) use args::Train;
use examples::Examples;
use plan::Plan;
use record::Record;
use run::Run;
use state::State;

pub(super) async fn run(shell: &mut Shell<'_>, train: Train) -> Result<Exit, Failure> {
    let interrupt = shell.world.interrupt.clone();
    let Some((mut run, examples, plan)) = interrupt.stops(1, prepare(shell, train)).await? else {
        return Ok(Exit::Done);
    };
    let ended = run.go(shell, examples, plan).await;
    run.end(shell, ended).await
}

/// Checks everything and makes the run's folder; nothing if that is all.
async fn prepare(
    shell: &mut Shell<'_>,
    train: Train,
) -> Result<Option<(Run, Examples, Plan)>, Failure> {
    let mut wanted = train.wanted;
    for path in [&mut wanted.file, &mut wanted.dir].into_iter().flatten() {
        *path = shell.world.path(path);
    }
    let resume = train.resume.map(|folder| shell.world.path(&folder));
    let old = resume.as_deref().map(State::load).transpose()?;
    if let Some(state) = old.as_ref().filter(|state| state.finished) {
        let sampler = state.sampler.clone().unwrap_or_default();
        let text = format!("the run is finished; chat with it: {}", chat_line(shell, &sampler));
        shell.text(&text, &json!({ "finished": true, "sampler": sampler }))?;
        return Ok(None);
    }
    let file = old.as_ref().map_or(wanted.file.as_deref(), |state| Some(&state.settings.file));
    let digest = data::digest(file.unwrap_or(Path::new("")))?;
    if let Some(state) = old.as_ref().filter(|state| state.digest != digest) {
        let why = format!("{} has changed since the run began", state.settings.file.display());
        return Err(
            Failure::usage(why).hint("put it back as it was, or start a new run with the new file")
        );
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
        let (table, json) = examples.plan(&settings, old.as_ref().map_or(0, State::step));
        shell.table(&table, &json)?;
        return Ok(None);
    }

    let folder = match resume {
        Some(folder) => folder,
        None => state::new_folder(&shell.world.folder, wanted.dir, &settings.file)?,
    };
    let state = old.unwrap_or_else(|| State::new(settings, digest));
    let record = Record::open(&folder.join("metrics.jsonl"), state.step())?;
    Ok(Some((Run { service, folder, state, record }, examples, plan)))
}

/// The line to type to talk to a checkpoint.
pub(super) fn chat_line(shell: &Shell<'_>, path: &str) -> String {
    let local = if shell.settings.local { " --local" } else { "" };
    format!("tinkex chat {path}{local}")
}
