//! Decoding of protobuf fields and arrays.

use std::sync::Arc;

use crate::slice::SharedSlice;
use crate::tensor::Shape;
use crate::{DecodeError, DecodeErrorKind};

/// Field names of a message in the order of their numbers, for errors.
pub(super) type Names = &'static [&'static str];

/// Iterator over the fields of a message.
pub(super) struct Fields<'a> {
    rest: &'a [u8],
    names: Names,
}

/// One field of a message.
pub(super) struct Field<'a> {
    pub(super) number: u32,
    name: &'static str,
    value: FieldValue<'a>,
}

enum FieldValue<'a> {
    Varint(u64),
    Fixed64([u8; 8]),
    Bytes(&'a [u8]),
    Fixed32,
}

impl<'a> Fields<'a> {
    pub(super) fn new(message: &'a [u8], names: Names) -> Self {
        Self { rest: message, names }
    }

    /// Returns the next field.
    pub(super) fn next(&mut self) -> Result<Option<Field<'a>>, DecodeError> {
        if self.rest.is_empty() {
            return Ok(None);
        }
        let tag = take_varint(&mut self.rest)?;
        let number = u32::try_from(tag >> 3).ok().filter(|n| (1..1 << 29).contains(n));
        let Some(number) = number else {
            return Err(DecodeError::new(DecodeErrorKind::Tag, format!("invalid tag {tag:#x}")));
        };
        let known = usize::try_from(number).ok().and_then(|n| self.names.get(n - 1));
        let name = known.copied().unwrap_or("(unknown field)");
        let value = self.value(tag & 7).map_err(|error| error.within(name))?;
        Ok(Some(Field { number, name, value }))
    }

    fn value(&mut self, wire_type: u64) -> Result<FieldValue<'a>, DecodeError> {
        Ok(match wire_type {
            0 => FieldValue::Varint(take_varint(&mut self.rest)?),
            1 => FieldValue::Fixed64(*self.take_chunk()?),
            2 => {
                let len = take_varint(&mut self.rest)?;
                let len = usize::try_from(len).ok().filter(|len| *len <= self.rest.len());
                let Some(len) = len else {
                    return Err(truncated());
                };
                let (bytes, rest) = self.rest.split_at(len);
                self.rest = rest;
                FieldValue::Bytes(bytes)
            }
            5 => {
                self.take_chunk::<4>()?;
                FieldValue::Fixed32
            }
            other => {
                let detail = format!("unsupported wire type {other}");
                return Err(DecodeError::new(DecodeErrorKind::Tag, detail));
            }
        })
    }

    fn take_chunk<const N: usize>(&mut self) -> Result<&'a [u8; N], DecodeError> {
        let (chunk, rest) = self.rest.split_first_chunk().ok_or_else(truncated)?;
        self.rest = rest;
        Ok(chunk)
    }
}

/// Counts the occurrences of the given fields, which are the capacities of the decoded lists.
pub(super) fn count<const N: usize>(
    message: &[u8],
    names: Names,
    numbers: [u32; N],
) -> Result<[usize; N], DecodeError> {
    let mut fields = Fields::new(message, names);
    let mut counts = [0; N];
    while let Some(field) = fields.next()? {
        for (count, number) in counts.iter_mut().zip(numbers) {
            *count += usize::from(field.number == number);
        }
    }
    Ok(counts)
}

impl<'a> Field<'a> {
    fn unexpected(&self, expected: &str) -> DecodeError {
        DecodeError::new(DecodeErrorKind::Tag, format!("expected {expected}")).within(self.name)
    }

    /// Returns an error in this field.
    pub(super) fn fail(&self, kind: DecodeErrorKind, detail: impl Into<String>) -> DecodeError {
        DecodeError::new(kind, detail).within(self.name)
    }

