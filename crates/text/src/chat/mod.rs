//! [`ChatFormat`]: formats conversations as tokens with the model's own chat template.
//!
//! [`template`] runs templates, in which [`python`] emulates the methods of Python's types.
//! [`message`] is one message of a conversation. [`spans`] finds assistant messages in the
//! rendered text, with [`locate`] where the template does not mark them. [`answer_prompt`] renders
//! prompts that continue a message. Nothing here depends on a particular model.

mod answer_prompt;
mod locate;
mod message;
mod python;
mod spans;
mod template;

use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use minijinja::Value;
use minijinja::value::Serde;
use serde::Serialize;
use tinkex_wire::Tokens;

use crate::error::{Error, ErrorKind, Result};
use crate::tokenizer::Tokenizer;
use crate::tokenizer::files::NamedTemplate;

use locate::PROBE;
pub use message::Message;
pub use spans::AssistantSpans;
use template::{Rendered, Template, strftime_now};

/// Template for models without a template of their own: `User: …`, `Assistant: …`, an empty line
/// between messages, and the end token after each message of the assistant.
const PLAIN_TEMPLATE: &str = "\
{{ bos_token }}
{%- for message in messages -%}
{{ message.role | capitalize }}: {{ (message.content or '') | trim }}
{%- if message.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n\\n' }}
{%- endfor -%}
{% if add_generation_prompt %}Assistant:{% endif %}";

/// Maximum size of a rendered conversation in bytes, unless [`ChatFormat::max_bytes`] sets another.
const MAX_BYTES: usize = 64 << 20;

/// Name of the template for conversations with tools, in models with several templates.
const TOOL_TEMPLATE_NAME: &str = "tool_use";

/// Formats conversations as a model expects them. Cheap to clone.
///
/// ```
/// use tinkex_text::{ChatFormat, Message, Tokenizer};
///
/// # let json = r#"{"version":"1.0","model":{"type":"WordLevel","unk_token":"?","vocab":{"?":0}}}"#;
/// let tokenizer = Tokenizer::from_json(json)?;
/// let template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}";
/// let format = ChatFormat::with_template(&tokenizer, template)?;
/// assert_eq!(format.render_prompt(&[Message::user("Name a river.")])?, "user: Name a river.\n");
/// # Ok::<_, tinkex_text::Error>(())
/// ```
#[derive(Clone)]
pub struct ChatFormat {
    tokenizer: Tokenizer,
    template: Arc<Template>,
    tool_template: Option<Arc<Template>>,
    tools: Option<Value>,
    variables: Vec<(String, Value)>,
    now: Option<SystemTime>,
    /// Maximum size of a rendered conversation in bytes.
    max_bytes: usize,
}

impl Tokenizer {
    /// Returns a formatter with the model's default chat template. A model without templates gets a
    /// plain format: `User: …`, `Assistant: …`, the end token after each message of the assistant.
    ///
    /// # Errors
    /// [`ErrorKind::Malformed`] if the template is malformed, [`ErrorKind::NotFound`] if there are
    /// several templates and none is the default.
    pub fn chat(&self) -> Result<ChatFormat> {
        let templates = &self.files().templates;
        let named = |name: &str| templates.iter().find(|template| template.name == name);
        let Some(default) = named(NamedTemplate::DEFAULT) else {
            if !templates.is_empty() {
                return Err(self.no_template(NamedTemplate::DEFAULT));
            }
            return ChatFormat::with_template(self, PLAIN_TEMPLATE);
        };
        let format = ChatFormat::with_template(self, &default.source)?;
        let for_tools = named(TOOL_TEMPLATE_NAME);
        let for_tools = for_tools.map(|named| ChatFormat::with_template(self, &named.source));
        let tool_template = for_tools.transpose()?.map(|format| format.template);
        Ok(ChatFormat { tool_template, ..format })
    }

    /// Returns a formatter with a named chat template, for models that have several.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if the model has no template of that name, [`ErrorKind::Malformed`] if
    /// the template is malformed.
    pub fn chat_named(&self, name: &str) -> Result<ChatFormat> {
        let found = self.files().templates.iter().find(|template| template.name == name);
        let found = found.ok_or_else(|| self.no_template(name))?;
        ChatFormat::with_template(self, &found.source)
    }

    /// Returns whether the model has a chat template.
    #[must_use]
    pub fn has_chat_template(&self) -> bool {
        !self.files().templates.is_empty()
    }

    fn no_template(&self, name: &str) -> Error {
        let names = self.files().templates.iter().map(|template| format!("{:?}", template.name));
        let names = names.collect::<Vec<_>>().join(", ");
        let names = if names.is_empty() { "none".to_owned() } else { names };
        let message = format!("{} has no chat template {name:?}; available: {names}", self.name());
        Error::new(ErrorKind::NotFound, message)
            .with_hint("Select a template with Tokenizer::chat_named.")
    }
}

impl ChatFormat {
    /// Creates a formatter from the source of a template, in Jinja as `transformers` runs it.
    ///
    /// # Errors
    /// [`ErrorKind::Malformed`] if the template is malformed.
    pub fn with_template(tokenizer: &Tokenizer, source: &str) -> Result<Self> {
        let template = Template::compile(source).map_err(|error| {
            error.during(format!("compiling the chat template of {}", tokenizer.name()))
        })?;
        Ok(Self {
            tokenizer: tokenizer.clone(),
            template: Arc::new(template),
            tool_template: None,
            tools: None,
            variables: Vec::new(),
            now: None,
            max_bytes: MAX_BYTES,
        })
    }

    /// Sets the tools that the model may call, in the form that its template expects: often a list
    /// of JSON schemas.
    ///
    /// Fields are rendered in the order in which they are serialized. A [`serde_json::Value`] sorts
    /// them by name, unlike Python; [`ChatFormat::tools_json`] keeps their order.
    #[must_use]
    pub fn tools(mut self, tools: impl Serialize) -> Self {
        self.tools = Some(Value::from(Serde(tools)));
        self
    }

    /// Sets the tools from JSON text, keeping the order of fields.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the text is not JSON.
    pub fn tools_json(mut self, text: &str) -> Result<Self> {
        let tools: Value = serde_json::from_str(text).map_err(|error| {
            Error::new(ErrorKind::InvalidInput, format!("cannot parse the tools: {error}"))
        })?;
        self.tools = Some(tools);
        Ok(self)
    }

    /// Sets a variable that the template reads, such as `enable_thinking`.
    #[must_use]
    pub fn variable(mut self, name: impl Into<String>, value: impl Serialize) -> Self {
        self.variables.push((name.into(), Value::from(Serde(value))));
        self
    }

    /// Sets the current date and time for templates that print it, in UTC. Defaults to the time of
    /// rendering. Set it for training data, which should not change from day to day.
    #[must_use]
    pub fn date(mut self, now: SystemTime) -> Self {
        self.now = Some(now);
        self
    }

    /// Sets the maximum size of a rendered conversation in bytes (default 64 MiB). A conversation
    /// for which the template writes more is refused, before the rest is written.
    #[must_use]
    pub fn max_bytes(mut self, max: usize) -> Self {
        self.max_bytes = max;
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
        self.render_values(&values(messages), false).map(|rendered| rendered.text)
    }

    /// Renders a conversation as text, followed by the beginning of the assistant's next message.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the template rejects the conversation.
    pub fn render_prompt(&self, messages: &[Message]) -> Result<String> {
        self.render_values(&values(messages), true).map(|rendered| rendered.text)
    }

    /// Encodes a conversation as a prompt for the assistant's next message.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the template rejects the conversation.
    pub fn prompt(&self, messages: &[Message]) -> Result<Tokens> {
        // The template itself writes the token that begins a text, if the model needs one.
        self.tokenizer.encode_piece(&self.render_prompt(messages)?)
    }

    /// Returns the tokens that end a completion: the model's end token, and the special token that
    /// its template writes after a message of the assistant. At least one.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if the model has neither.
    pub fn stop_tokens(&self) -> Result<Vec<u32>> {
        let mut ends: Vec<u32> = self.tokenizer.eos_id().into_iter().collect();
        let probe = values(&[Message::user("?"), Message::assistant(PROBE)]);
        // If the template rejects the probe, only the model's end token is returned.
        if let Ok(rendered) = self.render_values(&probe, false)
            && let Some((_, after)) = rendered.text.rsplit_once(PROBE)
            && let Some(first) = self.tokenizer.encode_piece(after)?.first().copied()
            && self.tokenizer.is_special(first)
            && !ends.contains(&first)
        {
            ends.push(first);
        }
        if ends.is_empty() {
            let message = format!(
                "cannot determine when a completion ends: {} has no end token",
                self.tokenizer.name()
            );
            return Err(Error::new(ErrorKind::NotFound, message));
        }
        Ok(ends)
    }

    /// Returns the template to render with, which may depend on whether tools are set.
    fn template(&self) -> &Template {
        match &self.tool_template {
            Some(template) if self.tools.is_some() => template,
            _ => &self.template,
        }
    }

    fn render_values(&self, messages: &[Value], generation_prompt: bool) -> Result<Rendered> {
        let special = self.tokenizer.special();
        let tokens = [
            ("bos_token", &special.bos_token),
            ("eos_token", &special.eos_token),
            ("pad_token", &special.pad_token),
            ("unk_token", &special.unk_token),
        ];
        let tokens = tokens.into_iter().filter_map(|(name, token)| Some((name, token.as_ref()?)));
        let named = [
            ("messages", Value::from(messages.to_vec())),
            ("tools", self.tools.clone().unwrap_or_else(|| Value::from(()))),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(generation_prompt)),
            ("strftime_now", strftime_now(self.now)),
        ];
        let context = named
            .into_iter()
            .chain(tokens.map(|(name, token)| (name, Value::from(token.as_str()))))
            .chain(self.variables.iter().map(|(name, value)| (name.as_str(), value.clone())));
        let rendered = self.template().render(Value::from_pairs(context), self.max_bytes);
        rendered.map_err(|error| error.during("rendering the conversation"))
    }
}

/// Converts messages to template values.
fn values(messages: &[Message]) -> Vec<Value> {
    messages.iter().map(Message::value).collect()
}

impl fmt::Debug for ChatFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatFormat").field("tokenizer", &self.tokenizer).finish_non_exhaustive()
    }
}
