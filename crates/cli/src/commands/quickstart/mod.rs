//! `tinkex quickstart`: fine-tunes the built-in model on bundled examples, with a server in this
//! process, and compares its responses before and after.

mod rl;

use std::io::Cursor;

use clap::Args;
use serde::Serialize;
use tinkex::{
    Chat, LoraOptions, Message, ModelInput, SamplingClient, SamplingParams, SaveOptions,
    ServiceClient, TooLong, TrainingClient,
};
use tinkex_recipes::{Schedule, TrainEvent, TrainExample, TrainLoop, TrainPlan};

use crate::args::positive;
use crate::context::CommandContext;
use crate::error::{CommandError, Exit};
use crate::format;
use crate::inference_endpoints::curl_chat;
use crate::local;
use crate::reference::{RunName, choose_name, run_metadata};
use crate::style::{BOLD, GREEN, RED};

use super::plot;
use super::training::progress::{TrainProgress, thousands};

/// Training data: short answers in the voice of a pirate.
const TRAINING_DATA: &str = include_str!("../../../data/pirate.jsonl");
/// Evaluation data: questions that are not in the training data.
const HELD_OUT_DATA: &str = include_str!("../../../data/pirate-held-out.jsonl");
/// Prompts for the comparison, and whether they are in the training data.
const PROMPTS: [(&str, bool); 4] = [
    ("What does a lion say?", false),
    ("Which day comes after Friday?", false),
    ("Who are you?", true),
    ("Where do you live?", true),
];

/// Default number of steps.
const STEPS: u64 = 70;
/// Default number of steps of reinforcement learning.
const RL_STEPS: u64 = 30;

/// Base URL of `tinkex serve` without options.
const SERVE_URL: &str = "http://127.0.0.1:8080";

/// Arguments of `tinkex quickstart`.
#[derive(Debug, Args)]
#[command(after_help = "\
Needs no key, no network and no GPU. The checkpoint is stored on this machine and is available to
other commands with --local.

Examples:
  tinkex quickstart              plot the loss and compare responses
  tinkex quickstart --rl         reinforcement learning, in about a minute
  tinkex quickstart --json       print the metrics and responses as JSON")]
pub(crate) struct QuickstartArgs {
    /// Train by reinforcement learning instead, with a reward for a word in stories
    #[arg(long)]
    rl: bool,
    /// Number of training steps [default: 70, with --rl 30]
    #[arg(long, value_name = "N", value_parser = positive::<u64>)]
    steps: Option<u64>,
}

#[derive(Serialize)]
struct QuickstartReport {
    model: &'static str,
    base_url: String,
    examples: usize,
    steps: u64,
    tokens: usize,
    seconds: f64,
    tokens_per_second: f64,
    losses: Vec<f64>,
    held_out_loss: BeforeAfter<f64>,
    samples: Vec<PromptComparison>,
    name: String,
    run_id: String,
    checkpoint: String,
    sampler: String,
}

#[derive(Serialize)]
struct BeforeAfter<T> {
    before: T,
    after: T,
}

#[derive(Serialize)]
struct PromptComparison {
    prompt: &'static str,
    /// Whether the prompt is in the training data.
    taught: bool,
    #[serde(flatten)]
    response: BeforeAfter<String>,
}

