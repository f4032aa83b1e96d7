//! `Q8_0`: an f16 scale and 32 signed bytes. A weight is its byte times the scale.

use super::round::ties_away;
use super::{inverse, read_f16, to_f16};

/// Weights of a block.
pub(super) const LEN: usize = 32;
/// Bytes of a block.
pub(super) const BYTES: usize = 34;

pub(super) fn decode(block: &[u8; BYTES], out: &mut [f32; LEN]) {
    let [d0, d1, integers @ ..] = block;
    let scale = read_f16([*d0, *d1]);
    for (out, integer) in out.iter_mut().zip(integers) {
        *out = f32::from(integer.cast_signed()) * scale;
    }
}

/// Scales the largest absolute value to 127.
pub(super) fn encode(values: &[f32; LEN], block: &mut [u8; BYTES]) {
    let scale = values.iter().fold(0.0_f32, |max, value| max.max(value.abs())) / 127.0;
    // The integers are computed with the scale before it is rounded to f16, as llama.cpp does.
    let factor = inverse(scale);
    let [d0, d1, integers @ ..] = block;
    [*d0, *d1] = to_f16(scale).0;
    for (integer, value) in integers.iter_mut().zip(values) {
        *integer = ties_away(value * factor).cast_unsigned();
    }
}
