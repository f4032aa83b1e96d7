//! Training and evaluation examples of a run, and the configuration that follows from them.

use serde::Serialize;
use serde_json::{Value, json};
use tinkex::{AdamParams, Chat};
use tinkex_recipes::TrainExample;
use tinkex_recipes::dpo::{DpoPair, DpoReference};
use tinkex_runs::{
    DpoSettings, EvaluationSettings, LongExamples, MethodSettings, RunSettings, SampleSettings,
    SftSettings, StartCheckpoint,
};

use crate::commands::training::ExampleFormat;
use crate::commands::training::data::{self, FileExamples};
use crate::commands::training::report::TruncatedCounts;
use crate::commands::training::source::{InputFile, RunInputs};
use crate::commands::training::start::{RunStart, context_length};
use crate::error::CommandError;
use crate::format;
use crate::table::Table;

use super::args::TrainArgs;
use super::estimate::RunEstimate;
use super::settings::{ExampleSettings, TrainMethod, train_on};

/// Default number of checkpoints, of evaluations and of completions of each prompt in a run.
const INTERVALS: u64 = 10;

/// Builds the settings of a new run from the arguments and the server's defaults. The number of steps
/// and the intervals are set later, once the examples are known.
pub(super) async fn configure(
    args: &TrainArgs,
    start: &RunStart,
) -> Result<RunSettings, CommandError> {
    let TrainArgs { run, examples, .. } = args;
    let context_length = context_length(&start.service, &start.base_model).await?;
    if examples.beta.is_some() && examples.method != TrainMethod::Dpo {
        return Err(CommandError::usage("--beta applies to --method dpo only")
            .hint("Omit --beta, or pass --method dpo."));
    }
    let batch_size = examples.batch_size;
    let max_tokens = examples.max_tokens.or(context_length);
    let long_examples =
        if examples.refuse_long { LongExamples::Reject } else { LongExamples::Truncate };
    let method = match examples.method {
        TrainMethod::Sft => MethodSettings::Sft(SftSettings {
            batch_size,
            max_tokens,
            long_examples,
            learned_messages: examples.learn.into(),
        }),
        TrainMethod::Dpo => MethodSettings::Dpo(DpoSettings {
            beta: examples.beta.unwrap_or(DpoSettings::default().beta),
            batch_size,
            max_tokens,
            long_examples,
        }),
    };
    let learning_rate = run
        .learning_rate
        .unwrap_or_else(|| default_learning_rate(&start.base_model, examples.method));
    let mut settings = RunSettings::new(&*start.base_model, method);
    settings.start = start
        .from
        .clone()
        .map(|checkpoint| StartCheckpoint { checkpoint, with_optimizer: examples.with_optimizer });
    settings.tokenizer.clone_from(&run.model.tokenizer);
    settings.rank = start.rank;
    settings.seed = run.seed;
    settings.optimizer = AdamParams::with_learning_rate(learning_rate);
    settings.schedule = examples.schedule;
    settings.warmup_steps = examples.warmup;
    let fraction = Some(examples.eval_split).filter(|fraction| *fraction > 0.0);
    // The start of the run sets the file and its checksum.
    settings.evaluation = (run.eval_file.is_some() || fraction.is_some())
        .then(|| EvaluationSettings { fraction, ..EvaluationSettings::default() });
    settings.checkpoints.keep = run.keep;
    settings.samples =
        examples.sample_prompts.clone().map(|prompts| SampleSettings { prompts, every: 0 });
    settings.event_log = run.log_to.map(Into::into);
    Ok(settings)
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
    settings: &RunSettings,
    inputs: &RunInputs,
    read: impl Fn(&InputFile) -> Result<FileExamples<T>, CommandError>,
) -> Result<SplitExamples<T>, CommandError> {
    let mut train = Vec::new();
    let mut formats = Vec::new();
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
            let evaluation = settings.evaluation.as_ref();
            let fraction = evaluation.and_then(|evaluation| evaluation.fraction);
            let (kept, held_out) = data::split(train, fraction.unwrap_or(0.0), settings.seed)?;
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

/// Examples of a run.
pub(super) struct Examples {
    pub(super) settings: ExampleSettings,
    /// Examples to train on. Examples of pairs have no reference log-probabilities yet.
    pub(super) train: Vec<TrainExample>,
    pub(super) eval: Vec<TrainExample>,
    /// Preference pairs of `train` and `eval`, for DPO.
    pub(super) pairs: Option<(Vec<DpoPair>, Vec<DpoPair>)>,
    pub(super) formats: Vec<FileFormat>,
    pub(super) truncated: TruncatedCounts,
}

impl Examples {
    /// Reads the files. Also sets the number of steps, if the run is new or the arguments change it,
    /// and the intervals of a new run.
    pub(super) fn read(
        chat: &Chat,
        mut settings: RunSettings,
        inputs: &RunInputs,
        args: &TrainArgs,
        is_new: bool,
    ) -> Result<(Self, RunSettings), CommandError> {
        let unexpected = || CommandError::usage("the run does not train on examples");
        let example_settings = ExampleSettings::of(&settings).ok_or_else(unexpected)?;
        let limit = example_settings.length_limit();
        let examples = if example_settings.beta.is_none() {
            let learn = train_on(example_settings.learned);
            let read = |file: &InputFile| data::read(chat, file, learn, limit);
            let SplitExamples { train, eval, formats, truncated } =
                read_split(&settings, inputs, read)?;
            Self { settings: example_settings, train, eval, pairs: None, formats, truncated }
        } else {
            let read = |file: &InputFile| data::read_pairs(chat, file, limit);
            let SplitExamples { train, eval, formats, truncated } =
                read_split(&settings, inputs, read)?;
            // The plan needs the sizes only; the run replaces the log-probabilities.
            let unknown = [DpoReference { chosen: 0.0, rejected: 0.0 }; 1];
            let examples =
                |pairs: &[DpoPair]| data::pair_examples(pairs, &unknown.repeat(pairs.len()));
            Self {
                settings: example_settings,
                train: examples(&train)?,
                eval: examples(&eval)?,
                pairs: Some((train, eval)),
                formats,
                truncated,
            }
        };
        if is_new || args.length.is_set() {
            let plan = example_settings.plan(&settings, examples.train.len());
            settings.steps = args.length.total_steps(plan.steps_per_epoch());
        }
        if is_new {
            let interval = settings.steps.div_ceil(INTERVALS);
            if let Some(evaluation) = &mut settings.evaluation {
                evaluation.every = args.run.eval_every.unwrap_or(interval);
            }
            settings.checkpoints.every = args.run.save_every.unwrap_or(interval);
            if let Some(samples) = &mut settings.samples {
                samples.every = args.examples.sample_every.unwrap_or(interval);
            }
        }
        Ok((examples, settings))
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
    pub(super) fn warning(&self) -> Option<String> {
        let count = self.truncated.total();
        let max = self.settings.max_tokens?;
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
    pub(super) fn remaining_tokens(&self, run: &RunSettings, from: u64) -> usize {
        let plan = self.settings.plan(run, self.train.len());
        let step_tokens = |step| plan.batch(step).into_iter().map(|index| self.train[index].tokens);
        (from..run.steps).flat_map(step_tokens).sum()
    }

    /// Describes what the run would do from step `from` on.
    pub(super) fn describe(
        &self,
        run: &RunSettings,
        files: &[InputFile],
        estimate: &RunEstimate,
        from: u64,
    ) -> (Table, Value) {
        let plan = self.settings.plan(run, self.train.len());
        let tokens: usize = self.train.iter().map(|example| example.tokens).sum();
        let learned: f64 = self.train.iter().map(|example| example.weight).sum();
        let longest = self.train.iter().map(|example| example.tokens).max().unwrap_or(0);
        let remaining = self.remaining_tokens(run, from);
        let names: Vec<_> = files.iter().map(|file| file.name.as_str()).collect();
        let mut table = Table::of_properties().title(format!("Plan: {}", names.join(", ")));
        table.property("Base model", &run.base_model);
        if let Some(beta) = self.settings.beta {
            table.property("Method", format!("DPO, beta {beta}"));
        }
        if let Some(start) = &run.start {
            table.property("Start", start.checkpoint.to_string());
        }
        table.property("Format", self.format_text());
        table.property("Examples", self.train.len().to_string());
        table.property("Held out", self.eval.len().to_string());
        table.property("Truncated", self.truncated_text(self.settings.max_tokens));
        table.property(
            "Tokens",
            match self.settings.beta {
                None => format!("{tokens} ({learned:.0} to learn)"),
                Some(_) => tokens.to_string(),
            },
        );
        table.property("Longest example", format::count(longest, "token"));
        let epochs = plan.epochs(run.steps);
        let batch = format::count(self.settings.batch_size, "example");
        table.property("Steps", format!("{} of {batch}", run.steps));
        table.property("Epochs", format!("{epochs:.2}"));
        table.property("Tokens to train on", remaining.to_string());
        table.property("Rank", run.rank.to_string());
        let rate = run.optimizer.learning_rate;
        table.property("Learning rate", format!("{rate:e}, {}", run.schedule.as_str()));
        let interval = |steps: u64| match steps {
            1 => "every step".to_owned(),
            steps => format!("every {steps} steps"),
        };
        table.property(
            "Evaluation",
            match run.evaluation.as_ref().map(|evaluation| evaluation.every) {
                None => "never".to_owned(),
                Some(0) => "before and after the run".to_owned(),
                Some(steps) => interval(steps),
            },
        );
        table.property(
            "Checkpoints",
            match run.checkpoints.every {
                0 => "at the end".to_owned(),
                steps => {
                    format!("{}, keeping the last {}", interval(steps), run.checkpoints.keep)
                }
            },
        );
        estimate.describe(&mut table);
        let json = json!({
            "settings": run,
            "examples": self.train.len(),
            "held_out": self.eval.len(),
            "formats": self.formats,
            "truncated": self.truncated,
            "tokens": tokens,
            "tokens_learned": learned,
            "longest_example": longest,
            "steps": run.steps,
            "steps_done": from,
            "epochs": epochs,
            "tokens_to_train_on": remaining,
            "estimate": estimate,
        });
        (table, json)
    }
}
