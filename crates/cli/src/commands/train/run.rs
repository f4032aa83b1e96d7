//! [`ActiveRun`]: executes a run and stores its progress in the run folder.

use std::pin::pin;
use std::time::Duration;

use tinkex::{
    LoraOptions, LossFn, RestoreMode, RestoreOptions, SaveOptions, ServiceClient, TinkerPath,
    TrainingClient,
};
use tinkex_recipes::dpo::{self, DpoPair, DpoReference};
use tinkex_recipes::{TrainEvent, TrainLoop, TrainPlan};
use tinkex_runs::{
    MetricsLine, REFERENCE_FILE, RunFolder, RunSettings, SavedCheckpoint, checkpoint_name, metric,
    rotate_checkpoints,
};

use crate::commands::training::data;
use crate::commands::training::log::RunLog;
use crate::commands::training::progress::TrainProgress;
use crate::commands::training::report::{self, FinishedRun, TruncatedCounts};
use crate::commands::training::start::{TrainingCommand, explain_rank};
use crate::context::CommandContext;
use crate::error::{CommandError, Exit};
use crate::format;
use crate::reference::{remember_folder, run_metadata};

use super::examples::Examples;
use super::samples::TrainingSamples;

/// Run in progress.
pub(super) struct ActiveRun {
    pub(super) service: ServiceClient,
    pub(super) model: TrainingClient,
    /// Run folder. Its lock prevents other processes from resuming the run.
    pub(super) folder: RunFolder,
    pub(super) log: RunLog,
    /// Completions during training, if the run has prompts for them.
    pub(super) samples: Option<TrainingSamples>,
}

/// Outcome of a run that ended without an error.
pub(super) struct RunOutcome {
    progress: TrainProgress,
    truncated: TruncatedCounts,
}

/// Creates the model to train, or loads it from the last checkpoint `saved`. A notice says that the
/// base model is being loaded if this takes longer than [`QUIET_LOAD`].
pub(super) async fn create_model(
    context: &mut CommandContext<'_>,
    service: &ServiceClient,
    settings: &RunSettings,
    name: Option<&str>,
    saved: Option<&SavedCheckpoint>,
) -> Result<TrainingClient, CommandError> {
    let create = async {
        let Some(saved) = saved else { return create_start(service, settings, name).await };
        let restore = RestoreMode::WithOptimizer;
        let options = RestoreOptions::new(restore).user_metadata(run_metadata(name));
        Ok(service.create_training_client_from(&saved.path, options).await?)
    };
    let mut create = pin!(create);
    let created = match tokio::time::timeout(QUIET_LOAD, &mut create).await {
        Ok(created) => created,
        Err(_) => {
            context.notice(&format!("loading {}", settings.base_model));
            create.await
        }
    };
    created.map_err(explain_rank)
}

/// Time after which a notice says that the model is being loaded.
const QUIET_LOAD: Duration = Duration::from_secs(2);

/// Creates a model with the starting weights.
async fn create_start(
    service: &ServiceClient,
    settings: &RunSettings,
    name: Option<&str>,
) -> Result<TrainingClient, CommandError> {
    let metadata = run_metadata(name);
    let Some(start) = &settings.start else {
        let options = LoraOptions::new(&*settings.base_model)
            .rank(settings.rank)
            .seed(settings.seed)
            .user_metadata(metadata);
        return Ok(service.create_lora_training_client(options).await?);
    };
    let restore =
        if start.with_optimizer { RestoreMode::WithOptimizer } else { RestoreMode::WeightsOnly };
    let options = RestoreOptions::new(restore).user_metadata(metadata);
    Ok(service.create_training_client_from(&start.checkpoint, options).await?)
}

