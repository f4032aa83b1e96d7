//! [`ClientCheckpoint`]: a checkpoint as its client knows it, and when it may be missing.

use std::time::Duration;

use tinkex::TinkerPath;
use tokio::time::Instant;

/// Time by which a checkpoint may expire too early or too late: requests are retried, and a server
/// that was killed continues its clock from the last time that it saved.
const TOLERANCE: Duration = Duration::from_secs(60);

/// A checkpoint that a program has saved.
#[derive(Clone)]
pub(crate) struct ClientCheckpoint {
    pub(crate) path: TinkerPath,
    expiry: Option<ExpiryTime>,
}

/// When a checkpoint expires. The exact time is unknown, because the server sets it between the
/// start and the end of a call.
#[derive(Clone, Copy)]
struct ExpiryTime {
    earliest: Instant,
    latest: Instant,
}

impl ClientCheckpoint {
    /// Describes a checkpoint. A call has saved it, or has set its time to live to `ttl`. The call
    /// started at `called` and has just ended.
    pub(crate) fn new(path: TinkerPath, called: Instant, ttl: Option<Duration>) -> Self {
        let now = Instant::now();
        let expiry = ttl.map(|ttl| ExpiryTime { earliest: called + ttl, latest: now + ttl });
        Self { path, expiry }
    }

    /// Returns the latest time at which the checkpoint can expire; `None` if it does not expire.
    pub(crate) fn expires(&self) -> Option<Instant> {
        self.expiry.map(|expiry| expiry.latest)
    }

    /// Returns whether a call that has just ended with `error` failed because the checkpoint has
    /// expired.
    pub(crate) fn is_expired(&self, error: &tinkex::Error) -> bool {
        let now = Instant::now() + TOLERANCE;
        is_missing(error) && self.expiry.is_some_and(|expiry| now >= expiry.earliest)
    }

    /// Returns whether the checkpoint had certainly expired when a call started at `called`.
    pub(crate) fn must_be_missing(&self, called: Instant) -> bool {
        self.expiry.is_some_and(|expiry| called > expiry.latest + TOLERANCE)
    }
}

/// Returns whether the server has rejected a request because an object does not exist.
pub(crate) fn is_missing(error: &tinkex::Error) -> bool {
    error.status() == Some(404)
}
