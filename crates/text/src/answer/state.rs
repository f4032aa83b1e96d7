//! The state machine of [`AnswerParser`].
//!
//! ```text
//! Start ──<think>──► Reasoning ──</think>──► Content ──<tool_call>──► TaggedCall
//!   └────────────────any other text───────────►│  ▲ ◄──</tool_call>────────┘
//!                                              └──┴──{ … }──► BareJson
//! ```
//!
//! Each state takes from the waiting text what is certain to belong to it. What may be the start of a
//! tag, and white space that is dropped if a tag follows, stays until more text arrives.

use std::mem;

use super::tool_call::{JsonObjectEnd, ToolCall};
use super::{AnswerEvent, AnswerParser, CALL, CALL_END, ReasoningStart, THINK, THINK_END};

/// Part of the answer to which the waiting text belongs.
#[derive(Clone, Debug, Default)]
pub(super) enum ParserState {
    /// The beginning, where reasoning may start.
    #[default]
    Start,
    /// Reasoning. `started` if some reasoning has been returned.
    Reasoning { started: bool },
    /// Content, and the part of the answer before it.
    Content(Preceding),
    /// A tool call, after its tag. The white space before the tag is returned if the call is
    /// invalid. The closing tag does not start in the first `searched` bytes.
    TaggedCall { space: String, searched: usize },
    /// A JSON object that may be a tool call. `before` is returned with the object if the object is
    /// not a call.
    BareJson { before: String, end: JsonObjectEnd },
}

/// Part of the answer before the content, which decides which white space is dropped and whether a
/// JSON object may be a tool call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Preceding {
    /// Nothing: a JSON object may be a call.
    Nothing,
    /// Reasoning: white space is dropped, and a JSON object may be a call.
    Reasoning,
    /// Other content: everything except tagged calls is content.
    Content,
    /// A tool call with tags: white space is dropped if nothing else follows.
    TaggedCall,
    /// A tool call without tags: another may follow, after white space or `;`.
    BareCall,
}

impl Preceding {
    /// Returns whether a JSON object may be a tool call without tags.
    fn allows_bare_call(self) -> bool {
        matches!(self, Self::Nothing | Self::Reasoning | Self::BareCall)
    }

    /// Returns whether a character is dropped between two tool calls.
    fn is_space(self, c: char) -> bool {
        c.is_whitespace() || (self == Self::BareCall && c == ';')
    }
}

/// Whether a step of the parser needs more text.
#[derive(PartialEq)]
pub(super) enum ParseProgress {
    Continue,
    NeedsText,
}

impl AnswerParser {
    /// Parses the waiting text in the current state, as far as it is certain.
    pub(super) fn step(&mut self, is_end: bool, events: &mut Vec<AnswerEvent>) -> ParseProgress {
        match mem::take(&mut self.state) {
            ParserState::Start => self.parse_start(is_end),
            ParserState::Reasoning { started } => self.parse_reasoning(started, is_end, events),
            ParserState::Content(preceding) if self.tools.is_some() => {
                self.parse_content(preceding, is_end, events)
            }
            ParserState::Content(preceding) => self.parse_content_without_tools(preceding, events),
            ParserState::TaggedCall { space, searched } => {
                self.parse_tagged_call(space, searched, is_end, events)
            }
            ParserState::BareJson { before, end } => {
                self.parse_bare_json(before, end, is_end, events)
            }
        }
    }

    /// Decides whether the answer begins with reasoning.
    fn parse_start(&mut self, is_end: bool) -> ParseProgress {
        let text = self.waiting.trim_start();
        match self.reasoning {
            ReasoningStart::Never => self.state = ParserState::Content(Preceding::Nothing),
            _ if text.starts_with(THINK) => {
                self.waiting = text[THINK.len()..].to_owned();
                self.state = ParserState::Reasoning { started: false };
            }
            _ if THINK.starts_with(text) && !is_end => {
                self.state = ParserState::Start;
                return ParseProgress::NeedsText;
            }
            ReasoningStart::Tag => self.state = ParserState::Content(Preceding::Nothing),
            ReasoningStart::Opened => self.state = ParserState::Reasoning { started: false },
        }
        ParseProgress::Continue
    }

    /// Returns reasoning up to its closing tag, without the white space around it.
    fn parse_reasoning(
        &mut self,
        started: bool,
        is_end: bool,
        events: &mut Vec<AnswerEvent>,
    ) -> ParseProgress {
        let tag = self.waiting.find(THINK_END);
        let text = match tag {
            Some(tag) => &self.waiting[..tag],
            None if is_end => self.waiting.as_str(),
            None => without_partial_tag(&self.waiting, THINK_END),
        };
        let text = text.trim_end();
        let certain = text.len();
        let text = if started { text } else { text.trim_start() };
        let started = started || !text.is_empty();
        if !text.is_empty() {
            events.push(AnswerEvent::Reasoning(text.to_owned()));
        }
        match tag {
            Some(tag) => {
                self.waiting.drain(..tag + THINK_END.len());
                self.state = ParserState::Content(Preceding::Reasoning);
                ParseProgress::Continue
            }
            None => {
                self.waiting.drain(..certain);
                self.state = ParserState::Reasoning { started };
                ParseProgress::NeedsText
            }
        }
    }

