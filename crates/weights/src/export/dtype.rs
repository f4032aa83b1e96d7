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
}

impl ExportDType {
    /// All element types.
    pub const ALL: [Self; 3] = [Self::Bf16, Self::F16, Self::F32];

    /// Returns the name of the type, for example `bf16`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }

    /// Returns the type of the elements in a safetensors file.
    pub(super) fn stored(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::F16 => DType::F16,
            Self::Bf16 => DType::Bf16,
        }
    }

    /// Returns the type's name in the configuration of a model.
    pub(super) fn torch_name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
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

/// Appends finite values to `out` as little-endian elements of a type, rounded to the nearest, ties
/// to even. `name` is used in errors.
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
        _ => {
            let reason = format!("{} is no element type of a merged tensor", dtype.name());
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
