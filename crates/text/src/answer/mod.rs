//! [`AnswerParser`]: splits the text of an answer into reasoning, content and tool calls.
//!
//! [`state`] has the state machine behind it, [`tool_call`] the JSON of a call.

mod state;
mod tool_call;

use std::sync::Arc;

use state::{ParseProgress, ParserState};

/// Part of an answer; returned by [`AnswerParser`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerEvent {
    /// Next text of the reasoning, which precedes the content.
    Reasoning(String),
    /// Next text of the content.
    Content(String),
    /// Start of a tool call.
    ToolCallStart {
        /// Number of the call in the answer, from 0.
        index: usize,
        /// Name of the tool.
        name: String,
    },
    /// Next text of the arguments of a tool call. The texts of a call together are a JSON object.
    ToolArguments {
        /// Number of the call in the answer, from 0.
        index: usize,
        /// JSON text, as the model wrote it.
        text: String,
    },
}

/// Where an answer may contain reasoning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReasoningStart {
    /// Nowhere: `<think>` is content.
    #[default]
    Never,
    /// At the beginning, after `<think>`.
    Tag,
    /// At the beginning: the prompt ends with `<think>`.
    Opened,
}

/// Splits the text of an answer, which arrives in pieces, into reasoning, content and tool calls.
///
/// * Reasoning is the text between `<think>` and `</think>` at the beginning. White space around it
///   is dropped.
/// * A tool call is `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, or, at the beginning of
///   the content, `{"name": …, "parameters": {…}}` with the name of a known tool. White space
///   between two calls and after the last call is dropped. Text that is not such a JSON object is
///   returned as content, unchanged.
/// * Everything else is content.
///
/// The events, with adjacent texts joined, do not depend on how the text is divided into pieces. A
/// tool call is returned once it is complete and known to be valid.
///
/// ```
/// use tinkex_text::{AnswerEvent, AnswerParser, ReasoningStart};
///
/// let mut parser = AnswerParser::new().reasoning(ReasoningStart::Tag).tools(["weather"]);
/// let mut events = parser.push("<think>Snow?</think>Let me look.\n<tool_call>{\"name\": \"weather\", ");
/// events.extend(parser.push("\"arguments\": {\"city\": \"Ulm\"}}</tool_call>"));
/// events.extend(parser.finish());
/// assert_eq!(events, [
///     AnswerEvent::Reasoning("Snow?".into()),
///     AnswerEvent::Content("Let me look.".into()),
///     AnswerEvent::ToolCallStart { index: 0, name: "weather".into() },
///     AnswerEvent::ToolArguments { index: 0, text: "{\"city\": \"Ulm\"}".into() },
/// ]);
/// ```
#[derive(Clone, Debug, Default)]
pub struct AnswerParser {
    reasoning: ReasoningStart,
    /// Names of the tools that the model may call; `None` if it has no tools. Shared with clones.
    tools: Option<Arc<[String]>>,
    state: ParserState,
    /// Text that is not returned yet.
    waiting: String,
    /// Number of tool calls returned so far.
    calls: usize,
}

pub(crate) const THINK: &str = "<think>";
pub(crate) const THINK_END: &str = "</think>";
const CALL: &str = "<tool_call>";
const CALL_END: &str = "</tool_call>";

impl AnswerParser {
    /// Tags that the parser recognizes. A decoder must not skip them, also if they are special
    /// tokens.
    pub const TAGS: [&str; 4] = [THINK, THINK_END, CALL, CALL_END];

    /// Tag before a tool call. A prompt that ends with it makes the model call a tool, if its
    /// template writes tool calls in this way.
    pub const TOOL_CALL_TAG: &str = CALL;

    /// Creates a parser that returns everything as content.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets where reasoning may start. Defaults to [`ReasoningStart::Never`].
    #[must_use]
    pub fn reasoning(mut self, start: ReasoningStart) -> Self {
        self.reasoning = start;
        self
    }

    /// Sets the names of the tools that the model may call. Without them tool calls are content.
    #[must_use]
    pub fn tools(mut self, names: impl IntoIterator<Item: Into<String>>) -> Self {
        self.tools = Some(names.into_iter().map(Into::into).collect());
        self
    }

    /// Adds text; returns the parts that have become certain.
    #[must_use]
    pub fn push(&mut self, text: &str) -> Vec<AnswerEvent> {
        self.waiting.push_str(text);
        self.parse(false)
    }

    /// Returns the remaining parts, once no more text follows.
    #[must_use]
    pub fn finish(&mut self) -> Vec<AnswerEvent> {
        self.parse(true)
    }

    /// Parses the waiting text until more is needed. `is_end` means that none follows.
    fn parse(&mut self, is_end: bool) -> Vec<AnswerEvent> {
        let mut events = Vec::new();
        while self.has_work(is_end) && self.step(is_end, &mut events) == ParseProgress::Continue {}
        events
    }

    /// Returns whether there is text to parse. At the end, the tag of a call that nothing follows is
    /// content, so it is parsed without text.
    fn has_work(&self, is_end: bool) -> bool {
        !self.waiting.is_empty() || is_end && matches!(self.state, ParserState::TaggedCall { .. })
    }
}

#[cfg(test)]
mod tests;
