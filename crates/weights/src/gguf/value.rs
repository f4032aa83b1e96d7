//! [`GgufValue`]: values of the metadata.

use super::cursor::{GgufCursor, ParseError};

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

/// Maximum depth of nested arrays.
const MAX_DEPTH: usize = 4;

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

    pub(super) fn read(cursor: &mut GgufCursor<'_>) -> Result<Self, ParseError> {
        let kind = cursor.u32()?;
        Ok(match kind {
            0 => Self::U8(u8::from_le_bytes(cursor.array()?)),
            1 => Self::I8(i8::from_le_bytes(cursor.array()?)),
            2 => Self::U16(u16::from_le_bytes(cursor.array()?)),
            3 => Self::I16(i16::from_le_bytes(cursor.array()?)),
            4 => Self::U32(cursor.u32()?),
            5 => Self::I32(i32::from_le_bytes(cursor.array()?)),
            6 => Self::F32(f32::from_le_bytes(cursor.array()?)),
            7 => Self::Bool(read_bool(cursor)?),
            8 => Self::String(cursor.string()?),
            9 => Self::Array(GgufArray::read(cursor, 1)?),
            10 => Self::U64(cursor.u64()?),
            11 => Self::I64(i64::from_le_bytes(cursor.array()?)),
            12 => Self::F64(f64::from_le_bytes(cursor.array()?)),
            other => return Err(unknown_type(other)),
        })
    }

    /// Appends the number of the type and the value.
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        let kind = match self {
            Self::U8(_) => 0,
            Self::I8(_) => 1,
            Self::U16(_) => 2,
            Self::I16(_) => 3,
            Self::U32(_) => 4,
            Self::I32(_) => 5,
            Self::F32(_) => 6,
            Self::Bool(_) => 7,
            Self::String(_) => 8,
            Self::Array(_) => 9,
            Self::U64(_) => 10,
            Self::I64(_) => 11,
            Self::F64(_) => 12_u32,
        };
        out.extend(kind.to_le_bytes());
        match self {
            Self::U8(value) => out.push(*value),
            Self::I8(value) => out.extend(value.to_le_bytes()),
            Self::U16(value) => out.extend(value.to_le_bytes()),
            Self::I16(value) => out.extend(value.to_le_bytes()),
            Self::U32(value) => out.extend(value.to_le_bytes()),
            Self::I32(value) => out.extend(value.to_le_bytes()),
            Self::F32(value) => out.extend(value.to_le_bytes()),
            Self::Bool(value) => out.push((*value).into()),
            Self::String(text) => write_string(text, out),
            Self::Array(array) => array.write(out),
            Self::U64(value) => out.extend(value.to_le_bytes()),
            Self::I64(value) => out.extend(value.to_le_bytes()),
            Self::F64(value) => out.extend(value.to_le_bytes()),
        }
    }
}

impl GgufArray {
    fn read(cursor: &mut GgufCursor<'_>, depth: usize) -> Result<Self, ParseError> {
        if depth > MAX_DEPTH {
            return Err(format!("arrays are nested more than {MAX_DEPTH} deep").into());
        }
        let (kind, count) = (cursor.u32()?, cursor.u64()?);
        Ok(match kind {
            0 => Self::U8(cursor.elements(count, u8::from_le_bytes)?),
            1 => Self::I8(cursor.elements(count, i8::from_le_bytes)?),
            2 => Self::U16(cursor.elements(count, u16::from_le_bytes)?),
            3 => Self::I16(cursor.elements(count, i16::from_le_bytes)?),
            4 => Self::U32(cursor.elements(count, u32::from_le_bytes)?),
            5 => Self::I32(cursor.elements(count, i32::from_le_bytes)?),
            6 => Self::F32(cursor.elements(count, f32::from_le_bytes)?),
            7 => Self::Bool(cursor.repeat(count, 1, read_bool)?),
            8 => Self::String(cursor.repeat(count, 8, GgufCursor::string)?),
            9 => Self::Array(cursor.repeat(count, 12, |cursor| Self::read(cursor, depth + 1))?),
            10 => Self::U64(cursor.elements(count, u64::from_le_bytes)?),
            11 => Self::I64(cursor.elements(count, i64::from_le_bytes)?),
            12 => Self::F64(cursor.elements(count, f64::from_le_bytes)?),
            other => return Err(unknown_type(other)),
        })
    }

    /// Appends the type of the elements, their number and the elements.
    fn write(&self, out: &mut Vec<u8>) {
        let mut start = |kind: u32, count: usize| {
            out.extend(kind.to_le_bytes());
            out.extend((count as u64).to_le_bytes());
        };
        match self {
            Self::U8(values) => {
                start(0, values.len());
                out.extend(values);
            }
            Self::I8(values) => {
                start(1, values.len());
                out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            }
            Self::U16(values) => {
                start(2, values.len());
                out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            }
            Self::I16(values) => {
                start(3, values.len());
                out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            }
            Self::U32(values) => {
                start(4, values.len());
                out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            }
            Self::I32(values) => {
                start(5, values.len());
                out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            }
            Self::F32(values) => {
                start(6, values.len());
                out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            }
            Self::Bool(values) => {
                start(7, values.len());
                out.extend(values.iter().map(|value| u8::from(*value)));
            }
            Self::String(texts) => {
                start(8, texts.len());
                texts.iter().for_each(|text| write_string(text, out));
            }
            Self::Array(arrays) => {
                start(9, arrays.len());
                arrays.iter().for_each(|array| array.write(out));
            }
            Self::U64(values) => {
                start(10, values.len());
                out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            }
            Self::I64(values) => {
                start(11, values.len());
                out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            }
            Self::F64(values) => {
                start(12, values.len());
                out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            }
        }
    }
}

/// Appends the length of a string and its bytes.
pub(super) fn write_string(text: &str, out: &mut Vec<u8>) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn read_bool(cursor: &mut GgufCursor<'_>) -> Result<bool, ParseError> {
    match cursor.array()? {
        [0] => Ok(false),
        [1] => Ok(true),
        [other] => Err(format!("a boolean has the value {other}, expected 0 or 1").into()),
    }
}

fn unknown_type(number: u32) -> ParseError {
    format!("value type {number} is unknown, expected 0 to 12").into()
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
