//! [`AutosaveRetries`]: schedules retries of failed autosaves of silent sessions.

use std::collections::HashMap;
use std::time::Duration;

use tinkex_backoff::Backoff;
use tinkex_wire::SessionId;
use tokio::time::Instant;

/// Delays after failures.
const BACKOFF: Backoff = Backoff::new(Duration::from_secs(30));
/// Number of failures after which the session ends without an autosave. The last failure is about
/// half an hour after the first.
const MAX_FAILURES: u32 = 7;

/// Failed autosaves of the sessions that are silent and still open.
#[derive(Default)]
pub(super) struct AutosaveRetries(HashMap<SessionId, FailedAutosaves>);

struct FailedAutosaves {
    /// Running time of the session's last request. A later request resets the failures.
    last_used: Duration,
    count: u32,
    backoff: Backoff,
    retry_at: Instant,
}

impl AutosaveRetries {
    /// Returns whether an autosave of the session may start: no autosave has failed since the
    /// running time `last_used`, or the delay after the last failure has passed.
    pub(super) fn is_due(&self, id: &SessionId, last_used: Duration, now: Instant) -> bool {
        let failed = self.0.get(id).filter(|failed| failed.last_used == last_used);
        failed.is_none_or(|failed| failed.retry_at <= now)
    }

    /// Counts a failure. Returns the delay until the next attempt; `None` if this was the last
    /// attempt.
    pub(super) fn failed(
        &mut self,
        id: &SessionId,
        last_used: Duration,
        now: Instant,
    ) -> Option<Duration> {
        let none = || FailedAutosaves { last_used, count: 0, backoff: BACKOFF, retry_at: now };
        let failed = self.0.entry(id.clone()).or_insert_with(none);
        if failed.last_used != last_used {
            *failed = none();
        }
        failed.count += 1;
        if failed.count == MAX_FAILURES {
            return None;
        }
        let delay = failed.backoff.next_delay();
        failed.retry_at = now + delay;
        Some(delay)
    }

    /// Removes the failures of a session that was saved or was used again.
    pub(super) fn forget(&mut self, id: &SessionId) {
        self.0.remove(id);
    }

    /// Removes the failures of all sessions except `silent`: the other sessions were used again or
    /// have ended.
    pub(super) fn retain(&mut self, silent: &[SessionId]) {
        self.0.retain(|id, _| silent.contains(id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_until_the_session_is_given_up() {
        let mut retries = AutosaveRetries::default();
        let a = SessionId::from("a");
        let b = SessionId::from("b");
        let mut now = Instant::now();
        let used = Duration::from_secs(7);
        let mut delays = Vec::new();
        assert!(retries.is_due(&a, used, now));
        while let Some(delay) = retries.failed(&a, used, now) {
            assert!(!retries.is_due(&a, used, now));
            assert!(retries.is_due(&b, used, now), "other sessions are not delayed");
            now += delay;
            assert!(retries.is_due(&a, used, now));
            delays.push(delay.as_secs());
        }
        assert_eq!(delays, [30, 60, 120, 240, 480, 960]);
        retries.forget(&a);
        assert_eq!(retries.failed(&a, used, now), Some(Duration::from_secs(30)));
    }

    #[test]
    fn failures_before_a_session_was_used_again_do_not_count() {
        let mut retries = AutosaveRetries::default();
        let id = SessionId::from("a");
        let now = Instant::now();
        let [first, second] = [1, 2].map(Duration::from_secs);
        for _ in 1..MAX_FAILURES {
            assert!(retries.failed(&id, first, now).is_some());
        }
        assert!(retries.is_due(&id, second, now));
        assert_eq!(retries.failed(&id, second, now), Some(Duration::from_secs(30)));
        assert!(!retries.is_due(&id, second, now));
        retries.retain(std::slice::from_ref(&id));
        assert_eq!(retries.0.len(), 1);
        retries.retain(&[]);
        assert!(retries.0.is_empty(), "a session that has ended is forgotten");
    }
}
