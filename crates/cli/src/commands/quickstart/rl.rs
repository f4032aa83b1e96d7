//! `tinkex quickstart --rl`: reinforcement learning of the built-in model.

use serde::Serialize;
use tinkex::{Chat, SamplingClient, SamplingParams, ServiceClient};
use tinkex_recipes::rl::{Completion, Rl};

use crate::context::CommandContext;
use crate::error::{CommandError, Exit};
use crate::format;
use crate::reference::run_metadata;
use crate::style::{BOLD, GREEN, RED};

use crate::commands::plot;
use crate::commands::training::progress::{TrainProgress, thousands};

use super::BeforeAfter;

/// Beginnings of stories to train on.
const BEGINNINGS: [&str; 8] = [
    "Once upon a time",
    "One day",
    "In the morning",
    "There was a",
    "Every evening",
    "Long ago",
    "One night",
    "Near the river",
];
/// Beginnings for the comparison, and whether they are trained on.
const COMPARED: [(&str, bool); 4] = [
    ("Every evening", true),
    ("Near the river", true),
    ("In the garden", false),
    ("One summer day", false),
];
/// Word that a story should mention once.
const WORD: &str = "golden";
/// Maximum number of tokens of a completion.
const MAX_TOKENS: u32 = 32;

#[derive(Serialize)]
struct RlQuickstartReport {
    model: &'static str,
    base_url: String,
    steps: u64,
    completions: usize,
    tokens: usize,
    seconds: f64,
    tokens_per_second: f64,
    rewards: Vec<f64>,
    samples: Vec<StoryComparison>,
    name: String,
    run_id: String,
    checkpoint: Option<String>,
    sampler: Option<String>,
}

#[derive(Serialize)]
struct StoryComparison {
    prompt: &'static str,
    /// Whether the prompt is trained on.
    taught: bool,
    #[serde(flatten)]
    response: BeforeAfter<String>,
}

/// Returns whether the text contains the word exactly once, which is rewarded with 1. If repetitions
/// were rewarded, the model would learn to write nothing but the word.
fn reward(completion: &Completion) -> bool {
    completion.text.matches(WORD).count() == 1
}

pub(super) async fn run(
    context: &mut CommandContext<'_>,
    service: &ServiceClient,
    steps: u64,
) -> Result<(), CommandError> {
    let base = service.create_sampling_client(tinkex_server::BUILT_IN).await?;
    let chat = base.tokenizer().await?.chat()?;
    let before = stories(&base, &chat).await?;
    context.notice(&format!(
        "Training {} to tell stories of something {WORD}: {}; the reward is 1 if the \
         text has the word {WORD:?} once",
        tinkex_server::BUILT_IN,
        format::count(steps, "step")
    ));
    let name = super::run_name(context, service, "quickstart-rl").await?;
    let rl = Rl::new(tinkex_server::BUILT_IN)
        .tokenizer(chat.tokenizer().clone())
        .prompts(BEGINNINGS)
        .reward(reward)
        .groups_per_batch(BEGINNINGS.len())
        .group_size(8)
        .max_tokens(MAX_TOKENS)
        .learning_rate(4e-3)
        // Keeps the sentences intact: the word alone would be enough for the reward.
        .kl_coef(0.1)
        .user_metadata(run_metadata(Some(name.as_str())))
        .steps(steps);
    let mut run = rl.start(service).await?;
    let mut progress = TrainProgress::new(context, steps, 0).label("reward");
    let mut rewards = Vec::new();
    let mut tokens = 0;
    let mut completions = 0;
    while let Some(report) = run.next().await {
        let report = report?;
        rewards.push(report.reward);
        tokens += report.tokens;
        completions += report.rollouts.len();
        progress.finish_step(context, report.step, report.tokens, report.reward);
    }
    progress.clear(context);
    let missing = || CommandError::new(Exit::Failed, "the run saved no sampler checkpoint");
    let outcome = run.outcome().ok_or_else(missing)?;
    let sampler = outcome.sampler.clone().ok_or_else(missing)?;
    let after = stories(&service.create_sampling_client_from(&sampler).await?, &chat).await?;
    let samples = COMPARED.iter().zip(before.into_iter().zip(after));
    let samples = samples.map(|((prompt, taught), (before, after))| StoryComparison {
        prompt,
        taught: *taught,
        response: BeforeAfter { before, after },
    });
    let report = RlQuickstartReport {
        model: tinkex_server::BUILT_IN,
        base_url: service.base_url().to_string(),
        steps,
        completions,
        tokens,
        seconds: progress.seconds(),
        tokens_per_second: progress.tokens_per_second(),
        rewards,
        samples: samples.collect(),
        name: name.to_string(),
        run_id: run.run_id().to_owned(),
        checkpoint: outcome.checkpoint.map(|path| path.to_string()),
        sampler: Some(sampler.to_string()),
    };
    let text = report.text(context);
    context.notice("");
    context.styled_text(&text, &report)
}

/// Returns a model's continuation of every beginning, sampled at temperature 0.
async fn stories(sampler: &SamplingClient, chat: &Chat) -> Result<Vec<String>, CommandError> {
    let params = SamplingParams::new().max_tokens(MAX_TOKENS).temperature(0.0).stop(chat.stop()?);
    let inputs = COMPARED.iter().map(|(text, _)| chat.tokenizer().input(text));
    let inputs = inputs.collect::<Result<_, _>>()?;
    super::respond(sampler, chat, inputs, &params).await
}

impl RlQuickstartReport {
    fn text(&self, context: &CommandContext<'_>) -> String {
        let bold = |text: &str| context.style().paint(BOLD, text);
        let first = self.rewards.first();
        let last = self.rewards.last();
        let shown =
            |reward: Option<&f64>| format::or_na(reward.map(|reward| format!("{reward:.2}")));
        let mut text = format!(
            "{}\n{}{} in {}, {} completions, {} tokens/s; mean reward {} → {}\n\n{}\n",
            bold("Reward"),
            plot::draw_numbers(context, "reward", &self.rewards),
            format::count(self.steps, "step"),
            format::short_duration(self.seconds),
            self.completions,
            thousands(self.tokens_per_second),
            shown(first),
            shown(last),
            bold("Stories before and after"),
        );
        for sample in &self.samples {
            let note = if sample.taught { "" } else { "  (not trained on)" };
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
        text += &format!(
            "\n{}\n  # Sample more stories\n  \
             tinkex sample {} -p 'In the garden' --max-tokens 48{flags}\n  \
             # Train with your own prompts and reward\n  \
             tinkex rl PROMPTS.jsonl --reward 'python3 reward.py'{flags}",
            bold("Next steps"),
            self.name,
        );
        text
    }
}
