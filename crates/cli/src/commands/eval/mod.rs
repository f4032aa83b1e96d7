//! `tinkex eval`: loss and answers of a model on a file of examples.
//!
//! | Module | Contents |
//! |---|---|
//! | `example` | tokens of an example: the prompt, the expected answer, and what the loss covers |
//! | `prompt_format` | finds the last message in a rendered prompt |
//! | `scorer` | comparison of an answer with the expected one |
//! | `report` | the result as a table and as JSON |

mod example;
mod prompt_format;
mod report;
mod scorer;

use std::path::PathBuf;

use clap::Args;
use clap_complete::ArgValueCandidates;
use futures_util::future::{OptionFuture, try_join};
use futures_util::{StreamExt as _, TryFutureExt as _, TryStreamExt as _, stream};
use tinkex::{SamplingClient, SamplingParams, TinkerPath, Tokenizer, TooLong};
use tinkex_recipes::{RewardProgram, TrainExample};
use tinkex_runs::RunFolder;

use crate::args::{positive, timeout};
use crate::context::CommandContext;
use crate::error::{CommandError, Exit};
use crate::format;
use crate::progress::{Progress, ProgressUnit};
use crate::reference::{self, LocalRun, folder_of_checkpoint};

use super::sample::SamplingArgs;
use super::train::settings::LearnFrom;
use super::training::args::number;
use super::training::data::{self, FileExamples};
use super::training::source::{DataFile, RunInputs};
use super::training::start::context_length;
use super::weights::WeightsArgs;
use example::EvalExample;
use prompt_format::PromptFormat;
use report::{EvalReport, EvaluatedAnswer, EvaluatedExample};
use scorer::{AnswerMatch, AnswerScorer};

/// Arguments of `tinkex eval`.
#[derive(Debug, Args)]
#[command(after_help = "\
FILE has examples as for `tinkex train`. The loss is the mean over the tokens that
training would learn. The answer to the last message of the assistant, or to a prompt, is generated
and compared with the expected one. The score of an answer is 1 if it matches and 0 otherwise, or the
number that the judge returns.

The judge is a program that reads one JSON object per line, with the fields prompt, completion and
metadata.answer (the expected answer), and prints {\"reward\": NUMBER} for each.

Examples:
  tinkex eval tinkex/tiny examples.jsonl --local
  tinkex eval animals examples.jsonl --local --match contains
  tinkex eval animals/final examples.jsonl --match 'regex:^(yes|no)$'
  tinkex eval animals examples.jsonl --local --judge-command 'python3 judge.py' --min-score 0.8
  tinkex eval animals examples.jsonl --local --format csv > answers.csv")]
pub(crate) struct EvalArgs {
    /// Base model, training run or checkpoint: NAME, RUN, RUN/NAME or tinker://…
    #[arg(value_name = "MODEL", add = ArgValueCandidates::new(reference::weights_candidates))]
    model: String,
    /// Examples in a format of `tinkex train`; - reads standard input
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// How an answer matches: exact, contains, number, regex, or regex:PATTERN
    #[arg(long = "match", value_name = "HOW", default_value = "exact", conflicts_with = "judge")]
    matching: AnswerMatch,
    /// Score the answers with this program; a shell command
    #[arg(long = "judge-command", id = "judge", value_name = "COMMAND")]
    judge: Option<String>,
    /// Maximum time of the judge for one answer
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = timeout)]
    judge_timeout: std::time::Duration,
    /// Compute the loss only, without generating answers
    #[arg(long, conflicts_with_all = ["judge", "min_score"])]
    loss_only: bool,
    /// Fail with exit code 1 if the mean score is below this number
    #[arg(long, value_name = "SCORE", allow_negative_numbers = true, value_parser = score)]
    min_score: Option<f64>,
    /// Evaluate the first N examples only
    #[arg(long, value_name = "N", value_parser = positive::<usize>)]
    limit: Option<usize>,
    /// Number of examples that are evaluated at the same time
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = positive::<usize>)]
    concurrency: usize,
    /// Assistant messages that the loss covers: all, last, or each in its own example
    #[arg(
        long,
        value_enum,
        value_name = "MESSAGES",
        default_value_t = LearnFrom::All,
        hide_possible_values = true
    )]
    learn: LearnFrom,
    /// Use another tokenizer: a model name on the hub, or a folder
    #[arg(long, value_name = "NAME")]
    tokenizer: Option<String>,
    #[command(flatten)]
    sampling: SamplingArgs,
}

