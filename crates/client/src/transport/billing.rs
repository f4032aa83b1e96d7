//! Waiting for an account to be settled.
//!
//! A 402 is not an error at once: whoever pays may be a minute away. All calls of a client share
//! one incident, which ends when nothing was heard of it for a while.

use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;

/// How long a paused call waits before it is sent again.
pub(crate) const PAUSE: Duration = Duration::from_secs(5);
const WARN_EVERY: Duration = Duration::from_secs(60);
const OVER_AFTER: Duration = Duration::from_secs(300);

#[derive(Debug)]
pub(crate) struct Billing {
    longest: Mutex<Duration>,
    incident: Mutex<Option<Incident>>,
}

#[derive(Clone, Copy, Debug)]
struct Incident {
    began: Instant,
    warned: Instant,
}

impl Billing {
    pub(crate) fn new(longest: Duration) -> Self {
        Self { longest: Mutex::new(longest), incident: Mutex::new(None) }
    }

    /// The server says how long it may take.
    pub(crate) fn set_longest(&self, longest: Duration) {
        *lock(&self.longest) = longest;
    }

    /// Whether a call that was answered with a 402 should wait and try again.
    pub(crate) fn pause(&self) -> bool {
        let (pause, warn) = self.decide(Instant::now());
        if warn {
            tracing::warn!("requests are paused: the account has to be settled first (402)");
        }
        if !pause {
            tracing::error!("the account was not settled in time; giving up");
        }
        pause
    }

    /// Whether to pause, and whether to say so.
    fn decide(&self, now: Instant) -> (bool, bool) {
        let longest = *lock(&self.longest);
        let mut incident = lock(&self.incident);
        let current = incident.filter(|incident| now - incident.warned <= OVER_AFTER);
        match current {
            None => {
                *incident = Some(Incident { began: now, warned: now });
                (true, true)
            }
            Some(old) if now - old.began > longest => (false, false),
            Some(old) => {
                let warn = now - old.warned > WARN_EVERY;
                let warned = if warn { now } else { old.warned };
                *incident = Some(Incident { warned, ..old });
                (true, warn)
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::fixture;

    #[test]
    fn pauses_and_warnings_come_as_in_the_reference() {
        for case in fixture::cases("billing_pause.json") {
            let longest = case["config"]["billing_exception_max_pause_duration_sec"].as_u64();
            let billing = Billing::new(Duration::from_secs(longest.unwrap_or(3600)));
            let zero = Instant::now();
            let times = case["times_of_402_seconds"].as_array().unwrap();
            let (mut decisions, mut warned) = (Vec::new(), Vec::new());
            for time in times {
                let at = zero + Duration::from_secs_f64(time.as_f64().unwrap());
                let (pause, warn) = billing.decide(at);
                decisions.push(json!(pause));
                if warn {
                    warned.push(time.clone());
                }
            }
            assert_eq!(Value::Array(decisions), case["pause_decision"], "{case}");
            assert_eq!(Value::Array(warned), case["warned_at"], "{case}");
        }
    }
}
