//! `tinkex rl`: reinforcement learning from a file of prompts and a reward.
//!
//! [`Rl`](tinkex::recipes::Rl) of the client library has the loop. This command reads the files,
//! chooses the reward and records the run in its folder.
//!
//! | Module | Contents |
//! |---|---|
//! | `args` | the arguments |
//! | `rewards` | the built-in rewards |
//! | `logs` | metrics and rollouts |
//! | `state` | the settings of the run, in `run.json` |
//! | `summary` | the result |

mod args;
mod logs;
pub(super) mod rewards;
mod state;
mod summary;

use std::path::{Path, PathBuf};
use std::time::Duration;

use tinkex::recipes::RewardProgram;
use tinkex::recipes::rl::{Rl, RlPrompt, RlRun};
use tinkex::{SamplingParams, ServiceClient, Tokenizer};
use tinkex_files::FileLock;

use crate::context::CommandContext;
use crate::error::{CommandError, Exit};
use crate::format;
use crate::reference::{
    CheckpointReference, CheckpointUse, RunFolderKind, find_folder, remember_folder, run_metadata,
};

use super::run_args::resume_text;
use super::train::data;
use super::train::progress::TrainProgress;
use super::train::source::{DataFile, RunInputs, STDIN_COPY};
use super::train::state::SettingChange;
use super::train::{RETRY_FOR, examples, state as train_state};
pub(crate) use args::RlArgs;
use logs::RunLogs;
use rewards::RewardOption;
use state::RlRunState;
use summary::EndedRun;

/// Run that is ready to start.
struct PreparedRun {
    service: ServiceClient,
    rl: Rl,
    state: RlRunState,
    folder: PathBuf,
    /// Prevents other processes from resuming the run.
    _lock: FileLock,
    /// Whether this command has created the run.
    is_new: bool,
}

pub(super) async fn run(
    context: &mut CommandContext<'_>,
    args: RlArgs,
) -> Result<Exit, CommandError> {
    context.settings.default_retry_for(RETRY_FOR);
    let interrupt = context.environment.interrupt.clone();
    let prepared = interrupt.run_until(1, Box::pin(prepare(context, args))).await?;
    let name = prepared.state.name.as_deref();
    let run = resume_text(context, RunFolderKind::Rl, &prepared.folder, name);
    let resume = format!("tinkex rl --resume {run}{}", context.server_flags());
    let executed = execute(context, &prepared.folder, &prepared.service, prepared.rl);
    let done = match Box::pin(executed).await {
        Ok(done) => done,
        Err(error) if prepared.is_new && error.exit() == Exit::Rejected => {
            remove_unstarted(&prepared.folder);
            return Err(error);
        }
        Err(error) => {
            return Err(error.add_hint(format!("Resume from the last checkpoint with: {resume}")));
        }
    };
    if !done.outcome.finished {
        prepared.service.abort().await;
        let message = format!("stopped at step {} and saved a checkpoint", done.outcome.step);
        return Err(
            CommandError::new(Exit::Interrupted, message).hint(format!("Resume with: {resume}"))
        );
    }
    prepared.service.finish(&Ok::<(), CommandError>(())).await;
    summary::report(context, &prepared.state, &prepared.folder, &done)?;
    Ok(Exit::Success)
}

