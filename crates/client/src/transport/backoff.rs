//! [`Backoff`]: "not before", shared by everyone who uses one server with one key.
//!
//! When a server says that it is too much, all clients of that server and key in this process hold
//! back, and nobody else does. Who shares one is [`pauses`](super::pauses)' business.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use crate::sync::{AtomicU64, Ordering};

/// For so long after a pause clients stay careful.
const CAREFUL_FOR: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) struct Backoff {
    epoch: Instant,
    /// When it ends, in microseconds since the epoch; 0 if there never was one.
    until: AtomicU64,
}

/// A request that waits for a pause, and begins one when it was too much.
#[derive(Clone, Debug)]
pub(crate) struct RequestBackoff {
    pub(crate) backoff: Arc<Backoff>,
    /// Its estimated size.
    pub(crate) bytes: u64,
}

impl RequestBackoff {
    /// The server said that this request was too much, and perhaps when to come back.
    pub(crate) fn too_much(&self, asked: Option<Duration>) {
        const LARGE_BYTES: u64 = 128 * 1024;
        let usual = Duration::from_secs(if self.bytes <= LARGE_BYTES { 1 } else { 5 });
        self.backoff.begin(asked.unwrap_or(usual));
    }
}

impl Backoff {
    pub(crate) fn new() -> Self {
        Self { epoch: Instant::now(), until: AtomicU64::new(0) }
    }

    /// Nobody sends for `time`. A longer pause that is on already stays as long as it was.
    pub(crate) fn begin(&self, time: Duration) {
        let end = Instant::now().saturating_duration_since(self.epoch) + time;
        let micros = u64::try_from(end.as_micros()).unwrap_or(u64::MAX).max(1);
        self.until.fetch_max(micros, Ordering::AcqRel);
    }

    /// When the last pause ends or ended.
    pub(crate) fn until(&self) -> Option<Instant> {
        match self.until.load(Ordering::Acquire) {
            0 => None,
            micros => Some(self.epoch + Duration::from_micros(micros)),
        }
    }

    /// How much is left of a pause.
    pub(crate) fn rest(&self) -> Duration {
        self.until().map_or(Duration::ZERO, |until| until.saturating_duration_since(Instant::now()))
    }

    /// Waits until there is no pause.
    pub(crate) async fn over(&self) {
        while let Some(until) = self.until().filter(|until| *until > Instant::now()) {
            sleep_until(until).await;
        }
    }

    /// Whether there is a pause, or was one not long ago.
    pub(crate) fn recent(&self) -> bool {
        recent(self.until(), Instant::now())
    }
}

pub(super) fn recent(until: Option<Instant>, now: Instant) -> bool {
    until.is_some_and(|until| now.saturating_duration_since(until) < CAREFUL_FOR)
}
