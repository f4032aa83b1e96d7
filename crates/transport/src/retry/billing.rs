//! [`BillingState`]: how long requests wait for a billing problem (402) to be settled.
//!
//! Requests are repeated until the account is settled or the server's maximum wait is over. All
//! requests of a transport share one incident. An incident starts with the first 402 and ends 5
//! minutes after its last warning.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Delay before a request is retried after a 402.
pub const DELAY: Duration = Duration::from_secs(5);
/// Minimum time between two warnings.
const WARNING_INTERVAL: Duration = Duration::from_secs(60);
/// Time since the last warning of an incident after which the incident ends.
const INCIDENT_TIMEOUT: Duration = Duration::from_secs(300);

/// State of the billing problem, if there is one.
#[derive(Debug)]
pub(crate) struct BillingState {
    max_wait: Mutex<Duration>,
    incident: Mutex<Option<Incident>>,
}

/// Series of 402 responses that counts as one billing problem.
#[derive(Clone, Copy, Debug)]
struct Incident {
    /// Time of the first 402.
    began: Instant,
    /// Time of the last warning.
    warned: Instant,
}

impl BillingState {
    pub(crate) fn new(max_wait: Duration) -> Self {
        Self { max_wait: Mutex::new(max_wait), incident: Mutex::new(None) }
    }

    /// Sets how long requests wait, counted from the first 402.
    pub(crate) fn set_max_wait(&self, max_wait: Duration) {
        *self.max_wait.lock() = max_wait;
    }

    /// Returns whether a request that failed with 402 should wait and be retried.
    pub(crate) fn should_wait(&self) -> bool {
        let (wait, warn) = self.decide(Instant::now());
        if warn {
            tracing::warn!("requests are waiting for the account to be settled (402)");
        }
        if !wait {
            tracing::error!("account was not settled in time (402); giving up");
        }
        wait
    }

    /// Returns whether to wait, and whether to log a warning.
    fn decide(&self, now: Instant) -> (bool, bool) {
        let max_wait = *self.max_wait.lock();
        let mut incident = self.incident.lock();
        let current = incident.filter(|incident| now - incident.warned <= INCIDENT_TIMEOUT);
        match current {
            None => {
                *incident = Some(Incident { began: now, warned: now });
                (true, true)
            }
            Some(old) if now - old.began > max_wait => (false, false),
            Some(old) => {
                let warn = now - old.warned > WARNING_INTERVAL;
                let warned = if warn { now } else { old.warned };
                *incident = Some(Incident { warned, ..old });
                (true, warn)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::fixture;

    #[test]
    fn waits_and_warnings_match_the_python_sdk() {
        for case in fixture::cases("billing_pause.json") {
            let max_wait = case["config"]["billing_exception_max_pause_duration_sec"].as_u64();
            let billing = BillingState::new(Duration::from_secs(max_wait.unwrap_or(3600)));
            let zero = Instant::now();
            let times = case["times_of_402_seconds"].as_array().unwrap();
            let mut decisions = Vec::new();
            let mut warned = Vec::new();
            for time in times {
                let at = zero + Duration::from_secs_f64(time.as_f64().unwrap());
                let (wait, warn) = billing.decide(at);
                decisions.push(json!(wait));
                if warn {
                    warned.push(time.clone());
                }
            }
            assert_eq!(Value::Array(decisions), case["pause_decision"], "{case}");
            assert_eq!(Value::Array(warned), case["warned_at"], "{case}");
        }
    }
}
