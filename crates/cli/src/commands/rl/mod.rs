//! `tinkex rl`: reinforcement learning from a file of prompts and a reward.
//!
//! [`Rl`](tinkex_recipes::Rl) of the client library has the loop and writes the run folder. This
//! command reads the files, chooses the reward and shows the progress.
//!
//! | Module | Contents |
//! |---|---|
//! | `args` | the arguments |
//! | `rewards` | the built-in rewards |

mod args;
pub(super) mod rewards;

use std::time::Duration;

use tinkex::{AdamParams, LossConfig, LossFn, LossSpec, SamplingParams, ServiceClient, Tokenizer};
use tinkex_recipes::RewardProgram;
use tinkex_recipes::rl::{Rl, RlPrompt, RlRun};
use tinkex_runs::{
    EvaluationSettings, LossOption, LossSettings, MethodSettings, RlSettings, RunFolder, RunMethod,
    RunRecord, RunSettings, StartCheckpoint,
};

use crate::context::CommandContext;
use crate::error::{CommandError, Exit};
use crate::format;
use crate::reference::{remember_folder, run_metadata};

use super::training::data;
use super::training::log::RunLog;
use super::training::progress::TrainProgress;
use super::training::report::{self, FinishedRun, TruncatedCounts};
use super::training::start::{RunStart, TrainingCommand, explain_rank};
pub(crate) use args::RlArgs;
use rewards::RewardOption;

/// Default number of steps.
const STEPS: u64 = 100;
/// Default evaluation interval in steps.
const EVAL_EVERY: u64 = 10;

/// Run that is ready to start.
struct PreparedRun {
    service: ServiceClient,
    folder: RunFolder,
    reward: RewardSource,
    prompts: Vec<RlPrompt>,
    eval_prompts: Vec<RlPrompt>,
    tokenizer: Tokenizer,
}

/// Reward, and how a program computes it.
struct RewardSource {
    reward: RewardOption,
    workers: usize,
    timeout: Duration,
}

pub(super) async fn run(
    context: &mut CommandContext<'_>,
    args: RlArgs,
) -> Result<Exit, CommandError> {
    let interrupt = context.environment.interrupt.clone();
    let prepared = interrupt.run_until(1, Box::pin(prepare(context, args))).await?;
    let Some(prepared) = prepared else { return Ok(Exit::Success) };
    let command = TrainingCommand::Rl;
    let path = prepared.folder.path().to_owned();
    let service = prepared.service.clone();
    let (log, progress) = match Box::pin(execute(context, prepared)).await {
        Ok(ended) => ended,
        Err(error) => return Err(report::failed(context, command, &path, error)),
    };
    let record = RunFolder::read(&path)?;
    if !record.progress.finished {
        service.abort().await;
        return Err(report::stopped(context, command, &path, &record));
    }
    service.finish().await;
    let finished = FinishedRun {
        folder: &path,
        record: &record,
        log: &log,
        progress: &progress,
        truncated: TruncatedCounts::default(),
    };
    finished.report(context)?;
    Ok(Exit::Success)
}

/// Checks the arguments and the data and prepares the run folder. Returns `None` if the resumed run
/// is finished.
async fn prepare(
    context: &mut CommandContext<'_>,
    mut args: RlArgs,
) -> Result<Option<PreparedRun>, CommandError> {
    let command = TrainingCommand::Rl;
    let extends = args.steps.is_some();
    let opened = RunStart::open(context, command, &mut args.run, &args.resume, extends, false);
    let Some(mut start) = opened.await? else { return Ok(None) };
    let mut settings = match &start.old {
        Some(record) => record.settings.clone(),
        None => configure(&args, &start)?,
    };
    if let Some(steps) = args.steps {
        settings.steps = steps;
    }
    let rl = rl_settings(&settings)?;
    let mut prompts = Vec::new();
    for file in &start.inputs.train {
        prompts.extend(data::read_prompts(file, rl.prompts_are_messages)?);
    }
    let eval_prompts = match &start.inputs.eval {
        Some(file) => data::read_prompts(file, rl.prompts_are_messages)?,
        None => Vec::new(),
    };
    let reward = RewardOption::try_from(&rl.reward)?;
    if let RewardOption::BuiltIn(reward) = &reward {
        reward.check(&prompts)?;
        reward.check(&eval_prompts)?;
    }
    if start.change_steps(context, settings.steps)? {
        return Ok(None);
    }
    let folder = start.folder(context, &args.run, &args.resume, settings).await?;
    let reward =
        RewardSource { reward, workers: args.reward_workers, timeout: args.reward_timeout };
    Ok(Some(PreparedRun {
        service: start.service,
        folder,
        reward,
        prompts,
        eval_prompts,
        tokenizer: start.tokenizer,
    }))
}

