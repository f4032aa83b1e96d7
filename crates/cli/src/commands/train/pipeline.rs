//! [`Pipeline`]: steps, evaluations and saves in order, asked for ahead so that the server never waits.

use std::collections::VecDeque;
use std::pin::pin;

use futures_util::future::{BoxFuture, Either, FutureExt as _, select};
use tinkex::{AdamParams, ApiFuture, BatchOutput, LossFn, SaveOptions, TinkerPath, TrainingClient};

use crate::environment::Interrupt;
use crate::error::{CommandError, Exit};

use super::data::TrainExample;
use super::plan::TrainPlan;

/// How many steps are on the server at once: one that is computed and one that waits.
const AHEAD: usize = 2;
/// How many examples are evaluated in one request.
const EVAL_BATCH: usize = 64;

/// What has happened.
#[derive(Clone, Debug)]
pub(crate) enum TrainEvent {
    Step(StepResult),
    /// The mean loss on what was held back, after so many steps.
    Evaluated {
        step: u64,
        loss: f64,
    },
    /// A checkpoint to go on from, after so many steps.
    Saved {
        step: u64,
        path: TinkerPath,
    },
    /// The user wants it to stop; what is under way is waited for.
    Stopping,
}

/// A step is done.
#[derive(Clone, Debug)]
pub(crate) struct StepResult {
    /// How many are done now.
    pub(crate) step: u64,
    /// Mean loss of a learned token, before the step.
    pub(crate) loss: f64,
    pub(crate) tokens: usize,
    pub(crate) learning_rate: f64,
}

/// A run under way.
pub(crate) struct Pipeline {
    model: TrainingClient,
    plan: TrainPlan,
    train: Vec<TrainExample>,
    eval: Vec<TrainExample>,
    eval_every: u64,
    /// How often to save; 0 for never.
    save_every: u64,
    adam: AdamParams,
    interrupt: Interrupt,
    /// The next step to ask for.
    next: u64,
    steps_waiting: usize,
    waiting: VecDeque<BoxFuture<'static, Result<TrainEvent, CommandError>>>,
    stopping: bool,
}

impl Pipeline {
    /// A run that goes on from a step. At the very beginning it is evaluated once.
    pub(crate) fn new(
        model: TrainingClient,
        plan: TrainPlan,
        (train, eval): (Vec<TrainExample>, Vec<TrainExample>),
        interrupt: Interrupt,
        from: u64,
    ) -> Self {
        let mut work = Self {
            model,
            plan,
            train,
            eval,
            eval_every: 0,
            save_every: 0,
            adam: AdamParams::default(),
            interrupt,
            next: from,
            steps_waiting: 0,
            waiting: VecDeque::new(),
            stopping: false,
        };
        if from == 0 {
            work.evaluate(0);
        }
        work
    }

    /// How often to evaluate and to save, in steps; 0 for never.
    pub(crate) fn every(mut self, eval: u64, save: u64) -> Self {
        (self.eval_every, self.save_every) = (eval, save);
        self
    }

    /// The optimizer's other numbers.
    pub(crate) fn adam(mut self, adam: AdamParams) -> Self {
        self.adam = adam;
        self
    }

    /// Whether the user stopped it.
    pub(crate) fn was_stopped(&self) -> bool {
        self.stopping
    }

    /// The next thing that happens; nothing when all is done.
    ///
    /// # Errors
    /// If the server fails, or the user does not want to wait for it.
    pub(crate) async fn next(&mut self) -> Result<Option<TrainEvent>, CommandError> {
        self.fill();
        let Some(front) = self.waiting.front_mut() else { return Ok(None) };
        let presses = if self.stopping { 2 } else { 1 };
        match select(front, pin!(self.interrupt.pressed(presses))).await {
            Either::Left((event, _)) => {
                self.waiting.pop_front();
                let event = event?;
                if matches!(event, TrainEvent::Step(_)) {
                    self.steps_waiting -= 1;
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

    /// Asks for more, while there is more and the server has little to do.
    fn fill(&mut self) {
        while !self.stopping && self.next < self.plan.steps && self.steps_waiting < AHEAD {
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
                self.waiting.push_back(saved.boxed());
            }
        }
    }

    fn step(&mut self, step: u64) {
        let batch: Vec<&TrainExample> =
            self.plan.batch(step).into_iter().map(|at| &self.train[at]).collect();
        let tokens = batch.iter().map(|piece| piece.tokens).sum();
        let weight = batch.iter().map(|piece| piece.weight).sum();
        let data = batch.into_iter().map(|piece| piece.datum.clone()).collect();
        let learning_rate = self.plan.rate(step);
        let adam = AdamParams { learning_rate, ..self.adam };
        let (pass, optim) = self.model.step(data, LossFn::CrossEntropy, adam);
        let step = step + 1;
        let stepped = async move {
            let loss = mean_loss(&pass.await?, weight)?;
            optim.await?;
            Ok(TrainEvent::Step(StepResult { step, loss, tokens, learning_rate }))
        };
        self.waiting.push_back(stepped.boxed());
        self.steps_waiting += 1;
    }

    fn evaluate(&mut self, step: u64) {
        if self.eval.is_empty() {
            return;
        }
        let pass = |batch: &[TrainExample]| -> ApiFuture<BatchOutput> {
            let data = batch.iter().map(|piece| piece.datum.clone()).collect();
            self.model.forward(data, LossFn::CrossEntropy)
        };
        let passes: Vec<_> = self.eval.chunks(EVAL_BATCH).map(pass).collect();
        let weight: f64 = self.eval.iter().map(|piece| piece.weight).sum();
        let evaluated = async move {
            let mut sum = 0.0;
            for pass in passes {
                sum += loss_sum(&pass.await?)?;
            }
            Ok(TrainEvent::Evaluated { step, loss: sum / weight })
        };
        self.waiting.push_back(evaluated.boxed());
    }
}

/// The name of a checkpoint after so many steps.
pub(crate) fn checkpoint_name(step: u64) -> String {
    format!("step-{step:06}")
}

fn mean_loss(output: &BatchOutput, weight: f64) -> Result<f64, CommandError> {
    Ok(loss_sum(output)? / weight)
}

fn loss_sum(output: &BatchOutput) -> Result<f64, CommandError> {
    output
        .loss()
        .ok_or_else(|| CommandError::new(Exit::Failed, "the server does not say what the loss was"))
}
