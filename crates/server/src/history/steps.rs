//! [`StepTracker`]: combines the requests of a run to training steps.
//!
//! A client may split a batch into several passes, so a step has the passes since the previous
//! optimizer step. As for the client, the suffix of a metric states how the values of several passes
//! are combined: `:sum` adds them, `:max` and `:min` choose one, and others are averaged by the
//! number of tokens.

use std::collections::BTreeMap;

use super::reader::PointRow;
use crate::record::UnixMicros;

/// Name of the sum of the loss in the result of a pass.
const LOSS_SUM: &str = "loss:sum";
/// Names of the weight by which the loss of a pass is averaged, in order of preference.
const LOSS_WEIGHTS: [&str; 2] = ["weight:sum", "tokens:sum"];
/// Names of the metrics that every step has.
pub(crate) const LOSS_PER_TOKEN: &str = "loss per token";
const TOKENS: &str = "tokens";
const TOKENS_PER_SECOND: &str = "tokens/s";
const COMPUTE_SECONDS: &str = "compute seconds";
const QUEUED_SECONDS: &str = "queued seconds";
const STEP_SECONDS: &str = "seconds per step";

/// A finished training step, or a forward pass.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StepPoint {
    /// Number of optimizer steps that are finished.
    pub(crate) step: u32,
    pub(crate) at: UnixMicros,
    pub(crate) metrics: BTreeMap<String, f64>,
}

/// Combines the points of one run, in the order in which they were executed.
#[derive(Clone, Debug, Default)]
pub(crate) struct StepTracker {
    /// Number of finished optimizer steps.
    steps: u32,
    passes: Accumulated,
    last_step_at: Option<UnixMicros>,
}

/// Passes since the last optimizer step.
#[derive(Clone, Debug, Default)]
struct Accumulated {
    tokens: u64,
    computed: i64,
    queued: i64,
    /// Sum and weight of each metric.
    metrics: BTreeMap<String, (f64, f64)>,
}

impl Accumulated {
    #[expect(clippy::cast_precision_loss, reason = "a mean of metrics")]
    fn add(&mut self, names: &[String], row: &PointRow) {
        self.tokens += row.tokens;
        self.computed += row.computed;
        self.queued += row.queued;
        let weight = (row.tokens as f64).max(1.0);
        for (name, value) in names.iter().zip(row.metrics()) {
            let entry = self.metrics.entry(name.clone());
            let new = match name.rsplit_once(':').map(|(_, suffix)| suffix) {
                Some("sum") => (value, 0.0),
                Some("max" | "min") => (value, -1.0),
                _ => (value * weight, weight),
            };
            entry
                .and_modify(|(sum, total)| match name.rsplit_once(':').map(|(_, s)| s) {
                    Some("max") => *sum = sum.max(value),
                    Some("min") => *sum = sum.min(value),
                    _ => (*sum, *total) = (*sum + new.0, *total + new.1),
                })
                .or_insert(new);
        }
    }

    /// Returns the metrics of all passes.
    #[expect(clippy::cast_precision_loss, reason = "values of a chart")]
    fn finish(self) -> BTreeMap<String, f64> {
        let mut all: BTreeMap<String, f64> = self
            .metrics
            .into_iter()
            .map(|(name, (sum, weight))| (name, if weight > 0.0 { sum / weight } else { sum }))
            .collect();
        if let Some(loss) = all.get(LOSS_SUM) {
            let weight = LOSS_WEIGHTS.iter().find_map(|name| all.get(*name));
            let weight = weight.copied().filter(|weight| *weight > 0.0);
            let per_token = loss / weight.unwrap_or((self.tokens as f64).max(1.0));
            all.insert(LOSS_PER_TOKEN.to_owned(), per_token);
        }
        let seconds = self.computed as f64 / 1e6;
        all.insert(TOKENS.to_owned(), self.tokens as f64);
        if seconds > 0.0 {
            all.insert(TOKENS_PER_SECOND.to_owned(), self.tokens as f64 / seconds);
        }
        all.insert(COMPUTE_SECONDS.to_owned(), seconds);
        all.insert(QUEUED_SECONDS.to_owned(), self.queued.max(0) as f64 / 1e6);
        all
    }
}

