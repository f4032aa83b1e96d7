//! [`ActiveRun`]: executes a run and stores its progress in the run folder.

use std::path::PathBuf;

use serde_json::json;
use tinkex::{AdamParams, RestoreMode, SaveOptions, ServiceClient, TinkerPath, TrainingClient};

use crate::commands::weights;
use crate::context::CommandContext;
use crate::error::{CommandError, Exit};
use crate::format;

use super::examples::Examples;
use super::metrics_log::{EvalLine, MetricsLog, StepLine};
use super::next_commands;
use super::pipeline::{self, Pipeline, TrainEvent};
use super::plan::TrainPlan;
use super::plot;
use super::progress::{TrainProgress, thousands};
use super::state::{RunState, SavedCheckpoint};

/// Run in progress.
pub(super) struct ActiveRun {
    pub(super) service: ServiceClient,
    pub(super) folder: PathBuf,
    /// Prevents other processes from resuming the run.
    pub(super) _lock: tinkex_files::FileLock,
    pub(super) state: RunState,
    pub(super) metrics: MetricsLog,
}

/// Outcome of a run that ended without an error.
pub(super) struct RunOutcome {
    step: u64,
    seconds: f64,
    tokens_per_second: f64,
    /// Whether the user stopped the run before its last step.
    stopped: bool,
}

impl ActiveRun {
    /// Runs the remaining steps and saves the model.
    pub(super) async fn execute(
        &mut self,
        context: &mut CommandContext<'_>,
        examples: Examples,
        plan: TrainPlan,
    ) -> Result<RunOutcome, CommandError> {
        let from = self.state.step();
        let config = self.state.settings.clone();
        self.state.store(&self.folder)?;
        // Draw the empty plot now, to fail before training if the file cannot be written.
        self.plot()?;
        context.notice(&format!(
            "{} {}: {}, {}, folder {}",
            if from > 0 { "resuming" } else { "training" },
            config.model,
            format::count(examples.train.len(), "example"),
            format::count(config.steps - from, "step"),
            self.folder.display()
        ));
        context.announce_dashboard();
        let interrupt = context.environment.interrupt.clone();
        let model = interrupt.run_until(1, self.create_model()).await?;
        self.state.run_id = Some(model.model_id().to_string());
        self.state.store(&self.folder)?;

        let mut progress = TrainProgress::new(context, config.steps, from);
        let data = (examples.train, examples.eval);
        let mut pipeline =
            Pipeline::new(model.clone(), plan.clone(), data, interrupt.clone(), from)
                .intervals(config.eval_every, config.save_every)
                .adam(AdamParams::default());
        let mut step = from;
        while let Some(event) = pipeline.next().await? {
            match event {
                TrainEvent::Step(result) => {
                    step = result.step;
                    progress.finish_step(context, step, result.tokens, result.loss);
                    self.metrics.add_step(StepLine {
                        step,
                        epoch: plan.epochs(step),
                        loss: result.loss,
                        learning_rate: result.learning_rate,
                        tokens: result.tokens,
                        tokens_per_second: progress.tokens_per_second(),
                    })?;
                }
                TrainEvent::Evaluated { step, loss } => {
                    progress.set_eval_loss(loss);
                    self.metrics.add_eval(EvalLine { step, eval_loss: loss })?;
                }
                TrainEvent::Saved { step, path } => self.add_checkpoint(step, &path).await?,
                TrainEvent::Stopping => {
                    progress.clear();
                    context.notice("saving a checkpoint; press Ctrl-C again to stop immediately");
                }
            }
        }
        progress.clear();
        let stopped = pipeline.was_stopped();
        interrupt.run_until(2, self.save(&model, step)).await?;
        let finished = step == config.steps;
        self.state.finished = finished;
        self.state.store(&self.folder)?;
        Ok(RunOutcome {
            step,
            seconds: progress.seconds(),
            tokens_per_second: progress.tokens_per_second(),
            stopped: stopped && !finished,
        })
    }

