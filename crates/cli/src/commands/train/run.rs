//! [`ActiveRun`]: a run under way, written down as it goes.

use std::path::PathBuf;

use serde_json::json;
use tinkex::{
    AdamParams, FinishReason, RestoreMode, SaveOptions, ServiceClient, TinkerPath, TrainingClient,
};

use crate::commands::weights;
use crate::error::{CommandError, Exit};
use crate::format;
use crate::output::Shell;

use super::chat_line;
use super::examples::Examples;
use super::metrics_log::{EvalLine, MetricsLog, StepLine};
use super::pipeline::{self, Pipeline, TrainEvent};
use super::plan::TrainPlan;
use super::plot;
use super::progress::{TrainProgress, thousands};
use super::state::{RunState, SavedCheckpoint};

/// A run under way, and where it is written down.
pub(super) struct ActiveRun {
    pub(super) service: ServiceClient,
    pub(super) folder: PathBuf,
    /// Nobody else goes on with it meanwhile.
    pub(super) _lock: tinkex_files::FileLock,
    pub(super) state: RunState,
    pub(super) record: MetricsLog,
}

impl ActiveRun {
    /// All steps that are left.
    pub(super) async fn go(
        &mut self,
        shell: &mut Shell<'_>,
        examples: Examples,
        plan: TrainPlan,
    ) -> Result<RunOutcome, CommandError> {
        let from = self.state.step();
        let settings = self.state.settings.clone();
        self.state.store(&self.folder)?;
        // Empty or not, so that a place that cannot be written to is known before anything is sent.
        self.plot()?;
        shell.notice(&format!(
            "{} {} on {} examples, {} steps ({})",
            if from > 0 { "going on with" } else { "training" },
            settings.model,
            examples.train.len(),
            settings.steps - from,
            self.folder.display()
        ));
        let interrupt = shell.environment.interrupt.clone();
        let model = interrupt.stops(1, self.model()).await?;
        self.state.run_id = Some(model.model_id().to_string());
        self.state.store(&self.folder)?;

        let mut show = TrainProgress::new(settings.steps, from);
        show.draw(shell, from);
        let parts = (examples.train, examples.eval);
        let mut work = Pipeline::new(model.clone(), plan.clone(), parts, interrupt.clone(), from)
            .every(settings.eval_every, settings.save_every)
            .adam(AdamParams::default());
        let mut step = from;
        loop {
            let event = match work.next().await {
                Ok(Some(event)) => event,
                Ok(None) => break,
                Err(failure) => {
                    show.clear(shell);
                    return Err(failure);
                }
            };
            match event {
                TrainEvent::Step(done) => {
                    step = done.step;
                    show.stepped(shell, step, done.tokens, done.loss);
                    self.record.step(StepLine {
                        step,
                        epoch: plan.epochs(step),
                        loss: done.loss,
                        learning_rate: done.learning_rate,
                        tokens: done.tokens,
                        tokens_per_second: show.speed(),
                    })?;
                }
                TrainEvent::Evaluated { step, loss } => {
                    show.evaluated(loss);
                    self.record.eval(EvalLine { step, eval_loss: loss })?;
                }
                TrainEvent::Saved { step, path } => self.saved(step, &path).await?,
                TrainEvent::Stopping => {
                    show.clear(shell);
                    shell.notice("stopping: saving first (Ctrl-C again ends at once)");
                }
            }
        }
        show.clear(shell);
        let stopped = work.was_stopped();
        interrupt.stops(2, self.save(&model, step)).await?;
        let finished = step == settings.steps;
        self.state.finished = finished;
        self.state.store(&self.folder)?;
        Ok(RunOutcome {
            step,
            seconds: show.seconds(),
            speed: show.speed(),
            stopped: stopped && !finished,
        })
    }

    /// The model to train: a new one, or the last checkpoint.
    async fn model(&self) -> Result<TrainingClient, CommandError> {
        let settings = &self.state.settings;
        let Some(saved) = self.state.saved.last() else {
            let new = self.service.create_lora_training_client(&*settings.model);
            return Ok(new.rank(settings.rank).seed(settings.seed).create().await?);
        };
        let path = weights::path(&saved.path)?;
        let from = self.service.create_training_client_from(&path, RestoreMode::WithOptimizer);
        Ok(from.create().await?)
    }

