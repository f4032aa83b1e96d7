//! [`StreamEnd`]: emits an event when a stream ends.

use std::time::Instant;

use tinkex_wire::SamplerId;

use crate::error::{Error, Result};
use crate::transport::targets;

use super::StreamedToken;

/// Emits one event for the end of a stream: completed, failed or dropped.
///
/// Measures real time, as the events of requests do.
pub(super) struct StreamEnd {
    sampler_id: SamplerId,
    start: Instant,
    /// Number of tokens that the program received.
    tokens: usize,
    ended: bool,
}

impl StreamEnd {
    pub(super) fn new(sampler_id: SamplerId) -> Self {
        Self { sampler_id, start: Instant::now(), tokens: 0, ended: false }
    }

    /// Observes what the stream returns to the program.
    pub(super) fn observe(&mut self, next: Option<&Result<StreamedToken>>) {
        match next {
            Some(Ok(token)) => {
                self.tokens += 1;
                if token.stop_reason.is_some() {
                    self.end("completed", None);
                }
            }
            Some(Err(error)) => self.end("failed", Some(error)),
            None => self.end("completed", None),
        }
    }

    /// Observes that the program drops the stream.
    pub(super) fn dropped(&mut self) {
        self.end("dropped", None);
    }

    fn end(&mut self, outcome: &str, error: Option<&Error>) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        tracing::debug!(
            target: targets::STREAM,
            sampler_id = %self.sampler_id,
            outcome,
            tokens = self.tokens,
            duration = self.start.elapsed().as_secs_f64(),
            error = error.map(tracing::field::display),
            "sample stream ended"
        );
    }
}
