//! The two ways this crate says no.
//!
//! [`DecodeError`] is about bytes that came from somewhere else; [`InvalidInput`] is about values
//! that the caller is about to send. Both name the field at fault.

use std::fmt;

/// Why bytes from the other side could not be understood.
///
/// The error names the field by its path inside the message, for example
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
pub struct DecodeError(Box<Inner>);

#[derive(Clone, PartialEq, Eq)]
struct Inner {
    kind: DecodeErrorKind,
    path: String,
    detail: String,
}

/// What was wrong with the bytes.
///
/// A fault in JSON is [`Json`](Self::Json) whatever field it is in, except for a wrong `type` tag
/// and a body that ends too early.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DecodeErrorKind {
    /// The message ends before a field does.
    Truncated,
    /// A field number or wire type that the message cannot have.
    Tag,
    /// A variable-length integer that does not end within ten bytes.
    Varint,
    /// Text that is not UTF-8.
    Utf8,
    /// A byte length that does not fit the element type or the declared shape.
    Length,
    /// A shape with a negative or overflowing dimension, or of the wrong rank.
    Shape,
    /// Row or datum offsets that do not start at zero, decrease, or leave the data.
    Offsets,
    /// A column index outside its row.
    Index,
    /// An element type that is missing or unknown, or not allowed here.
    DType,
    /// A number outside the range of its field.
    Number,
    /// A required field that is not there.
    Missing,
    /// A `type` tag or enum value that this message may not carry.
    Value,
    /// Text that is not JSON, or JSON of another shape.
    Json,
    /// A compressed body that does not decompress.
    Compression,
    /// More data than the caller allowed.
    TooLarge,
}

impl DecodeError {
    pub(crate) fn new(kind: DecodeErrorKind, detail: impl Into<String>) -> Self {
        Self(Box::new(Inner { kind, path: String::new(), detail: shortened(detail.into()) }))
    }

    /// Puts the error inside the field `name`.
    pub(crate) fn within(mut self, name: &str) -> Self {
        let inner = &mut self.0.path;
        let joint = if inner.is_empty() || inner.starts_with('[') { "" } else { "." };
        *inner = format!("{}{joint}{inner}", shortened(name.to_owned()));
        self
    }

    /// Puts the error inside element `index` of a list.
    pub(crate) fn at(self, index: usize) -> Self {
        self.within(&format!("[{index}]"))
    }

    /// Puts the error inside the entry `key` of a map.
    pub(crate) fn at_key(self, key: &str) -> Self {
        self.within(&format!("[{key:?}]"))
    }

    /// What was wrong.
    #[must_use]
    pub fn kind(&self) -> DecodeErrorKind {
        self.0.kind
    }

    /// What was wrong, in words, without the place.
    #[must_use]
    pub fn detail(&self) -> &str {
        &self.0.detail
    }

    /// Where in the message, outermost field first; empty for the message itself.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.0.path
    }
}

/// Messages quote what was sent, and that may be megabytes of it.
fn shortened(mut text: String) -> String {
    const MOST: usize = 200;
    if text.len() > MOST {
        text.truncate(text.floor_char_boundary(MOST));
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

/// Why a value cannot be built or sent.
///
/// ```
/// use tinkex_wire::TensorData;
///
/// let err = TensorData::from(vec![1.0_f32; 6]).reshape([4, 2]).unwrap_err();
/// assert_eq!(err.field(), "shape");
/// assert_eq!(err.to_string(), "shape: [4, 2] has 8 cells but there are 6 values");
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

    /// Puts the error inside the field `outer`.
    pub(crate) fn within(mut self, outer: &str) -> Self {
        self.field = format!("{outer}.{}", self.field);
        self
    }

    /// The field at fault.
    #[must_use]
    pub fn field(&self) -> &str {
        &self.field
    }

    /// What is wrong with it.
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

/// Refuses a number that JSON cannot carry.
pub(crate) fn finite(field: &'static str, value: f64) -> Result<(), InvalidInput> {
    if value.is_finite() {
        Ok(())
    } else {
        Err(InvalidInput::new(field, format!("{value} is not a finite number")))
    }
}
