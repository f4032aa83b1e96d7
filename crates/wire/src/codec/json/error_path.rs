//! [`error_path`]: the path of the value at which decoding failed.
//!
//! serde_json reports the line and column of an error, not its path. A decoder that tracks the
//! path, such as `serde_path_to_error`, would make the compiler generate the decoder of every
//! protocol type a second time, for an error that is rare. This module therefore derives the path
//! from the position, by scanning the text before the error.

use std::fmt::Write as _;

/// Maximum depth of objects and lists whose keys and indexes are kept. serde_json rejects typed
/// values that are nested more deeply; ignored values can be nested without a limit, and keeping
/// their keys would take more memory than the body.
const MAX_DEPTH: usize = 128;

/// Returns the path of the value at which decoding of `body` failed with `error`, for example
/// `prompt.chunks[0].tokens`. The path is empty for the outermost value.
///
/// serde_json reports an error of a value at the position after the value or, if the value was not
/// read, before the value. It reports an error of a whole object or list, such as a missing field,
/// at the position after the closing bracket.
pub(super) fn error_path(body: &[u8], error: &serde_json::Error) -> String {
    let Some(line_start) = line_start(body, error.line()) else { return String::new() };
    let offset = line_start.saturating_add(error.column()).min(body.len());
    let mut scanner = Scanner::default();
    scanner.read(&body[..offset]);
    if is_unread(&body[offset..], error) {
        scanner.start_value();
    }
    scanner.path()
}

/// Returns whether `error` rejects the object or list with which `rest` starts. serde_json rejects
/// a value of the wrong type before it reads the value, so the position is before the value.
fn is_unread(rest: &[u8], error: &serde_json::Error) -> bool {
    let found = match rest.trim_ascii_start().first() {
        Some(b'{') => "invalid type: map",
        Some(b'[') => "invalid type: sequence",
        _ => return false,
    };
    error.to_string().starts_with(found)
}

/// Returns the byte offset of the start of line `line`; lines are counted from 1.
fn line_start(body: &[u8], line: usize) -> Option<usize> {
    let lines_before = line.checked_sub(1)?;
    if lines_before == 0 {
        return Some(0);
    }
    let mut ends = body.iter().enumerate().filter(|(_, byte)| **byte == b'\n');
    ends.nth(lines_before - 1).map(|(end, _)| end + 1)
}

/// Tracks the path in a JSON text. The text is valid up to the error.
#[derive(Default)]
struct Scanner<'a> {
    /// Open objects and lists, outermost first; at most [`MAX_DEPTH`].
    open: Vec<Container<'a>>,
    /// Number of open objects and lists beyond [`MAX_DEPTH`].
    deeper: usize,
}

/// An open object or list.
struct Container<'a> {
    entry: Entry<'a>,
    /// Whether the scanner is at the value of the entry: inside the value, or directly after it.
    at_value: bool,
}

/// Current entry of an object or list.
enum Entry<'a> {
    /// Entry of an object: the key with its quotes, or `None` before the key.
    Field(Option<&'a [u8]>),
    /// Entry of a list: the index of the element.
    Element(usize),
}

impl<'a> Scanner<'a> {
    fn read(&mut self, text: &'a [u8]) {
        let mut rest = text;
        while let Some(first) = rest.first() {
            let len = match first {
                b'"' => string_len(rest),
                byte if is_separator(*byte) => 1,
                _ => rest.iter().position(|byte| is_separator(*byte)).unwrap_or(rest.len()),
            };
            let (token, after) = rest.split_at(len);
            self.read_token(token);
            rest = after;
        }
    }

    fn read_token(&mut self, token: &'a [u8]) {
        match token[0] {
            b' ' | b'\t' | b'\n' | b'\r' => {}
            b'{' => self.open(Entry::Field(None)),
            b'[' => self.open(Entry::Element(0)),
            b'}' | b']' => self.close(),
            _ if self.deeper > 0 => {}
            b':' => self.start_value(),
            b',' => self.next_entry(),
            _ => match self.open.last_mut() {
                Some(Container { entry: Entry::Field(key @ None), .. }) => *key = Some(token),
                _ => self.start_value(),
            },
        }
    }

    fn open(&mut self, entry: Entry<'a>) {
        if self.open.len() == MAX_DEPTH {
            self.deeper += 1;
            return;
        }
        self.start_value();
        self.open.push(Container { entry, at_value: false });
    }

    fn close(&mut self) {
        match self.deeper.checked_sub(1) {
            Some(deeper) => self.deeper = deeper,
            None => drop(self.open.pop()),
        }
    }

    fn start_value(&mut self) {
        if let Some(container) = self.open.last_mut() {
            container.at_value = true;
        }
    }

