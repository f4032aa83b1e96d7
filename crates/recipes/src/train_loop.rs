//! [`TrainLoop`]: runs the steps, evaluations and checkpoints of a training run on given data, in
//! order.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;

use futures_util::future::{BoxFuture, FutureExt as _};
use tinkex::{
    ApiFuture, BatchOutput, Error, ErrorKind, LossSpec, Result, SamplingClient, SaveOptions,
    TrainingClient,
};
use tinkex_runs::checkpoint_name;
use tinkex_wire::loss_input::WEIGHTS;
use tinkex_wire::{AdamParams, Datum, LossFn, TensorData, TinkerPath};

use super::dpo::{self, DpoPair, DpoReference};
use super::plan::TrainPlan;

/// Maximum number of submitted steps: one running and one queued.
const MAX_PENDING_STEPS: usize = 2;
/// Number of examples per evaluation request.
const EVAL_BATCH: usize = 64;

/// Example of a training run, with its number of tokens and its weight.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TrainExample {
    /// Data of the example: one datum, or the chosen and the rejected completion of a pair.
    pub data: Vec<Datum>,
    /// Number of tokens.
    pub tokens: usize,
    /// Contribution of the example to the divisor of the mean loss: the number of tokens to learn,
    /// or 1 for a pair.
    pub weight: f64,
}

impl TrainExample {
    /// Creates an example for cross entropy.
    #[must_use]
    pub fn new(datum: Datum) -> Self {
        let tokens = datum.model_input().token_count().unwrap_or(0);
        let weights = datum.loss_input(WEIGHTS).and_then(TensorData::as_f32);
        let weight = weights.unwrap_or_default().iter().map(|weight| f64::from(*weight)).sum();
        Self { data: vec![datum], tokens, weight }
    }

    /// Creates an example of a preference pair for [`dpo::loss`].
    ///
    /// # Errors
    /// Fails like [`DpoPair::data`].
    pub fn of_pair(pair: &DpoPair, reference: DpoReference) -> Result<Self> {
        Ok(Self { data: pair.data(reference)?.into(), tokens: pair.tokens(), weight: 1.0 })
    }
}

/// Event of a run. Events arrive in the order in which their requests were submitted.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum TrainEvent {
    /// A step is finished.
    Step(StepResult),
    /// The held-out examples were evaluated.
    Evaluated(EvalResult),
    /// A checkpoint was saved.
    Saved {
        /// Number of finished steps.
        step: u64,
        /// Path of the training checkpoint.
        path: TinkerPath,
    },
    /// The current weights are available for sampling.
    SamplerReady {
        /// Number of finished steps.
        step: u64,
        /// Client that samples from the weights after these steps.
        sampler: SamplingClient,
    },
}

/// Result of a finished step.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StepResult {
    /// Number of finished steps.
    pub step: u64,
    /// Mean loss per learned token, or per pair, before the update.
    pub loss: f64,
    /// Number of tokens of the batch.
    pub tokens: usize,
    /// Learning rate.
    pub learning_rate: f64,
    /// Metrics of the loss besides its value. Empty for cross entropy.
    pub metrics: BTreeMap<String, f64>,
}

/// Result of an evaluation.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct EvalResult {
    /// Number of finished steps.
    pub step: u64,
    /// Mean loss per learned token, or per pair.
    pub loss: f64,
    /// Metrics of the loss besides its value. Empty for cross entropy.
    pub metrics: BTreeMap<String, f64>,
}

