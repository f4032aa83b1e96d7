//! [`ChatRequest`]: a conversation to answer, independent of the API.

use serde::Serialize;
use serde_json::value::RawValue;
use tinkex_text::Message;

use super::tools::{Tool, ToolChoice};
use crate::InferenceError;

/// A conversation to answer, and the settings of the answer.
#[derive(Debug)]
pub(crate) struct ChatRequest {
    pub(crate) messages: Vec<Message>,
    /// Tools that the model may call.
    pub(crate) tools: Vec<Tool>,
    pub(crate) tool_choice: ToolChoice,
    /// Whether an answer may call several tools.
    pub(crate) parallel_tool_calls: bool,
    pub(crate) end: PromptEnd,
    /// Variables for the template.
    pub(crate) variables: Vec<(String, serde_json::Value)>,
    /// Size of the body of the request in bytes, which limits the size of the prompt.
    pub(crate) body_bytes: usize,
}

/// What follows the messages in the prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum PromptEnd {
    /// The beginning of a new assistant message.
    #[default]
    NewMessage,
    /// Nothing: the answer continues the last message, an assistant message.
    ContinueLast,
    /// Nothing: the model continues after the end of the last message.
    AfterLast,
}

impl ChatRequest {
    /// Creates a conversation without tools that the model answers with a new message.
    /// `body_bytes` is the size of the body of the request.
    pub(crate) fn new(messages: Vec<Message>, body_bytes: usize) -> Self {
        Self {
            body_bytes,
            messages,
            tools: Vec::new(),
            tool_choice: ToolChoice::Auto,
            parallel_tool_calls: true,
            end: PromptEnd::NewMessage,
            variables: Vec::new(),
        }
    }
}

/// A message, before it is converted to the form that templates read.
#[derive(Debug, Default, Serialize)]
pub(crate) struct ChatMessage {
    pub(crate) role: &'static str,
    pub(crate) content: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) tool_calls: Vec<PastToolCall>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tool_call_id: Option<String>,
}

/// A tool call of an earlier message.
#[derive(Debug, Serialize)]
pub(crate) struct PastToolCall {
    id: String,
    #[serde(rename = "type")]
    kind: &'static str,
    function: PastFunction,
}

#[derive(Debug, Serialize)]
struct PastFunction {
    name: String,
    arguments: Box<RawValue>,
}

impl ChatMessage {
    pub(crate) fn new(role: &'static str, content: impl Into<String>) -> Self {
        Self { role, content: content.into(), ..Self::default() }
    }

    /// Converts the message. The text form keeps the order of fields in the arguments of tool
    /// calls, which a [`serde_json::Value`] would sort.
    pub(crate) fn into_message(self) -> Result<Message, InferenceError> {
        let converted = serde_json::to_string(&self).and_then(|text| serde_json::from_str(&text));
        converted.map_err(|error| InferenceError::invalid("messages", error))
    }
}

impl PastToolCall {
    /// Creates a call from the JSON object of its arguments.
    pub(crate) fn new(id: String, name: String, arguments: Box<RawValue>) -> Self {
        Self { id, kind: "function", function: PastFunction { name, arguments } }
    }
}
