//! [`Answer`]: the reasoning, content and tool calls of an answer, complete or in parts.

use tinkex_text::AnswerEvent;

use crate::GeneratedToken;

/// A complete answer.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Answer {
    pub(crate) reasoning: String,
    pub(crate) content: String,
    /// Names and arguments of tool calls.
    pub(crate) tool_calls: Vec<(String, String)>,
    /// Ids of all tokens, including the token that ended the answer.
    pub(crate) token_ids: Vec<u32>,
    /// Tokens without the token that ended the answer.
    pub(crate) tokens: Vec<GeneratedToken>,
    /// Why the answer ended; `None` only before its last part was added.
    pub(crate) end: Option<AnswerEnd>,
}

/// Next part of one answer.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct AnswerUpdate {
    /// Index of the answer.
    pub(crate) index: usize,
    /// Ids of all new tokens, including the token that ended the answer.
    pub(crate) token_ids: Vec<u32>,
    /// New tokens, without the token that ended the answer.
    pub(crate) tokens: Vec<GeneratedToken>,
    /// Parts of the answer that later tokens cannot change.
    pub(crate) parts: Vec<AnswerEvent>,
    /// Why the answer ended, in its last update.
    pub(crate) end: Option<AnswerEnd>,
}

/// Why an answer ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum AnswerEnd {
    /// The model ended the answer.
    EndOfTurn,
    /// The answer contains this stop string.
    StopString(String),
    /// The answer has the maximum number of tokens.
    Length,
    /// The answer calls tools.
    ToolCalls,
}

impl Answer {
    /// Appends the next part of the answer.
    pub(super) fn add(&mut self, update: AnswerUpdate) {
        for part in update.parts {
            match part {
                AnswerEvent::Reasoning(text) => self.reasoning.push_str(&text),
                AnswerEvent::Content(text) => self.content.push_str(&text),
                AnswerEvent::ToolCallStart { name, .. } => {
                    self.tool_calls.push((name, String::new()));
                }
                AnswerEvent::ToolArguments { text, .. } => {
                    if let Some((_, arguments)) = self.tool_calls.last_mut() {
                        arguments.push_str(&text);
                    }
                }
            }
        }
        self.token_ids.extend(update.token_ids);
        self.tokens.extend(update.tokens);
        self.end = self.end.take().or(update.end);
    }
}
