//! Samples a completion in pieces, for servers that cannot stream tokens.
//!
//! Each piece continues the previous ones. The server's prefix cache makes this cheap.

use std::collections::VecDeque;
use std::time::Duration;

use tinkex_wire::{ModelInput, SampledSequence, SamplingParams, StopReason};
use tokio::time::Instant;

use crate::error::{Error, ErrorKind, Result};
use crate::sampling::SamplingClient;

use super::piece_text::{self, PieceDecoder, is_stop_token};
use super::{StreamedToken, TextSource};

/// Number of tokens in the first piece. Small, so that the first tokens arrive soon.
const FIRST_PIECE: u32 = 8;
/// Minimum number of tokens in a later piece, unless `max_tokens` leaves fewer.
const MIN_PIECE: u32 = 4;
/// Maximum number of tokens in a piece.
const MAX_PIECE: u32 = 128;
/// Target duration of a piece. The size of the next piece follows from the speed of the last.
const PIECE_DURATION: Duration = Duration::from_millis(300);

/// Completion that is sampled in pieces.
pub(super) struct Pieces {
    client: SamplingClient,
    prompt: ModelInput,
    params: SamplingParams,
    /// Source of the tokenizer. Taken when the first piece arrives and the decoder is created.
    text: Option<TextSource>,
    decoder: Option<PieceDecoder>,
    tokens: Vec<u32>,
    /// Number of tokens that may still be sampled.
    remaining: u32,
    /// Number of tokens in the next piece.
    piece: u32,
    /// Last token of the last piece. Held back until the next piece: if that piece is empty, this
    /// token is the last one of the completion and gets the stop reason.
    held: Option<StreamedToken>,
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
            text: Some(text),
            decoder: None,
            tokens: Vec::new(),
            piece: FIRST_PIECE,
            held: None,
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
        // Derive a seed for each piece: with an unchanged seed, every piece would use the same
        // random numbers.
        params.seed = params.seed.map(|seed| seed.wrapping_add(self.tokens.len() as u64));
        let mut prompt = self.prompt.clone();
        if !self.tokens.is_empty() {
            prompt = prompt.tokens(&self.tokens);
        }
        let started = Instant::now();
        let response = self.client.sample(prompt, params).await?;
        let elapsed = started.elapsed();
        if let Some(text) = self.text.take() {
            let decoder = piece_text::decoder(&text, &self.client, &self.params).await?;
            self.decoder = decoder.map(|decoder| piece_text::after_prompt(decoder, &self.prompt));
        }
        let Some(sequence) = response.sequences.first() else {
            let message = "cannot read a sample: the response contains no completion";
            return Err(Error::new(ErrorKind::Decode, message));
        };
        let count = u32::try_from(sequence.tokens.len()).unwrap_or(u32::MAX);
        self.remaining = self.remaining.saturating_sub(count);
        self.piece = next_piece(self.piece, count, elapsed);
        self.add(sequence)
    }

    /// Adds the tokens of a piece.
    fn add(&mut self, sequence: &SampledSequence) -> Result<()> {
        let reason = match sequence.stop_reason {
            StopReason::Length if !sequence.tokens.is_empty() && self.remaining > 0 => None,
            reason => Some(reason),
        };
        self.finished = reason.is_some();
        self.tokens.extend_from_slice(&sequence.tokens);
        for (at, token) in sequence.tokens.iter().enumerate() {
            self.ready.extend(self.held.take());
            let is_last = at + 1 == sequence.tokens.len();
            let streamed = StreamedToken {
                token: *token,
                text: String::new(),
                logprob: sequence.logprobs.as_ref().and_then(|all| all.get(at)),
                stop_reason: reason.filter(|_| is_last),
            };
            let streamed = self.decode(streamed)?;
            let ends = streamed.stop_reason.is_some();
            self.held = Some(streamed);
            if ends {
                self.finished = true;
                break;
            }
        }
        if self.finished {
            self.end(reason)?;
        }
        Ok(())
    }

    /// Adds the text of a token, and the stop reason if the token completes a stop string.
    fn decode(&mut self, mut streamed: StreamedToken) -> Result<StreamedToken> {
        let Some(decoder) = &mut self.decoder else { return Ok(streamed) };
        let stopped = streamed.stop_reason == Some(StopReason::Stop);
        if !(stopped && is_stop_token(&self.params, streamed.token)) {
            streamed.text = decoder.push(streamed.token)?;
        }
        // The server cannot detect a stop string that begins in an earlier piece, so the client
        // does.
        if decoder.matched_stop().is_some() {
            streamed.stop_reason = Some(StopReason::Stop);
        }
        Ok(streamed)
    }

    /// Makes the held token ready as the last one, with the stop reason and the text that the
    /// decoder held back for more tokens.
    fn end(&mut self, reason: Option<StopReason>) -> Result<()> {
        let Some(mut last) = self.held.take() else { return Ok(()) };
        last.stop_reason = last.stop_reason.or(reason);
        if let Some(decoder) = &mut self.decoder {
            last.text.push_str(&decoder.finish()?);
        }
        self.ready.push_back(last);
        Ok(())
    }
}

/// Returns the size of the next piece, after a piece of `count` tokens that took `elapsed`.
fn next_piece(piece: u32, count: u32, elapsed: Duration) -> u32 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the value is clamped"
    )]
    let tokens_in_target = (f64::from(count) * PIECE_DURATION.div_duration_f64(elapsed)) as u32;
    tokens_in_target.clamp(piece / 2, piece * 2).clamp(MIN_PIECE, MAX_PIECE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_of_a_piece_follows_the_speed_within_bounds() {
        for (piece, count, millis, next) in [
            (8, 8, 300, 8),
            (8, 8, 200, 12),
            (8, 8, 10, 16),
            (8, 8, 0, 16),
            (8, 8, 3000, 4),
            (128, 128, 1, 128),
            (4, 4, 9000, 4),
            (64, 0, 9000, 32),
        ] {
            assert_eq!(next_piece(piece, count, Duration::from_millis(millis)), next, "{millis}");
        }
    }
}