/// Training run on given data: supervised, or with preference pairs.
///
/// The next step is submitted while the current one runs, so that the server does not wait for the
/// client between steps.
///
/// ```no_run
/// use tinkex_recipes::{Schedule, TrainEvent, TrainExample, TrainLoop, TrainPlan};
///
/// # async fn run(model: tinkex::TrainingClient, data: Vec<tinkex::Datum>) -> tinkex::Result<()> {
/// let train: Vec<_> = data.into_iter().map(TrainExample::new).collect();
/// let plan = TrainPlan {
///     examples: train.len(),
///     batch_size: 16,
///     steps: 100,
///     seed: 0,
///     learning_rate: 2e-4,
///     schedule: Schedule::Linear,
///     warmup: 0,
/// };
/// let mut run = TrainLoop::new(model, plan, train).intervals(0, 10);
/// while let Some(event) = run.next().await? {
///     match event {
///         TrainEvent::Step(result) => println!("step {}: loss {:.3}", result.step, result.loss),
///         TrainEvent::Saved { path, .. } => println!("saved {path}"),
///         _ => {}
///     }
/// }
/// # Ok(()) }
/// ```
pub struct TrainLoop {
    model: TrainingClient,
    plan: TrainPlan,
    train: Vec<TrainExample>,
    eval: Vec<TrainExample>,
    loss: LossSpec,
    eval_every: u64,
    save_every: u64,
    sample_every: u64,
    adam: AdamParams,
    /// Next step to submit.
    next: u64,
    pending_steps: usize,
    pending: VecDeque<BoxFuture<'static, Result<TrainEvent>>>,
    stopped: bool,
    /// Whether the evaluation and publication of the starting weights have yet to be submitted.
    evaluates_start: bool,
}

impl TrainLoop {
    /// Creates a run that trains `model` with cross entropy from the first step of the plan on.
    #[must_use]
    pub fn new(model: TrainingClient, plan: TrainPlan, train: Vec<TrainExample>) -> Self {
        Self {
            model,
            plan,
            train,
            eval: Vec::new(),
            loss: LossFn::CrossEntropy.into(),
            eval_every: 0,
            save_every: 0,
            sample_every: 0,
            adam: AdamParams::default(),
            next: 0,
            pending_steps: 0,
            pending: VecDeque::new(),
            stopped: false,
            evaluates_start: true,
        }
    }

    /// Continues a run after `step` steps. The model must have the weights and the optimizer state
    /// after these steps.
    #[must_use]
    pub fn resume_at(mut self, step: u64) -> Self {
        self.next = step;
        self.evaluates_start = step == 0;
        self
    }

    /// Sets the evaluation examples. They are evaluated before the first step, at the interval that
    /// [`intervals`](Self::intervals) sets, and after the last step.
    #[must_use]
    pub fn eval(mut self, examples: Vec<TrainExample>) -> Self {
        self.eval = examples;
        self
    }

    /// Sets the loss (default cross entropy).
    #[must_use]
    pub fn loss(mut self, loss: impl Into<LossSpec>) -> Self {
        self.loss = loss.into();
        self
    }

    /// Sets the intervals of evaluations and checkpoints, in steps; 0 (the default) disables them.
    /// No checkpoint is saved after the last step: the caller saves the final weights.
    #[must_use]
    pub fn intervals(mut self, eval: u64, save: u64) -> Self {
        self.eval_every = eval;
        self.save_every = save;
        self
    }

    /// Sets the interval in steps at which the weights are published for sampling
    /// ([`TrainEvent::SamplerReady`]); 0 (the default) disables it. If enabled, the starting
    /// weights and the weights after the last step are published too.
    #[must_use]
    pub fn sample_every(mut self, steps: u64) -> Self {
        self.sample_every = steps;
        self
    }

    /// Sets the optimizer parameters. The plan replaces the learning rate.
    #[must_use]
    pub fn adam(mut self, adam: AdamParams) -> Self {
        self.adam = adam;
        self
    }

    /// Stops the submission of steps. Steps that were already submitted still produce their events.
    pub fn stop(&mut self) {
        self.stopped = true;
    }

    /// Waits for the next event. Returns `None` at the end of the run.
    ///
    /// # Errors
    /// Fails if a request fails.
    ///
    /// # Cancel safety
    /// Cancel safe: no event is lost.
    pub async fn next(&mut self) -> Result<Option<TrainEvent>> {
        if std::mem::take(&mut self.evaluates_start) {
            self.evaluate(0);
            self.publish(0);
        }
        self.submit();
        let Some(front) = self.pending.front_mut() else { return Ok(None) };
        let event = front.await;
        self.pending.pop_front();
        if matches!(event, Ok(TrainEvent::Step(_))) {
            self.pending_steps -= 1;
        }
        event.map(Some)
    }

