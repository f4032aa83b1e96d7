//! Requests of `messages` and `messages/count_tokens`.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::message_blocks;
use crate::chat::{ChatRequest, PromptEnd, Tool, ToolChoice, read_list};
use crate::{GenerationRequest, InferenceError, Parameters};

/// Parameters that have no effect on the answer.
const IGNORED: &[&str] = &["cache_control", "metadata", "service_tier"];

/// A validated request to `messages`.
#[derive(Debug)]
pub struct MessagesRequest {
    pub(super) model: String,
    pub(super) conversation: ChatRequest,
    /// Parameters of the generation, without the prompt.
    pub(super) generation: GenerationRequest,
    pub(super) stream: bool,
    /// Whether the response contains the reasoning of the model.
    pub(super) thinking: bool,
}

/// A validated request to `messages/count_tokens`.
#[derive(Debug)]
pub struct CountTokensRequest {
    pub(super) model: String,
    pub(super) conversation: ChatRequest,
    thinking: bool,
}

impl MessagesRequest {
    /// Reads the body of a request.
    ///
    /// # Errors
    /// Names the parameter that is missing, invalid or not supported.
    pub(super) fn parse(body: &[u8]) -> Result<Self, InferenceError> {
        let mut parameters = Parameters::parse(body)?;
        let max_tokens: u32 = parameters.require("max_tokens")?;
        let prompt = CountTokensRequest::read_prompt(&mut parameters, body.len())?;
        let mut generation = GenerationRequest::new(Vec::new());
        generation.max_tokens = Some(max_tokens);
        generation.temperature = parameters.take("temperature")?.unwrap_or(1.0);
        generation.top_p = parameters.take("top_p")?.unwrap_or(1.0);
        generation.top_k = parameters.take::<u32>("top_k")?.filter(|k| *k > 0);
        generation.stop_texts = parameters.take("stop_sequences")?.unwrap_or_default();
        if generation.stop_texts.iter().any(String::is_empty) {
            let reason = "expected strings that are not empty";
            return Err(InferenceError::invalid("stop_sequences", reason));
        }
        let stream = parameters.take("stream")?.unwrap_or(false);
        parameters.finish()?;
        let CountTokensRequest { model, conversation, thinking } = prompt;
        Ok(Self { model, conversation, generation, stream, thinking })
    }
}

impl CountTokensRequest {
    /// Reads the body of a request, which has the parameters of the prompt only.
    ///
    /// # Errors
    /// Names the parameter that is missing, invalid or not supported.
    pub(super) fn parse(body: &[u8]) -> Result<Self, InferenceError> {
        let mut parameters = Parameters::parse(body)?;
        let request = Self::read_prompt(&mut parameters, body.len())?;
        parameters.finish()?;
        Ok(request)
    }

    /// Reads the parameters of the prompt from a body of `body_bytes` bytes.
    fn read_prompt(parameters: &mut Parameters, body_bytes: usize) -> Result<Self, InferenceError> {
        parameters.ignore(IGNORED);
        let model = parameters.require("model")?;
        let messages: Vec<Box<RawValue>> = parameters.require("messages")?;
        let mut all: Vec<_> = message_blocks::system(parameters)?.into_iter().collect();
        all.extend(message_blocks::read(&messages)?);
        let continues = all.last().is_some_and(tinkex_text::Message::is_assistant);
        let mut conversation = ChatRequest::new(all, body_bytes);
        if continues {
            conversation.end = PromptEnd::ContinueLast;
        }
        let tools: Vec<Box<RawValue>> = parameters.take("tools")?.unwrap_or_default();
        conversation.tools = read_list("tools", &tools, tool)?;
        if let Some(choice) = parameters.take::<RawToolChoice>("tool_choice")? {
            conversation.parallel_tool_calls = !choice.disable_parallel_tool_use;
            conversation.tool_choice = choice.choice()?;
        }
        let thinking = thinking(parameters)?;
        // Templates of models that can reason read this variable; other templates ignore it.
        conversation.variables.push(("enable_thinking".to_owned(), thinking.into()));
        Ok(Self { model, conversation, thinking })
    }
}

