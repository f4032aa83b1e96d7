//! [`DType`]: element types of tensors.

use crate::BlockFormat;

/// Element type of a stored tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// 32-bit floats.
    F32,
    /// 16-bit IEEE 754 floats.
    F16,
    /// bfloat16: 16-bit floats with the exponent range of 32-bit floats.
    Bf16,
    /// 64-bit floats.
    F64,
    /// 64-bit signed integers.
    I64,
    /// 32-bit signed integers.
    I32,
    /// 16-bit signed integers.
    I16,
    /// 8-bit signed integers.
    I8,
    /// 64-bit unsigned integers.
    U64,
    /// 32-bit unsigned integers.
    U32,
    /// 16-bit unsigned integers.
    U16,
    /// 8-bit unsigned integers.
    U8,
    /// Booleans, one byte each.
    Bool,
    /// Floats in a block format. Safetensors files have no such type.
    Block(BlockFormat),
}

/// Element types with their names in a safetensors file and their sizes in bytes.
const NAMES: [(DType, &str, usize); 13] = [
    (DType::F32, "F32", 4),
    (DType::F16, "F16", 2),
    (DType::Bf16, "BF16", 2),
    (DType::F64, "F64", 8),
    (DType::I64, "I64", 8),
    (DType::I32, "I32", 4),
    (DType::I16, "I16", 2),
    (DType::I8, "I8", 1),
    (DType::U64, "U64", 8),
    (DType::U32, "U32", 4),
    (DType::U16, "U16", 2),
    (DType::U8, "U8", 1),
    (DType::Bool, "BOOL", 1),
];

impl DType {
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        NAMES.iter().find(|(_, other, _)| *other == name).map(|(dtype, ..)| *dtype)
    }

    /// Returns the entry of this type in [`NAMES`], or its block format.
    fn entry(self) -> Result<&'static (Self, &'static str, usize), BlockFormat> {
        if let Self::Block(format) = self {
            return Err(format);
        }
        Ok(NAMES.iter().find(|(dtype, ..)| *dtype == self).expect("every type has an entry"))
    }

    /// Returns the type's name in a file, for example `F32`, `BF16` or `Q8_0`.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.entry().map_or_else(BlockFormat::name, |entry| entry.1)
    }

    /// Returns the number of elements that are stored together: the length of a block, or 1.
    #[must_use]
    pub fn block_len(self) -> usize {
        self.entry().map_or_else(BlockFormat::block_len, |_| 1)
    }

    /// Returns the size in bytes of one element, or of one block of a block format.
    #[must_use]
    pub fn block_bytes(self) -> usize {
        self.entry().map_or_else(BlockFormat::block_bytes, |entry| entry.2)
    }

    /// Returns the size of `count` elements in bytes, or `None` if they are not whole blocks or the
    /// size exceeds `usize`.
    #[must_use]
    pub fn byte_len(self, count: usize) -> Option<usize> {
        let blocks = count.is_multiple_of(self.block_len()).then(|| count / self.block_len())?;
        blocks.checked_mul(self.block_bytes())
    }

    /// Returns whether the elements are floats that can be converted to f32.
    #[must_use]
    pub fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::Bf16 | Self::Block(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_maps_back_to_its_type() {
        for (dtype, name, size) in NAMES {
            assert_eq!(DType::from_name(name), Some(dtype));
            assert_eq!((dtype.name(), dtype.block_bytes()), (name, size));
        }
        assert_eq!(DType::from_name("F4"), None);
        assert_eq!(DType::from_name("Q8_0"), None);
    }
    #[test]
    fn sizes_count_whole_blocks() {
        assert_eq!(DType::F32.byte_len(3), Some(12));
        assert_eq!(DType::F32.byte_len(usize::MAX), None);
        let blocks = DType::Block(BlockFormat::Q4K);
        assert_eq!((blocks.name(), blocks.byte_len(512)), ("Q4_K", Some(288)));
        assert_eq!(blocks.byte_len(100), None);
    }
}