    /// Submits steps, evaluations and checkpoints until [`MAX_PENDING_STEPS`] steps are pending.
    fn submit(&mut self) {
        while !self.stopped && self.next < self.plan.steps && self.pending_steps < MAX_PENDING_STEPS
        {
            self.step(self.next);
            self.next += 1;
            let done = self.next;
            let last = self.next == self.plan.steps;
            let due = |every: u64| every > 0 && done.is_multiple_of(every);
            if due(self.eval_every) || last {
                self.evaluate(done);
            }
            if due(self.sample_every) || last {
                self.publish(done);
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
        let data = batch.into_iter().flat_map(|example| example.data.clone()).collect();
        let learning_rate = self.plan.learning_rate_at(step);
        let adam = self.adam.learning_rate(learning_rate);
        let output = self.model.step(data, self.loss.clone(), adam);
        let step = step + 1;
        let stepped = async move {
            let output = output.await?.pass;
            let loss = mean_loss(&output, weight)?;
            let metrics = metrics_of(&output);
            Ok(TrainEvent::Step(StepResult { step, loss, tokens, learning_rate, metrics }))
        };
        self.pending.push_back(stepped.boxed());
        self.pending_steps += 1;
    }

    /// Publishes the weights for sampling, if [`sample_every`](Self::sample_every) is set.
    fn publish(&mut self, step: u64) {
        if self.sample_every > 0 {
            let sampler = self.model.save_weights_and_get_sampling_client();
            let ready =
                async move { Ok(TrainEvent::SamplerReady { step, sampler: sampler.await? }) };
            self.pending.push_back(ready.boxed());
        }
    }

    fn evaluate(&mut self, step: u64) {
        if self.eval.is_empty() {
            return;
        }
        let pass = |batch: &[TrainExample]| -> (ApiFuture<BatchOutput>, usize) {
            let data = batch.iter().flat_map(|example| example.data.clone()).collect();
            (self.model.forward(data, self.loss.clone()), batch.len())
        };
        let passes: Vec<_> = self.eval.chunks(EVAL_BATCH).map(pass).collect();
        let weight: f64 = self.eval.iter().map(|example| example.weight).sum();
        let evaluated = async move {
            let mut sum = 0.0;
            let mut metrics = BTreeMap::<String, f64>::new();
            let mut count = 0.0;
            for (pass, examples) in passes {
                let output = pass.await?;
                sum += loss_sum(&output)?;
                #[expect(clippy::cast_precision_loss, reason = "a count of examples")]
                let examples = examples as f64;
                count += examples;
                for (name, mean) in metrics_of(&output) {
                    *metrics.entry(name).or_default() += mean * examples;
                }
            }
            metrics.values_mut().for_each(|sum| *sum /= count);
            Ok(TrainEvent::Evaluated(EvalResult { step, loss: sum / weight, metrics }))
        };
        self.pending.push_back(evaluated.boxed());
    }
}

/// Returns the metrics of the DPO loss, if the output has them.
fn metrics_of(output: &BatchOutput) -> BTreeMap<String, f64> {
    let metric = |name: &&str| {
        let value = output.metrics.get(&format!("{name}:mean"))?;
        Some(((*name).to_owned(), value.as_f64()))
    };
    dpo::METRICS.iter().filter_map(metric).collect()
}

fn mean_loss(output: &BatchOutput, weight: f64) -> Result<f64> {
    Ok(loss_sum(output)? / weight)
}

fn loss_sum(output: &BatchOutput) -> Result<f64> {
    output.loss().ok_or_else(|| Error::new(ErrorKind::Decode, "the server did not return the loss"))
}

impl fmt::Debug for TrainLoop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrainLoop")
            .field("model", &self.model)
            .field("plan", &self.plan)
            .finish_non_exhaustive()
    }
}
