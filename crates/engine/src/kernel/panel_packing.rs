//! Packs rows of weights into the blocks of a panel.
//!
//! Loading a model packs all of its weights, and should take no longer than reading its file. The
//! packing of bf16, `Q8_0`, `Q4_K` and `Q6_K` therefore transposes the words of sixteen rows and computes
//! all lanes at once. The code is safe Rust, compiled for every instruction set.

#![expect(unsafe_code, reason = "calls functions that require a detected instruction set")]

use half::f16;

use super::isa::{Isa, Level};
use super::panel_format::{PanelFormat, Q4_0, Q4K, Q6K, Q8_0};
use super::row_ops::{for_each_isa, narrow_pairs, transpose};
use super::weight_format::bytes_at;
use super::{PANEL, WeightFormat};

/// A word of each of the sixteen rows of a panel.
type Lanes = [u32; PANEL];

/// Size in bytes of sixteen words.
const LANES_BYTES: usize = PANEL * size_of::<u32>();

impl WeightFormat {
    /// Packs up to sixteen stored rows of `row_bytes` bytes, one after the other, into the blocks of
    /// a panel, which must be zeroed: lanes without a row stay 0. The format must
    /// [pack stored rows](Self::packs_stored_rows).
    pub(super) fn pack_stored<'a>(
        self,
        isa: Isa,
        rows: &[u8],
        row_bytes: usize,
        panel: impl Iterator<Item = &'a mut [u8]>,
    ) {
        let Some(format) = self.block_format() else {
            return pack_words(isa, rows, row_bytes, panel);
        };
        for (index, panel) in panel.enumerate() {
            let at = index * format.block_bytes();
            match self {
                Self::F32 | Self::F16 | Self::Bf16 => {}
                Self::Q4K => pack_q4_k(isa, rows, row_bytes, at, panel),
                Self::Q6K => pack_q6_k(isa, rows, row_bytes, at, panel),
                Self::Q8_0 => pack_q8_0(isa, rows, row_bytes, at, panel),
                Self::Q4_0 => {
                    for (lane, row) in rows.chunks_exact(row_bytes).enumerate() {
                        pack_q4_0(&row[at..][..format.block_bytes()], lane, panel);
                    }
                }
            }
        }
    }

    /// Packs up to sixteen rows of `cols` f32 weights, stored one after the other, into the blocks
    /// of a panel. `F16` and `Bf16` round to nearest, ties to even. The format must not be a
    /// quantized one.
    pub(super) fn pack_values<'a>(
        self,
        isa: Isa,
        rows: &[f32],
        cols: usize,
        mut panel: impl Iterator<Item = &'a mut [u8]>,
    ) {
        let block_bytes = self.block_bytes();
        let block_inputs = self.block_inputs();
        // Transpose squares of sixteen rows and sixteen inputs.
        for col in (0..cols).step_by(PANEL) {
            let width = PANEL.min(cols - col);
            let mut lanes = [0.0; PANEL * PANEL];
            let mut values = [0.0; PANEL * PANEL];
            for (row, to) in rows.chunks_exact(cols).zip(lanes.chunks_exact_mut(PANEL)) {
                to[..width].copy_from_slice(&row[col..][..width]);
            }
            transpose(isa, &lanes, &mut values);
            let mut packed = [0; PANEL * PANEL * size_of::<f32>()];
            match self {
                Self::F32 => packed.copy_from_slice(bytemuck::cast_slice(&values)),
                Self::Bf16 => narrow_pairs(isa, &values, &mut packed),
                _ => {
                    for (out, value) in packed.as_chunks_mut::<2>().0.iter_mut().zip(values) {
                        *out = f16::from_f32(value).to_le_bytes();
                    }
                }
            }
            let blocks = panel.by_ref().take(width.div_ceil(block_inputs));
            for (out, block) in blocks.zip(packed.chunks_exact(block_bytes)) {
                out.copy_from_slice(block);
            }
        }
    }
}

