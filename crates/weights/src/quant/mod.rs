//! [`BlockFormat`]: formats that store blocks of weights as small integers with common scales.
//!
//! GGUF files define these formats. A row of a matrix consists of whole blocks. Each format has a
//! file; `k_quant` searches for the scales of the formats with two levels of scales, and `round`
//! rounds as llama.cpp does.

mod k_quant;
mod q4_0;
mod q4_k;
mod q6_k;
mod q8_0;
mod round;

/// Encodes each block of weights with the function of a module. A call of a function that was passed
/// as an argument would not be inlined.
macro_rules! encode_blocks {
    ($module:ident, $values:expr, $out:expr) => {
        for (values, out) in $values.as_chunks().0.iter().zip($out.as_chunks_mut().0) {
            $module::encode(values, out);
        }
    };
}

/// A block format of quantized weights.
///
/// ```
/// use tinkex_weights::BlockFormat;
///
/// let values: Vec<f32> = (0_u8..32).map(|i| f32::from(i) - 16.0).collect();
/// let mut block = [0; 34];
/// BlockFormat::Q8_0.encode(&values, &mut block);
/// let mut decoded = [0.0; 32];
/// BlockFormat::Q8_0.decode(&block, &mut decoded);
/// assert!(values.iter().zip(decoded).all(|(value, decoded)| (value - decoded).abs() < 0.07));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockFormat {
    /// `Q8_0`: 8-bit integers with one f16 scale per 32 weights; 8.5 bits per weight.
    Q8_0,
    /// `Q4_0`: 4-bit integers with one f16 scale per 32 weights; 4.5 bits per weight.
    Q4_0,
    /// `Q4_K`: 4-bit integers with a 6-bit scale and a 6-bit minimum per 32 weights, which are
    /// multiples of two f16 numbers per 256 weights; 4.5 bits per weight.
    Q4K,
    /// `Q6_K`: 6-bit integers with an 8-bit scale per 16 weights, which is a multiple of one f16
    /// number per 256 weights; 6.5625 bits per weight.
    Q6K,
}

impl BlockFormat {
    /// All formats.
    pub const ALL: [Self; 4] = [Self::Q8_0, Self::Q4_0, Self::Q4K, Self::Q6K];

    /// Returns the name of the format in GGUF tools, for example `Q4_K`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Q8_0 => "Q8_0",
            Self::Q4_0 => "Q4_0",
            Self::Q4K => "Q4_K",
            Self::Q6K => "Q6_K",
        }
    }

    /// Returns the number of weights of a block.
    #[must_use]
    pub const fn block_len(self) -> usize {
        match self {
            Self::Q8_0 => q8_0::LEN,
            Self::Q4_0 => q4_0::LEN,
            Self::Q4K => q4_k::LEN,
            Self::Q6K => q6_k::LEN,
        }
    }

    /// Returns the size of a block in bytes.
    #[must_use]
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::Q8_0 => q8_0::BYTES,
            Self::Q4_0 => q4_0::BYTES,
            Self::Q4K => q4_k::BYTES,
            Self::Q6K => q6_k::BYTES,
        }
    }

    /// Returns the size in bytes of `len` weights, or `None` if they are not whole blocks.
    #[must_use]
    pub const fn byte_len(self, len: usize) -> Option<usize> {
        if len.is_multiple_of(self.block_len()) {
            (len / self.block_len()).checked_mul(self.block_bytes())
        } else {
            None
        }
    }

    /// Decodes whole blocks. Every block of bytes is valid; a scale that is not finite decodes to
    /// weights that are not finite.
    ///
    /// PyPI `gguf` and llama.cpp compute the same bits.
    ///
    /// # Panics
    /// If `out` does not consist of whole blocks, or `bytes` does not have their size.
    pub fn decode(&self, bytes: &[u8], out: &mut [f32]) {
        self.check(out.len(), bytes.len());
        match self {
            Self::Q8_0 => decode_blocks(bytes, out, q8_0::decode),
            Self::Q4_0 => decode_blocks(bytes, out, q4_0::decode),
            Self::Q4K => decode_blocks(bytes, out, q4_k::decode),
            Self::Q6K => decode_blocks(bytes, out, q6_k::decode),
        }
    }

    /// Encodes whole blocks.
    ///
    /// Always inlined, so that a caller can compile it for more instructions than the target's; the
    /// results have the same bits.
    ///
    /// The scales are f16. Values beyond ±65504 times the largest integer of the format, infinity
    /// and NaN decode to numbers that are wrong or not finite.
    ///
    /// # Panics
    /// If `values` does not consist of whole blocks, or `out` does not have their size.
    #[inline(always)]
    pub fn encode(&self, values: &[f32], out: &mut [u8]) {
        self.check(values.len(), out.len());
        match self {
            Self::Q8_0 => encode_blocks!(q8_0, values, out),
            Self::Q4_0 => encode_blocks!(q4_0, values, out),
            Self::Q4K => encode_blocks!(q4_k, values, out),
            Self::Q6K => encode_blocks!(q6_k, values, out),
        }
    }

    /// Returns whether all weights of the blocks are finite, which their f16 scales determine.
    #[must_use]
    pub fn is_finite(self, bytes: &[u8]) -> bool {
        // Offsets of the f16 scales in a block.
        let scales: &[usize] = match self {
            Self::Q8_0 | Self::Q4_0 => &[0],
            Self::Q4K => &[0, 2],
            Self::Q6K => &[208],
        };
        bytes.chunks_exact(self.block_bytes()).all(|block| {
            // A finite f16 number does not have all bits of its exponent set.
            scales.iter().all(|at| block[at + 1] & 0x7C != 0x7C)
        })
    }

    /// Asserts that `len` weights are whole blocks of `bytes` bytes.
    fn check(self, len: usize, bytes: usize) {
        assert_eq!(self.byte_len(len), Some(bytes), "bytes of {len} weights in {}", self.name());
    }
}

