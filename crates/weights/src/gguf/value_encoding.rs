//! Values of the metadata in files: the number of the type, then the value. An array is the number
//! of the type of its elements, their count, and the elements.

use super::cursor::{GgufCursor, ParseError};
use super::value::{GgufArray, GgufValue, with_content};

/// Maximum depth of nested arrays.
const MAX_DEPTH: usize = 4;

/// A type of values, with its number and its form in files.
pub(super) trait GgufType: Sized {
    const NUMBER: u32;
    /// Name for errors.
    const NAME: &'static str;
    /// Minimum size of a value in bytes.
    const MIN_BYTES: u64;

    /// Reads a value, which is inside `depth` arrays.
    fn read(cursor: &mut GgufCursor<'_>, depth: usize) -> Result<Self, ParseError>;

    /// Appends the value.
    fn write(&self, out: &mut Vec<u8>);
}

macro_rules! numbers {
    ($($type:ident = $number:literal),* $(,)?) => {$(
        impl GgufType for $type {
            const NUMBER: u32 = $number;
            const NAME: &'static str = stringify!($type);
            const MIN_BYTES: u64 = size_of::<Self>() as u64;

            fn read(cursor: &mut GgufCursor<'_>, _: usize) -> Result<Self, ParseError> {
                Ok(Self::from_le_bytes(cursor.array()?))
            }

            fn write(&self, out: &mut Vec<u8>) {
                out.extend(self.to_le_bytes());
            }
        }
    )*};
}

numbers! {
    u8 = 0, i8 = 1, u16 = 2, i16 = 3, u32 = 4, i32 = 5, f32 = 6, u64 = 10, i64 = 11, f64 = 12,
}

impl GgufType for bool {
    const NUMBER: u32 = 7;
    const NAME: &'static str = "bool";
    const MIN_BYTES: u64 = 1;

    fn read(cursor: &mut GgufCursor<'_>, _: usize) -> Result<Self, ParseError> {
        match cursor.array()? {
            [0] => Ok(false),
            [1] => Ok(true),
            [other] => Err(format!("a boolean has the value {other}, expected 0 or 1").into()),
        }
    }

    fn write(&self, out: &mut Vec<u8>) {
        out.push((*self).into());
    }
}

impl GgufType for String {
    const NUMBER: u32 = 8;
    const NAME: &'static str = "string";
    const MIN_BYTES: u64 = 8;

    fn read(cursor: &mut GgufCursor<'_>, _: usize) -> Result<Self, ParseError> {
        cursor.string()
    }

    fn write(&self, out: &mut Vec<u8>) {
        write_string(self, out);
    }
}

/// Appends the length of a string and its bytes.
pub(super) fn write_string(text: &str, out: &mut Vec<u8>) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

impl GgufType for GgufArray {
    const NUMBER: u32 = 9;
    const NAME: &'static str = "array";
    const MIN_BYTES: u64 = 12;

    fn read(cursor: &mut GgufCursor<'_>, depth: usize) -> Result<Self, ParseError> {
        let depth = depth + 1;
        if depth > MAX_DEPTH {
            return Err(format!("arrays are nested more than {MAX_DEPTH} deep").into());
        }
        Ok(match cursor.u32()? {
            u8::NUMBER => Self::U8(read_elements(cursor, depth)?),
            i8::NUMBER => Self::I8(read_elements(cursor, depth)?),
            u16::NUMBER => Self::U16(read_elements(cursor, depth)?),
            i16::NUMBER => Self::I16(read_elements(cursor, depth)?),
            u32::NUMBER => Self::U32(read_elements(cursor, depth)?),
            i32::NUMBER => Self::I32(read_elements(cursor, depth)?),
            f32::NUMBER => Self::F32(read_elements(cursor, depth)?),
            bool::NUMBER => Self::Bool(read_elements(cursor, depth)?),
            String::NUMBER => Self::String(read_elements(cursor, depth)?),
            Self::NUMBER => Self::Array(read_elements(cursor, depth)?),
            u64::NUMBER => Self::U64(read_elements(cursor, depth)?),
            i64::NUMBER => Self::I64(read_elements(cursor, depth)?),
            f64::NUMBER => Self::F64(read_elements(cursor, depth)?),
            other => return Err(unknown_type(other)),
        })
    }

    fn write(&self, out: &mut Vec<u8>) {
        with_content!(self, elements => write_elements(elements, out));
    }
}

/// Reads the count and the elements of an array.
fn read_elements<T: GgufType>(
    cursor: &mut GgufCursor<'_>,
    depth: usize,
) -> Result<Vec<T>, ParseError> {
    let count = cursor.u64()?;
    cursor.repeat(count, T::MIN_BYTES, |cursor| T::read(cursor, depth))
}

fn write_elements<T: GgufType>(elements: &[T], out: &mut Vec<u8>) {
    T::NUMBER.write(out);
    (elements.len() as u64).write(out);
    elements.iter().for_each(|element| element.write(out));
}

impl GgufValue {
    /// Reads the number of a type and a value of that type.
    pub(super) fn read(cursor: &mut GgufCursor<'_>) -> Result<Self, ParseError> {
        Ok(match cursor.u32()? {
            u8::NUMBER => Self::U8(GgufType::read(cursor, 0)?),
            i8::NUMBER => Self::I8(GgufType::read(cursor, 0)?),
            u16::NUMBER => Self::U16(GgufType::read(cursor, 0)?),
            i16::NUMBER => Self::I16(GgufType::read(cursor, 0)?),
            u32::NUMBER => Self::U32(GgufType::read(cursor, 0)?),
            i32::NUMBER => Self::I32(GgufType::read(cursor, 0)?),
            f32::NUMBER => Self::F32(GgufType::read(cursor, 0)?),
            bool::NUMBER => Self::Bool(GgufType::read(cursor, 0)?),
            String::NUMBER => Self::String(GgufType::read(cursor, 0)?),
            GgufArray::NUMBER => Self::Array(GgufType::read(cursor, 0)?),
            u64::NUMBER => Self::U64(GgufType::read(cursor, 0)?),
            i64::NUMBER => Self::I64(GgufType::read(cursor, 0)?),
            f64::NUMBER => Self::F64(GgufType::read(cursor, 0)?),
            other => return Err(unknown_type(other)),
        })
    }

    /// Appends the number of the type and the value.
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        fn write<T: GgufType>(content: &T, out: &mut Vec<u8>) {
            T::NUMBER.write(out);
            content.write(out);
        }
        with_content!(self, content => write(content, out));
    }
}

fn unknown_type(number: u32) -> ParseError {
    format!("value type {number} is unknown, expected 0 to 12").into()
}
