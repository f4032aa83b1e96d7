//! Training and evaluation examples of a run, and the configuration that follows from them.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tinkex::recipes::TrainExample;
use tinkex::recipes::dpo::{DpoPair, DpoReference};
use tinkex::{Chat, ServiceClient, Tokenizer};

use crate::commands::weights;
use crate::context::CommandContext;
use crate::error::CommandError;
use crate::settings::is_loopback;
use crate::table::Table;

use super::args::{LengthArgs, RunArgs};
use super::data::{self, DataFile};
use super::state::{RunConfig, TrainMethod};

/// Default number of checkpoints and of evaluations in a run.
const INTERVALS: u64 = 10;

/// Returns the named base model or, with `--local`, the built-in one.
pub(crate) fn base_model(
    context: &CommandContext<'_>,
    named: Option<&str>,
) -> Result<String, CommandError> {
    match named {
        Some(name) => Ok(name.to_owned()),
        None if context.settings.local => Ok(tinkex_server::BUILT_IN.to_owned()),
        None => Err(CommandError::usage("no model given").hint(
            "Pass --model NAME (see `tinkex model list`), or --local for the built-in model.",
        )),
    }
}

/// Loads the tokenizer of a base model. A server on this machine provides it; otherwise it comes from
/// the hub.
pub(crate) async fn find_tokenizer(
    context: &CommandContext<'_>,
    service: &ServiceClient,
    model: &str,
    named: Option<&str>,
) -> Result<Tokenizer, CommandError> {
    let env = &context.environment.variables;
    let url = service.base_url().as_str();
    match named {
        Some(name) => weights::load_tokenizer(env, name, false).await,
        None if model == tinkex_server::BUILT_IN => {
            weights::load_tokenizer(env, model, false).await
        }
        None if is_loopback(url) => {
            Ok(service.create_sampling_client(model).await?.tokenizer().await?)
        }
        None => weights::load_tokenizer(env, model, false).await,
    }
}

/// Builds the configuration of a new run from the arguments and the server's defaults. The number of
/// steps is set later, once the examples are known.
pub(super) async fn configure(
    context: &CommandContext<'_>,
    args: &RunArgs,
    service: &ServiceClient,
    model: String,
    rank: u32,
) -> Result<RunConfig, CommandError> {
    let models = service.server_capabilities().await?.supported_models;
    let supported = models.iter().find(|one| one.model_name.as_deref() == Some(&*model));
    let context_length = supported.and_then(|one| one.max_context_length);
    let context_length = context_length.and_then(|tokens| usize::try_from(tokens).ok());
    let absolute = |path: &PathBuf| {
        let path = context.environment.path(path);
        std::path::absolute(&path).unwrap_or(path)
    };
    if args.beta.is_some() && args.method != TrainMethod::Dpo {
        return Err(CommandError::usage("--beta applies to --method dpo only")
            .hint("Omit --beta, or pass --method dpo."));
    }
    let beta = (args.method == TrainMethod::Dpo).then(|| args.beta.unwrap_or(DEFAULT_BETA));
    Ok(RunConfig {
        method: args.method,
        beta,
        file: args.file.as_ref().map(absolute).unwrap_or_default(),
        eval_file: args.eval_file.as_ref().map(absolute),
        eval_split: args.eval_split,
        tokenizer: args.model.tokenizer.clone(),
        rank,
        from: args.model.from.as_ref().map(ToString::to_string),
        with_optimizer: args.with_optimizer,
        learning_rate: args
            .learning_rate
            .unwrap_or_else(|| default_learning_rate(&model, args.method)),
        schedule: args.schedule,
        warmup: args.warmup,
        batch_size: args.batch_size,
        steps: 0,
        seed: args.seed,
        max_tokens: args.max_tokens.or(context_length),
        refuse_long: args.refuse_long,
        learn: args.learn,
        eval_every: 0,
        save_every: 0,
        keep: args.keep,
        model,
    })
}

/// Returns the default learning rate. The built-in model is small and needs a high one.
fn default_learning_rate(model: &str, method: TrainMethod) -> f64 {
    match (model == tinkex_server::BUILT_IN, method) {
        (true, TrainMethod::Sft) => 3e-3,
        (true, TrainMethod::Dpo) => 1e-3,
        (false, TrainMethod::Sft) => 2e-4,
        (false, TrainMethod::Dpo) => 2e-5,
    }
}

/// Default β of DPO.
const DEFAULT_BETA: f64 = 0.1;

/// Reads the training file and the evaluation file, or holds out a part of the training file.
fn read_split<T>(
    config: &RunConfig,
    read: impl Fn(DataFile, &Path) -> Result<Vec<T>, CommandError>,
) -> Result<(Vec<T>, Vec<T>), CommandError> {
    let train = read(DataFile::Training, &config.file)?;
    match &config.eval_file {
        Some(file) => Ok((train, read(DataFile::Evaluation, file)?)),
        None => data::split(train, config.eval_split, config.seed),
    }
}

