//! Encoding and decoding of JSON bodies.
//!
//! Decoding ignores unknown fields. Only after decoding has failed are the bytes scanned a second
//! time, to find the path of the invalid field.

mod error_path;
pub(crate) mod positioned;

use std::borrow::Cow;

use bytes::Bytes;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::error::Category;

use self::error_path::error_path;
use crate::{DecodeError, DecodeErrorKind, InvalidInput};

/// Encodes a value without validating it: NaN and infinities are encoded as null.
///
/// # Errors
/// Returns an error if a map has keys other than strings, or if the `Serialize` implementation
/// fails.
pub fn encode<T: Serialize>(value: &T) -> Result<Bytes, InvalidInput> {
    encode_sized(value, 128)
}

/// Encodes a value into a buffer with an initial capacity of `capacity` bytes.
pub(crate) fn encode_sized<T: Serialize>(
    value: &T,
    capacity: usize,
) -> Result<Bytes, InvalidInput> {
    let mut out = Vec::with_capacity(capacity);
    serde_json::to_writer(&mut out, value)
        .map_err(|error| InvalidInput::new("body", error.to_string()))?;
    Ok(out.into())
}

/// Decodes a JSON object.
///
/// ```
/// use tinkex_wire::codec::json;
/// use tinkex_wire::SampleRequest;
///
/// let body = br#"{"prompt":{"chunks":[{"type":"encoded_text","tokens":[1,"x"]}]}}"#;
/// let err = json::decode::<SampleRequest>(body).unwrap_err();
/// assert_eq!(err.path(), "prompt.chunks[0].tokens[1]");
/// ```
///
/// # Errors
/// Returns an error with the path of the invalid field if the bytes are not a JSON object that
/// decodes to `T`.
pub fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, DecodeError> {
    // All bodies of the API are objects. Reject lists: serde would accept a list as the values of
    // the fields in order.
    if let Some(other) = body.trim_ascii_start().first().filter(|first| **first != b'{') {
        let detail = format!("expected a JSON object, found {:?}", char::from(*other));
        return Err(DecodeError::new(DecodeErrorKind::Json, detail));
    }
    decode_borrowed(body)
}

/// Decodes a value that may borrow from the bytes.
///
/// # Errors
/// Returns an error with the path of the invalid field if the bytes are not JSON that decodes to
/// `T`.
pub fn decode_borrowed<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, DecodeError> {
    serde_json::from_slice(body).map_err(|error| with_path(body, &error))
}

/// Converts an error of serde_json, and adds the path of the invalid field.
#[cold]
fn with_path(body: &[u8], error: &serde_json::Error) -> DecodeError {
    let kind = match error.classify() {
        Category::Eof => DecodeErrorKind::Truncated,
        _ => DecodeErrorKind::Json,
    };
    let path = error_path(body, error);
    let error = DecodeError::new(kind, error.to_string());
    if path.is_empty() { error } else { error.within(&path) }
}

/// Checks that the `type` field of a body is `tag`, null or missing.
///
/// # Errors
/// If the field has another value, or the body is not a JSON object.
pub(crate) fn expect_tag(body: &[u8], tag: &str) -> Result<(), DecodeError> {
    #[derive(Deserialize)]
    struct Tagged<'a> {
        #[serde(borrow, default, rename = "type")]
        tag: Option<Cow<'a, str>>,
    }

    match decode_borrowed::<Tagged<'_>>(body)?.tag {
        Some(other) if other != tag => {
            let detail = format!("expected {tag:?}, found {other:?}");
            Err(DecodeError::new(DecodeErrorKind::Value, detail).within("type"))
        }
        _ => Ok(()),
    }
}
