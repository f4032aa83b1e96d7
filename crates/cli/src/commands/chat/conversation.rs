//! [`Conversation`]: messages exchanged with a model, and completions that are sampled in chunks.
//!
//! The API cannot stream tokens. A completion is therefore sampled in chunks, each continuing the
//! previous ones; the server's prefix cache makes this cheap.

use std::time::Duration;

use tinkex::{
    Chat, Message, ModelInput, SamplingClient, SamplingParams, StopCondition, StopReason,
};
use tokio::time::Instant;

use crate::error::CommandError;

/// Tokens in the first chunk: few, so that text appears soon.
const FIRST_CHUNK: u32 = 8;
/// Maximum tokens in a chunk.
const MAX_CHUNK: u32 = 128;
/// Target duration of a chunk. The size of the next chunk follows from the speed of the last.
const CHUNK_DURATION: Duration = Duration::from_millis(300);

/// Conversation with a model.
pub(super) struct Conversation {
    pub(super) sampler: SamplingClient,
    pub(super) chat: Chat,
    pub(super) system: Option<String>,
    pub(super) messages: Vec<Message>,
}

/// Completion that is being sampled.
pub(super) struct ChunkedCompletion {
    sampler: SamplingClient,
    chat: Chat,
    params: SamplingParams,
    prompt: Vec<u32>,
    tokens: Vec<u32>,
    /// Length in bytes of the text that was returned.
    returned: usize,
    /// Tokens that may still be generated.
    remaining: u32,
    /// Tokens in the next chunk.
    chunk: u32,
    finished: bool,
}

impl Conversation {
    /// Returns all messages, with the system message first.
    pub(super) fn all_messages(&self) -> Vec<Message> {
        let system = self.system.iter().map(Message::system);
        system.chain(self.messages.iter().cloned()).collect()
    }

    /// Starts a completion of the last message.
    pub(super) fn complete(
        &self,
        params: SamplingParams,
    ) -> Result<ChunkedCompletion, CommandError> {
        let stop: StopCondition = match params.stop.clone() {
            Some(stop) => stop,
            None => self.chat.stop()?,
        };
        let prompt = self.chat.prompt(&self.all_messages())?;
        let prompt = prompt.to_tokens().map(|tokens| tokens.to_vec()).unwrap_or_default();
        Ok(ChunkedCompletion {
            sampler: self.sampler.clone(),
            chat: self.chat.clone(),
            remaining: params.max_tokens.unwrap_or(u32::MAX),
            params: params.stop(stop),
            prompt,
            tokens: Vec::new(),
            returned: 0,
            chunk: FIRST_CHUNK,
            finished: false,
        })
    }
}

impl ChunkedCompletion {
    /// Samples and returns the next text, or `None` if the completion is finished.
    pub(super) async fn next(&mut self) -> Result<Option<String>, CommandError> {
        while !self.finished && self.remaining > 0 {
            self.sample_chunk().await?;
            let text = self.text()?;
            // A replacement character at the end may be an incomplete UTF-8 sequence that the next
            // chunk completes.
            let complete = if self.finished { &*text } else { text.trim_end_matches('\u{FFFD}') };
            if let Some(new) = complete.get(self.returned..).filter(|new| !new.is_empty()) {
                self.returned = complete.len();
                return Ok(Some(new.to_owned()));
            }
        }
        Ok(None)
    }

    async fn sample_chunk(&mut self) -> Result<(), CommandError> {
        let max_tokens = self.chunk.min(self.remaining);
        let mut params = self.params.clone().max_tokens(max_tokens);
        // With an unchanged seed, every chunk would use the same random numbers.
        params.seed = params.seed.map(|seed| seed.wrapping_add(self.tokens.len() as u64));
        let mut prompt = self.prompt.clone();
        prompt.extend(&self.tokens);
        let started = Instant::now();
        let response = self.sampler.sample(ModelInput::from_tokens(prompt), params).await?;
        let Some(sequence) = response.sequences.first() else {
            self.finished = true;
            return Ok(());
        };
        self.tokens.extend_from_slice(&sequence.tokens);
        let count = u32::try_from(sequence.tokens.len()).unwrap_or(u32::MAX);
        self.remaining = self.remaining.saturating_sub(count);
        self.finished = sequence.stop_reason != StopReason::Length || count == 0;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "the value is clamped"
        )]
        let tokens_in_target =
            (f64::from(count) * CHUNK_DURATION.div_duration_f64(started.elapsed())) as u32;
        self.chunk = tokens_in_target.clamp(self.chunk / 2, self.chunk * 2).clamp(4, MAX_CHUNK);
        Ok(())
    }

    fn text(&self) -> Result<String, CommandError> {
        Ok(self.chat.tokenizer().decode_text(&self.tokens)?)
    }

    /// Returns the number of tokens so far.
    pub(super) fn token_count(&self) -> usize {
        self.tokens.len()
    }
}
