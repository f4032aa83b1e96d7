//! Reinforcement learning: samples groups of completions, rewards them and trains on their
//! advantages.
//!
//! ```no_run
//! use tinkex::ServiceClient;
//! use tinkex_recipes::rl::{Rl, RlPrompt};
//!
//! # async fn run() -> tinkex::Result<()> {
//! let service = ServiceClient::from_env()?;
//! let mut run = Rl::new("Qwen/Qwen3-8B")
//!     .prompts(["What is 2 + 2?", "What is 3 + 4?"].map(RlPrompt::chat))
//!     .reward(|completion| completion.text.to_uppercase() == completion.text)
//!     .steps(50)
//!     .run_folder("capitals-run")
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
//! run. If all rewards of a group are equal, the group has no gradient: it is skipped and counted
//! in [`RlReport::skipped_groups`]. If all groups are skipped, the step does not change the
//! weights.
//!
//! By default every batch is sampled from the current weights. With
//! [`off_policy(n)`](Rl::off_policy) the next batches are sampled while the current batch is
//! trained on, from weights that are at most `n` steps old.

mod advantage;
mod batch;
mod driver;
mod prompt;
mod report;
mod reward;
mod run;
mod run_store;
mod sample;

use std::collections::VecDeque;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use serde_json::json;
use sha2::{Digest as _, Sha256};
use tinkex::{
    Chat, Error, ErrorKind, LoraOptions, LossSpec, RestoreMode, RestoreOptions, Result,
    ServiceClient, Tokenizer, TrainingClient,
};
use tinkex_runs::{
    CheckpointSettings, EvaluationSettings, LossOption, LossSettings, MethodSettings,
    RewardSettings, RlSettings, RunFolder, RunSettings, StartCheckpoint,
};
use tinkex_transport::task::{Task, require_runtime};
use tinkex_wire::{AdamParams, JsonObject, LossFn, LossSetting, SamplingParams, TinkerPath};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::reward_program::RewardProgram;
use super::stop::StopHandle;
use batch::KlPenalty;
use driver::{LoopSettings, RlLoop};
use reward::MakeEnvironment;
use run_store::{FolderChoice, RunStore};
use sample::EpisodeSampler;

