//! [`ExampleFormat`]: the formats of training examples, recognized by their keys and converted to
//! the formats that the client library reads.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};

/// Format of an example of supervised training.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ExampleFormat {
    /// `{"messages": [{"role": …, "content": …}]}`.
    Conversations,
    /// `{"conversations": [{"from": …, "value": …}]}`.
    #[serde(rename = "sharegpt")]
    ShareGpt,
    /// `{"instruction": …, "input": …, "output": …}`.
    Alpaca,
    /// `{"prompt": …, "completion": …}`.
    PromptCompletion,
    /// `{"text": …}`.
    Text,
}

impl fmt::Display for ExampleFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Conversations => "conversations",
            Self::ShareGpt => "ShareGPT",
            Self::Alpaca => "Alpaca",
            Self::PromptCompletion => "prompt/completion",
            Self::Text => "text",
        })
    }
}

/// Reason why a record is not an example, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct InvalidRecord {
    /// Number of the line, from 1.
    pub(super) line: u64,
    pub(super) reason: String,
    pub(super) advice: Advice,
}

/// What to do about an invalid record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Advice {
    /// Use one of the formats.
    Formats,
    /// Convert the file to UTF-8.
    Encoding,
    /// Write each example on one line, or a JSON array.
    Layout,
    /// Replace the file, which cannot be read to its end.
    Damaged,
    /// Shorten the example or raise the limit.
    Length,
    /// Pass `--method dpo`.
    UseDpo,
    /// Omit `--method dpo`.
    UseSft,
}

/// Reason and advice, without the line.
pub(super) type Rejection = (String, Advice);

/// Fields of a record. Their values are not parsed.
type Fields = BTreeMap<String, Box<RawValue>>;

fn field<'a>(fields: &'a Fields, key: &str) -> Option<&'a RawValue> {
    fields.get(key).map(|value| &**value)
}

/// Parses a record as an object.
fn fields(record: &[u8]) -> Result<Fields, Rejection> {
    if let Err(error) = std::str::from_utf8(record) {
        let at = error.valid_up_to();
        let byte = record.get(at).copied().unwrap_or_default();
        let reason = format!("not UTF-8: byte 0x{byte:02X} at column {}", at + 1);
        return Err((reason, Advice::Encoding));
    }
    match serde_json::from_slice::<Fields>(record) {
        Ok(fields) => Ok(fields),
        Err(error) => Err(match serde_json::from_slice::<Value>(record) {
            Ok(value) => {
                (format!("expected an object, found {}", type_name(&value)), Advice::Formats)
            }
            Err(_) if error.is_eof() => {
                ("incomplete JSON: the object does not end".to_owned(), Advice::Layout)
            }
            Err(error) => (format!("invalid JSON at column {}", error.column()), Advice::Layout),
        }),
    }
}

/// Recognizes the format of an example and converts it to one that
/// [`Chat::read_jsonl`](tinkex::Chat::read_jsonl) reads.
///
/// # Errors
///
/// Names what was found if the format is unknown, a key is missing, or a role is unknown.
pub(super) fn example(record: &[u8]) -> Result<(ExampleFormat, Cow<'_, [u8]>), Rejection> {
    let record = record.trim_ascii();
    let fields = fields(record)?;
    let has = |key: &str| fields.get(key).is_some_and(|value| value.get() != "null");
    let wrong = |reason: String| (reason, Advice::Formats);
    let missing = |present: &str, absent: &str| wrong(format!("{present:?} without {absent:?}"));
    if has("chosen") && has("rejected") {
        return Err((
            "found a preference pair: \"chosen\" and \"rejected\"".to_owned(),
            Advice::UseDpo,
        ));
    }
    if let Some(messages) = fields.get("messages").filter(|_| has("messages")) {
        check_messages("messages", messages).map_err(wrong)?;
        return Ok((ExampleFormat::Conversations, Cow::Borrowed(record)));
    }
    if let Some(turns) = fields.get("conversations").filter(|_| has("conversations")) {
        let messages = share_gpt(turns, field(&fields, "system")).map_err(wrong)?;
        let line = conversation(&messages, field(&fields, "tools")).map_err(wrong)?;
        return Ok((ExampleFormat::ShareGpt, line.into()));
    }
    match (has("instruction"), has("output")) {
        (true, true) => {
            let mut messages = alpaca_prompt(&fields).map_err(wrong)?;
            messages.push(message("assistant", &text(&fields, "output").map_err(wrong)?));
            let line = conversation(&messages, None).map_err(wrong)?;
            return Ok((ExampleFormat::Alpaca, line.into()));
        }
        (true, false) => return Err(missing("instruction", "output")),
        _ => {}
    }
    match (has("prompt"), has("completion")) {
        (true, true) => return Ok((ExampleFormat::PromptCompletion, Cow::Borrowed(record))),
        (true, false) => return Err(missing("prompt", "completion")),
        (false, true) => return Err(missing("completion", "prompt")),
        (false, false) => {}
    }
    if has("text") {
        let text = text(&fields, "text").map_err(wrong)?;
        if text.is_empty() {
            return Err(wrong("\"text\" is empty".to_owned()));
        }
        let line = json!({ "prompt": "", "completion": text }).to_string();
        return Ok((ExampleFormat::Text, line.into_bytes().into()));
    }
    Err(wrong(unknown_keys(&fields)))
}

