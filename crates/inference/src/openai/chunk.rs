//! [`ChunkWriter`]: the events of a stream, which differ only in their choice.

use serde::Serialize;

use crate::EventWriter;

/// Writes the events of one stream, each with one choice. The text around the choice is the same in
/// all of them and encoded once.
pub(super) struct ChunkWriter {
    /// Text before the choice.
    prefix: Vec<u8>,
    /// Text after the choice.
    suffix: &'static [u8],
}

/// Fields with which all documents of a response begin.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct ChunkHead<'a> {
    pub(super) id: &'a str,
    pub(super) object: &'static str,
    /// Time of the request in seconds since the Unix epoch.
    pub(super) created: i64,
    pub(super) model: &'a str,
}

impl ChunkWriter {
    /// Creates the writer of a stream. With `include_usage`, every event has `"usage": null`; the
    /// usage is in a separate event at the end.
    pub(super) fn new(head: ChunkHead<'_>, include_usage: bool) -> Self {
        let mut prefix = serde_json::to_vec(&head).unwrap_or_default();
        // The object continues with the choices.
        prefix.pop();
        prefix.extend_from_slice(b",\"choices\":[");
        let suffix: &[u8] = if include_usage { b"],\"usage\":null}" } else { b"]}" };
        Self { prefix, suffix }
    }

    /// Writes the event of a choice.
    pub(super) fn write(&self, choice: &impl Serialize, out: &mut EventWriter) {
        out.data_within(&self.prefix, choice, self.suffix);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn an_event_is_the_document_with_its_choice() {
        let head = ChunkHead { id: "cmpl-1", object: "text_completion", created: 5, model: "a\"b" };
        for (include_usage, usage) in [(false, ""), (true, r#","usage":null"#)] {
            let mut out = EventWriter::default();
            ChunkWriter::new(head, include_usage).write(&json!({"index": 0}), &mut out);
            let text = String::from_utf8(out.take().to_vec()).unwrap();
            let data = text.strip_prefix("data: ").and_then(|text| text.strip_suffix("\n\n"));
            let expected = format!(
                r#"{{"id":"cmpl-1","object":"text_completion","created":5,"model":"a\"b","choices":[{{"index":0}}]{usage}}}"#
            );
            assert_eq!(data, Some(expected.as_str()));
            assert!(serde_json::from_str::<Value>(&expected).is_ok());
        }
    }
}
