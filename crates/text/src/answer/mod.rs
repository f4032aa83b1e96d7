//! [`AnswerParser`]: splits the text of an answer into reasoning, content and tool calls.

mod tool_call;

use std::mem;
use std::sync::Arc;

use tool_call::{JsonObjectEnd, ToolCall};

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
    /// Next text of the arguments of a tool call. All of them together are a JSON object.
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
///   between two calls and after the last is dropped. Text that is not such a JSON object is
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

/// What the waiting text is part of.
#[derive(Clone, Debug, Default)]
enum ParserState {
    /// The beginning, where reasoning may start.
    #[default]
    Start,
    /// Reasoning; whether some of it has been returned.
    Reasoning { started: bool },
    /// Content.
    Content(ContentStart),
    /// A tool call, after its tag. The white space before the tag is returned if the call is
    /// invalid. The closing tag does not start in the first `searched` bytes.
    TaggedCall { space: String, searched: usize },
    /// A JSON object that may be a tool call. The text before it is returned if it is not.
    BareJson { before: String, end: JsonObjectEnd },
}

/// What precedes content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ContentStart {
    /// Nothing.
    Nothing,
    /// Reasoning: white space is dropped.
    Reasoning,
    /// Other content.
    Content,
    /// A tool call with tags.
    TaggedCall,
    /// A tool call without tags, after which another may follow.
    BareCall,
}

pub(crate) const THINK: &str = "<think>";
pub(crate) const THINK_END: &str = "</think>";
const CALL: &str = "<tool_call>";
const CALL_END: &str = "</tool_call>";