    pub(super) fn bytes(&self) -> Result<&'a [u8], DecodeError> {
        match self.value {
            FieldValue::Bytes(bytes) => Ok(bytes),
            _ => Err(self.unexpected("a byte field")),
        }
    }

    pub(super) fn text(&self) -> Result<&'a str, DecodeError> {
        std::str::from_utf8(self.bytes()?)
            .map_err(|error| self.fail(DecodeErrorKind::Utf8, error.to_string()))
    }

    /// Decodes a nested message and prepends this field to the path of its errors.
    pub(super) fn message<T>(
        &self,
        decode: impl FnOnce(&'a [u8]) -> Result<T, DecodeError>,
    ) -> Result<T, DecodeError> {
        decode(self.bytes()?).map_err(|error| error.within(self.name))
    }

    pub(super) fn varint(&self) -> Result<u64, DecodeError> {
        match self.value {
            FieldValue::Varint(number) => Ok(number),
            _ => Err(self.unexpected("an integer field")),
        }
    }

    /// Returns an `int64` that is not negative.
    pub(super) fn count(&self) -> Result<u64, DecodeError> {
        let number = self.varint()?.cast_signed();
        u64::try_from(number)
            .map_err(|_| self.fail(DecodeErrorKind::Number, format!("{number} is negative")))
    }

    /// Returns a `uint32`.
    pub(super) fn uint32(&self) -> Result<u32, DecodeError> {
        let number = self.varint()?;
        u32::try_from(number).map_err(|_| {
            self.fail(DecodeErrorKind::Number, format!("{number} does not fit into 32 bits"))
        })
    }

    /// Returns an `int32` that is not negative.
    pub(super) fn count32(&self) -> Result<u32, DecodeError> {
        let number = self.varint()?.cast_signed();
        i32::try_from(number).ok().and_then(|number| u32::try_from(number).ok()).ok_or_else(|| {
            self.fail(DecodeErrorKind::Number, format!("{number} is not within 0 to 2^31 - 1"))
        })
    }

    pub(super) fn double(&self) -> Result<f64, DecodeError> {
        match self.value {
            FieldValue::Fixed64(bytes) => Ok(f64::from_le_bytes(bytes)),
            _ => Err(self.unexpected("a floating-point field")),
        }
    }

    /// Appends the packed or unpacked dimensions of this field to a shape.
    pub(super) fn dims(&self, shape: &mut Shape) -> Result<(), DecodeError> {
        let mut push = |dim: u64| {
            let dim = usize::try_from(dim.cast_signed());
            dim.map(|dim| shape.push(dim))
                .map_err(|_| self.fail(DecodeErrorKind::Shape, "a dimension is negative"))
        };
        match self.value {
            FieldValue::Varint(dim) => push(dim),
            FieldValue::Bytes(mut packed) => {
                while !packed.is_empty() {
                    push(take_varint(&mut packed).map_err(|error| error.within(self.name))?)?;
                }
                Ok(())
            }
            _ => Err(self.unexpected("a list of integers")),
        }
    }
}

fn truncated() -> DecodeError {
    DecodeError::new(DecodeErrorKind::Truncated, "the message ends within the field")
}

/// Removes a variable-length integer from the front of `rest`.
pub(crate) fn take_varint(rest: &mut &[u8]) -> Result<u64, DecodeError> {
    let mut number = 0_u64;
    for (i, byte) in rest.iter().take(10).enumerate() {
        number |= u64::from(byte & 0x7F) << (7 * i);
        if byte & 0x80 == 0 {
            // The tenth byte holds one bit.
            if i == 9 && *byte > 1 {
                break;
            }
            *rest = &rest[i + 1..];
            return Ok(number);
        }
    }
    if rest.len() < 10 {
        return Err(truncated());
    }
    Err(DecodeError::new(DecodeErrorKind::Varint, "integer of more than ten bytes"))
}

/// Decoders of raw little-endian arrays. A decoder makes one allocation and one pass, which compiles to
/// a plain copy on little-endian targets.
macro_rules! arrays {
    ($($(#[$doc:meta])* $name:ident: $wire:ty => $type:ty, $convert:expr;)*) => {$(
        $(#[$doc])*
        pub(super) fn $name(bytes: &[u8]) -> Result<SharedSlice<$type>, DecodeError> {
            const SIZE: usize = size_of::<$wire>();
            let (numbers, remainder) = bytes.as_chunks::<SIZE>();
            if !remainder.is_empty() {
                let len = bytes.len();
                let detail = format!("{len} bytes is not a multiple of the element size {SIZE}");
                return Err(DecodeError::new(DecodeErrorKind::Length, detail));
            }
            if numbers.is_empty() {
                return Ok(SharedSlice::default());
            }
            let numbers = numbers.iter().map(|number| $convert(<$wire>::from_le_bytes(*number)));
            Ok(numbers.collect::<Arc<[_]>>().into())
        }
    )*};
}

arrays! {
    f32s: f32 => f32, std::convert::identity;
    i64s: i64 => i64, std::convert::identity;
    u32s: u32 => u32, std::convert::identity;
    /// Widens 32-bit integers.
    i32s_as_i64s: i32 => i64, i64::from;
    /// Widens `bfloat16`, which is the upper half of an `f32`.
    bf16s_as_f32s: u16 => f32, |half| f32::from_bits(u32::from(half) << 16);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn varints_end_within_ten_bytes() {
        let read = |mut bytes: &[u8]| take_varint(&mut bytes).map_err(|e| e.kind());
        assert_eq!(read(&[0x96, 0x01]), Ok(150));
        let mut most = [0xFF; 10];
        most[9] = 1;
        assert_eq!(read(&most), Ok(u64::MAX));
        most[9] = 2;
        assert_eq!(read(&most), Err(DecodeErrorKind::Varint));
        assert_eq!(read(&[0x80; 11]), Err(DecodeErrorKind::Varint));
        assert_eq!(read(&[0x80; 3]), Err(DecodeErrorKind::Truncated));
        assert_eq!(read(&[]), Err(DecodeErrorKind::Truncated));
    }

    #[test]
    fn arrays_are_little_endian() {
        assert_eq!(i64s(&[1, 0, 0, 0, 0, 0, 0, 0x80]).unwrap()[..], [i64::MIN + 1]);
        assert_eq!(i32s_as_i64s(&[0xFF, 0xFF, 0xFF, 0xFF]).unwrap()[..], [-1]);
        assert_eq!(bf16s_as_f32s(&[0x80, 0x3F]).unwrap()[..], [1.0]);
        assert_eq!(f32s(&[0; 5]).unwrap_err().kind(), DecodeErrorKind::Length);
    }
}
