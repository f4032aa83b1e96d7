//! Writing the wire format. Every writer has a twin that computes its size.
//!
//! All field numbers of this API are below 16, so a tag is one byte.

use std::borrow::Cow;

use bytemuck::NoUninit;

const VARINT: u8 = 0;
const FIXED64: u8 = 1;
const BYTES: u8 = 2;

pub(super) fn varint_size(number: u64) -> usize {
    // Lengths are nearly always below 2 MB, and they are asked for many times a message.
    match number {
        ..0x80 => 1,
        0x80..0x4000 => 2,
        0x4000..0x20_0000 => 3,
        _ => (64 - number.leading_zeros()).div_ceil(7) as usize,
    }
}

pub(super) fn put_varint(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number.to_le_bytes()[0] | 0x80);
        number >>= 7;
    }
    out.push(number.to_le_bytes()[0]);
}

fn put_tag(out: &mut Vec<u8>, field: u8, wire_type: u8) {
    debug_assert!((1..16).contains(&field), "one-byte tags only");
    out.push(field << 3 | wire_type);
}

/// A field of `len` bytes, header included.
pub(super) fn bytes_size(len: usize) -> usize {
    1 + varint_size(len as u64) + len
}

/// The header of a field of `len` bytes, which the caller writes next.
pub(super) fn put_header(out: &mut Vec<u8>, field: u8, len: usize) {
    put_tag(out, field, BYTES);
    put_varint(out, len as u64);
}

pub(super) fn put_bytes(out: &mut Vec<u8>, field: u8, bytes: &[u8]) {
    put_header(out, field, bytes.len());
    out.extend_from_slice(bytes);
}

/// A field that is left out when empty.
pub(super) fn text_size(text: &str) -> usize {
    if text.is_empty() { 0 } else { bytes_size(text.len()) }
}

pub(super) fn put_text(out: &mut Vec<u8>, field: u8, text: &str) {
    if !text.is_empty() {
        put_bytes(out, field, text.as_bytes());
    }
}

/// A field that is left out when zero.
pub(super) fn number_size(number: u64) -> usize {
    if number == 0 { 0 } else { 1 + varint_size(number) }
}

pub(super) fn put_number(out: &mut Vec<u8>, field: u8, number: u64) {
    if number != 0 {
        put_present_number(out, field, number);
    }
}

/// A field that is written even when zero.
pub(super) fn put_present_number(out: &mut Vec<u8>, field: u8, number: u64) {
    put_tag(out, field, VARINT);
    put_varint(out, number);
}

pub(super) const DOUBLE_SIZE: usize = 9;

pub(super) fn put_double(out: &mut Vec<u8>, field: u8, number: f64) {
    put_tag(out, field, FIXED64);
    out.extend_from_slice(&number.to_le_bytes());
}

fn packed_len(numbers: &[usize]) -> usize {
    numbers.iter().map(|number| varint_size(*number as u64)).sum()
}

/// A list of integers, packed; left out when empty.
pub(super) fn dims_size(dims: &[usize]) -> usize {
    if dims.is_empty() { 0 } else { bytes_size(packed_len(dims)) }
}

pub(super) fn put_dims(out: &mut Vec<u8>, field: u8, dims: &[usize]) {
    if !dims.is_empty() {
        put_header(out, field, packed_len(dims));
        for dim in dims {
            put_varint(out, *dim as u64);
        }
    }
}

/// Numbers as the wire wants them: on a little-endian machine, the memory they are in.
pub(super) trait Little: NoUninit {
    fn bytes(numbers: &[Self]) -> Cow<'_, [u8]>;
}

macro_rules! little {
    ($($type:ty),*) => {$(
        impl Little for $type {
            fn bytes(numbers: &[Self]) -> Cow<'_, [u8]> {
                if cfg!(target_endian = "little") {
                    Cow::Borrowed(bytemuck::cast_slice(numbers))
                } else {
                    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
                }
            }
        }
    )*};
}

little!(f32, i64, u32);

pub(super) fn put_array<T: Little>(out: &mut Vec<u8>, field: u8, numbers: &[T]) {
    put_bytes(out, field, &T::bytes(numbers));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_agree_with_what_is_written() {
        for shift in 0..64 {
            for number in [1_u64 << shift, (1 << shift) - 1, u64::MAX >> shift] {
                let mut out = Vec::new();
                put_varint(&mut out, number);
                assert_eq!(out.len(), varint_size(number), "{number}");
            }
        }
    }
}
