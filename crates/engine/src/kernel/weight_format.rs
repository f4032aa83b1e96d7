//! [`WeightFormat`]: storage formats of packed weights, and conversion of rows to and from panels.
//!
//! `panel_format` describes the layout of a panel.

use half::f16;
use tinkex_weights::BlockFormat;

use super::panel_format::{PanelFormat, Q4_0, Q4K, Q6K, Q8_0};
use super::row_ops::{narrow_pairs, transpose};
use super::{Isa, PANEL};

/// Storage format of packed weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WeightFormat {
    F32,
    F16,
    Bf16,
    /// GGUF's `Q8_0`: 8 bits and a scale for 32 weights.
    Q8_0,
    /// GGUF's `Q4_0`: 4 bits and a scale for 32 weights.
    Q4_0,
    /// GGUF's `Q4_K`: 4 bits, and a scale and a minimum for 32 weights.
    Q4K,
    /// GGUF's `Q6_K`: 6 bits and a scale for 16 weights.
    Q6K,
}

/// Evaluates an expression in which `$F` is the [`PanelFormat`] of a [`WeightFormat`].
macro_rules! with_panel_format {
    ($format:expr, $F:ident => $body:expr) => {{
        use $crate::kernel::panel_format as formats;
        match $format {
            $crate::kernel::WeightFormat::F32 => {
                type $F = formats::F32;
                $body
            }
            $crate::kernel::WeightFormat::F16 => {
                type $F = formats::F16;
                $body
            }
            $crate::kernel::WeightFormat::Bf16 => {
                type $F = formats::Bf16;
                $body
            }
            $crate::kernel::WeightFormat::Q8_0 => {
                type $F = formats::Q8_0;
                $body
            }
            $crate::kernel::WeightFormat::Q4_0 => {
                type $F = formats::Q4_0;
                $body
            }
            $crate::kernel::WeightFormat::Q4K => {
                type $F = formats::Q4K;
                $body
            }
            $crate::kernel::WeightFormat::Q6K => {
                type $F = formats::Q6K;
                $body
            }
        }
    }};
}
pub(super) use with_panel_format;

impl WeightFormat {
    pub(super) const QUANTIZED: [Self; 4] = [Self::Q8_0, Self::Q4_0, Self::Q4K, Self::Q6K];

    pub(crate) fn is_quantized(self) -> bool {
        with_panel_format!(self, F => F::QUANTIZED)
    }

    /// Returns the number of inputs in a block of a panel.
    pub(super) fn block_inputs(self) -> usize {
        with_panel_format!(self, F => F::BLOCK_INPUTS)
    }

    /// Returns the size of a block of a panel in bytes.
    pub(super) fn block_bytes(self) -> usize {
        with_panel_format!(self, F => F::BLOCK_BYTES)
    }

    /// Returns the size of a panel of `cols` inputs in bytes, or `usize::MAX` if it is larger.
    pub(super) fn panel_bytes(self, cols: usize) -> usize {
        cols.div_ceil(self.block_inputs()).saturating_mul(self.block_bytes())
    }

    /// Returns the size in bytes of a packed matrix of `rows` outputs and `cols` inputs, or
    /// `usize::MAX` if it is larger.
    pub(crate) fn matrix_bytes(self, rows: usize, cols: usize) -> usize {
        rows.div_ceil(PANEL).saturating_mul(self.panel_bytes(cols))
    }

