//! What can be seen of requests from outside: events for [`tracing`], numbers for [`metrics`].
//!
//! | Event (target `tinkex::http`) | Level | Fields |
//! |---|---|---|
//! | `request start` | trace | `method`, `path`, `lane`, `base_url`, `retry_count` |
//! | `request stop` | debug | the same, `duration`, `status` |
//! | `request exception` | debug | the same, `duration`, `error` |
//!
//! Nothing of a body or a header is told, nor anything behind a `?`.

use std::time::Instant;

use bytes::Bytes;
use http::{Method, Response, Uri};

use crate::targets;

use super::http::{HttpFailure, Lane};

/// One request on its way. Time is the real one: it is told, never decided by.
pub(super) struct RequestEvents<'a> {
    method: &'a Method,
    path: &'a str,
    lane: &'static str,
    base_url: &'a str,
    retry_count: u32,
    start: Instant,
}

impl<'a> RequestEvents<'a> {
    pub(super) fn start(
        method: &'a Method,
        uri: &'a Uri,
        lane: Lane,
        base_url: &'a str,
        retry_count: u32,
    ) -> Self {
        let (path, lane) = (uri.path(), lane.as_str());
        tracing::trace!(
            target: targets::HTTP, %method, path, lane, base_url, retry_count, "request start"
        );
        Self { method, path, lane, base_url, retry_count, start: Instant::now() }
    }

    pub(super) fn stop(self, result: &Result<Response<Bytes>, HttpFailure>) {
        let Self { method, path, lane, base_url, retry_count, start } = self;
        let duration = start.elapsed();
        let outcome = match result {
            Ok(reply) => {
                let status = reply.status().as_u16();
                tracing::debug!(
                    target: targets::HTTP, %method, path, lane, base_url, retry_count, ?duration,
                    status, "request stop"
                );
                match status {
                    ..400 => "ok",
                    400..500 => "refused",
                    _ => "failed",
                }
            }
            Err(error) => {
                tracing::debug!(
                    target: targets::HTTP, %method, path, lane, base_url, retry_count, ?duration,
                    ?error, "request exception"
                );
                "lost"
            }
        };
        metrics::counter!("tinkex_requests_total", "lane" => lane, "outcome" => outcome)
            .increment(1);
        metrics::histogram!("tinkex_request_duration_seconds", "lane" => lane)
            .record(duration.as_secs_f64());
    }
}

/// The same bytes are sent again, for this reason.
pub(super) fn resend(why: &'static str) {
    metrics::counter!("tinkex_resends_total", "why" => why).increment(1);
}