fn score(text: &str) -> Result<f64, String> {
    number(text, f64::is_finite, "a number, such as 0.9")
}

pub(super) async fn run(
    context: &mut CommandContext<'_>,
    args: EvalArgs,
) -> Result<Exit, CommandError> {
    let mut path = args.file.clone();
    // Checked now, because starting a local server takes longer than reporting a missing file.
    let inputs = RunInputs::open(context, DataFile::Training, &mut [], Some(&mut path)).await?;
    let missing = || CommandError::usage("no file to evaluate");
    let file = inputs.eval.as_ref().ok_or_else(missing)?;
    let mut weights = WeightsArgs::of_name(args.model.clone(), args.tokenizer.clone());
    let service = weights.connect(context).await?;
    let (sampler, model) = weights.open(context, &service).await?;
    let run = find_run(context, &model);
    if weights.tokenizer.is_none() {
        // A run keeps the tokenizer that its examples were encoded with.
        weights.tokenizer =
            run.as_ref().and_then(|run| run.folder.record.settings.tokenizer.clone());
    }
    let tokenizer = weights.tokenizer(&context.environment.variables, &sampler).await?;
    let chat = tokenizer.chat()?;
    let base_model = sampler.get_sampler().await?.base_model;
    let context_length = context_length(&service, &base_model).await?;
    let limit = context_length.map(|tokens| (tokens, TooLong::Truncate));
    let FileExamples { examples, truncated, .. } =
        data::read(&chat, file, args.learn.into(), limit)?;
    if truncated > 0 {
        let count = format::count(truncated, "example");
        context.notice(&format!("warning: truncated {count} to the context length of the model"));
    }
    let examples = examples.iter().take(args.limit.unwrap_or(usize::MAX)).zip(1..);
    let prepare = |(example, number): (&TrainExample, usize)| {
        EvalExample::new(example).map_err(|error| {
            error.context(&format!("cannot evaluate example {number} of {}", file.name))
        })
    };
    let examples: Vec<EvalExample> = examples.map(prepare).collect::<Result<_, _>>()?;

    let scorer = match &args.judge {
        None => AnswerScorer::Match(args.matching.clone()),
        Some(command) => AnswerScorer::Judge(
            RewardProgram::new(command)
                .current_dir(&context.environment.folder)
                .timeout(args.judge_timeout)
                .on_stderr(context.line_writer("judge")),
        ),
    };
    let mut params = args.sampling.params(0.0);
    if params.stop.is_none() {
        params.stop = chat.stop().ok();
    }
    let evaluation = Evaluation {
        sampler,
        tokenizer,
        prompts: PromptFormat::new(&chat),
        params,
        context_length,
        answers: (!args.loss_only).then_some(&scorer),
    };
    let evaluated = evaluation.run(context, &examples, args.concurrency).await?;
    let report = EvalReport::new(args.model, model, file.name.clone(), &scorer, evaluated);
    if let Some(run) = run {
        run.record(context, &report);
    }
    context.table(&report.table(), &report)?;
    match (args.min_score, report.score) {
        (Some(wanted), Some(score)) if score < wanted => {
            let message = format!("score {score:.3} is below --min-score {wanted}");
            Err(CommandError::new(Exit::Failed, message))
        }
        (Some(_), None) => {
            let message = "no score: no example of the file has a prompt to answer";
            Err(CommandError::new(Exit::Failed, message))
        }
        _ => Ok(Exit::Success),
    }
}

/// Evaluated checkpoint of a run whose folder is on this machine.
struct EvaluatedRun {
    folder: LocalRun,
    checkpoint: TinkerPath,
}

