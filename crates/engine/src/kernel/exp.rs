//! Branch-free `exp`, which the compiler can vectorize in loops.

/// Returns eˣ with an error of at most 2 units in the last place. Subnormal results are flushed to
/// 0.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    // ln 2 as a sum of two parts. The first has few significant bits, so its multiples are exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding and subtracting 1.5 · 2²³ rounds to the nearest integer.
    const ROUND: f32 = 12_582_912.0;

    let clamped = x.clamp(-87.33, 88.8);
    // eˣ = 2^whole · e^rest, with |rest| ≤ ln 2 / 2.
    let whole = clamped.mul_add(LOG2_E, ROUND) - ROUND;
    let rest = (-whole).mul_add(LN2_LOW, (-whole).mul_add(LN2_HIGH, clamped));
    let mut poly = 1.987_569_1e-4_f32;
    poly = poly.mul_add(rest, 1.398_199_9e-3);
    poly = poly.mul_add(rest, 8.333_452e-3);
    poly = poly.mul_add(rest, 4.166_579_6e-2);
    poly = poly.mul_add(rest, 0.166_666_65);
    poly = poly.mul_add(rest, 0.5);
    let value = (poly * rest).mul_add(rest, rest) + 1.0;
    // 2^whole as two factors, because 2^128 is not representable in f32.
    #[expect(clippy::cast_possible_truncation, reason = "whole is between -126 and 128, or NaN")]
    let whole = whole as i32;
    let half = whole >> 1;
    let value = value * power_of_two(half) * power_of_two(whole - half);
    if x < -87.33 { 0.0 } else { value }
}

#[inline(always)]
fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits((exponent + 127).cast_unsigned() << 23)
}

#[cfg(test)]
mod tests {
    use super::exp;

    #[test]
    fn the_error_is_below_two_ulps_and_special_values_are_exact() {
        let mut x = -87.3_f32;
        while x < 88.7 {
            let expected = f64::from(x).exp();
            let error = (f64::from(exp(x)) - expected).abs() / expected;
            assert!(error < 2.5e-7, "exp({x}): off by {error:e}");
            x += 0.003_7;
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-100.0), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(89.0), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
    }
}
