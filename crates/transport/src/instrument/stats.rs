//! [`RequestStats`]: counts and latencies of requests, without an external metrics recorder.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::http::Lane;

/// Number of buckets per power of two. A bucket is at most 1/8 of its lower bound wide, and a
/// percentile is reported as the middle of its bucket, so the error of a percentile is at most
/// 1/16.
const SUB_BUCKETS: u32 = 8;
const SUB_BUCKET_BITS: u32 = SUB_BUCKETS.ilog2();
/// Largest power of two, in microseconds, that has buckets: 2³⁵ µs are 9.5 hours.
const MAX_EXPONENT: u32 = 35;
const BUCKETS: usize = ((MAX_EXPONENT - SUB_BUCKET_BITS + 2) * SUB_BUCKETS) as usize;

/// Outcome of one request. The variants are in the order of [`LaneCounters::outcomes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestOutcome {
    /// Status below 400.
    Ok,
    /// Status from 400 to 499.
    Refused,
    /// Status of 500 or more.
    Failed,
    /// No complete response.
    Lost,
    /// The program dropped a streamed response before its end.
    Dropped,
}

impl RequestOutcome {
    pub(crate) fn from_status(status: u16) -> Self {
        match status {
            ..400 => Self::Ok,
            400..500 => Self::Refused,
            _ => Self::Failed,
        }
    }

    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Refused => "refused",
            Self::Failed => "failed",
            Self::Lost => "lost",
            Self::Dropped => "dropped",
        }
    }
}

/// Statistics of all requests of a client. Recording neither locks nor allocates.
#[derive(Debug)]
pub struct RequestStats(Box<[LaneCounters]>);

/// Counters of the requests of one lane.
#[derive(Debug)]
struct LaneCounters {
    lane: Lane,
    /// Number of requests by [`RequestOutcome`].
    outcomes: [AtomicU64; 5],
    latency: Histogram,
}

impl Default for RequestStats {
    fn default() -> Self {
        let counters = |lane| LaneCounters {
            lane,
            outcomes: Default::default(),
            latency: Histogram::default(),
        };
        Self(Lane::ALL.into_iter().map(counters).collect())
    }
}

impl RequestStats {
    pub(crate) fn record(&self, lane: Lane, outcome: RequestOutcome, duration: Duration) {
        if let Some(counters) = self.0.iter().find(|counters| counters.lane == lane) {
            counters.outcomes[outcome as usize].fetch_add(1, Ordering::Relaxed);
            counters.latency.record(duration);
        }
    }

    /// Returns the statistics of all lanes with at least one request.
    pub fn snapshot(&self) -> ClientStats {
        let lanes = self.0.iter().map(LaneCounters::snapshot);
        ClientStats { lanes: lanes.filter(|lane| lane.requests() > 0).collect() }
    }
}

impl LaneCounters {
    fn snapshot(&self) -> LaneStats {
        let [ok, refused, failed, lost, dropped] =
            self.outcomes.each_ref().map(|count| count.load(Ordering::Relaxed));
        let [p50, p90, p99] = self.latency.percentiles([0.5, 0.9, 0.99]);
        LaneStats { lane: self.lane, ok, refused, failed, lost, dropped, p50, p90, p99 }
    }
}

/// Histogram of durations: one count per bucket. The width of a bucket grows with the duration.
#[derive(Debug)]
struct Histogram(Box<[AtomicU64]>);

impl Default for Histogram {
    fn default() -> Self {
        Self((0..BUCKETS).map(|_| AtomicU64::new(0)).collect())
    }
}

impl Histogram {
    fn record(&self, duration: Duration) {
        let micros = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        self.0[bucket(micros)].fetch_add(1, Ordering::Relaxed);
    }

    /// Returns, for each fraction, the duration that this fraction of all recorded durations does
    /// not exceed. Returns zeros if no duration was recorded.
    fn percentiles<const N: usize>(&self, fractions: [f64; N]) -> [Duration; N] {
        let counts: Vec<u64> = self.0.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        let total: u64 = counts.iter().sum();
        fractions.map(|fraction| {
            #[expect(
                clippy::cast_precision_loss,
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a rank that is off by one in 2^53 requests does not matter"
            )]
            let rank = ((total as f64 * fraction).ceil() as u64).max(1);
            let mut cumulative = 0;
            let bucket = counts.iter().position(|count| {
                cumulative += count;
                cumulative >= rank
            });
            bucket.map_or(Duration::ZERO, middle)
        })
    }
}

