//! Messages of the Anthropic API, which consist of content blocks.

use serde_json::value::RawValue;
use tinkex_text::Message;

use crate::chat::{ChatMessage, PastToolCall, TextOrParts, read_list};
use crate::{InferenceError, Parameters};

/// A content block.
enum Block {
    Text(String),
    Thinking(String),
    ToolUse(PastToolCall),
    ToolResult {
        id: String,
        content: String,
    },
    /// A block that the model does not read.
    Skipped,
}

/// Reads the messages of a conversation.
///
/// # Errors
/// Names the field that is invalid, for example `messages[2].content`.
pub(super) fn read(messages: &[Box<RawValue>]) -> Result<Vec<Message>, InferenceError> {
    if messages.is_empty() {
        return Err(InferenceError::invalid("messages", "expected at least one message"));
    }
    let messages = read_list("messages", messages, |fields| {
        let role: String = fields.require("role")?;
        let content = TextOrParts::take(fields, "content")?
            .ok_or_else(|| InferenceError::invalid("content", "required"))?;
        match role.as_str() {
            "user" => user_messages(content.map("content", Block::Text, user_block)?),
            "assistant" => {
                assistant_message(content.map("content", Block::Text, assistant_block)?)
            }
            other => {
                let reason = format!("{other:?}, expected \"user\" or \"assistant\"");
                Err(InferenceError::invalid("role", reason))
            }
        }
    })?;
    Ok(messages.into_iter().flatten().collect())
}

/// Reads `system`: a text, or text blocks, which are joined by line breaks.
pub(super) fn system(parameters: &mut Parameters) -> Result<Option<Message>, InferenceError> {
    let Some(content) = TextOrParts::take(parameters, "system")? else { return Ok(None) };
    let texts = content.map("system", |text| text, text_block)?;
    ChatMessage::new("system", texts.join("\n")).into_message().map(Some)
}

fn user_block(fields: &mut Parameters) -> Result<Block, InferenceError> {
    match block_type(fields)?.as_str() {
        "text" => fields.require("text").map(Block::Text),
        "tool_result" => {
            let id = fields.require("tool_use_id")?;
            // Chat templates cannot express that a call failed: the model sees it from the content
            // only.
            fields.ignore(&["is_error", "toolset_name"]);
            let content = match TextOrParts::take(fields, "content")? {
                None => String::new(),
                Some(content) => content.map("content", |text| text, text_block)?.join("\n"),
            };
            Ok(Block::ToolResult { id, content })
        }
        other => Err(unsupported(other, "\"text\" or \"tool_result\"")),
    }
}

fn assistant_block(fields: &mut Parameters) -> Result<Block, InferenceError> {
    match block_type(fields)?.as_str() {
        "text" => fields.require("text").map(Block::Text),
        "thinking" => {
            fields.ignore(&["signature"]);
            fields.require("thinking").map(Block::Thinking)
        }
        "redacted_thinking" => {
            fields.ignore(&["data"]);
            Ok(Block::Skipped)
        }
        "tool_use" => {
            // These fields name the origin of a call; calls of this server have neither field.
            fields.ignore(&["caller", "toolset_name"]);
            let id = fields.require("id")?;
            let name = fields.require("name")?;
            let input: Box<RawValue> = fields.require("input")?;
            if !input.get().starts_with('{') {
                return Err(InferenceError::invalid("input", "expected an object"));
            }
            Ok(Block::ToolUse(PastToolCall::new(id, name, input)))
        }
        other => Err(unsupported(other, "\"text\", \"thinking\" or \"tool_use\"")),
    }
}

fn text_block(fields: &mut Parameters) -> Result<String, InferenceError> {
    match block_type(fields)?.as_str() {
        "text" => fields.require("text"),
        other => Err(unsupported(other, "\"text\"")),
    }
}

fn block_type(fields: &mut Parameters) -> Result<String, InferenceError> {
    // The server caches every prompt, and its answers have no citations.
    fields.ignore(&["cache_control", "citations"]);
    fields.require("type")
}

fn unsupported(kind: &str, expected: &str) -> InferenceError {
    InferenceError::invalid("type", format!("{kind:?} is not supported, expected {expected}"))
}