/// Packs rows into blocks that consist of one word of each row: bf16, with two weights in a word.
/// The last word of a row of odd length is filled with 0.
fn pack_words<'a>(
    isa: Isa,
    rows: &[u8],
    row_bytes: usize,
    mut panel: impl Iterator<Item = &'a mut [u8]>,
) {
    let mut square = [0; PANEL * LANES_BYTES];
    let mut packed = [0; PANEL * LANES_BYTES];
    for at in (0..row_bytes).step_by(LANES_BYTES) {
        let width = LANES_BYTES.min(row_bytes - at);
        let rows = rows.chunks_exact(row_bytes);
        for (row, to) in rows.zip(square.as_chunks_mut::<LANES_BYTES>().0) {
            if let Some(row) = row[at..].first_chunk() {
                *to = *row;
            } else {
                to.fill(0);
                to[..width].copy_from_slice(&row[at..]);
            }
        }
        transpose_words(isa, &square, &mut packed);
        let blocks = panel.by_ref().take(width.div_ceil(size_of::<u32>()));
        for (out, block) in blocks.zip(packed.chunks_exact(LANES_BYTES)) {
            out.copy_from_slice(block);
        }
    }
}

for_each_isa! {
    /// Transposes sixteen rows of sixteen words.
    fn transpose_words(
        from: &[u8; PANEL * LANES_BYTES],
        to: &mut [u8; PANEL * LANES_BYTES],
    ) {
        let from = from.as_chunks::<4>().0;
        let to = to.as_chunks_mut::<4>().0;
        for k in 0..PANEL {
            for lane in 0..PANEL {
                to[k * PANEL + lane] = from[lane * PANEL + k];
            }
        }
    }

    /// Packs the `Q8_0` blocks at offset `at` of up to sixteen rows. A block has the scale (f16),
    /// then 32 signed bytes.
    fn pack_q8_0(rows: &[u8], row_bytes: usize, at: usize, panel: &mut [u8]) {
        let mut words = [[0; PANEL]; Q8_0::PART_CHUNKS];
        for (lane, row) in rows.chunks_exact(row_bytes).enumerate() {
            panel[2 * lane..][..2].copy_from_slice(&row[at..][..2]);
            let numbers: [u8; 4 * Q8_0::PART_CHUNKS] = bytes_at(row, at + 2);
            for (words, bytes) in words.iter_mut().zip(numbers.as_chunks().0) {
                // Adds 128, modulo 256.
                words[lane] = u32::from_le_bytes(bytes.map(|byte| byte ^ Q8_0::ZERO));
            }
        }
        for (chunk, words) in words.iter().enumerate() {
            store_lanes(panel, Q8_0::chunk_offset(0, chunk), words);
        }
    }

    /// Packs the `Q4_K` blocks at offset `at` of up to sixteen rows. A block has the scale and the
    /// minimum scale (f16), the factors of 8 parts (12 bytes), and 128 bytes. Of every 32 bytes, the
    /// lower halves are the weights of one part, and the upper halves are the weights of the next
    /// part.
    fn pack_q4_k(rows: &[u8], row_bytes: usize, at: usize, panel: &mut [u8]) {
        let mut factors = [[0; PANEL]; 3];
        for (lane, row) in rows.chunks_exact(row_bytes).enumerate() {
            let header: [u8; 16] = bytes_at(row, at);
            panel[2 * lane..][..2].copy_from_slice(&header[..2]);
            panel[32 + 2 * lane..][..2].copy_from_slice(&header[2..4]);
            for (factors, bytes) in factors.iter_mut().zip(header[4..].as_chunks().0) {
                factors[lane] = u32::from_le_bytes(*bytes);
            }
        }
        // A factor has 6 bits. The first four parts have them in the lower bits of bytes 0 to 3
        // (scale) and 4 to 7 (minimum). The others have their lower 4 bits in bytes 8 to 11, and
        // their upper 2 bits in the upper bits of bytes 0 to 7.
        let [scales, minimums, rest] = factors;
        let lower = |words: Lanes| words.map(|word| word & 0x3f3f_3f3f);
        let upper = |words: Lanes, shift: u32| -> Lanes {
            std::array::from_fn(|lane| {
                ((rest[lane] >> shift) & 0x0f0f_0f0f) | ((words[lane] >> 2) & 0x3030_3030)
            })
        };
        let factors =
            [[lower(scales), upper(scales, 0)], [lower(minimums), upper(minimums, 4)]];
        for part in 0..Q4K::PARTS {
            for (kind, words) in factors.iter().enumerate() {
                let to = &mut panel[Q4K::FACTORS + part * 32 + kind * PANEL..][..PANEL];
                for (to, word) in to.iter_mut().zip(words[part / 4]) {
                    *to = word.to_le_bytes()[part % 4];
                }
            }
        }
        for half in 0..2 {
            let words = load_words(rows, row_bytes, at + 16 + half * LANES_BYTES);
            for (index, [first, second]) in words.as_chunks::<2>().0.iter().enumerate() {
                let part = half * 4 + index / 4 * 2;
                let chunk = index % 4;
                for shift in [0, 4] {
                    let lanes = std::array::from_fn(|lane| {
                        let first = join_nibbles(first[lane] >> shift);
                        first | (join_nibbles(second[lane] >> shift) << 16)
                    });
                    store_lanes(panel, Q4K::chunk_offset(part + shift / 4, chunk), &lanes);
                }
            }
        }
    }

    /// Packs the `Q6_K` blocks at offset `at` of up to sixteen rows. A block has the lower 4 bits of
    /// all weights (128 bytes), their upper 2 bits (64 bytes), the factors of 16 parts (signed
    /// bytes), and the scale (f16).
    ///
    /// Each half of a block has 128 numbers, in four quarters of 32. A number consists of four lower
    /// bits and two upper bits, which are stored apart. In a half of a block:
    ///
    /// - byte `i` of the first 32 bytes of lower bits belongs to number `i` of quarter 0 (lower half
    ///   of the byte) and of quarter 2 (upper half);
    /// - byte `i` of the next 32 bytes of lower bits belongs to number `i` of quarters 1 and 3;
    /// - byte `i` of the 32 bytes of upper bits belongs to number `i` of all four quarters, with
    ///   quarter 0 in the lowest bits.
    fn pack_q6_k(rows: &[u8], row_bytes: usize, at: usize, panel: &mut [u8]) {
        for (lane, row) in rows.chunks_exact(row_bytes).enumerate() {
            let rest: [u8; 18] = bytes_at(row, at + 192);
            panel[2 * lane..][..2].copy_from_slice(&rest[16..]);
            for (part, factor) in rest[..16].iter().enumerate() {
                panel[Q6K::FACTORS + part * PANEL + lane] = *factor;
            }
        }
        let upper = load_words(rows, row_bytes, at + 128);
        for half in 0..2 {
            let lower = load_words(rows, row_bytes, at + half * LANES_BYTES);
            for part in 0..8 {
                let quarter = part / 2;
                let first = part % 2 * 4;
                // Four words with four numbers each, for all lanes.
                let numbers: [Lanes; 4] = std::array::from_fn(|i| {
                    let lower = &lower[quarter % 2 * 8 + first + i];
                    let upper = &upper[half * 8 + first + i];
                    std::array::from_fn(|lane| {
                        let low = (lower[lane] >> (quarter / 2 * 4)) & 0x0f0f_0f0f;
                        low | (((upper[lane] >> (quarter * 2)) & 0x0303_0303) << 4)
                    })
                });
                let mut words = [[0; PANEL]; 3];
                for lane in 0..PANEL {
                    let joined = join_six_bits(numbers.map(|numbers| numbers[lane]));
                    for (words, word) in words.iter_mut().zip(joined) {
                        words[lane] = word;
                    }
                }
                let offset = Q6K::chunk_offset(half * 8 + part, 0);
                for (i, words) in words.iter().enumerate() {
                    store_lanes(panel, offset + i * LANES_BYTES, words);
                }
            }
        }
    }
}