/// Checks the arguments and the data and creates the run folder.
async fn prepare(
    context: &mut CommandContext<'_>,
    args: RlArgs,
) -> Result<PreparedRun, CommandError> {
    let find = |text: &String| {
        let (variables, here) = (&context.environment.variables, &context.environment.folder);
        find_folder(variables, here, text, RunFolderKind::Rl)
    };
    let resume = args.resume.as_ref().map(find).transpose()?;
    let mut new = args.run.clone();
    if let Some(dir) = &mut new.folder.dir {
        let resolved = context.environment.path(dir);
        *dir = std::path::absolute(&resolved).unwrap_or(resolved);
    }
    let (mut config, inputs, old, lock) = match &resume {
        Some(folder) => {
            let lock = train_state::lock(folder)?;
            let state = RlRunState::load(folder)?;
            state.check_files()?;
            let config = state.settings.clone();
            let eval = config.eval_file.as_deref();
            let inputs = RunInputs::of_paths(DataFile::Prompts, &config.files, eval);
            (config, inputs, Some(state), Some(lock))
        }
        None => {
            let eval = new.eval_file.as_mut();
            let inputs = RunInputs::open(context, DataFile::Prompts, &mut new.files, eval).await?;
            (new, inputs, None, None)
        }
    };
    let old_steps = config.steps;
    config.steps = args.steps.unwrap_or(if old.is_some() { old_steps } else { 100 });
    let mut prompts = Vec::new();
    for file in &inputs.train {
        prompts.extend(data::read_prompts(file, config.chat)?);
    }
    let eval = match &inputs.eval {
        Some(file) => data::read_prompts(file, config.chat)?,
        None => Vec::new(),
    };
    let reward = config.reward.clone();
    let reward = reward.ok_or_else(|| CommandError::usage("no reward given"))?;
    if let RewardOption::BuiltIn(reward) = &reward {
        reward.check(&prompts)?;
        reward.check(&eval)?;
    }

    if old.is_none() {
        config.model.serve_path(context).await?;
    }
    let service = context.client().await?;
    let start = &mut config.model;
    let model = match (&mut start.from, &old) {
        (_, Some(state)) => state.model.clone(),
        (Some(from), None) => {
            let path = from.resolve(context, CheckpointUse::Train).await?;
            let info = service.rest().get_weights_info(&path).await?;
            *from = CheckpointReference::Path(path);
            start.rank = info.lora_rank.unwrap_or(start.rank);
            info.base_model
        }
        (None, None) => examples::base_model(context, start.model.as_deref())?,
    };
    let named = config.model.tokenizer.as_deref();
    let tokenizer = examples::find_tokenizer(context, &service, &model, named).await?;
    config.learning_rate.get_or_insert_with(|| default_learning_rate(&model));

    let is_new = old.is_none();
    let (folder, state) = match (resume, old) {
        (Some(folder), Some(mut state)) => {
            if config.steps != old_steps {
                let steps = config.steps;
                let at = RlRunState::finished_steps(&folder);
                train_state::check_steps(steps, at)?;
                context.notice(&format!("changing the run from {old_steps} to {steps} steps"));
                state.changes.push(SettingChange::of_steps(at, old_steps, steps));
            }
            state.settings = config;
            (folder, state)
        }
        _ => {
            let file = inputs.first_path();
            let (name, folder) = config.folder.choose(context, &service, &file).await?;
            train_state::new_folder(&folder)?;
            inputs.keep_stdin(&folder, config.files.iter_mut().chain(&mut config.eval_file))?;
            (folder, RlRunState::new(&name, config, model)?)
        }
    };
    let lock = match lock {
        Some(lock) => lock,
        None => train_state::lock(&folder)?,
    };
    state.store(&folder)?;
    remember_folder(&context.environment.variables, &folder);
    let reward =
        RewardSource { reward, workers: args.reward_workers, timeout: args.reward_timeout };
    let rl = build(context, &state, reward, (prompts, eval), tokenizer, &folder);
    Ok(PreparedRun { service, rl, state, folder, _lock: lock, is_new })
}

/// Removes the files of a run that the server rejected, and the folder if nothing else is in it.
/// Keeps a run that has started: it has a file to resume from.
fn remove_unstarted(folder: &Path) {
    if folder.join("resume.json").exists() {
        return;
    }
    for name in ["run.json", STDIN_COPY, "lock"] {
        let _ = std::fs::remove_file(folder.join(name));
    }
    let _ = std::fs::remove_dir(folder);
}

/// Returns the default learning rate. The built-in model is small and needs a high one.
fn default_learning_rate(model: &str) -> f64 {
    if model == tinkex_server::BUILT_IN { 3e-3 } else { 4e-5 }
}