pub(super) async fn run(
    context: &mut CommandContext<'_>,
    args: QuickstartArgs,
) -> Result<(), CommandError> {
    let globals = &context.globals;
    if globals.base_url.is_some() || globals.api_key.is_some() || globals.api_key_file.is_some() {
        return Err(CommandError::usage("quickstart runs its own server and needs no API key").hint(
            "Omit --base-url and the API key. To train on another server: tinkex train FILE.jsonl",
        ));
    }
    context.settings.local = true;
    let service = context.client().await?;
    let url = service.base_url().to_string();
    context.notice(&format!("Tinker server for this command: {url}"));
    context.announce_dashboard();

    if args.rl {
        return rl::run(context, &service, args.steps.unwrap_or(RL_STEPS)).await;
    }
    let base = service.create_sampling_client(tinkex_server::BUILT_IN).await?;
    let chat = base.tokenizer().await?.chat()?;
    let params = SamplingParams::new().max_tokens(48).temperature(0.0).stop(chat.stop()?);
    let prompts = PROMPTS.iter().map(|(prompt, _)| chat.prompt(&[Message::user(*prompt)]));
    let prompts: Vec<ModelInput> = prompts.collect::<Result<_, _>>()?;
    let before = respond(&base, &chat, prompts.clone(), &params).await?;
    let train = examples(&chat, TRAINING_DATA)?;
    let eval = examples(&chat, HELD_OUT_DATA)?;
    let count = train.len();
    let steps = args.steps.unwrap_or(STEPS);
    context.notice(&format!(
        "Fine-tuning {} to talk like a pirate: {count} examples, {}",
        tinkex_server::BUILT_IN,
        format::count(steps, "step")
    ));
    let name = run_name(context, &service, "quickstart").await?;
    let options = LoraOptions::new(tinkex_server::BUILT_IN)
        .rank(16)
        .seed(0)
        .user_metadata(run_metadata(Some(name.as_str())));
    let model = service.create_lora_training_client(options).await?;
    let metrics = train_model(context, &model, (train, eval), steps).await?;

    let checkpoint = model.save_state(SaveOptions::new("quickstart")).await?;
    let sampler = model.save_weights_for_sampler(SaveOptions::new("quickstart")).await?;
    let tuned = service.create_sampling_client_from(&sampler).await?;
    let after = respond(&tuned, &chat, prompts, &params).await?;
    let responses = before.into_iter().zip(after);
    let samples = PROMPTS.iter().zip(responses).map(|((prompt, taught), (before, after))| {
        PromptComparison { prompt, taught: *taught, response: BeforeAfter { before, after } }
    });
    let report = QuickstartReport {
        model: tinkex_server::BUILT_IN,
        base_url: url,
        examples: count,
        steps,
        tokens: metrics.tokens,
        seconds: metrics.seconds,
        tokens_per_second: metrics.tokens_per_second,
        losses: metrics.losses,
        held_out_loss: metrics.held_out,
        samples: samples.collect(),
        name: name.to_string(),
        run_id: model.model_id().to_string(),
        checkpoint: checkpoint.to_string(),
        sampler: sampler.to_string(),
    };
    let text = report.text(context);
    // Separates the notices from the result on a terminal.
    context.notice("");
    context.styled_text(&text, &report)
}

/// Chooses the name of the run: `wanted`, or `wanted` with a number.
async fn run_name(
    context: &CommandContext<'_>,
    service: &ServiceClient,
    wanted: &str,
) -> Result<RunName, CommandError> {
    let default = RunName::of_file(wanted.as_ref());
    choose_name(context, service, None, &default, |_| false).await
}

/// Encodes bundled examples.
fn examples(chat: &Chat, text: &'static str) -> Result<Vec<TrainExample>, CommandError> {
    let lines = chat.read_jsonl(Cursor::new(text)).max_tokens(256, TooLong::Reject);
    let encode = |line: Result<tinkex::Datum, tinkex::JsonlError>| match line {
        Ok(datum) => Ok(TrainExample::new(datum)),
        Err(error) => {
            let message = format!("cannot read the bundled examples: {error}");
            Err(CommandError::new(Exit::Failed, message))
        }
    };
    lines.map(encode).collect()
}

