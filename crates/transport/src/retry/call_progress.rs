//! [`CallProgress`]: counts the attempts and the elapsed time of one call, so that the retry policy
//! can limit them.

use std::time::Duration;

use tokio::time::Instant;

use crate::error::{Error, ErrorKind};

/// Progress of one call through its attempts, including the resubmissions of a sample.
#[derive(Debug)]
pub struct CallProgress {
    /// When the first attempt was admitted, before any wait for the shared backoff.
    start: Instant,
    /// Number of times the request was sent.
    attempts: u32,
    /// Number of failures that another attempt or poll followed.
    retries: u32,
    /// Latest failure that another attempt or poll followed.
    last_failure: Option<Error>,
    /// Whether the first retry was logged as a warning. If so, the end of the call is logged too.
    pub(crate) warned: bool,
}

impl Default for CallProgress {
    fn default() -> Self {
        Self::new()
    }
}

impl CallProgress {
    /// Starts a call without an attempt.
    pub fn new() -> Self {
        let start = Instant::now();
        Self { start, attempts: 0, retries: 0, last_failure: None, warned: false }
    }

    /// Continues a call that started at `start` and has sent its request `attempts` times.
    pub fn resume(start: Instant, attempts: u32) -> Self {
        Self { start, attempts, ..Self::new() }
    }

    /// Restarts the elapsed time if nothing was sent yet, so that it does not include the wait for
    /// admission control.
    pub fn admit(&mut self) {
        if self.attempts == 0 {
            self.start = Instant::now();
        }
    }

    /// Counts an attempt that is about to be sent.
    pub(crate) fn begin_attempt(&mut self) {
        self.attempts = self.attempts.saturating_add(1);
    }

    /// Records a failure that is followed by another attempt or poll.
    pub fn record_failure(&mut self, error: Error) {
        self.last_failure = Some(error);
        self.retries = self.retries.saturating_add(1);
    }

    /// Returns the number of recorded failures.
    pub(crate) fn retries(&self) -> u32 {
        self.retries
    }

    /// Returns when the call started.
    pub fn start(&self) -> Instant {
        self.start
    }

    /// Returns the number of times the request was sent.
    pub fn attempts(&self) -> u32 {
        self.attempts
    }

    /// Returns the time since the start of the call.
    pub fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// Adds the number of attempts and the elapsed time to the error that ends the call.
    pub fn finish(&self, error: Error) -> Error {
        error.after(self.attempts, self.elapsed())
    }

    /// Returns the error of a call that a time limit ends: the last failure if there was one, else
    /// an error of kind [`ErrorKind::Timeout`]. `reason` states the limit.
    pub fn timed_out(&mut self, reason: &str) -> Error {
        let error = match self.last_failure.take() {
            Some(last) => {
                let message = format!("{reason}; last failure: {}", last.message());
                last.with_message(message)
            }
            None => Error::new(ErrorKind::Timeout, reason),
        };
        self.finish(error)
    }

    /// Returns the error of a call that the caller's own `limit` ends. The source of the error is
    /// the last failure.
    pub fn deadline(&mut self, limit: Duration) -> Error {
        let error = Error::call_deadline(limit);
        let error = match self.last_failure.take() {
            Some(last) => {
                let message = format!("{}; last failure: {}", error.message(), last.message());
                error.with_message(message).with_source(last)
            }
            None => error,
        };
        self.finish(error)
    }

    /// Returns the status of the last failure, if the server responded.
    pub(crate) fn last_status(&self) -> Option<u16> {
        self.last_failure.as_ref().and_then(Error::status)
    }

    /// Removes and returns the last failure.
    pub(crate) fn take_last_failure(&mut self) -> Option<Error> {
        self.last_failure.take()
    }
}
