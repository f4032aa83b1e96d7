//! [`StepTracker`]: groups the requests of a run into training steps.
//!
//! A client may split a batch into several passes, so a step consists of all passes since the
//! previous optimizer step. As in the client, the suffix of a metric states how the values of
//! several passes are combined: `:sum` is their sum, `:max` and `:min` are their maximum and
//! minimum, and other metrics are averaged by the number of tokens.

use super::points::{PointRow, Series};
use crate::record::UnixMicros;

/// Name of the sum of the loss in the result of a pass.
const LOSS_SUM: &str = "loss:sum";
/// Names of the weight by which the loss of a pass is averaged, in order of preference.
const LOSS_WEIGHTS: [&str; 2] = ["weight:sum", "tokens:sum"];
/// Prefix of the metrics of forward passes, so that an evaluation has separate curves.
const FORWARD: &str = "forward: ";

/// Indices of the metrics that the server adds; [`DERIVED`] has their names.
const LOSS_PER_TOKEN: usize = 0;
const TOKENS: usize = 1;
const TOKENS_PER_SECOND: usize = 2;
const COMPUTE_SECONDS: usize = 3;
const QUEUED_SECONDS: usize = 4;
const STEP_SECONDS: usize = 5;
const DERIVED: [&str; 6] = [
    "loss per token",
    "tokens",
    "tokens/s",
    "compute seconds",
    "queued seconds",
    "seconds per step",
];

/// A finished training step, or a forward pass.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct StepPoint {
    /// Number of optimizer steps that are finished.
    pub(crate) step: u32,
    pub(crate) at: UnixMicros,
    /// Values by the index of the metric in [`StepTracker::names`].
    pub(crate) values: Vec<(usize, f64)>,
}

impl StepPoint {
    fn value(&self, metric: usize) -> Option<f64> {
        self.values.iter().find(|(index, _)| *index == metric).map(|(_, value)| *value)
    }
}

/// How the values of several passes are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Combine {
    Sum,
    Max,
    Min,
    Mean,
}

impl Combine {
    fn of(name: &str) -> Self {
        match name.rsplit_once(':').map(|(_, suffix)| suffix) {
            Some("sum") => Self::Sum,
            Some("max") => Self::Max,
            Some("min") => Self::Min,
            _ => Self::Mean,
        }
    }
}

/// The metrics of a run. Points refer to metrics by index, because a run has hundreds of thousands
/// of points.
#[derive(Clone, Debug)]
struct MetricTable {
    names: Vec<String>,
    combine: Vec<Combine>,
    /// Indices of the metrics of each series, by the id of the series.
    series: Vec<(i64, Vec<usize>)>,
    /// For each metric, the index of the metric of forward passes, if it was needed.
    forward: Vec<Option<usize>>,
    /// Indices of [`LOSS_SUM`] and [`LOSS_WEIGHTS`], if the run has them.
    loss_sum: Option<usize>,
    loss_weights: [Option<usize>; 2],
}

impl Default for MetricTable {
    fn default() -> Self {
        let names = DERIVED.map(str::to_owned).to_vec();
        let combine = vec![Combine::Mean; names.len()];
        Self {
            names,
            combine,
            series: Vec::new(),
            forward: Vec::new(),
            loss_sum: None,
            loss_weights: [None; 2],
        }
    }
}

impl MetricTable {
    fn index(&mut self, name: &str) -> usize {
        let known = self.names.iter().position(|known| known == name);
        known.unwrap_or_else(|| {
            let index = self.names.len();
            self.names.push(name.to_owned());
            self.combine.push(Combine::of(name));
            if name == LOSS_SUM {
                self.loss_sum = Some(index);
            }
            if let Some(weight) = LOSS_WEIGHTS.iter().position(|weight| *weight == name) {
                self.loss_weights[weight] = Some(index);
            }
            index
        })
    }

    /// Returns the position of a series in `self.series`.
    fn series(&mut self, id: i64, series: &Series) -> usize {
        let known = self.series.iter().position(|(known, _)| *known == id);
        known.unwrap_or_else(|| {
            let metrics = series.names.iter().map(|name| self.index(name)).collect();
            self.series.push((id, metrics));
            self.series.len() - 1
        })
    }

    /// Returns the index of the metric of forward passes for a metric.
    fn forward(&mut self, metric: usize) -> usize {
        if let Some(Some(index)) = self.forward.get(metric) {
            return *index;
        }
        let index = self.index(&format!("{FORWARD}{}", self.names[metric]));
        self.forward.resize(self.forward.len().max(metric + 1), None);
        self.forward[metric] = Some(index);
        index
    }
}

/// Combines the points of one run, in the order in which they were executed.
#[derive(Clone, Debug, Default)]
pub(crate) struct StepTracker {
    /// Number of finished optimizer steps.
    steps: u32,
    passes: Accumulated,
    last_step_at: Option<UnixMicros>,
    table: MetricTable,
    /// The last point. Its memory is reused, because a run has many points.
    point: StepPoint,
}

