//! [`Pipeline`]: submits the steps, evaluations and checkpoints of a run in order.
//!
//! The next step is submitted while the current one runs, so that the server does not wait for the
//! client between steps.

use std::collections::VecDeque;
use std::pin::pin;

use futures_util::future::{BoxFuture, Either, FutureExt as _, select};
use tinkex::{AdamParams, ApiFuture, BatchOutput, LossFn, SaveOptions, TinkerPath, TrainingClient};

use crate::environment::Interrupt;
use crate::error::{CommandError, Exit};

use super::data::TrainExample;
use super::plan::TrainPlan;

/// Maximum number of submitted steps: one running and one queued.
const MAX_PENDING_STEPS: usize = 2;
/// Number of examples per evaluation request.
const EVAL_BATCH: usize = 64;

/// Event of a run, in the order of submission.
#[derive(Clone, Debug)]
pub(crate) enum TrainEvent {
    Step(StepResult),
    /// Mean loss on the held-out examples after `step` steps.
    Evaluated {
        step: u64,
        loss: f64,
    },
    /// Checkpoint saved after `step` steps.
    Saved {
        step: u64,
        path: TinkerPath,
    },
    /// The user interrupted the run. Pending requests are still awaited.
    Stopping,
}

/// Result of a finished step.
#[derive(Clone, Debug)]
pub(crate) struct StepResult {
    /// Number of finished steps.
    pub(crate) step: u64,
    /// Mean loss per learned token, before the update.
    pub(crate) loss: f64,
    pub(crate) tokens: usize,
    pub(crate) learning_rate: f64,
}

/// Run in progress.
pub(crate) struct Pipeline {
    model: TrainingClient,
    plan: TrainPlan,
    train: Vec<TrainExample>,
    eval: Vec<TrainExample>,
    eval_every: u64,
    save_every: u64,
    adam: AdamParams,
    interrupt: Interrupt,
    /// Next step to submit.
    next: u64,
    pending_steps: usize,
    pending: VecDeque<BoxFuture<'static, Result<TrainEvent, CommandError>>>,
    stopping: bool,
}

impl Pipeline {
    /// Creates a pipeline that starts at step `from`. A new run is evaluated first.
    pub(crate) fn new(
        model: TrainingClient,
        plan: TrainPlan,
        (train, eval): (Vec<TrainExample>, Vec<TrainExample>),
        interrupt: Interrupt,
        from: u64,
    ) -> Self {
        let mut pipeline = Self {
            model,
            plan,
            train,
            eval,
            eval_every: 0,
            save_every: 0,
            adam: AdamParams::default(),
            interrupt,
            next: from,
            pending_steps: 0,
            pending: VecDeque::new(),
            stopping: false,
        };
        if from == 0 {
            pipeline.evaluate(0);
        }
        pipeline
    }

    /// Sets the intervals in steps for evaluations and checkpoints; 0 disables.
    pub(crate) fn intervals(mut self, eval: u64, save: u64) -> Self {
        (self.eval_every, self.save_every) = (eval, save);
        self
    }

    /// Sets the optimizer parameters. The plan replaces the learning rate.
    pub(crate) fn adam(mut self, adam: AdamParams) -> Self {
        self.adam = adam;
        self
    }

    /// Returns whether the user interrupted the run.
    pub(crate) fn was_stopped(&self) -> bool {
        self.stopping
    }

    /// Waits for the next event. Returns `None` at the end of the run.
    ///
    /// # Errors
    ///
    /// Returns an error if a request fails, or if the user interrupts the run a second time.
    pub(crate) async fn next(&mut self) -> Result<Option<TrainEvent>, CommandError> {
        self.submit();
        let Some(front) = self.pending.front_mut() else { return Ok(None) };
        let interruptions = if self.stopping { 2 } else { 1 };
        match select(front, pin!(self.interrupt.pressed(interruptions))).await {
            Either::Left((event, _)) => {
                self.pending.pop_front();
                let event = event?;
                if matches!(event, TrainEvent::Step(_)) {
                    self.pending_steps -= 1;
                }
                Ok(Some(event))
            }
            Either::Right(_) if self.stopping => Err(CommandError::interrupted()),
            Either::Right(_) => {
                self.stopping = true;
                Ok(Some(TrainEvent::Stopping))
            }
        }
    }

    /// Submits steps, evaluations and checkpoints until [`MAX_PENDING_STEPS`] steps are pending.
    fn submit(&mut self) {
        while !self.stopping
            && self.next < self.plan.steps
            && self.pending_steps < MAX_PENDING_STEPS
        {
            self.step(self.next);
            self.next += 1;
            let (done, last) = (self.next, self.next == self.plan.steps);
            let due = |every: u64| every > 0 && done.is_multiple_of(every);
            if due(self.eval_every) || last {
                self.evaluate(done);
            }
            if due(self.save_every) && !last {
                let path = self.model.save_state(SaveOptions::new(checkpoint_name(done)));
                let saved = async move { Ok(TrainEvent::Saved { step: done, path: path.await? }) };
                self.pending.push_back(saved.boxed());
            }
        }
    }

    fn step(&mut self, step: u64) {
        let batch: Vec<&TrainExample> =
            self.plan.batch(step).into_iter().map(|index| &self.train[index]).collect();
        let tokens = batch.iter().map(|example| example.tokens).sum();
        let weight = batch.iter().map(|example| example.weight).sum();
        let data = batch.into_iter().map(|example| example.datum.clone()).collect();
        let learning_rate = self.plan.learning_rate_at(step);
        let adam = self.adam.learning_rate(learning_rate);
        let output = self.model.step(data, LossFn::CrossEntropy, adam).send();
        let step = step + 1;
        let stepped = async move {
            let loss = mean_loss(&output.await?.pass, weight)?;
            Ok(TrainEvent::Step(StepResult { step, loss, tokens, learning_rate }))
        };
        self.pending.push_back(stepped.boxed());
        self.pending_steps += 1;
    }

    fn evaluate(&mut self, step: u64) {
        if self.eval.is_empty() {
            return;
        }
        let pass = |batch: &[TrainExample]| -> ApiFuture<BatchOutput> {
            let data = batch.iter().map(|example| example.datum.clone()).collect();
            self.model.forward(data, LossFn::CrossEntropy)
        };
        let passes: Vec<_> = self.eval.chunks(EVAL_BATCH).map(pass).collect();
        let weight: f64 = self.eval.iter().map(|example| example.weight).sum();
        let evaluated = async move {
            let mut sum = 0.0;
            for pass in passes {
                sum += loss_sum(&pass.await?)?;
            }
            Ok(TrainEvent::Evaluated { step, loss: sum / weight })
        };
        self.pending.push_back(evaluated.boxed());
    }
}

/// Returns the name of the checkpoint after `step` steps.
pub(crate) fn checkpoint_name(step: u64) -> String {
    format!("step-{step:06}")
}

fn mean_loss(output: &BatchOutput, weight: f64) -> Result<f64, CommandError> {
    Ok(loss_sum(output)? / weight)
}

fn loss_sum(output: &BatchOutput) -> Result<f64, CommandError> {
    output
        .loss()
        .ok_or_else(|| CommandError::new(Exit::Failed, "the server did not return the loss"))
}