    /// Creates the model to train, or loads it from the last checkpoint.
    async fn create_model(&self) -> Result<TrainingClient, CommandError> {
        let config = &self.state.settings;
        let (path, restore) = match (self.state.saved.last(), &config.from) {
            (Some(saved), _) => (&saved.path, RestoreMode::WithOptimizer),
            (None, Some(from)) => (from, RestoreMode::WeightsOnly),
            (None, None) => {
                let new = self.service.create_lora_training_client(&*config.model);
                return Ok(new.rank(config.rank).seed(config.seed).create().await?);
            }
        };
        let path = weights::parse_path(path)?;
        Ok(self.service.create_training_client_from(&path, restore).create().await?)
    }

    /// Records a new checkpoint in `run.json`, then deletes the oldest ones. In the other order, a
    /// crash in between could leave a `run.json` that refers only to deleted checkpoints.
    async fn add_checkpoint(&mut self, step: u64, path: &TinkerPath) -> Result<(), CommandError> {
        self.state.saved.push(SavedCheckpoint { step, path: path.to_string() });
        let excess = self.state.saved.len().saturating_sub(self.state.settings.keep);
        let old: Vec<SavedCheckpoint> = self.state.saved.drain(..excess).collect();
        self.state.store(&self.folder)?;
        self.plot()?;
        for saved in old {
            self.delete_checkpoint(&saved.path).await;
        }
        Ok(())
    }

    /// Deletes a checkpoint. Errors are ignored: the checkpoint only takes up space.
    async fn delete_checkpoint(&self, path: &str) {
        if let Ok(path) = weights::parse_path(path) {
            let _ = self.service.rest().delete_checkpoint(&path).await;
        }
    }

    /// Saves a training checkpoint, unless one exists for this step, and a sampler checkpoint.
    async fn save(&mut self, model: &TrainingClient, step: u64) -> Result<(), CommandError> {
        let name = pipeline::checkpoint_name(step);
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
        let name = self.state.settings.file.file_name().unwrap_or_default().to_string_lossy();
        let title = format!("{} on {name}", self.state.settings.model);
        plot::draw(&self.metrics, &title, &self.plot_file())
    }

    fn plot_file(&self) -> PathBuf {
        self.state.plot.clone().unwrap_or_else(|| self.folder.join("loss.svg"))
    }

    /// Closes the session and reports the outcome.
    pub(super) async fn finish(
        self,
        context: &mut CommandContext<'_>,
        outcome: Result<RunOutcome, CommandError>,
    ) -> Result<Exit, CommandError> {
        let folder = format::shell_quote(&self.folder.display().to_string());
        let resume = format!("tinkex train --resume {folder}{}", context.server_flags());
        let outcome = match outcome {
            Ok(outcome) => outcome,
            Err(error) => {
                let hint = match self.state.step() {
                    // The model was not created. A resumed run would send the same request.
                    0 if self.state.run_id.is_none() && error.is_rejected_request() => format!(
                        "Start a new run with other options; {folder} contains no checkpoint and \
                         can be deleted."
                    ),
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
            "model": self.state.settings.model,
            "run_id": self.state.run_id,
            "steps": outcome.step,
            "tokens": self.metrics.tokens(),
            "seconds": outcome.seconds,
            "tokens_per_second": outcome.tokens_per_second,
            "loss": { "first": first.map(|line| line.loss), "last": last.map(|line| line.loss) },
            "eval_loss": {
                "first": evals.0.map(|line| line.eval_loss),
                "last": evals.1.map(|line| line.eval_loss),
            },
            "checkpoint": self.state.saved.last().map(|saved| &saved.path),
            "sampler": sampler,
            "folder": self.folder,
            "metrics": file("metrics.jsonl"),
            "plot": self.plot_file(),
        });
        let loss =
            |line: Option<&StepLine>| format::or_na(line.map(|line| format!("{:.3}", line.loss)));
        let mut text = format!(
            "Trained {} in {} ({} tokens/s): loss {} → {}",
            format::count(outcome.step, "step"),
            format::short_duration(outcome.seconds),
            thousands(outcome.tokens_per_second),
            loss(first),
            loss(last),
        );
        if let (Some(first), Some(last)) = evals {
            text += &format!(", held-out loss {:.3} → {:.3}", first.eval_loss, last.eval_loss);
        }
        text += &format!(
            "\n  checkpoint  {sampler}\n  metrics     {}\n  plot        {}\n\n{}",
            file("metrics.jsonl"),
            self.plot_file().display(),
            next_commands(context, &self.state),
        );
        context.text(&text, &json)?;
        Ok(Exit::Success)
    }
}