pub use prompt::RlPrompt;
pub use report::{RlReport, Rollout, StepTimes};
pub use reward::{Completion, Environment, Reward, RewardError, Turn};
pub use run::{BestCheckpoint, RlOutcome, RlRun};
pub use tinkex_runs::Advantage;

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
    folder: Option<FolderChoice>,
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
            folder: None,
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

    /// Sets the evaluation prompts, for which one completion each is sampled at temperature 0. The
    /// evaluation runs before the first step, every `every` steps (0: not during the run) and after
    /// the last step. The mean reward of an evaluation determines the best checkpoint.
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
    /// use tinkex_recipes::rl::{Reward, Rl, RewardError};
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

    /// Sets the reward to the result of an external program.
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

    /// Sets the loss (default [`LossFn::ImportanceSampling`]). Pass a [`LossSpec`] for a loss with
    /// options. The loss receives the inputs `target_tokens`, `logprobs` and `advantages`.
    pub fn loss(mut self, loss: impl Into<LossSpec>) -> Self {
        self.settings.loss = loss.into();
        self
    }

    /// Sets the coefficient of the penalty for the KL divergence from the starting weights (default
    /// 0, no penalty).
    ///
    /// The advantage A of a token becomes A + c · (mean KL − KL), where c is the coefficient and KL
    /// = ln q − ln p₀ is the difference between the log-probabilities of the token under the
    /// sampling policy q and under the starting weights p₀.
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

    /// Sets the sampling parameters. The run replaces their seed, and sets a stop condition if they
    /// have none. Defaults to at most 256 tokens at temperature 1.
    ///
    /// The losses assume that completions are sampled from the policy itself: a temperature other
    /// than 1, `top_k` and `top_p` bias the gradient. At another temperature than 1, reports have no
    /// [`kl`](RlReport::kl), and [`kl_coef`](Self::kl_coef) must be 0.
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
    /// [run folder](Self::run_folder), so that a crash loses at most the running batch, and to 0
    /// without.
    pub fn save_every(mut self, steps: u64) -> Self {
        self.save_every = Some(steps);
        self
    }

    /// Sets the number of checkpoints to keep (default 2), in addition to the checkpoint with the
    /// highest reward.
    pub fn keep(mut self, checkpoints: usize) -> Self {
        self.settings.keep = checkpoints;
        self
    }

    /// Stores settings, progress, metrics and completions of the run in this folder. If the folder
    /// contains a run, that run resumes from its last checkpoint. The settings of this builder must
    /// then equal the stored settings, except for the number of steps and the intervals of
    /// evaluations and checkpoints. `tinkex ui` shows the folder.
    pub fn run_folder(mut self, path: impl Into<PathBuf>) -> Self {
        self.folder = Some(FolderChoice::Path(path.into()));
        self
    }

    /// Stores the run in a folder that the caller has prepared ([`RunFolder::new`]) or opened
    /// ([`RunFolder::open`]). The settings that the folder stores are not compared with the
    /// settings of this builder.
    pub fn opened_folder(mut self, folder: RunFolder) -> Self {
        self.folder = Some(FolderChoice::Opened(Box::new(folder)));
        self
    }

    /// Sets the tokenizer. Defaults to the tokenizer of the base model.
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
    /// [`ErrorKind::InvalidInput`] if the settings are incomplete or invalid, or if the run folder
    /// contains a run with other settings; otherwise fails if a request fails.
    pub async fn start(mut self, service: &ServiceClient) -> Result<RlRun> {
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
        if self.kl_coef > 0.0 && !is_policy_temperature(&self.params) {
            // The server computes the log-probabilities of the reference at temperature 1. Compared
            // with log-probabilities at another temperature, they differ even for equal weights.
            return invalid(
                "cannot start the run: a KL penalty needs samples at temperature 1; remove the \
                 penalty or set the temperature to 1",
            );
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

        // With a run folder, save every step by default, so that the run can resume from it.
        let save_every = self.save_every.unwrap_or(u64::from(self.folder.is_some()));
        self.settings.save_every = save_every;
        let settings = self.run_settings(&prompts, &params);
        let mut store = RunStore::open(self.folder.take(), settings).await?;
        let model = self.create_model(service, &store).await?;
        store.progress.run_id = Some(model.model_id().clone());
        store.store().await?;
        let penalty = self.penalty(service).await?;
        let stop = StopHandle::new();
        let model_id = model.model_id().to_string();
        let from = store.progress.step();
        let run = RlLoop {
            settings: Arc::new(self.settings),
            service: service.clone(),
            model,
            episodes: EpisodeSampler { tokenizer, params, environment },
            prompts: prompts.into(),
            eval_prompts,
            penalty,
            store,
            step: from,
            started: Instant::now(),
            tokens: 0,
            stop: stop.clone(),
            changed: from == 0,
            samplers: VecDeque::new(),
        };
        let (sender, reports) = mpsc::channel(1);
        let (outcome_sender, outcome) = watch::channel(None);
        let task = Task::spawn(driver::drive(run, sender, outcome_sender));
        Ok(RlRun { reports, outcome, stop, model_id, from, _task: task })
    }

    /// Returns the settings to store in the run folder.
    fn run_settings(&self, prompts: &[Arc<RlPrompt>], params: &SamplingParams) -> RunSettings {
        let loop_settings = &self.settings;
        let mut settings = RunSettings::new(
            &*self.base_model,
            MethodSettings::Rl(RlSettings {
                reward: RewardSettings::Custom,
                // The program that uses this crate chooses the encoding of each prompt, so the
                // setting does not apply.
                prompts_are_messages: false,
                group_size: loop_settings.group_size,
                groups_per_batch: loop_settings.groups_per_batch,
                loss: loss_settings(&loop_settings.loss),
                advantage: loop_settings.advantage,
                kl_coefficient: self.kl_coef,
                max_policy_age: loop_settings.off_policy,
                sampling: params.clone(),
            }),
        );
        settings.start = self
            .from
            .clone()
            .map(|checkpoint| StartCheckpoint { checkpoint, with_optimizer: false });
        settings.rank = self.rank;
        settings.seed = loop_settings.seed;
        settings.steps = loop_settings.steps;
        settings.optimizer = loop_settings.adam;
        settings.data.digest = digest(prompts);
        settings.evaluation = (!self.eval_prompts.is_empty()).then(|| EvaluationSettings {
            every: loop_settings.eval_every,
            ..EvaluationSettings::default()
        });
        settings.checkpoints =
            CheckpointSettings { every: loop_settings.save_every, keep: loop_settings.keep };
        settings
    }

    async fn create_model(
        &self,
        service: &ServiceClient,
        store: &RunStore,
    ) -> Result<TrainingClient> {
        let metadata = self.user_metadata.clone().unwrap_or_default();
        let (path, restore) = match (store.progress.checkpoints.last(), &self.from) {
            (Some(saved), _) => (&saved.path, RestoreMode::WithOptimizer),
            (None, Some(from)) => (from, RestoreMode::WeightsOnly),
            (None, None) => {
                let options = LoraOptions::new(&*self.base_model)
                    .rank(self.rank)
                    .seed(self.settings.seed)
                    .user_metadata(metadata);
                return service.create_lora_training_client(options).await;
            }
        };
        let options = RestoreOptions::new(restore).user_metadata(metadata);
        service.create_training_client_from(path, options).await
    }

    /// Creates the sampler of the starting weights, if there is a KL penalty.
    async fn penalty(&self, service: &ServiceClient) -> Result<Option<KlPenalty>> {
        if self.kl_coef == 0.0 {
            return Ok(None);
        }
        let reference = match &self.from {
            Some(path) => {
                let restore = RestoreMode::WeightsOnly;
                let start = service.create_training_client_from(path, restore).await?;
                start.save_weights_and_get_sampling_client().await?
            }
            // A new adapter does not change the output of the base model, so sample from the base
            // model.
            None => service.create_sampling_client(&*self.base_model).await?,
        };
        Ok(Some(KlPenalty { reference, coefficient: self.kl_coef }))
    }
}

/// Returns the settings of a loss to store in the run folder.
fn loss_settings(loss: &LossSpec) -> LossSettings {
    let Some((function, config)) = loss.built_in() else {
        return LossSettings::new(LossFn::Custom.as_str());
    };
    let option = |setting: &LossSetting| match setting {
        LossSetting::Number(number) => LossOption::Number(*number),
        LossSetting::Text(text) => LossOption::Text(text.clone()),
    };
    let mut settings = LossSettings::new(function.as_str());
    settings.options =
        config.iter().map(|(name, setting)| (name.to_owned(), option(setting))).collect();
    settings
}

/// Returns the SHA-256 checksum of the tokens and metadata of prompts.
fn digest(prompts: &[Arc<RlPrompt>]) -> String {
    let mut digest = Sha256::new();
    for prompt in prompts {
        let line = json!([&prompt.tokens[..], prompt.metadata]);
        digest.update(line.to_string());
    }
    digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
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

/// Returns whether samples are drawn at temperature 1, the temperature at which the server computes
/// the log-probabilities of training data and references.
fn is_policy_temperature(params: &SamplingParams) -> bool {
    params.temperature.to_bits() == 1.0_f64.to_bits()
}
