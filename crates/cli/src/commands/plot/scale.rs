//! Axes of a plot: round ticks, a range without outliers, and the smoothed line.

use super::PlotPoint;

/// Axis with round ticks.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Axis {
    pub(super) low: f64,
    pub(super) high: f64,
    pub(super) ticks: Vec<f64>,
    /// Distance of two ticks.
    step: f64,
}

impl Axis {
    /// Creates an axis of about `count` intervals that ends at ticks and covers `low` to `high`.
    pub(super) fn covering(low: f64, high: f64, count: u32) -> Self {
        // A constant value gets an interval around it.
        let high = if high > low { high } else { low + low.abs().max(1e-3) };
        let step = round_step((high - low) / f64::from(count.max(1)));
        let first = (low / step + 1e-9).floor();
        let last = (high / step - 1e-9).ceil();
        let ticks = ticks_between(first, last, step);
        Self { low: first * step, high: last * step, ticks, step }
    }

    /// Creates the axis of steps: from 0 to `last`, with ticks at whole numbers.
    pub(super) fn of_steps(last: f64, count: u32) -> Self {
        let last = last.max(1.0);
        let step = round_step(last / f64::from(count.max(1))).max(1.0);
        let ticks = ticks_between(0.0, (last / step + 1e-9).floor(), step);
        Self { low: 0.0, high: last, ticks, step }
    }

    /// Returns the position of a value between the ends of the axis: 0 to 1, if it is on the axis.
    pub(super) fn position(&self, value: f64) -> f64 {
        (value - self.low) / (self.high - self.low)
    }

    /// Returns a tick with the decimals that distinguish it from the others.
    pub(super) fn label(&self, tick: f64) -> String {
        if self.step < 1e-4 || self.high.abs().max(self.low.abs()) >= 1e6 {
            return if tick == 0.0 { "0".to_owned() } else { format!("{tick:.1e}") };
        }
        let fits = |decimals: &i32| self.step >= 0.999 * 10_f64.powi(-decimals);
        let decimals = (0..4).find(fits).unwrap_or(4);
        let decimals = usize::try_from(decimals).unwrap_or(0);
        format!("{tick:.decimals$}")
    }
}

/// Returns the smallest of 1, 2 and 5 times a power of ten that is at least `rough`.
fn round_step(rough: f64) -> f64 {
    let power = 10_f64.powf(rough.max(f64::MIN_POSITIVE).log10().floor());
    let fits = [1.0, 2.0, 5.0].into_iter().find(|part| part * power >= rough * (1.0 - 1e-9));
    fits.unwrap_or(10.0) * power
}

/// Returns the multiples of `step` from `first * step` to `last * step`, at most 24.
fn ticks_between(first: f64, last: f64, step: f64) -> Vec<f64> {
    let mut ticks = Vec::new();
    let mut index = first;
    while index <= last && ticks.len() < 24 {
        // Adding 0 turns the negative zero, which would be shown as -0, into zero.
        ticks.push(index * step + 0.0);
        index += 1.0;
    }
    ticks
}

/// Returns the range of the vertical axis: the range of the values without outliers. `lines` are the
/// values of each line in order.
///
/// An outlier is a value far outside the range of the running medians. A single extreme value does
/// not change the median of its neighbourhood; a steep beginning or a divergence does, and so stays
/// visible. The range starts at 0 if the lowest value is at most half of the highest.
pub(super) fn robust_range(lines: &[&[PlotPoint]]) -> (f64, f64) {
    let mut low = f64::INFINITY;
    let mut high = f64::NEG_INFINITY;
    for line in lines {
        for median in running_median(line) {
            low = low.min(median);
            high = high.max(median);
        }
    }
    if low > high {
        return (0.0, 1.0);
    }
    // Noise around the medians is shown if it is not much larger than their own range.
    let margin = (high - low).max(high.abs() * 0.05) * 0.25;
    let shown = low - margin..=high + margin;
    let values = lines.iter().flat_map(|line| line.iter()).map(|(_, value)| *value);
    let values: Vec<f64> = values.filter(|value| shown.contains(value)).collect();
    let lowest = values.iter().copied().fold(low, f64::min);
    let highest = values.iter().copied().fold(high, f64::max);
    if lowest >= 0.0 && lowest <= highest * 0.5 { (0.0, highest) } else { (lowest, highest) }
}

/// Returns the median of the neighbourhood of each value: a fiftieth of the values, 5 to 101.
fn running_median(points: &[PlotPoint]) -> Vec<f64> {
    let half = (points.len() / 100).clamp(2, 50);
    let last = points.len().saturating_sub(1);
    let mut window = Vec::with_capacity(2 * half + 1);
    let median = |at: usize| {
        window.clear();
        // The ends are repeated, so that a steep beginning counts as much as a plateau.
        let neighbours = (0..=2 * half).map(|offset| (at + offset).saturating_sub(half).min(last));
        window.extend(neighbours.map(|index| points[index].1));
        *window.select_nth_unstable_by(half, f64::total_cmp).1
    };
    (0..points.len()).map(median).collect()
}

