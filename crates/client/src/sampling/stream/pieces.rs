//! Samples a completion in pieces, for servers that cannot stream tokens.
//!
//! Each piece continues the previous ones. The server's prefix cache makes this cheap.

use std::collections::VecDeque;
use std::time::Duration;

use tinkex_wire::{ModelInput, SamplingParams, StopReason};
use tokio::time::Instant;

use crate::error::Result;
use crate::sampling::SamplingClient;
#[cfg(feature = "tokenizer")]
use crate::tokenizer::Tokenizer;

use super::{StreamedToken, TextSource};

/// Tokens in the first piece: few, so that they arrive soon.
const FIRST_PIECE: u32 = 8;
/// Fewest tokens in a later piece, unless fewer may still be sampled.
const MIN_PIECE: u32 = 4;
/// Most tokens in a piece.
const MAX_PIECE: u32 = 128;
/// Target duration of a piece. The size of the next piece follows from the speed of the last.
const PIECE_DURATION: Duration = Duration::from_millis(300);

/// Completion that is sampled in pieces.
pub(super) struct Pieces {
    client: SamplingClient,
    prompt: ModelInput,
    params: SamplingParams,
    text: TextSource,
    tokens: Vec<u32>,
    /// Length in bytes of the text that was returned.
    #[cfg_attr(not(feature = "tokenizer"), expect(dead_code, reason = "there is no text"))]
    returned: usize,
    /// Tokens that may still be sampled.
    remaining: u32,
    /// Tokens in the next piece.
    piece: u32,
    ready: VecDeque<StreamedToken>,
    finished: bool,
}

impl Pieces {
    pub(super) fn new(
        client: SamplingClient,
        prompt: ModelInput,
        params: SamplingParams,
        text: TextSource,
    ) -> Box<Self> {
        Box::new(Self {
            client,
            prompt,
            remaining: params.max_tokens.unwrap_or(u32::MAX),
            params,
            text,
            tokens: Vec::new(),
            returned: 0,
            piece: FIRST_PIECE,
            ready: VecDeque::new(),
            finished: false,
        })
    }

    /// Returns the next token, or `None` at the end.
    pub(super) async fn next(&mut self) -> Result<Option<StreamedToken>> {
        while self.ready.is_empty() && !self.finished {
            self.sample_piece().await?;
        }
        Ok(self.ready.pop_front())
    }

    async fn sample_piece(&mut self) -> Result<()> {
        let size = self.piece.min(self.remaining);
        let mut params = self.params.clone().max_tokens(size);
        // With an unchanged seed, every piece would use the same random numbers.
        params.seed = params.seed.map(|seed| seed.wrapping_add(self.tokens.len() as u64));
        let mut prompt = self.prompt.clone();
        if !self.tokens.is_empty() {
            prompt = prompt.tokens(&self.tokens);
        }
        let started = Instant::now();
        let response = self.client.sample(prompt, params).await?;
        let Some(sequence) = response.sequences.first() else {
            self.finished = true;
            return Ok(());
        };
        let count = u32::try_from(sequence.tokens.len()).unwrap_or(u32::MAX);
        self.remaining = self.remaining.saturating_sub(count);
        let reason = match sequence.stop_reason {
            StopReason::Length if count > 0 && self.remaining > 0 => None,
            reason => Some(reason),
        };
        self.finished = reason.is_some();
        self.piece = next_piece(self.piece, count, started.elapsed());
        self.tokens.extend_from_slice(&sequence.tokens);
        let mut text = Some(self.new_text().await?);
        let last = sequence.tokens.len().wrapping_sub(1);
        for (at, token) in sequence.tokens.iter().enumerate() {
            self.ready.push_back(StreamedToken {
                token: *token,
                text: if at == last { text.take().unwrap_or_default() } else { String::new() },
                logprob: sequence.logprobs.as_ref().and_then(|all| all.get(at)),
                stop_reason: reason.filter(|_| at == last),
            });
        }
        Ok(())
    }

    /// Returns the text that became certain with the last piece.
    #[cfg(feature = "tokenizer")]
    async fn new_text(&mut self) -> Result<String> {
        if let TextSource::BaseModel = self.text {
            self.text = TextSource::Tokenizer(self.client.tokenizer().await?);
        }
        let TextSource::Tokenizer(tokenizer) = &self.text else { return Ok(String::new()) };
        let text = decode(tokenizer, &self.tokens)?;
        // A replacement character at the end may be an incomplete UTF-8 sequence that the next
        // piece completes.
        let certain = if self.finished { &*text } else { text.trim_end_matches('\u{FFFD}') };
        let new = certain.get(self.returned..).unwrap_or_default().to_owned();
        self.returned += new.len();
        Ok(new)
    }

    #[cfg(not(feature = "tokenizer"))]
    #[expect(clippy::unused_async, reason = "with the feature `tokenizer` it loads a tokenizer")]
    async fn new_text(&mut self) -> Result<String> {
        Ok(String::new())
    }
}

#[cfg(feature = "tokenizer")]
fn decode(tokenizer: &Tokenizer, tokens: &[u32]) -> Result<String> {
    tokenizer.decode_text(tokens)
}

/// Returns the size of the piece after one of `count` tokens that took `elapsed`.
fn next_piece(piece: u32, count: u32, elapsed: Duration) -> u32 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the value is clamped"
    )]
    let tokens_in_target = (f64::from(count) * PIECE_DURATION.div_duration_f64(elapsed)) as u32;
    tokens_in_target.clamp(piece / 2, piece * 2).clamp(MIN_PIECE, MAX_PIECE)
}
