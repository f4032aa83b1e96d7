//! The loop of a run: one task samples batches, another trains on them.

use std::collections::VecDeque;
use std::future::pending;
use std::pin::pin;
use std::sync::Arc;

use futures_util::future::select;
use tinkex::{LossSpec, Result, SamplingClient, SaveOptions, ServiceClient, TrainingClient};
use tinkex_runs::{
    Advantage, RunProgress, SavedCheckpoint, best_checkpoint, checkpoint_name, rotate_checkpoints,
};
use tinkex_transport::task::Task;
use tinkex_wire::AdamParams;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::batch::{KlPenalty, PreparedBatch, mean_reward, prompts_of_step};
use super::is_policy_temperature;
use super::prompt::RlPrompt;
use super::report::RlReport;
use super::run::{BestCheckpoint, RlOutcome};
use super::run_store::RunStore;
use super::sample::{EpisodeSampler, SampledBatch};
use crate::plan::derive_seed;
use crate::stop::StopHandle;

/// Sampling client for the weights after `step` steps.
#[derive(Clone)]
struct SamplingPolicy {
    step: u64,
    sampler: SamplingClient,
}

/// Settings of the loop.
pub(super) struct LoopSettings {
    pub(super) steps: u64,
    pub(super) group_size: u32,
    pub(super) groups_per_batch: usize,
    pub(super) off_policy: u64,
    pub(super) advantage: Advantage,
    pub(super) loss: LossSpec,
    pub(super) adam: AdamParams,
    pub(super) seed: u64,
    pub(super) eval_every: u64,
    pub(super) save_every: u64,
    pub(super) keep: usize,
}

/// Run in progress.
pub(super) struct RlLoop {
    pub(super) settings: Arc<LoopSettings>,
    pub(super) service: ServiceClient,
    pub(super) model: TrainingClient,
    pub(super) episodes: EpisodeSampler,
    pub(super) prompts: Arc<[Arc<RlPrompt>]>,
    pub(super) eval_prompts: Vec<Arc<RlPrompt>>,
    pub(super) penalty: Option<KlPenalty>,
    pub(super) store: RunStore,
    /// Number of finished steps.
    pub(super) step: u64,
    /// Time at which this process started or resumed the run.
    pub(super) started: Instant,
    /// Number of tokens that were sampled since `started`.
    pub(super) tokens: usize,
    pub(super) stop: StopHandle,
    /// Whether the weights changed since the last checkpoint.
    pub(super) changed: bool,
    /// Open sampling clients, oldest first, each with the number of finished steps when its weights
    /// were saved.
    pub(super) samplers: VecDeque<(u64, SamplingClient)>,
}

/// Samples the batches of a run ahead of training, as far as the maximum age of the policy allows.
struct BatchSource {
    settings: Arc<LoopSettings>,
    episodes: EpisodeSampler,
    prompts: Arc<[Arc<RlPrompt>]>,
    policy: watch::Receiver<SamplingPolicy>,
    stop: StopHandle,
}

impl BatchSource {
    /// Samples batches from step `from` on, until the last step, a failure, or a stop. A batch that
    /// is being sampled when the run stops is discarded.
    async fn run(mut self, from: u64, batches: mpsc::Sender<Result<SampledBatch>>) {
        let stop = self.stop.clone();
        let sample = async {
            for step in from..self.settings.steps {
                let batch = self.batch(step).await;
                let failed = batch.is_err();
                if batches.send(batch).await.is_err() || failed {
                    return;
                }
            }
        };
        select(pin!(sample), pin!(stop.stopped())).await;
    }

    async fn batch(&mut self, step: u64) -> Result<SampledBatch> {
        let settings = &self.settings;
        let oldest = step.saturating_sub(settings.off_policy);
        let policy = self.policy.wait_for(|policy| policy.step >= oldest).await;
        let policy = policy.ok().map(|policy| policy.clone());
        // The sender was dropped, so the training task has ended. Wait for ever: the end of the run
        // aborts this task.
        let Some(policy) = policy else { return pending().await };
        let groups = settings.groups_per_batch;
        let seed = settings.seed;
        let prompts = prompts_of_step(&self.prompts, groups, seed, step);
        let (groups, sampling_seconds, reward_seconds) = self
            .episodes
            .batch(&policy.sampler, prompts, settings.group_size, derive_seed(seed, &[step]))
            .await?;
        Ok(SampledBatch {
            step,
            policy_step: policy.step,
            groups,
            sampling_seconds,
            reward_seconds,
        })
    }
}

