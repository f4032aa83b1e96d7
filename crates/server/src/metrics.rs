//! Metrics for `/metrics` in the Prometheus text format.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::limits::ServerLimits;
use crate::queue::Queue;
use crate::state::ServerState;

/// Counters of the server, and the number of loaded base models.
#[derive(Debug, Default)]
pub(crate) struct ServerMetrics {
    pub(crate) http_requests: AtomicMetric,
    pub(crate) rejected: AtomicMetric,
    /// Number of requests with a future and of inference requests that have finished.
    pub(crate) requests: AtomicMetric,
    pub(crate) failed_requests: AtomicMetric,
    /// Number of times that a request was returned to its queue after a fault.
    pub(crate) retries: AtomicMetric,
    pub(crate) trained_tokens: AtomicMetric,
    pub(crate) prompt_tokens: AtomicMetric,
    pub(crate) sampled_tokens: AtomicMetric,
    /// Time in which the worker was busy, in microseconds.
    pub(crate) busy_micros: AtomicMetric,
    /// Number of pages of the KV caches that hold running samples.
    pub(crate) cache_pages: AtomicMetric,
    /// Number of base models in memory.
    pub(crate) loaded_models: AtomicMetric,
}

/// Atomic value of a counter or gauge.
#[derive(Debug, Default)]
pub(crate) struct AtomicMetric(AtomicU64);

impl AtomicMetric {
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

/// Name, description and value of a metric.
type MetricRow = (&'static str, &'static str, u64);

/// Values that are read from the queue and the store when metrics are requested.
pub(crate) struct GaugeValues {
    pub(crate) queued: usize,
    pub(crate) queued_bytes: usize,
    pub(crate) sessions: usize,
    pub(crate) requests: usize,
    pub(crate) result_bytes: usize,
    pub(crate) payload_bytes: u64,
    pub(crate) commits: u64,
}

impl ServerMetrics {
    /// Counts a finished request.
    pub(crate) fn count_request(&self, successful: bool) {
        self.requests.add(1);
        if !successful {
            self.failed_requests.add(1);
        }
    }

    /// Returns names, descriptions and values of the counters.
    fn counters(&self, gauges: &GaugeValues) -> [MetricRow; 10] {
        [
            ("calls_total", "HTTP requests received", self.http_requests.get()),
            ("refused_total", "HTTP requests rejected", self.rejected.get()),
            ("jobs_total", "requests finished, successful or failed", self.requests.get()),
            ("failed_jobs_total", "requests that failed", self.failed_requests.get()),
            ("retries_total", "executions repeated after a fault", self.retries.get()),
            ("trained_tokens_total", "tokens trained on", self.trained_tokens.get()),
            ("prompt_tokens_total", "prompt tokens processed", self.prompt_tokens.get()),
            ("sampled_tokens_total", "tokens sampled", self.sampled_tokens.get()),
            (
                "busy_microseconds_total",
                "time in which the worker was busy",
                self.busy_micros.get(),
            ),
            ("commits_total", "transactions committed to disk", gauges.commits),
        ]
    }

    /// Returns names, descriptions and values of the gauges.
    fn gauges(&self, gauges: &GaugeValues) -> [MetricRow; 8] {
        let to_u64 = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
        [
            ("queued", "requests being written, queued or sampled", to_u64(gauges.queued)),
            (
                "queued_bytes",
                "size of the requests being written, queued or sampled",
                to_u64(gauges.queued_bytes),
            ),
            ("sessions", "open sessions", to_u64(gauges.sessions)),
            ("answers", "requests known, finished or not", to_u64(gauges.requests)),
            ("answer_bytes", "size of the results in memory", to_u64(gauges.result_bytes)),
            ("payload_bytes", "size of the payload file", gauges.payload_bytes),
            ("cache_pages", "pages of the KV cache in use", self.cache_pages.get()),
            ("loaded_models", "base models in memory", self.loaded_models.get()),
        ]
    }

    /// Formats all metrics in the Prometheus text format.
    pub(crate) fn to_text(&self, gauges: &GaugeValues, limits: &ServerLimits) -> String {
        let mut out = String::new();
        let (counters, gauges) = (self.counters(gauges), self.gauges(gauges));
        for (kind, rows) in [("counter", &counters[..]), ("gauge", &gauges[..])] {
            for (name, help, value) in rows {
                // Writing to a String cannot fail.
                let _ = write!(
                    out,
                    "# HELP tinkex_{name} {help}\n\
                     # TYPE tinkex_{name} {kind}\n\
                     tinkex_{name} {value}\n"
                );
            }
        }
        out.push_str("# HELP tinkex_limit_bytes memory limits\n# TYPE tinkex_limit_bytes gauge\n");
        for (name, bytes) in limits.memory_limits() {
            let _ = writeln!(out, "tinkex_limit_bytes{{memory=\"{name}\"}} {bytes}");
        }
        out
    }
}

impl GaugeValues {
    /// Reads the values of a server.
    pub(crate) fn of(state: &ServerState) -> Self {
        let sizes = state.backends.queues().map(Queue::size);
        let (queued, queued_bytes) =
            sizes.fold((0, 0), |(count, bytes), (more, size)| (count + more, bytes + size));
        let store = state.store();
        Self {
            queued,
            queued_bytes,
            sessions: store.sessions.values().filter(|entry| entry.row.end.is_none()).count(),
            requests: store.requests.len(),
            result_bytes: store.result_bytes,
            payload_bytes: store.disk.payload_bytes(),
            commits: store.disk.commits(),
        }
    }
}

/// Returns the figures of `/metrics` as a JSON document, with the limits on them.
pub(crate) fn figures(state: &ServerState) -> serde_json::Value {
    let gauges = GaugeValues::of(state);
    let rows = |rows: &[MetricRow]| -> serde_json::Value {
        let row = |(name, help, value): &MetricRow| {
            ((*name).to_owned(), serde_json::json!({ "value": value, "help": help }))
        };
        rows.iter().map(row).collect::<serde_json::Map<_, _>>().into()
    };
    let limits = &state.options.limits;
    let memory: serde_json::Map<String, serde_json::Value> = limits
        .memory_limits()
        .into_iter()
        .map(|(name, bytes)| (name.to_owned(), bytes.into()))
        .collect();
    let upstreams: Vec<serde_json::Value> = state
        .backends
        .upstreams()
        .map(|(name, upstream)| {
            let down = upstream.status().down.is_some();
            serde_json::json!({ "name": **name, "up": !down })
        })
        .collect();
    serde_json::json!({
        "counters": rows(&state.metrics.counters(&gauges)),
        "gauges": rows(&state.metrics.gauges(&gauges)),
        "limits": { "memory": memory, "queued": limits.queued_requests },
        "upstreams": upstreams,
        "process_bytes": crate::memory::process_memory(),
        "disk_free_bytes": state.options.disk.available(&state.options.data_dir),
        "time": state.clock.now().div_euclid(1_000),
    })
}
