//! Reduces a metric to the points that a chart can show.

use serde::Serialize;

use super::columns::MetricColumn;

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
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct MetricCurve {
    pub(crate) step: Vec<u32>,
    pub(crate) time: Vec<i64>,
    /// `None` for values that are not finite, which JSON cannot represent.
    pub(crate) value: Vec<Option<f64>>,
    /// Mean of the values that each pair of points stands for; empty if all points are returned.
    pub(crate) mean: Vec<Option<f64>>,
}

impl MetricCurve {
    fn push(&mut self, column: &MetricColumn, index: usize) {
        self.step.push(column.steps[index]);
        self.time.push(column.times[index].div_euclid(1_000));
        self.value.push(finite(column.values[index]));
    }

    /// Returns the points of a column. Of more than `query.points` points, each of equal ranges is
    /// represented by its minimum and its maximum, so that no spike is lost.
    pub(crate) fn of(column: &MetricColumn, query: &MetricsQuery) -> Self {
        let start = column.steps.partition_point(|step| *step < query.from);
        let end = column.steps.partition_point(|step| *step <= query.to).max(start);
        let mut curve = Self::default();
        if end - start <= query.points {
            (start..end).for_each(|index| curve.push(column, index));
            return curve;
        }
        let ranges = (query.points / 2).max(1);
        let bound = |range: usize| start + (end - start) * range / ranges;
        for range in 0..ranges {
            let values = &column.values[bound(range)..bound(range + 1)];
            let finite_values = || values.iter().enumerate().filter(|(_, value)| value.is_finite());
            let by_value = |a: &(usize, &f32), b: &(usize, &f32)| a.1.total_cmp(b.1);
            let (min, max) =
                match finite_values().min_by(by_value).zip(finite_values().max_by(by_value)) {
                    Some((min, max)) => (min.0.min(max.0), min.0.max(max.0)),
                    None => (0, values.len() - 1),
                };
            #[expect(clippy::cast_precision_loss, reason = "a mean of metrics")]
            let mean = finite_values().map(|(_, value)| *value).sum::<f32>()
                / finite_values().count() as f32;
            for index in [min, max] {
                curve.push(column, bound(range) + index);
                curve.mean.push(finite(mean));
            }
        }
        curve
    }
}

/// Returns the number with the shortest decimal form that is this value: 0.1, not the 0.10000000149
/// that is nearest to it as `f64`.
fn finite(value: f32) -> Option<f64> {
    if value.is_finite() { value.to_string().parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn column(count: u32, value: impl Fn(u32) -> f32) -> MetricColumn {
        MetricColumn {
            steps: (1..=count).collect(),
            times: (1..=count).map(|step| i64::from(step) * 1_000).collect(),
            values: (1..=count).map(value).collect(),
        }
    }

    #[test]
    fn a_spike_is_never_lost() {
        let column = column(100_000, |step| if step == 77_777 { 50.0 } else { 1.0 });
        let query = MetricsQuery { from: 0, to: u32::MAX, points: 1_000 };
        let curve = MetricCurve::of(&column, &query);
        assert_eq!((curve.step.len(), curve.mean.len()), (1_000, 1_000));
        let spike = curve.value.iter().position(|value| *value == Some(50.0)).unwrap();
        assert_eq!((curve.step[spike], curve.time[spike]), (77_777, 77_777));
        assert!(curve.step.is_sorted());
    }

    #[test]
    fn a_range_is_returned_exactly() {
        let column = column(100_000, |step| if step % 2 == 0 { f32::NAN } else { 1.0 });
        let query = MetricsQuery { from: 500, to: 503, points: 1_000 };
        let curve = MetricCurve::of(&column, &query);
        assert_eq!(curve.step, [500, 501, 502, 503]);
        assert_eq!(curve.value, [None, Some(1.0), None, Some(1.0)]);
        assert!(curve.mean.is_empty());
        let nothing = MetricsQuery { from: 10, to: 5, points: 1_000 };
        assert!(MetricCurve::of(&column, &nothing).step.is_empty());
    }

    #[test]
    fn values_that_are_not_finite_do_not_fail() {
        let column = column(5_000, |_| f32::INFINITY);
        let curve = MetricCurve::of(&column, &MetricsQuery { from: 0, to: 9_999, points: 10 });
        assert_eq!(curve.value, [None; 10]);
    }
}
