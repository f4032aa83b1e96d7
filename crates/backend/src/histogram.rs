//! [`Histograms`]: durations by label, for Prometheus.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use parking_lot::Mutex;

/// Upper bounds of the buckets in seconds, as text and as numbers. A sample of a small model takes
/// milliseconds, and a training pass or a long poll may take minutes.
const BOUNDS: [(&str, f64); 14] = [
    ("0.001", 0.001),
    ("0.0025", 0.0025),
    ("0.005", 0.005),
    ("0.01", 0.01),
    ("0.025", 0.025),
    ("0.05", 0.05),
    ("0.1", 0.1),
    ("0.25", 0.25),
    ("1", 1.0),
    ("2.5", 2.5),
    ("10", 10.0),
    ("30", 30.0),
    ("120", 120.0),
    ("600", 600.0),
];

/// Histograms of durations with the same buckets, by the value of one label.
#[derive(Debug, Default)]
pub struct Histograms(Mutex<BTreeMap<&'static str, Histogram>>);

#[derive(Debug, Default)]
struct Histogram {
    /// Number of durations per bucket; durations above the last bound are in `count` only.
    buckets: [u64; BOUNDS.len()],
    count: u64,
    sum: Duration,
}

impl Histograms {
    /// Adds a duration to the histogram of `label`.
    pub fn observe(&self, label: &'static str, duration: Duration) {
        let mut histograms = self.0.lock();
        let histogram = histograms.entry(label).or_default();
        let seconds = duration.as_secs_f64();
        if let Some(bucket) = BOUNDS.iter().position(|(_, bound)| seconds <= *bound) {
            histogram.buckets[bucket] += 1;
        }
        histogram.count += 1;
        histogram.sum += duration;
    }

    /// Appends the histograms in the Prometheus text format to `out`, as the metric `name` with the
    /// description `help` and the label `label`.
    pub fn write_text(&self, out: &mut String, name: &str, help: &str, label: &str) {
        let histograms = self.0.lock();
        // Writing to a String cannot fail.
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} histogram");
        for (value, histogram) in histograms.iter() {
            let mut cumulative = 0;
            for ((bound, _), bucket) in BOUNDS.iter().zip(histogram.buckets) {
                cumulative += bucket;
                let _ = writeln!(
                    out,
                    "{name}_bucket{{{label}=\"{value}\",le=\"{bound}\"}} {cumulative}"
                );
            }
            let Histogram { count, sum, .. } = histogram;
            let _ = write!(
                out,
                "{name}_bucket{{{label}=\"{value}\",le=\"+Inf\"}} {count}\n\
                 {name}_sum{{{label}=\"{value}\"}} {}\n\
                 {name}_count{{{label}=\"{value}\"}} {count}\n",
                sum.as_secs_f64(),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_cumulative_and_include_their_bound() {
        let histograms = Histograms::default();
        for millis in [1, 2, 250, 700_000] {
            histograms.observe("sample", Duration::from_millis(millis));
        }
        histograms.observe("optim_step", Duration::ZERO);
        let mut text = String::new();
        histograms.write_text(&mut text, "seconds", "duration", "operation");
        let value = |line: &str| {
            let found = text.lines().find_map(|found| found.strip_prefix(line));
            found.unwrap_or_else(|| panic!("{line}: {text}")).trim().to_owned()
        };
        let bucket =
            |bound: &str| value(&format!("seconds_bucket{{operation=\"sample\",le=\"{bound}\"}}"));
        assert_eq!(bucket("0.001"), "1");
        assert_eq!(bucket("0.0025"), "2");
        assert_eq!(bucket("0.1"), "2");
        assert_eq!(bucket("0.25"), "3");
        assert_eq!(bucket("600"), "3");
        assert_eq!(bucket("+Inf"), "4");
        assert_eq!(value("seconds_count{operation=\"sample\"}"), "4");
        assert_eq!(value("seconds_sum{operation=\"sample\"}"), "700.253");
        assert_eq!(value("seconds_count{operation=\"optim_step\"}"), "1");
        assert!(text.starts_with("# HELP seconds duration\n# TYPE seconds histogram\n"), "{text}");
    }
}