/// Applies `decode` to each block of `BYTES` bytes.
fn decode_blocks<const BYTES: usize, const LEN: usize>(
    bytes: &[u8],
    out: &mut [f32],
    decode: impl Fn(&[u8; BYTES], &mut [f32; LEN]),
) {
    for (block, out) in bytes.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
        decode(block, out);
    }
}

/// Returns the f16 number in two little-endian bytes as f32.
fn read_f16(bytes: [u8; 2]) -> f32 {
    half::f16::from_le_bytes(bytes).to_f32()
}

/// Returns `value` rounded to f16, as little-endian bytes and as f32.
fn to_f16(value: f32) -> ([u8; 2], f32) {
    let rounded = half::f16::from_f32(value);
    (rounded.to_le_bytes(), rounded.to_f32())
}

/// Returns `1 / value`, or 0 for 0.
fn inverse(value: f32) -> f32 {
    if value == 0.0 { 0.0 } else { 1.0 / value }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_zeros_stay_zeros() {
        for format in BlockFormat::ALL {
            let mut bytes = vec![0xA5; format.block_bytes()];
            let mut values = vec![0.0; format.block_len()];
            format.encode(&values, &mut bytes);
            values.fill(1.0);
            format.decode(&bytes, &mut values);
            assert!(values.iter().all(|value| *value == 0.0), "{}", format.name());
        }
    }

    #[test]
    fn sizes_are_those_of_whole_blocks() {
        assert_eq!(BlockFormat::Q4K.byte_len(512), Some(288));
        assert_eq!(BlockFormat::Q4K.byte_len(0), Some(0));
        assert_eq!(BlockFormat::Q4K.byte_len(255), None);
        assert_eq!(BlockFormat::Q8_0.byte_len(usize::MAX - 31), None);
    }

    #[test]
    fn infinite_scales_are_found() {
        for format in BlockFormat::ALL {
            let mut bytes = vec![0x7B; 3 * format.block_bytes()];
            assert!(format.is_finite(&bytes));
            let mut values = vec![0.0; 3 * format.block_len()];
            format.decode(&bytes, &mut values);
            assert!(values.iter().all(|value| value.is_finite()));
            let at = if format == BlockFormat::Q6K { 208 } else { 0 };
            bytes[2 * format.block_bytes() + at + 1] = 0xFC;
            assert!(!format.is_finite(&bytes), "{}", format.name());
        }
    }

    /// Bug: values whose sums overflow f32 became zeros in Q6_K.
    #[test]
    fn values_that_a_format_cannot_hold_give_scales_that_are_not_finite() {
        for format in BlockFormat::ALL {
            for value in [1e10_f32, 6e18, 1e30, f32::MAX] {
                let values: Vec<f32> = (0..format.block_len())
                    .map(|i| if i % 2 == 0 { value } else { -value / 3.0 })
                    .collect();
                let mut bytes = vec![0; format.block_bytes()];
                format.encode(&values, &mut bytes);
                assert!(!format.is_finite(&bytes), "{} {value}", format.name());
            }
        }
    }

    #[test]
    #[should_panic(expected = "bytes of 33 weights in Q8_0")]
    fn partial_blocks_are_rejected() {
        BlockFormat::Q8_0.decode(&[0; 34], &mut [0.0; 33]);
    }
}