impl StepTracker {
    /// Adds a request and returns the point that it completes, if any.
    pub(crate) fn add(
        &mut self,
        kind: &str,
        names: &[String],
        row: &PointRow,
    ) -> Option<StepPoint> {
        if row.error.is_some() {
            return None;
        }
        match kind {
            "forward_backward" => {
                self.passes.add(names, row);
                None
            }
            "forward" => {
                let mut pass = Accumulated::default();
                pass.add(names, row);
                let metrics = pass.finish().into_iter();
                // A forward pass is an evaluation: its curves are not those of the training.
                let metrics = metrics.map(|(name, value)| (format!("forward: {name}"), value));
                Some(StepPoint {
                    step: self.steps,
                    at: row.finished_at,
                    metrics: metrics.collect(),
                })
            }
            "optim_step" => {
                self.steps += 1;
                let mut passes = std::mem::take(&mut self.passes);
                passes.computed += row.computed;
                let mut metrics = passes.finish();
                metrics.extend(names.iter().cloned().zip(row.metrics()));
                if let Some(last) = self.last_step_at.replace(row.finished_at) {
                    #[expect(clippy::cast_precision_loss, reason = "values of a chart")]
                    let seconds = row.finished_at.saturating_sub(last) as f64 / 1e6;
                    metrics.insert(STEP_SECONDS.to_owned(), seconds);
                }
                Some(StepPoint { step: self.steps, at: row.finished_at, metrics })
            }
            _ => None,
        }
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
    /// Losses of the run at equal distances, at most [`SPARK_POINTS`].
    pub(crate) losses: Vec<f32>,
    /// Number of steps for each entry of `losses`.
    stride: u32,
    pub(crate) last_at: UnixMicros,
    /// Error of the last request, if it failed.
    pub(crate) error: Option<String>,
}

/// Maximum number of points of the small chart in the list of runs.
const SPARK_POINTS: usize = 64;

impl RunSummary {
    pub(crate) fn add(&mut self, kind: &str, names: &[String], row: &PointRow) {
        self.last_point = row.id;
        self.last_at = row.finished_at;
        self.error.clone_from(&row.error);
        self.tokens += row.tokens;
        let Some(point) = self.tracker.add(kind, names, row) else { return };
        if kind == "forward" {
            return;
        }
        self.steps = point.step;
        let loss = point.metrics.get(LOSS_PER_TOKEN).copied();
        self.loss = loss.or(self.loss);
        let speed = point.metrics.get(TOKENS_PER_SECOND).copied();
        self.tokens_per_second = speed.or(self.tokens_per_second);
        self.stride = self.stride.max(1);
        if let Some(loss) = loss.filter(|_| point.step.is_multiple_of(self.stride)) {
            #[expect(clippy::cast_possible_truncation, reason = "a chart of 64 points")]
            self.losses.push(loss as f32);
        }
        if self.losses.len() > SPARK_POINTS {
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
    use crate::history::values_to_blob;

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

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn the_passes_of_a_split_batch_are_one_step() {
        let mut tracker = StepTracker::default();
        let pass = names(&["loss:sum", "weight:sum", "kl:mean", "ratio:max"]);
        assert_eq!(
            tracker.add("forward_backward", &pass, &row(1, 30, &[6.0, 3.0, 1.0, 2.0])),
            None
        );
        assert_eq!(
            tracker.add("forward_backward", &pass, &row(2, 10, &[2.0, 1.0, 5.0, 9.0])),
            None
        );
        let step = names(&["learning_rate"]);
        let point = tracker.add("optim_step", &step, &row(3, 0, &[1e-4])).unwrap();
        assert_eq!((point.step, point.at), (1, 3_000_000));
        for (name, value) in [
            ("loss:sum", 8.0),
            (LOSS_PER_TOKEN, 2.0),
            ("kl:mean", 2.0),
            ("ratio:max", 9.0),
            ("learning_rate", 1e-4),
            (TOKENS, 40.0),
            (COMPUTE_SECONDS, 0.75),
            (QUEUED_SECONDS, 1.0),
        ] {
            assert!((point.metrics[name] - value).abs() < 1e-12, "{name}: {:?}", point.metrics);
        }
        assert!(!point.metrics.contains_key(STEP_SECONDS));
        let next = tracker.add("optim_step", &step, &row(5, 0, &[1e-4])).unwrap();
        assert_eq!((next.step, next.metrics[STEP_SECONDS]), (2, 2.0));
        assert!(!next.metrics.contains_key(LOSS_PER_TOKEN), "there was no pass");
    }

    #[test]
    fn forward_passes_have_curves_of_their_own_and_failures_none() {
        let mut tracker = StepTracker::default();
        let pass = names(&["loss:sum"]);
        let point = tracker.add("forward", &pass, &row(1, 4, &[8.0])).unwrap();
        assert_eq!((point.step, point.metrics["forward: loss per token"]), (0, 2.0));
        let failed = PointRow { error: Some("no".to_owned()), ..row(2, 4, &[]) };
        assert_eq!(tracker.add("optim_step", &[], &failed), None);
    }

    #[test]
    fn the_small_chart_of_a_long_run_has_few_points() {
        let mut summary = RunSummary::default();
        let pass = names(&["loss:sum"]);
        for step in 0..10_000_i32 {
            let id = i64::from(step) * 2;
            summary.add("forward_backward", &pass, &row(id, 1, &[f64::from(step)]));
            summary.add("optim_step", &[], &row(id + 1, 0, &[]));
        }
        assert_eq!((summary.steps, summary.tokens), (10_000, 10_000));
        assert!((32..=64).contains(&summary.losses.len()), "{}", summary.losses.len());
        assert!(summary.losses.windows(2).all(|pair| pair[0] < pair[1]));
        assert!(summary.losses.last().unwrap() > &9_000.0);
    }
}
