//! Request of `chat/completions`.

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::chat_messages;
use super::sampling::{self, Delivery};
use crate::chat::{ChatRequest, PromptEnd, Tool, ToolChoice};
use crate::{GenerationRequest, InferenceError, Parameters};

/// Maximum of `top_logprobs`, as in the OpenAI API.
const MAX_TOP_LOGPROBS: u32 = 20;

/// A validated request to `chat/completions`.
#[derive(Debug)]
pub struct ChatCompletionRequest {
    pub(super) model: String,
    pub(super) conversation: ChatRequest,
    /// Parameters of the generation, without the prompt.
    pub(super) generation: GenerationRequest,
    pub(super) delivery: Delivery,
    /// Whether the response has log-probabilities.
    pub(super) logprobs: bool,
    /// How much the model reasons, for templates that read it.
    pub(super) reasoning_effort: Option<String>,
}

impl ChatCompletionRequest {
    /// Reads the body of a request.
    ///
    /// # Errors
    /// Names the parameter that is missing, invalid or not supported.
    pub(super) fn parse(body: &[u8]) -> Result<Self, InferenceError> {
        let mut parameters = Parameters::parse(body)?;
        let model = parameters.require("model")?;
        let (mut generation, delivery) = sampling::read(&mut parameters)?;
        generation.max_tokens = max_tokens(&mut parameters)?;
        let logprobs = parameters.take("logprobs")?.unwrap_or(false);
        generation.top_logprobs = top_logprobs(&mut parameters, logprobs)?;
        let messages: Vec<Box<RawValue>> = parameters.require("messages")?;
        let mut conversation = ChatRequest::new(chat_messages::read(&messages)?, body.len());
        conversation.tools = tools(&mut parameters)?;
        conversation.tool_choice = tool_choice(&mut parameters)?;
        conversation.parallel_tool_calls = parameters.take("parallel_tool_calls")?.unwrap_or(true);
        conversation.end = prompt_end(&mut parameters)?;
        conversation.variables = template_variables(&mut parameters)?;
        let reasoning_effort = parameters.take("reasoning_effort")?;
        parameters.refuse("response_format", |format| format["type"] == "text")?;
        parameters.refuse("modalities", |modalities| *modalities == serde_json::json!(["text"]))?;
        parameters.finish()?;
        Ok(Self { model, conversation, generation, delivery, logprobs, reasoning_effort })
    }
}

/// Reads `max_completion_tokens`, and `max_tokens`, its older name.
fn max_tokens(parameters: &mut Parameters) -> Result<Option<u32>, InferenceError> {
    let older: Option<u32> = parameters.take("max_tokens")?;
    let limit = parameters.take("max_completion_tokens")?;
    match (limit, older) {
        (Some(a), Some(b)) if a != b => {
            let reason = format!("{a} differs from max_tokens, {b}; send only one");
            Err(InferenceError::invalid("max_completion_tokens", reason))
        }
        _ => Ok(limit.or(older)),
    }
}

/// Reads `chat_template_kwargs`, an extension of vLLM: variables for the template. They must not
/// replace `messages` and `tools`, which are parameters of the request.
fn template_variables(parameters: &mut Parameters) -> Result<Vec<(String, Value)>, InferenceError> {
    let variables: serde_json::Map<String, Value> =
        parameters.take("chat_template_kwargs")?.unwrap_or_default();
    match ["messages", "tools"].iter().find(|name| variables.contains_key(**name)) {
        Some(name) => {
            let reason = format!("{name} is a parameter of the request, not of the template");
            Err(InferenceError::invalid("chat_template_kwargs", reason))
        }
        None => Ok(variables.into_iter().collect()),
    }
}

fn top_logprobs(parameters: &mut Parameters, logprobs: bool) -> Result<u32, InferenceError> {
    let top: u32 = parameters.take("top_logprobs")?.unwrap_or(0);
    let reason = if top > MAX_TOP_LOGPROBS {
        format!("{top}, expected at most {MAX_TOP_LOGPROBS}")
    } else if top > 0 && !logprobs {
        "requires logprobs: true".to_owned()
    } else {
        return Ok(top);
    };
    Err(InferenceError::invalid("top_logprobs", reason))
}

/// Reads `continue_final_message` and `add_generation_prompt`, two extensions of vLLM that continue
/// an assistant message.
fn prompt_end(parameters: &mut Parameters) -> Result<PromptEnd, InferenceError> {
    let new_message: Option<bool> = parameters.take("add_generation_prompt")?;
    let continued = parameters.take("continue_final_message")?.unwrap_or(false);
    match (continued, new_message) {
        (true, Some(true)) => {
            let reason = "contradicts add_generation_prompt: true";
            Err(InferenceError::invalid("continue_final_message", reason))
        }
        (true, _) => Ok(PromptEnd::ContinueLast),
        (false, Some(false)) => Ok(PromptEnd::AfterLast),
        (false, _) => Ok(PromptEnd::NewMessage),
    }
}

