//! [`DType`]: element types of tensors.

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
}

/// Element types with their names in a file and their sizes in bytes.
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

    /// Returns the entry of this type in [`NAMES`].
    fn entry(self) -> &'static (Self, &'static str, usize) {
        NAMES.iter().find(|(dtype, ..)| *dtype == self).expect("every type has an entry")
    }

    /// Returns the type's name in a file, for example `F32` or `BF16`.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.entry().1
    }

    /// Returns the size of one element in bytes.
    #[must_use]
    pub fn size(self) -> usize {
        self.entry().2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_maps_back_to_its_type() {
        for (dtype, name, size) in NAMES {
            assert_eq!(DType::from_name(name), Some(dtype));
            assert_eq!((dtype.name(), dtype.size()), (name, size));
        }
        assert_eq!(DType::from_name("F4"), None);
    }
}