impl RlLoop {
    /// Runs the remaining steps and saves the model. Sends a report of each step, and returns early
    /// if the receiver is dropped.
    pub(super) async fn run(
        mut self,
        reports: &mpsc::Sender<Result<RlReport>>,
    ) -> Result<RlOutcome> {
        let from = self.step;
        if from < self.settings.steps {
            let sampler = self.model.save_weights_and_get_sampling_client().await?;
            self.samplers.push_back((from, sampler.clone()));
            let (policy, watched) = watch::channel(SamplingPolicy { step: from, sampler });
            let ahead =
                usize::try_from(self.settings.off_policy).unwrap_or(usize::MAX).clamp(1, 64);
            let (sender, mut batches) = mpsc::channel(ahead);
            let source = BatchSource {
                settings: Arc::clone(&self.settings),
                episodes: self.episodes.clone(),
                prompts: Arc::clone(&self.prompts),
                policy: watched,
                stop: self.stop.clone(),
            };
            let _source = Task::spawn(source.run(from, sender));
            if from == 0 {
                self.evaluate_start(&policy, reports).await?;
            }
            while let Some(batch) = batches.recv().await {
                let report = self.step(batch?, &policy).await?;
                if reports.send(Ok(report)).await.is_err() {
                    break;
                }
            }
        }
        self.finish().await
    }

    /// Trains on a batch, publishes the new weights to the sampler and saves a checkpoint.
    async fn step(
        &mut self,
        batch: SampledBatch,
        policy: &watch::Sender<SamplingPolicy>,
    ) -> Result<RlReport> {
        let settings = Arc::clone(&self.settings);
        let done = batch.step + 1;
        let policy_step = batch.policy_step;
        let last = done == settings.steps;
        let start = Instant::now();
        self.close_samplers(policy_step);
        let mut prepared =
            PreparedBatch::new(&batch, settings.advantage, self.penalty.as_ref()).await?;
        drop(batch);
        let due = |every: u64| every > 0 && done.is_multiple_of(every);
        // Without evaluation prompts, the mean reward of a batch counts as the reward of the
        // weights that sampled the batch.
        if self.eval_prompts.is_empty() {
            self.record_reward(policy_step, prepared.report.reward);
        }
        let output;
        let sampler;
        let saved;
        let data = std::mem::take(&mut prepared.data);
        if data.is_empty() {
            output = None;
            sampler = policy.borrow().sampler.clone();
            saved = None;
        } else {
            // Queue the requests without awaiting each result, so that the server executes them in
            // order without a pause.
            let step = self.model.step(data, settings.loss.clone(), settings.adam);
            let new_sampler = self.model.save_weights_and_get_sampling_client();
            let name = checkpoint_name(done);
            let state =
                due(settings.save_every).then(|| self.model.save_state(SaveOptions::new(name)));
            self.changed = true;
            output = Some(step.await?.pass);
            sampler = new_sampler.await?;
            self.samplers.push_back((done, sampler.clone()));
            saved = state;
        }
        policy.send_replace(SamplingPolicy { step: done, sampler: sampler.clone() });
        let mut report = prepared.report(output.as_ref());
        if !is_policy_temperature(&self.episodes.params) {
            // The sampled log-probabilities are at another temperature than the trained ones.
            report.kl = None;
        }
        report.time.training = start.elapsed().as_secs_f64();
        report.learning_rate = settings.adam.learning_rate;
        match saved {
            Some(saved) => {
                let path = saved.await?;
                report.checkpoint = Some(path.clone());
                self.store.progress.checkpoints.push(SavedCheckpoint::new(done, path));
                self.changed = false;
            }
            // The weights did not change, so the last checkpoint is also the checkpoint of this
            // step.
            None if !self.changed => advance_checkpoint(&mut self.store.progress, done),
            None => {}
        }
        if due(settings.eval_every) || last {
            report.eval_reward = self.evaluate(&sampler, done).await?;
        }
        self.tokens += report.tokens;
        report.epoch = self.epochs(done);
        report.tokens_per_second = self.tokens_per_second();
        self.step = done;
        self.store.log(&report).await?;
        self.store_checkpoints().await?;
        Ok(report)
    }

    /// Closes the sampling clients that no later batch uses, so that the server deletes their
    /// weights. Batches are sampled one after the other, so later batches use the weights after
    /// `policy_step` steps or newer ones.
    fn close_samplers(&mut self, policy_step: u64) {
        while self.samplers.get(1).is_some_and(|(step, _)| *step <= policy_step) {
            if let Some((_, unused)) = self.samplers.pop_front() {
                unused.close().detach();
            }
        }
    }

    /// Returns the number of passes over the prompts after `steps` steps.
    #[expect(clippy::cast_precision_loss, reason = "a count of steps")]
    fn epochs(&self, steps: u64) -> f64 {
        let sampled = steps as f64 * self.settings.groups_per_batch as f64;
        sampled / self.prompts.len().max(1) as f64
    }