/// Builds the settings of a new run from the arguments.
fn configure(args: &RlArgs, start: &RunStart) -> Result<RunSettings, CommandError> {
    let RlArgs { run, policy, .. } = args;
    let reward = policy.reward.as_ref();
    let reward = reward.ok_or_else(|| CommandError::usage("no reward given"))?;
    let method = MethodSettings::Rl(RlSettings {
        reward: reward.into(),
        prompts_are_messages: policy.chat,
        group_size: policy.group_size,
        groups_per_batch: policy.groups_per_batch,
        loss: policy.loss(),
        advantage: policy.advantage(),
        kl_coefficient: policy.kl_coef,
        max_policy_age: policy.off_policy,
        sampling: SamplingParams::new()
            .max_tokens(policy.max_tokens)
            .temperature(policy.temperature),
    });
    let learning_rate =
        run.learning_rate.unwrap_or_else(|| default_learning_rate(&start.base_model));
    let mut settings = RunSettings::new(&*start.base_model, method);
    settings.start =
        start.from.clone().map(|checkpoint| StartCheckpoint { checkpoint, with_optimizer: false });
    settings.tokenizer.clone_from(&run.model.tokenizer);
    settings.rank = start.rank;
    settings.seed = run.seed;
    settings.steps = STEPS;
    settings.optimizer = AdamParams::with_learning_rate(learning_rate);
    // The start of the run sets the file and its checksum.
    settings.evaluation = run.eval_file.is_some().then(|| EvaluationSettings {
        every: run.eval_every.unwrap_or(EVAL_EVERY),
        ..EvaluationSettings::default()
    });
    settings.checkpoints.every = run.save_every.unwrap_or(1);
    settings.checkpoints.keep = run.keep;
    settings.event_log = run.log_to.map(Into::into);
    Ok(settings)
}

/// Returns the default learning rate. The built-in model is small and needs a high one.
fn default_learning_rate(model: &str) -> f64 {
    if model == tinkex_server::BUILT_IN { 3e-3 } else { 4e-5 }
}

/// Returns the settings that only runs with rewards have.
fn rl_settings(settings: &RunSettings) -> Result<&RlSettings, CommandError> {
    match &settings.method {
        MethodSettings::Rl(rl) => Ok(rl),
        other => {
            let method: RunMethod = other.method();
            Err(CommandError::usage(format!("the method of the run is {method}")))
        }
    }
}

/// Returns the loss of a run with its options.
fn loss_spec(loss: &LossSettings) -> LossSpec {
    let mut config = LossConfig::new();
    for (name, option) in &loss.options {
        config = match option {
            LossOption::Number(number) => config.set(name.clone(), *number),
            LossOption::Text(text) => config.set(name.clone(), text.as_str()),
        };
    }
    LossSpec::new(LossFn::from(loss.function.as_str()), config)
}

/// Builds the run from its settings.
fn build(context: &CommandContext<'_>, prepared: PreparedRun) -> Result<Rl, CommandError> {
    let record = &prepared.folder.record;
    let settings = &record.settings;
    let rl = rl_settings(settings)?;
    let eval_every = settings.evaluation.as_ref().map_or(0, |evaluation| evaluation.every);
    let mut builder = Rl::new(&*settings.base_model)
        .rank(settings.rank)
        .user_metadata(run_metadata(Some(&record.name)))
        .prompts(prepared.prompts)
        .eval_prompts(prepared.eval_prompts, eval_every)
        .tokenizer(prepared.tokenizer)
        .steps(settings.steps)
        .group_size(rl.group_size)
        .groups_per_batch(rl.groups_per_batch)
        .loss(loss_spec(&rl.loss))
        .advantage(rl.advantage)
        .kl_coef(rl.kl_coefficient)
        .adam(settings.optimizer)
        .sampling(rl.sampling.clone())
        .off_policy(rl.max_policy_age)
        .seed(settings.seed)
        .save_every(settings.checkpoints.every)
        .keep(settings.checkpoints.keep);
    if let Some(start) = &settings.start {
        builder = builder.from_checkpoint(start.checkpoint.clone());
    }
    let builder = match prepared.reward.reward {
        RewardOption::BuiltIn(reward) => builder.reward(reward.function()),
        RewardOption::Program(command) => builder.reward_program(
            RewardProgram::new(command)
                .current_dir(&context.environment.folder)
                .workers(prepared.reward.workers)
                .timeout(prepared.reward.timeout)
                .on_stderr(context.line_writer("reward")),
        ),
    };
    Ok(builder.opened_folder(prepared.folder))
}

/// Starts the run and follows its reports until it ends. Returns its metrics.
async fn execute(
    context: &mut CommandContext<'_>,
    prepared: PreparedRun,
) -> Result<(RunLog, TrainProgress), CommandError> {
    let interrupt = context.environment.interrupt.clone();
    let path = prepared.folder.path().to_owned();
    let record = prepared.folder.record.clone();
    let prompts = format::count(prepared.prompts.len(), "prompt");
    let service = prepared.service.clone();
    let rl = build(context, prepared)?;
    let start = Box::pin(async { rl.start(&service).await.map_err(|error| error.into()) });
    let mut run: RlRun = interrupt.run_until(1, start).await.map_err(explain_rank)?;
    remember_folder(&context.environment.variables, &path);
    let mut log = RunLog::follow(&path, &record)?;
    // Draw the empty plot now, to fail before training if the file cannot be written.
    log.plot()?;
    report::announce(context, &path, &record, &prompts);
    context.announce_dashboard();
    let progress = follow(context, &record, &mut run, &mut log).await?;
    log.plot()?;
    Ok((log, progress))
}

/// Shows the reports of a run until it ends.
async fn follow(
    context: &mut CommandContext<'_>,
    record: &RunRecord,
    run: &mut RlRun,
    log: &mut RunLog,
) -> Result<TrainProgress, CommandError> {
    let interrupt = context.environment.interrupt.clone();
    let from = run.resumed_from();
    let mut progress =
        TrainProgress::new(context, record.settings.steps, from).label(log.main.name);
    let mut stopping = false;
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
            progress.finish_step(context, report.step, report.tokens, report.reward);
        }
        for line in report.metrics_lines() {
            log.add(line)?;
        }
        if report.checkpoint.is_some() {
            log.plot()?;
        }
    }
    progress.clear(context);
    Ok(progress)
}
