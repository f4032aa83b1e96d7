//! `Q6_K`: 256 6-bit integers, sixteen 8-bit scales and an f16 number.
//!
//! Every 16 weights have a scale, which is the signed 8-bit integer times the f16 number. A weight
//! is its 6-bit integer minus 32, times the scale. The integers of each half of the block are
//! spread over 64 bytes with their lower four bits and 32 bytes with their upper two bits.

use super::k_quant;
use super::round::ties_to_even;
use super::{inverse, read_f16, to_f16};

/// Weights of a block.
pub(super) const LEN: usize = 256;
/// Bytes of a block.
pub(super) const BYTES: usize = 210;
/// Weights with one scale.
const GROUP: usize = 16;
/// Groups of a block.
const GROUPS: usize = LEN / GROUP;
/// Offset of the stored integers.
const OFFSET: f32 = 32.0;

pub(super) fn decode(block: &[u8; BYTES], out: &mut [f32; LEN]) {
    let (low, rest) = block.split_first_chunk::<128>().expect("lower bits");
    let (high, rest) = rest.split_first_chunk::<64>().expect("upper bits");
    let (scales, unit) = rest.split_first_chunk::<GROUPS>().expect("scales");
    let unit = read_f16([unit[0], unit[1]]);
    let halves = low.as_chunks::<64>().0.iter().zip(high.as_chunks::<32>().0);
    for (half, (low, high)) in halves.enumerate() {
        for quarter in 0..4 {
            // Quarters 0 and 1 have the low nibbles of the first and the last 32 bytes of `low`,
            // quarters 2 and 3 the high nibbles. Each quarter has two bits of every byte of `high`.
            let nibbles = &low[quarter % 2 * 32..][..32];
            let first = half * 128 + quarter * 32;
            for group in 0..2 {
                let scale = scales[first / GROUP + group].cast_signed();
                let scale = unit * f32::from(scale);
                for i in group * GROUP..(group + 1) * GROUP {
                    let nibble = nibbles[i] >> (quarter / 2 * 4) & 15;
                    let bits = high[i] >> (quarter * 2) & 3;
                    let integer = (nibble | bits << 4).cast_signed() - 32;
                    out[first + i] = scale * f32::from(integer);
                }
            }
        }
    }
}

/// Fits a scale to each group, then rounds the scales to multiples of a common unit and computes
/// the integers for the rounded ones.
#[inline(always)]
pub(super) fn encode(values: &[f32; LEN], block: &mut [u8; BYTES]) {
    let mut fits = [0.0_f32; GROUPS];
    for (fit, values) in fits.iter_mut().zip(values.as_chunks::<GROUP>().0) {
        *fit = k_quant::fit_scale(values, OFFSET);
    }
    let mut largest = 0.0_f32;
    for fit in fits {
        if fit.abs() > largest.abs() {
            largest = fit;
        }
    }
    let (low, rest) = block.split_first_chunk_mut::<128>().expect("lower bits");
    let (high, rest) = rest.split_first_chunk_mut::<64>().expect("upper bits");
    let (scales, unit_bytes) = rest.split_first_chunk_mut::<GROUPS>().expect("scales");
    // The largest scale becomes −128.
    let (bytes, unit) = to_f16(largest / -128.0);
    unit_bytes.copy_from_slice(&bytes);
    let to_scale = -128.0 * inverse(largest);
    let mut integers = [0_u8; LEN];
    let groups = values.as_chunks::<GROUP>().0.iter().zip(integers.as_chunks_mut::<GROUP>().0);
    for (((values, integers), scale), fit) in groups.zip(scales).zip(fits) {
        #[expect(clippy::cast_possible_truncation, reason = "within i8")]
        let rounded = ties_to_even((fit * to_scale).clamp(-128.0, 127.0)) as i8;
        *scale = rounded.cast_unsigned();
        let factor = inverse(unit * f32::from(rounded));
        for (integer, value) in integers.iter_mut().zip(values) {
            let steps = ties_to_even((value * factor).clamp(-OFFSET, OFFSET - 1.0));
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 63")]
            let stored = (steps + OFFSET) as u8;
            *integer = stored;
        }
    }
    for half in 0..2 {
        let quarters = &integers[half * 128..][..128];
        for i in 0..32 {
            let [a, b, c, d] = [0, 32, 64, 96].map(|quarter| quarters[quarter + i]);
            low[half * 64 + i] = a & 15 | c << 4;
            low[half * 64 + 32 + i] = b & 15 | d << 4;
            high[half * 32 + i] = a >> 4 | b >> 4 << 2 | c >> 4 << 4 | d >> 4 << 6;
        }
    }
}