/// Reward, and how a program computes it.
struct RewardSource {
    reward: RewardOption,
    workers: usize,
    timeout: Duration,
}

/// Builds the run from the settings.
fn build(
    context: &CommandContext<'_>,
    state: &RlRunState,
    source: RewardSource,
    (prompts, eval): (Vec<RlPrompt>, Vec<RlPrompt>),
    tokenizer: Tokenizer,
    folder: &Path,
) -> Rl {
    let config = &state.settings;
    let sampling =
        SamplingParams::new().max_tokens(config.max_tokens).temperature(config.temperature);
    let mut rl = Rl::new(&*state.model)
        .rank(config.model.rank)
        .user_metadata(run_metadata(state.name.as_deref()))
        .prompts(prompts)
        .eval_prompts(eval, config.eval_every)
        .tokenizer(tokenizer)
        .steps(config.steps)
        .group_size(config.group_size)
        .groups_per_batch(config.groups_per_batch)
        .loss(config.loss())
        .advantage(config.advantage())
        .kl_coef(config.kl_coef)
        .learning_rate(config.learning_rate.unwrap_or_default())
        .sampling(sampling)
        .off_policy(config.off_policy)
        .seed(config.seed)
        .save_every(config.save_every)
        .keep(config.keep)
        .resume_file(folder.join("resume.json"));
    if let Some(CheckpointReference::Path(from)) = &config.model.from {
        rl = rl.from_checkpoint(from.clone());
    }
    match source.reward {
        RewardOption::BuiltIn(reward) => rl.reward(reward.function()),
        RewardOption::Program(command) => {
            let program = RewardProgram::new(command)
                .current_dir(&context.environment.folder)
                .workers(source.workers)
                .timeout(source.timeout)
                .on_stderr(context.line_writer("reward"));
            rl.reward_program(program)
        }
    }
}

/// Starts the run and records its reports until it ends.
async fn execute(
    context: &mut CommandContext<'_>,
    folder: &Path,
    service: &ServiceClient,
    rl: Rl,
) -> Result<EndedRun, CommandError> {
    let interrupt = context.environment.interrupt.clone();
    let steps = rl.total_steps();
    let start = Box::pin(async { Ok(rl.start(service).await?) });
    let mut run: RlRun = interrupt.run_until(1, start).await?;
    let from = run.resumed_from();
    let mut logs = RunLogs::open(folder, from)?;
    context.notice(&format!(
        "{} by reinforcement learning: {}, folder {}",
        if from > 0 { "resuming" } else { "training" },
        format::count(steps.saturating_sub(from), "step"),
        folder.display()
    ));
    context.announce_dashboard();
    let mut progress = TrainProgress::new(context, steps, from).label("reward");
    let (mut tokens, mut stopping) = (0, false);
    loop {
        let next = match interrupt.race(1 + u32::from(stopping), run.next()).await {
            Some(next) => next,
            None if stopping => return Err(CommandError::interrupted()),
            None => {
                stopping = true;
                run.stop_handle().stop();
                progress.clear(context);
                context.notice("saving a checkpoint; press Ctrl-C again to stop immediately");
                continue;
            }
        };
        let Some(report) = next else { break };
        let report = report?;
        if let Some(reward) = report.eval_reward {
            progress.set_eval_loss(context, report.step, reward);
        }
        if report.step > from {
            tokens += report.tokens;
            progress.finish_step(context, report.step, report.tokens, report.reward);
        }
        logs.add(report)?;
    }
    progress.clear(context);
    let Some(outcome) = run.outcome() else {
        return Err(CommandError::new(Exit::Failed, "the run ended without an outcome"));
    };
    Ok(EndedRun {
        outcome,
        run_id: run.run_id().to_owned(),
        first: logs.first,
        last: logs.last,
        evals: logs.evals,
        tokens,
        seconds: progress.seconds(),
    })
}
