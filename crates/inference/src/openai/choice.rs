//! [`ChoiceWriter`]: converts the tokens of a completion to a choice.

use serde::Serialize;
use tinkex_text::{TextDecoder, Tokenizer};

use super::logprobs::{LogprobColumns, LogprobRow};
use crate::{GeneratedToken, GenerationRequest, InferenceError, PromptReport, StopReason};

/// Settings that determine which fields a choice contains besides its text.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChoiceContent {
    /// Number of most probable tokens per token; `None` for no log-probabilities.
    pub(super) logprobs: Option<u32>,
    pub(super) token_ids: bool,
    /// Whether sampled tokens are left out, because the request has `max_tokens: 0`.
    pub(super) prompt_only: bool,
}

/// A part of a choice: everything since the previous event, or the whole choice.
#[derive(Clone, Default, Serialize)]
pub(super) struct ChoicePiece {
    index: usize,
    text: String,
    /// `null` without tokens.
    #[serde(serialize_with = "LogprobColumns::serialize_or_null")]
    logprobs: LogprobColumns,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    token_ids: Vec<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_token_ids: Option<Vec<u32>>,
}

impl ChoicePiece {
    /// Returns whether a stream has nothing to send.
    fn is_empty(&self) -> bool {
        self.text.is_empty()
            && self.logprobs.is_empty()
            && self.token_ids.is_empty()
            && self.finish_reason.is_none()
    }

    /// Removes the content that was sent. Keeps the memory for the next event.
    fn clear(&mut self) {
        self.text.clear();
        self.logprobs.clear();
        self.token_ids.clear();
        self.finish_reason = None;
    }
}

/// Converts the tokens of one completion.
#[derive(Clone)]
pub(super) struct ChoiceWriter {
    content: ChoiceContent,
    tokenizer: Option<Tokenizer>,
    decoder: Option<TextDecoder>,
    /// Tokens that end the completion and are not part of its text.
    end_tokens: Vec<u32>,
    /// Number of characters of the text so far.
    characters: usize,
    /// Content that was added since the last [`send_piece`](Self::send_piece).
    piece: ChoicePiece,
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
        let has_top = content.logprobs.is_some_and(|top| top > 0);
        let piece =
            ChoicePiece { logprobs: LogprobColumns::new(has_top), ..ChoicePiece::default() };
        let tokenizer = tokenizer.cloned();
        Self { content, tokenizer, decoder, end_tokens, characters: 0, piece }
    }

    /// Returns the writer of another choice of the same prompt.
    pub(super) fn with_index(&self, index: usize) -> Self {
        let mut writer = self.clone();
        writer.piece.index = index;
        writer
    }

    /// Sets the last token of the prompt, which the text follows.
    pub(super) fn after(mut self, token: Option<u32>) -> Self {
        if let Some(token) = token {
            self.decoder = self.decoder.map(|decoder| decoder.after(token));
        }
        self
    }

    /// Adds the prompt, whose text is `text`, before the first token.
    pub(super) fn echo(
        &mut self,
        text: &str,
        prompt: &[u32],
        report: &PromptReport,
    ) -> Result<(), InferenceError> {
        if self.content.logprobs.is_some() {
            let tokenizer = self.tokenizer.as_ref();
            let offsets = text_offsets(tokenizer, prompt, text)?;
            for (i, (token, text_offset)) in prompt.iter().zip(offsets).enumerate() {
                let logprob = report.logprobs.get(i).copied();
                let top = report.top.get(i).map_or(&[][..], Vec::as_slice);
                let row = LogprobRow { token: *token, logprob, top, text_offset };
                self.piece.logprobs.push(tokenizer, &row);
            }
        }
        self.characters += count(text);
        self.piece.text.push_str(text);
        Ok(())
    }

    /// Adds a sampled token.
    pub(super) fn push(&mut self, token: &GeneratedToken) -> Result<(), InferenceError> {
        let piece = &mut self.piece;
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
            piece.logprobs.push(self.tokenizer.as_ref(), &row);
        }
        if self.content.token_ids {
            piece.token_ids.push(token.token);
        }
        if let Some(decoder) = &mut self.decoder {
            let before = piece.text.len();
            let ends = token.stop == Some(StopReason::Stop);
            if !(ends && self.end_tokens.contains(&token.token)) {
                let text = decoder.push(token.token).map_err(|error| cannot_decode(&error))?;
                piece.text.push_str(&text);
            }
            if token.stop.is_some() {
                let text = decoder.finish().map_err(|error| cannot_decode(&error))?;
                piece.text.push_str(&text);
            }
            self.characters += count(&piece.text[before..]);
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

    /// Calls `send` with the content that was added since the last call, unless nothing was added.
    pub(super) fn send_piece(&mut self, send: impl FnOnce(&ChoicePiece)) {
        if !self.piece.is_empty() {
            send(&self.piece);
            self.piece.clear();
        }
    }

    /// Returns the content that was added since the last [`send_piece`](Self::send_piece).
    pub(super) fn into_piece(self) -> ChoicePiece {
        self.piece
    }
}

