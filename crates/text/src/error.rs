//! [`Error`]: why a text cannot be converted.

use std::fmt;

/// Result of a fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Error of a tokenizer or a chat template.
///
/// ```
/// use tinkex_text::{ErrorKind, Tokenizer};
///
/// let error = Tokenizer::from_json("{").unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::Malformed);
/// assert!(error.to_string().starts_with("cannot parse tokenizer.json: "));
/// ```
#[derive(Clone, Debug)]
pub struct Error {
    kind: ErrorKind,
    operation: Option<String>,
    message: String,
    hint: Option<&'static str>,
}

/// Classification of an [`Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A text or a conversation is invalid for this tokenizer or this template.
    InvalidInput,
    /// The chat template writes more text than allowed for this conversation.
    TooLong,
    /// A file or a template is malformed.
    Malformed,
    /// A file, a template or a token does not exist.
    NotFound,
    /// A file exists and cannot be read.
    Unreadable,
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, operation: None, message: message.into(), hint: None }
    }

    pub(crate) fn with_hint(mut self, hint: &'static str) -> Self {
        self.hint = Some(hint);
        self
    }

    /// Sets what was attempted.
    #[cfg(feature = "chat")]
    pub(crate) fn during(mut self, operation: impl Into<String>) -> Self {
        self.operation = Some(operation.into());
        self
    }

    /// Returns the classification of the error.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Returns what was attempted, if known, for example `rendering the conversation`.
    #[must_use]
    pub fn operation(&self) -> Option<&str> {
        self.operation.as_deref()
    }

    /// Returns the cause, without the operation.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Returns advice on what to do about the error, if there is any: an imperative sentence.
    #[must_use]
    pub fn hint(&self) -> Option<&'static str> {
        self.hint
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(operation) = &self.operation {
            write!(f, "{operation} failed: ")?;
        }
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}
