//! Error types.
//!
//! [`DecodeError`] reports malformed bytes from the peer, [`InvalidInput`] invalid values from the
//! caller. Both name the field.

use std::fmt;

/// Error returned when bytes cannot be decoded.
///
/// [`path`](Self::path) names the field within the message, for example
/// `data[3].loss_fn_inputs["weights"].dense`.
///
/// ```
/// use tinkex_wire::{DecodeErrorKind, SampleResponse};
///
/// let err = SampleResponse::from_proto(b"\x12\x05abc").unwrap_err();
/// assert_eq!(err.kind(), DecodeErrorKind::Truncated);
/// assert_eq!(err.path(), "prompt_logprobs");
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct DecodeError(Box<DecodeErrorData>);

#[derive(Clone, PartialEq, Eq)]
struct DecodeErrorData {
    kind: DecodeErrorKind,
    path: String,
    detail: String,
}

/// Kind of a [`DecodeError`].
///
/// Errors in JSON have the kind [`Json`](Self::Json), except for an unexpected `type` tag
/// ([`Value`](Self::Value)) and an incomplete body ([`Truncated`](Self::Truncated)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DecodeErrorKind {
    /// The message ends within a field.
    Truncated,
    /// Invalid field number or wire type.
    Tag,
    /// Variable-length integer of more than ten bytes.
    Varint,
    /// String that is not UTF-8.
    Utf8,
    /// Byte length that does not match the element type or the shape.
    Length,
    /// Shape with a negative or overflowing dimension, or of the wrong rank.
    Shape,
    /// Row or datum offsets that do not start at zero, decrease, or exceed the data.
    Offsets,
    /// Column index outside its row.
    Index,
    /// Missing, unknown or unexpected element type.
    DType,
    /// Number outside the range of its field.
    Number,
    /// Missing required field.
    Missing,
    /// Unexpected `type` tag or enum value.
    Value,
    /// Malformed JSON, or JSON of another structure.
    Json,
    /// Malformed compressed body.
    Compression,
    /// More data than the limit allows.
    TooLarge,
}

impl DecodeError {
    pub(crate) fn new(kind: DecodeErrorKind, detail: impl Into<String>) -> Self {
        Self(Box::new(DecodeErrorData {
            kind,
            path: String::new(),
            detail: truncate(detail.into()),
        }))
    }

    /// Prepends the field `name` to the path.
    pub(crate) fn within(mut self, name: &str) -> Self {
        let inner = &mut self.0.path;
        let joint = if inner.is_empty() || inner.starts_with('[') { "" } else { "." };
        *inner = format!("{}{joint}{inner}", truncate(name.to_owned()));
        self
    }

    /// Prepends the index of a list element to the path.
    pub(crate) fn at(self, index: usize) -> Self {
        self.within(&format!("[{index}]"))
    }

    /// Prepends the key of a map entry to the path.
    pub(crate) fn at_key(self, key: &str) -> Self {
        self.within(&format!("[{key:?}]"))
    }

    /// Returns the kind of the error.
    #[must_use]
    pub fn kind(&self) -> DecodeErrorKind {
        self.0.kind
    }

    /// Returns the description without the path.
    #[must_use]
    pub fn detail(&self) -> &str {
        &self.0.detail
    }

    /// Returns the path of the field, outermost field first; empty for the message itself.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.0.path
    }
}

/// Truncates a string to 200 bytes: errors quote input, which may have megabytes.
fn truncate(mut text: String) -> String {
    const MAX_BYTES: usize = 200;
    if text.len() > MAX_BYTES {
        text.truncate(text.floor_char_boundary(MAX_BYTES));
        text.push('…');
    }
    text
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.path.as_str() {
            "" => f.write_str(&self.0.detail),
            path => write!(f, "{path}: {}", self.0.detail),
        }
    }
}

impl fmt::Debug for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DecodeError")
            .field("kind", &self.0.kind)
            .field("path", &self.0.path)
            .field("detail", &self.0.detail)
            .finish()
    }
}

impl std::error::Error for DecodeError {}

/// Error returned when a value is invalid and cannot be constructed or sent.
///
/// ```
/// # use tinkex_wire as tinkex;
/// use tinkex::TensorData;
///
/// let err = TensorData::from(vec![1.0_f32; 6]).reshape([4, 2]).unwrap_err();
/// assert_eq!(err.field(), "shape");
/// assert_eq!(err.to_string(), "shape: [4, 2] has 8 elements but there are 6 values");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidInput {
    field: String,
    reason: String,
}

impl InvalidInput {
    pub(crate) fn new(field: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { field: field.into(), reason: reason.into() }
    }

    /// Prepends the field `outer` to the field name.
    pub(crate) fn within(mut self, outer: &str) -> Self {
        self.field = format!("{outer}.{}", self.field);
        self
    }

    /// Returns the name of the invalid field.
    #[must_use]
    pub fn field(&self) -> &str {
        &self.field
    }

    /// Returns the description without the field name.
    #[must_use]
    pub fn reason(&self) -> &str {
        &self.reason
    }
}

impl fmt::Display for InvalidInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.reason)
    }
}

impl std::error::Error for InvalidInput {}

/// Rejects NaN and infinities, which JSON cannot represent.
pub(crate) fn finite(field: &'static str, value: f64) -> Result<(), InvalidInput> {
    if value.is_finite() {
        Ok(())
    } else {
        Err(InvalidInput::new(field, format!("{value} is not a finite number")))
    }
}