/// Converts a preference pair to a form that
/// [`DpoPair::read_jsonl`](tinkex_recipes::dpo::DpoPair::read_jsonl) reads: the prompt of ShareGPT
/// and Alpaca pairs becomes a conversation.
pub(super) fn pair(record: &[u8]) -> Result<Cow<'_, [u8]>, Rejection> {
    let record = record.trim_ascii();
    let fields = fields(record)?;
    let wrong = |reason: String| (reason, Advice::Formats);
    if !fields.contains_key("chosen") || !fields.contains_key("rejected") {
        return Err(match example(record) {
            Ok((format, _)) => {
                let reason = format!("expected \"chosen\" and \"rejected\", found {format}");
                (reason, Advice::UseSft)
            }
            Err(_) => {
                let keys = quoted_keys(&fields);
                wrong(format!("expected \"chosen\" and \"rejected\", found {keys}"))
            }
        });
    }
    let prompt = if let Some(turns) = fields.get("conversations") {
        share_gpt(turns, field(&fields, "system")).map_err(wrong)?
    } else if fields.contains_key("instruction") {
        alpaca_prompt(&fields).map_err(wrong)?
    } else {
        for key in ["prompt", "messages", "chosen", "rejected"] {
            if let Some(messages) = fields.get(key).filter(|value| value.get().starts_with('[')) {
                check_messages(key, messages).map_err(wrong)?;
            }
        }
        return Ok(Cow::Borrowed(record));
    };
    let completion = |key: &str| -> Result<Value, Rejection> {
        let value: Value = parse(&fields[key]);
        match value {
            Value::String(text) => Ok(message("assistant", &text)),
            Value::Object(_) => {
                let turn = share_gpt_turn(key, 0, &value).map_err(wrong)?;
                Ok(turn)
            }
            other => Err(wrong(format!(
                "{key:?}: expected a string or a message, found {}",
                type_name(&other)
            ))),
        }
    };
    let pair = json!({
        "prompt": prompt,
        "chosen": completion("chosen")?,
        "rejected": completion("rejected")?,
    });
    Ok(pair.to_string().into_bytes().into())
}

/// Checks a prompt of `tinkex rl`.
pub(super) fn prompt(record: &[u8]) -> Result<&[u8], Rejection> {
    let record = record.trim_ascii();
    let fields = fields(record)?;
    let wrong = |reason: String| (reason, Advice::Formats);
    if let Some(messages) = fields.get("messages") {
        check_messages("messages", messages).map_err(wrong)?;
    } else if !fields.contains_key("prompt") {
        let keys = quoted_keys(&fields);
        return Err(wrong(format!("expected \"prompt\" or \"messages\", found {keys}")));
    }
    Ok(record)
}

fn parse(raw: &RawValue) -> Value {
    // The value is valid JSON: it was parsed as a part of its record.
    serde_json::from_str(raw.get()).unwrap_or_default()
}

/// Returns a field that must be a string.
fn text(fields: &Fields, key: &str) -> Result<String, String> {
    match fields.get(key).map(|value| parse(value)) {
        Some(Value::String(text)) => Ok(text),
        None | Some(Value::Null) => Ok(String::new()),
        Some(other) => Err(format!("{key:?}: expected a string, found {}", type_name(&other))),
    }
}

