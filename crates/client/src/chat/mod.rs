//! [`Chat`]: conversations as tokens, through the model's own chat template.
//!
//! [`template`] runs templates, [`train`] finds what the model is to learn, [`jsonl`] reads files of
//! conversations. Nothing here knows any particular model.

mod jsonl;
mod message;
mod python;
mod template;
mod train;

use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use minijinja::Value;
use minijinja::value::Serde;
use serde::Serialize;
use tinkex_wire::{ModelInput, StopCondition};

use crate::error::{Error, ErrorKind, Result};
use crate::tokenizer::Tokenizer;
use crate::tokenizer::files::NamedTemplate;

pub use jsonl::{JsonlError, JsonlReader, TooLong};
pub use message::Message;
use template::{Rendered, Template, strftime_now};
pub use train::{TrainOn, TrainingExample};

/// For models without a template of their own: `User: …`, `Assistant: …`, an empty line between
/// turns, and the end token behind what the assistant says.
const PLAIN: &str = "\
{{ bos_token }}
{%- for message in messages -%}
{{ message.role | capitalize }}: {{ (message.content or '') | trim }}
{%- if message.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n\\n' }}
{%- endfor -%}
{% if add_generation_prompt %}Assistant:{% endif %}";

/// The template that a model of several has for conversations with tools.
const FOR_TOOLS: &str = "tool_use";

/// A model's way to write conversations. Cheap to clone.
///
/// ```no_run
/// # async fn run(sampler: tinkex::SamplingClient) -> tinkex::Result<()> {
/// use tinkex::{Message, SamplingParams};
///
/// let tokenizer = sampler.tokenizer().await?;
/// let chat = tokenizer.chat()?;
/// let prompt = chat.prompt(&[Message::user("Name a river.")])?;
/// let params = SamplingParams::new().max_tokens(100).stop(chat.stop()?);
/// let answer = sampler.sample(prompt, params).send().await?;
/// println!("{}", tokenizer.decode_text(&answer.sequences[0].tokens)?);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Chat {
    tokenizer: Tokenizer,
    template: Arc<Template>,
    for_tools: Option<Arc<Template>>,
    tools: Option<Value>,
    variables: Vec<(String, Value)>,
    now: Option<SystemTime>,
}

impl Tokenizer {
    /// How this model writes conversations: its own template, or for a model without one a plain
    /// form (`User: …`, `Assistant: …`, the end token behind every answer), which is logged.
    ///
    /// # Errors
    /// If the template cannot be understood, or there are several and none is the usual one.
    pub fn chat(&self) -> Result<Chat> {
        let templates = &self.files().templates;
        let named = |name: &str| templates.iter().find(|template| template.name == name);
        let Some(usual) = named(NamedTemplate::USUAL) else {
            if !templates.is_empty() {
                return Err(self.no_template(NamedTemplate::USUAL));
            }
            tracing::warn!(
                model = self.name(),
                "the model has no chat template; conversations are written in a plain form"
            );
            return Chat::with_template(self, PLAIN);
        };
        let chat = Chat::with_template(self, &usual.source)?;
        let for_tools =
            named(FOR_TOOLS).map(|named| Template::compile(&named.source)).transpose()?;
        Ok(Chat { for_tools: for_tools.map(Arc::new), ..chat })
    }

    /// One of several templates that the model has, by its name.
    ///
    /// # Errors
    /// If there is none of that name, or it cannot be understood.
    pub fn chat_named(&self, name: &str) -> Result<Chat> {
        let found = self.files().templates.iter().find(|template| template.name == name);
        let found = found.ok_or_else(|| self.no_template(name))?;
        Chat::with_template(self, &found.source)
    }

    /// Whether the model has a chat template of its own.
    #[must_use]
    pub fn has_chat_template(&self) -> bool {
        !self.files().templates.is_empty()
    }

    fn no_template(&self, name: &str) -> Error {
        let names = self.files().templates.iter().map(|template| format!("{:?}", template.name));
        let names = names.collect::<Vec<_>>().join(", ");
        let names = if names.is_empty() { "none".to_owned() } else { names };
        let why = format!("{} has no chat template {name:?}; it has: {names}", self.name());
        Error::new(ErrorKind::NotFound, why).with_hint("name one with Tokenizer::chat_named")
    }
}

impl Chat {
    /// Another template, in Jinja as `transformers` runs it.
    ///
    /// # Errors
    /// If it cannot be understood.
    pub fn with_template(tokenizer: &Tokenizer, source: &str) -> Result<Self> {
        let template = Template::compile(source).map_err(|error| {
            error.during(format!("reading the template of {}", tokenizer.name()))
        })?;
        Ok(Self {
            tokenizer: tokenizer.clone(),
            template: Arc::new(template),
            for_tools: None,
            tools: None,
            variables: Vec::new(),
            now: None,
        })
    }