/// Passes since the last optimizer step.
#[derive(Clone, Debug, Default)]
struct Accumulated {
    tokens: u64,
    computed: i64,
    queued: i64,
    /// Sum and weight of each metric, by its index.
    metrics: Vec<Option<(f64, f64)>>,
}

impl Accumulated {
    #[expect(clippy::cast_precision_loss, reason = "a mean of metrics")]
    fn add(&mut self, table: &MetricTable, series: usize, row: &PointRow) {
        self.tokens += row.tokens;
        self.computed += row.computed;
        self.queued += row.queued;
        let weight = (row.tokens as f64).max(1.0);
        for (index, value) in table.series[series].1.iter().zip(row.metrics()) {
            if self.metrics.len() <= *index {
                self.metrics.resize(index + 1, None);
            }
            let slot = &mut self.metrics[*index];
            let (sum, total) = slot.unwrap_or((0.0, 0.0));
            *slot = Some(match (table.combine[*index], &slot) {
                (Combine::Sum, _) => (sum + value, 0.0),
                (Combine::Max, Some(_)) => (sum.max(value), 0.0),
                (Combine::Min, Some(_)) => (sum.min(value), 0.0),
                (Combine::Max | Combine::Min, None) => (value, 0.0),
                (Combine::Mean, _) => (sum + value * weight, total + weight),
            });
        }
    }

    /// Moves the metrics of all passes to `values`.
    #[expect(clippy::cast_precision_loss, reason = "values of a chart")]
    fn finish(&mut self, table: &MetricTable, values: &mut Vec<(usize, f64)>) {
        values.clear();
        let value = |slot: (f64, f64)| if slot.1 > 0.0 { slot.0 / slot.1 } else { slot.0 };
        let metrics = &mut self.metrics;
        let find = |index: Option<usize>| metrics.get(index?).copied().flatten().map(value);
        if let Some(loss) = find(table.loss_sum) {
            let weight = table.loss_weights.iter().find_map(|index| find(*index));
            let weight = weight.filter(|weight| *weight > 0.0);
            let per_token = loss / weight.unwrap_or((self.tokens as f64).max(1.0));
            values.push((LOSS_PER_TOKEN, per_token));
        }
        for (index, slot) in metrics.iter_mut().enumerate() {
            if let Some(slot) = slot.take() {
                values.push((index, value(slot)));
            }
        }
        let seconds = self.computed as f64 / 1e6;
        values.push((TOKENS, self.tokens as f64));
        if seconds > 0.0 {
            values.push((TOKENS_PER_SECOND, self.tokens as f64 / seconds));
        }
        values.push((COMPUTE_SECONDS, seconds));
        values.push((QUEUED_SECONDS, self.queued.max(0) as f64 / 1e6));
        self.tokens = 0;
        self.computed = 0;
        self.queued = 0;
    }
}

impl StepTracker {
    /// Returns the names of the metrics by their index.
    pub(crate) fn names(&self) -> &[String] {
        &self.table.names
    }

    /// Adds a request of the series with the id `id`, and returns whether it completes
    /// [`point`](Self::point).
    pub(super) fn add(&mut self, id: i64, series: &Series, row: &PointRow) -> bool {
        if row.error.is_some() {
            return false;
        }
        let metrics = self.table.series(id, series);
        match series.kind.as_str() {
            "forward_backward" => {
                self.passes.add(&self.table, metrics, row);
                false
            }
            "forward" => {
                let mut pass = Accumulated::default();
                pass.add(&self.table, metrics, row);
                pass.finish(&self.table, &mut self.point.values);
                for (index, _) in &mut self.point.values {
                    *index = self.table.forward(*index);
                }
                self.point.step = self.steps;
                self.point.at = row.finished_at;
                true
            }
            "optim_step" => {
                self.steps += 1;
                self.passes.computed += row.computed;
                let values = &mut self.point.values;
                self.passes.finish(&self.table, values);
                values.extend(self.table.series[metrics].1.iter().copied().zip(row.metrics()));
                if let Some(last) = self.last_step_at.replace(row.finished_at) {
                    #[expect(clippy::cast_precision_loss, reason = "values of a chart")]
                    let seconds = row.finished_at.saturating_sub(last) as f64 / 1e6;
                    values.push((STEP_SECONDS, seconds));
                }
                self.point.step = self.steps;
                self.point.at = row.finished_at;
                true
            }
            _ => false,
        }
    }

    /// Returns the point that the last request completed.
    pub(crate) fn point(&self) -> &StepPoint {
        &self.point
    }
}

/// Summary of a run for the list of runs.
#[derive(Clone, Debug, Default)]
pub(crate) struct RunSummary {
    tracker: StepTracker,
    /// Id of the last point that was added.
    pub(crate) last_point: i64,
    pub(crate) steps: u32,
    /// Loss per token of the last step.
    pub(crate) loss: Option<f64>,
    pub(crate) tokens: u64,
    /// Tokens per second of compute time in the last step.
    pub(crate) tokens_per_second: Option<f64>,
    /// Losses of the run at equal distances, at most [`MAX_LOSS_POINTS`].
    pub(crate) losses: Vec<f32>,
    /// Number of steps for each entry of `losses`.
    stride: u32,
    pub(crate) last_at: UnixMicros,
    /// Error of the last request, if it failed.
    pub(crate) error: Option<String>,
}