    /// Returns the mean number of sampled tokens per second of this process.
    #[expect(clippy::cast_precision_loss, reason = "a speed")]
    fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.started.elapsed().as_secs_f64().max(1e-9)
    }

    /// Evaluates the starting weights and reports the result as step 0.
    async fn evaluate_start(
        &mut self,
        policy: &watch::Sender<SamplingPolicy>,
        reports: &mpsc::Sender<Result<RlReport>>,
    ) -> Result<()> {
        let sampler = policy.borrow().sampler.clone();
        if let Some(reward) = self.evaluate(&sampler, 0).await? {
            let report = RlReport { reward, eval_reward: Some(reward), ..RlReport::default() };
            self.store.log(&report).await?;
            // Ignore a dropped receiver here: sending the next report detects it.
            let _ = reports.send(Ok(report)).await;
        }
        Ok(())
    }

    /// Returns the mean reward of the evaluation prompts, sampled at temperature 0.
    async fn evaluate(&mut self, sampler: &SamplingClient, step: u64) -> Result<Option<f64>> {
        if self.eval_prompts.is_empty() {
            return Ok(None);
        }
        let mut episodes = self.episodes.clone();
        episodes.params.temperature = 0.0;
        let batch = episodes.batch(sampler, self.eval_prompts.clone(), 1, self.settings.seed);
        let reward = mean_reward(&batch.await?.0);
        self.record_reward(step, reward);
        Ok(Some(reward))
    }

    /// Records the reward of the checkpoint after `step` steps.
    fn record_reward(&mut self, step: u64, reward: f64) {
        let saved = self.store.progress.checkpoints.iter_mut().find(|saved| saved.step == step);
        if let Some(saved) = saved {
            saved.reward = Some(reward);
        }
    }

    /// Stores the list of checkpoints to keep, then deletes the other checkpoints on the server.
    async fn store_checkpoints(&mut self) -> Result<()> {
        let excess = rotate_checkpoints(&mut self.store.progress.checkpoints, self.settings.keep);
        self.store.store().await?;
        for checkpoint in excess {
            // Ignore an error: a checkpoint that is not deleted only uses storage.
            let _ = self.service.rest().delete_checkpoint(&checkpoint.path).await;
        }
        Ok(())
    }

    /// Saves the weights after the last step, unless a checkpoint of them exists, and ends the run.
    async fn finish(mut self) -> Result<RlOutcome> {
        for (_, sampler) in self.samplers.drain(..) {
            sampler.close().detach();
        }
        let step = self.step;
        let finished = step >= self.settings.steps;
        if self.store.progress.finished {
            return Ok(self.outcome());
        }
        let name = checkpoint_name(step);
        let last = self.store.progress.checkpoints.last();
        if step > 0 && last.is_none_or(|saved| saved.step != step) {
            let path = self.model.save_state(SaveOptions::new(&*name)).await?;
            self.store.progress.checkpoints.push(SavedCheckpoint::new(step, path));
            self.store_checkpoints().await?;
        }
        let sampler = self.model.save_weights_for_sampler(SaveOptions::new(name)).await?;
        let old = self.store.progress.sampler.replace(sampler);
        self.store.progress.finished = finished;
        self.store.store().await?;
        if let Some(old) = old {
            // Delete the sampler checkpoint of the previous stop, which the new one replaces.
            let _ = self.service.rest().delete_checkpoint(&old).await;
        }
        Ok(self.outcome())
    }

    fn outcome(self) -> RlOutcome {
        let progress = self.store.progress;
        let best = best_checkpoint(&progress.checkpoints).map(|best| BestCheckpoint {
            step: best.step,
            reward: best.reward.unwrap_or_default(),
            path: best.path.clone(),
        });
        RlOutcome {
            step: self.step,
            finished: progress.finished,
            checkpoint: progress.checkpoints.last().map(|saved| saved.path.clone()),
            sampler: progress.sampler,
            best,
        }
    }
}

/// Sets the step of the last checkpoint to `step`, because the weights have not changed since.
fn advance_checkpoint(progress: &mut RunProgress, step: u64) {
    if let Some(last) = progress.checkpoints.last_mut() {
        last.step = step;
    }
}

/// Runs the loop. If it fails, sends the error as the last report.
pub(super) async fn drive(
    run: RlLoop,
    reports: mpsc::Sender<Result<RlReport>>,
    outcome: watch::Sender<Option<RlOutcome>>,
) {
    match Box::pin(run.run(&reports)).await {
        Ok(ended) => {
            outcome.send_replace(Some(ended));
        }
        Err(error) => {
            // Fails only if the stream of reports was dropped.
            let _ = reports.send(Err(error)).await;
        }
    }
}
