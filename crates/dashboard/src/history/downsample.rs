//! [`MetricCurve`]: a metric reduced to the points that a chart can show.

use std::ops::Range;

use super::columns::{PointAxis, is_present};

/// Which points of the metrics of a run to return.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct MetricsQuery {
    /// First step.
    pub(crate) from: u32,
    /// Last step.
    pub(crate) to: u32,
    /// Maximum number of points per metric.
    pub(crate) points: usize,
}

/// Points of a metric. Times are milliseconds since the Unix epoch.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct MetricCurve {
    pub(crate) step: Vec<u32>,
    pub(crate) time: Vec<i64>,
    /// `None` for values that are not finite, which JSON cannot represent.
    pub(crate) value: Vec<Option<f64>>,
    /// Mean of the values that each pair of points stands for; empty if all points are returned.
    pub(crate) mean: Vec<Option<f64>>,
}

impl MetricCurve {
    fn push(&mut self, axis: &PointAxis, values: &[f32], index: usize) {
        self.step.push(axis.steps[index]);
        self.time.push(axis.times[index].div_euclid(1_000));
        self.value.push(finite(values[index]));
    }

    /// Returns the points of a metric. More than `query.points` points are divided into ranges of
    /// equal length, and the minimum and the maximum of each range are returned, so that no spike
    /// is lost.
    pub(super) fn of(axis: &PointAxis, values: &[f32], query: &MetricsQuery) -> Self {
        let steps = &axis.steps[..values.len()];
        let start = steps.partition_point(|step| *step < query.from);
        let end = steps.partition_point(|step| *step <= query.to).max(start);
        let mut curve = Self::default();
        // The first `query.points + 1` values decide whether to downsample: counting all values of
        // a long run would take longer than reducing them.
        let present = (start..end).filter(|index| is_present(values[*index]));
        if present.take(query.points + 1).count() <= query.points {
            let all = (start..end).filter(|index| is_present(values[*index]));
            all.for_each(|index| curve.push(axis, values, index));
            return curve;
        }
        let ranges = (query.points / 2).max(1);
        let bound = |range: usize| start + (end - start) * range / ranges;
        for range in 0..ranges {
            let Some((min, max, mean)) = extremes(values, bound(range)..bound(range + 1)) else {
                continue;
            };
            for index in [min.min(max), min.max(max)] {
                curve.push(axis, values, index);
                curve.mean.push(mean.and_then(finite));
            }
        }
        curve
    }
}

/// Returns the indices of the minimum and of the maximum of a range, and the mean. If no value is
/// finite, returns the indices of the first and the last value without a mean. Returns `None` if
/// the range has no value.
#[expect(clippy::cast_precision_loss, reason = "a mean of metrics")]
fn extremes(values: &[f32], range: Range<usize>) -> Option<(usize, usize, Option<f32>)> {
    let mut min = None;
    let mut max = None;
    let mut ends = None;
    let mut sum = 0.0_f32;
    let mut count = 0_u32;
    for index in range {
        let value = values[index];
        if !is_present(value) {
            continue;
        }
        ends = Some((ends.map_or(index, |(first, _)| first), index));
        if !value.is_finite() {
            continue;
        }
        if min.is_none_or(|(_, least)| value < least) {
            min = Some((index, value));
        }
        if max.is_none_or(|(_, most)| value >= most) {
            max = Some((index, value));
        }
        sum += value;
        count += 1;
    }
    match (min, max) {
        (Some((min, _)), Some((max, _))) => Some((min, max, Some(sum / count as f32))),
        _ => ends.map(|(first, last)| (first, last, None)),
    }
}

/// Converts a value to the `f64` with the same shortest decimal form: the `f32` 0.1 becomes 0.1,
/// not 0.10000000149. Returns `None` if the value is not finite.
fn finite(value: f32) -> Option<f64> {
    if value.is_finite() { value.to_string().parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::super::RunColumns;
    use super::*;

    /// Returns the curve of a metric whose value at each of `count` steps is `value`.
    fn curve(count: u32, value: impl Fn(u32) -> f32, query: (u32, u32, usize)) -> MetricCurve {
        let axis = PointAxis {
            steps: (1..=count).collect(),
            times: (1..=count).map(|step| i64::from(step) * 1_000).collect(),
        };
        let values: Vec<f32> = (1..=count).map(value).collect();
        let (from, to, points) = query;
        MetricCurve::of(&axis, &values, &MetricsQuery { from, to, points })
    }

    #[test]
    fn a_spike_is_never_lost() {
        let spike = |step| if step == 77_777 { 50.0 } else { 1.0 };
        let curve = curve(100_000, spike, (0, u32::MAX, 1_000));
        assert_eq!((curve.step.len(), curve.mean.len()), (1_000, 1_000));
        let spike = curve.value.iter().position(|value| *value == Some(50.0)).unwrap();
        assert_eq!((curve.step[spike], curve.time[spike]), (77_777, 77_777));
        assert!((curve.mean[spike].unwrap() - 1.245).abs() < 1e-3, "{:?}", curve.mean[spike]);
        assert!(curve.step.is_sorted());
    }

    #[test]
    fn a_range_is_returned_exactly() {
        let value = |step| if step % 2 == 0 { f32::NAN } else { 1.0 };
        let some = curve(100_000, value, (500, 503, 1_000));
        assert_eq!(some.step, [500, 501, 502, 503]);
        assert_eq!(some.value, [None, Some(1.0), None, Some(1.0)]);
        assert!(some.mean.is_empty());
        assert!(curve(100_000, value, (10, 5, 1_000)).step.is_empty());
    }

    #[test]
    fn values_that_are_not_finite_do_not_fail() {
        assert_eq!(curve(5_000, |_| f32::INFINITY, (0, 9_999, 10)).value, [None; 10]);
    }

    /// A metric of few steps, such as an evaluation, is returned with all of its points.
    #[test]
    fn points_without_the_metric_do_not_count() {
        let mut columns = RunColumns::default();
        for step in 1..=10_000 {
            let evaluation = (step % 1_000 == 0).then_some(("eval_loss", 2.0));
            columns.push(step, [("loss", 1.0)].into_iter().chain(evaluation));
        }
        let curves = columns.curves(&MetricsQuery { from: 0, to: u32::MAX, points: 100 });
        let steps = |name: &str| &curves[name].step;
        assert_eq!((steps("loss").len(), steps("eval_loss").len()), (100, 10));
        assert_eq!(steps("eval_loss")[0], 1_000);
    }
}