/// Maximum number of points of the small chart in the list of runs.
const MAX_LOSS_POINTS: usize = 64;

impl RunSummary {
    pub(super) fn add(&mut self, id: i64, series: &Series, row: &PointRow) {
        self.last_point = row.id;
        self.last_at = row.finished_at;
        self.error.clone_from(&row.error);
        self.tokens += row.tokens;
        if !self.tracker.add(id, series, row) || series.kind == "forward" {
            return;
        }
        let point = self.tracker.point();
        self.steps = point.step;
        let loss = point.value(LOSS_PER_TOKEN);
        self.loss = loss.or(self.loss);
        let speed = point.value(TOKENS_PER_SECOND);
        self.tokens_per_second = speed.or(self.tokens_per_second);
        self.stride = self.stride.max(1);
        if let Some(loss) = loss.filter(|_| point.step.is_multiple_of(self.stride)) {
            #[expect(clippy::cast_possible_truncation, reason = "a chart of 64 points")]
            self.losses.push(loss as f32);
        }
        if self.losses.len() > MAX_LOSS_POINTS {
            let mut index = 0;
            self.losses.retain(|_| {
                index += 1;
                index % 2 == 0
            });
            self.stride *= 2;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tinkex_store::history::values_to_blob;

    fn row(id: i64, tokens: u64, values: &[f64]) -> PointRow {
        PointRow {
            id,
            seq: id.unsigned_abs(),
            finished_at: id * 1_000_000,
            queued: 500_000,
            computed: 250_000,
            tokens,
            values: values_to_blob(values.iter().copied()),
            error: None,
        }
    }

    fn series(kind: &str, names: &[&str]) -> Series {
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        Series { run: "a:train:0".into(), kind: kind.to_owned(), names }
    }

    /// Returns the value of a metric of the last point.
    fn value(tracker: &StepTracker, name: &str) -> Option<f64> {
        let metric = tracker.names().iter().position(|known| known == name)?;
        tracker.point().value(metric)
    }

    #[test]
    fn the_passes_of_a_split_batch_are_one_step() {
        let mut tracker = StepTracker::default();
        let pass = series(
            "forward_backward",
            &["loss:sum", "weight:sum", "kl:mean", "ratio:max", "x:min"],
        );
        assert!(!tracker.add(1, &pass, &row(1, 30, &[6.0, 3.0, 1.0, 2.0, 4.0])));
        assert!(!tracker.add(1, &pass, &row(2, 10, &[2.0, 1.0, 5.0, 9.0, -4.0])));
        let step = series("optim_step", &["learning_rate"]);
        assert!(tracker.add(2, &step, &row(3, 0, &[1e-4])));
        assert_eq!((tracker.point().step, tracker.point().at), (1, 3_000_000));
        for (name, expected) in [
            ("loss:sum", 8.0),
            ("loss per token", 2.0),
            ("kl:mean", 2.0),
            ("ratio:max", 9.0),
            ("x:min", -4.0),
            ("learning_rate", 1e-4),
            ("tokens", 40.0),
            ("compute seconds", 0.75),
            ("queued seconds", 1.0),
        ] {
            let found = value(&tracker, name).unwrap();
            assert!((found - expected).abs() < 1e-12, "{name}: {found}");
        }
        assert_eq!(value(&tracker, "seconds per step"), None);
        assert!(tracker.add(2, &step, &row(5, 0, &[1e-4])));
        assert_eq!(value(&tracker, "seconds per step"), Some(2.0));
        assert_eq!(value(&tracker, "loss per token"), None, "there was no pass");
    }

    #[test]
    fn forward_passes_have_curves_of_their_own_and_failures_none() {
        let mut tracker = StepTracker::default();
        let pass = series("forward", &["loss:sum"]);
        assert!(tracker.add(1, &pass, &row(1, 4, &[8.0])));
        assert_eq!(tracker.point().step, 0);
        assert_eq!(value(&tracker, "forward: loss per token"), Some(2.0));
        assert_eq!(value(&tracker, "loss per token"), None);
        let failed = PointRow { error: Some("no".to_owned()), ..row(2, 4, &[]) };
        assert!(!tracker.add(2, &series("optim_step", &[]), &failed));
    }

    #[test]
    fn the_small_chart_of_a_long_run_has_few_points() {
        let mut summary = RunSummary::default();
        let pass = series("forward_backward", &["loss:sum"]);
        let optim = series("optim_step", &[]);
        for step in 0..10_000_i32 {
            let id = i64::from(step) * 2;
            summary.add(1, &pass, &row(id, 1, &[f64::from(step)]));
            summary.add(2, &optim, &row(id + 1, 0, &[]));
        }
        assert_eq!((summary.steps, summary.tokens), (10_000, 10_000));
        assert!((32..=64).contains(&summary.losses.len()), "{}", summary.losses.len());
        assert!(summary.losses.windows(2).all(|pair| pair[0] < pair[1]));
        assert!(summary.losses.last().unwrap() > &9_000.0);
    }
}
