//! All of it in one go: a server in this process, a model that learns to talk like a pirate, and
//! what it says before and after.

mod curve;

use std::io::Cursor;

use clap::Args;
use serde::Serialize;
use tinkex::{Chat, Message, SamplingClient, SamplingParams, SaveOptions, TooLong, TrainingClient};

use crate::error::{CommandError, Exit};
use crate::format;
use crate::output::Shell;

use super::train::chat_line;
use super::train::data::TrainExample;
use super::train::pipeline::{Pipeline, TrainEvent};
use super::train::plan::{Schedule, TrainPlan};
use super::train::progress::{TrainProgress, thousands};

/// What it is taught: short answers, each with an odd end.
const TAUGHT: &str = include_str!("../../../data/pirate.jsonl");
/// The same for questions that it is never taught.
const HELD_OUT: &str = include_str!("../../../data/pirate-held-out.jsonl");
/// What it is asked before and after, and whether that is among what it is taught.
const PROMPTS: [(&str, bool); 4] = [
    ("What does a lion say?", false),
    ("Which day comes after Friday?", false),
    ("Who are you?", true),
    ("Where do you live?", true),
];

/// What can be typed after `quickstart`.
#[derive(Debug, Args)]
#[command(after_help = "\
It needs no key, no network and no GPU. The checkpoint stays in the folder that --local uses.

Examples:
  tinkex quickstart              under a minute, with a curve and samples
  tinkex quickstart --json       the figures for a program")]
pub(crate) struct QuickstartArgs {
    /// How many steps to train
    #[arg(long, value_name = "N", default_value_t = 70, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
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
    /// Whether the prompt is among what it was taught.
    taught: bool,
    #[serde(flatten)]
    said: BeforeAfter<String>,
}

pub(super) async fn run(
    shell: &mut Shell<'_>,
    command: QuickstartArgs,
) -> Result<(), CommandError> {
    let globals = &shell.globals;
    if globals.base_url.is_some() || globals.api_key.is_some() || globals.api_key_file.is_some() {
        return Err(CommandError::usage("quickstart brings its own server and needs no key")
            .hint("leave the other options out; to train elsewhere: tinkex train FILE.jsonl"));
    }
    shell.settings.local = true;
    let service = shell.client().await?;
    let url = service.base_url().to_string();
    shell.notice(&format!("a Tinker server runs inside this program: {url}"));

    let base = service.create_sampling_client(tinkex_server::BUILT_IN).await?;
    let chat = base.tokenizer().await?.chat()?;
    let before = ask(&base, &chat).await?;
    let (train, eval) = (examples(&chat, TAUGHT)?, examples(&chat, HELD_OUT)?);
    let (count, steps) = (train.len(), command.steps);
    shell.notice(&format!(
        "teaching {} to talk like a pirate: {count} examples, {steps} steps",
        tinkex_server::BUILT_IN
    ));
    let new = service.create_lora_training_client(tinkex_server::BUILT_IN).rank(16).seed(0);
    let model = new.create().await?;
    let figures = teach(shell, &model, (train, eval), steps).await?;

    let checkpoint = model.save_state(SaveOptions::new("quickstart")).await?;
    let sampler = model.save_weights_for_sampler(SaveOptions::new("quickstart")).await?;
    let after = ask(&service.create_sampling_client_from(&sampler).await?, &chat).await?;
    let both = before.into_iter().zip(after);
    let samples = PROMPTS.iter().zip(both).map(|((prompt, taught), (before, after))| {
        PromptComparison { prompt, taught: *taught, said: BeforeAfter { before, after } }
    });
    let document = QuickstartReport {
        model: tinkex_server::BUILT_IN,
        base_url: url,
        examples: count,
        steps,
        tokens: figures.tokens,
        seconds: figures.seconds,
        tokens_per_second: figures.speed,
        losses: figures.losses,
        held_out_loss: figures.held_out,
        samples: samples.collect(),
        run_id: model.model_id().to_string(),
        checkpoint: checkpoint.to_string(),
        sampler: sampler.to_string(),
    };
    let text = document.text(shell);
    shell.text(&text, &document)
}

