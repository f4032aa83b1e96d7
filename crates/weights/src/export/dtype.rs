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

/// Appends finite values to `out` as little-endian elements of type `dtype`. Floats are rounded to
/// the nearest, ties to even. `name` is used in errors.
///
/// # Errors
/// [`Error::InvalidTensor`] if a value is outside the range of the type.
pub(super) fn encode(name: &str, values: &[f32], dtype: DType, out: &mut Vec<u8>) -> Result<()> {
    let mut too_large = None;
    match dtype {
        DType::F32 => out.extend(values.iter().flat_map(|value| value.to_le_bytes())),
        DType::Bf16 => out.extend(values.iter().flat_map(|&value| {
            let rounded = bf16::from_f32(value);
            too_large = too_large.or((!rounded.is_finite()).then_some(value));
            rounded.to_le_bytes()
        })),
        DType::F16 => out.extend(values.iter().flat_map(|&value| {
            let rounded = f16::from_f32(value);
            too_large = too_large.or((!rounded.is_finite()).then_some(value));
            rounded.to_le_bytes()
        })),
        DType::Block(format) => {
            // The scales are f16. All formats can represent values up to the largest f16 number.
            let is_large = |value: &&f32| value.abs() > f16::MAX.to_f32();
            too_large = values.iter().find(is_large).copied();
            let Some(len) = format.byte_len(values.len()) else {
                return Err(Error::invalid_tensor(name, "its rows are not whole blocks"));
            };
            let start = out.len();
            out.resize(start + len, 0);
            format.encode(values, &mut out[start..]);
        }
        _ => {
            let reason = format!("merged tensors cannot be stored as {}", dtype.name());
            return Err(Error::invalid_tensor(name, reason));
        }
    }
    match too_large {
        None => Ok(()),
        Some(value) => {
            let reason = format!("{value} is outside the range of {}", dtype.name());
            Err(Error::invalid_tensor(name, reason))
        }
    }
}