impl ActiveRun {
    /// Runs the remaining steps and saves the model.
    pub(super) async fn execute(
        &mut self,
        context: &mut CommandContext<'_>,
        mut examples: Examples,
        plan: TrainPlan,
    ) -> Result<RunOutcome, CommandError> {
        let from = self.folder.record.progress.step();
        let settings = self.folder.record.settings.clone();
        remember_folder(&context.environment.variables, self.folder.path());
        // Draw the empty plot now, to fail before training if the file cannot be written.
        self.log.plot()?;
        let data = format::count(examples.train.len(), "example");
        report::announce(context, self.folder.path(), &self.folder.record, &data);
        if let Some(warning) = examples.warning() {
            context.notice(&warning);
        }
        context.announce_dashboard();
        let interrupt = context.environment.interrupt.clone();
        let model = self.model.clone();

        let loss = match (&examples.pairs, examples.settings.beta) {
            (Some((train, eval)), Some(beta)) => {
                let reference = self.reference(&model, train, eval);
                let reference = interrupt.run_until(1, reference).await?;
                let (of_train, of_eval) = reference.split_at(train.len().min(reference.len()));
                examples.train = data::pair_examples(train, of_train)?;
                examples.eval = data::pair_examples(eval, of_eval)?;
                dpo::loss(beta)
            }
            _ => LossFn::CrossEntropy.into(),
        };
        let truncated = examples.truncated;
        let eval_every = settings.evaluation.as_ref().map(|evaluation| evaluation.every);
        let sample_every = settings.samples.as_ref().map(|samples| samples.every);
        let mut progress = TrainProgress::new(context, settings.steps, from);
        if let Some(every) = eval_every {
            progress = progress.evaluates(every);
        }
        let mut training = TrainLoop::new(model.clone(), plan.clone(), examples.train)
            .eval(examples.eval)
            .loss(loss)
            .intervals(eval_every.unwrap_or(0), settings.checkpoints.every)
            .sample_every(sample_every.unwrap_or(0))
            .adam(settings.optimizer)
            .resume_at(from);
        let mut step = from;
        let mut stopped = false;
        loop {
            let next = match interrupt.race(1 + u32::from(stopped), training.next()).await {
                Some(next) => next,
                None if stopped => return Err(CommandError::interrupted()),
                None => {
                    stopped = true;
                    training.stop();
                    progress.clear(context);
                    context.notice("saving a checkpoint; press Ctrl-C again to stop immediately");
                    continue;
                }
            };
            match next? {
                None => break,
                Some(TrainEvent::Step(result)) => {
                    step = result.step;
                    progress.finish_step(context, step, result.tokens, result.loss);
                    #[expect(clippy::cast_precision_loss, reason = "a batch has few tokens")]
                    let tokens = result.tokens as f64;
                    self.log.add(
                        MetricsLine::new(step)
                            .with(metric::EPOCH, plan.epochs(step))
                            .with(metric::LOSS, result.loss)
                            .with(metric::LEARNING_RATE, result.learning_rate)
                            .with(metric::TOKENS, tokens)
                            .with(metric::TOKENS_PER_SECOND, progress.tokens_per_second())
                            .with_all("", result.metrics),
                    )?;
                }
                Some(TrainEvent::Evaluated(result)) => {
                    progress.set_eval_loss(context, result.step, result.loss);
                    self.log.add(
                        MetricsLine::new(result.step)
                            .with(metric::EVAL_LOSS, result.loss)
                            .with_all(metric::EVAL_PREFIX, result.metrics),
                    )?;
                }
                Some(TrainEvent::Saved { step, path }) => self.add_checkpoint(step, &path).await?,
                Some(TrainEvent::SamplerReady { step, sampler }) => {
                    if let Some(samples) = &mut self.samples {
                        let presses = 1 + u32::from(stopped);
                        let added = Box::pin(samples.add(context, &sampler, step));
                        if let Some(added) = interrupt.race(presses, added).await {
                            added?;
                        }
                    }
                    sampler.close().detach();
                }
                Some(_) => {}
            }
        }
        progress.clear(context);
        interrupt.run_until(2, self.save(&model, step)).await?;
        self.folder.record.progress.finished = step == settings.steps;
        self.folder.store()?;
        Ok(RunOutcome { progress, truncated })
    }