fn tool(fields: &mut Parameters) -> Result<Tool, InferenceError> {
    let kind: Option<String> = fields.take("type")?;
    if let Some(kind) = kind.filter(|kind| kind != "custom") {
        let reason = format!("{kind:?} is not supported, expected \"custom\"");
        return Err(InferenceError::invalid("type", reason));
    }
    // As in the OpenAI API, `strict` is accepted, and the arguments of a call are not checked.
    fields.ignore(&["cache_control", "eager_input_streaming", "strict"]);
    let name = fields.require("name")?;
    let description: Option<String> = fields.take("description")?;
    let schema: Box<RawValue> = fields.require("input_schema")?;
    Tool::function(name, description.as_deref(), &schema)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawToolChoice {
    #[serde(rename = "type")]
    kind: String,
    name: Option<String>,
    #[serde(default)]
    disable_parallel_tool_use: bool,
}

impl RawToolChoice {
    fn choice(self) -> Result<ToolChoice, InferenceError> {
        match (self.kind.as_str(), self.name) {
            ("auto", None) => Ok(ToolChoice::Auto),
            ("any", None) => Ok(ToolChoice::Required),
            ("none", None) => Ok(ToolChoice::None),
            ("tool", Some(name)) => Ok(ToolChoice::Named(name)),
            _ => {
                let reason =
                    "expected the type \"auto\", \"any\" or \"none\", or \"tool\" with a name";
                Err(InferenceError::invalid("tool_choice", reason))
            }
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Thinking {
    #[serde(rename = "type")]
    kind: String,
    /// Not enforced: only `max_tokens` limits an answer.
    #[serde(default, rename = "budget_tokens")]
    _budget_tokens: Option<u32>,
    /// Reasoning is always returned as the model wrote it.
    #[serde(default, rename = "display")]
    _display: Option<String>,
}

fn thinking(parameters: &mut Parameters) -> Result<bool, InferenceError> {
    let Some(thinking) = parameters.take::<Thinking>("thinking")? else { return Ok(false) };
    match thinking.kind.as_str() {
        "enabled" | "adaptive" => Ok(true),
        "disabled" => Ok(false),
        other => {
            let reason = format!("{other:?}, expected \"enabled\", \"adaptive\" or \"disabled\"");
            Err(InferenceError::invalid("thinking", reason))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(fields: &str) -> Result<MessagesRequest, InferenceError> {
        let body = format!(
            r#"{{"model": "m", "messages": [{{"role": "user", "content": "a"}}]{fields}}}"#
        );
        MessagesRequest::parse(body.as_bytes())
    }

    #[test]
    fn parameters_are_read() {
        let request = read(
            r#", "max_tokens": 7, "system": [{"type": "text", "text": "brief"}], "top_k": 5,
               "stop_sequences": ["x"], "temperature": 0.5, "top_p": 0.9, "stream": true,
               "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
               "tool_choice": {"type": "any", "disable_parallel_tool_use": true},
               "thinking": {"type": "enabled", "budget_tokens": 1024}, "metadata": {"user_id": "u"}"#,
        )
        .unwrap();
        let generation = request.generation;
        assert_eq!((generation.max_tokens, generation.top_k), (Some(7), Some(5)));
        assert_eq!((generation.temperature, generation.top_p), (0.5, 0.9));
        assert_eq!(generation.stop_texts, ["x"]);
        assert!(request.stream && request.thinking);
        let conversation = request.conversation;
        assert_eq!(conversation.messages[0].content(), Some("brief"));
        assert_eq!(conversation.tool_choice, ToolChoice::Required);
        assert!(!conversation.parallel_tool_calls);
        assert_eq!(
            (conversation.tools[0].name.as_str(), conversation.end),
            ("f", PromptEnd::NewMessage)
        );
    }

    #[test]
    fn a_last_message_of_the_assistant_is_continued() {
        let body =
            br#"{"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "a"},
            {"role": "assistant", "content": "The"}]}"#;
        let request = MessagesRequest::parse(body).unwrap();
        assert_eq!(request.conversation.end, PromptEnd::ContinueLast);
    }

    #[test]
    fn errors_name_the_parameter() {
        for (fields, param) in [
            ("", "max_tokens"),
            (r#", "max_tokens": "x""#, "max_tokens"),
            (r#", "max_tokens": 1, "system": 5"#, "system"),
            (r#", "max_tokens": 1, "system": [{"type": "image"}]"#, "system[0].type"),
            (r#", "max_tokens": 1, "stop_sequences": [""]"#, "stop_sequences"),
            (
                r#", "max_tokens": 1, "tools": [{"type": "bash_20250124", "name": "b"}]"#,
                "tools[0].type",
            ),
            (r#", "max_tokens": 1, "tools": [{"name": "b"}]"#, "tools[0].input_schema"),
            (r#", "max_tokens": 1, "tool_choice": {"type": "tool"}"#, "tool_choice"),
            (r#", "max_tokens": 1, "thinking": {"type": "deep"}"#, "thinking"),
            (r#", "max_tokens": 1, "mcp_servers": []"#, "mcp_servers"),
        ] {
            let error = read(fields).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{fields}: {error}");
        }
    }
}