/// Returns the bucket of a duration in microseconds. Durations below 8 µs have a bucket per
/// microsecond. Durations above the largest bucket are counted in the largest bucket.
fn bucket(micros: u64) -> usize {
    let exponent = micros.max(1).ilog2();
    if exponent < SUB_BUCKET_BITS {
        return usize::try_from(micros).unwrap_or(0);
    }
    if exponent > MAX_EXPONENT {
        return BUCKETS - 1;
    }
    let shift = exponent - SUB_BUCKET_BITS;
    let sub_bucket = (micros >> shift) & u64::from(SUB_BUCKETS - 1);
    ((shift + 1) * SUB_BUCKETS) as usize + usize::try_from(sub_bucket).unwrap_or(0)
}

/// Returns the middle of a bucket.
fn middle(bucket: usize) -> Duration {
    let sub_buckets = SUB_BUCKETS as usize;
    if bucket < sub_buckets {
        return Duration::from_micros(bucket as u64);
    }
    let shift = bucket / sub_buckets - 1;
    let sub_bucket = bucket % sub_buckets;
    let width = 1_u64 << shift;
    Duration::from_micros((sub_buckets + sub_bucket) as u64 * width)
        + Duration::from_micros(width) / 2
}

/// Statistics of a client's requests to its server; returned by
/// `ServiceClient::stats`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClientStats {
    /// Lanes with at least one request.
    pub lanes: Vec<LaneStats>,
}

impl ClientStats {
    /// Returns the statistics of a lane, or `None` if it had no request.
    #[must_use]
    pub fn lane(&self, lane: Lane) -> Option<&LaneStats> {
        self.lanes.iter().find(|stats| stats.lane == lane)
    }
}

/// Statistics of the requests of one [`Lane`]. Each attempt and each followed redirect counts as a
/// request.
///
/// The percentiles cover all requests since the client was built. The latency of a request is the
/// time until the end of its response, also of a streamed one, or until its failure. Percentiles are
/// within 7 % of the exact value.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LaneStats {
    /// Lane of the requests.
    pub lane: Lane,
    /// Number of successful responses and redirects (status below 400).
    pub ok: u64,
    /// Number of responses with a status from 400 to 499.
    pub refused: u64,
    /// Number of responses with a status of 500 or more.
    pub failed: u64,
    /// Number of requests without a complete response.
    pub lost: u64,
    /// Number of streamed responses that the program dropped before their end.
    pub dropped: u64,
    /// Median latency.
    pub p50: Duration,
    /// Latency that 90 % of the requests do not exceed.
    pub p90: Duration,
    /// Latency that 99 % of the requests do not exceed.
    pub p99: Duration,
}

impl LaneStats {
    /// Returns the number of requests.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.ok + self.refused + self.failed + self.lost + self.dropped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_within_seven_percent() {
        for unit in [1_u64, 100, 10_000, 1_000_000, 10_000_000] {
            let stats = RequestStats::default();
            for step in 1..=1000 {
                let duration = Duration::from_micros(step * unit);
                stats.record(Lane::Sample, RequestOutcome::Ok, duration);
            }
            let stats = stats.snapshot();
            let lane = stats.lane(Lane::Sample).unwrap();
            assert_eq!((lane.requests(), lane.ok), (1000, 1000));
            for (given, exact) in [(lane.p50, 500), (lane.p90, 900), (lane.p99, 990)] {
                let exact = Duration::from_micros(exact * unit).as_secs_f64();
                let error = (given.as_secs_f64() - exact).abs() / exact;
                assert!(error < 0.07, "{given:?} instead of {exact} s");
            }
            assert!(stats.lane(Lane::Train).is_none());
        }
    }

    #[test]
    fn extreme_durations_have_a_bucket() {
        let histogram = Histogram::default();
        assert_eq!(histogram.percentiles([0.5]), [Duration::ZERO], "no request");
        histogram.record(Duration::ZERO);
        assert_eq!(histogram.percentiles([0.5]), [Duration::ZERO]);
        for _ in 0..2 {
            histogram.record(Duration::MAX);
        }
        assert!(histogram.percentiles([0.99])[0] > Duration::from_secs(9 * 3600));
        let mut last = 0;
        for micros in 0..100_000 {
            let bucket = bucket(micros);
            assert!(bucket == last || bucket == last + 1, "{micros}: no bucket is skipped");
            last = bucket;
        }
    }
}
