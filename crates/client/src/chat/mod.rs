//! [`Chat`]: formats conversations as tokens with the model's own chat template.
//!
//! [`tinkex_text`] renders conversations, [`train`] makes training examples of them, and [`jsonl`]
//! reads training files.

mod jsonl;
mod train;

use std::fmt;
use std::time::SystemTime;

use serde::Serialize;
use tinkex_text::ChatFormat;
use tinkex_wire::{ModelInput, StopCondition};

#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::Result;
use crate::tokenizer::{Tokenizer, text_error};

pub use jsonl::{JsonlError, JsonlReader, TooLong};
pub use tinkex_text::Message;
pub use train::{TrainOn, TrainingExample};

/// Formats conversations as a model expects them. Cheap to clone.
///
/// ```no_run
/// # async fn run(sampler: tinkex::SamplingClient) -> tinkex::Result<()> {
/// use tinkex::{Message, SamplingParams};
///
/// let tokenizer = sampler.tokenizer().await?;
/// let chat = tokenizer.chat()?;
/// let prompt = chat.prompt(&[Message::user("Name a river.")])?;
/// let params = SamplingParams::new().max_tokens(100).stop(chat.stop()?);
/// let response = sampler.sample(prompt, params).await?;
/// println!("{}", tokenizer.decode_text(&response.sequences[0].tokens)?);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Chat {
    tokenizer: Tokenizer,
    format: ChatFormat,
    /// Number of tokens beyond which the text of an example is not encoded; `None` is no limit.
    max_tokens: Option<usize>,
}

impl Tokenizer {
    /// Returns a formatter with the model's default chat template. A model without templates gets a
    /// plain format (`User: …`, `Assistant: …`, the end token after each message of the assistant),
    /// and a warning is logged.
    ///
    /// # Errors
    /// [`ErrorKind::Decode`] if the template is malformed, [`ErrorKind::NotFound`] if there are
    /// several and none is the default.
    pub fn chat(&self) -> Result<Chat> {
        let format = self.inner().chat().map_err(text_error)?;
        if !self.has_chat_template() {
            tracing::warn!(
                model = self.name(),
                "the model has no chat template; using a plain format"
            );
        }
        Ok(Chat { tokenizer: self.clone(), format, max_tokens: None })
    }

    /// Returns a formatter with a named chat template, for models that have several.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if the model has no template of that name, [`ErrorKind::Decode`] if
    /// the template is malformed.
    pub fn chat_named(&self, name: &str) -> Result<Chat> {
        let format = self.inner().chat_named(name).map_err(text_error)?;
        Ok(Chat { tokenizer: self.clone(), format, max_tokens: None })
    }

    /// Returns whether the model has a chat template.
    #[must_use]
    pub fn has_chat_template(&self) -> bool {
        self.inner().has_chat_template()
    }
}

impl Chat {
    /// Creates a formatter from the source of a template, in Jinja as `transformers` runs it.
    ///
    /// # Errors
    /// [`ErrorKind::Decode`] if the template is malformed.
    pub fn with_template(tokenizer: &Tokenizer, source: &str) -> Result<Self> {
        let format = ChatFormat::with_template(tokenizer.inner(), source).map_err(text_error)?;
        Ok(Self { tokenizer: tokenizer.clone(), format, max_tokens: None })
    }

    /// Sets the tools that the model may call, in the form that its template expects: often a list
    /// of JSON schemas.
    ///
    /// Fields are rendered in the order in which they are serialized. A [`serde_json::Value`] sorts
    /// them by name, unlike Python; [`Chat::tools_json`] keeps their order.
    #[must_use]
    pub fn tools(mut self, tools: impl Serialize) -> Self {
        self.format = self.format.tools(tools);
        self
    }

    /// Sets the tools from JSON text, keeping the order of fields.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the text is not JSON.
    pub fn tools_json(mut self, text: &str) -> Result<Self> {
        self.format = self.format.tools_json(text).map_err(text_error)?;
        Ok(self)
    }

    /// Sets a variable that the template reads, such as `enable_thinking`.
    #[must_use]
    pub fn variable(mut self, name: impl Into<String>, value: impl Serialize) -> Self {
        self.format = self.format.variable(name, value);
        self
    }

    /// Sets the current date and time for templates that print it, in UTC. Defaults to the time of
    /// rendering. Set it for training data, which should not change from day to day.
    #[must_use]
    pub fn date(mut self, now: SystemTime) -> Self {
        self.format = self.format.date(now);
        self
    }

    /// Encodes only as much of the text of an example as is needed to find that it has more than
    /// `max` tokens: encoding needs hundreds of bytes of memory per byte of text.
    #[doc(hidden)]
    #[must_use]
    pub fn max_example_tokens(mut self, max: usize) -> Self {
        self.max_tokens = Some(max);
        self
    }

    /// Returns the tokenizer.
    #[must_use]
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Renders a complete conversation as text.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the template rejects the conversation.
    pub fn render(&self, messages: &[Message]) -> Result<String> {
        self.format.render(messages).map_err(text_error)
    }

    /// Renders a conversation as text, followed by the beginning of the assistant's next message.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the template rejects the conversation.
    pub fn render_prompt(&self, messages: &[Message]) -> Result<String> {
        self.format.render_prompt(messages).map_err(text_error)
    }

    /// Encodes a conversation as a prompt for the assistant's next message.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the template rejects the conversation.
    pub fn prompt(&self, messages: &[Message]) -> Result<ModelInput> {
        self.format.prompt(messages).map(ModelInput::from_tokens).map_err(text_error)
    }

    /// Returns the tokens that end a completion: the model's end token, and the special token that
    /// its template writes after a message of the assistant.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if the model has neither.
    pub fn stop(&self) -> Result<StopCondition> {
        self.format.stop_tokens().map(StopCondition::Tokens).map_err(text_error)
    }
}

impl fmt::Debug for Chat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Chat").field("tokenizer", &self.tokenizer).finish_non_exhaustive()
    }
}
