//! The protobuf messages of the API, written by hand.
//!
//! Three messages cross the wire: [`request`] to the server, [`output`] and [`sample`] back. Most
//! of their bytes are raw little-endian arrays, so encoding is copying: the size is computed
//! first, then everything goes into one buffer of exactly that size. Decoding checks every length
//! before it allocates, and copies each array once into a typed vector.
//!
//! `tests/it/messages.rs` declares the same messages for prost; the tests check that both agree.

pub(crate) mod output;
mod read;
pub(crate) mod request;
pub(crate) mod sample;
mod tensor;
mod write;

pub(crate) use read::take_varint;

use crate::DecodeError;

use read::{Field, Fields};

/// Entries that a map of named tensors or settings may have. They are searched one by one.
const MAX_ENTRIES: usize = 256;

/// Key and value of a map entry; a missing key is the empty text.
fn entry(message: &[u8]) -> Result<(&str, Option<Field<'_>>), DecodeError> {
    let (mut key, mut value) = ("", None);
    let mut fields = Fields::new(message, &["key", "value"]);
    while let Some(field) = fields.next()? {
        match field.number {
            1 => key = field.text()?,
            2 => value = Some(field),
            _ => {}
        }
    }
    Ok((key, value))
}
