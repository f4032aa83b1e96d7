//! [`TrainingSamples`]: completions of the model during training.

use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use tinkex::{Chat, ModelInput, SamplingClient, SamplingParams};
use tinkex_recipes::rl::RlPrompt;
use tinkex_runs::{RunFolder, SAMPLES_FILE, SampleLine, StepLog};

use crate::context::CommandContext;
use crate::error::{CommandError, Exit};
use crate::format;

/// Maximum number of tokens of a completion.
const MAX_TOKENS: u32 = 100;
/// Maximum number of completions that are sampled at the same time.
const CONCURRENT: usize = 16;
/// Maximum number of characters of a prompt and of a completion on the terminal.
const SHOWN: usize = 300;

/// Prompts that the model completes during training, and the file with the completions.
pub(super) struct TrainingSamples {
    prompts: Vec<(String, ModelInput)>,
    chat: Chat,
    log: StepLog,
    /// Path of the file, for messages.
    shown: String,
}

impl TrainingSamples {
    /// Encodes the prompts and opens the file of a run.
    pub(super) fn new(
        prompts: Vec<RlPrompt>,
        chat: Chat,
        folder: &RunFolder,
    ) -> Result<Self, CommandError> {
        let encode = |prompt: RlPrompt| -> Result<(String, ModelInput), CommandError> {
            let input = if prompt.messages.is_empty() {
                chat.tokenizer().input(&prompt.text)?
            } else {
                chat.prompt(&prompt.messages)?
            };
            Ok((prompt.text, input))
        };
        let prompts = prompts.into_iter().map(encode).collect::<Result<_, _>>()?;
        let shown = folder.path().join(SAMPLES_FILE).display().to_string();
        let log = folder.samples(folder.record.progress.step())?;
        Ok(Self { prompts, chat, log, shown })
    }

    /// Samples a completion of every prompt, shows the completions and adds them to the file.
    pub(super) async fn add(
        &mut self,
        context: &mut CommandContext<'_>,
        sampler: &SamplingClient,
        step: u64,
    ) -> Result<(), CommandError> {
        // The most likely completion: completions of different steps differ only by what the model
        // has learned.
        let mut params = SamplingParams::new().max_tokens(MAX_TOKENS).temperature(0.0);
        params.stop = self.chat.stop().ok();
        let params = &params;
        let tokenizer = self.chat.tokenizer();
        let samples: Vec<SampleLine> = stream::iter(&self.prompts)
            .map(|(prompt, input)| async move {
                let response = sampler.sample(input, params).await?;
                let Some(sampled) = response.sequences.first() else {
                    return Err(CommandError::new(
                        Exit::Failed,
                        "the server returned no completion",
                    ));
                };
                let completion = tokenizer.decode_text(&sampled.tokens)?;
                let mut line = SampleLine::new(step, prompt, completion);
                line.tokens = sampled.tokens.len() as u64;
                line.stop_reason = sampled.stop_reason;
                Ok(line)
            })
            .buffered(CONCURRENT)
            .try_collect()
            .await?;
        for sample in &samples {
            let prompt = shorten(&sample.prompt);
            let completion = shorten(&sample.completion);
            context.notice(&format!("step {step}: {prompt} → {completion}"));
            let written = self.log.append(sample);
            written.map_err(|error| CommandError::file("write", &self.shown, &error))?;
        }
        Ok(())
    }
}

/// Returns a text on one line, with its end omitted if it is long.
fn shorten(text: &str) -> String {
    let mut letters = text.trim().chars();
    let mut shown: String = letters.by_ref().take(SHOWN).collect();
    shown.extend(letters.next().map(|_| '…'));
    format::escape_controls(&shown)
}
