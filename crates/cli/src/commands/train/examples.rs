//! Training and evaluation examples of a run, and the configuration that follows from them.

use serde::Serialize;
use serde_json::{Value, json};
use tinkex::recipes::TrainExample;
use tinkex::recipes::dpo::{DpoPair, DpoReference};
use tinkex::{Chat, ServiceClient, Tokenizer};

use crate::commands::weights;
use crate::context::CommandContext;
use crate::error::CommandError;
use crate::format;
use crate::settings::is_loopback;
use crate::table::Table;

use super::args::{LengthArgs, RunArgs};
use super::data::{self, FileExamples};
use super::estimate::RunEstimate;
use super::example_format::ExampleFormat;
use super::source::{InputFile, RunInputs};
use super::state::{RunConfig, TrainMethod};

/// Default number of checkpoints, of evaluations and of answers to each prompt in a run.
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

/// Returns the context length of a base model in tokens, if the server reports it.
pub(crate) async fn context_length(
    service: &ServiceClient,
    model: &str,
) -> Result<Option<usize>, CommandError> {
    let models = service.server_capabilities().await?.supported_models;
    let supported = models.iter().find(|one| one.model_name.as_deref() == Some(model));
    let tokens = supported.and_then(|one| one.max_context_length);
    Ok(tokens.and_then(|tokens| usize::try_from(tokens).ok()))
}