/// Reads sixteen words from offset `at` of every row. Element `k` of the result has word `k` of
/// every row; lanes without a row are 0.
#[inline(always)]
fn load_words(rows: &[u8], row_bytes: usize, at: usize) -> [Lanes; PANEL] {
    let mut square = [[[0; 4]; PANEL]; PANEL];
    for (to, row) in square.iter_mut().zip(rows.chunks_exact(row_bytes)) {
        let bytes: [u8; LANES_BYTES] = bytes_at(row, at);
        to.copy_from_slice(bytes.as_chunks().0);
    }
    let mut words = [[0; PANEL]; PANEL];
    for k in 0..PANEL {
        for lane in 0..PANEL {
            words[k][lane] = u32::from_le_bytes(square[lane][k]);
        }
    }
    words
}

/// Writes a word of every lane at offset `at` of a block.
#[inline(always)]
fn store_lanes(block: &mut [u8], at: usize, lanes: &Lanes) {
    let to = block[at..].first_chunk_mut::<LANES_BYTES>().expect("a whole block");
    for (to, word) in to.as_chunks_mut::<4>().0.iter_mut().zip(lanes) {
        *to = word.to_le_bytes();
    }
}

/// Joins the lower four bits of four bytes to sixteen bits, the first one in the lowest bits.
#[inline(always)]
fn join_nibbles(bytes: u32) -> u32 {
    let bits = bytes & 0x0f0f_0f0f;
    let bits = (bits | (bits >> 4)) & 0x00ff_00ff;
    (bits | (bits >> 8)) & 0xffff
}

