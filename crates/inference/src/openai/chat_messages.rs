//! Messages of `chat/completions`.

use serde::Deserialize;
use serde_json::value::RawValue;
use tinkex_text::Message;

use crate::chat::{ChatMessage, PastToolCall, TextOrParts, read_list};
use crate::{InferenceError, Parameters};

/// Reads the messages of a conversation.
///
/// # Errors
/// Names the field that is invalid, for example `messages[2].content`.
pub(super) fn read(messages: &[Box<RawValue>]) -> Result<Vec<Message>, InferenceError> {
    if messages.is_empty() {
        return Err(InferenceError::invalid("messages", "expected at least one message"));
    }
    read_list("messages", messages, read_message)
}

fn read_message(fields: &mut Parameters) -> Result<Message, InferenceError> {
    let role: String = fields.require("role")?;
    let role = match role.as_str() {
        // Chat templates have only one role for instructions.
        "system" | "developer" => "system",
        "user" => "user",
        "assistant" => "assistant",
        "tool" => "tool",
        other => {
            let reason = format!(
                "{other:?}, expected \"system\", \"developer\", \"user\", \"assistant\" or \"tool\""
            );
            return Err(InferenceError::invalid("role", reason));
        }
    };
    let content = content(fields)?;
    let mut message = ChatMessage::new(role, String::new());
    message.name = fields.take("name")?;
    match role {
        "assistant" => {
            message.reasoning_content = fields.take("reasoning_content")?;
            let calls: Vec<Box<RawValue>> = fields.take("tool_calls")?.unwrap_or_default();
            message.tool_calls = read_list("tool_calls", &calls, tool_call)?;
            // Responses contain `annotations`, so clients send the field back in conversations.
            fields.ignore(&["annotations"]);
        }
        "tool" => message.tool_call_id = fields.take("tool_call_id")?,
        _ => {}
    }
    message.content = match content {
        Some(content) => content,
        // An answer that only calls tools has no content.
        None if role == "assistant" => String::new(),
        None => return Err(InferenceError::invalid("content", "required")),
    };
    message.into_message()
}

/// Reads the content of a message; parts are joined by line breaks.
fn content(fields: &mut Parameters) -> Result<Option<String>, InferenceError> {
    let Some(content) = TextOrParts::take(fields, "content")? else { return Ok(None) };
    let texts = content.map(
        "content",
        |text| text,
        |part| {
            let kind: String = part.require("type")?;
            if kind != "text" {
                let reason = format!("{kind:?} is not supported, expected \"text\"");
                return Err(InferenceError::invalid("type", reason));
            }
            part.require("text")
        },
    )?;
    Ok(Some(texts.join("\n")))
}

#[derive(Deserialize)]
struct CalledFunction {
    name: String,
    #[serde(default)]
    arguments: String,
}

fn tool_call(fields: &mut Parameters) -> Result<PastToolCall, InferenceError> {
    // Some clients leave out the id and the type, which templates do not need.
    let id: Option<String> = fields.take("id")?;
    let kind: Option<String> = fields.take("type")?;
    if let Some(kind) = kind.filter(|kind| kind != "function") {
        let reason = format!("{kind:?} is not supported, expected \"function\"");
        return Err(InferenceError::invalid("type", reason));
    }
    let function: CalledFunction = fields.require("function")?;
    // Streamed calls have an index.
    fields.ignore(&["index"]);
    let text = match function.arguments.trim() {
        "" => "{}",
        text => text,
    };
    let arguments: Option<Box<RawValue>> =
        serde_json::from_str(text).ok().filter(|_| text.starts_with('{'));
    let arguments = arguments.ok_or_else(|| {
        InferenceError::invalid("function.arguments", "expected the text of a JSON object")
    })?;
    Ok(PastToolCall::new(id.unwrap_or_default(), function.name, arguments))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(text: &str) -> Result<Vec<Message>, InferenceError> {
        read(&serde_json::from_str::<Vec<Box<RawValue>>>(text).unwrap())
    }

    #[test]
    fn messages_become_those_of_templates() {
        let messages = read_text(
            r#"[{"role": "developer", "content": "brief"},
                {"role": "user", "name": "Ann",
                 "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": null, "refusal": null, "tool_calls": [{"id": "c1",
                 "type": "function", "function": {"name": "f", "arguments": "{\"z\": 1, \"a\": 2}"}}]},
                {"role": "tool", "tool_call_id": "c1", "content": "snow"},
                {"role": "assistant", "content": "x", "reasoning_content": "y"}]"#,
        )
        .unwrap();
        let texts: Vec<String> =
            messages.iter().map(|message| serde_json::to_string(message).unwrap()).collect();
        assert_eq!(
            texts,
            [
                r#"{"role":"system","content":"brief"}"#,
                r#"{"role":"user","content":"a\nb","name":"Ann"}"#,
                r#"{"role":"assistant","content":"","tool_calls":[{"id":"c1","type":"function","function":{"name":"f","arguments":{"z":1,"a":2}}}]}"#,
                r#"{"role":"tool","content":"snow","tool_call_id":"c1"}"#,
                r#"{"role":"assistant","content":"x","reasoning_content":"y"}"#,
            ]
        );
    }

    #[test]
    fn errors_name_the_field() {
        for (text, param) in [
            ("[]", "messages"),
            ("[1]", "messages[0]"),
            (r#"[{"content": "a"}]"#, "messages[0].role"),
            (r#"[{"role": "robot", "content": "a"}]"#, "messages[0].role"),
            (r#"[{"role": "user"}]"#, "messages[0].content"),
            (r#"[{"role": "user", "content": 5}]"#, "messages[0].content"),
            (
                r#"[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]"#,
                "messages[0].content[0].type",
            ),
            (r#"[{"role": "user", "content": "a", "audio": {"id": "x"}}]"#, "messages[0].audio"),
            (
                r#"[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "x"}}]}]"#,
                "messages[0].tool_calls[0].function.arguments",
            ),
            (
                r#"[{"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "f"}}]}]"#,
                "messages[0].tool_calls[0].type",
            ),
        ] {
            let error = read_text(text).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{text}: {error}");
            assert!(error.to_string().starts_with(&format!("{param}: ")), "{error}");
        }
    }
}
