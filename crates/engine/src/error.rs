//! [`Error`]: the error type of the engine.

use std::io;
use std::path::Path;

use tinkex_weights::Error as FileError;

/// Result of an operation of the engine.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Error of an operation of the engine.
///
/// After an error, weights, optimizer state and accumulated gradients are unchanged.
/// [`Error::kind`] classifies the cause.
///
/// ```
/// use tinkex_engine::{Error, ErrorKind};
///
/// let error = Error::Length { field: "weights".to_owned(), expected: 4, got: 3 };
/// assert_eq!(error.kind(), ErrorKind::Input);
/// assert_eq!(error.to_string(), "weights has 3 values, expected 4");
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file cannot be read or written, is damaged, lacks a tensor, or is not supported.
    #[error(transparent)]
    File(#[from] tinkex_weights::Error),
    /// A tensor does not have the shape that the operation or the model requires. If the files of
    /// one model or adapter contradict each other, the error is [`Error::File`] instead.
    #[error("{what} has shape {got:?}, expected {expected:?}")]
    Shape {
        /// Name of the tensor, or of an operand of an operation.
        what: String,
        /// Required shape.
        expected: Vec<usize>,
        /// Actual shape.
        got: Vec<usize>,
    },
    /// A list has the wrong length.
    #[error("{field} has {got} values, expected {expected}")]
    Length {
        /// Name of the list.
        field: String,
        /// Required length.
        expected: usize,
        /// Actual length.
        got: usize,
    },
    /// A required input is missing.
    #[error("{what} requires the input {field:?}")]
    MissingInput {
        /// Name of the operation.
        what: String,
        /// Name of the input.
        field: String,
    },
    /// A setting is out of range or does not apply to the operation.
    #[error("{field}: {reason}")]
    Invalid {
        /// Name of the setting.
        field: String,
        /// Description of the problem.
        reason: String,
    },
    /// An input contains NaN or an infinity.
    #[error("NonFiniteInTensor: {field}[{index}] is {value}")]
    NonFiniteInput {
        /// Name of the input.
        field: String,
        /// Index of the value.
        index: usize,
        /// NaN or an infinity.
        value: f32,
    },
    /// A computation on valid inputs produced NaN or an infinity.
    #[error("{what} is {value} at position {index}; {hint}")]
    NonFiniteResult {
        /// Name of the result.
        what: String,
        /// Index of the value.
        index: usize,
        /// NaN or an infinity.
        value: f64,
        /// Suggested action.
        hint: &'static str,
    },
    /// A token is not in the model's vocabulary.
    #[error("{field}[{index}] is token {token}, but the model has {vocab} tokens")]
    TokenOutOfRange {
        /// Name of the list.
        field: String,
        /// Index of the token.
        index: usize,
        /// The token.
        token: i64,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// A feature that must be enabled explicitly is not enabled.
    #[error("{what} is not available: {reason}")]
    Unavailable {
        /// Name of the feature.
        what: String,
        /// Reason, and how to enable the feature.
        reason: &'static str,
    },
    /// One datum of a batch is invalid.
    #[error("data[{index}]: {error}")]
    Datum {
        /// Index of the datum.
        index: usize,
        /// The error of the datum, which is part of the message and therefore not the
        /// [`source`](std::error::Error::source).
        error: Box<Self>,
    },
    /// A custom loss is invalid or cannot be evaluated.
    #[error(transparent)]
    CustomLoss(#[from] tinkex_autodiff::Error),
    /// An operation needs more memory than its configured limit.
    #[error("{what} needs {needed} bytes, the limit is {available}; {hint}")]
    Memory {
        /// Purpose of the memory.
        what: &'static str,
        /// Required memory in bytes.
        needed: u64,
        /// Limit in bytes.
        available: u64,
        /// Suggested action.
        hint: &'static str,
    },
    /// The system refused to provide memory.
    #[error(
        "cannot allocate {needed} bytes for {what}: the system refused; free memory or use less"
    )]
    OutOfMemory {
        /// Purpose of the memory.
        what: &'static str,
        /// Required memory in bytes.
        needed: u64,
    },
}

/// Cause of an [`Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The caller's input is invalid; repeating the request fails again.
    Input,
    /// The computation on valid input left the range of finite numbers.
    Numeric,
    /// A file lacks a tensor, is damaged, or is not supported.
    File,
    /// The system failed: disk or memory.
    System,
}

impl Error {
    /// Returns the cause of the error.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::File(FileError::Io { .. }) | Self::Memory { .. } | Self::OutOfMemory { .. } => {
                ErrorKind::System
            }
            Self::File(FileError::InvalidTensor { .. }) => ErrorKind::Input,
            Self::File(_) => ErrorKind::File,
            Self::NonFiniteResult { .. } => ErrorKind::Numeric,
            Self::CustomLoss(error) if error.is_numeric() => ErrorKind::Numeric,
            Self::Datum { error, .. } => error.kind(),
            Self::Shape { .. }
            | Self::Length { .. }
            | Self::MissingInput { .. }
            | Self::Invalid { .. }
            | Self::NonFiniteInput { .. }
            | Self::TokenOutOfRange { .. }
            | Self::Unavailable { .. }
            | Self::CustomLoss(_) => ErrorKind::Input,
        }
    }

    /// Wraps the error in [`Error::Datum`] for datum `index` of a batch.
    #[must_use]
    pub fn in_datum(self, index: usize) -> Self {
        Self::Datum { index, error: Box::new(self) }
    }

    /// Returns a closure that wraps an I/O error of `action` on `path`.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |error| Self::File(FileError::io(action, path)(error))
    }

    /// Creates an error about the contents of a file.
    pub(crate) fn bad_file(path: &Path, reason: impl Into<String>) -> Self {
        Self::File(FileError::bad_file(path, reason))
    }

    /// Creates [`Error::Invalid`].
    pub(crate) fn invalid(field: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Invalid { field: field.into(), reason: reason.into() }
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    #[test]
    fn the_cause_of_a_datum_is_in_the_message_but_not_in_the_chain() {
        let cause = Error::Length { field: "weights".to_owned(), expected: 4, got: 3 };
        let error = cause.in_datum(2);
        assert_eq!(error.to_string(), "data[2]: weights has 3 values, expected 4");
        assert!(error.source().is_none());
        assert_eq!(error.kind(), ErrorKind::Input);
    }
}