/// Joins sixteen numbers of 6 bits, each in a byte, to three words: five in each word, and two bits
/// of the last number in the top bits of each.
#[inline(always)]
fn join_six_bits(numbers: [u32; 4]) -> [u32; 3] {
    // Join four numbers to 24 bits.
    let [a, b, c, d] = numbers.map(|bytes| {
        let bits = (bytes & 0x003f_003f) | ((bytes & 0x3f00_3f00) >> 2);
        (bits & 0xfff) | ((bits >> 4) & 0xff_f000)
    });
    let last = d >> 18;
    [
        a | ((b & 0x3f) << 24) | ((last & 3) << 30),
        (b >> 6) | ((c & 0xfff) << 18) | ((last >> 2 & 3) << 30),
        (c >> 12) | ((d & 0x3_ffff) << 12) | ((last >> 4) << 30),
    ]
}

/// Writes lane `lane` of the sixteen words at offset `at`.
fn set_word(block: &mut [u8], at: usize, lane: usize, word: u32) {
    block[at + 4 * lane..][..4].copy_from_slice(&word.to_le_bytes());
}

/// Packs a `Q4_0` block of a row: the scale (f16), then 16 bytes. The lower halves of the bytes are
/// weights 0 to 15, the upper halves weights 16 to 31.
fn pack_q4_0(row: &[u8], lane: usize, panel: &mut [u8]) {
    let (scale, numbers) = row.split_at(2);
    panel[2 * lane..][..2].copy_from_slice(scale);
    for chunk in 0..Q4_0::PART_CHUNKS {
        let bytes = |at: usize| u32::from_le_bytes(bytes_at(numbers, chunk % 2 * 8 + at));
        let joined = |at: usize| join_nibbles(bytes(at) >> (chunk / 2 * 4));
        set_word(panel, Q4_0::chunk_offset(0, chunk), lane, joined(0) | (joined(4) << 16));
    }
}

#[cfg(test)]
mod tests {
    use super::super::kernel_check::block_rows;
    use super::*;

    /// Packs rows of a format into one panel.
    fn pack(isa: Isa, format: WeightFormat, rows: &[u8], row_bytes: usize, cols: usize) -> Vec<u8> {
        let mut panel = vec![0; format.panel_bytes(cols)];
        let blocks = panel.chunks_exact_mut(format.block_bytes());
        format.pack_stored(isa, rows, row_bytes, blocks);
        panel
    }

    /// Packs a `Q8_0` block of one row, number by number.
    fn pack_q8_0_row(row: &[u8], lane: usize, panel: &mut [u8]) {
        let (scale, numbers) = row.split_at(2);
        panel[2 * lane..][..2].copy_from_slice(scale);
        for (chunk, numbers) in numbers.as_chunks::<4>().0.iter().enumerate() {
            let word = u32::from_le_bytes(numbers.map(|number| number.wrapping_add(128)));
            set_word(panel, Q8_0::chunk_offset(0, chunk), lane, word);
        }
    }

