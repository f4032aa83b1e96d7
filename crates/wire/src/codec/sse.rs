//! Server-sent events.
//!
//! [`SseDecoder`] splits the bytes of a response into events. Bytes may arrive in parts of any
//! size; the events do not depend on where the parts are split.

use std::collections::VecDeque;

use crate::{DecodeError, DecodeErrorKind};

/// An event of a stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SseEvent {
    /// Name of the event; empty if it has none.
    pub event: String,
    /// Data lines, joined by line feeds.
    pub data: String,
}

/// Incremental decoder of server-sent events.
///
/// Lines end with LF, CRLF or CR. Comments, ids, retry times and events without data are skipped.
/// An event that the end of the stream cuts off is dropped, as the format requires.
///
/// ```
/// use tinkex_wire::codec::sse::SseDecoder;
///
/// let mut decoder = SseDecoder::new(1024);
/// decoder.push(b": ping\n\ndata: {\"a\"")?;
/// assert_eq!(decoder.next_event(), None);
/// decoder.push(b": 1}\r\n\r\ndata: [DONE]\n\n")?;
/// assert_eq!(decoder.next_event().unwrap().data, "{\"a\": 1}");
/// assert_eq!(decoder.next_event().unwrap().data, "[DONE]");
/// assert_eq!(decoder.next_event(), None);
/// # Ok::<_, tinkex_wire::DecodeError>(())
/// ```
#[derive(Debug)]
pub struct SseDecoder {
    /// Maximum size of an event, in bytes.
    max_event: usize,
    /// The line that has not ended yet.
    line: Vec<u8>,
    /// The event that has not ended yet, and whether it has a data line.
    event: SseEvent,
    has_data: bool,
    /// Whether the last byte was a CR: a LF that follows it belongs to the same line end.
    after_cr: bool,
    /// Whether no line has ended yet: the first may start with a byte order mark.
    first_line: bool,
    ready: VecDeque<SseEvent>,
}

impl SseDecoder {
    /// Creates a decoder that rejects lines and events of more than `max_event` bytes.
    #[must_use]
    pub fn new(max_event: usize) -> Self {
        Self {
            max_event,
            line: Vec::new(),
            event: SseEvent::default(),
            has_data: false,
            after_cr: false,
            first_line: true,
            ready: VecDeque::new(),
        }
    }

    /// Decodes the next bytes of the stream.
    ///
    /// # Errors
    /// Returns an error if a line or an event exceeds the limit or is not UTF-8. The decoder must
    /// not be used afterwards.
    pub fn push(&mut self, mut bytes: &[u8]) -> Result<(), DecodeError> {
        while !bytes.is_empty() {
            if self.after_cr {
                self.after_cr = false;
                if let Some(rest) = bytes.strip_prefix(b"\n") {
                    bytes = rest;
                    continue;
                }
            }
            let end = bytes.iter().position(|byte| matches!(byte, b'\n' | b'\r'));
            let text = &bytes[..end.unwrap_or(bytes.len())];
            if self.line.len() + text.len() > self.max_event {
                return Err(self.too_large());
            }
            self.line.extend_from_slice(text);
            let Some(end) = end else { return Ok(()) };
            self.after_cr = bytes[end] == b'\r';
            bytes = &bytes[end + 1..];
            let line = std::mem::take(&mut self.line);
            self.end_line(&line)?;
            // Keep the allocation for the next line.
            self.line = line;
            self.line.clear();
        }
        Ok(())
    }

    /// Returns the next complete event, if there is one.
    pub fn next_event(&mut self) -> Option<SseEvent> {
        self.ready.pop_front()
    }