/// Whether a step of the parser needs more text.
#[derive(PartialEq)]
enum Progress {
    Again,
    NeedsText,
}

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

    fn parse(&mut self, is_end: bool) -> Vec<AnswerEvent> {
        let mut events = Vec::new();
        // An unfinished call without text is content at the end.
        while (!self.waiting.is_empty()
            || is_end && matches!(self.state, ParserState::TaggedCall { .. }))
            && self.step(is_end, &mut events) == Progress::Again
        {}
        events
    }

    fn step(&mut self, is_end: bool, events: &mut Vec<AnswerEvent>) -> Progress {
        match mem::take(&mut self.state) {
            ParserState::Start => self.start(is_end),
            ParserState::Reasoning { started } => self.reason(started, is_end, events),
            ParserState::Content(start) => match self.tools.is_some() {
                true => self.content(start, is_end, events),
                false => self.content_without_tools(start, events),
            },
            ParserState::TaggedCall { space, searched } => {
                self.tagged_call(space, searched, is_end, events)
            }
            ParserState::BareJson { before, end } => self.bare_json(before, end, is_end, events),
        }
    }

    fn start(&mut self, is_end: bool) -> Progress {
        let text = self.waiting.trim_start();
        match self.reasoning {
            ReasoningStart::Never => self.state = ParserState::Content(ContentStart::Nothing),
            _ if text.starts_with(THINK) => {
                self.waiting = text[THINK.len()..].to_owned();
                self.state = ParserState::Reasoning { started: false };
            }
            _ if THINK.starts_with(text) && !is_end => {
                self.state = ParserState::Start;
                return Progress::NeedsText;
            }
            ReasoningStart::Tag => self.state = ParserState::Content(ContentStart::Nothing),
            ReasoningStart::Opened => self.state = ParserState::Reasoning { started: false },
        }
        Progress::Again
    }

    fn reason(&mut self, started: bool, is_end: bool, events: &mut Vec<AnswerEvent>) -> Progress {
        let end = self.waiting.find(THINK_END);
        let certain = match end {
            Some(end) => self.waiting[..end].trim_end().len(),
            None if is_end => self.waiting.trim_end().len(),
            None => {
                let partial = partial_tag(&self.waiting, THINK_END);
                self.waiting[..self.waiting.len() - partial].trim_end().len()
            }
        };
        let text = &self.waiting[..certain];
        let text = if started { text } else { text.trim_start() };
        let started = started || !text.is_empty();
        if !text.is_empty() {
            events.push(AnswerEvent::Reasoning(text.to_owned()));
        }
        if let Some(end) = end {
            self.waiting.drain(..end + THINK_END.len());
            self.state = ParserState::Content(ContentStart::Reasoning);
            return Progress::Again;
        }
        self.waiting.drain(..certain);
        self.state = ParserState::Reasoning { started };
        Progress::NeedsText
    }

    fn content_without_tools(
        &mut self,
        start: ContentStart,
        events: &mut Vec<AnswerEvent>,
    ) -> Progress {
        let text = mem::take(&mut self.waiting);
        let text = match start {
            ContentStart::Reasoning => text.trim_start().to_owned(),
            _ => text,
        };
        self.state = ParserState::Content(match text.is_empty() {
            true => start,
            false => ContentStart::Content,
        });
        content(text, events);
        Progress::NeedsText
    }

    fn content(
        &mut self,
        start: ContentStart,
        is_end: bool,
        events: &mut Vec<AnswerEvent>,
    ) -> Progress {
        let is_space = |c: char| c.is_whitespace() || (start == ContentStart::BareCall && c == ';');
        let space = self.waiting.len() - self.waiting.trim_start_matches(is_space).len();
        let text = &self.waiting[space..];
        if start != ContentStart::Content && text.is_empty() {
            // The space is returned only if content precedes or follows it.
            if is_end && start == ContentStart::Nothing {
                content(mem::take(&mut self.waiting), events);
            }
            self.state = ParserState::Content(start);
            return Progress::NeedsText;
        }
        if text.starts_with('{')
            && !matches!(start, ContentStart::Content | ContentStart::TaggedCall)
        {
            let kept = if start == ContentStart::Reasoning { 0 } else { space };
            let before = self.waiting[..kept].to_owned();
            self.waiting.drain(..space);
            self.state = ParserState::BareJson { before, end: JsonObjectEnd::default() };
            return Progress::Again;
        }
        if start == ContentStart::Reasoning {
            self.waiting.drain(..space);
        }
        if let Some(tag) = self.waiting.find(CALL) {
            let certain = without_space(&self.waiting[..tag], is_space);
            let space = self.waiting[certain..tag].to_owned();
            content(self.waiting[..certain].to_owned(), events);
            self.waiting.drain(..tag + CALL.len());
            self.state = ParserState::TaggedCall { space, searched: 0 };
            return Progress::Again;
        }
        let certain = match is_end {
            true => self.waiting.len(),
            false => {
                let partial = partial_tag(&self.waiting, CALL);
                without_space(&self.waiting[..self.waiting.len() - partial], is_space)
            }
        };
        content(self.waiting.drain(..certain).collect(), events);
        self.state = ParserState::Content(match certain {
            0 => start,
            _ => ContentStart::Content,
        });
        Progress::NeedsText
    }

    fn tagged_call(
        &mut self,
        space: String,
        searched: usize,
        is_end: bool,
        events: &mut Vec<AnswerEvent>,
    ) -> Progress {
        let end = self.waiting[searched..].find(CALL_END).map(|at| searched + at);
        if end.is_none() && !is_end {
            let searched = self.waiting.len() - partial_tag(&self.waiting, CALL_END);
            self.state = ParserState::TaggedCall { space, searched };
            return Progress::NeedsText;
        }
        // The model may end its answer without the closing tag.
        let (len, after) = match end {
            Some(end) => (end, end + CALL_END.len()),
            None => (self.waiting.len(), self.waiting.len()),
        };
        match ToolCall::parse(&self.waiting[..len]) {
            Some(call) => {
                self.call(call, events);
                self.state = ParserState::Content(ContentStart::TaggedCall);
            }
            None => {
                content(format!("{space}{CALL}{}", &self.waiting[..after]), events);
                self.state = ParserState::Content(ContentStart::Content);
            }
        }
        self.waiting.drain(..after);
        Progress::Again
    }

    fn bare_json(
        &mut self,
        before: String,
        mut end: JsonObjectEnd,
        is_end: bool,
        events: &mut Vec<AnswerEvent>,
    ) -> Progress {
        let Some(len) = end.find(&self.waiting) else {
            if is_end {
                content(format!("{before}{}", mem::take(&mut self.waiting)), events);
            }
            self.state = ParserState::BareJson { before, end };
            return Progress::NeedsText;
        };
        let names = self.tools.as_deref().unwrap_or_default();
        let call = ToolCall::parse(&self.waiting[..len]);
        match call.filter(|call| names.contains(&call.name)) {
            Some(call) => {
                self.waiting.drain(..len);
                self.call(call, events);
                self.state = ParserState::Content(ContentStart::BareCall);
            }
            None => {
                let object: String = self.waiting.drain(..len).collect();
                content(format!("{before}{object}"), events);
                self.state = ParserState::Content(ContentStart::Content);
            }
        }
        Progress::Again
    }

    fn call(&mut self, call: ToolCall, events: &mut Vec<AnswerEvent>) {
        let index = self.calls;
        self.calls += 1;
        events.push(AnswerEvent::ToolCallStart { index, name: call.name });
        events.push(AnswerEvent::ToolArguments { index, text: call.arguments });
    }
}

fn content(text: String, events: &mut Vec<AnswerEvent>) {
    if !text.is_empty() {
        events.push(AnswerEvent::Content(text));
    }
}

/// Returns the length of the longest start of `tag` that `text` ends with.
fn partial_tag(text: &str, tag: &str) -> usize {
    (1..tag.len()).rev().find(|len| text.ends_with(&tag[..*len])).unwrap_or(0)
}

/// Returns the length of a text without the white space at its end; 0 if it has only characters
/// that are dropped between tool calls.
fn without_space(text: &str, is_space: impl Fn(char) -> bool) -> usize {
    if text.chars().all(is_space) { 0 } else { text.trim_end().len() }
}

#[cfg(test)]
mod tests;
