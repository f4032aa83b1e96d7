//! `tinkex sample`: generates text. Standard output contains only the text.

use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;
use serde_json::json;
use tinkex::{
    SampleOptions, SampleResponse, SampleStream, SampleStreamOptions, SampledSequence,
    SamplingParams, StopCondition, StopReason, StreamedToken, Tokenizer,
};

use crate::args::{positive, whole_number};
use crate::context::CommandContext;
use crate::error::CommandError;
use crate::format;
use crate::output::to_json_line;
use crate::table::Table;

use super::prompt::{PromptArgs, PromptSource};
use super::weights::WeightsArgs;

/// Arguments of `tinkex sample`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tinkex sample --local --prompt 'Once upon a time'             continue a text
  tinkex sample --local --chat --prompt 'What does a cow say?'  ask a question
  tinkex sample Qwen/Qwen3-8B -p 'Two words:' --num-samples 4   generate several samples
  tinkex sample tinker://RUN/sampler_weights/final -p Hello --json
  tinkex sample animals --prompt-file question.txt --output answer.txt
  tinkex sample --local --prompt 'Once upon a time' --stream    print tokens as they are sampled
  echo Hello | tinkex sample --local                            read the prompt from a pipe")]
pub(crate) struct SampleArgs {
    #[command(flatten)]
    weights: WeightsArgs,
    #[command(flatten)]
    prompt: PromptArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// Number of samples
    #[arg(short, long, value_name = "N", default_value_t = 1, value_parser = positive::<u32>)]
    num_samples: u32,
    /// Print the log-probability of each token instead of the text
    #[arg(long)]
    logprobs: bool,
    /// Also print the K most likely tokens at each position
    #[arg(long, value_name = "K", default_value_t = 0, value_parser = whole_number::<u32>)]
    topk_logprobs: u32,
    /// Write the result to this file
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Print the text while it is sampled; with --json, one line per token
    #[arg(long, conflicts_with_all = ["num_samples", "logprobs", "topk_logprobs", "output"])]
    stream: bool,
}

/// Sampling parameters.
#[derive(Clone, Debug, Args)]
pub(crate) struct SamplingArgs {
    /// Maximum number of tokens to generate
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = positive::<u32>)]
    pub(crate) max_tokens: u32,
    /// Sampling temperature; 0 always takes the most likely token [default: 1, for chat 0.7, for
    /// eval 0]
    #[arg(short, long, value_name = "T", allow_negative_numbers = true, value_parser = temperature)]
    temperature: Option<f64>,
    /// Sample from the K most likely tokens only
    #[arg(long, value_name = "K", value_parser = whole_number::<u32>)]
    pub(crate) top_k: Option<u32>,
    /// Sample from the most likely tokens with this total probability only
    #[arg(long, value_name = "P", default_value_t = 1.0, allow_negative_numbers = true, value_parser = probability)]
    pub(crate) top_p: f64,
    /// Seed for reproducible samples
    #[arg(long, value_name = "N", value_parser = whole_number::<u64>)]
    pub(crate) seed: Option<u64>,
    /// Stop at this text; repeatable
    #[arg(long = "stop", value_name = "TEXT")]
    pub(crate) stop: Vec<String>,
}

/// Default temperature of answers in a chat.
pub(crate) const CHAT_TEMPERATURE: f64 = 0.7;

fn temperature(text: &str) -> Result<f64, String> {
    let parsed = text.parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0);
    parsed.ok_or_else(|| "expected a number of at least 0".to_owned())
}

fn probability(text: &str) -> Result<f64, String> {
    let parsed = text.parse().ok().filter(|number: &f64| *number > 0.0 && *number <= 1.0);
    parsed.ok_or_else(|| "expected a number above 0 and at most 1".to_owned())
}

impl SamplingArgs {
    pub(crate) fn params(&self, default_temperature: f64) -> SamplingParams {
        let mut params = SamplingParams::new()
            .max_tokens(self.max_tokens)
            .temperature(self.temperature.unwrap_or(default_temperature))
            .top_p(self.top_p);
        params.top_k = self.top_k;
        params.seed = self.seed;
        params.stop = (!self.stop.is_empty()).then(|| StopCondition::Texts(self.stop.clone()));
        params
    }
}

#[derive(Serialize)]
struct SampleReport<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    model: &'a str,
    prompt_tokens: Option<usize>,
    sequences: Vec<SequenceReport<'a>>,
}

#[derive(Serialize)]
struct SequenceReport<'a> {
    text: Option<String>,
    tokens: &'a [u32],
    stop_reason: &'static str,
    logprobs: Option<Vec<Option<f32>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    topk_logprobs: Option<Vec<Vec<(u32, f32)>>>,
}

/// Line of `--stream --json`.
#[derive(Serialize)]
struct TokenReport<'a> {
    token: u32,
    text: &'a str,
    logprob: Option<f32>,
    stop_reason: Option<&'static str>,
}

