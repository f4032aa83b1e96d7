//! The loop of a run: one task samples batches, another trains on them.

use std::future::pending;
use std::pin::pin;
use std::sync::Arc;

use futures_util::future::select;
use tinkex_wire::AdamParams;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::error::Result;
use crate::sampling::SamplingClient;
use crate::service::ServiceClient;
use crate::task::Task;
use crate::training::{LossSpec, SaveOptions, TrainingClient};

use super::super::checkpoints::{
    SavedCheckpoint, best_checkpoint, checkpoint_name, rotate_checkpoints,
};
use super::super::plan::derive_seed;
use super::super::stop::StopHandle;
use super::advantage::Advantage;
use super::batch::{KlPenalty, PreparedBatch, mean_reward, prompts_of_step};
use super::prompt::RlPrompt;
use super::report::RlReport;
use super::resume::ResumeFile;
use super::run::{BestCheckpoint, RlOutcome};
use super::sample::{EpisodeSampler, SampledBatch};

/// Weights to sample from, after a number of steps.
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
    pub(super) resume: ResumeFile,
    pub(super) stop: StopHandle,
    /// Whether the weights changed since the last checkpoint.
    pub(super) changed: bool,
}

/// Samples the batches of a run, as far ahead as the bound on the age of the policy allows.
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
        // Without a sender the trainer has ended, and with it the run.
        let Some(policy) = policy else { return pending().await };
        let (groups, seed) = (settings.groups_per_batch, settings.seed);
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
        let from = self.resume.state.step;
        let mut step = from;
        if from < self.settings.steps {
            let sampler = self.model.save_weights_and_get_sampling_client().await?;
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
                step = report.step;
                if reports.send(Ok(report)).await.is_err() {
                    break;
                }
            }
        }
        self.finish(step).await
    }

    /// Trains on a batch, publishes the new weights to the sampler and saves a checkpoint.
    async fn step(
        &mut self,
        batch: SampledBatch,
        policy: &watch::Sender<SamplingPolicy>,
    ) -> Result<RlReport> {
        let settings = Arc::clone(&self.settings);
        let (done, policy_step) = (batch.step + 1, batch.policy_step);
        let last = done == settings.steps;
        let start = Instant::now();
        let mut prepared =
            PreparedBatch::new(&batch, settings.advantage, self.penalty.as_ref()).await?;
        drop(batch);
        let due = |every: u64| every > 0 && done.is_multiple_of(every);
        // The rewards of a batch measure the weights that sampled it.
        if self.eval_prompts.is_empty() {
            self.record_reward(policy_step, prepared.report.reward);
        }
        let (output, sampler, saved);
        let data = std::mem::take(&mut prepared.data);
        if data.is_empty() {
            (output, sampler, saved) = (None, policy.borrow().sampler.clone(), None);
        } else {
            // Queued together: the server executes them in this order without a pause.
            let step = self.model.step(data, settings.loss.clone(), settings.adam).send();
            let new_sampler = self.model.save_weights_and_get_sampling_client();
            let name = checkpoint_name(done);
            let state =
                due(settings.save_every).then(|| self.model.save_state(SaveOptions::new(name)));
            self.changed = true;
            output = Some(step.await?.pass);
            sampler = new_sampler.await?;
            saved = state;
        }
        policy.send_replace(SamplingPolicy { step: done, sampler: sampler.clone() });
        let mut report = prepared.report(output.as_ref());
        report.time.training = start.elapsed().as_secs_f64();
        report.learning_rate = settings.adam.learning_rate;
        match saved {
            Some(saved) => {
                let path = saved.await?;
                report.checkpoint = Some(path.clone());
                self.resume.state.saved.push(SavedCheckpoint::new(done, path));
                self.changed = false;
            }
            // The last checkpoint has these weights too.
            None if !self.changed => self.resume.state.advance_checkpoint(done),
            None => {}
        }
        if due(settings.eval_every) || last {
            report.eval_reward = self.evaluate(&sampler, done).await?;
        }
        self.resume.state.step = done;
        self.store_checkpoints().await?;
        Ok(report)
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
            // A dropped receiver is noticed at the next report.
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
        let saved = self.resume.state.saved.iter_mut().find(|saved| saved.step == step);
        if let Some(saved) = saved {
            saved.reward = Some(reward);
        }
    }

    /// Stores the list of checkpoints, then deletes the excess ones.
    async fn store_checkpoints(&mut self) -> Result<()> {
        let excess = rotate_checkpoints(&mut self.resume.state.saved, self.settings.keep);
        self.resume.store().await?;
        for checkpoint in excess {
            // An error is ignored: the checkpoint only takes up space.
            let _ = self.service.rest().delete_checkpoint(&checkpoint.path).await;
        }
        Ok(())
    }

    /// Saves the weights after `step` steps, unless they are saved, and ends the run.
    async fn finish(mut self, step: u64) -> Result<RlOutcome> {
        let finished = step >= self.settings.steps;
        if self.resume.state.finished {
            return Ok(self.outcome());
        }
        let name = checkpoint_name(step);
        let last = self.resume.state.saved.last();
        if step > 0 && last.is_none_or(|saved| saved.step != step) {
            let path = self.model.save_state(SaveOptions::new(&*name)).await?;
            self.resume.state.saved.push(SavedCheckpoint::new(step, path));
            self.store_checkpoints().await?;
        }
        let sampler = self.model.save_weights_for_sampler(SaveOptions::new(name)).await?;
        let old = self.resume.state.sampler.replace(sampler);
        self.resume.state.finished = finished;
        self.resume.store().await?;
        if let Some(old) = old {
            // The sampler checkpoint of the previous stop is superseded.
            let _ = self.service.rest().delete_checkpoint(&old).await;
        }
        Ok(self.outcome())
    }

    fn outcome(self) -> RlOutcome {
        let state = self.resume.state;
        let best = best_checkpoint(&state.saved).map(|best| BestCheckpoint {
            step: best.step,
            reward: best.reward.unwrap_or_default(),
            path: best.path.clone(),
        });
        RlOutcome {
            step: state.step,
            finished: state.finished,
            checkpoint: state.saved.last().map(|saved| saved.path.clone()),
            sampler: state.sampler,
            best,
        }
    }
}

impl super::resume::RlState {
    /// Records that the weights of the last checkpoint did not change until `step`.
    fn advance_checkpoint(&mut self, step: u64) {
        if let Some(last) = self.saved.last_mut() {
            last.step = step;
        }
    }
}

/// Runs the loop and sends its error, if it fails.
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