/// Returns the position of every token of a prompt in its text, in characters.
///
/// A special token that occurs in the text has the width of its text. A special token that the
/// tokenizer added has the width 0.
fn text_offsets(
    tokenizer: Option<&Tokenizer>,
    prompt: &[u32],
    text: &str,
) -> Result<Vec<usize>, InferenceError> {
    let Some(tokenizer) = tokenizer else { return Ok(vec![0; prompt.len()]) };
    let mut decoder = TextDecoder::new(tokenizer).skip_special_tokens(false);
    let mut characters = 0;
    let mut bytes = 0;
    let mut offsets = Vec::with_capacity(prompt.len());
    for token in prompt {
        offsets.push(characters);
        let rest = text.get(bytes..).unwrap_or_default();
        let was_added = tokenizer.is_special(*token)
            && !tokenizer.token(*token).is_some_and(|special| rest.starts_with(&special));
        if !was_added {
            let piece = decoder.push(*token).map_err(|error| cannot_decode(&error))?;
            characters += count(&piece);
            bytes += piece.len();
        }
    }
    Ok(offsets)
}

fn count(text: &str) -> usize {
    text.chars().count()
}

fn cannot_decode(error: &tinkex_text::Error) -> InferenceError {
    InferenceError::internal(format!("cannot decode the sampled tokens: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tokenizer of single characters with a special token `<s>` (3) that begins every text.
    fn tokenizer() -> Tokenizer {
        let bytes = r#"{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
            "use_regex": true}"#;
        let json = format!(
            r#"{{"version": "1.0", "pre_tokenizer": {bytes}, "decoder": {bytes},
            "added_tokens": [{{"id": 3, "content": "<s>", "special": true, "single_word": false,
                "lstrip": false, "rstrip": false, "normalized": false}}],
            "post_processor": {{"type": "TemplateProcessing",
                "single": [{{"SpecialToken": {{"id": "<s>", "type_id": 0}}}},
                    {{"Sequence": {{"id": "A", "type_id": 0}}}}],
                "pair": [{{"Sequence": {{"id": "A", "type_id": 0}}}},
                    {{"Sequence": {{"id": "B", "type_id": 0}}}}],
                "special_tokens": {{"<s>": {{"id": "<s>", "ids": [3], "tokens": ["<s>"]}}}}}},
            "model": {{"type": "BPE", "merges": [], "vocab": {{"a": 0, "Ã": 1, "©": 2}}}}}}"#
        );
        Tokenizer::from_json(json).unwrap()
    }

    #[test]
    fn offsets_of_an_echoed_prompt_count_the_special_tokens_of_its_text() {
        let tokenizer = tokenizer();
        let offsets =
            |prompt: &[u32], text: &str| text_offsets(Some(&tokenizer), prompt, text).unwrap();
        let ids = [0, 3, 0, 1, 2, 0];
        assert_eq!(offsets(&ids, &tokenizer.decode(&ids).unwrap()), [0, 1, 4, 5, 5, 6]);
        // The tokenizer adds a token to the text that the text does not contain.
        let text = "aéa";
        let tokens = tokenizer.encode(text).unwrap();
        assert_eq!(tokens[..], [3, 0, 1, 2, 0]);
        assert_eq!(offsets(&tokens, text), [0, 0, 1, 1, 2]);
        assert_eq!(text_offsets(None, &[7, 8], "").unwrap(), [0, 0]);
    }
}
