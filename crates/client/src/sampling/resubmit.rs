//! The only loop that asks for the same sample anew, and the watch over it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::json;
use tinkex_wire::{ClientConfig, JsonObject};
use tokio::time::{Instant, sleep_until};

use crate::dispatch::{Limit, Permit};
use crate::error::{Error, ErrorKind, Result};
use crate::settings::Settings;

/// What the service calls a sample that failed.
pub(super) const SAMPLE_FAILED: &str = "RetryHandler.execute.exception";

const FIRST: f64 = 0.5;
const LONGEST: f64 = 10.0;
const JITTER: f64 = 0.25;
/// Without any progress for so long, a sample is given up, unless the caller says otherwise.
const STUCK_AFTER: Duration = Duration::from_secs(7200);

/// The wait before attempt number `attempt` after the first (from 0).
pub(super) fn delay(attempt: u32, chance: f64) -> Duration {
    let doubled = FIRST * 2_f64.powi(i32::try_from(attempt.min(1000)).unwrap_or(1000));
    let wait = doubled.min(LONGEST) * (1.0 + JITTER * (2.0 * chance - 1.0));
    Duration::from_secs_f64(wait.clamp(0.0, LONGEST))
}

/// Whether asking anew may help: unlike elsewhere, an answer that expired may be asked for again.
pub(crate) fn is_resubmittable(error: &Error) -> bool {
    error.kind() == ErrorKind::Expired
        || (error.kind() != ErrorKind::WorkFailed && error.is_retryable())
}

/// How many samples of one client may be under way, and when the last one succeeded.
#[derive(Debug)]
pub(super) struct ActiveSamples {
    places: Option<Arc<Limit>>,
    /// After how long without progress a sample is given up, if at all.
    stuck_after: Option<Duration>,
    epoch: Instant,
    /// When a sample last succeeded, in microseconds since the epoch.
    progress: AtomicU64,
}

impl ActiveSamples {
    /// As the server and the caller want it; the stricter one counts.
    pub(super) fn new(config: &ClientConfig, settings: &Settings) -> Self {
        // With one poll for all there is no request per sample under way that could be too many.
        let servers =
            (!config.sample_use_retrieve_futures).then_some(config.sample_max_concurrent_requests);
        let most = [servers, settings.max_samples.map(u64::from)].into_iter().flatten().min();
        let places =
            most.map(|places| Limit::concurrency(u32::try_from(places).unwrap_or(u32::MAX).max(1)));
        let stuck_after = settings.progress_timeout.unwrap_or(STUCK_AFTER);
        let stuck_after = config.sample_enable_stuck_detection.then_some(stuck_after);
        Self { places, stuck_after, epoch: Instant::now(), progress: AtomicU64::new(0) }
    }

    /// A place among the samples under way. Waiting for it is not watched.
    pub(super) async fn enter(&self) -> ActiveSample<'_> {
        let permit = match &self.places {
            Some(places) => Some(places.acquire(1).await),
            None => None,
        };
        ActiveSample { watch: self, since: Instant::now(), _permit: permit }
    }

    pub(super) fn progressed(&self) {
        let micros = self.epoch.elapsed().as_micros();
        self.progress.fetch_max(u64::try_from(micros).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    fn last_progress(&self) -> Instant {
        self.epoch + Duration::from_micros(self.progress.load(Ordering::Relaxed))
    }
}

/// A sample under way.
pub(super) struct ActiveSample<'a> {
    watch: &'a ActiveSamples,
    since: Instant,
    _permit: Option<Permit>,
}

impl ActiveSample<'_> {
    /// Ends when nothing has succeeded for too long since this sample began.
    pub(super) async fn stuck<T>(&self) -> Result<T> {
        loop {
            let last = self.since.max(self.watch.last_progress());
            let due = self.watch.stuck_after.and_then(|after| last.checked_add(after));
            let Some(due) = due else { return std::future::pending().await };
            if due <= Instant::now() {
                let seconds = self.watch.stuck_after.unwrap_or_default().as_secs();
                let why = format!("no sample has succeeded for {seconds} seconds");
                return Err(Error::new(ErrorKind::Connect, why));
            }
            sleep_until(due).await;
        }
    }
}

/// For the events.
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
            assert!(is_resubmittable(&Error::from_response(status, b"", None)), "{status}");
        }
        for status in [400, 401, 404, 410, 422] {
            assert!(!is_resubmittable(&Error::from_response(status, b"", None)), "{status}");
        }
        assert!(is_resubmittable(&Error::from_response(410, b"", None).expired()));
        assert!(is_resubmittable(&crate::HttpFailure::timeout("t").into()));
        let failed = tinkex_wire::RequestFailed {
            error: "x".to_owned(),
            category: tinkex_wire::ErrorCategory::Server,
        };
        assert!(!is_resubmittable(&Error::from_failed_request(failed)));
    }
}
