//! [`AnswerReader`]: converts the tokens of one answer to its parts.

use std::sync::Arc;

use tinkex_text::{AnswerEvent, AnswerParser, TextDecoder};

use super::answer::{AnswerEnd, AnswerUpdate};
use crate::{GeneratedToken, StopReason};

/// Converts the tokens of one answer: decodes them, splits the text into parts, and decides where
/// the answer ends.
#[derive(Clone)]
pub(super) struct AnswerReader {
    decoder: TextDecoder,
    parser: AnswerParser,
    /// Whether the answer ends after its first tool call.
    is_single_call: bool,
    /// Tokens that end the answer and are not part of it.
    end_tokens: Arc<[u32]>,
    has_calls: bool,
    progress: AnswerProgress,
}

/// How far an answer has been read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum AnswerProgress {
    Running,
    /// The engine has stopped sampling.
    Ended,
    /// The answer is complete, but the engine still samples: this reader may find a stop string
    /// before the engine does, and only this reader recognizes tool calls.
    EndedEarly,
}

impl AnswerReader {
    /// Creates the reader of an answer whose text `decoder` decodes and `parser` splits.
    pub(super) fn new(
        decoder: TextDecoder,
        parser: AnswerParser,
        is_single_call: bool,
        end_tokens: &[u32],
    ) -> Self {
        Self {
            decoder,
            parser,
            is_single_call,
            end_tokens: end_tokens.into(),
            has_calls: false,
            progress: AnswerProgress::Running,
        }
    }

    /// Returns whether no token follows.
    pub(super) fn has_ended(&self) -> bool {
        self.progress != AnswerProgress::Running
    }

    /// Returns whether the answer ended before the engine stopped sampling it.
    pub(super) fn has_ended_early(&self) -> bool {
        self.progress == AnswerProgress::EndedEarly
    }

    /// Adds the text, parts and end that result from one token to `update`.
    pub(super) fn read(
        &mut self,
        token: GeneratedToken,
        update: &mut AnswerUpdate,
    ) -> tinkex_text::Result<()> {
        let stop = token.stop;
        update.token_ids.push(token.token);
        let text = self.decode(token, update)?;
        let mut parts = self.parser.push(&text);
        let mut end = self.end(stop);
        if end.is_some() {
            parts.extend(self.parser.finish());
        }
        let is_call = |part: &AnswerEvent| matches!(part, AnswerEvent::ToolArguments { .. });
        let first_call = parts.iter().position(is_call);
        self.has_calls |= first_call.is_some();
        match (first_call, &end) {
            (Some(first), _) if self.is_single_call => {
                parts.truncate(first + 1);
                end = Some(AnswerEnd::ToolCalls);
            }
            (_, Some(AnswerEnd::EndOfTurn)) if self.has_calls => end = Some(AnswerEnd::ToolCalls),
            _ => {}
        }
        self.progress = match (&end, stop) {
            (None, _) => AnswerProgress::Running,
            (Some(_), Some(_)) => AnswerProgress::Ended,
            (Some(_), None) => AnswerProgress::EndedEarly,
        };
        update.parts.extend(parts);
        update.end = end;
        Ok(())
    }

    /// Decodes a token. Returns the text that later tokens cannot change, and adds the token to the
    /// update unless it only ends the answer.
    fn decode(
        &mut self,
        token: GeneratedToken,
        update: &mut AnswerUpdate,
    ) -> tinkex_text::Result<String> {
        let stop = token.stop;
        let only_ends = stop == Some(StopReason::Stop) && self.end_tokens.contains(&token.token);
        let mut text = String::new();
        if !only_ends {
            text = self.decoder.push(token.token)?;
            update.tokens.push(token);
        }
        if stop.is_some() {
            text.push_str(&self.decoder.finish()?);
        }
        Ok(text)
    }

    /// Returns why the text ends after a token with this stop reason, regardless of tool calls.
    fn end(&self, stop: Option<StopReason>) -> Option<AnswerEnd> {
        match (self.decoder.matched_stop(), stop) {
            (Some(string), _) => Some(AnswerEnd::StopString(string.to_owned())),
            (None, Some(StopReason::Length)) => Some(AnswerEnd::Length),
            (None, Some(StopReason::Stop)) => Some(AnswerEnd::EndOfTurn),
            (None, None) => None,
        }
    }
}
