//! Encoding of protobuf fields. Each `put_*` function has a `*_size` function that computes its
//! size.
//!
//! All field numbers of this API are less than 16, so a tag is one byte.

use std::borrow::Cow;

use bytemuck::NoUninit;

const VARINT: u8 = 0;
const FIXED64: u8 = 1;
const BYTES: u8 = 2;

pub(super) fn varint_size(number: u64) -> usize {
    // Fast path for lengths below 2 MiB: nearly all lengths, which are computed many times per
    // message.
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

/// Returns the size of a bytes field of length `len`, including its header.
pub(super) fn bytes_size(len: usize) -> usize {
    1 + varint_size(len as u64) + len
}

/// Writes the header of a bytes field of length `len`; the caller writes the bytes.
pub(super) fn put_header(out: &mut Vec<u8>, field: u8, len: usize) {
    put_tag(out, field, BYTES);
    put_varint(out, len as u64);
}

pub(super) fn put_bytes(out: &mut Vec<u8>, field: u8, bytes: &[u8]) {
    put_header(out, field, bytes.len());
    out.extend_from_slice(bytes);
}

/// Returns the size of a bytes field of length `len` that is omitted when empty.
pub(super) fn nonempty_size(len: usize) -> usize {
    if len == 0 { 0 } else { bytes_size(len) }
}

/// Writes a bytes field unless it is empty.
pub(super) fn put_nonempty(out: &mut Vec<u8>, field: u8, bytes: &[u8]) {
    if !bytes.is_empty() {
        put_bytes(out, field, bytes);
    }
}

/// Returns the size of a string field that is omitted when empty.
pub(super) fn text_size(text: &str) -> usize {
    nonempty_size(text.len())
}

pub(super) fn put_text(out: &mut Vec<u8>, field: u8, text: &str) {
    put_nonempty(out, field, text.as_bytes());
}

/// Returns the size of an integer field that is omitted when zero.
pub(super) fn number_size(number: u64) -> usize {
    if number == 0 { 0 } else { 1 + varint_size(number) }
}

pub(super) fn put_number(out: &mut Vec<u8>, field: u8, number: u64) {
    if number != 0 {
        put_present_number(out, field, number);
    }
}

/// Writes an integer field even when zero.
pub(super) fn put_present_number(out: &mut Vec<u8>, field: u8, number: u64) {
    put_tag(out, field, VARINT);
    put_varint(out, number);
}

/// Size of a `double` field with its tag.
pub(super) const DOUBLE_SIZE: usize = 9;

pub(super) fn put_double(out: &mut Vec<u8>, field: u8, number: f64) {
    put_tag(out, field, FIXED64);
    out.extend_from_slice(&number.to_le_bytes());
}

fn packed_len(numbers: &[usize]) -> usize {
    numbers.iter().map(|number| varint_size(*number as u64)).sum()
}

/// Returns the size of a packed list of integers that is omitted when empty.
pub(super) fn dims_size(dims: &[usize]) -> usize {
    nonempty_size(packed_len(dims))
}

pub(super) fn put_dims(out: &mut Vec<u8>, field: u8, dims: &[usize]) {
    if !dims.is_empty() {
        put_header(out, field, packed_len(dims));
        for dim in dims {
            put_varint(out, *dim as u64);
        }
    }
}

/// Numbers with a little-endian encoding, which borrows their memory on little-endian targets.
pub(super) trait LittleEndian: NoUninit {
    fn bytes(numbers: &[Self]) -> Cow<'_, [u8]>;
}

macro_rules! little_endian {
    ($($type:ty),*) => {$(
        impl LittleEndian for $type {
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

little_endian!(f32, i64, u32);

pub(super) fn put_array<T: LittleEndian>(out: &mut Vec<u8>, field: u8, numbers: &[T]) {
    put_bytes(out, field, &T::bytes(numbers));
}

/// Returns the size of an array field that is omitted when empty.
pub(super) fn nonempty_array_size<T>(numbers: &[T]) -> usize {
    nonempty_size(size_of_val(numbers))
}

/// Writes an array field unless it is empty.
pub(super) fn put_nonempty_array<T: LittleEndian>(out: &mut Vec<u8>, field: u8, numbers: &[T]) {
    put_nonempty(out, field, &T::bytes(numbers));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn computed_sizes_match_encoded_sizes() {
        for shift in 0..64 {
            for number in [1_u64 << shift, (1 << shift) - 1, u64::MAX >> shift] {
                let mut out = Vec::new();
                put_varint(&mut out, number);
                assert_eq!(out.len(), varint_size(number), "{number}");
            }
        }
    }
}
