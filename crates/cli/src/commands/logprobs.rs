//! `tinkex logprobs`: log-probabilities of the tokens of a text.

use clap::Args;
use serde::Serialize;

use crate::context::CommandContext;
use crate::error::CommandError;
use crate::format;
use crate::table::{Table, TableCell};

use super::prompt::PromptArgs;
use super::sample::{quoted_token, token_text};
use super::weights::WeightsArgs;

/// Arguments of `tinkex logprobs`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tinkex logprobs --local --prompt 'The cat says meow.'
  tinkex logprobs Qwen/Qwen3-8B --prompt-file page.txt --json")]
pub(crate) struct LogprobsArgs {
    #[command(flatten)]
    weights: WeightsArgs,
    #[command(flatten)]
    prompt: PromptArgs,
}

#[derive(Serialize)]
struct LogprobsReport<'a> {
    model: &'a str,
    tokens: Vec<ScoredToken>,
    logprob_sum: f64,
    logprob_mean: Option<f64>,
    perplexity: Option<f64>,
}

#[derive(Serialize)]
struct ScoredToken {
    id: u32,
    /// Text of the token; `None` if the tokenizer does not have it.
    text: Option<String>,
    /// `None` for the first token, which has no preceding tokens.
    logprob: Option<f32>,
}

pub(super) async fn run(
    context: &mut CommandContext<'_>,
    mut args: LogprobsArgs,
) -> Result<(), CommandError> {
    let source = args.prompt.read(context).await?;
    let service = args.weights.connect(context).await?;
    let (sampler, model) = args.weights.open(context, &service).await?;
    let tokenizer = args.weights.tokenizer(&context.environment.variables, &sampler).await?;
    let input = args.prompt.input(context.environment, source, || Ok(tokenizer.clone()))?;
    let Some(ids) = input.to_tokens() else {
        return Err(
            CommandError::usage("cannot compute log-probabilities of images").hint("Omit --image.")
        );
    };
    let logprobs = sampler.compute_logprobs(input).await?;
    let tokens: Vec<ScoredToken> = ids
        .iter()
        .enumerate()
        .map(|(at, id)| ScoredToken {
            id: *id,
            text: token_text(&tokenizer, *id),
            logprob: logprobs.get(at),
        })
        .collect();
    let known: Vec<f64> = tokens.iter().filter_map(|token| token.logprob).map(f64::from).collect();
    let logprob_sum = known.iter().sum();
    #[expect(clippy::cast_precision_loss, reason = "a count of tokens")]
    let logprob_mean = (!known.is_empty()).then(|| known.iter().sum::<f64>() / known.len() as f64);
    let perplexity = logprob_mean.map(|mean| (-mean).exp());
    let report = LogprobsReport { model: &model, tokens, logprob_sum, logprob_mean, perplexity };
    let mut table = Table::new(["Token", "Text", "Logprob"]).title(format!(
        "{}, sum {logprob_sum:.3}, perplexity {}",
        format::count(report.tokens.len(), "token"),
        format::or_na(perplexity.map(|perplexity| format!("{perplexity:.3}"))),
    ));
    for token in &report.tokens {
        let logprob = format::or_na(token.logprob.map(|logprob| format!("{logprob:.4}")));
        let value = token.logprob.map(|logprob| logprob.to_string()).unwrap_or_default();
        let quoted = quoted_token(Some(&tokenizer), token.id);
        table.row([
            TableCell::from(token.id.to_string()),
            TableCell::with_value(quoted, token.text.as_deref().unwrap_or_default()),
            TableCell::with_value(logprob, value),
        ]);
    }
    context.table(&table, &report)
}
