//! The only loop that asks for the same sample anew, and the watch over it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::json;
use tinkex_wire::JsonObject;
use tokio::time::{Instant, sleep_until};

use crate::dispatch::{Limit, Permit};
use crate::error::{Error, ErrorKind, Result};

/// What the service calls a sample that failed.
pub(super) const SAMPLE_FAILED: &str = "RetryHandler.execute.exception";

const FIRST: f64 = 0.5;
const LONGEST: f64 = 10.0;
const JITTER: f64 = 0.25;
/// Without any progress for so long, a sample is given up.
const STUCK_AFTER: Duration = Duration::from_secs(7200);

/// The wait before attempt number `attempt` after the first (from 0).
pub(super) fn delay(attempt: u32, chance: f64) -> Duration {
    let doubled = FIRST * 2_f64.powi(i32::try_from(attempt.min(1000)).unwrap_or(1000));
    let wait = doubled.min(LONGEST) * (1.0 + JITTER * (2.0 * chance - 1.0));
    Duration::from_secs_f64(wait.clamp(0.0, LONGEST))
}

/// Whether asking anew may help: unlike elsewhere, an answer that expired may be asked for again.
pub(super) fn worth_another(error: &Error) -> bool {
    error.kind() == ErrorKind::Expired
        || (error.kind() != ErrorKind::WorkFailed && error.is_retryable())
}

/// How many samples of one client may be under way, and when the last one succeeded.
#[derive(Debug)]
pub(super) struct Watch {
    places: Option<Arc<Limit>>,
    under_way: AtomicUsize,
    watched: bool,
    progress: Mutex<Instant>,
}

impl Watch {
    /// At most so many at once; any number without a limit.
    pub(super) fn new(places: Option<u64>, watched: bool) -> Self {
        let places =
            places.map(|places| Limit::of_places(u32::try_from(places).unwrap_or(u32::MAX).max(1)));
        let progress = Mutex::new(Instant::now());
        Self { places, under_way: AtomicUsize::new(0), watched, progress }
    }

    /// A place among the samples under way. Waiting for it is not watched.
    pub(super) async fn enter(&self) -> Place<'_> {
        let permit = match &self.places {
            Some(places) => Some(places.take(1).await),
            None => None,
        };
        if self.under_way.fetch_add(1, Ordering::AcqRel) == 0 {
            // Nobody was under way: the clock starts now.
            self.progressed();
        }
        Place { watch: self, _permit: permit }
    }

    pub(super) fn progressed(&self) {
        *self.progress.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// Ends when nothing has succeeded for too long.
    pub(super) async fn stuck<T>(&self) -> Result<T> {
        if !self.watched {
            std::future::pending::<()>().await;
        }
        loop {
            let last = *self.progress.lock().unwrap_or_else(PoisonError::into_inner);
            let due = last + STUCK_AFTER;
            if due <= Instant::now() {
                let why =
                    format!("no sample has succeeded for {} minutes", STUCK_AFTER.as_secs() / 60);
                return Err(Error::new(ErrorKind::Connect, why));
            }
            sleep_until(due).await;
        }
    }
}

/// A sample under way.
pub(super) struct Place<'a> {
    watch: &'a Watch,
    _permit: Option<Permit>,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.watch.under_way.fetch_sub(1, Ordering::AcqRel);
    }
}

/// For the journal.
pub(super) fn so_far(again: bool, attempt: u32) -> JsonObject {
    let facts = [("should_retry", json!(again)), ("attempt_count", json!(attempt + 1))];
    facts.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;

    /// Covers AUD.4.
    #[test]
    fn waits_grow_as_in_the_reference() {
        for case in fixture::cases("retry_handler_delay.json") {
            if case["config"].as_object().is_some_and(|config| !config.is_empty()) {
                // Other bases and jitters are not offered.
                continue;
            }
            let attempt = u32::try_from(case["attempt"].as_u64().unwrap()).unwrap();
            for (chance, key) in [
                (0.0, "delay_at_random_0"),
                (0.5, "delay_at_random_half"),
                (1.0, "delay_at_random_1"),
            ] {
                let wait = delay(attempt, chance).as_secs_f64();
                assert!((wait - case[key].as_f64().unwrap()).abs() < 1e-9, "{case}");
            }
        }
    }

    #[test]
    fn only_passing_failures_and_expired_answers_are_asked_for_anew() {
        for status in [408, 409, 429, 500, 503] {
            assert!(worth_another(&Error::of_reply(status, b"", None)), "{status}");
        }
        for status in [400, 401, 404, 410, 422] {
            assert!(!worth_another(&Error::of_reply(status, b"", None)), "{status}");
        }
        assert!(worth_another(&Error::of_reply(410, b"", None).expired()));
        assert!(worth_another(&Error::of_transport(ErrorKind::Timeout, "t".into())));
        let failed = tinkex_wire::RequestFailed {
            error: "x".to_owned(),
            category: tinkex_wire::Category::Server,
        };
        assert!(!worth_another(&Error::of_work(failed)));
    }
}