fn message(role: &str, content: &str) -> Value {
    json!({ "role": role, "content": content })
}

/// Returns the system message and the request of an Alpaca example: the instruction, and after an
/// empty line the input.
fn alpaca_prompt(fields: &Fields) -> Result<Vec<Value>, String> {
    let instruction = text(fields, "instruction")?;
    let input = text(fields, "input")?;
    let system = text(fields, "system")?;
    let request = match input.trim() {
        "" => instruction,
        _ => format!("{instruction}\n\n{input}"),
    };
    let system = (!system.is_empty()).then(|| message("system", &system));
    Ok(system.into_iter().chain([message("user", &request)]).collect())
}

/// Writes a conversation as one line. `tools` is JSON, or a string with JSON, as in some datasets.
/// Its text is kept, because the order of its fields matters.
fn conversation(messages: &[Value], tools: Option<&RawValue>) -> Result<Vec<u8>, String> {
    let messages = Value::from(messages);
    let tools = match tools.map(parse) {
        None | Some(Value::Null) => None,
        Some(Value::String(text)) if text.trim().is_empty() => None,
        Some(Value::String(text)) => {
            let json: &RawValue = serde_json::from_str(&text)
                .map_err(|_| "\"tools\": expected a list, or a string with JSON".to_owned())?;
            // Strings contain no line breaks, so these are white space.
            Some(json.get().replace(['\n', '\r'], " "))
        }
        Some(_) => tools.map(|tools| tools.get().to_owned()),
    };
    let line = match tools {
        None => json!({ "messages": messages }).to_string(),
        Some(tools) => format!("{{\"messages\":{messages},\"tools\":{tools}}}"),
    };
    Ok(line.into_bytes())
}

/// Converts the turns of a ShareGPT conversation to messages.
fn share_gpt(turns: &RawValue, system: Option<&RawValue>) -> Result<Vec<Value>, String> {
    let turns = match parse(turns) {
        Value::Array(turns) => turns,
        other => {
            return Err(format!("\"conversations\": expected a list, found {}", type_name(&other)));
        }
    };
    let mut messages = Vec::new();
    if let Some(Value::String(system)) = system.map(parse)
        && !system.is_empty()
    {
        messages.push(message("system", &system));
    }
    for (index, turn) in turns.iter().enumerate() {
        messages.push(share_gpt_turn("conversations", index, turn)?);
    }
    Ok(messages)
}

/// Converts a turn, which has `from` and `value`, or `role` and `content`.
fn share_gpt_turn(list: &str, index: usize, turn: &Value) -> Result<Value, String> {
    let at = format!("{list}[{index}]");
    let Value::Object(fields) = turn else {
        return Err(format!("{at}: expected an object, found {}", type_name(turn)));
    };
    let of = |a: &str, b: &str| fields.get(a).or_else(|| fields.get(b));
    let (Some(from), Some(value)) = (of("from", "role"), of("value", "content")) else {
        let keys = quoted(fields.keys());
        return Err(format!("{at}: expected \"from\" and \"value\", found {keys}"));
    };
    let role = match from.as_str().map(str::to_ascii_lowercase).as_deref() {
        Some("human" | "user") => "user",
        Some("gpt" | "chatgpt" | "assistant" | "model" | "bot") => "assistant",
        Some("system") => "system",
        Some("tool" | "observation" | "function_response") => "tool",
        _ => {
            return Err(format!(
                "{at}: unknown speaker {from}; expected human, gpt, system or tool"
            ));
        }
    };
    match value {
        Value::String(content) => Ok(message(role, content)),
        other => Err(format!("{at}.value: expected a string, found {}", type_name(other))),
    }
}

/// Roles that chat templates know.
const ROLES: [&str; 7] =
    ["system", "developer", "user", "assistant", "tool", "function", "ipython"];

