//! Samples from a model: text alone on standard output.

use std::path::{Path, PathBuf};

use clap::{Args, value_parser};
use serde::Serialize;
use serde_json::json;
use tinkex::{SampleResponse, SampledSequence, SamplingParams, StopCondition, Tokenizer};

use crate::error::CommandError;
use crate::format;
use crate::output::Shell;
use crate::table::Table;

use super::prompt::{PromptArgs, PromptSource};
use super::weights::WeightsArgs;

/// What can be typed after `sample`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tinkex sample --local --prompt 'Once upon a time'            go on with a text
  tinkex sample --local --chat --prompt 'What does a cow say?'  ask a question
  tinkex sample Qwen/Qwen3-8B -p 'Two words:' --num-samples 4   several at once
  tinkex sample tinker://RUN/sampler_weights/final -p Hello --json
  tinkex sample --run RUN_ID --prompt-file question.txt --output answer.txt
  echo Hello | tinkex sample --local                            from a pipe")]
pub(crate) struct SampleArgs {
    #[command(flatten)]
    weights: WeightsArgs,
    #[command(flatten)]
    prompt: PromptArgs,
    #[command(flatten)]
    how: SamplingArgs,
    /// SamplingArgs many samples
    #[arg(short, long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u32).range(1..))]
    num_samples: u32,
    /// SamplingArgs likely each token was, in place of the text
    #[arg(long)]
    logprobs: bool,
    /// The K likeliest tokens at each place as well
    #[arg(long, value_name = "K", default_value_t = 0)]
    topk_logprobs: u32,
    /// Write the result to a file
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// SamplingArgs tokens are drawn.
#[derive(Clone, Debug, Args)]
pub(crate) struct SamplingArgs {
    /// SamplingArgs many tokens at most
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = value_parser!(u32).range(1..))]
    pub(crate) max_tokens: u32,
    /// SamplingArgs daring; 0 always takes the likeliest token [default: 1, in a conversation 0.7]
    #[arg(short, long, value_name = "T", allow_negative_numbers = true, value_parser = temperature)]
    temperature: Option<f64>,
    /// Draw from the K likeliest tokens
    #[arg(long, value_name = "K")]
    pub(crate) top_k: Option<u32>,
    /// Draw from the likeliest tokens that have this much probability together
    #[arg(long, value_name = "P", default_value_t = 1.0, allow_negative_numbers = true, value_parser = share)]
    pub(crate) top_p: f64,
    /// Makes the draw repeatable
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u64>,
    /// Stop at this text; may be repeated
    #[arg(long = "stop", value_name = "TEXT")]
    pub(crate) stop: Vec<String>,
}

fn temperature(text: &str) -> Result<f64, String> {
    let wanted = text.parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0);
    wanted.ok_or_else(|| "give a number that is 0 or more".to_owned())
}

fn share(text: &str) -> Result<f64, String> {
    let wanted = text.parse().ok().filter(|number: &f64| *number > 0.0 && *number <= 1.0);
    wanted.ok_or_else(|| "give a number above 0 and up to 1".to_owned())
}

