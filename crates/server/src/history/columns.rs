//! [`RunColumns`]: the metrics of a run as columns.

use std::collections::BTreeMap;

use super::steps::StepPoint;
use crate::record::UnixMicros;

/// Metrics of the steps of a run.
#[derive(Clone, Debug, Default)]
pub(crate) struct RunColumns {
    /// Columns by the name of the metric.
    pub(crate) columns: BTreeMap<String, MetricColumn>,
}

/// One metric; all vectors have the same length.
#[derive(Clone, Debug, Default)]
pub(crate) struct MetricColumn {
    /// Numbers of finished steps, not decreasing.
    pub(crate) steps: Vec<u32>,
    pub(crate) times: Vec<UnixMicros>,
    pub(crate) values: Vec<f32>,
}

impl RunColumns {
    #[expect(clippy::cast_possible_truncation, reason = "a chart shows fewer digits")]
    pub(crate) fn push(&mut self, point: StepPoint) {
        for (name, value) in point.metrics {
            let column = self.columns.entry(name).or_default();
            column.steps.push(point.step);
            column.times.push(point.at);
            column.values.push(value as f32);
        }
    }
}
