//! [`WeightFormat`]: storage formats of packed weights, and conversion of panels to rows.
//!
//! `panel_format` describes the layout of a panel, and `panel_packing` converts rows to panels.

use half::{bf16, f16};
use tinkex_weights::BlockFormat;

use super::PANEL;
use super::panel_format::{PanelFormat, Q4_0, Q4K, Q6K, Q8_0};

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

    /// Returns whether rows can be packed from the bytes of a file: GGUF blocks, or bf16 numbers.
    pub(super) fn packs_stored_rows(self) -> bool {
        self.is_quantized() || self == Self::Bf16
    }

    /// Returns the size in bytes of a stored row of `cols` weights.
    ///
    /// # Panics
    /// If the format [does not pack stored rows](Self::packs_stored_rows), if `cols` is not a
    /// multiple of its block, or if the size exceeds the address space.
    pub(crate) fn row_bytes(self, cols: usize) -> usize {
        let bytes = match self.block_format() {
            Some(format) => format.byte_len(cols),
            None if self == Self::Bf16 => cols.checked_mul(size_of::<bf16>()),
            None => None,
        };
        bytes.expect("rows of whole blocks")
    }

    /// Decodes stored rows to f32. `rows` must have the stored size of as many weights as `out` has.
    pub(super) fn decode_rows(self, rows: &[u8], out: &mut [f32]) {
        if let Some(format) = self.block_format() {
            return format.decode(rows, out);
        }
        for (out, bytes) in out.iter_mut().zip(rows.as_chunks().0) {
            *out = bf16::from_le_bytes(*bytes).to_f32();
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
pub(super) fn bytes_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
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

/// Returns the unsigned number of `bits` bits that starts at bit `shift` of a word, as f32.
#[expect(clippy::cast_possible_truncation, reason = "a field has at most eight bits")]
fn field(word: u32, shift: usize, bits: u32) -> f32 {
    f32::from(((word >> shift) & ((1 << bits) - 1)) as u8)
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

fn unpack_q4_0(block: &[u8], lane: usize, out: &mut [f32]) {
    let scale = half_at(block, lane);
    for (chunk, out) in out.chunks_exact_mut(Q4_0::CHUNK_INPUTS).enumerate() {
        let word = word_at(block, Q4_0::chunk_offset(0, chunk), lane);
        for (i, out) in out.iter_mut().enumerate() {
            *out = scale * (field(word, 4 * i, 4) - 8.0);
        }
    }
}

fn unpack_q4_k(block: &[u8], lane: usize, out: &mut [f32]) {
    let scale = half_at(block, lane);
    let minimum = half_at(&block[32..], lane);
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