impl SamplingArgs {
    pub(crate) fn params(&self, chat: bool) -> SamplingParams {
        let usual = if chat { 0.7 } else { 1.0 };
        let mut params = SamplingParams::new()
            .max_tokens(self.max_tokens)
            .temperature(self.temperature.unwrap_or(usual))
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

pub(super) async fn run(shell: &mut Shell<'_>, sample: SampleArgs) -> Result<(), CommandError> {
    let given = sample.prompt.read(shell).await?;
    let service = shell.client().await?;
    let (sampler, model) = sample.weights.open(shell, &service).await?;
    // Tokens go in and out as numbers where no tokenizer is to be had.
    let tokenizer = sample.weights.tokenizer(&shell.environment.variables, &sampler).await;
    let tokenizer = match (&given, tokenizer) {
        (PromptSource::Tokens(_), Err(_)) => None,
        (_, tokenizer) => Some(tokenizer?),
    };
    let missing = || CommandError::usage("there is no tokenizer for the text");
    let input =
        sample.prompt.input(shell.environment, given, || tokenizer.clone().ok_or_else(missing))?;
    let mut params = sample.how.params(sample.prompt.is_chat());
    if let (true, None, Some(tokenizer)) = (sample.prompt.is_chat(), &params.stop, &tokenizer) {
        params.stop = Some(tokenizer.chat()?.stop()?);
    }
    let prompt_tokens = input.token_count();
    let mut call = sampler.sample(input, params).num_samples(sample.num_samples);
    if sample.topk_logprobs > 0 {
        call = call.topk_sample_logprobs(sample.topk_logprobs);
    }
    let answer = call.send().await?;

    let document = SampleReport {
        kind: "sample",
        model: &model,
        prompt_tokens,
        sequences: answer.sequences.iter().map(|one| sequence(one, tokenizer.as_ref())).collect(),
    };
    if let Some(path) = &sample.output {
        write(shell, path, &document)?;
        let json = json!({ "output": path, "model": model, "sequences": document.sequences.len() });
        return shell.done(&format!("written to {}", path.display()), &json);
    }
    if sample.logprobs || sample.topk_logprobs > 0 {
        return shell.table(&table(&answer, tokenizer.as_ref()), &document);
    }
    if shell.is_json() {
        return shell.text("", &document);
    }
    let count = document.sequences.len();
    for (at, sequence) in document.sequences.iter().enumerate() {
        if count > 1 {
            shell.notice(&format!("--- {} of {count}", at + 1));
        }
        let text = shown(sequence);
        // A model must not move the cursor; a file or another program gets what it said.
        let terminal = shell.environment.terminals.out.is_some();
        let text = if terminal { format::visible_lines(&text) } else { text };
        shell.write(&format!("{text}\n"))?;
    }
    Ok(())
}

/// The text, or the tokens where nobody knows it.
fn shown(sequence: &SequenceReport<'_>) -> String {
    let ids = || sequence.tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    sequence.text.clone().unwrap_or_else(ids)
}

fn sequence<'a>(one: &'a SampledSequence, tokenizer: Option<&Tokenizer>) -> SequenceReport<'a> {
    let rows = |top: &tinkex::wire::TopkLogprobs| {
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

/// One row for each token.
fn table(answer: &SampleResponse, tokenizer: Option<&Tokenizer>) -> Table {
    let mut table = Table::new(["Sample", "Token", "Text", "Logprob", "Likeliest"]);
    for (number, one) in answer.sequences.iter().enumerate() {
        for (at, token) in one.tokens.iter().enumerate() {
            let logprob = one.logprobs.as_ref().and_then(|all| all.get(at));
            let top = one.topk_logprobs.as_ref().and_then(|top| top.row(at));
            let top = top
                .into_iter()
                .flatten()
                .map(|(token, logprob)| format!("{} {logprob:.2}", piece(tokenizer, token)));
            table.row([
                (number + 1).to_string(),
                token.to_string(),
                piece(tokenizer, *token),
                format::or_missing(logprob.map(|logprob| format!("{logprob:.4}"))),
                top.collect::<Vec<_>>().join("  "),
            ]);
        }
    }
    table
}

/// One token as text, in quotes so that spaces are seen.
pub(crate) fn piece(tokenizer: Option<&Tokenizer>, token: u32) -> String {
    let bytes = tokenizer.and_then(|tokenizer| tokenizer.token_bytes(token));
    bytes.map_or_else(
        || format!("<{token}>"),
        |bytes| format!("{:?}", String::from_utf8_lossy(&bytes)),
    )
}

fn write(shell: &Shell<'_>, path: &Path, document: &SampleReport<'_>) -> Result<(), CommandError> {
    let text = if shell.is_json() {
        serde_json::to_string_pretty(document).unwrap_or_default() + "\n"
    } else {
        document.sequences.iter().map(|one| shown(one) + "\n").collect()
    };
    tinkex_files::write(shell.environment.path(path), text)
        .map_err(|why| CommandError::file("written", &path.display().to_string(), &why))
}
