//! Reinforcement learning: samples groups of completions, rewards them and trains on their
//! advantages.
//!
//! ```no_run
//! use tinkex::ServiceClient;
//! use tinkex::recipes::rl::{Rl, RlPrompt};
//!
//! # async fn run() -> tinkex::Result<()> {
//! let service = ServiceClient::from_env()?;
//! let mut run = Rl::new("Qwen/Qwen3-8B")
//!     .prompts(["What is 2 + 2?", "What is 3 + 4?"].map(RlPrompt::chat))
//!     .reward(|completion| completion.text.to_uppercase() == completion.text)
//!     .steps(50)
//!     .resume_file("rl.json")
//!     .start(&service)
//!     .await?;
//! while let Some(report) = run.next().await {
//!     println!("{}", report?);
//! }
//! # Ok(()) }
//! ```
//!
//! A step takes [`groups_per_batch`](Rl::groups_per_batch) prompts, samples
//! [`group_size`](Rl::group_size) completions of each, computes their rewards, converts the rewards
//! of each group to advantages ([`Advantage`]), and trains on the completions with the loss of the
//! run. A group with constant rewards has no gradient: it is skipped and counted. If no group is
//! left, the step changes no weights.
//!
//! By default every batch is sampled from the current weights. With [`off_policy`](Rl::off_policy)
//! the next batches are sampled while the current one is trained on, from weights that are at most
//! that many steps old.

mod advantage;
mod batch;
mod driver;
mod prompt;
mod report;
mod resume;
mod reward;
mod run;
mod sample;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use serde_json::json;
use sha2::{Digest as _, Sha256};
use tinkex_wire::{AdamParams, JsonObject, LossFn, SamplingParams, TinkerPath};
use tokio::sync::{mpsc, watch};

use crate::chat::Chat;
use crate::error::{Error, ErrorKind, Result};
use crate::service::ServiceClient;
use crate::task::{Task, require_runtime};
use crate::tokenizer::Tokenizer;
use crate::training::{LossSpec, RestoreMode, TrainingClient};

use super::reward_program::RewardProgram;
use super::stop::StopHandle;
use batch::KlPenalty;
use driver::{LoopSettings, RlLoop};
use resume::ResumeFile;
use reward::MakeEnvironment;
use sample::EpisodeSampler;

pub use advantage::Advantage;
pub use prompt::RlPrompt;
pub use report::{RlReport, Rollout, StepTimes};
pub use reward::{Completion, Environment, Reward, RewardError, Turn};
pub use run::{BestCheckpoint, RlOutcome, RlRun};

/// Builder of a reinforcement-learning run. See the [module documentation](self).
#[must_use = "nothing happens until the run is started"]
pub struct Rl {
    base_model: String,
    from: Option<TinkerPath>,
    rank: u32,
    user_metadata: Option<JsonObject>,
    prompts: Vec<RlPrompt>,
    eval_prompts: Vec<RlPrompt>,
    environment: Option<MakeEnvironment>,
    tokenizer: Option<Tokenizer>,
    params: SamplingParams,
    settings: LoopSettings,
    kl_coef: f64,
    save_every: Option<u64>,
    resume_file: Option<PathBuf>,
}

impl Rl {
    /// Creates a run that trains a new LoRA adapter of `base_model`.
    pub fn new(base_model: impl Into<String>) -> Self {
        Self {
            base_model: base_model.into(),
            from: None,
            rank: 16,
            user_metadata: None,
            prompts: Vec::new(),
            eval_prompts: Vec::new(),
            environment: None,
            tokenizer: None,
            params: SamplingParams::new().max_tokens(256),
            settings: LoopSettings {
                steps: 100,
                group_size: 8,
                groups_per_batch: 16,
                off_policy: 0,
                advantage: Advantage::default(),
                loss: LossFn::ImportanceSampling.into(),
                adam: AdamParams::default(),
                seed: 0,
                eval_every: 0,
                save_every: 0,
                keep: 2,
            },
            kl_coef: 0.0,
            save_every: None,
            resume_file: None,
        }
    }

