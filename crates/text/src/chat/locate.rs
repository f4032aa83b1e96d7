//! [`MessageLocator`]: finds an assistant message in the rendered conversation.
//!
//! A chat template is a program: only its output shows where a message is. The locator renders
//! variations of the conversation and compares the texts. In this conversation, the
//! template omits the thinking of all messages but the last:
//!
//! | Index | Role | Content | Rendered |
//! |---|---|---|---|
//! | 0 | user | `Hi` | `<user>Hi<end>` |
//! | 1 | assistant | `<think>a</think>Hello` | `<assistant>Hello<end>` |
//! | 2 | user | `Bye` | `<user>Bye<end>` |
//! | 3 | assistant | `<think>b</think>Ciao` | `<assistant><think>b</think>Ciao<end>` |
//!
//! Message 1 is located with these texts:
//!
//! | Text | Renders | Example |
//! |---|---|---|
//! | `rendered` | 0 to 3 | `<user>Hi<end><assistant>Hello<end><user>Bye<end><assistant>…` |
//! | `prompt` | 0, and the generation prompt | `<user>Hi<end><assistant>` |
//! | `up_to_message` | 0 to 1 | `<user>Hi<end><assistant><think>a</think>Hello<end>` |
//! | probe within the conversation | 0 to 3, [`PROBE`] in place of 1 | `<user>Hi<end><assistant>PROBE<end><user>Bye<end><assistant>…` |
//! | probe as the last message | 0 to 1, [`PROBE`] in place of 1 | `<user>Hi<end><assistant>PROBE<end>` |
//!
//! * The message starts at the end of `prompt`, because `rendered` starts with `prompt`.
//! * It would end at the end of `up_to_message`, but `rendered` does not start with that text: the
//!   thinking is missing. The probe helps: the text after a message does not depend on its content,
//!   so `rendered` ends with the text after the probe, `<end><user>Bye<end><assistant>…`.
//! * That text begins with `<end>`, which belongs to the message: it also follows the probe as the
//!   last message, where it cannot belong to a later message.
//!
//! Message 1 is therefore `Hello<end>`. If the texts do not match in this way, the position is not
//! certain and the conversation is rejected.

use std::ops::Range;

use minijinja::Value;

use crate::error::{Error, ErrorKind, Result};

use super::{ChatFormat, Message};

/// Content of a message that is rendered to find the text that the template writes around it.
pub(crate) const PROBE: &str = "tinkex-9f4b1c-probe";

/// Finds one assistant message in a rendered conversation.
pub(super) struct MessageLocator<'a> {
    pub(super) format: &'a ChatFormat,
    pub(super) messages: &'a [Value],
    /// Text of all `messages`.
    pub(super) rendered: &'a str,
    /// Index of the message to find.
    pub(super) index: usize,
}

/// Text that the template writes around the [`PROBE`].
struct AroundProbe {
    before: String,
    after: String,
}

impl MessageLocator<'_> {
    /// Returns the byte range of the message, from the end of its prompt to the token that ends it,
    /// inclusive.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the position is not certain, or if the template rejects a
    /// variation of the conversation.
    pub(super) fn locate(&self) -> Result<Range<usize>> {
        let start = self.start()?;
        let end = self.end(start)?;
        // The model does not generate the white space after the token that ends the message.
        let trimmed = self.rendered[start..end].trim_end();
        let ends_with_token = self.format.tokenizer.ends_with_special(trimmed);
        let end = if ends_with_token { start + trimmed.len() } else { end };
        if start == end {
            return Err(self.uncertain("renders nothing for it"));
        }
        Ok(start..end)
    }

    /// Returns where the message starts: where its prompt ends.
    fn start(&self) -> Result<usize> {
        let prompt = self.render(&self.messages[..self.index], true)?;
        if self.rendered.starts_with(&prompt) {
            return Ok(prompt.len());
        }
        let is_last = self.index + 1 == self.messages.len();
        if is_last {
            return Err(self.uncertain("does not render it after its own prompt"));
        }
        self.start_after_changed_text(&prompt)
    }

    /// Returns where the message starts if the text before it differs from its prompt, because the
    /// template renders earlier messages differently once later messages follow.
    ///
    /// The content of a message does not change the text before the message, so the text before the
    /// probe is the text before the message. That text must end with the generation prompt, such as
    /// `<assistant>`: otherwise the message would not start where sampling starts it.
    fn start_after_changed_text(&self, prompt: &str) -> Result<usize> {
        let before = self.around_probe(self.messages)?.before;
        let history = self.render(&self.messages[..self.index], false)?;
        let generation_prompt = prompt.strip_prefix(&*history).unwrap_or_default();
        let is_certain = !generation_prompt.is_empty()
            && before.ends_with(generation_prompt)
            && self.rendered.starts_with(&*before);
        if !is_certain {
            let reason = "changes the text before it once other messages follow";
            return Err(self.uncertain(reason));
        }
        Ok(before.len())
    }

    /// Returns where the message ends, including the white space after its last token.
    fn end(&self, start: usize) -> Result<usize> {
        let up_to_message = self.render(&self.messages[..=self.index], false)?;
        if self.rendered.starts_with(&up_to_message) && up_to_message.len() > start {
            return Ok(up_to_message.len());
        }
        self.end_of_changed_message(start)
    }

    /// Returns where the message ends if the template renders it differently once other messages
    /// follow, for example without its thinking.
    fn end_of_changed_message(&self, start: usize) -> Result<usize> {
        let after = self.around_probe(self.messages)?.after;
        let ending = self.around_probe(&self.messages[..=self.index])?.after;
        // White space after the last message may be missing after earlier messages.
        let ending = if after.starts_with(&*ending) { &*ending } else { ending.trim_end() };
        // Some templates end the last message with another token than earlier messages. The model
        // must learn the token that ends its answer, so such a message is rejected.
        let same_ending = after.starts_with(ending);
        match self.rendered.strip_suffix(&*after) {
            Some(up_to_content) if up_to_content.len() > start && same_ending => {
                Ok(up_to_content.len() + ending.len())
            }
            _ => {
                let reason = "changes its end or the text after it once other messages follow";
                Err(self.uncertain(reason))
            }
        }
    }

    /// Renders `messages` with [`PROBE`] in place of the message to locate.
    fn around_probe(&self, messages: &[Value]) -> Result<AroundProbe> {
        let mut probed = messages.to_vec();
        probed[self.index] = Message::assistant(PROBE).value();
        let text = self.render(&probed, false)?;
        match text.split_once(PROBE) {
            Some((before, after)) if !after.contains(PROBE) => {
                Ok(AroundProbe { before: before.to_owned(), after: after.to_owned() })
            }
            _ => Err(self.uncertain("changes its content")),
        }
    }

    fn render(&self, messages: &[Value], generation_prompt: bool) -> Result<String> {
        Ok(self.format.render_values(messages, generation_prompt)?.text)
    }

    /// Error returned when the position of the message is not certain.
    fn uncertain(&self, reason: &str) -> Error {
        let number = self.index + 1;
        let message = format!("cannot locate message {number}: the chat template {reason}");
        Error::new(ErrorKind::InvalidInput, message).with_hint(
            "Train on each message separately (TrainOn::EachAssistant) or only on the last.",
        )
    }
}
