//! Metrics for `/metrics` in the Prometheus text format.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;

use tinkex_backend::histogram::Histograms;
use tinkex_backend::metrics::{AtomicMetric, WorkMetrics};
use tinkex_backend::queue::RequestQueue;
use tinkex_dashboard::FigureDocument;
use tinkex_store::store::Store;

use crate::backends::Backends;
use crate::limits::ServerLimits;

/// Counters and engine metrics of the server.
#[derive(Debug)]
pub(crate) struct ServerMetrics {
    pub(crate) http_requests: AtomicMetric,
    pub(crate) rejected: AtomicMetric,
    /// Time from the headers of a request until the headers of its response, by endpoint.
    pub(crate) http_seconds: Histograms,
    pub(crate) work: Arc<WorkMetrics>,
    pub(crate) engine: Arc<EngineMetrics>,
}

/// Metrics that the worker reports about the engine.
#[derive(Debug, Default)]
pub(crate) struct EngineMetrics {
    /// Time in which the worker was busy, in microseconds.
    pub(crate) busy_micros: AtomicMetric,
    /// Number of micro-batches of training passes that were executed.
    pub(crate) micro_batches: AtomicMetric,
    /// Number of passes whose gradients are missing because they failed.
    pub(crate) failed_passes: AtomicMetric,
    /// Number of pages of the KV caches that running samples use.
    pub(crate) cache_pages: AtomicMetric,
    /// Number of base models in memory.
    pub(crate) loaded_models: AtomicMetric,
}

/// Name, description and value of a metric.
type MetricRow = (&'static str, &'static str, u64);

/// Documents for the dashboard, by the name of the metric.
type MetricDocuments = BTreeMap<&'static str, FigureDocument>;

/// Values that are read from the queues and the store when metrics are requested.
pub(crate) struct GaugeValues {
    pub(crate) queued: usize,
    pub(crate) queued_bytes: usize,
    pub(crate) sessions: usize,
    pub(crate) requests: usize,
    pub(crate) result_bytes: usize,
    pub(crate) payload_bytes: u64,
    pub(crate) commits: u64,
    pub(crate) draining: bool,
}

impl ServerMetrics {
    /// Creates the metrics of a server whose backends update `work`.
    pub(crate) fn new(work: Arc<WorkMetrics>) -> Self {
        Self {
            http_requests: AtomicMetric::default(),
            rejected: AtomicMetric::default(),
            http_seconds: Histograms::default(),
            work,
            engine: Arc::default(),
        }
    }

    /// Returns names, descriptions and values of the counters.
    fn counters(&self, gauges: &GaugeValues) -> [MetricRow; 12] {
        [
            ("http_requests_total", "HTTP requests received", self.http_requests.get()),
            ("rejected_total", "HTTP requests rejected", self.rejected.get()),
            ("requests_total", "requests finished, successful or failed", self.work.requests.get()),
            ("failed_requests_total", "requests that failed", self.work.failed_requests.get()),
            ("retries_total", "executions repeated after a fault", self.work.retries.get()),
            ("trained_tokens_total", "tokens trained on", self.work.trained_tokens.get()),
            (
                "failed_passes_total",
                "forward_backward passes that failed",
                self.engine.failed_passes.get(),
            ),
            (
                "micro_batches_total",
                "micro-batches of training passes executed",
                self.engine.micro_batches.get(),
            ),
            ("prompt_tokens_total", "prompt tokens processed", self.work.prompt_tokens.get()),
            ("sampled_tokens_total", "tokens sampled", self.work.sampled_tokens.get()),
            (
                "busy_microseconds_total",
                "time in which the worker was busy",
                self.engine.busy_micros.get(),
            ),
            ("commits_total", "transactions committed to disk", gauges.commits),
        ]
    }

    /// Returns names, descriptions and values of the gauges.
    fn gauges(&self, gauges: &GaugeValues) -> [MetricRow; 9] {
        let to_u64 = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
        [
            ("queued", "requests being written, queued or sampled", to_u64(gauges.queued)),
            (
                "queued_bytes",
                "size of the requests being written, queued or sampled",
                to_u64(gauges.queued_bytes),
            ),
            ("sessions", "open sessions", to_u64(gauges.sessions)),
            ("requests", "requests known, finished or not", to_u64(gauges.requests)),
            ("result_bytes", "size of the results in memory", to_u64(gauges.result_bytes)),
            ("payload_bytes", "size of the payload file", gauges.payload_bytes),
            ("cache_pages", "pages of the KV cache in use", self.engine.cache_pages.get()),
            ("loaded_models", "base models in memory", self.engine.loaded_models.get()),
            ("draining", "whether the server refuses new work", gauges.draining.into()),
        ]
    }

    /// Returns the counters as documents of the dashboard, by name.
    pub(crate) fn counter_documents(&self, gauges: &GaugeValues) -> MetricDocuments {
        documents(&self.counters(gauges))
    }

    /// Returns the gauges as documents of the dashboard, by name.
    pub(crate) fn gauge_documents(&self, gauges: &GaugeValues) -> MetricDocuments {
        documents(&self.gauges(gauges))
    }

    /// Formats all metrics in the Prometheus text format.
    pub(crate) fn to_text(&self, gauges: &GaugeValues, limits: &ServerLimits) -> String {
        let mut out = String::new();
        let counters = self.counters(gauges);
        let gauges = self.gauges(gauges);
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
        self.work.request_seconds.write_text(
            &mut out,
            "tinkex_request_seconds",
            "time from the admission of a request until its outcome",
            "kind",
        );
        self.http_seconds.write_text(
            &mut out,
            "tinkex_http_request_seconds",
            "time until the headers of the response",
            "endpoint",
        );
        out.push_str("# HELP tinkex_limit_bytes memory limits\n# TYPE tinkex_limit_bytes gauge\n");
        for (name, bytes) in limits.memory_limits() {
            let _ = writeln!(out, "tinkex_limit_bytes{{memory=\"{name}\"}} {bytes}");
        }
        out
    }
}

fn documents(rows: &[MetricRow]) -> MetricDocuments {
    rows.iter().map(|&(name, help, value)| (name, FigureDocument { value, help })).collect()
}

impl GaugeValues {
    /// Reads the values from the queues and the store.
    pub(crate) fn read(backends: &Backends, store: &Store, draining: bool) -> Self {
        let sizes = backends.queues().map(RequestQueue::size);
        let (queued, queued_bytes) =
            sizes.fold((0, 0), |(count, bytes), (more, size)| (count + more, bytes + size));
        Self {
            queued,
            queued_bytes,
            sessions: store.sessions.values().filter(|entry| entry.row.end.is_none()).count(),
            requests: store.requests.len(),
            result_bytes: store.result_bytes,
            payload_bytes: store.disk.payload_bytes(),
            commits: store.disk.commits(),
            draining,
        }
    }
}
