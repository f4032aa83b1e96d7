//! [`ActiveRun`]: executes a run and stores its progress in the run folder.

use std::path::PathBuf;
use std::pin::pin;
use std::time::Duration;

use serde_json::json;
use tinkex::recipes::dpo::{self, DpoPair, DpoReference};
use tinkex::recipes::{
    SavedCheckpoint, TrainEvent, TrainLoop, TrainPlan, checkpoint_name, rotate_checkpoints,
};
use tinkex::{LossFn, RestoreMode, SaveOptions, ServiceClient, TinkerPath, TrainingClient};

use crate::args::OutputFormat;
use crate::commands::plot::{Plot, TerminalPlot};
use crate::commands::run_args::resume_text;
use crate::context::CommandContext;
use crate::error::{CommandError, Exit};
use crate::format;
use crate::reference::{RunFolderKind, parse_path, remember_folder, run_metadata};

use super::data;
use super::event_log::EVENT_FILE;
use super::examples::{Examples, TruncatedCounts};
use super::metrics_log::{EvalLine, MetricsLog, StepLine};
use super::next_commands;
use super::progress::{TrainProgress, thousands};
use super::samples::{SAMPLES_FILE, TrainingSamples};
use super::state::{RunConfig, RunState, TrainMethod};

/// Run in progress.
pub(super) struct ActiveRun {
    pub(super) service: ServiceClient,
    pub(super) model: TrainingClient,
    pub(super) folder: PathBuf,
    /// Prevents other processes from resuming the run.
    pub(super) _lock: tinkex_files::FileLock,
    pub(super) state: RunState,
    pub(super) metrics: MetricsLog,
    /// Answers during training, if the run has prompts for them.
    pub(super) samples: Option<TrainingSamples>,
}

/// Outcome of a run that ended without an error.
pub(super) struct RunOutcome {
    step: u64,
    seconds: f64,
    tokens_per_second: f64,
    /// Whether the user stopped the run before its last step.
    stopped: bool,
    truncated: TruncatedCounts,
}

/// Creates the model to train, or loads it from the last checkpoint `saved`. A notice says that the
/// base model is being loaded if this takes longer than [`QUIET_LOAD`].
pub(super) async fn create_model(
    context: &mut CommandContext<'_>,
    service: &ServiceClient,
    config: &RunConfig,
    name: Option<&str>,
    saved: Option<&SavedCheckpoint>,
) -> Result<TrainingClient, CommandError> {
    let create = async {
        let Some(saved) = saved else { return create_start(service, config, name).await };
        let restore = RestoreMode::WithOptimizer;
        let model = service.create_training_client_from(&saved.path, restore);
        Ok(model.user_metadata(run_metadata(name)).create().await?)
    };
    let mut create = pin!(create);
    let created = match tokio::time::timeout(QUIET_LOAD, &mut create).await {
        Ok(created) => created,
        Err(_) => {
            context.notice(&format!("loading {}", config.model));
            create.await
        }
    };
    created.map_err(|error| match error.to_string().starts_with("lora_config.rank") {
        true => error.hint("Pass a rank that the message allows, such as --rank 16."),
        false => error,
    })
}

/// Time after which a notice says that the model is being loaded.
const QUIET_LOAD: Duration = Duration::from_secs(2);

/// Creates a model with the starting weights.
async fn create_start(
    service: &ServiceClient,
    config: &RunConfig,
    name: Option<&str>,
) -> Result<TrainingClient, CommandError> {
    let metadata = run_metadata(name);
    let Some(from) = &config.from else {
        let new = service.create_lora_training_client(&*config.model);
        let new = new.rank(config.rank).seed(config.seed).user_metadata(metadata);
        return Ok(new.create().await?);
    };
    let restore = match config.with_optimizer {
        true => RestoreMode::WithOptimizer,
        false => RestoreMode::WeightsOnly,
    };
    let model = service.create_training_client_from(&parse_path(from)?, restore);
    Ok(model.user_metadata(metadata).create().await?)
}

