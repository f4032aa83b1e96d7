//! [`GgufValue`]: values of the metadata. `value_encoding` has their form in files.

use super::value_encoding::GgufType;

/// A value of the metadata of a GGUF file.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the variants are named after their types")]
pub enum GgufValue {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    Array(GgufArray),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// An array of the metadata of a GGUF file, whose elements have one type.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the variants are named after their types")]
pub enum GgufArray {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    String(Vec<String>),
    Array(Vec<Self>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

/// Evaluates an expression with the content of a [`GgufValue`] or a [`GgufArray`], whatever its
/// type.
macro_rules! with_content {
    ($self:expr, $content:ident => $result:expr) => {
        match $self {
            Self::U8($content) => $result,
            Self::I8($content) => $result,
            Self::U16($content) => $result,
            Self::I16($content) => $result,
            Self::U32($content) => $result,
            Self::I32($content) => $result,
            Self::F32($content) => $result,
            Self::Bool($content) => $result,
            Self::String($content) => $result,
            Self::Array($content) => $result,
            Self::U64($content) => $result,
            Self::I64($content) => $result,
            Self::F64($content) => $result,
        }
    };
}
pub(super) use with_content;

impl GgufValue {
    /// Returns the value if it is an integer of any width and not negative.
    #[must_use]
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Self::U8(value) => Some(value.into()),
            Self::U16(value) => Some(value.into()),
            Self::U32(value) => Some(value.into()),
            Self::U64(value) => Some(value),
            Self::I8(value) => value.try_into().ok(),
            Self::I16(value) => value.try_into().ok(),
            Self::I32(value) => value.try_into().ok(),
            Self::I64(value) => value.try_into().ok(),
            _ => None,
        }
    }

    /// Returns whether the value is an integer of any width.
    pub(super) fn is_integer(&self) -> bool {
        matches!(
            self,
            Self::U8(_)
                | Self::U16(_)
                | Self::U32(_)
                | Self::U64(_)
                | Self::I8(_)
                | Self::I16(_)
                | Self::I32(_)
                | Self::I64(_)
        )
    }

    /// Returns the value if it is a float.
    #[must_use]
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Self::F32(value) => Some(value.into()),
            Self::F64(value) => Some(value),
            _ => None,
        }
    }

    /// Returns the value if it is a boolean.
    #[must_use]
    pub fn as_bool(&self) -> Option<bool> {
        match *self {
            Self::Bool(value) => Some(value),
            _ => None,
        }
    }

    /// Returns the value if it is a string.
    #[must_use]
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(text) => Some(text),
            _ => None,
        }
    }

    /// Returns the value if it is an array of strings.
    #[must_use]
    pub fn as_strings(&self) -> Option<&[String]> {
        match self {
            Self::Array(GgufArray::String(texts)) => Some(texts),
            _ => None,
        }
    }

    /// Returns value and type for errors, for example `97 (u32)`. Strings are shortened to 60
    /// characters, arrays are described by their length and the type of their elements.
    pub(super) fn shown(&self) -> String {
        match self {
            Self::Array(array) => array.shown(),
            Self::String(text) => match text.char_indices().nth(60) {
                None => format!("{text:?} (string)"),
                Some((end, _)) => format!("{:?}… (string)", &text[..end]),
            },
            number => with_content!(number, content => shown_as(content)),
        }
    }
}

/// Returns a value with the name of its type. Uses `Debug`, because `with_content!` requires the
/// bound of all types, and [`GgufArray`] has no `Display`.
fn shown_as<T: GgufType + std::fmt::Debug>(value: &T) -> String {
    format!("{value:?} ({})", T::NAME)
}

impl GgufArray {
    fn shown(&self) -> String {
        fn shown<T: GgufType>(elements: &[T]) -> String {
            format!("an array of {} elements of type {}", elements.len(), T::NAME)
        }
        with_content!(self, elements => shown(elements))
    }
}

macro_rules! from_value {
    ($($type:ty => $variant:ident),* $(,)?) => {$(
        impl From<$type> for GgufValue {
            fn from(value: $type) -> Self {
                Self::$variant(value)
            }
        }

        impl From<Vec<$type>> for GgufValue {
            fn from(values: Vec<$type>) -> Self {
                Self::Array(GgufArray::$variant(values))
            }
        }
    )*};
}

from_value! { u32 => U32, i32 => I32, u64 => U64, f32 => F32, bool => Bool, String => String }

impl From<&str> for GgufValue {
    fn from(text: &str) -> Self {
        Self::String(text.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_show_value_and_type() {
        for (value, want) in [
            (GgufValue::U32(97), "97 (u32)"),
            (GgufValue::F32(0.5), "0.5 (f32)"),
            (GgufValue::Bool(true), "true (bool)"),
            ("a\"b".into(), "\"a\\\"b\" (string)"),
            (vec![1_i32, 2].into(), "an array of 2 elements of type i32"),
            (
                GgufValue::Array(GgufArray::Array(vec![GgufArray::U8(vec![])])),
                "an array of 1 elements of type array",
            ),
        ] {
            assert_eq!(value.shown(), want);
        }
        let long = GgufValue::String("ä".repeat(100)).shown();
        assert_eq!(long, format!("\"{}\"… (string)", "ä".repeat(60)));
    }
}
