//! [`RlPrompt`]: a prompt for which completions are sampled.

use std::io::BufRead;

use serde::Deserialize;
use tinkex::{Chat, Error, ErrorKind, Message, Result};
use tinkex_wire::{JsonObject, Tokens};

/// Prompt for which completions are sampled, with data for the reward.
///
/// ```
/// use tinkex_recipes::rl::RlPrompt;
///
/// let prompt = RlPrompt::chat("What is 2 + 2?").with("answer", 4);
/// assert_eq!(prompt.metadata["answer"], 4);
/// ```
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct RlPrompt {
    /// Text that the model continues, or, in a conversation, the content of the last message.
    pub text: String,
    /// Messages, if the prompt is a conversation. The model writes the next message.
    pub messages: Vec<Message>,
    /// Tokens of the prompt. If they are empty, a run computes them from the messages or the text.
    pub tokens: Tokens,
    /// Data for the reward, such as the expected answer.
    pub metadata: JsonObject,
}

impl RlPrompt {
    /// Creates a prompt whose text the model continues.
    #[must_use]
    pub fn text(text: impl Into<String>) -> Self {
        Self { text: text.into(), ..Self::default() }
    }

    /// Creates a prompt with one message of the user, which the model answers.
    #[must_use]
    pub fn chat(text: impl Into<String>) -> Self {
        Self::messages(vec![Message::user(text)])
    }

    /// Creates a prompt from a conversation, whose next message the model writes.
    #[must_use]
    pub fn messages(messages: Vec<Message>) -> Self {
        let text = messages.last().and_then(Message::content).unwrap_or_default().to_owned();
        Self { text, messages, ..Self::default() }
    }

    /// Creates a prompt from tokens.
    #[must_use]
    pub fn tokens(tokens: impl Into<Tokens>) -> Self {
        Self { tokens: tokens.into(), ..Self::default() }
    }

    /// Adds data for the reward.
    #[must_use]
    pub fn with(mut self, name: impl Into<String>, value: impl Into<serde_json::Value>) -> Self {
        self.metadata.insert(name.into(), value.into());
        self
    }

    /// Reads prompts from JSON Lines: `{"prompt": "…"}` or `{"messages": […]}` per line. All other
    /// fields become [metadata](Self::metadata). Empty lines are ignored.
    ///
    /// If `chat` is set, the text of `prompt` is a message of the user instead of a text to
    /// continue.
    ///
    /// # Errors
    /// Returns the number of each invalid line, from 1, with the reason.
    pub fn read_jsonl(
        reader: impl BufRead,
        chat: bool,
    ) -> std::result::Result<Vec<Self>, Vec<(u64, String)>> {
        let mut prompts = Vec::new();
        let mut invalid = Vec::new();
        for (number, line) in (1..).zip(reader.lines()) {
            let line = match line {
                Ok(line) => line,
                Err(error) => {
                    invalid.push((number, error.to_string()));
                    break;
                }
            };
            let line = line.trim_start_matches('\u{FEFF}').trim();
            if line.is_empty() {
                continue;
            }
            match parse_line(line, chat) {
                Ok(prompt) => prompts.push(prompt),
                Err(reason) => invalid.push((number, reason)),
            }
        }
        if invalid.is_empty() { Ok(prompts) } else { Err(invalid) }
    }

    /// Computes the tokens, if they are not set.
    pub(super) fn render(mut self, chat: &Chat) -> Result<Self> {
        if self.tokens.is_empty() {
            self.tokens = if self.messages.is_empty() {
                chat.tokenizer().encode(&self.text)?
            } else {
                chat.prompt(&self.messages)?.to_tokens().unwrap_or_default()
            };
        } else if self.text.is_empty() {
            self.text = chat.tokenizer().decode(&self.tokens)?;
        }
        if self.tokens.is_empty() {
            return Err(Error::new(ErrorKind::InvalidInput, "a prompt has no tokens"));
        }
        Ok(self)
    }
}

impl From<&str> for RlPrompt {
    fn from(text: &str) -> Self {
        Self::text(text)
    }
}

impl From<String> for RlPrompt {
    fn from(text: String) -> Self {
        Self::text(text)
    }
}

/// Line of a file of prompts.
#[derive(Deserialize)]
struct PromptLine {
    prompt: Option<String>,
    messages: Option<Vec<Message>>,
    #[serde(flatten)]
    metadata: JsonObject,
}

fn parse_line(line: &str, chat: bool) -> std::result::Result<RlPrompt, String> {
    if !line.starts_with('{') {
        return Err("expected an object".to_owned());
    }
    let line: PromptLine = serde_json::from_str(line)
        // The parser gets a single line and reports every error as line 1, so remove the line
        // number.
        .map_err(|error| error.to_string().replace(" at line 1 column ", " at column "))?;
    let prompt = match (line.prompt, line.messages) {
        (Some(text), None) if text.is_empty() => return Err("\"prompt\" is empty".to_owned()),
        (Some(text), None) if chat => RlPrompt::chat(text),
        (Some(text), None) => RlPrompt::text(text),
        (None, Some(messages)) if messages.is_empty() => {
            return Err("\"messages\" is empty".to_owned());
        }
        (None, Some(messages)) if messages.last().is_some_and(Message::is_assistant) => {
            return Err("the last of \"messages\" is from the assistant: end the conversation \
                        with the message to answer"
                .to_owned());
        }
        (None, Some(messages)) => RlPrompt::messages(messages),
        _ => return Err("expected \"prompt\" or \"messages\"".to_owned()),
    };
    Ok(RlPrompt { metadata: line.metadata, ..prompt })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_become_prompts_with_metadata() {
        let lines = "{\"prompt\": \"2 + 2 =\", \"answer\": 4}\n\n\
                     {\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}]}\n";
        let prompts = RlPrompt::read_jsonl(lines.as_bytes(), false).unwrap();
        assert_eq!(
            (&*prompts[0].text, prompts[0].metadata["answer"].as_i64()),
            ("2 + 2 =", Some(4))
        );
        assert_eq!((&*prompts[1].text, prompts[1].messages.len()), ("Hi", 1));
        let prompts = RlPrompt::read_jsonl(lines.as_bytes(), true).unwrap();
        assert_eq!(prompts[0].messages.len(), 1);
    }

    #[test]
    fn invalid_lines_are_reported_by_number() {
        let lines = "{\"prompt\": \"\"}\n[1]\n{\"prompt\": 1}\n{\"answer\": 1}\n\
                     {\"messages\": [{\"role\": \"assistant\", \"content\": \"Hi\"}]}\n";
        let invalid = RlPrompt::read_jsonl(lines.as_bytes(), false).unwrap_err();
        assert_eq!(invalid.iter().map(|(line, _)| *line).collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
        assert!(invalid[2].1.contains("expected a string"), "{invalid:?}");
    }
}