impl ActiveRun {
    /// Runs the remaining steps and saves the model.
    pub(super) async fn execute(
        &mut self,
        context: &mut CommandContext<'_>,
        mut examples: Examples,
        plan: TrainPlan,
    ) -> Result<RunOutcome, CommandError> {
        let from = self.state.step();
        let config = self.state.settings.clone();
        self.state.run_id = Some(self.model.model_id().to_string());
        self.state.store(&self.folder)?;
        remember_folder(&context.environment.variables, &self.folder);
        // Draw the empty plot now, to fail before training if the file cannot be written.
        self.plot()?;
        context.notice(&format!(
            "{} {}{}: {}, {}, folder {}",
            if from > 0 { "resuming" } else { "training" },
            self.state.name.as_deref().map(|name| format!("{name} on ")).unwrap_or_default(),
            config.model,
            format::count(examples.train.len(), "example"),
            format::count(config.steps - from, "step"),
            self.folder.display()
        ));
        if let Some(warning) = examples.warning(&config) {
            context.notice(&warning);
        }
        context.announce_dashboard();
        let interrupt = context.environment.interrupt.clone();
        let model = self.model.clone();

        let loss = match (&examples.pairs, config.beta) {
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
        let mut progress = TrainProgress::new(context, config.steps, from);
        if !examples.eval.is_empty() {
            progress = progress.evaluates(config.eval_every);
        }
        let mut training = TrainLoop::new(model.clone(), plan.clone(), examples.train)
            .eval(examples.eval)
            .loss(loss)
            .intervals(config.eval_every, config.save_every)
            .sample_every(if self.samples.is_some() { config.sample_every } else { 0 })
            .resume_at(from);
        let (mut step, mut stopped) = (from, false);
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
                    self.metrics.add_step(StepLine {
                        step,
                        epoch: plan.epochs(step),
                        loss: result.loss,
                        learning_rate: result.learning_rate,
                        tokens: result.tokens,
                        tokens_per_second: progress.tokens_per_second(),
                        metrics: result.metrics,
                    })?;
                }
                Some(TrainEvent::Evaluated(result)) => {
                    progress.set_eval_loss(context, result.step, result.loss);
                    let (step, eval_loss) = (result.step, result.loss);
                    self.metrics.add_eval(EvalLine { step, eval_loss, metrics: result.metrics })?;
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
                }
                Some(_) => {}
            }
        }
        progress.clear(context);
        interrupt.run_until(2, self.save(&model, step)).await?;
        let finished = step == config.steps;
        self.state.finished = finished;
        self.state.store(&self.folder)?;
        Ok(RunOutcome {
            step,
            seconds: progress.seconds(),
            tokens_per_second: progress.tokens_per_second(),
            stopped: stopped && !finished,
            truncated,
        })
    }

    /// Returns the log-probabilities of all pairs under the starting weights. They are computed once
    /// and stored in the run folder.
    async fn reference(
        &self,
        model: &TrainingClient,
        train: &[DpoPair],
        eval: &[DpoPair],
    ) -> Result<Vec<DpoReference>, CommandError> {
        let path = self.folder.join("reference.json");
        let count = train.len() + eval.len();
        if let Ok(bytes) = std::fs::read(&path)
            && let Ok(stored) = serde_json::from_slice::<Vec<DpoReference>>(&bytes)
            && stored.len() == count
        {
            return Ok(stored);
        }
        let start = match self.state.step() {
            0 => model.clone(),
            // The model has other weights by now. The name belongs to the model that is trained.
            _ => create_start(&self.service, &self.state.settings, None).await?,
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
        self.state.saved.push(SavedCheckpoint::new(step, path.clone()));
        let old = rotate_checkpoints(&mut self.state.saved, self.state.settings.keep);
        self.state.store(&self.folder)?;
        self.plot()?;
        for saved in old {
            let _ = self.service.rest().delete_checkpoint(&saved.path).await;
        }
        Ok(())
    }

    /// Deletes a checkpoint. Errors are ignored: the checkpoint only takes up space.
    async fn delete_checkpoint(&self, path: &str) {
        if let Ok(path) = parse_path(path) {
            let _ = self.service.rest().delete_checkpoint(&path).await;
        }
    }

    /// Saves a training checkpoint, unless one exists for this step, and a sampler checkpoint.
    async fn save(&mut self, model: &TrainingClient, step: u64) -> Result<(), CommandError> {
        let name = checkpoint_name(step);
        let unsaved = self.state.saved.last().is_none_or(|saved| saved.step != step);
        if unsaved && step > 0 {
            let path = model.save_state(SaveOptions::new(&*name)).await?;
            self.add_checkpoint(step, &path).await?;
        }
        let sampler = model.save_weights_for_sampler(SaveOptions::new(name)).await?.to_string();
        let old = self.state.sampler.replace(sampler.clone()).filter(|old| *old != sampler);
        self.state.store(&self.folder)?;
        // The sampler checkpoint of the previous stop is superseded.
        if let Some(old) = old {
            self.delete_checkpoint(&old).await;
        }
        self.plot()
    }

    fn plot(&self) -> Result<(), CommandError> {
        let files = self.state.settings.files.iter().filter_map(|file| file.file_name());
        let names: Vec<_> = files.map(|name| name.to_string_lossy()).collect();
        let title = format!("{} on {}", self.state.settings.model, names.join(", "));
        self.plot_of(title).write(&self.plot_file())
    }

    #[expect(clippy::cast_precision_loss, reason = "coordinates of a plot")]
    fn plot_of(&self, title: String) -> Plot {
        let y_title = match self.state.settings.method {
            TrainMethod::Sft => "loss per token",
            TrainMethod::Dpo => "loss per pair",
        };
        let steps = self.metrics.steps.iter().map(|line| (line.step as f64, line.loss));
        let evals = self.metrics.evals.iter().map(|line| (line.step as f64, line.eval_loss));
        Plot::new(title, y_title, steps, evals)
    }

    /// Returns the curve of the loss for a terminal; `None` if the result goes elsewhere.
    fn curve(&self, context: &CommandContext<'_>) -> Option<String> {
        let wanted = !context.globals.quiet && context.settings.format == OutputFormat::Table;
        context.environment.terminals.out.filter(|_| wanted)?;
        Some(TerminalPlot::for_output(context).draw(&self.plot_of(String::new())))
    }

    fn plot_file(&self) -> PathBuf {
        self.state.plot.clone().unwrap_or_else(|| self.folder.join("loss.svg"))
    }

    /// Reports the outcome. Ends the session, unless the run failed.
    pub(super) async fn finish(
        self,
        context: &mut CommandContext<'_>,
        outcome: Result<RunOutcome, CommandError>,
    ) -> Result<Exit, CommandError> {
        let name = self.state.name.as_deref();
        let run = resume_text(context, RunFolderKind::Train, &self.folder, name);
        let resume = format!("tinkex train --resume {run}{}", context.server_flags());
        let outcome = match outcome {
            Ok(outcome) => outcome,
            Err(error) => {
                let hint = match self.state.step() {
                    0 => format!("Nothing was saved. Start again with: {resume}"),
                    step => format!("Resume from step {step} with: {resume}"),
                };
                // After the error's own hint: its cause must be resolved before the run continues.
                return Err(error.add_hint(hint));
            }
        };
        if outcome.stopped {
            // Everything is saved, so nothing is queued.
            self.service.abort().await;
            let message = format!("stopped at step {} and saved a checkpoint", outcome.step);
            return Err(CommandError::new(Exit::Interrupted, message)
                .hint(format!("Resume with: {resume}")));
        }
        self.service.finish(&Ok::<(), CommandError>(())).await;
        let sampler = self.state.sampler.clone().unwrap_or_default();
        let (first, last) = (self.metrics.steps.first(), self.metrics.steps.last());
        let evals = (self.metrics.evals.first(), self.metrics.evals.last());
        let file = |name: &str| self.folder.join(name).display().to_string();
        let json = json!({
            "finished": true,
            "name": self.state.name,
            "model": self.state.settings.model,
            "run_id": self.state.run_id,
            "steps": outcome.step,
            "tokens": self.metrics.tokens(),
            "seconds": outcome.seconds,
            "tokens_per_second": outcome.tokens_per_second,
            "truncated": outcome.truncated,
            "loss": { "first": first.map(|line| line.loss), "last": last.map(|line| line.loss) },
            "eval_loss": {
                "first": evals.0.map(|line| line.eval_loss),
                "last": evals.1.map(|line| line.eval_loss),
            },
            "metrics_last": last.map(|line| &line.metrics),
            "eval_metrics_last": evals.1.map(|line| &line.metrics),
            "checkpoint": self.state.saved.last().map(|saved| &saved.path),
            "sampler": sampler,
            "folder": self.folder,
            "metrics": file("metrics.jsonl"),
            "plot": self.plot_file(),
            "samples": self.samples.as_ref().map(|_| file(SAMPLES_FILE)),
            "events": self.state.settings.log_to.map(|_| file(EVENT_FILE)),
        });
        let loss =
            |line: Option<&StepLine>| format::or_na(line.map(|line| format!("{:.3}", line.loss)));
        let curve = self.curve(context).map(|curve| curve + "\n").unwrap_or_default();
        let mut text = format!(
            "{curve}Trained {} in {} ({} tokens/s): loss {} → {}",
            format::count(outcome.step, "step"),
            format::short_duration(outcome.seconds),
            thousands(outcome.tokens_per_second),
            loss(first),
            loss(last),
        );
        if let (Some(first), Some(last)) = evals {
            text += &format!(", held-out loss {:.3} → {:.3}", first.eval_loss, last.eval_loss);
        }
        let preferences = evals.1.map(|line| &line.metrics).or(last.map(|line| &line.metrics));
        if let Some((accuracy, margin)) =
            preferences.and_then(|metrics| Some((metrics.get("accuracy")?, metrics.get("margin")?)))
        {
            let held_out = if evals.1.is_some() { "held-out " } else { "" };
            text += &format!(", {held_out}accuracy {accuracy:.2}, margin {margin:.2}");
        }
        if outcome.truncated.total() > 0 {
            let count = format::count(outcome.truncated.total(), "example");
            text += &format!("; {count} truncated");
        }
        text += &format!(
            "\n  checkpoint  {sampler}\n  metrics     {}\n  plot        {}",
            file("metrics.jsonl"),
            self.plot_file().display(),
        );
        if self.samples.is_some() {
            text += &format!("\n  samples     {}", file(SAMPLES_FILE));
        }
        if self.state.settings.log_to.is_some() {
            text += &format!("\n  events      {}", file(EVENT_FILE));
        }
        text += &format!("\n\n{}", next_commands(context, &self.state));
        context.text(&text, &json)?;
        Ok(Exit::Success)
    }
}