/// Minimum number of points of a line that is smoothed.
const SMOOTHED_FROM: usize = 21;

/// Returns the mean of the neighbourhood of each value: a twentieth of the values, 3 to 101. Values
/// outside the range from `low` to `high` are left out. Returns `None` if there are fewer than
/// [`SMOOTHED_FROM`] points.
///
/// The neighbourhood is symmetric, so the line is not delayed. It is smaller at the ends, so the line
/// starts and ends like the values.
pub(super) fn smooth(points: &[PlotPoint], (low, high): (f64, f64)) -> Option<Vec<PlotPoint>> {
    if points.len() < SMOOTHED_FROM {
        return None;
    }
    let half = (points.len() / 40).clamp(1, 50);
    let mean = |(at, (step, value)): (usize, &PlotPoint)| {
        let half = half.min(at).min(points.len() - 1 - at);
        let neighbours = &points[at - half..=at + half];
        let mut sum = 0.0;
        let mut count = 0.0;
        for (_, value) in neighbours.iter().filter(|(_, value)| (low..=high).contains(value)) {
            sum += value;
            count += 1.0;
        }
        (*step, if count > 0.0 { sum / count } else { *value })
    };
    Some(points.iter().enumerate().map(mean).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(values: &[f64]) -> Vec<PlotPoint> {
        #[expect(clippy::cast_precision_loss, reason = "a few steps")]
        values.iter().enumerate().map(|(step, value)| (step as f64, *value)).collect()
    }

    fn labels(axis: &Axis) -> Vec<String> {
        axis.ticks.iter().map(|tick| axis.label(*tick)).collect()
    }

    #[test]
    fn ticks_are_round_and_cover_the_range() {
        assert_eq!(labels(&Axis::covering(0.0, 4.3, 5)), ["0", "1", "2", "3", "4", "5"]);
        assert_eq!(
            labels(&Axis::covering(0.0, 0.037, 4)),
            ["0.00", "0.01", "0.02", "0.03", "0.04"]
        );
        assert_eq!(
            labels(&Axis::covering(1.92, 2.11, 4)),
            ["1.90", "1.95", "2.00", "2.05", "2.10", "2.15"]
        );
        assert_eq!(labels(&Axis::covering(-0.4, 0.3, 4)), ["-0.4", "-0.2", "0.0", "0.2", "0.4"]);
        assert_eq!(labels(&Axis::covering(0.0, 4e7, 4)), ["0", "1.0e7", "2.0e7", "3.0e7", "4.0e7"]);
        assert_eq!(labels(&Axis::of_steps(117.0, 6)), ["0", "20", "40", "60", "80", "100"]);
        assert_eq!(labels(&Axis::of_steps(3.0, 6)), ["0", "1", "2", "3"]);
        let constant = Axis::covering(2.0, 2.0, 5);
        assert!(constant.low <= 2.0 && constant.high > 2.0, "{constant:?}");
    }

    #[test]
    fn an_outlier_does_not_determine_the_range() {
        let mut values: Vec<f64> = (0..100).map(|step| 2.0 + 0.01 * f64::from(step % 7)).collect();
        values[40] = 900.0;
        let (low, high) = robust_range(&[&points(&values)]);
        assert!(low > 1.9 && high < 2.2, "{low} {high}");
    }

    #[test]
    fn a_steep_beginning_and_a_divergence_stay_visible() {
        let decline: Vec<f64> = (0..200).map(|step| 8.0 * 0.5_f64.powi(step)).collect();
        assert_eq!(robust_range(&[&points(&decline)]), (0.0, 8.0));
        let mut divergence = vec![1.0; 30];
        divergence.extend([50.0; 10]);
        assert_eq!(robust_range(&[&points(&divergence)]), (0.0, 50.0));
        assert_eq!(robust_range(&[]), (0.0, 1.0));
    }

    #[test]
    fn few_points_are_not_smoothed() {
        let range = (0.0, 9.0);
        assert_eq!(smooth(&points(&[1.0; 20]), range), None);
        let mut noisy = vec![1.0; 60];
        noisy[30] = 4.0;
        let smoothed = smooth(&points(&noisy), range).unwrap();
        assert!((smoothed[30].1 - 2.0).abs() < 1e-9, "{smoothed:?}");
        assert_eq!((smoothed[0], smoothed[59]), ((0.0, 1.0), (59.0, 1.0)));
        noisy[30] = 1e300;
        let smoothed = smooth(&points(&noisy), range).unwrap();
        assert!(smoothed.iter().all(|(_, value)| *value == 1.0), "the outlier is left out");
    }
}