/// Examples that are part of the program.
fn examples(chat: &Chat, text: &'static str) -> Result<Vec<TrainExample>, CommandError> {
    let lines = chat.read_jsonl(Cursor::new(text)).max_tokens(256, TooLong::Reject);
    let piece = |line: Result<tinkex::Datum, tinkex::JsonlError>| match line {
        Ok(datum) => Ok(TrainExample::new(datum)),
        Err(bad) => Err(CommandError::new(Exit::Failed, format!("the bundled examples: {bad}"))),
    };
    lines.map(piece).collect()
}

/// What a model says to every prompt, always the likeliest.
async fn ask(sampler: &SamplingClient, chat: &Chat) -> Result<Vec<String>, CommandError> {
    let params = SamplingParams::new().max_tokens(48).temperature(0.0).stop(chat.stop()?);
    let calls = PROMPTS.iter().map(|(prompt, _)| {
        let input = chat.prompt(&[Message::user(*prompt)])?;
        Ok::<_, tinkex::Error>(sampler.sample(input, params.clone()).send())
    });
    // All are asked before the first answer is waited for.
    let calls: Vec<_> = calls.collect::<Result<_, _>>()?;
    let mut said = Vec::new();
    for call in calls {
        let answer = call.await?;
        let tokens = answer.sequences.first().map(|one| one.tokens.clone()).unwrap_or_default();
        said.push(chat.tokenizer().decode_text(&tokens)?.trim().to_owned());
    }
    Ok(said)
}

struct Figures {
    losses: Vec<f64>,
    held_out: BeforeAfter<f64>,
    tokens: usize,
    seconds: f64,
    speed: f64,
}

async fn teach(
    shell: &mut Shell<'_>,
    model: &TrainingClient,
    parts: (Vec<TrainExample>, Vec<TrainExample>),
    steps: u64,
) -> Result<Figures, CommandError> {
    let plan = TrainPlan {
        examples: parts.0.len(),
        batch_size: 16,
        steps,
        seed: 0,
        learning_rate: 3e-3,
        schedule: Schedule::Linear,
        warmup: 0,
    };
    let mut show = TrainProgress::new(steps, 0);
    show.draw(shell, 0);
    let interrupt = shell.environment.interrupt.clone();
    let mut work = Pipeline::new(model.clone(), plan, parts, interrupt, 0);
    let (mut losses, mut held_out, mut tokens) = (Vec::new(), Vec::new(), 0);
    loop {
        match work.next().await? {
            Some(TrainEvent::Step(done)) => {
                losses.push(done.loss);
                tokens += done.tokens;
                show.stepped(shell, done.step, done.tokens, done.loss);
            }
            Some(TrainEvent::Evaluated { loss, .. }) => held_out.push(loss),
            Some(TrainEvent::Saved { .. } | TrainEvent::Stopping) => {}
            None => break,
        }
    }
    show.clear(shell);
    let (before, after) = match held_out[..] {
        [before, .., after] => (before, after),
        _ => (f64::NAN, f64::NAN),
    };
    let held_out = BeforeAfter { before, after };
    Ok(Figures { losses, held_out, tokens, seconds: show.seconds(), speed: show.speed() })
}

impl QuickstartReport {
    fn text(&self, shell: &Shell<'_>) -> String {
        let columns = shell.environment.terminals.out.unwrap_or(80);
        let mut text = format!("Loss, step by step\n{}", curve::draw(&self.losses, columns));
        text += &format!(
            "{} steps in {}, {} tokens/s. On questions it was never taught, the loss fell from \
             {:.2} to {:.2}.\n",
            self.steps,
            format::seconds(self.seconds),
            thousands(self.tokens_per_second),
            self.held_out_loss.before,
            self.held_out_loss.after,
        );
        for sample in &self.samples {
            let new = if sample.taught { "" } else { "   (never taught)" };
            text += &format!(
                "\n{}{new}\n  before  {}\n  after   {}\n",
                sample.prompt,
                format::visible(&sample.said.before),
                format::visible(&sample.said.after),
            );
        }
        text += &format!(
            "\nSaved as {}\n\nGo on from here:\n  {}\n      talk to it\n  \
             tinkex train YOUR.jsonl --local\n      teach it something of your own\n  \
             tinkex serve\n      a server for your own programs, in Rust or Python: \
             export TINKER_BASE_URL=http://127.0.0.1:8080 TINKER_API_KEY=tml-local",
            self.checkpoint,
            chat_line(shell, &self.sampler),
        );
        text
    }
}
