//! Searches for the scales of groups of weights as llama.cpp does for k-quants: rounds a group with
//! several trial scales, computes the least-squares scale of each rounding, and keeps the one with
//! the smallest error.
//!
//! Sums are accumulated in lanes, so that the compiler vectorizes them.

use super::round::ties_to_even;

/// Lanes of an accumulator.
const LANES: usize = 8;

/// A group of weights is approximated by `integer · scale − min`.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AffineFit {
    pub(super) scale: f32,
    /// Not negative.
    pub(super) min: f32,
}

/// Finds the scale and the minimum that approximate `values` with integers from 0 to `max`.
///
/// Minimizes the squared error, weighted by the magnitude of a value plus the group's root mean
/// square: errors of large weights have more effect.
pub(super) fn fit_affine<const N: usize>(values: &[f32; N], max: f32) -> AffineFit {
    let mean_square = sum(|i| values[i] * values[i], N) / N as f32;
    let base = mean_square.sqrt();
    let weights: [f32; N] = std::array::from_fn(|i| base + values[i].abs());
    // In the names of sums, w is a weight of the error, x a value and l an integer.
    let sum_w = sum(|i| weights[i], N);
    let sum_x = sum(|i| weights[i] * values[i], N);
    let low = values.iter().fold(0.0_f32, |low, value| low.min(*value));
    let high = values.iter().fold(values[0], |high, value| high.max(*value));
    let range = high - low;
    if range <= 0.0 {
        return AffineFit { scale: 0.0, min: -low };
    }
    // The weighted squared error of the integers that `scale` and `low` give.
    let error = |scale: f32, low: f32| {
        let factor = 1.0 / scale;
        let squares = |i: usize| {
            let integer = ties_to_even((factor * (values[i] - low)).clamp(0.0, max));
            let difference = scale * integer + low - values[i];
            weights[i] * difference * difference
        };
        sum(squares, N)
    };
    let plain = range / max;
    let mut best = (error(plain, low), plain, low);
    for step in 0_u8..=20 {
        let factor = (max - 1.0 + 0.1 * f32::from(step)) / range;
        let integers: [f32; N] =
            std::array::from_fn(|i| ties_to_even((factor * (values[i] - low)).clamp(0.0, max)));
        let sum_l = sum(|i| weights[i] * integers[i], N);
        let sum_l2 = sum(|i| weights[i] * integers[i] * integers[i], N);
        let sum_xl = sum(|i| weights[i] * integers[i] * values[i], N);
        let determinant = sum_w * sum_l2 - sum_l * sum_l;
        if determinant <= 0.0 {
            continue;
        }
        let mut scale = (sum_w * sum_xl - sum_x * sum_l) / determinant;
        let mut low = (sum_l2 * sum_x - sum_l * sum_xl) / determinant;
        if low > 0.0 {
            // The stored minimum cannot be negative.
            low = 0.0;
            scale = sum_xl / sum_l2;
        }
        let error = error(scale, low);
        if error < best.0 {
            best = (error, scale, low);
        }
    }
    AffineFit { scale: best.1, min: -best.2 }
}

/// Finds the scale that approximates `values` with integers from `−max` to `max − 1`.
///
/// Minimizes the squared error, weighted by the square of a value. The scale may be negative: the
/// value of largest magnitude becomes the negative limit, which is one larger.
pub(super) fn fit_scale<const N: usize>(values: &[f32; N], max: f32) -> f32 {
    /// Magnitude below which all values of a group count as zero.
    const TINY: f32 = 1e-15;
    let mut largest = 0.0_f32;
    for &value in values {
        if value.abs() > largest.abs() {
            largest = value;
        }
    }
    if largest.abs() < TINY {
        return 0.0;
    }
    // The best scale so far, after the amount by which it reduces the squared error.
    let mut best = (0.0, 0.0);
    for step in -9_i8..=9 {
        let factor = -(max + 0.1 * f32::from(step)) / largest;
        let integers: [f32; N] =
            std::array::from_fn(|i| ties_to_even((factor * values[i]).clamp(-max, max - 1.0)));
        let weight = |i: usize| values[i] * values[i];
        let sum_xl = sum(|i| weight(i) * values[i] * integers[i], N);
        let sum_l2 = sum(|i| weight(i) * integers[i] * integers[i], N);
        if sum_l2 > 0.0 && sum_xl * sum_xl > best.0 * sum_l2 {
            best = (sum_xl * sum_xl / sum_l2, sum_xl / sum_l2);
        }
    }
    best.1
}

/// Returns the sum of `term` over `0..count`, which must be a multiple of [`LANES`].
#[inline]
fn sum(term: impl Fn(usize) -> f32, count: usize) -> f32 {
    let mut lanes = [0.0_f32; LANES];
    for first in (0..count).step_by(LANES) {
        for (lane, total) in lanes.iter_mut().enumerate() {
            *total += term(first + lane);
        }
    }
    lanes.iter().sum()
}