    fn next_entry(&mut self) {
        if let Some(container) = self.open.last_mut() {
            container.at_value = false;
            match &mut container.entry {
                Entry::Field(key) => *key = None,
                Entry::Element(index) => *index += 1,
            }
        }
    }

    fn path(&self) -> String {
        let mut path = String::new();
        for container in self.open.iter().filter(|container| container.at_value) {
            match container.entry {
                Entry::Field(None) => {}
                Entry::Field(Some(key)) => {
                    let joint = if path.is_empty() { "" } else { "." };
                    path.push_str(joint);
                    path.push_str(&unquoted(key));
                }
                // Writing to a String cannot fail.
                Entry::Element(index) => drop(write!(path, "[{index}]")),
            }
        }
        path
    }
}

fn is_separator(byte: u8) -> bool {
    matches!(byte, b'{' | b'}' | b'[' | b']' | b':' | b',' | b'"' | b' ' | b'\t' | b'\n' | b'\r')
}

/// Returns the length of the string at the start of `text`, with its quotes. A string without an
/// end takes the whole text.
fn string_len(text: &[u8]) -> usize {
    let mut escaped = false;
    for (index, byte) in text.iter().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return index + 1,
            _ => {}
        }
    }
    text.len()
}

/// Decodes a key, which may contain escapes.
fn unquoted(key: &[u8]) -> String {
    serde_json::from_slice(key).unwrap_or_else(|_| String::from_utf8_lossy(key).into_owned())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde::Deserialize;
    use serde::de::DeserializeOwned;

    use super::*;
    use crate::{CreateModel, Datum, OptimStep, SampleRequest, TinkerPath};

    /// Returns the path according to [`error_path`] and the path according to
    /// `serde_path_to_error`; `None` if `body` is valid.
    fn paths<T: DeserializeOwned>(body: &str) -> Option<(String, String)> {
        let error = serde_json::from_str::<T>(body).err()?;
        let mut decoder = serde_json::Deserializer::from_str(body);
        let tracked = serde_path_to_error::deserialize::<_, T>(&mut decoder).err()?;
        let tracked = tracked.path().to_string();
        let tracked = if tracked == "." { String::new() } else { tracked };
        Some((error_path(body.as_bytes(), &error), tracked))
    }

    #[derive(Deserialize)]
    #[expect(dead_code, reason = "only decoded")]
    struct Outer {
        id: u32,
        items: Vec<Inner>,
        #[serde(default)]
        named: BTreeMap<String, Inner>,
        #[serde(default)]
        pair: Option<(u32, f32)>,
    }

    #[derive(Deserialize)]
    #[expect(dead_code, reason = "only decoded")]
    struct Inner {
        size: u8,
        #[serde(default)]
        kind: Option<Kind>,
    }

    #[derive(Deserialize)]
    #[serde(rename_all = "lowercase")]
    enum Kind {
        Small,
    }

    #[derive(Deserialize)]
    #[expect(dead_code, reason = "only decoded")]
    struct Batch {
        data: Vec<Datum>,
        path: TinkerPath,
    }

    #[test]
    fn errors_of_values_have_the_path_of_the_value() {
        for (body, path) in [
            (r#"{"id":"x","items":[]}"#, "id"),
            (r#"{"id":{},"items":[]}"#, "id"),
            (r#"{"id":1,"items":{}}"#, "items"),
            (r#"{"id":1,"items":[3]}"#, "items[0]"),
            (r#"{"id":1,"items":[ "x" ]}"#, "items[0]"),
            (r#"{"id":1,"items":[{"size":1}, [{}] ]}"#, "items[1][0]"),
            (r#"{"id":1,"items":[{"size":1},{"size":300}]}"#, "items[1].size"),
            (r#"{"id":1,"items":[{"size":-1}]}"#, "items[0].size"),
            (r#"{"id":1,"items":[{"size":1,"kind":"big"}]}"#, "items[0].kind"),
            (r#"{"id":1,"items":[],"named":{"a\"b":{"size":""}}}"#, "named.a\"b.size"),
            ("{\"id\":1,\n \"items\":\n [{\"size\":\n null}]}", "items[0].size"),
            (r#"{"skipped":[[{"a":[1,"}",{}]}]],"id":1,"items":7}"#, "items"),
            (r#"{"id":1,"items":[],"pair":[1,"x"]}"#, "pair[1]"),
        ] {
            let (found, tracked) = paths::<Outer>(body).unwrap();
            assert_eq!((&*found, &*tracked), (path, path), "{body}");
        }
    }

    #[test]
    fn errors_of_objects_and_lists_have_their_path() {
        for (body, path) in [
            ("{}", ""),
            (r#"{"id":1}"#, ""),
            (r#"{"id":1,"items":[{}]}"#, "items[0]"),
            (r#"{"id":1,"items":[{"size":1},{"kind":"small"} ]}"#, "items[1]"),
            (r#"{"id":1,"id":2,"items":[]}"#, ""),
            (r#"{"id":1,"items":[],"named":{"x":{}}}"#, "named.x"),
            (r#"{"id":1,"items":[],"pair":[1]}"#, "pair"),
        ] {
            let (found, tracked) = paths::<Outer>(body).unwrap();
            assert_eq!((&*found, &*tracked), (path, path), "{body}");
        }
    }

    #[test]
    fn truncated_and_malformed_bodies_have_the_path_of_the_value_in_progress() {
        for (body, path) in [
            (r#"{"id":1,"items":[{"size":1},{"size":"#, "items[1].size"),
            (r#"{"id":1,"items":[{"size":1},{"si"#, "items[1]"),
            (r#"{"id":1,"items":[{"size":x}]}"#, "items[0].size"),
            (r#"{"id":1,"items":["#, "items"),
            ("", ""),
        ] {
            let error = serde_json::from_str::<Outer>(body).err().unwrap();
            assert_eq!(error_path(body.as_bytes(), &error), path, "{body}");
        }
    }

    #[test]
    fn deeply_nested_ignored_values_are_skipped() {
        let nested = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
        let body = format!(r#"{{"ignored":{nested},"id":1,"items":[{{"size":""}}]}}"#);
        let error = serde_json::from_str::<Outer>(&body).err().unwrap();
        assert_eq!(error_path(body.as_bytes(), &error), "items[0].size");
    }

    /// Replaces each value of a request by a value of another type, and removes each field.
    #[test]
    fn every_invalid_field_of_a_request_has_the_path_of_a_tracking_decoder() {
        let sample = r#"{"prompt":{"chunks":[{"type":"encoded_text","tokens":[1,2]},
            {"type":"image","data":"aGk=","format":"png"}]},"num_samples":2,
            "sampling_params":{"max_tokens":5,"seed":3,"stop":["a"],"temperature":0.5},
            "base_model":"m","prompt_logprobs":null,"topk_prompt_logprobs":0}"#;
        let create = r#"{"session_id":"s","model_seq_id":0,"base_model":"m","user_metadata":
            {"a":[1]},"lora_config":{"rank":4,"seed":1,"train_mlp":true}}"#;
        let batch = r#"{"data":[{"model_input":{"chunks":[{"type":"encoded_text","tokens":[1,2]}]},
            "loss_fn_inputs":{"weights":{"data":[1.0,1.0],"dtype":"float32","shape":[2]},
            "target_tokens":{"data":[3,4],"dtype":"int64","shape":[2]}}}],"path":
            "tinker://s:train:0/weights/a"}"#;
        let step = r#"{"model_id":"s:train:0","seq_id":2,"optim_params":{"type":"dimuon",
            "learning_rate":1e-4,"grad_clip_norm":1.0,"beta1":0.9}}"#;
        let checked = check_mutations::<SampleRequest>(sample)
            + check_mutations::<CreateModel>(create)
            + check_mutations::<Batch>(batch)
            + check_mutations::<OptimStep>(step);
        assert!(checked > 100, "{checked}");
    }

    /// Compares the two paths for every mutation of `body` that is rejected. Returns the number of
    /// rejected mutations.
    fn check_mutations<T: DeserializeOwned>(body: &str) -> usize {
        let document: serde_json::Value = serde_json::from_str(body).unwrap();
        assert!(serde_json::from_value::<T>(document.clone()).is_ok(), "{body}");
        let mut checked = 0;
        for pointer in pointers(&document) {
            for other in ["null", "true", "-7", "3.5", "\"?\"", "[]", "[true]", "{}", "{\"?\":1}"] {
                let mut mutated = document.clone();
                let value = mutated.pointer_mut(&pointer).unwrap();
                *value = serde_json::from_str(other).unwrap();
                let text = mutated.to_string();
                if let Some((found, tracked)) = paths::<T>(&text) {
                    assert_eq!(found, tracked, "{pointer} = {other}: {text}");
                    checked += 1;
                }
            }
        }
        checked
    }

    /// Returns the JSON pointers of all values below `value`.
    fn pointers(value: &serde_json::Value) -> Vec<String> {
        let children: Vec<(String, &serde_json::Value)> = match value {
            serde_json::Value::Object(fields) => {
                fields.iter().map(|(key, value)| (format!("/{key}"), value)).collect()
            }
            serde_json::Value::Array(items) => {
                items.iter().enumerate().map(|(i, value)| (format!("/{i}"), value)).collect()
            }
            _ => Vec::new(),
        };
        let below = children.iter().flat_map(|(step, child)| {
            pointers(child).into_iter().map(move |rest| format!("{step}{rest}"))
        });
        let mut all: Vec<String> = below.collect();
        all.extend(children.iter().map(|(step, _)| step.clone()));
        all
    }
}
