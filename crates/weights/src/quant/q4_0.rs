//! `Q4_0`: an f16 scale and 32 nibbles. A weight is its nibble minus 8, times the scale. The low
//! nibbles of the 16 bytes are weights 0 to 15, the high nibbles weights 16 to 31.

use super::{inverse, read_f16, to_f16};

/// Weights of a block.
pub(super) const LEN: usize = 32;
/// Bytes of a block.
pub(super) const BYTES: usize = 18;

pub(super) fn decode(block: &[u8; BYTES], out: &mut [f32; LEN]) {
    let [d0, d1, nibbles @ ..] = block;
    let scale = read_f16([*d0, *d1]);
    let (low, high) = out.split_at_mut(LEN / 2);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(nibbles) {
        *low = scale * f32::from((byte & 15).cast_signed() - 8);
        *high = scale * f32::from((byte >> 4).cast_signed() - 8);
    }
}

/// Scales the value of largest magnitude to −8.
pub(super) fn encode(values: &[f32; LEN], block: &mut [u8; BYTES]) {
    let mut largest = 0.0_f32;
    for &value in values {
        if value.abs() > largest.abs() {
            largest = value;
        }
    }
    let scale = largest / -8.0;
    // The nibbles are computed with the scale before it is rounded to f16, as llama.cpp does.
    let factor = inverse(scale);
    #[expect(clippy::cast_possible_truncation, reason = "rounds down; casts saturate")]
    #[expect(clippy::cast_sign_loss, reason = "negative sums saturate to 0")]
    let nibble = |value: f32| ((value * factor + 8.5) as u8).min(15);
    let [d0, d1, nibbles @ ..] = block;
    [*d0, *d1] = to_f16(scale).0;
    let (low, high) = values.split_at(LEN / 2);
    for ((low, high), byte) in low.iter().zip(high).zip(nibbles) {
        *byte = nibble(*low) | nibble(*high) << 4;
    }
}