#[derive(Deserialize)]
struct ToolHead {
    #[serde(rename = "type")]
    kind: String,
    function: Option<FunctionHead>,
}

#[derive(Deserialize)]
struct FunctionHead {
    name: String,
}

fn tools(parameters: &mut Parameters) -> Result<Vec<Tool>, InferenceError> {
    let tools: Vec<Box<RawValue>> = parameters.take("tools")?.unwrap_or_default();
    let read = |(at, tool): (usize, Box<RawValue>)| {
        let path = format!("tools[{at}]");
        let invalid = |reason: String| InferenceError::invalid(&path, reason);
        let head: ToolHead =
            serde_json::from_str(tool.get()).map_err(|error| invalid(error.to_string()))?;
        match head.function {
            Some(function) if head.kind == "function" => Ok(Tool::new(function.name, tool)),
            _ => Err(invalid(format!("{:?} is not supported, expected \"function\"", head.kind))),
        }
    };
    tools.into_iter().enumerate().map(read).collect()
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected \"none\", \"auto\", \"required\" or a function")]
enum RawToolChoice {
    Mode(String),
    Named { function: FunctionHead },
}

fn tool_choice(parameters: &mut Parameters) -> Result<ToolChoice, InferenceError> {
    Ok(match parameters.take("tool_choice")? {
        None => ToolChoice::Auto,
        Some(RawToolChoice::Named { function }) => ToolChoice::Named(function.name),
        Some(RawToolChoice::Mode(mode)) => match mode.as_str() {
            "none" => ToolChoice::None,
            "auto" => ToolChoice::Auto,
            "required" => ToolChoice::Required,
            other => {
                let reason =
                    format!("{other:?}, expected \"none\", \"auto\", \"required\" or a function");
                return Err(InferenceError::invalid("tool_choice", reason));
            }
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(fields: &str) -> Result<ChatCompletionRequest, InferenceError> {
        let body = format!(
            r#"{{"model": "m", "messages": [{{"role": "user", "content": "a"}}]{fields}}}"#
        );
        ChatCompletionRequest::parse(body.as_bytes())
    }

    #[test]
    fn parameters_are_read() {
        let request = read(
            r#", "max_completion_tokens": 7, "logprobs": true, "top_logprobs": 3,
               "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
               "tool_choice": {"type": "function", "function": {"name": "f"}},
               "parallel_tool_calls": false, "continue_final_message": true,
               "chat_template_kwargs": {"enable_thinking": false},
               "response_format": {"type": "text"}, "store": false"#,
        )
        .unwrap();
        assert_eq!((request.generation.max_tokens, request.generation.top_logprobs), (Some(7), 3));
        let conversation = request.conversation;
        assert_eq!(conversation.tool_choice, ToolChoice::Named("f".to_owned()));
        assert_eq!(conversation.end, PromptEnd::ContinueLast);
        assert!(!conversation.parallel_tool_calls);
        assert_eq!(conversation.variables, [("enable_thinking".to_owned(), false.into())]);
        assert_eq!(read(r#", "max_tokens": 5"#).unwrap().generation.max_tokens, Some(5));
        let choice = |text: &str| read(text).unwrap().conversation.tool_choice;
        assert_eq!(choice(r#", "tool_choice": "none""#), ToolChoice::None);
        assert_eq!(choice(r#", "tool_choice": "required""#), ToolChoice::Required);
    }

    #[test]
    fn errors_name_the_parameter() {
        for (fields, param) in [
            (r#", "max_tokens": 1, "max_completion_tokens": 2"#, "max_completion_tokens"),
            (r#", "max_tokens": -1"#, "max_tokens"),
            (r#", "top_logprobs": 2"#, "top_logprobs"),
            (r#", "logprobs": true, "top_logprobs": 21"#, "top_logprobs"),
            (r#", "logprobs": 5"#, "logprobs"),
            (r#", "tools": [{"type": "web_search"}]"#, "tools[0]"),
            (r#", "tools": [{"type": "function", "function": {}}]"#, "tools[0]"),
            (r#", "tool_choice": "any""#, "tool_choice"),
            (r#", "tool_choice": {"type": "function"}"#, "tool_choice"),
            (r#", "response_format": {"type": "json_object"}"#, "response_format"),
            (r#", "functions": []"#, "functions"),
            (r#", "audio": {"voice": "x"}"#, "audio"),
            (r#", "chat_template_kwargs": 1"#, "chat_template_kwargs"),
            (r#", "chat_template_kwargs": {"messages": []}"#, "chat_template_kwargs"),
            (
                r#", "continue_final_message": true, "add_generation_prompt": true"#,
                "continue_final_message",
            ),
        ] {
            let error = read(fields).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{fields}: {error}");
        }
        let error = ChatCompletionRequest::parse(br#"{"model": "m"}"#).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("messages"));
    }
}