/// Builds the configuration of a new run from the arguments and the server's defaults. The number of
/// steps is set later, once the examples are known.
pub(super) async fn configure(
    args: &RunArgs,
    service: &ServiceClient,
    model: String,
    rank: u32,
) -> Result<RunConfig, CommandError> {
    let context_length = context_length(service, &model).await?;
    if args.beta.is_some() && args.method != TrainMethod::Dpo {
        return Err(CommandError::usage("--beta applies to --method dpo only")
            .hint("Omit --beta, or pass --method dpo."));
    }
    let beta = (args.method == TrainMethod::Dpo).then(|| args.beta.unwrap_or(DEFAULT_BETA));
    Ok(RunConfig {
        method: args.method,
        beta,
        files: args.files.clone(),
        eval_file: args.eval_file.clone(),
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
        sample_prompts: args.sample_prompts.clone(),
        sample_every: 0,
        log_to: args.log_to,
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

/// Examples of all files, their formats, and the number of truncated ones.
struct SplitExamples<T> {
    train: Vec<T>,
    eval: Vec<T>,
    formats: Vec<FileFormat>,
    truncated: TruncatedCounts,
}

/// Reads the training files and the evaluation file with `read`. Without an evaluation file, holds
/// out a part of the training examples.
fn read_split<T>(
    config: &RunConfig,
    inputs: &RunInputs,
    read: impl Fn(&InputFile) -> Result<FileExamples<T>, CommandError>,
) -> Result<SplitExamples<T>, CommandError> {
    let (mut train, mut formats) = (Vec::new(), Vec::new());
    let mut truncated = TruncatedCounts::default();
    let mut add = |file: &InputFile| -> Result<(Vec<T>, usize), CommandError> {
        let read = read(file)?;
        formats.extend(read.format.map(|format| FileFormat { file: file.name.clone(), format }));
        Ok((read.examples, read.truncated))
    };
    for file in &inputs.train {
        let (examples, count) = add(file)?;
        train.extend(examples);
        truncated.train += count;
    }
    let eval = match &inputs.eval {
        Some(file) => {
            let (examples, count) = add(file)?;
            truncated.eval = count;
            examples
        }
        None => {
            let (kept, held_out) = data::split(train, config.eval_split, config.seed)?;
            train = kept;
            held_out
        }
    };
    Ok(SplitExamples { train, eval, formats, truncated })
}

/// Format of a file.
#[derive(Clone, Debug, Serialize)]
pub(super) struct FileFormat {
    file: String,
    format: ExampleFormat,
}

/// Number of examples that had too many tokens and were truncated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct TruncatedCounts {
    /// In the training files, also of the examples that are held out.
    pub(super) train: usize,
    /// In the evaluation file.
    pub(super) eval: usize,
}

impl TruncatedCounts {
    pub(super) fn total(self) -> usize {
        self.train + self.eval
    }
}

/// Examples of a run.
pub(super) struct Examples {
    /// Examples to train on. Those of pairs have no reference log-probabilities yet.
    pub(super) train: Vec<TrainExample>,
    pub(super) eval: Vec<TrainExample>,
    /// Preference pairs of `train` and `eval`, for DPO.
    pub(super) pairs: Option<(Vec<DpoPair>, Vec<DpoPair>)>,
    pub(super) formats: Vec<FileFormat>,
    pub(super) truncated: TruncatedCounts,
}

impl Examples {
    /// Reads the files. Also sets the number of steps, if the run is new or `length` changes it, and
    /// the intervals of a new run.
    pub(super) fn read(
        chat: &Chat,
        mut config: RunConfig,
        inputs: &RunInputs,
        args: &RunArgs,
        length: LengthArgs,
        is_new: bool,
    ) -> Result<(Self, RunConfig), CommandError> {
        let (learn, limit) = (config.learn.into(), config.length_limit());
        let read = |file: &InputFile| data::read(chat, file, learn, limit);
        let read_pairs = |file: &InputFile| data::read_pairs(chat, file, limit);
        let (train, eval, pairs, formats, truncated) = match config.method {
            TrainMethod::Sft => {
                let SplitExamples { train, eval, formats, truncated } =
                    read_split(&config, inputs, read)?;
                (train, eval, None, formats, truncated)
            }
            TrainMethod::Dpo => {
                let SplitExamples { train, eval, formats, truncated } =
                    read_split(&config, inputs, read_pairs)?;
                // The plan needs the sizes only; the run replaces the log-probabilities.
                let unknown = [DpoReference { chosen: 0.0, rejected: 0.0 }; 1];
                let examples =
                    |pairs: &[DpoPair]| data::pair_examples(pairs, &unknown.repeat(pairs.len()));
                (examples(&train)?, examples(&eval)?, Some((train, eval)), formats, truncated)
            }
        };
        if is_new || length.is_set() {
            config.steps = length.total_steps(config.plan(train.len()).steps_per_epoch());
        }
        if is_new {
            let interval = config.steps.div_ceil(INTERVALS);
            config.eval_every = args.eval_every.unwrap_or(interval);
            config.save_every = args.save_every.unwrap_or(interval);
            config.sample_every = args.sample_every.unwrap_or(interval);
        }
        Ok((Self { train, eval, pairs, formats, truncated }, config))
    }

    /// Describes the formats: one for all files, or each with its file.
    fn format_text(&self) -> String {
        match &self.formats[..] {
            [] => "preference pairs".to_owned(),
            [first, rest @ ..] if rest.iter().all(|other| other.format == first.format) => {
                first.format.to_string()
            }
            all => {
                let list = all.iter().map(|one| format!("{}: {}", one.file, one.format));
                list.collect::<Vec<_>>().join(", ")
            }
        }
    }

    /// Describes how many examples were truncated.
    fn truncated_text(&self, max_tokens: Option<usize>) -> String {
        match (self.truncated.total(), max_tokens) {
            (0, _) | (_, None) => "none".to_owned(),
            (count, Some(max)) => format!("{count}, to {max} tokens"),
        }
    }

    /// Returns a warning about truncated examples, if there are any.
    pub(super) fn warning(&self, config: &RunConfig) -> Option<String> {
        let (count, max) = (self.truncated.total(), config.max_tokens?);
        let total = self.train.len() + self.eval.len();
        let verb = if count == 1 { "is" } else { "are" };
        (count > 0).then(|| {
            format!(
                "warning: {count} of {} {verb} longer than {max} tokens and truncated; pass \
                 --refuse-long to reject them",
                format::count(total, "example")
            )
        })
    }

    /// Returns the number of tokens to train on from step `from` on.
    pub(super) fn remaining_tokens(&self, config: &RunConfig, from: u64) -> usize {
        let plan = config.plan(self.train.len());
        let step_tokens = |step| plan.batch(step).into_iter().map(|index| self.train[index].tokens);
        (from..config.steps).flat_map(step_tokens).sum()
    }

    /// Describes what the run would do from step `from` on.
    pub(super) fn describe(
        &self,
        config: &RunConfig,
        estimate: &RunEstimate,
        from: u64,
    ) -> (Table, Value) {
        let plan = config.plan(self.train.len());
        let tokens: usize = self.train.iter().map(|example| example.tokens).sum();
        let learned: f64 = self.train.iter().map(|example| example.weight).sum();
        let longest = self.train.iter().map(|example| example.tokens).max().unwrap_or(0);
        let remaining = self.remaining_tokens(config, from);
        let names: Vec<_> = config.files.iter().map(|file| file.display().to_string()).collect();
        let mut table = Table::of_properties().title(format!("Plan: {}", names.join(", ")));
        table.property("Base model", &config.model);
        if let Some(beta) = config.beta {
            table.property("Method", format!("DPO, beta {beta}"));
        }
        if let Some(from) = &config.from {
            table.property("Start", from);
        }
        table.property("Format", self.format_text());
        table.property("Examples", self.train.len().to_string());
        table.property("Held out", self.eval.len().to_string());
        table.property("Truncated", self.truncated_text(config.max_tokens));
        table.property(
            "Tokens",
            match config.method {
                TrainMethod::Sft => format!("{tokens} ({learned:.0} to learn)"),
                TrainMethod::Dpo => tokens.to_string(),
            },
        );
        table.property("Longest example", format::count(longest, "token"));
        let epochs = plan.epochs(config.steps);
        let batch = format::count(config.batch_size, "example");
        table.property("Steps", format!("{} of {batch}", config.steps));
        table.property("Epochs", format!("{epochs:.2}"));
        table.property("Tokens to train on", remaining.to_string());
        table.property("Rank", config.rank.to_string());
        let rate = format!("{:e}, {:?}", config.learning_rate, config.schedule);
        table.property("Learning rate", rate.to_lowercase());
        let interval = |steps: u64| match steps {
            1 => "every step".to_owned(),
            steps => format!("every {steps} steps"),
        };
        table.property(
            "Evaluation",
            match config.eval_every {
                _ if self.eval.is_empty() => "never".to_owned(),
                0 => "before and after the run".to_owned(),
                steps => interval(steps),
            },
        );
        table.property(
            "Checkpoints",
            match config.save_every {
                0 => "at the end".to_owned(),
                steps => format!("{}, keeping the last {}", interval(steps), config.keep),
            },
        );
        estimate.describe(&mut table);
        let json = json!({
            "settings": config,
            "examples": self.train.len(),
            "held_out": self.eval.len(),
            "formats": self.formats,
            "truncated": self.truncated,
            "tokens": tokens,
            "tokens_learned": learned,
            "longest_example": longest,
            "steps": config.steps,
            "steps_done": from,
            "epochs": epochs,
            "tokens_to_train_on": remaining,
            "estimate": estimate,
        });
        (table, json)
    }
}