/// Returns the run of an evaluated checkpoint, if its folder is on this machine.
fn find_run(context: &CommandContext<'_>, model: &str) -> Option<EvaluatedRun> {
    let checkpoint: TinkerPath = model.parse().ok()?;
    let environment = &*context.environment;
    let folder = folder_of_checkpoint(&environment.variables, &environment.folder, &checkpoint)?;
    Some(EvaluatedRun { folder, checkpoint })
}

impl EvaluatedRun {
    /// Adds the result to the run folder. A folder that cannot be written is no error: the result is
    /// printed anyway.
    fn record(&self, context: &mut CommandContext<'_>, report: &EvalReport) {
        let line = report.line(self.checkpoint.clone());
        if let Err(error) = RunFolder::add_evaluation(&self.folder.path, &line) {
            context.notice(&format!("warning: {error}"));
        }
    }
}

/// Evaluation of a model on examples.
struct Evaluation<'a> {
    sampler: SamplingClient,
    tokenizer: Tokenizer,
    prompts: PromptFormat,
    params: SamplingParams,
    context_length: Option<usize>,
    /// Scores answers; `None` computes the loss only.
    answers: Option<&'a AnswerScorer>,
}

impl Evaluation<'_> {
    /// Evaluates the examples, at most `concurrency` at the same time. Returns the results in order.
    async fn run(
        &self,
        context: &CommandContext<'_>,
        examples: &[EvalExample],
        concurrency: usize,
    ) -> Result<Vec<EvaluatedExample>, CommandError> {
        let total = u64::try_from(examples.len()).ok();
        let progress = Progress::new(context, "Evaluating", ProgressUnit::Items, total);
        let progress = &progress;
        let numbered = examples.iter().enumerate();
        stream::iter(numbered)
            .map(|(index, example)| async move {
                let evaluated = self.evaluate(index + 1, example).await;
                progress.advance(1);
                evaluated
            })
            .buffered(concurrency)
            .try_collect()
            .await
    }

    async fn evaluate(
        &self,
        number: usize,
        example: &EvalExample,
    ) -> Result<EvaluatedExample, CommandError> {
        let logprobs = self.sampler.compute_logprobs(example.tokens.clone());
        let logprobs = logprobs.map_err(CommandError::from);
        let answer = self.answers.filter(|_| example.has_prompt());
        let answer = OptionFuture::from(answer.map(|scorer| self.answer(example, scorer)));
        let (logprobs, answer) = try_join(logprobs, async { answer.await.transpose() }).await?;
        let loss = example.loss(&logprobs)?;
        let tokens = example.learned();
        let weight = example.weight;
        Ok(EvaluatedExample { number, tokens, loss, weight, answer })
    }

    /// Generates the answer to the prompt of an example and scores it.
    async fn answer(
        &self,
        example: &EvalExample,
        scorer: &AnswerScorer,
    ) -> Result<EvaluatedAnswer, CommandError> {
        let prompt = example.prompt();
        let mut params = self.params.clone();
        if let Some(room) = self.context_length.map(|length| length.saturating_sub(prompt.len())) {
            let room = u32::try_from(room).unwrap_or(u32::MAX);
            params.max_tokens = params.max_tokens.map(|tokens| tokens.min(room));
        }
        let response = self.sampler.sample(prompt.clone(), params).await?;
        let Some(sampled) = response.sequences.first() else {
            return Err(CommandError::new(Exit::Failed, "the server returned no answer"));
        };
        let text = |tokens: &[u32]| self.tokenizer.decode_text(tokens).map_err(CommandError::from);
        let mut answer = EvaluatedAnswer {
            prompt: self.prompts.last_message(&self.tokenizer, &prompt)?,
            expected: text(example.expected())?,
            answer: text(&sampled.tokens)?,
            stop_reason: sampled.stop_reason.as_str(),
            score: 0.0,
        };
        answer.score = scorer.score(&answer).await?;
        Ok(answer)
    }
}
