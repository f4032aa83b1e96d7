//! [`TensorType`]: the types of tensors and their numbers in GGUF files.

use crate::{BlockFormat, DType};

/// Number and name of each tensor type, and the element type if tensors of it can be read.
const TYPES: [(u32, &str, Option<DType>); 34] = [
    (0, "F32", Some(DType::F32)),
    (1, "F16", Some(DType::F16)),
    (2, "Q4_0", Some(DType::Block(BlockFormat::Q4_0))),
    (3, "Q4_1", None),
    (6, "Q5_0", None),
    (7, "Q5_1", None),
    (8, "Q8_0", Some(DType::Block(BlockFormat::Q8_0))),
    (9, "Q8_1", None),
    (10, "Q2_K", None),
    (11, "Q3_K", None),
    (12, "Q4_K", Some(DType::Block(BlockFormat::Q4K))),
    (13, "Q5_K", None),
    (14, "Q6_K", Some(DType::Block(BlockFormat::Q6K))),
    (15, "Q8_K", None),
    (16, "IQ2_XXS", None),
    (17, "IQ2_XS", None),
    (18, "IQ3_XXS", None),
    (19, "IQ1_S", None),
    (20, "IQ4_NL", None),
    (21, "IQ3_S", None),
    (22, "IQ2_S", None),
    (23, "IQ4_XS", None),
    (24, "I8", Some(DType::I8)),
    (25, "I16", Some(DType::I16)),
    (26, "I32", Some(DType::I32)),
    (27, "I64", Some(DType::I64)),
    (28, "F64", Some(DType::F64)),
    (29, "IQ1_M", None),
    (30, "BF16", Some(DType::Bf16)),
    (34, "TQ1_0", None),
    (35, "TQ2_0", None),
    (39, "MXFP4", None),
    (40, "NVFP4", None),
    (41, "Q1_0", None),
];

/// Types that tensors of a model may have, for errors.
pub(super) const SUPPORTED: &str = "F32, F16, BF16, Q8_0, Q4_0, Q4_K and Q6_K";

/// Type of a tensor in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TensorType {
    Supported(DType),
    /// A type whose elements cannot be read, by its number.
    Unsupported(u32),
}

impl TensorType {
    pub(super) fn from_number(number: u32) -> Self {
        let found = TYPES.iter().find(|(other, ..)| *other == number);
        match found.and_then(|(.., dtype)| *dtype) {
            Some(dtype) => Self::Supported(dtype),
            None => Self::Unsupported(number),
        }
    }

    /// Returns the name of the type, or its number if it has no name.
    pub(super) fn name(self) -> String {
        match self {
            Self::Supported(dtype) => dtype.name().to_owned(),
            Self::Unsupported(number) => TYPES
                .iter()
                .find(|(other, ..)| *other == number)
                .map_or_else(|| format!("number {number}"), |(_, name, _)| (*name).to_owned()),
        }
    }
}

/// Returns the number of a type, or `None` if GGUF has no such type.
pub(super) fn number(dtype: DType) -> Option<u32> {
    TYPES.iter().find(|(.., other)| *other == Some(dtype)).map(|(number, ..)| *number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_types_match() {
        for (number, name, dtype) in TYPES {
            assert_eq!(TensorType::from_number(number).name(), name);
            if let Some(dtype) = dtype {
                assert_eq!(super::number(dtype), Some(number));
            }
        }
        assert_eq!(TensorType::from_number(4).name(), "number 4");
        assert_eq!(number(DType::U8), None);
    }
}
