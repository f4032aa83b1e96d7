//! [`Conversation`]: a conversation with a model, whose answers come piece by piece.

use std::time::Duration;

use tinkex::{
    Chat, Message, ModelInput, SamplingClient, SamplingParams, StopCondition, StopReason,
};
use tokio::time::Instant;

use crate::error::CommandError;

/// How many tokens are asked for first. Few, so that something is seen soon.
const FIRST: u32 = 8;
/// How many at most.
const MOST: u32 = 128;
/// How long a piece should take; the next one is as long as fits.
const RHYTHM: Duration = Duration::from_millis(300);

/// A conversation with a model.
pub(super) struct Conversation {
    pub(super) sampler: SamplingClient,
    pub(super) chat: Chat,
    pub(super) system: Option<String>,
    pub(super) messages: Vec<Message>,
}

/// An answer on its way. The API has no stream of tokens, so it is sampled in pieces, each from
/// where the last one ended; the server remembers what it has read already.
pub(super) struct Completion {
    sampler: SamplingClient,
    chat: Chat,
    params: SamplingParams,
    prompt: Vec<u32>,
    tokens: Vec<u32>,
    /// How much text was handed out.
    told: usize,
    left: u32,
    piece: u32,
    over: bool,
}

impl Conversation {
    /// Everything that was said, and what the model was told first.
    pub(super) fn whole(&self) -> Vec<Message> {
        let system = self.system.iter().map(Message::system);
        system.chain(self.messages.iter().cloned()).collect()
    }

    /// Asks for an answer to the last message.
    pub(super) fn answer(&self, params: SamplingParams) -> Result<Completion, CommandError> {
        let stop: StopCondition = match params.stop.clone() {
            Some(stop) => stop,
            None => self.chat.stop()?,
        };
        let prompt = self.chat.prompt(&self.whole())?;
        let prompt = prompt.to_tokens().map(|tokens| tokens.to_vec()).unwrap_or_default();
        Ok(Completion {
            sampler: self.sampler.clone(),
            chat: self.chat.clone(),
            left: params.max_tokens.unwrap_or(u32::MAX),
            params: params.stop(stop),
            prompt,
            tokens: Vec::new(),
            told: 0,
            piece: FIRST,
            over: false,
        })
    }
}

impl Completion {
    /// The next bit of text; nothing when the answer is complete.
    pub(super) async fn next(&mut self) -> Result<Option<String>, CommandError> {
        while !self.over && self.left > 0 {
            self.sample().await?;
            let text = self.text()?;
            // Half a character at the end becomes a whole one with the next piece.
            let whole = if self.over { &*text } else { text.trim_end_matches('\u{FFFD}') };
            if let Some(new) = whole.get(self.told..).filter(|new| !new.is_empty()) {
                self.told = whole.len();
                return Ok(Some(new.to_owned()));
            }
        }
        Ok(None)
    }

    async fn sample(&mut self) -> Result<(), CommandError> {
        let ask = self.piece.min(self.left);
        let mut params = self.params.clone().max_tokens(ask);
        // Another seed for each piece, or all would be drawn with the same numbers.
        params.seed = params.seed.map(|seed| seed.wrapping_add(self.tokens.len() as u64));
        let mut prompt = self.prompt.clone();
        prompt.extend(&self.tokens);
        let started = Instant::now();
        let answer = self.sampler.sample(ModelInput::from_tokens(prompt), params).await?;
        let Some(one) = answer.sequences.first() else {
            self.over = true;
            return Ok(());
        };
        self.tokens.extend_from_slice(&one.tokens);
        let got = u32::try_from(one.tokens.len()).unwrap_or(u32::MAX);
        self.left = self.left.saturating_sub(got);
        self.over = one.stop_reason != StopReason::Length || got == 0;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "it is clamped"
        )]
        let fits = (f64::from(got) * RHYTHM.div_duration_f64(started.elapsed())) as u32;
        self.piece = fits.clamp(self.piece / 2, self.piece * 2).clamp(4, MOST);
        Ok(())
    }

    /// All text so far.
    pub(super) fn text(&self) -> Result<String, CommandError> {
        Ok(self.chat.tokenizer().decode_text(&self.tokens)?)
    }

    /// How many tokens it has.
    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }
}
