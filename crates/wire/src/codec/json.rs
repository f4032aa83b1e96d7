//! JSON bodies.
//!
//! Written compact; read with unknown fields ignored. Only when reading fails are the bytes read a
//! second time, slowly, to name the field.

use std::borrow::Cow;
use std::collections::BTreeMap;

use bytes::Bytes;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::error::Category;
use serde_json::value::RawValue;

use crate::route::Route;
use crate::{DecodeError, DecodeErrorKind, InvalidInput};

/// Writes a value, without the checks that [`ApiRequest::body`](crate::ApiRequest::body) makes: a number that
/// JSON has no form for becomes null.
///
/// # Errors
/// If a map has keys that are not text, or a type refuses to be written.
pub fn encode<T: Serialize>(value: &T) -> Result<Bytes, InvalidInput> {
    encode_sized(value, 128)
}

/// Writes a value whose size is about known.
pub(crate) fn encode_sized<T: Serialize>(value: &T, size: usize) -> Result<Bytes, InvalidInput> {
    let mut out = Vec::with_capacity(size);
    serde_json::to_writer(&mut out, value)
        .map_err(|why| InvalidInput::new("body", why.to_string()))?;
    Ok(out.into())
}

/// Reads a value.
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
/// If the bytes are not a JSON object of that shape; the error names the field.
pub fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, DecodeError> {
    // Every body of the API is an object; serde would read a list of field values as well.
    if let Some(other) = body.trim_ascii_start().first().filter(|first| **first != b'{') {
        let why = format!("a JSON object was expected, not {:?}", char::from(*other));
        return Err(DecodeError::new(DecodeErrorKind::Json, why));
    }
    decode_borrowed(body)
}

/// Reads a value that may borrow from the bytes.
///
/// # Errors
/// If the bytes are not JSON of that shape; the error names the field.
pub fn decode_borrowed<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, DecodeError> {
    serde_json::from_slice(body).map_err(|error| locate::<T>(body, &error))
}

#[cold]
fn locate<'a, T: Deserialize<'a>>(body: &'a [u8], error: &serde_json::Error) -> DecodeError {
    let kind = match error.classify() {
        Category::Eof => DecodeErrorKind::Truncated,
        _ => DecodeErrorKind::Json,
    };
    let found = DecodeError::new(kind, error.to_string());
    let mut reader = serde_json::Deserializer::from_slice(body);
    match serde_path_to_error::deserialize::<_, T>(&mut reader) {
        Err(slow) if slow.path().iter().len() > 0 => found.within(&slow.path().to_string()),
        _ => found,
    }
}

/// Refuses a body whose `type` contradicts what was expected. It may be missing or null.
pub(crate) fn expect_tag(body: &[u8], tag: &str) -> Result<(), DecodeError> {
    #[derive(Deserialize)]
    struct Tagged<'a> {
        #[serde(borrow, default, rename = "type")]
        tag: Option<Cow<'a, str>>,
    }

    match decode_borrowed::<Tagged<'_>>(body)?.tag {
        Some(other) if other != tag => {
            let why = format!("is {other:?} where {tag:?} was expected");
            Err(DecodeError::new(DecodeErrorKind::Value, why).within("type"))
        }
        _ => Ok(()),
    }
}

/// Fields that a server which does not know them may refuse, and the value that says the same as
/// leaving them out.
const OPTIONAL: &[(Route, &str, &str)] = &[
    (Route::CreateModel, "optimizer_config", r#"{"type":"adamw"}"#),
    (Route::RetrieveFuture, "allow_metadata_only", "false"),
    (Route::Sample, "prompt_alt_tokens_k", "0"),
    (Route::Sample, "prompt_logprobs", "false"),
    (Route::Sample, "record_stability_info", "false"),
    (Route::Sample, "topk_prompt_logprobs", "0"),
    (Route::Sample, "topk_sample_logprobs", "0"),
    (Route::SaveWeights, "overwrite", "false"),
];

/// The same body without the fields that are at their default, for old servers that refuse what
/// they do not know.
///
/// ```
/// use tinkex_wire::codec::json;
/// use tinkex_wire::{ApiRequest, RetrieveFuture, Route};
///
/// let poll = RetrieveFuture { request_id: "r-1".into(), allow_metadata_only: false };
/// let body = json::encode(&poll)?;
/// assert_eq!(&json::without_defaults(Route::RetrieveFuture, &body)[..], br#"{"request_id":"r-1"}"#);
/// # Ok::<_, tinkex_wire::InvalidInput>(())
/// ```
#[must_use]
pub fn without_defaults(route: Route, body: &Bytes) -> Bytes {
    let optional = |key: &str, value: &RawValue| {
        OPTIONAL.iter().any(|row| (row.0, row.1, row.2) == (route, key, value.get()))
    };
    if !OPTIONAL.iter().any(|row| row.0 == route) {
        return body.clone();
    }
    let Ok(mut fields) = serde_json::from_slice::<BTreeMap<&str, &RawValue>>(body) else {
        return body.clone();
    };
    fields.retain(|key, value| !optional(key, value));
    serde_json::to_vec(&fields).map_or_else(|_| body.clone(), Bytes::from)
}
