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
    /// Running time of the session's last request. The failures before a later one do not count.
    last_used: Duration,
    count: u32,
    retry_at: Instant,
}

impl AutosaveRetries {
    /// Returns whether an autosave of the session, last used at the running time `last_used`, may
    /// start: none has failed since, or the delay after the last failure has passed.
    pub(super) fn is_due(&self, id: &SessionId, last_used: Duration, now: Instant) -> bool {
        let failed = self.0.get(id).filter(|failed| failed.last_used == last_used);
        failed.is_none_or(|failed| failed.retry_at <= now)
    }

    /// Counts a failure. Returns the delay until the next attempt; `None` if it was the last one.
    pub(super) fn failed(
        &mut self,
        id: &SessionId,
        last_used: Duration,
        now: Instant,
    ) -> Option<Duration> {
        let none = || FailedAutosaves { last_used, count: 0, retry_at: now };
        let failed = self.0.entry(id.clone()).or_insert_with(none);
        if failed.last_used != last_used {
            *failed = none();
        }
        failed.count += 1;
        if failed.count == MAX_FAILURES {
            return None;
        }
        let delay = FIRST_DELAY * 2_u32.pow(failed.count - 1);
        failed.retry_at = now + delay;
        Some(delay)
    }

    /// Forgets a session that was saved or was used again.
    pub(super) fn forget(&mut self, id: &SessionId) {
        self.0.remove(id);
    }

    /// Forgets all sessions except `silent`: the others were used again or have ended.
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
        let (a, b) = (SessionId::from("a"), SessionId::from("b"));
        let (mut now, used) = (Instant::now(), Duration::from_secs(7));
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
        assert_eq!(retries.failed(&a, used, now), Some(FIRST_DELAY));
    }

    #[test]
    fn bug_failures_before_a_session_was_used_again_counted() {
        let mut retries = AutosaveRetries::default();
        let (id, now) = (SessionId::from("a"), Instant::now());
        let [first, second] = [1, 2].map(Duration::from_secs);
        for _ in 1..MAX_FAILURES {
            assert!(retries.failed(&id, first, now).is_some());
        }
        assert!(retries.is_due(&id, second, now));
        assert_eq!(retries.failed(&id, second, now), Some(FIRST_DELAY));
        assert!(!retries.is_due(&id, second, now));
        retries.retain(std::slice::from_ref(&id));
        assert_eq!(retries.0.len(), 1);
        retries.retain(&[]);
        assert!(retries.0.is_empty(), "a session that has ended is forgotten");
    }
}