    /// Returns the GGUF block format of these weights, or `None` if they are not quantized.
    pub(super) fn block_format(self) -> Option<BlockFormat> {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => None,
            Self::Q8_0 => Some(BlockFormat::Q8_0),
            Self::Q4_0 => Some(BlockFormat::Q4_0),
            Self::Q4K => Some(BlockFormat::Q4K),
            Self::Q6K => Some(BlockFormat::Q6K),
        }
    }

    /// Returns the offsets in bytes of the f16 scales in a block of a GGUF row.
    pub(super) fn row_scales(self) -> &'static [usize] {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => &[],
            Self::Q8_0 | Self::Q4_0 => &[0],
            Self::Q4K => &[0, 2],
            Self::Q6K => &[208],
        }
    }

    /// Returns the size in bytes of a GGUF row of `cols` weights.
    ///
    /// # Panics
    /// If the format is not quantized, or `cols` is not a multiple of its block.
    pub(super) fn row_bytes(self, cols: usize) -> usize {
        let bytes = self.block_format().and_then(|format| format.byte_len(cols));
        bytes.expect("rows of whole blocks of a quantized format")
    }

    /// Packs up to sixteen GGUF rows of `row_bytes` bytes, stored one after the other, into the
    /// blocks of a panel, which must be zeroed: lanes without a row stay 0. Does nothing if the
    /// format is not quantized.
    pub(super) fn pack_blocks<'a>(
        self,
        rows: &[u8],
        row_bytes: usize,
        panel: impl Iterator<Item = &'a mut [u8]>,
    ) {
        let Some(block_bytes) = self.block_format().map(BlockFormat::block_bytes) else { return };
        for (index, panel) in panel.enumerate() {
            for (lane, row) in rows.chunks_exact(row_bytes).enumerate() {
                let row = &row[index * block_bytes..][..block_bytes];
                match self {
                    Self::F32 | Self::F16 | Self::Bf16 => {}
                    Self::Q8_0 => pack_q8_0(row, lane, panel),
                    Self::Q4_0 => pack_q4_0(row, lane, panel),
                    Self::Q4K => pack_q4_k(row, lane, panel),
                    Self::Q6K => pack_q6_k(row, lane, panel),
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
        let (block_bytes, block_inputs) = (self.block_bytes(), self.block_inputs());
        // Transpose squares of sixteen rows and sixteen inputs.
        for col in (0..cols).step_by(PANEL) {
            let width = PANEL.min(cols - col);
            let (mut lanes, mut values) = ([0.0; PANEL * PANEL], [0.0; PANEL * PANEL]);
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

    /// Decodes row `lane` of a panel, given as its blocks, into `out`.
    pub(super) fn unpack_lane<'a>(
        self,
        panel: impl Iterator<Item = &'a [u8]>,
        lane: usize,
        out: &mut [f32],
    ) {
        let block_inputs = self.block_inputs();
        for (block, out) in panel.zip(out.chunks_mut(block_inputs)) {
            match self {
                Self::F32 => out[0] = f32::from_le_bytes(bytes_at(block, 4 * lane)),
                Self::F16 => out[0] = half_at(block, lane),
                Self::Bf16 => {
                    let word = word_at(block, 0, lane);
                    for (out, bits) in out.iter_mut().zip([word << 16, word & 0xffff_0000]) {
                        *out = f32::from_bits(bits);
                    }
                }
                Self::Q8_0 => unpack_q8_0(block, lane, out),
                Self::Q4_0 => unpack_q4_0(block, lane, out),
                Self::Q4K => unpack_q4_k(block, lane, out),
                Self::Q6K => unpack_q6_k(block, lane, out),
            }
        }
    }
}

/// Returns the `N` bytes at offset `at`.
fn bytes_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    *bytes[at..].first_chunk().expect("a whole block")
}

/// Returns the f16 value of lane `lane` at the start of `block`.
fn half_at(block: &[u8], lane: usize) -> f32 {
    f16::from_le_bytes(bytes_at(block, 2 * lane)).to_f32()
}

/// Returns lane `lane` of the sixteen words at offset `at`.
fn word_at(block: &[u8], at: usize, lane: usize) -> u32 {
    u32::from_le_bytes(bytes_at(block, at + 4 * lane))
}

/// Writes lane `lane` of the sixteen words at offset `at`.
fn set_word(block: &mut [u8], at: usize, lane: usize, word: u32) {
    block[at + 4 * lane..][..4].copy_from_slice(&word.to_le_bytes());
}

/// Joins the lower four bits of eight bytes, the first one in the lowest bits.
fn join_nibbles(bytes: u64) -> u32 {
    let mut bits = bytes & 0x0f0f_0f0f_0f0f_0f0f;
    bits = (bits | (bits >> 4)) & 0x00ff_00ff_00ff_00ff;
    bits = (bits | (bits >> 8)) & 0x0000_ffff_0000_ffff;
    bits |= bits >> 16;
    #[expect(clippy::cast_possible_truncation, reason = "the lower half has all bits")]
    {
        bits as u32
    }
}

/// Returns the unsigned number of `bits` bits that starts at bit `shift` of a word, as f32.
#[expect(clippy::cast_possible_truncation, reason = "a field has at most eight bits")]
fn field(word: u32, shift: usize, bits: u32) -> f32 {
    f32::from(((word >> shift) & ((1 << bits) - 1)) as u8)
}

/// Packs a `Q8_0` block of a row: the scale (f16), then 32 signed bytes.
fn pack_q8_0(row: &[u8], lane: usize, panel: &mut [u8]) {
    let (scale, numbers) = row.split_at(2);
    panel[2 * lane..][..2].copy_from_slice(scale);
    for (chunk, numbers) in numbers.as_chunks::<4>().0.iter().enumerate() {
        // Adds 128, modulo 256.
        let word = u32::from_le_bytes(numbers.map(|number| number ^ Q8_0::ZERO));
        set_word(panel, Q8_0::chunk_offset(0, chunk), lane, word);
    }
}

fn unpack_q8_0(block: &[u8], lane: usize, out: &mut [f32]) {
    let scale = half_at(block, lane);
    for (chunk, out) in out.chunks_exact_mut(Q8_0::CHUNK_INPUTS).enumerate() {
        let word = word_at(block, Q8_0::chunk_offset(0, chunk), lane);
        for (out, byte) in out.iter_mut().zip(word.to_le_bytes()) {
            *out = scale * f32::from((byte ^ Q8_0::ZERO).cast_signed());
        }
    }
}

/// Packs a `Q4_0` block of a row: the scale (f16), then 16 bytes. The lower halves of the bytes are
/// weights 0 to 15, the upper halves weights 16 to 31.
fn pack_q4_0(row: &[u8], lane: usize, panel: &mut [u8]) {
    let (scale, numbers) = row.split_at(2);
    panel[2 * lane..][..2].copy_from_slice(scale);
    for chunk in 0..Q4_0::PART_CHUNKS {
        let bytes = u64::from_le_bytes(bytes_at(numbers, chunk % 2 * 8));
        let word = join_nibbles(bytes >> (chunk / 2 * 4));
        set_word(panel, Q4_0::chunk_offset(0, chunk), lane, word);
    }
}

fn unpack_q4_0(block: &[u8], lane: usize, out: &mut [f32]) {
    let scale = half_at(block, lane);
    for (chunk, out) in out.chunks_exact_mut(Q4_0::CHUNK_INPUTS).enumerate() {
        let word = word_at(block, Q4_0::chunk_offset(0, chunk), lane);
        for (i, out) in out.iter_mut().enumerate() {
            *out = scale * (field(word, 4 * i, 4) - 8.0);
        }
    }
}

/// Packs a `Q4_K` block of a row: the scale and the minimum scale (f16), the factors of 8 parts (12
/// bytes), then 128 bytes. Of every 32 bytes, the lower halves are the weights of one part, the
/// upper halves those of the next part.
fn pack_q4_k(row: &[u8], lane: usize, panel: &mut [u8]) {
    panel[2 * lane..][..2].copy_from_slice(&row[..2]);
    panel[32 + 2 * lane..][..2].copy_from_slice(&row[2..4]);
    let (factors, numbers) = row[4..].split_at(12);
    for part in 0..Q4K::PARTS {
        // The factors have 6 bits. The first four parts have them in the lower bits of bytes 0 to
        // 3 (scale) and 4 to 7 (minimum). The others have their lower 4 bits in bytes 8 to 11,
        // and their upper 2 bits in the upper bits of bytes 0 to 7.
        let (scale, minimum) = match part {
            0..4 => (factors[part] & 63, factors[part + 4] & 63),
            _ => (
                (factors[part + 4] & 15) | (factors[part - 4] >> 6 << 4),
                (factors[part + 4] >> 4) | (factors[part] >> 6 << 4),
            ),
        };
        let at = Q4K::FACTORS + part * 32;
        panel[at + lane] = scale;
        panel[at + PANEL + lane] = minimum;
        for chunk in 0..Q4K::PART_CHUNKS {
            let bytes = u64::from_le_bytes(bytes_at(numbers, part / 2 * 32 + chunk * 8));
            let word = join_nibbles(bytes >> (part % 2 * 4));
            set_word(panel, Q4K::chunk_offset(part, chunk), lane, word);
        }
    }
}

fn unpack_q4_k(block: &[u8], lane: usize, out: &mut [f32]) {
    let (scale, minimum) = (half_at(block, lane), half_at(&block[32..], lane));
    for (part, out) in out.chunks_exact_mut(32).enumerate() {
        let factors = &block[Q4K::FACTORS + part * 32..];
        let scale = scale * f32::from(factors[lane]);
        let minimum = minimum * f32::from(factors[PANEL + lane]);
        for (chunk, out) in out.chunks_exact_mut(Q4K::CHUNK_INPUTS).enumerate() {
            let word = word_at(block, Q4K::chunk_offset(part, chunk), lane);
            for (i, out) in out.iter_mut().enumerate() {
                // The product is exact, so this has the bits of a fused multiply-subtract.
                *out = scale * field(word, 4 * i, 4) - minimum;
            }
        }
    }
}

/// Packs a `Q6_K` block of a row: the lower 4 bits of all weights (128 bytes), their upper 2 bits
/// (64 bytes), the factors of 16 parts (signed bytes), and the scale (f16).
fn pack_q6_k(row: &[u8], lane: usize, panel: &mut [u8]) {
    let (lower, rest) = row.split_at(128);
    let (upper, rest) = rest.split_at(64);
    let (factors, scale) = rest.split_at(16);
    panel[2 * lane..][..2].copy_from_slice(scale);
    for (part, factor) in factors.iter().enumerate() {
        panel[Q6K::FACTORS + part * PANEL + lane] = *factor;
        let numbers = q6_k_numbers(lower, upper, part);
        for (i, word) in join_six_bits(numbers).into_iter().enumerate() {
            set_word(panel, Q6K::chunk_offset(part, 0) + i * 64, lane, word);
        }
    }
}

/// Returns the sixteen numbers, of 6 bits, of part `part` of a GGUF row's `Q6_K` block.
///
/// Each half of the block has 128 numbers, in four quarters of 32. In a half, byte `i` of the first
/// 32 bytes of `lower` has the lower 4 bits of number `i` of quarter 0, and in its upper half those
/// of quarter 2; byte `i` of the next 32 bytes those of quarters 1 and 3. Byte `i` of the 32 bytes
/// of `upper` has the upper 2 bits of number `i` of all four quarters, those of quarter 0 in the
/// lowest bits.
fn q6_k_numbers(lower: &[u8], upper: &[u8], part: usize) -> [u8; 16] {
    let (half, quarter, first) = (part / 8, part % 8 / 2, part % 2 * 16);
    let lower: [u8; 16] = bytes_at(lower, half * 64 + quarter % 2 * 32 + first);
    let upper: [u8; 16] = bytes_at(upper, half * 32 + first);
    std::array::from_fn(|i| {
        let low = lower[i] >> (quarter / 2 * 4) & 15;
        let high = upper[i] >> (quarter * 2) & 3;
        low | (high << 4)
    })
}

/// Joins sixteen numbers of 6 bits to three words: five in each word, and two bits of the last
/// number in the top bits of each.
fn join_six_bits(numbers: [u8; 16]) -> [u32; 3] {
    let [first @ .., last] = numbers;
    std::array::from_fn(|word| {
        let top = u32::from(last) >> (2 * word) & 3;
        let five = &first[5 * word..5 * word + 5];
        five.iter().rev().fold(top, |bits, number| bits << 6 | u32::from(*number))
    })
}

fn unpack_q6_k(block: &[u8], lane: usize, out: &mut [f32]) {
    let scale = half_at(block, lane);
    for (part, out) in out.chunks_exact_mut(Q6K::CHUNK_INPUTS).enumerate() {
        let factor = block[Q6K::FACTORS + part * PANEL + lane].cast_signed();
        let scale = scale * f32::from(factor);
        let words: [u32; 3] = std::array::from_fn(|word| {
            word_at(block, Q6K::chunk_offset(part, 0) + word * 64, lane)
        });
        let last = words[0] >> 30 | words[1] >> 30 << 2 | words[2] >> 30 << 4;
        for (i, out) in out.iter_mut().enumerate() {
            let number =
                if i == 15 { field(last, 0, 6) } else { field(words[i / 5], 6 * (i % 5), 6) };
            *out = scale * (number - 32.0);
        }
    }
}
