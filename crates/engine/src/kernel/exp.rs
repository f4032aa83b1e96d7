//! `exp` without branches, so that the compiler turns a loop of it into vector code.

/// eˣ, within 2 units of the last place; subnormal results are 0.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    // ln 2 in two parts: the first has few bits, so its multiples are exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding and taking away 1.5 · 2²³ leaves the nearest whole number.
    const ROUND: f32 = 12_582_912.0;

    let clamped = x.clamp(-87.33, 88.8);
    let whole = clamped.mul_add(LOG2_E, ROUND) - ROUND;
    let rest = (-whole).mul_add(LN2_LOW, (-whole).mul_add(LN2_HIGH, clamped));
    let mut poly = 1.987_569_1e-4_f32;
    poly = poly.mul_add(rest, 1.398_199_9e-3);
    poly = poly.mul_add(rest, 8.333_452e-3);
    poly = poly.mul_add(rest, 4.166_579_6e-2);
    poly = poly.mul_add(rest, 0.166_666_65);
    poly = poly.mul_add(rest, 0.5);
    let value = (poly * rest).mul_add(rest, rest) + 1.0;
    // 2^whole in two factors, because 2^128 has no float of its own.
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
    fn it_is_close_everywhere_and_right_at_the_edges() {
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
