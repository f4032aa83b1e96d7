//! [`ToolCall`]: a tool call as models write it.

use serde::Deserialize;
use serde_json::value::RawValue;

/// A tool call.
#[derive(Debug, PartialEq)]
pub(super) struct ToolCall {
    pub(super) name: String,
    /// Text of a JSON object.
    pub(super) arguments: String,
}

#[derive(Deserialize)]
struct RawToolCall<'a> {
    name: String,
    #[serde(borrow, alias = "parameters")]
    arguments: Option<&'a RawValue>,
}

impl ToolCall {
    /// Parses a JSON object with a `name` and `arguments` or `parameters`: an object, a string with
    /// the text of one, or nothing. Returns `None` for any other text.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        // serde would accept a list of the field values in order.
        let call: RawToolCall<'_> =
            text.starts_with('{').then(|| serde_json::from_str(text).ok())??;
        let arguments = match call.arguments.map(RawValue::get) {
            None => "{}".to_owned(),
            Some(text) if text.starts_with('"') => {
                let inner: String = serde_json::from_str(text).ok()?;
                serde_json::from_str::<&RawValue>(&inner).ok()?;
                inner.trim().to_owned()
            }
            Some(text) => text.to_owned(),
        };
        let is_object = arguments.starts_with('{');
        is_object.then_some(Self { name: call.name, arguments })
    }
}

/// Finds the end of a JSON object in a text that grows.
#[derive(Clone, Debug, Default)]
pub(super) struct JsonObjectEnd {
    /// Number of bytes that have been read.
    read: usize,
    depth: usize,
    in_string: bool,
    escaped: bool,
}

impl JsonObjectEnd {
    /// Returns the length of the object that `text` starts with, once it is complete. Later calls
    /// must pass the same text, with more at its end.
    pub(super) fn find(&mut self, text: &str) -> Option<usize> {
        for byte in text.bytes().skip(self.read) {
            self.read += 1;
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' if self.in_string => self.escaped = true,
                b'"' => self.in_string = !self.in_string,
                _ if self.in_string => {}
                b'{' => self.depth += 1,
                b'}' => {
                    self.depth -= 1;
                    if self.depth == 0 {
                        return Some(self.read);
                    }
                }
                _ => {}
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_parsed_with_the_text_of_their_arguments() {
        for (text, arguments) in [
            (r#" {"name": "f", "arguments": {"b": 1,  "a": [2]}} "#, r#"{"b": 1,  "a": [2]}"#),
            (r#"{"parameters":{}, "name":"f", "type": "function"}"#, "{}"),
            (r#"{"name": "f"}"#, "{}"),
            (r#"{"name": "f", "arguments": null}"#, "{}"),
            (r#"{"name": "f", "arguments": " {\"a\": 1}"}"#, r#"{"a": 1}"#),
        ] {
            let call = ToolCall::parse(text).unwrap();
            assert_eq!((call.name.as_str(), call.arguments.as_str()), ("f", arguments), "{text}");
        }
    }

    #[test]
    fn other_texts_are_not_calls() {
        for text in [
            "",
            "f",
            r#"["f", {}]"#,
            r#"{"name": 1}"#,
            r#"{"arguments": {}}"#,
            r#"{"name": "f", "arguments": [1]}"#,
            r#"{"name": "f", "arguments": "x"}"#,
            r#"{"name": "f", "arguments": {}} and"#,
            r#"{"name": "f", "arguments": {"#,
            r#"{"name": "f", "arguments": {}, "parameters": {}}"#,
        ] {
            assert_eq!(ToolCall::parse(text), None, "{text}");
        }
    }

    #[test]
    fn the_end_of_an_object_is_found_in_pieces() {
        let text = r#"{"a}": "\"}\\", "b": {"c": "{"}} rest"#;
        let mut end = JsonObjectEnd::default();
        for len in 1..text.len() - 5 {
            assert_eq!(end.find(&text[..len]), None, "{len}");
        }
        assert_eq!(end.find(text), Some(text.len() - 5));
    }
}
