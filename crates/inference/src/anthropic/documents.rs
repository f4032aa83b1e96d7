//! Responses and events of `messages`.

use serde::Serialize;
use serde_json::value::RawValue;

use crate::chat::{Answer, AnswerEnd, AnswerUsage};

/// A message of the assistant: the response, or the beginning of a stream.
#[derive(Debug, Serialize)]
pub(super) struct MessageDocument<'a> {
    pub(super) id: &'a str,
    #[serde(rename = "type")]
    pub(super) kind: &'static str,
    pub(super) role: &'static str,
    pub(super) model: &'a str,
    pub(super) content: Vec<ContentBlock>,
    pub(super) stop_reason: Option<&'static str>,
    pub(super) stop_sequence: Option<String>,
    pub(super) usage: MessageUsage,
}

/// Part of a message.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum ContentBlock {
    Text {
        text: String,
    },
    Thinking {
        thinking: String,
        /// Always empty: this server does not verify reasoning that clients send back.
        signature: &'static str,
    },
    ToolUse {
        id: String,
        name: String,
        input: Box<RawValue>,
    },
}

/// Next part of a content block.
#[derive(Debug, Serialize)]
#[serde(tag = "type")]
pub(super) enum BlockDelta {
    #[serde(rename = "text_delta")]
    Text { text: String },
    #[serde(rename = "thinking_delta")]
    Thinking { thinking: String },
    #[serde(rename = "input_json_delta")]
    InputJson { partial_json: String },
}

/// An event of a stream. The name of the event is the value of its `type` field.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum StreamEvent<'a> {
    MessageStart { message: MessageDocument<'a> },
    ContentBlockStart { index: usize, content_block: ContentBlock },
    Ping,
    ContentBlockDelta { index: usize, delta: BlockDelta },
    ContentBlockStop { index: usize },
    MessageDelta { delta: StopDocument, usage: MessageUsage },
    MessageStop,
}

/// Why a message ended.
#[derive(Debug, Serialize)]
pub(super) struct StopDocument {
    pub(super) stop_reason: &'static str,
    pub(super) stop_sequence: Option<String>,
}

/// Number of tokens of a request.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct MessageUsage {
    /// Prompt tokens that were not found in the KV cache.
    input_tokens: usize,
    cache_creation_input_tokens: usize,
    /// Prompt tokens that were found in the KV cache.
    cache_read_input_tokens: usize,
    output_tokens: usize,
}

impl From<AnswerUsage> for MessageUsage {
    fn from(usage: AnswerUsage) -> Self {
        Self {
            input_tokens: usage.prompt_tokens - usage.cached_tokens,
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: usage.cached_tokens,
            output_tokens: usage.completion_tokens,
        }
    }
}

impl StreamEvent<'_> {
    /// Returns the name of the event.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::MessageStart { .. } => "message_start",
            Self::ContentBlockStart { .. } => "content_block_start",
            Self::Ping => "ping",
            Self::ContentBlockDelta { .. } => "content_block_delta",
            Self::ContentBlockStop { .. } => "content_block_stop",
            Self::MessageDelta { .. } => "message_delta",
            Self::MessageStop => "message_stop",
        }
    }
}

impl From<&AnswerEnd> for StopDocument {
    fn from(reason: &AnswerEnd) -> Self {
        let (stop_reason, stop_sequence) = match reason {
            AnswerEnd::EndOfTurn => ("end_turn", None),
            AnswerEnd::StopString(text) => ("stop_sequence", Some(text.clone())),
            AnswerEnd::Length => ("max_tokens", None),
            AnswerEnd::ToolCalls => ("tool_use", None),
        };
        Self { stop_reason, stop_sequence }
    }
}

impl ContentBlock {
    /// Creates a tool call with a new id.
    pub(super) fn tool_use(name: String, arguments: &str) -> Self {
        let id = format!("toolu_{}", uuid::Uuid::new_v4().simple());
        // The parser of answers returns only valid JSON objects.
        let input = RawValue::from_string(arguments.to_owned()).unwrap_or_default();
        Self::ToolUse { id, name, input }
    }
}

/// Returns the blocks of an answer, including the reasoning if `thinking` is true.
pub(super) fn content_blocks(answer: Answer, thinking: bool) -> Vec<ContentBlock> {
    let mut blocks = Vec::new();
    if thinking && !answer.reasoning.is_empty() {
        blocks.push(ContentBlock::Thinking { thinking: answer.reasoning, signature: "" });
    }
    if !answer.content.is_empty() {
        blocks.push(ContentBlock::Text { text: answer.content });
    }
    let calls = answer.tool_calls.into_iter();
    blocks.extend(calls.map(|(name, arguments)| ContentBlock::tool_use(name, &arguments)));
    blocks
}
