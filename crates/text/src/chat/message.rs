//! [`Message`]: one message of a conversation.

use std::fmt;

use minijinja::Value;
use minijinja::value::{Serde, ValueKind};
use serde::de::{self, Deserialize, Deserializer};
use serde::ser::{Serialize, SerializeMap as _, Serializer};

/// One message of a conversation: its role, its content, and other fields that the model's template
/// reads, such as tool calls. Fields keep their order.
///
/// ```
/// use tinkex_text::Message;
///
/// let question = Message::user("What is the weather in Ulm?");
/// let tool_calls = serde_json::json!([{"function": {"name": "weather"}}]);
/// let call = Message::assistant("").with("tool_calls", tool_calls);
/// let result: Message = serde_json::from_str(r#"{"role": "tool", "content": "snow"}"#).unwrap();
/// assert_eq!((question.role(), result.role()), ("user", "tool"));
/// ```
#[derive(Clone, PartialEq)]
pub struct Message {
    role: String,
    fields: Vec<(String, Value)>,
}

impl Message {
    /// Creates a message with any role.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        let role = role.into();
        let fields = vec![
            ("role".to_owned(), Value::from(role.clone())),
            ("content".to_owned(), Value::from(content.into())),
        ];
        Self { role, fields }
    }

    /// Creates a message with the role `system`: instructions for the model.
    pub fn system(content: impl Into<String>) -> Self {
        Self::new("system", content)
    }

    /// Creates a message with the role `user`.
    pub fn user(content: impl Into<String>) -> Self {
        Self::new("user", content)
    }

    /// Creates a message with the role `assistant`: a completion of the model.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self::new(ASSISTANT, content)
    }

    /// Creates a message with the role `tool`: the result of a tool call.
    pub fn tool(content: impl Into<String>) -> Self {
        Self::new("tool", content)
    }

    /// Adds or replaces a field. If the value cannot be serialized, rendering a template that uses
    /// it fails.
    #[must_use]
    pub fn with(mut self, name: impl Into<String>, value: impl Serialize) -> Self {
        let name = name.into();
        let value = Value::from(Serde(value));
        if name == "role" {
            value.as_str().unwrap_or_default().clone_into(&mut self.role);
        }
        match self.fields.iter_mut().find(|(key, _)| *key == name) {
            Some((_, old)) => *old = value,
            None => self.fields.push((name, value)),
        }
        self
    }

    /// Returns the role: `system`, `user`, `assistant`, `tool`, or another.
    #[must_use]
    pub fn role(&self) -> &str {
        &self.role
    }

    /// Returns the content, if it is plain text.
    #[must_use]
    pub fn content(&self) -> Option<&str> {
        self.fields.iter().find(|(name, _)| name == "content")?.1.as_str()
    }

    /// Returns whether the role is `assistant`.
    #[must_use]
    pub fn is_assistant(&self) -> bool {
        self.role == ASSISTANT
    }

    /// Returns the message as a template value.
    pub(crate) fn value(&self) -> Value {
        Value::from_pairs(self.fields.iter().map(|(name, value)| (name.as_str(), value.clone())))
    }
}

const ASSISTANT: &str = "assistant";

impl Serialize for Message {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.fields.len()))?;
        for (name, value) in &self.fields {
            map.serialize_entry(name, value)?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for Message {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        if value.kind() != ValueKind::Map {
            return Err(de::Error::custom("expected a message: an object with a role and content"));
        }
        let mut fields = Vec::new();
        for name in value.try_iter().map_err(de::Error::custom)? {
            let field = value.get_item(&name).map_err(de::Error::custom)?;
            fields.push((name.to_string(), field));
        }
        let role = fields.iter().find(|(name, _)| name == "role");
        let role = role.and_then(|(_, role)| role.as_str()).map(str::to_owned);
        let role = role.ok_or_else(|| de::Error::custom("a message has no role"))?;
        Ok(Self { role, fields })
    }
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.fields.iter().map(|(name, value)| (name, value))).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_keep_their_order_in_both_directions() {
        let text = r#"{"role":"assistant","z":1,"content":null,"a":{"y":[true],"b":2.5}}"#;
        let message: Message = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&message).unwrap(), text);
        assert_eq!((message.role(), message.content()), ("assistant", None));
        let changed = message.with("content", "hi").with("role", "user");
        let text = r#"{"role":"user","z":1,"content":"hi","a":{"y":[true],"b":2.5}}"#;
        assert_eq!(serde_json::to_string(&changed).unwrap(), text);
        assert_eq!((changed.role(), changed.content()), ("user", Some("hi")));
    }

    #[test]
    fn values_that_are_not_messages_are_rejected() {
        for text in ["1", "[]", "{}", r#"{"role":1,"content":"x"}"#] {
            assert!(serde_json::from_str::<Message>(text).is_err(), "{text}");
        }
    }
}
