//! Instrumentation of requests: events for [`tracing`] and counters for [`metrics`].
//!
//! [`targets`] lists the events. The metrics are:
//!
//! | Metric | Type | Labels |
//! |---|---|---|
//! | `tinkex_requests_total` | counter | `lane`, `outcome`: `ok`, `refused` (4xx), `failed` (5xx), `lost` (no complete response), `dropped` (stream that the program dropped) |
//! | `tinkex_request_duration_seconds` | histogram | `lane`; until the end of the response, also of a stream |
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

use std::borrow::Cow;
use std::sync::Arc;
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
    method: Cow<'a, Method>,
    path: Cow<'a, str>,
    lane: Lane,
    base_url: Cow<'a, str>,
    retry_count: u32,
    start: Instant,
}

/// End of a request.
enum RequestEnd<'a> {
    /// The response has arrived, with this status.
    Response(u16),
    /// No response, or the body of a streamed response broke.
    Failed(&'a HttpFailure),
    /// The program dropped a streamed response with this status before its end.
    Dropped(u16),
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
        Self {
            method: Cow::Borrowed(method),
            path: path.into(),
            lane,
            base_url: base_url.into(),
            retry_count,
            start: Instant::now(),
        }
    }

    /// Records the end of a request whose response was received as a whole, or that failed.
    pub(crate) fn stop<B>(self, result: &Result<Response<B>, HttpFailure>, stats: &RequestStats) {
        let end = match result {
            Ok(response) => RequestEnd::Response(response.status().as_u16()),
            Err(failure) => RequestEnd::Failed(failure),
        };
        self.end(&end, stats);
    }

    /// Records the start of a streamed response. Its end is recorded by the returned value.
    pub(crate) fn response_started(self, status: u16, stats: &Arc<RequestStats>) -> StreamEvents {
        let Self { method, path, lane, base_url, retry_count, start } = self;
        let duration = start.elapsed().as_secs_f64();
        tracing::debug!(
            target: targets::HTTP, %method, path = &*path, lane = lane.as_str(),
            base_url = &*base_url, retry_count, duration, status, "response start"
        );
        let request = RequestEvents {
            method: Cow::Owned(method.into_owned()),
            path: path.into_owned().into(),
            lane,
            base_url: base_url.into_owned().into(),
            retry_count,
            start,
        };
        let span = tracing::Span::current();
        StreamEvents { open: Some((request, status)), stats: Arc::clone(stats), span }
    }

    fn end(self, end: &RequestEnd<'_>, stats: &RequestStats) {
        let Self { method, path, lane, base_url, retry_count, start } = self;
        let path = &*path;
        let base_url = &*base_url;
        let elapsed = start.elapsed();
        let stats_lane = lane;
        let lane = lane.as_str();
        let duration = elapsed.as_secs_f64();
        let outcome = match end {
            RequestEnd::Response(status) => {
                tracing::debug!(
                    target: targets::HTTP, %method, path, lane, base_url, retry_count, duration,
                    status, "request stop"
                );
                RequestOutcome::from_status(*status)
            }
            RequestEnd::Failed(error) => {
                tracing::debug!(
                    target: targets::HTTP, %method, path, lane, base_url, retry_count, duration,
                    ?error, "request exception"
                );
                RequestOutcome::Lost
            }
            RequestEnd::Dropped(status) => {
                tracing::debug!(
                    target: targets::HTTP, %method, path, lane, base_url, retry_count, duration,
                    status, "response dropped"
                );
                RequestOutcome::Dropped
            }
        };
        stats.record(stats_lane, outcome, elapsed);
        let outcome = outcome.as_str();
        metrics::counter!("tinkex_requests_total", "lane" => lane, "outcome" => outcome)
            .increment(1);
        metrics::histogram!("tinkex_request_duration_seconds", "lane" => lane).record(duration);
    }
}

/// Records the end of a streamed response: complete, broken or, if this value is dropped before,
/// dropped by the program.
pub(crate) struct StreamEvents {
    /// Request and status of its response; `None` once the end was recorded.
    open: Option<(RequestEvents<'static>, u16)>,
    stats: Arc<RequestStats>,
    /// Span of the request, in which the events are emitted.
    span: tracing::Span,
}

impl StreamEvents {
    /// Records that the response is complete. Only the first end is recorded.
    pub(crate) fn complete(&mut self) {
        self.end(RequestEnd::Response);
    }

    /// Records that the body broke. Only the first end is recorded.
    pub(crate) fn fail(&mut self, failure: &HttpFailure) {
        self.end(|_| RequestEnd::Failed(failure));
    }

    fn end<'a>(&mut self, end: impl FnOnce(u16) -> RequestEnd<'a>) {
        if let Some((request, status)) = self.open.take() {
            self.span.in_scope(|| request.end(&end(status), &self.stats));
        }
    }
}

impl Drop for StreamEvents {
    fn drop(&mut self) {
        self.end(RequestEnd::Dropped);
    }
}

/// Counts a retry.
pub(crate) fn count_retry(reason: &'static str) {
    metrics::counter!("tinkex_retries_total", "reason" => reason).increment(1);
}