    /// Starts from the weights of a training checkpoint, with a new optimizer.
    pub fn from_checkpoint(mut self, path: TinkerPath) -> Self {
        self.from = Some(path);
        self
    }

    /// Sets the LoRA rank (default 16).
    pub fn rank(mut self, rank: u32) -> Self {
        self.rank = rank;
        self
    }

    /// Stores a JSON object with the training run (default: none).
    pub fn user_metadata(mut self, metadata: JsonObject) -> Self {
        self.user_metadata = Some(metadata);
        self
    }

    /// Sets the prompts. Every epoch uses all of them in a new order.
    pub fn prompts<P: Into<RlPrompt>>(mut self, prompts: impl IntoIterator<Item = P>) -> Self {
        self.prompts = prompts.into_iter().map(Into::into).collect();
        self
    }

    /// Sets prompts to evaluate on: one completion each, at temperature 0. They are evaluated
    /// before the first step, every `every` steps (0: never) and after the last step, and decide
    /// which checkpoint is the best.
    pub fn eval_prompts<P: Into<RlPrompt>>(
        mut self,
        prompts: impl IntoIterator<Item = P>,
        every: u64,
    ) -> Self {
        self.eval_prompts = prompts.into_iter().map(Into::into).collect();
        self.settings.eval_every = every;
        self
    }

