//! [`AutosaveRetries`]: when the worker tries again to save the models of a silent session.

use std::collections::HashMap;
use std::time::Duration;

use tinkex_wire::SessionId;
use tokio::time::Instant;

/// Delay after the first failure. Doubles with every further one.
const FIRST_DELAY: Duration = Duration::from_secs(30);
/// Number of failures after which the session ends without an autosave, about half an hour after
/// the first.
const MAX_FAILURES: u32 = 7;

/// Failed autosaves of the sessions that are silent and still open.
#[derive(Default)]
pub(super) struct AutosaveRetries(HashMap<SessionId, FailedAutosaves>);

struct FailedAutosaves {
    count: u32,
    retry_at: Instant,
}

impl AutosaveRetries {
    /// Returns whether an autosave of the session may start: none has failed, or the delay after
    /// the last failure has passed.
    pub(super) fn is_due(&self, id: &SessionId, now: Instant) -> bool {
        self.0.get(id).is_none_or(|failed| failed.retry_at <= now)
    }

    /// Counts a failure. Returns the delay until the next attempt; `None` if it was the last one.
    pub(super) fn failed(&mut self, id: &SessionId, now: Instant) -> Option<Duration> {
        let failed =
            self.0.entry(id.clone()).or_insert(FailedAutosaves { count: 0, retry_at: now });
        failed.count += 1;
        if failed.count == MAX_FAILURES {
            return None;
        }
        let delay = FIRST_DELAY * 2_u32.pow(failed.count - 1);
        failed.retry_at = now + delay;
        Some(delay)
    }

    /// Forgets a session that was saved, was used again, or has ended.
    pub(super) fn forget(&mut self, id: &SessionId) {
        self.0.remove(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_until_the_session_is_given_up() {
        let mut retries = AutosaveRetries::default();
        let (a, b) = (SessionId::from("a"), SessionId::from("b"));
        let mut now = Instant::now();
        let mut delays = Vec::new();
        assert!(retries.is_due(&a, now));
        while let Some(delay) = retries.failed(&a, now) {
            assert!(!retries.is_due(&a, now));
            assert!(retries.is_due(&b, now), "other sessions are not delayed");
            now += delay;
            assert!(retries.is_due(&a, now));
            delays.push(delay.as_secs());
        }
        assert_eq!(delays, [30, 60, 120, 240, 480, 960]);
        retries.forget(&a);
        assert_eq!(retries.failed(&a, now), Some(FIRST_DELAY));
    }
}
