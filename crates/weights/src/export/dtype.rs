//! [`ExportDType`]: element types of exported weights.

use std::fmt;
use std::str::FromStr;

use half::{bf16, f16};

use crate::{DType, Error, Result};

/// Element type of exported weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ExportDType {
    /// 32-bit floats.
    F32,
    /// 16-bit IEEE 754 floats, up to 65,504.
    F16,
    /// bfloat16: 16-bit floats with the exponent range of 32-bit floats.
    Bf16,
    /// 8-bit integers with one scale per 32 weights, 8.5 bits per weight; only in GGUF.
    Q8_0,
    /// llama.cpp's `Q4_K_M`, a mix of 4-bit and 6-bit integers, about 4.9 bits per weight; only in
    /// GGUF.
    Q4KM,
}

impl ExportDType {
    /// All element types.
    pub const ALL: [Self; 5] = [Self::Bf16, Self::F16, Self::F32, Self::Q8_0, Self::Q4KM];

    /// Returns the name of the type, for example `bf16`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Q8_0 => "q8_0",
            Self::Q4KM => "q4_k_m",
        }
    }

    /// Returns the type of the elements in a safetensors file, or `None` if only GGUF has the type.
    pub(super) fn stored(self) -> Option<DType> {
        match self {
            Self::F32 => Some(DType::F32),
            Self::F16 => Some(DType::F16),
            Self::Bf16 => Some(DType::Bf16),
            Self::Q8_0 | Self::Q4KM => None,
        }
    }

    /// Returns the type whose elements safetensors files store as `dtype`.
    pub(super) fn from_stored(dtype: DType) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.stored() == Some(dtype))
    }

    /// Returns the type's name in a `config.json`, or `None` if only GGUF has the type.
    pub(super) fn torch_name(self) -> Option<&'static str> {
        match self {
            Self::F32 => Some("float32"),
            Self::F16 => Some("float16"),
            Self::Bf16 => Some("bfloat16"),
            Self::Q8_0 | Self::Q4KM => None,
        }
    }
}

impl fmt::Display for ExportDType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for ExportDType {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|dtype| dtype.as_str() == text).ok_or_else(|| {
            let names = Self::ALL.map(Self::as_str).join(", ");
            format!("unknown element type {text:?}, expected one of {names}")
        })
    }
}

/// Minimum number of values per thread. Starting a thread for fewer costs more time than it saves.
const MIN_VALUES_PER_THREAD: usize = 1 << 16;
/// Multiple of the block lengths of all formats.
const ALL_BLOCKS: usize = 256;

/// Replaces the content of `out` by finite values as little-endian elements of type `dtype`. Floats
/// are rounded to the nearest, ties to even. Uses all cores. `name` is used in errors.
///
/// # Errors
/// [`Error::InvalidTensor`] if a value is outside the range of the type, or the values are not whole
/// blocks.
pub(super) fn encode(name: &str, values: &[f32], dtype: DType, out: &mut Vec<u8>) -> Result<()> {
    if !dtype.is_float() {
        let reason = format!("merged tensors cannot be stored as {}", dtype.name());
        return Err(Error::invalid_tensor(name, reason));
    }
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let part = values.len().div_ceil(threads).max(MIN_VALUES_PER_THREAD);
    let part = part.next_multiple_of(ALL_BLOCKS);
    let no_whole_blocks = || Error::invalid_tensor(name, "its rows are not whole blocks");
    let len = dtype.byte_len(values.len()).ok_or_else(no_whole_blocks)?;
    let part_len = dtype.byte_len(part).ok_or_else(no_whole_blocks)?;
    out.resize(len, 0);
    let too_large = if values.len() <= part {
        encode_part(values, dtype, out)
    } else {
        std::thread::scope(|scope| {
            let parts = values.chunks(part).zip(out.chunks_mut(part_len));
            let spawn = |(values, out)| scope.spawn(move || encode_part(values, dtype, out));
            let running: Vec<_> = parts.map(spawn).collect();
            let join = |part: std::thread::ScopedJoinHandle<'_, Option<f32>>| {
                part.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            running.into_iter().filter_map(join).next()
        })
    };
    match too_large {
        None => Ok(()),
        Some(value) => {
            let reason = format!("{value} is outside the range of {}", dtype.name());
            Err(Error::invalid_tensor(name, reason))
        }
    }
}

/// Encodes values, which are whole blocks, into `out`, which has their size. Returns a value that is
/// outside the range of the type, if there is one.
fn encode_part(values: &[f32], dtype: DType, out: &mut [u8]) -> Option<f32> {
    match dtype {
        DType::Bf16 => encode_elements(values, out, |value| {
            let rounded = bf16::from_f32(value);
            (rounded.to_le_bytes(), rounded.is_finite())
        }),
        DType::F16 => encode_elements(values, out, |value| {
            let rounded = f16::from_f32(value);
            (rounded.to_le_bytes(), rounded.is_finite())
        }),
        DType::Block(format) => {
            format.encode(values, out);
            // The scales are f16. All formats can represent values up to the largest f16 number.
            values.iter().copied().find(|value| value.abs() > f16::MAX.to_f32())
        }
        _ => encode_elements(values, out, |value| (value.to_le_bytes(), true)),
    }
}

/// Encodes values of `N` bytes each with `round`, which also returns whether the value is inside the
/// range of the type. Returns a value that is not.
fn encode_elements<const N: usize>(
    values: &[f32],
    out: &mut [u8],
    round: impl Fn(f32) -> ([u8; N], bool),
) -> Option<f32> {
    let mut too_large = None;
    for (value, out) in values.iter().zip(out.as_chunks_mut::<N>().0) {
        let (bytes, fits) = round(*value);
        *out = bytes;
        if !fits {
            too_large = Some(*value);
        }
    }
    too_large
}

#[cfg(test)]
mod tests {
    use crate::BlockFormat;

    use super::*;

    #[test]
    fn threads_do_not_change_the_bytes() {
        let count = 5 * MIN_VALUES_PER_THREAD + ALL_BLOCKS;
        let values: Vec<f32> = (0..count).map(|i| ((i * 7919) % 1000) as f32 / 1000.0).collect();
        for dtype in [
            DType::F32,
            DType::F16,
            DType::Bf16,
            DType::Block(BlockFormat::Q8_0),
            DType::Block(BlockFormat::Q6K),
        ] {
            let mut all = vec![1; 3];
            let mut one = vec![0; dtype.byte_len(count).unwrap()];
            encode("x", &values, dtype, &mut all).unwrap();
            assert_eq!(encode_part(&values, dtype, &mut one), None);
            assert!(all == one, "{}", dtype.name());
        }
    }

    #[test]
    fn a_value_outside_the_range_is_named_from_any_thread() {
        let mut values = vec![0.0; 5 * MIN_VALUES_PER_THREAD];
        *values.last_mut().unwrap() = 1e6;
        for dtype in [DType::F16, DType::Block(BlockFormat::Q8_0)] {
            let error = encode("x", &values, dtype, &mut Vec::new()).unwrap_err().to_string();
            let want =
                format!("cannot write tensor x: 1000000 is outside the range of {}", dtype.name());
            assert_eq!(error, want);
        }
    }
}
