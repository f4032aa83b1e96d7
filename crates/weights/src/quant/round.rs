//! Rounding to small integers.
//!
//! `f32::round` and `f32::round_ties_even` are function calls on x86-64 without SSE 4.1. These
//! functions compile to a few instructions that the compiler vectorizes.

/// Rounds to the nearest integer, ties to even. `value` must be within ±2²².
#[inline(always)]
pub(super) fn ties_to_even(value: f32) -> f32 {
    // 1.5 · 2²³: the sum has no fractional bits, so the addition rounds.
    const MAGIC: f32 = 12_582_912.0;
    (value + MAGIC) - MAGIC
}

/// Rounds to the nearest integer, ties away from zero, and saturates at the limits of i8.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "the integer part; casts saturate")]
pub(super) fn ties_away(value: f32) -> i8 {
    let whole = value as i32;
    // Exact for values that do not saturate: the fraction consists of the lowest bits of `value`.
    let fraction = value - whole as f32;
    let step = i32::from(fraction >= 0.5) - i32::from(fraction <= -0.5);
    whole.saturating_add(step).clamp(i8::MIN.into(), i8::MAX.into()) as i8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::cast_possible_truncation, reason = "the reference saturates as well")]
    fn results_equal_those_of_the_standard_library() {
        for step in -5200_i16..5200 {
            for value in [f32::from(step) / 40.0, f32::from(step) / 40.0 + 1e-7] {
                assert_eq!(ties_to_even(value), value.round_ties_even(), "{value}");
                assert_eq!(ties_away(value), value.round() as i8, "{value}");
            }
        }
        for value in [0.499_999_97, -0.499_999_97, 1e30, -1e30, f32::INFINITY, 1e-40] {
            assert_eq!(ties_away(value), value.round() as i8, "{value}");
        }
    }
}