    /// Returns the log-probabilities of all pairs under the starting weights. They are computed once
    /// and stored in the run folder.
    async fn reference(
        &self,
        model: &TrainingClient,
        train: &[DpoPair],
        eval: &[DpoPair],
    ) -> Result<Vec<DpoReference>, CommandError> {
        let path = self.folder.path().join(REFERENCE_FILE);
        let count = train.len() + eval.len();
        if let Ok(bytes) = std::fs::read(&path)
            && let Ok(stored) = serde_json::from_slice::<Vec<DpoReference>>(&bytes)
            && stored.len() == count
        {
            return Ok(stored);
        }
        let record = &self.folder.record;
        let start = match record.progress.step() {
            0 => model.clone(),
            // Training has already changed the weights. Only the trained model has the name.
            _ => create_start(&self.service, &record.settings, None).await?,
        };
        let pairs = [train, eval].concat();
        let reference = dpo::reference_logprobs(&start, &pairs).await?;
        let text = serde_json::to_vec(&reference).unwrap_or_default();
        let written = tinkex_files::write(&path, text);
        written.map_err(|error| CommandError::file("write", path.display(), &error))?;
        Ok(reference)
    }

    /// Records a new checkpoint in `run.json`, then deletes the oldest ones. In the other order, a
    /// crash in between could leave a `run.json` that refers only to deleted checkpoints.
    async fn add_checkpoint(&mut self, step: u64, path: &TinkerPath) -> Result<(), CommandError> {
        let record = &mut self.folder.record;
        record.progress.checkpoints.push(SavedCheckpoint::new(step, path.clone()));
        let keep = record.settings.checkpoints.keep;
        let old = rotate_checkpoints(&mut record.progress.checkpoints, keep);
        self.folder.store()?;
        self.log.plot()?;
        for saved in old {
            self.delete_checkpoint(&saved.path).await;
        }
        Ok(())
    }

    /// Deletes a checkpoint. Errors are ignored: the checkpoint only takes up space.
    async fn delete_checkpoint(&self, path: &TinkerPath) {
        let _ = self.service.rest().delete_checkpoint(path).await;
    }

    /// Saves a training checkpoint, unless one exists for this step, and a sampler checkpoint.
    async fn save(&mut self, model: &TrainingClient, step: u64) -> Result<(), CommandError> {
        let name = checkpoint_name(step);
        let last = self.folder.record.progress.checkpoints.last();
        let unsaved = last.is_none_or(|saved| saved.step != step);
        if unsaved && step > 0 {
            let path = model.save_state(SaveOptions::new(&*name)).await?;
            self.add_checkpoint(step, &path).await?;
        }
        let sampler = model.save_weights_for_sampler(SaveOptions::new(name)).await?;
        let old = self.folder.record.progress.sampler.replace(sampler.clone());
        self.folder.store()?;
        // The sampler checkpoint of the previous stop is superseded.
        if let Some(old) = old.filter(|old| *old != sampler) {
            self.delete_checkpoint(&old).await;
        }
        self.log.plot()
    }

    /// Reports the outcome. Ends the session, unless the run failed.
    pub(super) async fn finish(
        self,
        context: &mut CommandContext<'_>,
        outcome: Result<RunOutcome, CommandError>,
    ) -> Result<Exit, CommandError> {
        let command = TrainingCommand::Train;
        let path = self.folder.path();
        let record = &self.folder.record;
        let outcome = match outcome {
            Ok(outcome) => outcome,
            Err(error) => return Err(report::failed(context, command, path, error)),
        };
        if !record.progress.finished {
            // Everything is saved, so nothing is queued.
            self.service.abort().await;
            return Err(report::stopped(context, command, path, record));
        }
        self.service.finish().await;
        let finished = FinishedRun {
            folder: path,
            record,
            log: &self.log,
            progress: &outcome.progress,
            truncated: outcome.truncated,
        };
        finished.report(context)?;
        Ok(Exit::Success)
    }
}