/// Returns a model's response to every prompt.
async fn respond(
    sampler: &SamplingClient,
    chat: &Chat,
    prompts: Vec<ModelInput>,
    params: &SamplingParams,
) -> Result<Vec<String>, CommandError> {
    let requests = prompts.into_iter().map(|prompt| sampler.sample(prompt, params));
    // Submit all requests before awaiting the first, so that the server batches them.
    let requests: Vec<_> = requests.collect();
    let mut responses = Vec::new();
    for request in requests {
        let response = request.await?;
        let tokens = response.sequences.first().map(|one| one.tokens.clone()).unwrap_or_default();
        responses.push(chat.tokenizer().decode_text(&tokens)?.trim().to_owned());
    }
    Ok(responses)
}

/// Metrics of the training run.
struct QuickstartMetrics {
    losses: Vec<f64>,
    held_out: BeforeAfter<f64>,
    tokens: usize,
    seconds: f64,
    tokens_per_second: f64,
}

async fn train_model(
    context: &mut CommandContext<'_>,
    model: &TrainingClient,
    data: (Vec<TrainExample>, Vec<TrainExample>),
    steps: u64,
) -> Result<QuickstartMetrics, CommandError> {
    let plan = TrainPlan {
        examples: data.0.len(),
        batch_size: 16,
        steps,
        seed: 0,
        learning_rate: 3e-3,
        schedule: Schedule::Linear,
        warmup: 0,
    };
    let mut progress = TrainProgress::new(context, steps, 0);
    let mut training = TrainLoop::new(model.clone(), plan, data.0).eval(data.1);
    let mut losses = Vec::new();
    let mut held_out = Vec::new();
    let mut tokens = 0;
    while let Some(event) = training.next().await? {
        match event {
            TrainEvent::Step(result) => {
                losses.push(result.loss);
                tokens += result.tokens;
                progress.finish_step(context, result.step, result.tokens, result.loss);
            }
            TrainEvent::Evaluated(result) => held_out.push(result.loss),
            _ => {}
        }
    }
    progress.clear(context);
    let (before, after) = match held_out[..] {
        [before, .., after] => (before, after),
        _ => (f64::NAN, f64::NAN),
    };
    Ok(QuickstartMetrics {
        losses,
        held_out: BeforeAfter { before, after },
        tokens,
        seconds: progress.seconds(),
        tokens_per_second: progress.tokens_per_second(),
    })
}

impl QuickstartReport {
    fn text(&self, context: &CommandContext<'_>) -> String {
        let bold = |text: &str| context.style().paint(BOLD, text);
        let held_out = &self.held_out_loss;
        let mut text = format!(
            "{}\n{}{} in {}, {} tokens/s; held-out loss {:.2} → {:.2}\n\n{}\n",
            bold("Training loss"),
            plot::draw_numbers(context, "loss per token", &self.losses),
            format::count(self.steps, "step"),
            format::short_duration(self.seconds),
            thousands(self.tokens_per_second),
            held_out.before,
            held_out.after,
            bold("Responses before and after fine-tuning"),
        );
        for sample in &self.samples {
            let note = if sample.taught { "" } else { "  (not in the training data)" };
            text += &format!(
                "  {}{note}\n    {}  {}\n    {}   {}\n",
                sample.prompt,
                context.style().paint(RED, "before"),
                format::escape_controls(&sample.response.before),
                context.style().paint(GREEN, "after"),
                format::escape_controls(&sample.response.after),
            );
        }
        let flags = context.server_flags();
        let data = local::data_folder(&context.environment.variables);
        let key_file = data.ok().map(tinkex_server::api_key_file);
        text += &format!(
            "\n{}\n  # Chat with the fine-tuned model\n  tinkex chat {}{flags}\n  \
             # Fine-tune on your own data\n  tinkex train YOUR.jsonl{flags}\n  \
             # Serve the model to your own programs and to OpenAI and Anthropic clients\n  \
             tinkex serve --alias pirate={}\n  \
             # Send it a message, while it is served\n  {}",
            bold("Next steps"),
            self.name,
            self.sampler,
            curl_chat(SERVE_URL, key_file.as_deref(), "pirate", "Who are you?"),
        );
        text
    }
}
