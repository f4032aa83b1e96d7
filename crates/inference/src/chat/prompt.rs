//! [`AnswerPrompt`]: a conversation as the model reads it.

use tinkex_text::{AnswerParser, ErrorKind, ReasoningStart};

use super::chat_model::ChatModel;
use super::request::{ChatRequest, PromptEnd};
use crate::{InferenceError, ServedModel, TextLimit, encode};

/// The prompt for an answer, and the parser for the answer.
#[derive(Debug)]
pub(super) struct AnswerPrompt {
    text: String,
    /// Parser of the answer. It has already read the part of the answer that the prompt contains.
    pub(super) parser: AnswerParser,
}

impl ChatRequest {
    /// Renders the prompt with the chat template of a model. `limit` is the limit on texts.
    pub(super) fn prompt(
        &self,
        model: &ChatModel,
        limit: TextLimit,
    ) -> Result<AnswerPrompt, InferenceError> {
        self.check_tools()?;
        let max_bytes = limit.rendered_bytes(self.body_bytes);
        let mut format = model.format.clone().max_bytes(max_bytes);
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
        let invalid = |error: tinkex_text::Error| {
            let too_long = error.kind() == ErrorKind::TooLong;
            // If the limit on texts is the reason, that limit has the better message.
            let limited = limit.check("messages", max_bytes.saturating_add(1));
            match limited {
                Err(limited) if too_long => limited,
                _ => InferenceError::invalid("messages", error),
            }
        };
        let mut text = rendered.map_err(invalid)?;
        let reasoning = match format.reasoning_start(&text) {
            // The message that is continued already has content, so its reasoning has ended.
            ReasoningStart::Tag if self.end == PromptEnd::ContinueLast => ReasoningStart::Never,
            start => start,
        };
        let mut parser = AnswerParser::new().reasoning(reasoning);
        if let Some(names) = self.callable_tools() {
            parser = parser.tools(names);
        }
        if let Some(call) = self.forced_call() {
            // A model may have another template for conversations with tools.
            if !format.template_contains(AnswerParser::TOOL_CALL_TAG) {
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
        Ok(AnswerPrompt { text, parser })
    }

    /// Returns the number of tokens of the prompt.
    ///
    /// # Errors
    /// Names the parameter that is invalid or that the chat template rejects.
    pub(crate) fn count_tokens(
        &self,
        model: &dyn ServedModel,
        chat: &ChatModel,
    ) -> Result<usize, InferenceError> {
        Ok(self.prompt(chat, TextLimit::new(model, &chat.tokenizer))?.tokens(model, chat)?.len())
    }
}

impl AnswerPrompt {
    /// Returns the tokens of the prompt. The template writes the special tokens itself.
    pub(super) fn tokens(
        &self,
        model: &dyn ServedModel,
        chat: &ChatModel,
    ) -> Result<Vec<u32>, InferenceError> {
        encode(model, &chat.tokenizer, "messages", &self.text, false)
    }
}

#[cfg(test)]
mod tests {
    use tinkex_text::{AnswerEvent, ChatFormat, Message, Tokenizer};

    use super::*;
    use crate::chat::{Tool, ToolChoice};

    /// A template with tools that lets the model reason if `think` is set.
    const TEMPLATE: &str = "{% if tools %}{{ tools | tojson }}{% endif %}\
        {% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}\
        {% if add_generation_prompt %}<assistant>{% if think %}<think>\n{% endif %}{% endif %}\
        {# <tool_call> </think> #}";

    const UNLIMITED: TextLimit = TextLimit::server_only(usize::MAX);

    const TOKENIZER: &str =
        r#"{"version":"1.0","model":{"type":"WordLevel","unk_token":"?","vocab":{"?":0}}}"#;

    fn model(template: &str) -> ChatModel {
        let tokenizer = Tokenizer::from_json(TOKENIZER).unwrap();
        let format = ChatFormat::with_template(&tokenizer, template).unwrap();
        ChatModel { tokenizer, format, end_tokens: [].into() }
    }

    fn conversation(choice: ToolChoice, names: &[&str]) -> ChatRequest {
        let mut conversation = ChatRequest::new(vec![Message::user("a")], 0);
        let tool = |name: &&str| {
            let schema = serde_json::value::to_raw_value(&serde_json::json!({})).unwrap();
            Tool::function((*name).to_owned(), None, &schema).unwrap()
        };
        conversation.tools = names.iter().map(tool).collect();
        conversation.tool_choice = choice;
        conversation
    }

    fn prompt_text(conversation: &ChatRequest) -> String {
        conversation.prompt(&model(TEMPLATE), UNLIMITED).unwrap().text
    }

    #[test]
    fn tools_are_part_of_the_prompt_unless_none_may_be_called() {
        let auto = prompt_text(&conversation(ToolChoice::Auto, &["f"]));
        let tools = r#"[{"type": "function", "function": {"name": "f", "parameters": {}}}]"#;
        assert_eq!(auto, format!("{tools}<user>a</user><assistant>"));
        let none = prompt_text(&conversation(ToolChoice::None, &["f"]));
        assert_eq!(none, "<user>a</user><assistant>");
    }

    #[test]
    fn a_call_is_forced_by_its_start() {
        let named = conversation(ToolChoice::Named("f\"".to_owned()), &["f\"", "g"]);
        let start = "<tool_call>\n{\"name\": \"f\\\"\", \"arguments\": ";
        assert!(prompt_text(&named).ends_with(&format!("<assistant>{start}")));
        let only = conversation(ToolChoice::Required, &["f"]);
        assert!(prompt_text(&only).ends_with("{\"name\": \"f\", \"arguments\": "));
        let mut any = conversation(ToolChoice::Required, &["f", "g"]);
        assert!(prompt_text(&any).ends_with("<assistant><tool_call>\n{\"name\": \""));

        // The call follows the reasoning, which the prompt has opened.
        any.variables.push(("think".to_owned(), true.into()));
        let mut prompt = any.prompt(&model(TEMPLATE), UNLIMITED).unwrap();
        assert!(prompt.text.ends_with("<think>\n\n</think>\n\n<tool_call>\n{\"name\": \""));
        let mut events = prompt.parser.push("g\"}</tool_call>");
        events.extend(prompt.parser.finish());
        let start = AnswerEvent::ToolCallStart { index: 0, name: "g".to_owned() };
        assert_eq!(events.first(), Some(&start));
    }

    #[test]
    fn the_tag_of_a_separate_tool_template_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let config = serde_json::json!({"chat_template": [
            {"name": "default", "template": "{{ messages[0].content }}"},
            {"name": "tool_use", "template": TEMPLATE},
        ]});
        std::fs::write(folder.path().join("tokenizer.json"), TOKENIZER).unwrap();
        let config_file = folder.path().join("tokenizer_config.json");
        std::fs::write(config_file, config.to_string()).unwrap();
        let tokenizer = Tokenizer::from_folder(folder.path()).unwrap();
        let format = tokenizer.chat().unwrap();
        let model = ChatModel { tokenizer, format, end_tokens: [].into() };
        let prompt = conversation(ToolChoice::Required, &["f"]).prompt(&model, UNLIMITED).unwrap();
        assert!(prompt.text.ends_with("{\"name\": \"f\", \"arguments\": "), "{}", prompt.text);
    }

    #[test]
    fn tool_choices_that_are_not_possible_are_refused() {
        let refused = |conversation: &ChatRequest, template: &str| {
            let error = conversation.prompt(&model(template), UNLIMITED).unwrap_err();
            error.param.unwrap()
        };
        let plain = "{{ messages[0].content }}";
        assert_eq!(refused(&conversation(ToolChoice::Required, &["f"]), plain), "tool_choice");
        assert_eq!(refused(&conversation(ToolChoice::Required, &[]), TEMPLATE), "tool_choice");
        let other = conversation(ToolChoice::Named("g".to_owned()), &["f"]);
        assert_eq!(refused(&other, TEMPLATE), "tool_choice");
        assert_eq!(refused(&conversation(ToolChoice::Auto, &["f", "f"]), TEMPLATE), "tools");
        let mut continued = conversation(ToolChoice::Required, &["f"]);
        continued.end = PromptEnd::ContinueLast;
        assert_eq!(refused(&continued, TEMPLATE), "tool_choice");
        continued.tool_choice = ToolChoice::Auto;
        assert_eq!(refused(&continued, TEMPLATE), "messages", "the last message is the user's");
    }

    #[test]
    fn a_template_that_writes_without_end_is_refused() {
        let endless = "{% for a in range(9999) %}{% for b in range(9999) %}{{ messages[0].content }}\
            {% endfor %}{% endfor %}";
        let conversation = ChatRequest::new(vec![Message::user("abcdefgh")], 100);
        let error = conversation.prompt(&model(endless), UNLIMITED).unwrap_err();
        assert_eq!(error.param(), Some("messages"));
        assert!(error.to_string().contains("writes more than 32768 bytes"), "{error}");
        let error = conversation.prompt(&model(endless), TextLimit::server_only(99)).unwrap_err();
        assert!(error.to_string().contains("memory to tokenize 99 bytes"), "{error}");
        let busy = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}";
        let error = conversation.prompt(&model(busy), UNLIMITED).unwrap_err();
        assert!(error.to_string().contains("steps for this conversation"), "{error}");
    }
}
