//! `Q4_K`: two f16 numbers, eight 6-bit scales and minima in 12 bytes, and 256 nibbles.
//!
//! Every 32 weights have a scale and a minimum, which are the 6-bit integers times the first and
//! the second f16 number. A weight is its nibble times the scale, minus the minimum. Of every 32
//! bytes of nibbles, the low nibbles are 32 weights and the high nibbles the next 32.

use super::k_quant::{self, AffineFit};
use super::round::ties_to_even;
use super::{inverse, read_f16, to_f16};

/// Weights of a block.
pub(super) const LEN: usize = 256;
/// Bytes of a block.
pub(super) const BYTES: usize = 144;
/// Weights with one scale and minimum.
const GROUP: usize = 32;
/// Groups of a block.
const GROUPS: usize = LEN / GROUP;
/// Largest 6-bit integer.
const MAX_SCALE: f32 = 63.0;
/// Largest nibble.
const MAX_NIBBLE: f32 = 15.0;

pub(super) fn decode(block: &[u8; BYTES], out: &mut [f32; LEN]) {
    let [d0, d1, m0, m1, rest @ ..] = block;
    let unit = read_f16([*d0, *d1]);
    let min_unit = read_f16([*m0, *m1]);
    let (packed, nibbles) = rest.split_first_chunk().expect("12 bytes of scales");
    let scales = unpack(packed);
    let pairs = out.as_chunks_mut::<{ 2 * GROUP }>().0.iter_mut();
    for ((out, bytes), scales) in
        pairs.zip(nibbles.as_chunks::<GROUP>().0).zip(scales.as_chunks::<2>().0)
    {
        let [low, high] =
            scales.map(|(scale, min)| (unit * f32::from(scale), min_unit * f32::from(min)));
        let (low_out, high_out) = out.split_at_mut(GROUP);
        for ((low_out, high_out), byte) in low_out.iter_mut().zip(high_out).zip(bytes) {
            *low_out = low.0 * f32::from(byte & 15) - low.1;
            *high_out = high.0 * f32::from(byte >> 4) - high.1;
        }
    }
}

/// Fits a scale and a minimum to each group, then rounds them to multiples of common units and
/// computes the nibbles for the rounded ones.
#[inline(always)]
pub(super) fn encode(values: &[f32; LEN], block: &mut [u8; BYTES]) {
    let mut fits = [AffineFit::default(); GROUPS];
    for (fit, values) in fits.iter_mut().zip(values.as_chunks::<GROUP>().0) {
        *fit = k_quant::fit_affine(values, MAX_NIBBLE);
    }
    let largest = |pick: fn(&AffineFit) -> f32| fits.iter().map(pick).fold(0.0_f32, f32::max);
    let max_scale = largest(|fit| fit.scale);
    let max_min = largest(|fit| fit.min);
    let [d0, d1, m0, m1, rest @ ..] = block;
    let unit;
    let min_unit;
    ([*d0, *d1], unit) = to_f16(max_scale / MAX_SCALE);
    ([*m0, *m1], min_unit) = to_f16(max_min / MAX_SCALE);
    let to_scale = MAX_SCALE * inverse(max_scale);
    let to_min = MAX_SCALE * inverse(max_min);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 63")]
    let six_bits = |value: f32| ties_to_even(value).clamp(0.0, MAX_SCALE) as u8;
    let scales = fits.map(|fit| (six_bits(fit.scale * to_scale), six_bits(fit.min * to_min)));
    let (packed, nibbles) = rest.split_first_chunk_mut().expect("12 bytes of scales");
    *packed = pack(&scales);
    let pairs = values.as_chunks::<{ 2 * GROUP }>().0.iter();
    for ((values, bytes), scales) in
        pairs.zip(nibbles.as_chunks_mut::<GROUP>().0).zip(scales.as_chunks::<2>().0)
    {
        let [low, high] = scales
            .map(|(scale, min)| (inverse(unit * f32::from(scale)), min_unit * f32::from(min)));
        let nibble = |value: f32, (factor, min): (f32, f32)| {
            let steps = ((value + min) * factor).clamp(0.0, MAX_NIBBLE);
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 15")]
            let nibble = ties_to_even(steps) as u8;
            nibble
        };
        let (low_values, high_values) = values.split_at(GROUP);
        for ((low_value, high_value), byte) in low_values.iter().zip(high_values).zip(bytes) {
            *byte = nibble(*low_value, low) | nibble(*high_value, high) << 4;
        }
    }
}

/// Returns the scale and the minimum of each group.
///
/// Bytes 0 to 3 hold the scales of groups 0 to 3 in their lower six bits, bytes 4 to 7 the minima.
/// Groups 4 to 7 have their lower four bits in the nibbles of bytes 8 to 11, and their upper two
/// bits in the upper two bits of bytes 0 to 7.
fn unpack(packed: &[u8; 12]) -> [(u8, u8); GROUPS] {
    std::array::from_fn(|group| {
        let at = group % 4;
        let scale = packed[at];
        let min = packed[at + 4];
        let nibbles = packed[at + 8];
        if group < 4 {
            (scale & 63, min & 63)
        } else {
            (nibbles & 15 | scale >> 6 << 4, nibbles >> 4 | min >> 6 << 4)
        }
    })
}

/// Reverses [`unpack`].
fn pack(scales: &[(u8, u8); GROUPS]) -> [u8; 12] {
    let mut packed = [0; 12];
    for at in 0..4 {
        let (scale, min) = scales[at];
        let (high_scale, high_min) = scales[at + 4];
        packed[at] = scale | high_scale >> 4 << 6;
        packed[at + 4] = min | high_min >> 4 << 6;
        packed[at + 8] = high_scale & 15 | high_min << 4;
    }
    packed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packing_scales_restores_them() {
        let scales = [(63, 0), (1, 62), (0, 63), (33, 17), (63, 63), (16, 47), (15, 48), (0, 1)];
        assert_eq!(unpack(&pack(&scales)), scales);
    }
}