/// Checks roles and contents of messages. The client library checks everything else.
fn check_messages(list: &str, messages: &RawValue) -> Result<(), String> {
    let Value::Array(messages) = parse(messages) else { return Ok(()) };
    for (index, message) in messages.iter().enumerate() {
        let at = format!("{list}[{index}]");
        let Value::Object(fields) = message else {
            let found = type_name(message);
            return Err(format!("{at}: expected an object with a role and content, found {found}"));
        };
        let Some(role) = fields.get("role") else {
            let keys = quoted(fields.keys());
            return Err(format!("{at}: expected \"role\" and \"content\", found {keys}"));
        };
        if !role.as_str().is_some_and(|role| ROLES.contains(&role)) {
            return Err(format!(
                "{at}: unknown role {role}; expected system, user, assistant or tool"
            ));
        }
        let is_empty = !["content", "tool_calls", "thinking", "reasoning_content"]
            .iter()
            .any(|key| fields.contains_key(*key));
        if is_empty {
            let keys = quoted(fields.keys());
            return Err(format!("{at}: expected \"content\", found {keys}"));
        }
    }
    Ok(())
}

/// Describes the keys of a record of no known format.
fn unknown_keys(fields: &Fields) -> String {
    const KNOWN: [&str; 7] =
        ["messages", "conversations", "prompt", "completion", "instruction", "output", "text"];
    let found = quoted_keys(fields);
    if fields.contains_key("role") && fields.contains_key("content") {
        return format!("found a single message; expected a list of them in \"messages\": {found}");
    }
    let plain = |key: &str| key.to_ascii_lowercase().trim_end_matches('s').to_owned();
    let similar = |key: &String| KNOWN.into_iter().find(|known| plain(key) == plain(known));
    match fields.keys().find_map(|key| Some((key, similar(key)?))) {
        Some((key, known)) if key != known => {
            format!("unknown key {key:?}; did you mean {known:?}?")
        }
        _ => format!("unknown format: found {found}"),
    }
}

fn quoted_keys(fields: &Fields) -> String {
    quoted(fields.keys())
}

/// Returns keys in quotes: `"a", "b"`; at most six.
fn quoted<'a>(keys: impl Iterator<Item = &'a String>) -> String {
    /// Maximum number of keys to name.
    const MAX_KEYS: usize = 6;
    let keys: Vec<String> = keys.map(|key| format!("{key:?}")).collect();
    match keys.len() {
        0 => "no keys".to_owned(),
        1..=MAX_KEYS => keys.join(", "),
        count => format!("{} and {} more", keys[..MAX_KEYS].join(", "), count - MAX_KEYS),
    }
}