    fn end_line(&mut self, line: &[u8]) -> Result<(), DecodeError> {
        let first = std::mem::replace(&mut self.first_line, false);
        let line = line.strip_prefix("\u{FEFF}".as_bytes()).filter(|_| first).unwrap_or(line);
        if line.is_empty() {
            let event = std::mem::take(&mut self.event);
            if std::mem::replace(&mut self.has_data, false) {
                self.ready.push_back(event);
            }
            return Ok(());
        }
        let line = std::str::from_utf8(line)
            .map_err(|_| DecodeError::new(DecodeErrorKind::Value, "an event is not UTF-8"))?;
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "data" => {
                if self.event.data.len() + 1 + value.len() > self.max_event {
                    return Err(self.too_large());
                }
                if self.has_data {
                    self.event.data.push('\n');
                }
                self.event.data.push_str(value);
                self.has_data = true;
            }
            "event" => value.clone_into(&mut self.event.event),
            // A comment has an empty field name.
            _ => {}
        }
        Ok(())
    }

    fn too_large(&self) -> DecodeError {
        let detail = format!("an event has more than {} bytes", self.max_event);
        DecodeError::new(DecodeErrorKind::Value, detail)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn decode(parts: &[&[u8]]) -> Result<Vec<SseEvent>, DecodeError> {
        let mut decoder = SseDecoder::new(64);
        for part in parts {
            decoder.push(part)?;
        }
        Ok(std::iter::from_fn(|| decoder.next_event()).collect())
    }

    fn data(text: &str) -> Vec<String> {
        decode(&[text.as_bytes()]).unwrap().into_iter().map(|event| event.data).collect()
    }

    #[test]
    fn an_empty_line_ends_an_event() {
        assert_eq!(data("data: a\n\ndata:b\n\n"), ["a", "b"]);
        assert_eq!(data("data: a\rdata:  b\r\r"), ["a\n b"]);
        assert_eq!(data("data\n\n"), [""], "an empty data line");
        assert_eq!(data("\u{FEFF}data: a\n\n\u{FEFF}data: b\n\n"), ["a"], "one byte order mark");
        let named = decode(&[b"event: ping\nid: 7\nretry: 9\ndata: {}\n\n"]).unwrap();
        assert_eq!((&*named[0].event, &*named[0].data), ("ping", "{}"));
    }

    #[test]
    fn comments_and_events_without_data_are_skipped() {
        assert!(data(": ping\n\n:\n\n\n\r\n\r\nevent: ping\n\nother: x\n\n").is_empty());
        assert!(data("data: cut").is_empty(), "an incomplete event is dropped");
        assert!(data("data: cut\n").is_empty());
        let next = decode(&[b"event: lost\n\ndata: a\n\n"]).unwrap();
        assert_eq!(next[0].event, "", "the name of a skipped event is not kept");
    }

    #[test]
    fn an_endless_line_or_event_is_rejected() {
        for text in ["x".repeat(65), ":".repeat(65), "data: 0123456789\n".repeat(7)] {
            assert!(decode(&[text.as_bytes()]).is_err(), "{text}");
            let bytes: Vec<&[u8]> = text.as_bytes().chunks(1).collect();
            assert!(decode(&bytes).is_err(), "{text}");
        }
        assert!(decode(&[b"data: \xFF\n\n"]).is_err());
        let many = "data: 0123456789\n\n".repeat(7);
        assert_eq!(data(&many).len(), 7, "the limit is per event");
    }

    proptest! {
        /// Line ends, comments and fields in any order, cut into parts anywhere.
        #[test]
        fn events_do_not_depend_on_the_parts(
            pieces in prop::collection::vec(
                prop::sample::select(&["data: é", "data:", "event: x", ": c", "\n", "\r", "\r\n"]),
                0..24,
            ),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
        ) {
            let bytes = pieces.concat().into_bytes();
            let whole = decode(&[&bytes]);
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
            cuts.sort_unstable();
            let mut parts = Vec::new();
            let mut start = 0;
            for cut in cuts.into_iter().chain([bytes.len()]) {
                parts.push(&bytes[start..cut]);
                start = cut;
            }
            prop_assert_eq!(decode(&parts).ok(), whole.ok());
        }

        #[test]
        fn any_bytes_are_decoded_or_rejected(bytes in prop::collection::vec(any::<u8>(), 0..256)) {
            let singly: Vec<&[u8]> = bytes.chunks(1).collect();
            prop_assert_eq!(decode(&singly).ok(), decode(&[&bytes]).ok());
        }
    }
}
