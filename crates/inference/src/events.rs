//! Server-sent events: the `text/event-stream` format, and the source of a streamed response.

use std::task::{Context, Poll};

use bytes::{BufMut as _, Bytes, BytesMut};
use serde::Serialize;

/// Produces the events of a streamed response.
pub trait EventSource: Send {
    /// Returns the next events in the format `text/event-stream`; `None` after the last event.
    /// Dropping the source cancels its generations.
    fn poll_events(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>>;
}

/// Memory that is reserved for an event, in bytes.
const EVENT_BYTES: usize = 512;

/// Writes events in the format of `text/event-stream`.
#[derive(Default)]
pub(crate) struct EventWriter(BytesMut);

impl EventWriter {
    /// Writes an event with a JSON document as its data.
    pub(crate) fn data(&mut self, data: &impl Serialize) {
        self.data_within(b"", data, b"");
    }

    /// Writes an event whose data is a JSON document between two texts.
    pub(crate) fn data_within(&mut self, prefix: &[u8], data: &impl Serialize, suffix: &[u8]) {
        // `reserve` reuses the memory of events that were sent.
        self.0.reserve(EVENT_BYTES.max(prefix.len() + suffix.len()));
        self.0.extend_from_slice(b"data: ");
        self.0.extend_from_slice(prefix);
        let start = self.0.len();
        // JSON on one line contains no line break, which would end the data.
        if serde_json::to_writer((&mut self.0).writer(), data).is_err() {
            self.0.truncate(start);
            self.0.extend_from_slice(b"null");
        }
        self.0.extend_from_slice(suffix);
        self.0.extend_from_slice(b"\n\n");
    }

    /// Writes an event with a name and a JSON document as its data.
    pub(crate) fn event(&mut self, name: &str, data: &impl Serialize) {
        self.0.extend_from_slice(b"event: ");
        self.0.extend_from_slice(name.as_bytes());
        self.0.extend_from_slice(b"\n");
        self.data(data);
    }

    /// Writes the event that ends a stream of the OpenAI API.
    pub(crate) fn done(&mut self) {
        self.0.extend_from_slice(b"data: [DONE]\n\n");
    }

    /// Returns whether nothing was written since the last [`take`](Self::take).
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns what was written and leaves the writer empty.
    pub(crate) fn take(&mut self) -> Bytes {
        self.0.split().freeze()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_one_line_of_json() {
        let mut writer = EventWriter::default();
        writer.data(&serde_json::json!({"text": "a\nb"}));
        writer.done();
        let text = "data: {\"text\":\"a\\nb\"}\n\ndata: [DONE]\n\n";
        assert_eq!(writer.take(), text);
        assert!(writer.is_empty());
    }
}
