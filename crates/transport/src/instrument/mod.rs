//! Instrumentation of requests: events for [`tracing`] and counters for [`metrics`].
//!
//! [`targets`] lists the events. The metrics are:
//!
//! | Metric | Type | Labels |
//! |---|---|---|
//! | `tinkex_requests_total` | counter | `lane`, `outcome`: `ok`, `refused` (4xx), `failed` (5xx), `lost` (no response) |
//! | `tinkex_request_duration_seconds` | histogram | `lane` |
//! | `tinkex_retries_total` | counter | `reason`: `retry`, `round` (new round of retries), `backoff` (429), `billing` (402), `resubmit` (sample), `poll` |
//!
//! [`RequestStats`] keeps the same numbers for programs without a metrics recorder. Bodies, headers
//! and query strings are never recorded.
//!
//! `last_response` records the time of the server's last response; `trace_context` adds the
//! header `traceparent` (feature `opentelemetry`).

pub(crate) mod last_response;
pub mod stats;
#[cfg(feature = "opentelemetry")]
pub(crate) mod trace_context;

use std::time::Instant;

use http::{Method, Response, Uri};

use crate::targets;

use crate::http::{HttpFailure, Lane};
use stats::{RequestOutcome, RequestStats};

/// Instruments one request: emits its events, and records its metrics and statistics when it ends.
///
/// Measures real time, even in tests with paused time: durations are only reported, and no decision
/// depends on them.
pub(crate) struct RequestEvents<'a> {
    method: &'a Method,
    path: &'a str,
    lane: Lane,
    base_url: &'a str,
    retry_count: u32,
    start: Instant,
}

impl<'a> RequestEvents<'a> {
    pub(crate) fn start(
        method: &'a Method,
        uri: &'a Uri,
        lane: Lane,
        base_url: &'a str,
        retry_count: u32,
    ) -> Self {
        let path = uri.path();
        tracing::trace!(
            target: targets::HTTP, %method, path, lane = lane.as_str(), base_url, retry_count,
            "request start"
        );
        Self { method, path, lane, base_url, retry_count, start: Instant::now() }
    }

    /// Records the end of the request. For a streamed response, this is the arrival of the first
    /// part of its body.
    pub(crate) fn stop<B>(self, result: &Result<Response<B>, HttpFailure>, stats: &RequestStats) {
        let Self { method, path, lane, base_url, retry_count, start } = self;
        let elapsed = start.elapsed();
        let stats_lane = lane;
        let lane = lane.as_str();
        let duration = elapsed.as_secs_f64();
        let outcome = match result {
            Ok(response) => {
                let status = response.status().as_u16();
                tracing::debug!(
                    target: targets::HTTP, %method, path, lane, base_url, retry_count, duration,
                    status, "request stop"
                );
                RequestOutcome::from_status(status)
            }
            Err(error) => {
                tracing::debug!(
                    target: targets::HTTP, %method, path, lane, base_url, retry_count, duration,
                    ?error, "request exception"
                );
                RequestOutcome::Lost
            }
        };
        stats.record(stats_lane, outcome, elapsed);
        let outcome = outcome.as_str();
        metrics::counter!("tinkex_requests_total", "lane" => lane, "outcome" => outcome)
            .increment(1);
        metrics::histogram!("tinkex_request_duration_seconds", "lane" => lane).record(duration);
    }
}

/// Counts a retry.
pub(crate) fn count_retry(reason: &'static str) {
    metrics::counter!("tinkex_retries_total", "reason" => reason).increment(1);
}