/// Converts the blocks of a user message. Results of tool calls become separate messages with the
/// role `tool`; the texts between them become messages of the user.
fn user_messages(blocks: Vec<Block>) -> Result<Vec<Message>, InferenceError> {
    let mut messages = Vec::new();
    let mut texts = Vec::new();
    for block in blocks {
        match block {
            Block::Text(text) => texts.push(text),
            Block::ToolResult { id, content } => {
                push_texts(&mut messages, &mut texts)?;
                let mut message = ChatMessage::new("tool", content);
                message.tool_call_id = Some(id);
                messages.push(message.into_message()?);
            }
            _ => {}
        }
    }
    if messages.is_empty() && texts.is_empty() {
        texts.push(String::new());
    }
    push_texts(&mut messages, &mut texts)?;
    Ok(messages)
}

fn push_texts(messages: &mut Vec<Message>, texts: &mut Vec<String>) -> Result<(), InferenceError> {
    if !texts.is_empty() {
        messages.push(ChatMessage::new("user", texts.join("\n")).into_message()?);
        texts.clear();
    }
    Ok(())
}

/// Converts the blocks of an assistant message to one message.
fn assistant_message(blocks: Vec<Block>) -> Result<Vec<Message>, InferenceError> {
    let mut message = ChatMessage::new("assistant", String::new());
    let mut texts = Vec::new();
    let mut thoughts = Vec::new();
    for block in blocks {
        match block {
            Block::Text(text) => texts.push(text),
            Block::Thinking(text) => thoughts.push(text),
            Block::ToolUse(call) => message.tool_calls.push(call),
            _ => {}
        }
    }
    message.content = texts.join("\n");
    message.reasoning_content = (!thoughts.is_empty()).then(|| thoughts.join("\n"));
    Ok(vec![message.into_message()?])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(text: &str) -> Result<Vec<Message>, InferenceError> {
        read(&serde_json::from_str::<Vec<Box<RawValue>>>(text).unwrap())
    }

    #[test]
    fn blocks_become_the_messages_of_templates() {
        let messages = read_text(
            r#"[{"role": "user", "content": "hi"},
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"},
                 {"type": "text", "text": "look"},
                 {"type": "tool_use", "id": "t1", "name": "f", "input": {"z": 1, "a": [2]}}]},
                {"role": "user", "content": [
                 {"type": "tool_result", "tool_use_id": "t1", "is_error": false,
                  "content": [{"type": "text", "text": "snow"}]},
                 {"type": "text", "text": "and?", "cache_control": {"type": "ephemeral"}}]}]"#,
        )
        .unwrap();
        let texts: Vec<String> =
            messages.iter().map(|message| serde_json::to_string(message).unwrap()).collect();
        assert_eq!(
            texts,
            [
                r#"{"role":"user","content":"hi"}"#,
                r#"{"role":"assistant","content":"look","reasoning_content":"hm","tool_calls":[{"id":"t1","type":"function","function":{"name":"f","arguments":{"z":1,"a":[2]}}}]}"#,
                r#"{"role":"tool","content":"snow","tool_call_id":"t1"}"#,
                r#"{"role":"user","content":"and?"}"#,
            ]
        );
    }

    #[test]
    fn errors_name_the_field() {
        for (text, param) in [
            ("[]", "messages"),
            (r#"[{"role": "system", "content": "a"}]"#, "messages[0].role"),
            (r#"[{"role": "user"}]"#, "messages[0].content"),
            (r#"[{"role": "user", "content": {}}]"#, "messages[0].content"),
            (
                r#"[{"role": "user", "content": [{"type": "image", "source": {}}]}]"#,
                "messages[0].content[0].type",
            ),
            (r#"[{"role": "user", "content": [{"type": "text"}]}]"#, "messages[0].content[0].text"),
            (
                r#"[{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": 1}]}]"#,
                "messages[0].content[0].input",
            ),
            (r#"[{"role": "user", "content": "a", "name": "b"}]"#, "messages[0].name"),
        ] {
            let error = read_text(text).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{text}: {error}");
        }
    }
}