pub(super) async fn run(
    context: &mut CommandContext<'_>,
    mut args: SampleArgs,
) -> Result<(), CommandError> {
    let source = args.prompt.read(context).await?;
    let service = args.weights.connect(context).await?;
    context.announce_dashboard();
    let (sampler, model) = args.weights.open(context, &service).await?;
    // Token ids can be sampled and printed without a tokenizer.
    let tokenizer = args.weights.tokenizer(&context.environment.variables, &sampler).await;
    let tokenizer = match (&source, tokenizer) {
        (PromptSource::Tokens(_), Err(_)) => None,
        (_, tokenizer) => Some(tokenizer?),
    };
    let missing = || CommandError::usage("no tokenizer to encode the prompt");
    let input =
        args.prompt.input(context.environment, source, || tokenizer.clone().ok_or_else(missing))?;
    let default_temperature = if args.prompt.is_chat() { CHAT_TEMPERATURE } else { 1.0 };
    let mut params = args.sampling.params(default_temperature);
    if args.prompt.is_chat()
        && params.stop.is_none()
        && let Some(tokenizer) = &tokenizer
    {
        params.stop = Some(tokenizer.chat()?.stop()?);
    }
    if args.stream {
        let has_text = tokenizer.is_some();
        let options = SampleStreamOptions::new(params);
        let options = match tokenizer {
            Some(tokenizer) => options.tokenizer(tokenizer),
            None => options.without_text(),
        };
        return print_stream(context, sampler.sample_stream(input, options), has_text).await;
    }
    let prompt_tokens = input.token_count();
    let mut options = SampleOptions::new(params).num_samples(args.num_samples);
    if args.topk_logprobs > 0 {
        options = options.topk_sample_logprobs(args.topk_logprobs);
    }
    let response = sampler.sample(input, options).await?;

    let document = SampleReport {
        kind: "sample",
        model: &model,
        prompt_tokens,
        sequences: response.sequences.iter().map(|one| sequence(one, tokenizer.as_ref())).collect(),
    };
    if let Some(path) = &args.output {
        write(context, path, &document)?;
        let json = json!({ "output": path, "model": model, "sequences": document.sequences.len() });
        return context.confirm_change(&format!("wrote {}", path.display()), &json);
    }
    if args.logprobs || args.topk_logprobs > 0 {
        return context.table(&table(&response, tokenizer.as_ref()), &document);
    }
    if context.is_json() {
        return context.text("", &document);
    }
    let count = document.sequences.len();
    for (at, sequence) in document.sequences.iter().enumerate() {
        if count > 1 {
            context.notice(&format!("--- sample {} of {count}", at + 1));
        }
        context.write_text(&(text_or_ids(sequence) + "\n"))?;
    }
    Ok(())
}

/// Prints the tokens of a completion while they are sampled.
async fn print_stream(
    context: &mut CommandContext<'_>,
    mut stream: SampleStream,
    has_text: bool,
) -> Result<(), CommandError> {
    let mut separator = "";
    while let Some(token) = stream.next().await {
        let StreamedToken { token, text, logprob, stop_reason, .. } = token?;
        if context.is_json() {
            let stop_reason = stop_reason.map(StopReason::as_str);
            let line = TokenReport { token, text: &text, logprob, stop_reason };
            context.write(&to_json_line(&line)?)?;
        } else if !has_text {
            context.write(&format!("{}{token}", std::mem::replace(&mut separator, ",")))?;
        } else if !text.is_empty() {
            context.write_text(&text)?;
        }
    }
    if context.is_json() { Ok(()) } else { context.write("\n") }
}

/// Returns the text, or the token ids if there is no tokenizer.
fn text_or_ids(sequence: &SequenceReport<'_>) -> String {
    let ids = || sequence.tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    sequence.text.clone().unwrap_or_else(ids)
}

fn sequence<'a>(one: &'a SampledSequence, tokenizer: Option<&Tokenizer>) -> SequenceReport<'a> {
    let rows = |top: &tinkex::TopkLogprobs| {
        top.rows().map(|row| row.map(Iterator::collect).unwrap_or_default()).collect()
    };
    SequenceReport {
        text: tokenizer.and_then(|tokenizer| tokenizer.decode_text(&one.tokens).ok()),
        tokens: &one.tokens,
        stop_reason: one.stop_reason.as_str(),
        logprobs: one.logprobs.as_ref().map(|all| all.iter().collect()),
        topk_logprobs: one.topk_logprobs.as_ref().map(rows),
    }
}

/// Returns a table with one row per token.
fn table(response: &SampleResponse, tokenizer: Option<&Tokenizer>) -> Table {
    let mut table = Table::new(["Sample", "Token", "Text", "Logprob", "Most Likely"]);
    for (number, one) in response.sequences.iter().enumerate() {
        for (at, token) in one.tokens.iter().enumerate() {
            let logprob = one.logprobs.as_ref().and_then(|all| all.get(at));
            let top = one.topk_logprobs.as_ref().and_then(|top| top.row(at));
            let top = top
                .into_iter()
                .flatten()
                .map(|(token, logprob)| format!("{} {logprob:.2}", quoted_token(tokenizer, token)));
            table.row([
                (number + 1).to_string(),
                token.to_string(),
                quoted_token(tokenizer, *token),
                format::or_na(logprob.map(|logprob| format!("{logprob:.4}"))),
                top.collect::<Vec<_>>().join("  "),
            ]);
        }
    }
    table
}

/// Returns the text of a token in quotes, or its id in angle brackets.
pub(crate) fn quoted_token(tokenizer: Option<&Tokenizer>, token: u32) -> String {
    let text = tokenizer.and_then(|tokenizer| token_text(tokenizer, token));
    text.map_or_else(|| format!("<{token}>"), |text| format!("{text:?}"))
}

/// Returns the text of a token. Bytes that are not UTF-8 are replaced by U+FFFD.
pub(crate) fn token_text(tokenizer: &Tokenizer, token: u32) -> Option<String> {
    let bytes = tokenizer.token_bytes(token)?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

fn write(
    context: &CommandContext<'_>,
    path: &Path,
    document: &SampleReport<'_>,
) -> Result<(), CommandError> {
    let text = if context.is_json() {
        serde_json::to_string_pretty(document).unwrap_or_default() + "\n"
    } else {
        document.sequences.iter().map(|one| text_or_ids(one) + "\n").collect()
    };
    tinkex_files::write(context.environment.path(path), text)
        .map_err(|error| CommandError::file("write", path.display(), &error))
}
