//! Hand-written codecs of the API's protobuf messages.
//!
//! There are three messages: [`request`] to the server, [`output`] and [`sample`] to the client.
//! They consist mostly of raw little-endian arrays. An encoder computes the exact size first and
//! then writes into one buffer of that size. A decoder checks every length before it allocates, and
//! copies each array once.
//!
//! `tests/it/messages.rs` declares the messages for prost; the tests compare both implementations.

pub(crate) mod output;
mod read;
pub(crate) mod request;
pub(crate) mod sample;
mod tensor;
mod write;

pub(crate) use read::take_varint;

use crate::DecodeError;

use read::{Field, Fields};

/// Maximum number of entries of a map, which lookups search linearly.
const MAX_ENTRIES: usize = 256;

/// Returns the key and the value of a map entry; a missing key is the empty string.
fn entry(message: &[u8]) -> Result<(&str, Option<Field<'_>>), DecodeError> {
    let mut key = "";
    let mut value = None;
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
