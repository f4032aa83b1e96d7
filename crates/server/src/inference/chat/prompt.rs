//! [`AnswerPrompt`]: a conversation as the model reads it.

use tinkex_text::{AnswerParser, ReasoningStart};

use super::chat_model::ChatModel;
use super::conversation::{Conversation, PromptEnd};
use crate::inference::InferenceError;

/// The prompt for an answer, and how to read the answer.
#[derive(Debug)]
pub(super) struct AnswerPrompt {
    pub(super) tokens: Vec<u32>,
    /// Parser of the answer, which has read the part of the answer that the prompt contains.
    pub(super) parser: AnswerParser,
}

impl Conversation {
    /// Renders the prompt with the chat template of a model.
    pub(super) fn prompt(&self, model: &ChatModel) -> Result<AnswerPrompt, InferenceError> {
        self.check_tools()?;
        let mut format = model.format.clone();
        for (name, value) in &self.variables {
            format = format.variable(name, value);
        }
        if let Some(tools) = self.tools_json() {
            let invalid = |error| InferenceError::invalid("tools", error);
            format = format.tools_json(&tools).map_err(invalid)?;
        }
        let rendered = match self.end {
            PromptEnd::NewMessage => format.render_prompt(&self.messages),
            PromptEnd::ContinueLast => format.render_continuation(&self.messages),
            PromptEnd::AfterLast => format.render(&self.messages),
        };
        let invalid = |error| InferenceError::invalid("messages", error);
        let mut text = rendered.map_err(invalid)?;
        let reasoning = match format.reasoning_start(&text) {
            // The content of the message that is continued has begun.
            ReasoningStart::Tag if self.end == PromptEnd::ContinueLast => ReasoningStart::Never,
            start => start,
        };
        let mut parser = AnswerParser::new().reasoning(reasoning);
        if let Some(names) = self.callable_tools() {
            parser = parser.tools(names);
        }
        if let Some(call) = self.forced_call() {
            if !model.has_tool_tags {
                let reason = "the chat template of this model has no tag with which a tool call \
                              starts, so no call can be forced; use \"auto\"";
                return Err(InferenceError::invalid("tool_choice", reason));
            }
            let prefill = match reasoning {
                ReasoningStart::Opened => format!("\n</think>\n\n{call}"),
                _ => call,
            };
            text.push_str(&prefill);
            // An incomplete call has no events.
            let _ = parser.push(&prefill);
        }
        let tokens = model.tokenizer.encode_piece(&text).map_err(invalid)?;
        Ok(AnswerPrompt { tokens: tokens.to_vec(), parser })
    }

    /// Returns the number of tokens of the prompt.
    ///
    /// # Errors
    /// Names the parameter that is invalid or that the chat template rejects.
    pub(crate) fn count_tokens(&self, model: &ChatModel) -> Result<usize, InferenceError> {
        Ok(self.prompt(model)?.tokens.len())
    }
}
