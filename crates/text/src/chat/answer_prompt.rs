//! Prompts for answers: how a template lets the model reason, and answers that continue a message.

use crate::answer::{ReasoningStart, THINK, THINK_END};
use crate::error::{Error, ErrorKind, Result};

use super::locate::PROBE;
use super::{ChatFormat, Message, values};

impl ChatFormat {
    /// Renders a conversation up to the end of the content of its last message, which the model
    /// continues. The last message must be an assistant message with plain text.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the last message is not an assistant message with plain text,
    /// or if the template rejects the conversation or does not write the content of the message
    /// once.
    pub fn render_continuation(&self, messages: &[Message]) -> Result<String> {
        let continued = messages.last().filter(|message| message.is_assistant());
        let Some((last, content)) =
            continued.and_then(|message| Some((message, message.content()?)))
        else {
            let message = "cannot continue the last message: expected an assistant message with \
                           plain text";
            return Err(Error::new(ErrorKind::InvalidInput, message));
        };
        let mut probed = values(messages);
        probed.pop();
        probed.push(last.clone().with("content", PROBE).value());
        let text = self.render_values(&probed, false)?.text;
        match text.split_once(PROBE) {
            Some((before, after)) if !after.contains(PROBE) => Ok(format!("{before}{content}")),
            _ => {
                let message = "the chat template cannot continue a message of the assistant";
                Err(Error::new(ErrorKind::InvalidInput, message))
            }
        }
    }

    /// Returns whether the source of the template contains a text, such as a tag that the model
    /// writes, or the name of a variable.
    #[must_use]
    pub fn template_contains(&self, text: &str) -> bool {
        self.template().source_contains(text)
    }

    /// Returns where an answer to a rendered `prompt` may contain reasoning.
    #[must_use]
    pub fn reasoning_start(&self, prompt: &str) -> ReasoningStart {
        if prompt.trim_end().ends_with(THINK) {
            ReasoningStart::Opened
        } else if self.template_contains(THINK_END) {
            ReasoningStart::Tag
        } else {
            ReasoningStart::Never
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::Tokenizer;

    fn format(template: &str) -> ChatFormat {
        let json =
            r#"{"version":"1.0","model":{"type":"WordLevel","unk_token":"?","vocab":{"?":0}}}"#;
        ChatFormat::with_template(&Tokenizer::from_json(json).unwrap(), template).unwrap()
    }

    const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>\
        {% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}\
        {{ m.content | trim }}<end>{% endfor %}\
        {% if add_generation_prompt %}<assistant>{% if think %}<think>\n{% endif %}{% endif %}";

    #[test]
    fn a_message_of_the_assistant_is_continued_as_written() {
        let messages = [Message::user("a"), Message::assistant("b ")];
        let text = format(TEMPLATE).render_continuation(&messages).unwrap();
        assert_eq!(text, "<user>a<end><assistant><think></think>b ");
        let error = format(TEMPLATE).render_continuation(&messages[..1]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        let twice = format("{% for m in messages %}{{ m.content * 2 }}{% endfor %}");
        let error = twice.render_continuation(&messages).unwrap_err();
        assert!(error.to_string().contains("cannot continue"), "{error}");
    }

    #[test]
    fn the_template_tells_where_reasoning_starts() {
        let start = |format: &ChatFormat| {
            format.reasoning_start(&format.render_prompt(&[Message::user("a")]).unwrap())
        };
        assert_eq!(start(&format(TEMPLATE)), ReasoningStart::Tag);
        assert_eq!(start(&format(TEMPLATE).variable("think", true)), ReasoningStart::Opened);
        assert_eq!(start(&format("{{ messages[0].content }}")), ReasoningStart::Never);
    }
}