/// Examples of a run.
pub(super) struct Examples {
    /// Examples to train on. Those of pairs have no reference log-probabilities yet.
    pub(super) train: Vec<TrainExample>,
    pub(super) eval: Vec<TrainExample>,
    /// Preference pairs of `train` and `eval`, for DPO.
    pub(super) pairs: Option<(Vec<DpoPair>, Vec<DpoPair>)>,
}

impl Examples {
    /// Reads the files. Also sets the number of steps, if the run is new or `length` changes it, and
    /// the intervals of a new run.
    pub(super) fn read(
        chat: &Chat,
        mut config: RunConfig,
        args: &RunArgs,
        length: LengthArgs,
        is_new: bool,
    ) -> Result<(Self, RunConfig), CommandError> {
        let (learn, limit) = (config.learn.into(), config.length_limit());
        let read = |kind, file: &Path| data::read(chat, kind, file, learn, limit);
        let read_pairs = |kind, file: &Path| data::read_pairs(chat, kind, file, limit);
        let (train, eval, pairs) = match config.method {
            TrainMethod::Sft => {
                let (train, eval) = read_split(&config, read)?;
                (train, eval, None)
            }
            TrainMethod::Dpo => {
                let (train, eval) = read_split(&config, read_pairs)?;
                // The plan needs the sizes only; the run replaces the log-probabilities.
                let unknown = [DpoReference { chosen: 0.0, rejected: 0.0 }; 1];
                let examples =
                    |pairs: &[DpoPair]| data::pair_examples(pairs, &unknown.repeat(pairs.len()));
                (examples(&train)?, examples(&eval)?, Some((train, eval)))
            }
        };
        if is_new || length.is_set() {
            config.steps = length.total_steps(config.plan(train.len()).steps_per_epoch());
        }
        if is_new {
            let interval = config.steps.div_ceil(INTERVALS);
            config.eval_every = args.eval_every.unwrap_or(interval);
            config.save_every = args.save_every.unwrap_or(interval);
        }
        Ok((Self { train, eval, pairs }, config))
    }

    /// Describes what the run would do from step `from` on.
    pub(super) fn describe(&self, config: &RunConfig, from: u64) -> (Table, Value) {
        let plan = config.plan(self.train.len());
        let tokens: usize = self.train.iter().map(|example| example.tokens).sum();
        let learned: f64 = self.train.iter().map(|example| example.weight).sum();
        let longest = self.train.iter().map(|example| example.tokens).max().unwrap_or(0);
        let step_tokens = |step| plan.batch(step).into_iter().map(|index| self.train[index].tokens);
        let remaining: usize = (from..config.steps).flat_map(step_tokens).sum();
        let mut table = Table::of_properties().title(format!("Plan: {}", config.file.display()));
        table.property("Base model", &config.model);
        if let Some(beta) = config.beta {
            table.property("Method", format!("DPO, beta {beta}"));
        }
        if let Some(from) = &config.from {
            table.property("Start", from);
        }
        table.property("Examples", self.train.len().to_string());
        table.property("Held out", self.eval.len().to_string());
        table.property(
            "Tokens",
            match config.method {
                TrainMethod::Sft => format!("{tokens} ({learned:.0} to learn)"),
                TrainMethod::Dpo => tokens.to_string(),
            },
        );
        table.property("Longest example", format!("{longest} tokens"));
        let epochs = plan.epochs(config.steps);
        table.property("Steps", format!("{} of {} examples", config.steps, config.batch_size));
        table.property("Epochs", format!("{epochs:.2}"));
        table.property("Tokens to train on", remaining.to_string());
        table.property("Rank", config.rank.to_string());
        let rate = format!("{:e}, {:?}", config.learning_rate, config.schedule);
        table.property("Learning rate", rate.to_lowercase());
        let interval = |steps: u64| match steps {
            0 => "never".to_owned(),
            steps => format!("every {steps} steps"),
        };
        table.property(
            "Evaluation",
            if self.eval.is_empty() { interval(0) } else { interval(config.eval_every) },
        );
        table.property(
            "Checkpoints",
            format!("{}, keeping the last {}", interval(config.save_every), config.keep),
        );
        let json = json!({
            "settings": config,
            "examples": self.train.len(),
            "held_out": self.eval.len(),
            "tokens": tokens,
            "tokens_learned": learned,
            "longest_example": longest,
            "steps": config.steps,
            "steps_done": from,
            "epochs": epochs,
            "tokens_to_train_on": remaining,
        });
        (table, json)
    }
}
