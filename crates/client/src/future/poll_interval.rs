//! [`PollInterval`]: not asking a server as fast as it can say "not yet". [`Contact`]: not asking one for ever
//! that is gone.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::targets;

/// An answer that comes faster than this was not waited for by the server.
const FAST: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// A server should hold a poll until there is something to say. One that does not is given more and
/// more time.
#[derive(Debug)]
pub(super) struct PollInterval {
    enabled: bool,
    fast: u32,
}

impl PollInterval {
    pub(super) fn new(enabled: bool) -> Self {
        Self { enabled, fast: 0 }
    }

    /// The server had nothing to say, on a poll that began then.
    pub(super) async fn wait(&mut self, asked: Instant) {
        if !self.enabled || asked.elapsed() >= FAST {
            self.fast = 0;
            return;
        }
        let most = Duration::from_millis(250 << self.fast.min(5)).min(LONGEST_PAUSE);
        self.fast += 1;
        sleep(most.mul_f64(0.5 + 0.5 * fastrand::f64())).await;
    }
}

/// How long nothing at all has come back.
#[derive(Debug)]
pub(super) struct Contact {
    /// How long somebody waits for that, if anybody does.
    patience: Option<Duration>,
    lost: Option<Instant>,
}

impl Contact {
    pub(super) fn new(patience: Option<Duration>) -> Self {
        Self { patience, lost: None }
    }

    /// The server said something.
    pub(super) fn seen(&mut self) {
        self.lost = None;
    }

    /// A poll that began then got no answer; returns whether it is time to give up.
    pub(super) fn lost(&mut self, asked: Instant) -> bool {
        if self.lost.is_none() {
            tracing::warn!(
                target: targets::OUTAGE,
                "connection lost while waiting for a result; polling continues"
            );
        }
        let since = self.lost.get_or_insert(asked).elapsed();
        self.patience.is_some_and(|patience| since >= patience)
    }
}
