//! [`ChoiceWriter`]: turns the tokens of one completion into the pieces of a choice.

use serde::Serialize;
use tinkex_engine::sample::{PromptScores, StopReason, TopK};
use tinkex_text::{TextDecoder, Tokenizer};

use super::logprobs::{LogprobColumns, LogprobRow};
use crate::error::ServerError;
use crate::inference::{GeneratedToken, GenerationRequest};

/// What a choice contains besides its text.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChoiceContent {
    /// Number of most probable tokens per token; `None` for no log-probabilities.
    pub(super) logprobs: Option<u32>,
    pub(super) token_ids: bool,
    /// Whether sampled tokens are left out, because the request has `max_tokens: 0`.
    pub(super) prompt_only: bool,
}

/// A part of a choice: everything that became known in one step, or the whole choice.
#[derive(Default, Serialize)]
pub(super) struct ChoicePiece {
    pub(super) index: usize,
    pub(super) text: String,
    logprobs: Option<LogprobColumns>,
    pub(super) finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_token_ids: Option<Vec<u32>>,
}

impl ChoicePiece {
    /// Returns whether a stream has nothing to send.
    pub(super) fn is_empty(&self) -> bool {
        self.text.is_empty()
            && self.logprobs.is_none()
            && self.token_ids.is_none()
            && self.finish_reason.is_none()
    }

    /// Adds the piece that follows.
    pub(super) fn append(&mut self, next: Self) {
        self.text.push_str(&next.text);
        match (&mut self.logprobs, next.logprobs) {
            (Some(columns), Some(next)) => columns.append(next),
            (logprobs, next) => *logprobs = logprobs.take().or(next),
        }
        match (&mut self.token_ids, next.token_ids) {
            (Some(ids), Some(next)) => ids.extend(next),
            (ids, next) => *ids = ids.take().or(next),
        }
        self.finish_reason = self.finish_reason.or(next.finish_reason);
    }
}

/// Converts the tokens of one completion.
#[derive(Clone)]
pub(super) struct ChoiceWriter {
    index: usize,
    content: ChoiceContent,
    tokenizer: Option<Tokenizer>,
    decoder: Option<TextDecoder>,
    /// Tokens that end the completion and are not part of its text.
    end_tokens: Vec<u32>,
    /// Number of characters of the text so far.
    characters: usize,
}

impl ChoiceWriter {
    /// Creates the writer of the first choice. `eos` are the end-of-sequence tokens of the model.
    /// Without a tokenizer the text is empty.
    pub(super) fn new(
        content: ChoiceContent,
        tokenizer: Option<&Tokenizer>,
        request: &GenerationRequest,
        eos: &[u32],
    ) -> Self {
        let decoder = tokenizer
            .map(|tokenizer| TextDecoder::new(tokenizer).stop_strings(request.stop_texts.clone()));
        let eos = eos.iter().filter(|_| !request.ignore_eos);
        let end_tokens = eos.chain(&request.stop_tokens).copied().collect();
        let tokenizer = tokenizer.cloned();
        Self { index: 0, content, tokenizer, decoder, end_tokens, characters: 0 }
    }

    /// Returns the writer of another choice of the same prompt.
    pub(super) fn with_index(&self, index: usize) -> Self {
        Self { index, ..self.clone() }
    }

    /// Sets the last token of the prompt, which the text follows.
    pub(super) fn after(mut self, token: Option<u32>) -> Self {
        if let Some(token) = token {
            self.decoder = self.decoder.map(|decoder| decoder.after(token));
        }
        self
    }

    /// Returns the piece that repeats the prompt, whose text is `text`.
    pub(super) fn echo(
        &mut self,
        text: &str,
        prompt: &[u32],
        scores: &PromptScores,
    ) -> Result<ChoicePiece, ServerError> {
        let mut columns = self.new_columns();
        if let Some(columns) = &mut columns {
            let mut decoder = self.tokenizer.as_ref().map(TextDecoder::new);
            let mut text_offset = 0;
            for (i, token) in prompt.iter().enumerate() {
                let logprob = scores.logprobs.as_ref().and_then(|all| all.get(i).copied());
                let top = top_row(scores, i);
                let row = LogprobRow { token: *token, logprob, top: &top, text_offset };
                columns.push(self.tokenizer.as_ref(), &row);
                if let Some(decoder) = &mut decoder {
                    text_offset +=
                        count(&decoder.push(*token).map_err(|error| cannot_decode(&error))?);
                }
            }
        }
        self.characters += count(text);
        let text = text.to_owned();
        Ok(ChoicePiece { index: self.index, text, logprobs: columns, ..ChoicePiece::default() })
    }

    /// Adds a sampled token to `piece`, which contains only tokens of this choice.
    pub(super) fn push(
        &mut self,
        piece: &mut ChoicePiece,
        token: &GeneratedToken,
    ) -> Result<(), ServerError> {
        piece.index = self.index;
        if self.content.prompt_only {
            piece.finish_reason = Some("length");
            return Ok(());
        }
        if self.content.logprobs.is_some() {
            let row = LogprobRow {
                token: token.token,
                logprob: Some(token.logprob),
                top: &token.top,
                text_offset: self.characters,
            };
            let tokenizer = self.tokenizer.as_ref();
            let columns = piece.logprobs.take().or_else(|| self.new_columns());
            piece.logprobs = columns.map(|mut columns| {
                columns.push(tokenizer, &row);
                columns
            });
        }
        if self.content.token_ids {
            piece.token_ids.get_or_insert_default().push(token.token);
        }
        if let Some(decoder) = &mut self.decoder {
            let ends = token.stop == Some(StopReason::Stop);
            let mut text = String::new();
            if !(ends && self.end_tokens.contains(&token.token)) {
                text = decoder.push(token.token).map_err(|error| cannot_decode(&error))?;
            }
            if token.stop.is_some() {
                text.push_str(&decoder.finish().map_err(|error| cannot_decode(&error))?);
            }
            self.characters += count(&text);
            piece.text.push_str(&text);
        }
        piece.finish_reason = token.stop.map(|reason| match reason {
            StopReason::Stop => "stop",
            StopReason::Length => "length",
        });
        Ok(())
    }

    /// Returns whether sampled tokens are part of the choice and of the usage.
    pub(super) fn counts_tokens(&self) -> bool {
        !self.content.prompt_only
    }

    fn new_columns(&self) -> Option<LogprobColumns> {
        self.content.logprobs.map(|top| LogprobColumns::new(top > 0))
    }
}

/// Returns the most probable tokens at position `row` of a prompt.
fn top_row(scores: &PromptScores, row: usize) -> Vec<(u32, f32)> {
    let Some(TopK { k, tokens, logprobs }) = &scores.top_k else { return Vec::new() };
    let pairs = tokens.iter().copied().zip(logprobs.iter().copied());
    pairs.skip(row * k).take(*k).collect()
}

fn count(text: &str) -> usize {
    text.chars().count()
}

fn cannot_decode(error: &tinkex_text::Error) -> ServerError {
    ServerError::Internal(format!("cannot decode the sampled tokens: {error}"))
}