    /// Packs a `Q4_K` block of one row, number by number.
    fn pack_q4_k_row(row: &[u8], lane: usize, panel: &mut [u8]) {
        panel[2 * lane..][..2].copy_from_slice(&row[..2]);
        panel[32 + 2 * lane..][..2].copy_from_slice(&row[2..4]);
        let (factors, numbers) = row[4..].split_at(12);
        for part in 0..8 {
            let (scale, minimum) = match part {
                0..4 => (factors[part] & 63, factors[part + 4] & 63),
                _ => (
                    (factors[part + 4] & 15) | (factors[part - 4] >> 6 << 4),
                    (factors[part + 4] >> 4) | (factors[part] >> 6 << 4),
                ),
            };
            panel[Q4K::FACTORS + part * 32 + lane] = scale;
            panel[Q4K::FACTORS + part * 32 + PANEL + lane] = minimum;
            for chunk in 0..4 {
                let word = (0..8).rev().fold(0, |word, i| {
                    let byte = numbers[part / 2 * 32 + chunk * 8 + i];
                    word << 4 | u32::from(byte >> (part % 2 * 4) & 15)
                });
                set_word(panel, Q4K::chunk_offset(part, chunk), lane, word);
            }
        }
    }

    /// Packs a `Q6_K` block of one row, number by number.
    fn pack_q6_k_row(row: &[u8], lane: usize, panel: &mut [u8]) {
        let lower = &row[..128];
        let upper = &row[128..192];
        panel[2 * lane..][..2].copy_from_slice(&row[208..]);
        for part in 0..16 {
            panel[Q6K::FACTORS + part * PANEL + lane] = row[192 + part];
            let half = part / 8;
            let quarter = part % 8 / 2;
            let number = |i: usize| {
                let at = part % 2 * 16 + i;
                let low = lower[half * 64 + quarter % 2 * 32 + at] >> (quarter / 2 * 4) & 15;
                let high = upper[half * 32 + at] >> (quarter * 2) & 3;
                u32::from(low | high << 4)
            };
            for word in 0..3 {
                let top = number(15) >> (2 * word) & 3;
                let bits = (0..5).rev().fold(top, |bits, i| bits << 6 | number(5 * word + i));
                set_word(panel, Q6K::chunk_offset(part, 0) + word * 64, lane, bits);
            }
        }
    }

    #[test]
    fn packing_all_lanes_at_once_has_the_bits_of_packing_row_by_row() {
        type PackRow = fn(&[u8], usize, &mut [u8]);
        let formats: [(_, PackRow); 3] = [
            (WeightFormat::Q8_0, pack_q8_0_row),
            (WeightFormat::Q4K, pack_q4_k_row),
            (WeightFormat::Q6K, pack_q6_k_row),
        ];
        for (format, pack_row) in formats {
            for (rows, cols) in [(16, 512), (5, 768), (1, 256)] {
                let blocks = block_rows(format, rows, cols, 3);
                let row_bytes = format.row_bytes(cols);
                let block_bytes = format.row_bytes(format.block_inputs());
                let mut want = vec![0; format.panel_bytes(cols)];
                for (lane, row) in blocks.chunks_exact(row_bytes).enumerate() {
                    let panel = want.chunks_exact_mut(format.block_bytes());
                    for (row, panel) in row.chunks_exact(block_bytes).zip(panel) {
                        pack_row(row, lane, panel);
                    }
                }
                for isa in Isa::available() {
                    let packed = pack(isa, format, &blocks, row_bytes, cols);
                    assert_eq!(packed, want, "{format:?} {isa:?} {rows} × {cols}");
                }
            }
        }
    }

    #[test]
    fn stored_bf16_rows_are_packed_as_their_values() {
        for (rows, cols) in [(16, 64), (16, 70), (7, 31), (3, 1), (16, 33)] {
            let mut random = fastrand::Rng::with_seed(4);
            // All finite bf16 values, including subnormal ones and both zeros.
            let numbers: Vec<half::bf16> =
                std::iter::repeat_with(|| half::bf16::from_bits(random.u16(..)))
                    .filter(|number| number.is_finite())
                    .take(rows * cols)
                    .collect();
            let stored: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            let values: Vec<f32> = numbers.iter().map(|number| number.to_f32()).collect();
            for isa in Isa::available() {
                let mut want = vec![0; WeightFormat::Bf16.panel_bytes(cols)];
                let blocks = want.chunks_exact_mut(WeightFormat::Bf16.block_bytes());
                WeightFormat::Bf16.pack_values(isa, &values, cols, blocks);
                let packed = pack(isa, WeightFormat::Bf16, &stored, 2 * cols, cols);
                assert_eq!(packed, want, "{isa:?} {rows} × {cols}");
            }
        }
    }
}
