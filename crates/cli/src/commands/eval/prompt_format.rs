//! [`PromptFormat`]: finds the last message of the user in a rendered prompt.

use tinkex::{Chat, Message, Tokenizer};

use crate::error::CommandError;

/// Text that a chat template writes around the last message of the user.
#[derive(Debug, Default, PartialEq)]
pub(super) struct PromptFormat {
    before: String,
    after: String,
}

impl PromptFormat {
    /// Renders a conversation with the template of `chat` and finds the texts in the result. They
    /// are empty if the template changes or omits a message; prompts are then shown completely.
    pub(super) fn new(chat: &Chat) -> Self {
        const MESSAGES: [&str; 3] = ["first question", "first answer", "second question"];
        let messages = [
            Message::user(MESSAGES[0]),
            Message::assistant(MESSAGES[1]),
            Message::user(MESSAGES[2]),
        ];
        let rendered = chat.render_prompt(&messages).unwrap_or_default();
        Self::between(&rendered, MESSAGES).unwrap_or_default()
    }

    fn between(rendered: &str, [first, answer, second]: [&str; 3]) -> Option<Self> {
        let (start, rest) = rendered.split_once(first)?;
        let (_, rest) = rest.split_once(answer)?;
        let (between, after) = rest.split_once(second)?;
        // The common end of the texts before both messages of the user is the header of a message.
        let mut common = 0;
        for (a, b) in start.chars().rev().zip(between.chars().rev()) {
            if a != b {
                break;
            }
            common += a.len_utf8();
        }
        let before = between[between.len() - common..].to_owned();
        Some(Self { before, after: after.to_owned() })
    }

    /// Returns the last message of the user, or the whole prompt without special tokens if it does
    /// not end with such a message.
    pub(super) fn last_message(
        &self,
        tokenizer: &Tokenizer,
        prompt: &[u32],
    ) -> Result<String, CommandError> {
        let rendered = tokenizer.decode(prompt)?;
        match self.message_of(&rendered) {
            Some(message) => Ok(message.to_owned()),
            None => Ok(tokenizer.decode_text(prompt)?),
        }
    }

    fn message_of<'a>(&self, rendered: &'a str) -> Option<&'a str> {
        if self.before.is_empty() || self.after.is_empty() {
            return None;
        }
        let prompt = rendered.strip_suffix(&self.after)?;
        let at = prompt.rfind(&self.before)?;
        Some(&prompt[at + self.before.len()..])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_message_is_found_between_the_texts_of_the_template() {
        let rendered = "<s>system: be nice\n<u>user:\nq1</u>\n<a>assistant:\na1</a>\n\
                        <u>user:\nq2</u>\n<a>assistant:\n";
        let format = PromptFormat::between(rendered, ["q1", "a1", "q2"]).unwrap();
        let expected = ("\n<u>user:\n".to_owned(), "</u>\n<a>assistant:\n".to_owned());
        assert_eq!((format.before.clone(), format.after.clone()), expected);
        assert_eq!(format.message_of(rendered), Some("q2"));
        assert_eq!(format.message_of("Two and two is"), None);
        assert_eq!(PromptFormat::between("q1 q2", ["q1", "a1", "q2"]), None);
        assert_eq!(PromptFormat::default().message_of("x"), None);
    }
}