    /// Sets the reward to a function of the completion. The function runs on the async threads, so
    /// it should take no longer than a few milliseconds.
    pub fn reward<R: Into<Reward> + 'static>(
        self,
        reward: impl Fn(&Completion) -> R + Send + Sync + 'static,
    ) -> Self {
        let reward = Arc::new(reward);
        self.with_environment(reward::single_turn(move |completion: Completion| {
            let reward = reward(&completion).into();
            async move { Ok(reward) }
        }))
    }

    /// Sets the reward to an async function of the completion.
    ///
    /// ```
    /// use tinkex::recipes::rl::{Reward, Rl, RewardError};
    ///
    /// let rl = Rl::new("Qwen/Qwen3-8B").reward_async(|completion| async move {
    ///     let length = f64::from(u32::try_from(completion.text.len())?);
    ///     Ok::<_, RewardError>(Reward::new(-length).metric("length", length))
    /// });
    /// ```
    pub fn reward_async<F, R>(self, reward: F) -> Self
    where
        F: Fn(Completion) -> R + Send + Sync + 'static,
        R: Future<Output = std::result::Result<Reward, RewardError>> + Send + 'static,
    {
        self.with_environment(reward::single_turn(reward))
    }

    /// Sets the reward to that of a program.
    pub fn reward_program(self, program: RewardProgram) -> Self {
        let program = Arc::new(program);
        self.reward_async(move |completion| {
            let program = Arc::clone(&program);
            async move { program.score(&completion).await }
        })
    }

    /// Sets the environment: `make` creates one for every completion of a group.
    pub fn environment<E: Environment + 'static>(
        self,
        make: impl Fn(&RlPrompt) -> E + Send + Sync + 'static,
    ) -> Self {
        self.with_environment(Arc::new(move |prompt| Box::new(make(prompt))))
    }

    fn with_environment(mut self, environment: MakeEnvironment) -> Self {
        self.environment = Some(environment);
        self
    }

    /// Sets the number of steps (default 100).
    pub fn steps(mut self, steps: u64) -> Self {
        self.settings.steps = steps;
        self
    }

    /// Sets the number of completions per prompt (default 8).
    pub fn group_size(mut self, completions: u32) -> Self {
        self.settings.group_size = completions;
        self
    }

    /// Sets the number of prompts per step (default 16).
    pub fn groups_per_batch(mut self, prompts: usize) -> Self {
        self.settings.groups_per_batch = prompts;
        self
    }

    /// Sets the advantage estimator (default [`Advantage::GroupMean`]).
    pub fn advantage(mut self, advantage: Advantage) -> Self {
        self.settings.advantage = advantage;
        self
    }

    /// Sets the loss (default [`LossFn::ImportanceSampling`]). A loss with options is a
    /// [`LossSpec`]; it receives the loss inputs `target_tokens`, `logprobs` and `advantages`.
    pub fn loss(mut self, loss: impl Into<LossSpec>) -> Self {
        self.settings.loss = loss.into();
        self
    }

    /// Sets the coefficient of the penalty for leaving the starting weights (default 0, no
    /// penalty).
    ///
    /// The advantage of a token becomes A + c · (mean KL − KL), where KL = ln q − ln p₀ is the
    /// divergence of the token from the starting weights.
    pub fn kl_coef(mut self, coefficient: f64) -> Self {
        self.kl_coef = coefficient;
        self
    }

    /// Sets the optimizer parameters.
    pub fn adam(mut self, adam: AdamParams) -> Self {
        self.settings.adam = adam;
        self
    }

    /// Sets the learning rate (default 1e-4).
    pub fn learning_rate(mut self, rate: f64) -> Self {
        self.settings.adam.learning_rate = rate;
        self
    }

    /// Sets the sampling parameters. The run sets their seed, and their stop condition if there is
    /// none. Defaults to at most 256 tokens at temperature 1.
    ///
    /// The losses assume that completions are sampled from the policy itself: a temperature other
    /// than 1, `top_k` and `top_p` bias the gradient.
    pub fn sampling(mut self, params: SamplingParams) -> Self {
        self.params = params;
        self
    }

    /// Sets the maximum number of tokens per completion (default 256).
    pub fn max_tokens(mut self, tokens: u32) -> Self {
        self.params.max_tokens = Some(tokens);
        self
    }

    /// Sets the maximum age of the weights that sample a batch, in steps (default 0). With 1 or
    /// more, sampling overlaps training.
    pub fn off_policy(mut self, steps: u64) -> Self {
        self.settings.off_policy = steps;
        self
    }

    /// Sets the seed of the order of prompts, of the samples and of the initial weights (default
    /// 0).
    pub fn seed(mut self, seed: u64) -> Self {
        self.settings.seed = seed;
        self
    }

    /// Sets the interval of checkpoints in steps; 0 saves only at the end. Defaults to 1 with a
    /// [resume file](Self::resume_file), so that a crash loses at most the running batch, and to 0
    /// without.
    pub fn save_every(mut self, steps: u64) -> Self {
        self.save_every = Some(steps);
        self
    }

    /// Sets the number of checkpoints to keep (default 2), besides the one with the highest reward.
    pub fn keep(mut self, checkpoints: usize) -> Self {
        self.settings.keep = checkpoints;
        self
    }

    /// Stores the progress of the run in this file. If the file exists, the run resumes from its
    /// last checkpoint.
    pub fn resume_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.resume_file = Some(path.into());
        self
    }

    /// Sets the tokenizer. Defaults to that of the base model.
    pub fn tokenizer(mut self, tokenizer: Tokenizer) -> Self {
        self.tokenizer = Some(tokenizer);
        self
    }

    /// Returns the number of steps.
    #[must_use]
    pub fn total_steps(&self) -> u64 {
        self.settings.steps
    }

    /// Creates or restores the model and starts the run.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the settings are incomplete or invalid, or if the resume file
    /// belongs to a run with other settings; otherwise fails if a request fails.
    pub async fn start(self, service: &ServiceClient) -> Result<RlRun> {
        require_runtime()?;
        let invalid = |message: &str| Err(Error::new(ErrorKind::InvalidInput, message));
        if self.prompts.is_empty() {
            return invalid("cannot start the run: it has no prompts");
        }
        let Some(environment) = self.environment.clone() else {
            return invalid("cannot start the run: it has no reward");
        };
        if self.settings.groups_per_batch == 0 || self.settings.group_size < 2 {
            return invalid(
                "cannot start the run: it needs at least one group of two completions per step",
            );
        }
        if !(self.kl_coef.is_finite() && self.kl_coef >= 0.0) {
            return invalid("cannot start the run: the KL coefficient must be at least 0");
        }
        let tokenizer = match self.tokenizer.clone() {
            Some(tokenizer) => tokenizer,
            None => service.create_sampling_client(&*self.base_model).await?.tokenizer().await?,
        };
        let chat = tokenizer.chat()?;
        let prompts = render(&self.prompts, &chat)?;
        let eval_prompts = render(&self.eval_prompts, &chat)?;
        let mut params = self.params.clone();
        if params.stop.is_none() {
            params.stop = chat.stop().ok();
        }

        let mut resume =
            ResumeFile::open(self.resume_file.clone(), self.identity(&prompts, &params)).await?;
        resume.state.step = resume.state.saved.last().map_or(0, |saved| saved.step);
        // A finished run that has more steps now continues.
        resume.state.finished &= resume.state.step >= self.settings.steps;
        let model = self.create_model(service, &resume).await?;
        resume.state.run_id = Some(model.model_id().to_string());
        resume.store().await?;
        let penalty = self.penalty(service).await?;
        let save_every = self.save_every.unwrap_or(u64::from(resume.exists()));
        let stop = StopHandle::new();
        let (model_id, from) = (model.model_id().to_string(), resume.state.step);
        let run = RlLoop {
            settings: Arc::new(LoopSettings { save_every, ..self.settings }),
            service: service.clone(),
            model,
            episodes: EpisodeSampler { tokenizer, params, environment },
            prompts: prompts.into(),
            eval_prompts,
            penalty,
            resume,
            stop: stop.clone(),
            changed: from == 0,
        };
        let (sender, reports) = mpsc::channel(1);
        let (outcome_sender, outcome) = watch::channel(None);
        let task = Task::spawn(driver::drive(run, sender, outcome_sender));
        Ok(RlRun { reports, outcome, stop, model_id, from, _task: task })
    }

    /// Returns the settings that a resumed run must not change.
    fn identity(&self, prompts: &[Arc<RlPrompt>], params: &SamplingParams) -> serde_json::Value {
        let mut digest = Sha256::new();
        for prompt in prompts {
            let line = json!([&prompt.tokens[..], prompt.metadata]);
            digest.update(line.to_string());
        }
        let settings = &self.settings;
        let hex: String = digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        json!({
            "base_model": self.base_model,
            "from": self.from,
            "rank": self.rank,
            "prompts": hex,
            "sampling": params,
            "group_size": settings.group_size,
            "groups_per_batch": settings.groups_per_batch,
            "off_policy": settings.off_policy,
            "advantage": settings.advantage,
            "loss": format!("{:?}", settings.loss),
            "kl_coef": self.kl_coef,
            "adam": settings.adam,
            "seed": settings.seed,
        })
    }

    async fn create_model(
        &self,
        service: &ServiceClient,
        resume: &ResumeFile,
    ) -> Result<TrainingClient> {
        let metadata = self.user_metadata.clone().unwrap_or_default();
        let (path, restore) = match (resume.state.saved.last(), &self.from) {
            (Some(saved), _) => (&saved.path, RestoreMode::WithOptimizer),
            (None, Some(from)) => (from, RestoreMode::WeightsOnly),
            (None, None) => {
                let new = service.create_lora_training_client(&*self.base_model);
                let new = new.rank(self.rank).seed(self.settings.seed).user_metadata(metadata);
                return new.create().await;
            }
        };
        let model = service.create_training_client_from(path, restore);
        model.user_metadata(metadata).create().await
    }

    /// Creates the sampler of the starting weights, if there is a KL penalty.
    async fn penalty(&self, service: &ServiceClient) -> Result<Option<KlPenalty>> {
        if self.kl_coef == 0.0 {
            return Ok(None);
        }
        let reference = match &self.from {
            Some(path) => {
                let restore = RestoreMode::WeightsOnly;
                let start = service.create_training_client_from(path, restore).create().await?;
                start.save_weights_and_get_sampling_client().await?
            }
            // A new adapter does not change the base model.
            None => service.create_sampling_client(&*self.base_model).await?,
        };
        Ok(Some(KlPenalty { reference, coefficient: self.kl_coef }))
    }
}

fn render(prompts: &[RlPrompt], chat: &Chat) -> Result<Vec<Arc<RlPrompt>>> {
    prompts.iter().map(|prompt| prompt.clone().render(chat).map(Arc::new)).collect()
}

impl fmt::Debug for Rl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rl")
            .field("base_model", &self.base_model)
            .field("prompts", &self.prompts.len())
            .finish_non_exhaustive()
    }
}
