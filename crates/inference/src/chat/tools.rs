//! Tools that a model may call.

use std::collections::HashSet;
use std::fmt::Write as _;

use serde::Serialize;
use serde_json::value::RawValue;
use tinkex_text::AnswerParser;

use super::request::ChatRequest;
use crate::InferenceError;

/// A tool that the model may call.
#[derive(Clone, Debug)]
pub(crate) struct Tool {
    pub(crate) name: String,
    /// Description for the template, in the form of the OpenAI API.
    json: Box<RawValue>,
}

/// Which tools the model must call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum ToolChoice {
    /// No tool. The prompt does not mention the tools.
    None,
    /// Any number of tools: the model decides.
    #[default]
    Auto,
    /// At least one tool.
    Required,
    /// The tool of this name, once.
    Named(String),
}

#[derive(Serialize)]
struct ToolDocument<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    function: FunctionDocument<'a>,
}

#[derive(Serialize)]
struct FunctionDocument<'a> {
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    description: Option<&'a str>,
    parameters: &'a RawValue,
}

impl Tool {
    /// Creates a tool from its name and the JSON object of its description.
    pub(crate) fn new(name: String, json: Box<RawValue>) -> Self {
        Self { name, json }
    }

    /// Creates a tool from its name, its description and the JSON schema of its parameters.
    pub(crate) fn function(
        name: String,
        description: Option<&str>,
        parameters: &RawValue,
    ) -> Result<Self, InferenceError> {
        let function = FunctionDocument { name: &name, description, parameters };
        let document = ToolDocument { kind: "function", function };
        let json = serde_json::value::to_raw_value(&document)
            .map_err(|error| InferenceError::invalid("tools", error))?;
        Ok(Self { name, json })
    }
}

impl ChatRequest {
    /// Checks that the tools have different names and that the tool choice refers to them.
    pub(super) fn check_tools(&self) -> Result<(), InferenceError> {
        let mut names = HashSet::new();
        for Tool { name, .. } in &self.tools {
            if name.is_empty() {
                return Err(InferenceError::invalid("tools", "a tool has an empty name"));
            }
            if !names.insert(name) {
                let reason = format!("two tools have the name {name:?}");
                return Err(InferenceError::invalid("tools", reason));
            }
        }
        let reason = match &self.tool_choice {
            ToolChoice::None | ToolChoice::Auto => return Ok(()),
            ToolChoice::Required if self.tools.is_empty() => "the request has no tools".to_owned(),
            ToolChoice::Named(name) if !self.tools.iter().any(|tool| tool.name == *name) => {
                format!("the request has no tool {name:?}")
            }
            _ if self.end != super::PromptEnd::NewMessage => {
                "a message that is continued cannot be forced to call a tool".to_owned()
            }
            _ => return Ok(()),
        };
        Err(InferenceError::invalid("tool_choice", reason))
    }

    /// Returns the tools that the prompt mentions, as a JSON list; `None` if the prompt mentions no
    /// tools.
    pub(super) fn tools_json(&self) -> Option<String> {
        if self.tools.is_empty() || self.tool_choice == ToolChoice::None {
            return None;
        }
        let tools: Vec<&str> = self.tools.iter().map(|tool| tool.json.get()).collect();
        Some(format!("[{}]", tools.join(", ")))
    }

    /// Returns the names of the tools that the answer may call; `None` if the answer may call no
    /// tools.
    pub(super) fn callable_tools(&self) -> Option<Vec<String>> {
        self.tools_json()?;
        Some(self.tools.iter().map(|tool| tool.name.clone()).collect())
    }

    /// Returns whether an answer ends after its first tool call.
    pub(super) fn is_single_call(&self) -> bool {
        !self.parallel_tool_calls || matches!(self.tool_choice, ToolChoice::Named(_))
    }

    /// Returns the start of a tool call that makes the model call a tool, if it must.
    pub(super) fn forced_call(&self) -> Option<String> {
        let name = match (&self.tool_choice, &self.tools[..]) {
            (ToolChoice::Named(name), _) => Some(name),
            (ToolChoice::Required, [only]) => Some(&only.name),
            (ToolChoice::Required, _) => None,
            _ => return None,
        };
        let mut call = format!("{}\n{{\"name\": ", AnswerParser::TOOL_CALL_TAG);
        match name {
            Some(name) => {
                let name = serde_json::Value::from(name.as_str());
                // Writing to a string does not fail.
                let _ = write!(call, "{name}, \"arguments\": ");
            }
            None => call.push('"'),
        }
        Some(call)
    }
}
