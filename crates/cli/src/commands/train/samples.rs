//! [`TrainingSamples`]: answers of the model during training.

use std::path::Path;

use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use serde::Serialize;
use tinkex::recipes::StepLog;
use tinkex::recipes::rl::RlPrompt;
use tinkex::{Chat, ModelInput, SamplingClient, SamplingParams};

use crate::context::CommandContext;
use crate::error::{CommandError, Exit};
use crate::format;

/// Name of the file in the run folder.
pub(super) const SAMPLES_FILE: &str = "samples.jsonl";
/// Maximum number of tokens of an answer.
const MAX_TOKENS: u32 = 100;
/// Maximum number of answers that are sampled at the same time.
const CONCURRENT: usize = 16;
/// Maximum number of characters of a prompt and of an answer on the terminal.
const SHOWN: usize = 300;

/// Prompts that are answered during training, and the file with the answers.
pub(super) struct TrainingSamples {
    prompts: Vec<(String, ModelInput)>,
    chat: Chat,
    log: StepLog,
    /// Path of the file, for messages.
    shown: String,
}

/// Line of `samples.jsonl`.
#[derive(Debug, Serialize)]
struct SampleLine {
    /// Number of finished steps.
    step: u64,
    prompt: String,
    answer: String,
    stop_reason: &'static str,
}

impl TrainingSamples {
    /// Encodes the prompts and opens the file of a run that continues after `from` steps.
    pub(super) fn new(
        prompts: Vec<RlPrompt>,
        chat: Chat,
        path: &Path,
        from: u64,
    ) -> Result<Self, CommandError> {
        let encode = |prompt: RlPrompt| -> Result<(String, ModelInput), CommandError> {
            let input = match prompt.messages.is_empty() {
                true => chat.tokenizer().input(&prompt.text)?,
                false => chat.prompt(&prompt.messages)?,
            };
            Ok((prompt.text, input))
        };
        let prompts = prompts.into_iter().map(encode).collect::<Result<_, _>>()?;
        let shown = path.display().to_string();
        let log = StepLog::open(path, from, |_| ())
            .map_err(|error| CommandError::file("write", &shown, &error))?;
        Ok(Self { prompts, chat, log, shown })
    }

    /// Samples an answer to every prompt, shows them and adds them to the file.
    pub(super) async fn add(
        &mut self,
        context: &mut CommandContext<'_>,
        sampler: &SamplingClient,
        step: u64,
    ) -> Result<(), CommandError> {
        // The most likely answer: those of different steps differ only by what was learned.
        let mut params = SamplingParams::new().max_tokens(MAX_TOKENS).temperature(0.0);
        params.stop = self.chat.stop().ok();
        let (params, tokenizer) = (&params, self.chat.tokenizer());
        let answers: Vec<SampleLine> = stream::iter(&self.prompts)
            .map(|(prompt, input)| async move {
                let response = sampler.sample(input.clone(), params.clone()).send().await?;
                let Some(sampled) = response.sequences.first() else {
                    return Err(CommandError::new(Exit::Failed, "the server returned no answer"));
                };
                Ok(SampleLine {
                    step,
                    prompt: prompt.clone(),
                    answer: tokenizer.decode_text(&sampled.tokens)?,
                    stop_reason: sampled.stop_reason.as_str(),
                })
            })
            .buffered(CONCURRENT)
            .try_collect()
            .await?;
        for answer in &answers {
            let (prompt, text) = (shorten(&answer.prompt), shorten(&answer.answer));
            context.notice(&format!("step {step}: {prompt} → {text}"));
            let written = self.log.append(answer);
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