fn type_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_recognized_and_converted() {
        use ExampleFormat::{Alpaca, Conversations, PromptCompletion, ShareGpt, Text};
        let turns =
            json!([{ "role": "user", "content": "Hi" }, { "role": "assistant", "content": "Yes" }]);
        for (record, format, expected) in [
            (json!({ "messages": turns, "prompt": "x" }), Conversations, None),
            (json!({ "prompt": "a", "completion": "b", "id": 1 }), PromptCompletion, None),
            (json!({ "text": "abc" }), Text, Some(json!({ "prompt": "", "completion": "abc" }))),
            (
                json!({ "conversations": [{ "from": "human", "value": "Hi" },
                    { "from": "gpt", "value": "Yes" }], "id": "x" }),
                ShareGpt,
                Some(json!({ "messages": turns })),
            ),
            (
                json!({ "instruction": "Hi", "input": "", "output": "Yes" }),
                Alpaca,
                Some(json!({ "messages": turns })),
            ),
            (
                json!({ "instruction": "Add", "input": "1 2", "output": "3", "system": "Be exact" }),
                Alpaca,
                Some(json!({ "messages": [
                    { "role": "system", "content": "Be exact" },
                    { "role": "user", "content": "Add\n\n1 2" },
                    { "role": "assistant", "content": "3" },
                ] })),
            ),
            (
                json!({ "conversations": turns, "tools": "[\n  {\"z\": 1, \"a\": 2}\n]\n" }),
                ShareGpt,
                Some(json!({ "messages": turns, "tools": [{ "z": 1, "a": 2 }] })),
            ),
        ] {
            let bytes = record.to_string();
            let (found, converted) = example(bytes.as_bytes()).unwrap();
            assert!(!converted.contains(&b'\n'), "{bytes}: several lines");
            let converted: Value = serde_json::from_slice(&converted).unwrap();
            assert_eq!((found, converted), (format, expected.unwrap_or(record)), "{bytes}");
        }
        let tools = br#"{"conversations": [], "tools": [{"z": 1, "a": 2}]}"#;
        let (_, converted) = example(tools).unwrap();
        let text = String::from_utf8(converted.into_owned()).unwrap();
        assert!(text.ends_with(r#"[{"z": 1, "a": 2}]}"#), "the order of the tools changed: {text}");
    }

    #[test]
    fn invalid_examples_name_what_was_found() {
        for (record, expected, advice) in [
            (
                &br#"{"question": "a", "answer": "b"}"#[..],
                r#"unknown format: found "answer", "question""#,
                Advice::Formats,
            ),
            (
                br#"{"message": []}"#,
                r#"unknown key "message"; did you mean "messages"?"#,
                Advice::Formats,
            ),
            (br#"{"prompt": "a"}"#, r#""prompt" without "completion""#, Advice::Formats),
            (br#"{"instruction": "a"}"#, r#""instruction" without "output""#, Advice::Formats),
            (br#"{"role": "user", "content": "a"}"#, "found a single message", Advice::Formats),
            (
                br#"{"messages": [{"role": "human", "content": "a"}]}"#,
                r#"messages[0]: unknown role "human""#,
                Advice::Formats,
            ),
            (
                br#"{"messages": [{"role": "user", "text": "a"}]}"#,
                r#"messages[0]: expected "content", found "role", "text""#,
                Advice::Formats,
            ),
            (
                br#"{"messages": ["hi"]}"#,
                "messages[0]: expected an object with a role and content, found a string",
                Advice::Formats,
            ),
            (
                br#"{"conversations": [{"from": "alien", "value": "a"}]}"#,
                r#"conversations[0]: unknown speaker "alien""#,
                Advice::Formats,
            ),
            (
                br#"{"conversations": [{"from": "gpt"}]}"#,
                r#"conversations[0]: expected "from" and "value", found "from""#,
                Advice::Formats,
            ),
            (
                br#"{"conversations": [], "tools": "search"}"#,
                r#""tools": expected a list, or a string with JSON"#,
                Advice::Formats,
            ),
            (br#"{"text": 5}"#, r#""text": expected a string, found a number"#, Advice::Formats),
            (
                br#"{"prompt": "", "chosen": "a", "rejected": "b"}"#,
                "found a preference pair",
                Advice::UseDpo,
            ),
            (b"[1]", "expected an object, found a list", Advice::Formats),
            (b"{", "incomplete JSON", Advice::Layout),
            (b"prompt,completion", "invalid JSON at column 1", Advice::Layout),
            (b"{\"text\": \"caf\xE9\"}", "not UTF-8: byte 0xE9 at column 14", Advice::Encoding),
        ] {
            let (reason, found) = example(record).unwrap_err();
            assert!(reason.starts_with(expected), "{reason}");
            assert_eq!(found, advice, "{reason}");
        }
    }

    #[test]
    fn pairs_of_other_formats_are_converted() {
        let own = br#" {"prompt": "a", "chosen": "b", "rejected": "c"}"#;
        assert_eq!(*pair(own).unwrap(), own[1..]);
        let user = json!([{ "role": "user", "content": "Hi" }]);
        let yes = message("assistant", "Yes");
        let no = message("assistant", "No");
        let expected = json!({ "prompt": user, "chosen": yes, "rejected": no });
        for record in [
            json!({ "instruction": "Hi", "chosen": "Yes", "rejected": "No" }),
            json!({ "conversations": [{ "from": "human", "value": "Hi" }],
                "chosen": { "from": "gpt", "value": "Yes" },
                "rejected": { "from": "gpt", "value": "No" } }),
        ] {
            let converted = pair(record.to_string().as_bytes()).unwrap().into_owned();
            assert_eq!(serde_json::from_slice::<Value>(&converted).unwrap(), expected);
        }
        let (reason, advice) = pair(br#"{"prompt": "a", "completion": "b"}"#).unwrap_err();
        assert_eq!(advice, Advice::UseSft);
        assert!(reason.ends_with("found prompt/completion"), "{reason}");
        let (reason, _) = pair(br#"{"chosen": "a"}"#).unwrap_err();
        assert!(reason.ends_with("found \"chosen\""), "{reason}");
    }
}
