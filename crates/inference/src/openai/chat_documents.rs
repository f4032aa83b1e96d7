//! Responses and events of `chat/completions`.

use serde::Serialize;

use super::chat_logprobs::ChatLogprobs;
use super::chunk::ChunkHead;
use super::usage::UsageDocument;
use crate::chat::AnswerEnd;

/// A complete response, or the last event of a stream, which has no choices.
#[derive(Debug, Serialize)]
pub(super) struct ChatDocument<'a, C> {
    #[serde(flatten)]
    pub(super) head: ChunkHead<'a>,
    pub(super) choices: Vec<C>,
    /// Tokens of the prompt, if the request has `return_token_ids`; not in events.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_token_ids: Option<&'a [u32]>,
    pub(super) usage: UsageDocument,
}

/// A complete answer.
#[derive(Debug, Serialize)]
pub(super) struct ChatChoice {
    pub(super) index: usize,
    pub(super) message: ChatMessageDocument,
    pub(super) logprobs: Option<ChatLogprobs>,
    pub(super) finish_reason: &'static str,
    /// All sampled tokens, if the request has `return_token_ids`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) token_ids: Option<Vec<u32>>,
}

#[derive(Debug, Serialize)]
pub(super) struct ChatMessageDocument {
    pub(super) role: &'static str,
    /// `None` if the answer only calls tools.
    pub(super) content: Option<String>,
    pub(super) refusal: Option<()>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) tool_calls: Vec<ToolCallDocument>,
}

/// Part of an answer in an event.
#[derive(Debug, Serialize)]
pub(super) struct ChatChoiceDelta {
    pub(super) index: usize,
    pub(super) delta: MessageDelta,
    pub(super) logprobs: Option<ChatLogprobs>,
    pub(super) finish_reason: Option<&'static str>,
    /// New tokens, if the request has `return_token_ids`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) token_ids: Option<Vec<u32>>,
}

#[derive(Debug, Default, Serialize)]
pub(super) struct MessageDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) tool_calls: Vec<ToolCallDocument>,
}

/// A tool call, or a part of a tool call in an event.
#[derive(Debug, Serialize)]
pub(super) struct ToolCallDocument {
    /// Number of the call in the answer; in events only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub(super) kind: Option<&'static str>,
    pub(super) function: FunctionCall,
}

#[derive(Debug, Serialize)]
pub(super) struct FunctionCall {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) name: Option<String>,
    pub(super) arguments: String,
}

impl ToolCallDocument {
    /// Creates a call with a new id.
    pub(super) fn new(index: Option<usize>, name: String, arguments: String) -> Self {
        let id = format!("call_{}", uuid::Uuid::new_v4().simple());
        let function = FunctionCall { name: Some(name), arguments };
        Self { index, id: Some(id), kind: Some("function"), function }
    }

    /// Creates the next part of the arguments of a call.
    pub(super) fn arguments(index: usize, arguments: String) -> Self {
        let function = FunctionCall { name: None, arguments };
        Self { index: Some(index), id: None, kind: None, function }
    }
}

/// Returns the name of a reason in the OpenAI API.
pub(super) fn finish_reason(reason: &AnswerEnd) -> &'static str {
    match reason {
        AnswerEnd::EndOfTurn | AnswerEnd::StopString(_) => "stop",
        AnswerEnd::Length => "length",
        AnswerEnd::ToolCalls => "tool_calls",
    }
}
