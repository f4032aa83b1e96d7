//! [`RunColumns`]: the metrics of a run as columns.

use std::collections::BTreeMap;

use super::downsample::{MetricCurve, MetricsQuery};
use super::steps::StepTracker;
use crate::record::UnixMicros;

/// Marks a point without a value of the metric: a NaN that no calculation returns.
const ABSENT: f32 = f32::from_bits(0x7fc0_ab5e);

/// Returns whether a point has a value of the metric.
pub(super) fn is_present(value: f32) -> bool {
    value.to_bits() != ABSENT.to_bits()
}

/// Metrics of the steps of a run. All metrics share the numbers and the times of the points.
#[derive(Clone, Debug, Default)]
pub(crate) struct RunColumns {
    axis: PointAxis,
    /// Names and values of the metrics. A column is shorter than the axis if the last points do not
    /// have the metric.
    columns: Vec<(String, Vec<f32>)>,
}

/// Numbers and times of the points of a run.
#[derive(Clone, Debug, Default)]
pub(super) struct PointAxis {
    /// Numbers of finished steps, not decreasing.
    pub(super) steps: Vec<u32>,
    pub(super) times: Vec<UnixMicros>,
}

impl RunColumns {
    /// Adds the last point of a tracker. All points must be from the same tracker: the index of a
    /// metric in the tracker is the index of its column.
    pub(super) fn push_point(&mut self, tracker: &StepTracker) {
        let point = tracker.point();
        for name in tracker.names().iter().skip(self.columns.len()) {
            self.columns.push((name.clone(), Vec::new()));
        }
        let index = self.axis.steps.len();
        self.axis.steps.push(point.step);
        self.axis.times.push(point.at);
        for (metric, value) in &point.values {
            push(&mut self.columns[*metric].1, index, *value);
        }
    }

    /// Adds the metrics of a step whose time is unknown.
    pub(crate) fn push<'a>(&mut self, step: u32, metrics: impl Iterator<Item = (&'a str, f64)>) {
        let index = self.axis.steps.len();
        self.axis.steps.push(step);
        self.axis.times.push(0);
        for (name, value) in metrics {
            let known = self.columns.iter().position(|(known, _)| known == name);
            let metric = known.unwrap_or_else(|| {
                self.columns.push((name.to_owned(), Vec::new()));
                self.columns.len() - 1
            });
            push(&mut self.columns[metric].1, index, value);
        }
    }

    /// Returns the points of all metrics.
    pub(crate) fn curves(&self, query: &MetricsQuery) -> BTreeMap<String, MetricCurve> {
        let columns = self.columns.iter().filter(|(_, values)| !values.is_empty());
        let curve = |values: &[f32]| MetricCurve::of(&self.axis, values, query);
        columns.map(|(name, values)| (name.clone(), curve(values))).collect()
    }

    /// Returns the number of points of a metric.
    #[cfg(test)]
    pub(super) fn count(&self, name: &str) -> usize {
        let found = self.columns.iter().find(|(known, _)| known == name);
        found.map_or(0, |(_, values)| values.iter().filter(|value| is_present(**value)).count())
    }
}

/// Sets the value of the point `index`, which is the last.
#[expect(clippy::cast_possible_truncation, reason = "a chart shows fewer digits")]
fn push(values: &mut Vec<f32>, index: usize, value: f64) {
    if values.len() < index {
        values.resize(index, ABSENT);
    }
    let value = if value.is_nan() { f32::NAN } else { value as f32 };
    // A metric has one value per point, also if a program sends its name twice.
    if values.len() == index {
        values.push(value);
    } else {
        values[index] = value;
    }
}