    /// A checkpoint is there: it is written down first, and then those that are too many go.
    async fn saved(&mut self, step: u64, path: &TinkerPath) -> Result<(), CommandError> {
        self.state.saved.push(SavedCheckpoint { step, path: path.to_string() });
        let many = self.state.saved.len().saturating_sub(self.state.settings.keep);
        let old: Vec<SavedCheckpoint> = self.state.saved.drain(..many).collect();
        self.state.store(&self.folder)?;
        self.plot()?;
        for saved in old {
            self.delete(&saved.path).await;
        }
        Ok(())
    }

    /// A checkpoint that cannot be deleted is no reason to stop; it may be gone already.
    async fn delete(&self, path: &str) {
        if let Ok(path) = weights::path(path) {
            let _ = self.service.rest().delete_checkpoint(&path).await;
        }
    }

    /// Saves the model as it is, to go on from and to sample from.
    async fn save(&mut self, model: &TrainingClient, step: u64) -> Result<(), CommandError> {
        let name = pipeline::checkpoint_name(step);
        let again = self.state.saved.last().is_none_or(|saved| saved.step != step);
        if again && step > 0 {
            let path = model.save_state(SaveOptions::new(&*name)).await?;
            self.saved(step, &path).await?;
        }
        let sampler = model.save_weights_for_sampler(SaveOptions::new(name)).await?.to_string();
        // The one of the last stop is of no use any more.
        let old = self.state.sampler.replace(sampler.clone()).filter(|old| *old != sampler);
        self.state.store(&self.folder)?;
        if let Some(old) = old {
            self.delete(&old).await;
        }
        self.plot()
    }

    fn plot(&self) -> Result<(), CommandError> {
        let name = self.state.settings.file.file_name().unwrap_or_default().to_string_lossy();
        let title = format!("{} on {name}", self.state.settings.model);
        plot::draw(&self.record, &title, &self.plot_file())
    }

    fn plot_file(&self) -> PathBuf {
        self.state.plot.clone().unwrap_or_else(|| self.folder.join("loss.svg"))
    }

    /// Tells how it went, the server and the user.
    pub(super) async fn end(
        self,
        shell: &mut Shell<'_>,
        ended: Result<RunOutcome, CommandError>,
    ) -> Result<Exit, CommandError> {
        let folder = format::word(&self.folder.display().to_string());
        let resume = format!("tinkex train --resume {folder}{}", shell.server_flags());
        let done = match ended {
            Ok(done) => done,
            Err(failure) => {
                let step = self.state.step();
                let how = match step {
                    0 => format!("nothing was saved yet; start again with: {resume}"),
                    _ => format!("go on from step {step} with: {resume}"),
                };
                return Err(failure.hint(how));
            }
        };
        let reason = if done.stopped { FinishReason::Interrupted } else { FinishReason::Success };
        // The run itself is safe; whether the server heard of its end changes nothing.
        let _ = self.service.close(reason, None).await;
        if done.stopped {
            let why = format!("stopped at step {} and saved", done.step);
            return Err(
                CommandError::new(Exit::Interrupted, why).hint(format!("go on with: {resume}"))
            );
        }
        let sampler = self.state.sampler.clone().unwrap_or_default();
        let (first, last) = (self.record.steps.first(), self.record.steps.last());
        let evals = (self.record.evals.first(), self.record.evals.last());
        let file = |name: &str| self.folder.join(name).display().to_string();
        let json = json!({
            "finished": true,
            "model": self.state.settings.model,
            "run_id": self.state.run_id,
            "steps": done.step,
            "tokens": self.record.tokens(),
            "seconds": done.seconds,
            "tokens_per_second": done.speed,
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
        let of = |line: Option<&StepLine>| {
            format::or_missing(line.map(|line| format!("{:.3}", line.loss)))
        };
        let mut text = format!(
            "trained {} steps in {} ({} tokens/s): loss {} → {}",
            done.step,
            format::seconds(done.seconds),
            thousands(done.speed),
            of(first),
            of(last),
        );
        if let (Some(first), Some(last)) = evals {
            text += &format!(", held-out {:.3} → {:.3}", first.eval_loss, last.eval_loss);
        }
        text += &format!(
            "\n  checkpoint  {sampler}\n  figures     {}\n  plot        {}\n\nchat with it:\n  {}",
            file("metrics.jsonl"),
            self.plot_file().display(),
            chat_line(shell, &sampler)
        );
        shell.text(&text, &json)?;
        Ok(Exit::Success)
    }
}

/// How a run ended.
pub(super) struct RunOutcome {
    step: u64,
    seconds: f64,
    speed: f64,
    stopped: bool,
}
