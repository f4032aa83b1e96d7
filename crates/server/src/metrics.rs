//! Counters for `/metrics`, in Prometheus' text form.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counters, nearly all only ever growing.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    pub(crate) calls: Counter,
    pub(crate) refused: Counter,
    pub(crate) jobs: Counter,
    pub(crate) failed_jobs: Counter,
    pub(crate) trained_tokens: Counter,
    pub(crate) prompt_tokens: Counter,
    pub(crate) sampled_tokens: Counter,
    pub(crate) busy_micros: Counter,
    /// Base models in memory.
    pub(crate) loaded: Counter,
}

/// A number.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn set(&self, n: usize) {
        self.0.store(u64::try_from(n).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What is counted elsewhere.
pub(crate) struct Gauges {
    pub(crate) queued: usize,
    pub(crate) queued_bytes: usize,
    pub(crate) sessions: usize,
    pub(crate) answers: usize,
    pub(crate) answer_bytes: usize,
    pub(crate) payload_bytes: u64,
    pub(crate) commits: u64,
}

impl Metrics {
    pub(crate) fn text(&self, gauges: &Gauges) -> String {
        let mut out = String::new();
        let counters = [
            ("calls_total", "HTTP calls answered", self.calls.get()),
            ("refused_total", "HTTP calls refused", self.refused.get()),
            ("jobs_total", "requests carried out", self.jobs.get()),
            ("failed_jobs_total", "requests that failed", self.failed_jobs.get()),
            ("trained_tokens_total", "tokens trained on", self.trained_tokens.get()),
            ("prompt_tokens_total", "prompt tokens read", self.prompt_tokens.get()),
            ("sampled_tokens_total", "tokens sampled", self.sampled_tokens.get()),
            ("busy_microseconds_total", "time the engine worked", self.busy_micros.get()),
            ("commits_total", "batches written to disk", gauges.commits),
        ];
        let wide = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
        let gauges = [
            ("queued", "requests in line, and samples being drawn", wide(gauges.queued)),
            ("queued_bytes", "bytes of these", wide(gauges.queued_bytes)),
            ("sessions", "open sessions", wide(gauges.sessions)),
            ("answers", "requests known, answered or not", wide(gauges.answers)),
            ("answer_bytes", "bytes of answers in memory", wide(gauges.answer_bytes)),
            ("payload_bytes", "bytes of requests and answers on disk", gauges.payload_bytes),
            ("loaded_models", "base models in memory", self.loaded.get()),
        ];
        for (kind, rows) in [("counter", &counters[..]), ("gauge", &gauges[..])] {
            for (name, help, value) in rows {
                // Writing into a text cannot fail.
                let _ = write!(
                    out,
                    "# HELP tinkex_{name} {help}\n# TYPE tinkex_{name} {kind}\ntinkex_{name} {value}\n"
                );
            }
        }
        out
    }
}