    /// Returns all text as content.
    fn parse_content_without_tools(
        &mut self,
        preceding: Preceding,
        events: &mut Vec<AnswerEvent>,
    ) -> ParseProgress {
        let text = mem::take(&mut self.waiting);
        let text = match preceding {
            Preceding::Reasoning => text.trim_start().to_owned(),
            _ => text,
        };
        let has_content = !text.is_empty();
        self.state = ParserState::Content(if has_content { Preceding::Content } else { preceding });
        push_content(text, events);
        ParseProgress::NeedsText
    }

    /// Returns content up to a tool call.
    fn parse_content(
        &mut self,
        preceding: Preceding,
        is_end: bool,
        events: &mut Vec<AnswerEvent>,
    ) -> ParseProgress {
        let is_space = |c: char| preceding.is_space(c);
        let space = self.waiting.len() - self.waiting.trim_start_matches(is_space).len();
        let text = &self.waiting[space..];
        if text.is_empty() && preceding != Preceding::Content {
            // The space is returned only if content precedes or follows it.
            if is_end && preceding == Preceding::Nothing {
                push_content(mem::take(&mut self.waiting), events);
            }
            self.state = ParserState::Content(preceding);
            return ParseProgress::NeedsText;
        }
        if text.starts_with('{') && preceding.allows_bare_call() {
            let kept = if preceding == Preceding::Reasoning { 0 } else { space };
            let before = self.waiting[..kept].to_owned();
            self.waiting.drain(..space);
            self.state = ParserState::BareJson { before, end: JsonObjectEnd::default() };
            return ParseProgress::Continue;
        }
        if preceding == Preceding::Reasoning {
            self.waiting.drain(..space);
        }
        if let Some(tag) = self.waiting.find(CALL) {
            let certain = without_space(&self.waiting[..tag], is_space);
            let space = self.waiting[certain..tag].to_owned();
            push_content(self.waiting[..certain].to_owned(), events);
            self.waiting.drain(..tag + CALL.len());
            self.state = ParserState::TaggedCall { space, searched: 0 };
            return ParseProgress::Continue;
        }
        let certain = if is_end {
            self.waiting.len()
        } else {
            without_space(without_partial_tag(&self.waiting, CALL), is_space)
        };
        push_content(self.waiting.drain(..certain).collect(), events);
        let has_content = certain > 0;
        self.state = ParserState::Content(if has_content { Preceding::Content } else { preceding });
        ParseProgress::NeedsText
    }

    /// Returns a tool call between its tags, or the text as content if it is not valid.
    fn parse_tagged_call(
        &mut self,
        space: String,
        searched: usize,
        is_end: bool,
        events: &mut Vec<AnswerEvent>,
    ) -> ParseProgress {
        let tag = self.waiting[searched..].find(CALL_END).map(|at| searched + at);
        if tag.is_none() && !is_end {
            let searched = without_partial_tag(&self.waiting, CALL_END).len();
            self.state = ParserState::TaggedCall { space, searched };
            return ParseProgress::NeedsText;
        }
        // The model may end its answer without the closing tag.
        let (len, after) = match tag {
            Some(tag) => (tag, tag + CALL_END.len()),
            None => (self.waiting.len(), self.waiting.len()),
        };
        match ToolCall::parse(&self.waiting[..len]) {
            Some(call) => {
                self.push_call(call, events);
                self.state = ParserState::Content(Preceding::TaggedCall);
            }
            None => {
                push_content(format!("{space}{CALL}{}", &self.waiting[..after]), events);
                self.state = ParserState::Content(Preceding::Content);
            }
        }
        self.waiting.drain(..after);
        ParseProgress::Continue
    }

    /// Returns a JSON object as a tool call if it calls a known tool, and as content otherwise.
    fn parse_bare_json(
        &mut self,
        before: String,
        mut end: JsonObjectEnd,
        is_end: bool,
        events: &mut Vec<AnswerEvent>,
    ) -> ParseProgress {
        let Some(len) = end.find(&self.waiting) else {
            if is_end {
                push_content(format!("{before}{}", mem::take(&mut self.waiting)), events);
            }
            self.state = ParserState::BareJson { before, end };
            return ParseProgress::NeedsText;
        };
        let object: String = self.waiting.drain(..len).collect();
        let tools = self.tools.as_deref().unwrap_or_default();
        match ToolCall::parse(&object).filter(|call| tools.contains(&call.name)) {
            Some(call) => {
                self.push_call(call, events);
                self.state = ParserState::Content(Preceding::BareCall);
            }
            None => {
                push_content(format!("{before}{object}"), events);
                self.state = ParserState::Content(Preceding::Content);
            }
        }
        ParseProgress::Continue
    }

    fn push_call(&mut self, call: ToolCall, events: &mut Vec<AnswerEvent>) {
        let index = self.calls;
        self.calls += 1;
        events.push(AnswerEvent::ToolCallStart { index, name: call.name });
        events.push(AnswerEvent::ToolArguments { index, text: call.arguments });
    }
}

fn push_content(text: String, events: &mut Vec<AnswerEvent>) {
    if !text.is_empty() {
        events.push(AnswerEvent::Content(text));
    }
}

/// Returns a text without the longest start of `tag` that it ends with.
fn without_partial_tag<'a>(text: &'a str, tag: &str) -> &'a str {
    let lengths = (1..tag.len()).rev();
    lengths.map(|len| &tag[..len]).find_map(|start| text.strip_suffix(start)).unwrap_or(text)
}

/// Returns the length of a text without the white space at its end; 0 if it has only characters
/// that are dropped between tool calls.
fn without_space(text: &str, is_space: impl Fn(char) -> bool) -> usize {
    if text.chars().all(is_space) { 0 } else { text.trim_end().len() }
}
