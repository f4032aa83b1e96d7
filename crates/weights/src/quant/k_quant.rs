//! Searches for the scales of groups of weights as llama.cpp does for k-quants: rounds a group with
//! several trial scales, computes the least-squares scale of each rounding, and keeps the scale with
//! the smallest error.
//!
//! The loops run over arrays of [`LANES`] elements, so that the compiler vectorizes them. The
//! functions are always inlined, so that the caller determines the instructions.

use super::round::ties_to_even;

/// Elements that are processed together.
const LANES: usize = 8;

/// A group of weights is approximated by `integer · scale − min`.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AffineFit {
    pub(super) scale: f32,
    /// Not negative.
    pub(super) min: f32,
}

/// Sums over a group in which every term is multiplied by the importance of its value. In the
/// names, `x` is a value and `l` its integer.
#[derive(Clone, Copy, Debug, Default)]
struct ValueSums {
    /// Sum of the importances.
    one: f32,
    x: f32,
    x2: f32,
}

/// Sums that depend on the integers; see [`ValueSums`].
#[derive(Clone, Copy, Debug, Default)]
struct IntegerSums {
    l: f32,
    l2: f32,
    xl: f32,
}

/// Finds the scale and the minimum that approximate `values` with integers from 0 to `max`.
///
/// Minimizes the squared error, in which the importance of a value is its magnitude plus the
/// root mean square of the group: errors of large values have more effect.
#[inline(always)]
pub(super) fn fit_affine<const N: usize>(values: &[f32; N], max: f32) -> AffineFit {
    let [square] = sums(values, values, |x, _| [x * x]);
    let base = (square / N as f32).sqrt();
    let importances = values.map(|value| base + value.abs());
    let [one, x, x2] = sums(values, &importances, |x, importance| {
        [importance, importance * x, importance * x * x]
    });
    let totals = ValueSums { one, x, x2 };
    let low = values.iter().fold(0.0_f32, |low, value| low.min(*value));
    let high = values.iter().fold(values[0], |high, value| high.max(*value));
    let range = high - low;
    if range <= 0.0 {
        return AffineFit { scale: 0.0, min: -low };
    }
    let plain = range / max;
    // The first trial keeps the plain scale, the others use the least-squares scale.
    let mut best = (f32::INFINITY, plain, low);
    for trial in 0_u8..=21 {
        let factor = match trial {
            0 => 1.0 / plain,
            _ => (max - 1.0 + 0.1 * f32::from(trial - 1)) / range,
        };
        // Round with the factor.
        let [l, l2, xl] = sums(values, &importances, |x, importance| {
            let integer = ties_to_even(limit((x - low) * factor, 0.0, max));
            let weighted = importance * integer;
            [weighted, weighted * integer, weighted * x]
        });
        let integers = IntegerSums { l, l2, xl };
        let fit = if trial == 0 { Some((plain, low)) } else { totals.least_squares(integers) };
        let Some((scale, low)) = fit else { continue };
        let error = totals.error(integers, scale, low);
        if trial == 0 || error < best.0 {
            best = (error, scale, low);
        }
    }
    AffineFit { scale: best.1, min: -best.2 }
}

impl ValueSums {
    /// Returns the scale and the offset with the smallest error for given integers, or `None` if
    /// all integers are equal. The offset is not positive, because the stored minimum is its
    /// negative.
    #[inline(always)]
    fn least_squares(self, IntegerSums { l, l2, xl }: IntegerSums) -> Option<(f32, f32)> {
        let determinant = self.one * l2 - l * l;
        if determinant <= 0.0 {
            return None;
        }
        let offset = (l2 * self.x - l * xl) / determinant;
        if offset > 0.0 {
            return Some((xl / l2, 0.0));
        }
        Some(((self.one * xl - self.x * l) / determinant, offset))
    }

    /// Returns the squared error of `scale · integer + offset`, from the expanded square.
    #[inline(always)]
    fn error(self, IntegerSums { l, l2, xl }: IntegerSums, scale: f32, offset: f32) -> f32 {
        let squares = scale * scale * l2 + offset * offset * self.one + self.x2;
        squares + 2.0 * (scale * offset * l - scale * xl - offset * self.x)
    }
}

/// Finds the scale that approximates `values` with integers from `−max` to `max − 1`.
///
/// Minimizes the squared error, in which the importance of a value is its square. The scale may be
/// negative: the value of largest magnitude becomes the negative limit, which is one larger.
#[inline(always)]
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
    let importances = values.map(|value| value * value);
    // The best scale so far, after the amount by which it reduces the squared error.
    let mut best = (0.0, 0.0);
    for step in -9_i8..=9 {
        let factor = -(max + 0.1 * f32::from(step)) / largest;
        let [xl, l2] = sums(values, &importances, |x, importance| {
            let integer = ties_to_even(limit(x * factor, -max, max - 1.0));
            let weighted = importance * integer;
            [weighted * x, weighted * integer]
        });
        if l2 > 0.0 && xl * xl > best.0 * l2 {
            best = (xl * xl / l2, xl / l2);
        }
    }
    // The sums overflow for values that the format cannot hold. Return their plain scale, which
    // overflows f16, so that the caller finds an infinite scale instead of zeros.
    if best.1.is_finite() && best.1 != 0.0 { best.1 } else { -largest / max }
}

/// Returns the sums of the terms that `terms` returns for each value and its importance. `N` must
/// be a multiple of [`LANES`].
#[inline(always)]
fn sums<const N: usize, const SUMS: usize>(
    values: &[f32; N],
    importances: &[f32; N],
    terms: impl Fn(f32, f32) -> [f32; SUMS],
) -> [f32; SUMS] {
    let mut totals = [[0.0_f32; LANES]; SUMS];
    for (values, importances) in values.as_chunks::<LANES>().0.iter().zip(importances.as_chunks().0)
    {
        let importances: &[f32; LANES] = importances;
        for lane in 0..LANES {
            let terms = terms(values[lane], importances[lane]);
            for (total, term) in totals.iter_mut().zip(terms) {
                total[lane] += term;
            }
        }
    }
    totals.map(|lanes| lanes.iter().sum())
}

/// Limits `value`, which must not be NaN. Unlike `f32::clamp`, compiles to two instructions that
/// exist for vectors.
#[inline(always)]
fn limit(value: f32, min: f32, max: f32) -> f32 {
    let value = if value > min { value } else { min };
    if value < max { value } else { max }
}