    /// Tools that the model may call, as its template expects them: often a list of JSON schemas.
    ///
    /// Their fields are written in the order that they come in. A [`serde_json::Value`] sorts them
    /// by name, unlike Python; [`Chat::tools_json`] does not.
    #[must_use]
    pub fn tools(mut self, tools: impl Serialize) -> Self {
        self.tools = Some(Value::from(Serde(tools)));
        self
    }

    /// The same from JSON text, with fields in the order they have there.
    ///
    /// # Errors
    /// If the text is not JSON.
    pub fn tools_json(mut self, text: &str) -> Result<Self> {
        let tools: Value = serde_json::from_str(text).map_err(|why| {
            Error::new(ErrorKind::InvalidInput, format!("the tools are not JSON: {why}"))
        })?;
        self.tools = Some(tools);
        Ok(self)
    }

    /// A variable that the template reads, such as `enable_thinking`.
    #[must_use]
    pub fn variable(mut self, name: impl Into<String>, value: impl Serialize) -> Self {
        self.variables.push((name.into(), Value::from(Serde(value))));
        self
    }

    /// The moment that the template takes for now, if it writes the date; otherwise that of the call.
    /// Dates are in UTC. Training data should not change from day to day, so set it there.
    #[must_use]
    pub fn date(mut self, now: SystemTime) -> Self {
        self.now = Some(now);
        self
    }

    /// The tokenizer.
    #[must_use]
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// A whole conversation as text.
    ///
    /// # Errors
    /// If the template does not take the conversation.
    pub fn render(&self, messages: &[Message]) -> Result<String> {
        self.write(&values(messages), false).map(|rendered| rendered.text)
    }

    /// A conversation as text, up to where the model is to go on.
    ///
    /// # Errors
    /// If the template does not take the conversation.
    pub fn render_prompt(&self, messages: &[Message]) -> Result<String> {
        self.write(&values(messages), true).map(|rendered| rendered.text)
    }

    /// A conversation to be gone on with, as a model reads it.
    ///
    /// # Errors
    /// If the template does not take the conversation.
    pub fn prompt(&self, messages: &[Message]) -> Result<ModelInput> {
        // The template writes the token that begins a text, if the model wants one.
        let tokens = self.tokenizer.encode_piece(&self.render_prompt(messages)?)?;
        Ok(ModelInput::from_tokens(tokens))
    }

    /// Where an answer ends: the model's end token, and what its template puts behind a turn.
    ///
    /// # Errors
    /// If there is neither.
    pub fn stop(&self) -> Result<StopCondition> {
        let mut ends: Vec<u32> = self.tokenizer.eos_id().into_iter().collect();
        let probe = values(&[Message::user("?"), Message::assistant(train::PROBE)]);
        // A template that does not take the probe has no say; the end token remains.
        if let Ok(rendered) = self.write(&probe, false)
            && let Some((_, behind)) = rendered.text.rsplit_once(train::PROBE)
            && let Some(first) = self.tokenizer.encode_piece(behind)?.first().copied()
            && self.tokenizer.is_special(first)
            && !ends.contains(&first)
        {
            ends.push(first);
        }
        if ends.is_empty() {
            let why = format!("{} does not say where an answer ends", self.tokenizer.name());
            return Err(Error::new(ErrorKind::NotFound, why));
        }
        Ok(StopCondition::Tokens(ends))
    }

    fn template(&self) -> &Template {
        match &self.for_tools {
            Some(template) if self.tools.is_some() => template,
            _ => &self.template,
        }
    }

    /// The same with the tools of one conversation, where that has its own.
    fn with_tools(&self, tools: Option<Value>) -> Self {
        Self { tools: tools.or_else(|| self.tools.clone()), ..self.clone() }
    }

    fn write(&self, messages: &[Value], go_on: bool) -> Result<Rendered> {
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
            ("add_generation_prompt", Value::from(go_on)),
            ("strftime_now", strftime_now(self.now)),
        ];
        let context = named
            .into_iter()
            .chain(tokens.map(|(name, token)| (name, Value::from(token.as_str()))))
            .chain(self.variables.iter().map(|(name, value)| (name.as_str(), value.clone())));
        let rendered = self.template().render(Value::from_pairs(context));
        rendered.map_err(|error| error.during("writing the conversation"))
    }
}

fn values(messages: &[Message]) -> Vec<Value> {
    messages.iter().map(Message::value).collect()
}

impl fmt::Debug for Chat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Chat").field("tokenizer", &self.tokenizer).finish_non_exhaustive()
    }
}
