//! Client for server-sent events.

use std::collections::VecDeque;

use serde_json::Value;

use crate::harness::http_client;

/// Returns the URL of the `completions` endpoint.
pub(crate) fn completions_url(base: &str) -> String {
    format!("{base}/oai/api/v1/completions")
}

/// A streamed response. Dropping it closes the connection.
pub(crate) struct EventStream {
    response: reqwest::Response,
    buffer: Vec<u8>,
    events: VecDeque<Value>,
    done: bool,
}

impl EventStream {
    /// Sends a request and returns once the headers of the response have arrived.
    pub(crate) async fn post(url: &str, body: &Value) -> Self {
        let response = http_client().post(url).body(body.to_string()).send().await.unwrap();
        let status = response.status();
        let kind = response.headers().get("content-type").cloned();
        assert_eq!(status, 200, "{}", response.text().await.unwrap());
        assert_eq!(kind.unwrap(), "text/event-stream");
        Self { response, buffer: Vec::new(), events: VecDeque::new(), done: false }
    }

    /// Returns the next event; `None` at the end of the response.
    pub(crate) async fn next(&mut self) -> Option<Value> {
        while self.events.is_empty() {
            self.buffer.extend_from_slice(&self.response.chunk().await.unwrap()?);
            while let Some(end) = self.buffer.windows(2).position(|pair| pair == b"\n\n") {
                let event: Vec<u8> = self.buffer.drain(..end + 2).collect();
                if event.starts_with(b":") {
                    // A comment, which keeps the connection alive.
                    continue;
                }
                // Events of the Anthropic API have a name, which their data repeat.
                let name = if event.starts_with(b"event: ") {
                    event.iter().position(|byte| *byte == b'\n').unwrap() + 1
                } else {
                    0
                };
                let data = event[name..].strip_prefix(b"data: ").unwrap();
                match data {
                    b"[DONE]\n\n" => self.done = true,
                    data => self.events.push_back(serde_json::from_slice(data).unwrap()),
                }
            }
        }
        self.events.pop_front()
    }

    /// Returns whether the stream ended with `[DONE]`.
    pub(crate) fn is_done(&self) -> bool {
        self.done
    }
}
