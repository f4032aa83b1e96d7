//! [`Error`]: the error type of the engine.

use std::fmt::{self, Display, Formatter};
use std::io;
use std::path::{Path, PathBuf};

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
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// A file operation failed.
    Io {
        /// Operation, for example `read` or `write`.
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// A file is truncated, corrupted, of the wrong format, or uses an unsupported feature.
    BadFile {
        /// Path of the file.
        path: PathBuf,
        /// Description of the problem.
        reason: String,
    },
    /// A model has an architecture that the engine does not support.
    UnknownArchitecture {
        /// Path of the configuration.
        path: PathBuf,
        /// Architecture that the configuration names.
        name: String,
        /// Supported architectures.
        known: &'static str,
    },
    /// A required tensor is missing.
    MissingTensor {
        /// Path of the file or folder that should contain it.
        path: PathBuf,
        /// Name of the tensor.
        name: String,
    },
    /// A tensor does not have the shape that the operation or the model requires. If the files of
    /// one model or adapter contradict each other, the error is [`Error::BadFile`] instead.
    Shape {
        /// Name of the tensor, or of an operand of an operation.
        what: String,
        /// Required shape.
        expected: Vec<usize>,
        /// Actual shape.
        got: Vec<usize>,
    },
    /// A list has the wrong length.
    Length {
        /// Name of the list.
        field: String,
        /// Required length.
        expected: usize,
        /// Actual length.
        got: usize,
    },
    /// A required input is missing.
    MissingInput {
        /// Name of the operation.
        what: String,
        /// Name of the input.
        field: String,
    },
    /// A setting is out of range or does not apply to the operation.
    Invalid {
        /// Name of the setting.
        field: String,
        /// Description of the problem.
        reason: String,
    },
    /// An input contains NaN or an infinity.
    NonFiniteInput {
        /// Name of the input.
        field: String,
        /// Index of the value.
        index: usize,
        /// NaN or an infinity.
        value: f32,
    },
    /// A computation on valid inputs produced NaN or an infinity.
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
    Unavailable {
        /// Name of the feature.
        what: String,
        /// Reason, and how to enable the feature.
        reason: &'static str,
    },
    /// One datum of a batch is invalid.
    Datum {
        /// Index of the datum.
        index: usize,
        /// The error of the datum, whose message is part of this error's message.
        source: Box<Self>,
    },
    /// A custom loss is invalid or cannot be evaluated.
    CustomLoss(tinkex_autodiff::Error),
    /// An operation needs more memory than its configured limit.
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
    /// A file is missing a tensor, damaged, or not supported.
    File,
    /// The system failed: disk or memory.
    System,
}

impl Error {
    /// Returns the cause of the error.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Io { .. } | Self::Memory { .. } | Self::OutOfMemory { .. } => ErrorKind::System,
            Self::BadFile { .. }
            | Self::UnknownArchitecture { .. }
            | Self::MissingTensor { .. } => ErrorKind::File,
            Self::NonFiniteResult { .. } => ErrorKind::Numeric,
            Self::CustomLoss(error) if error.is_numeric() => ErrorKind::Numeric,
            Self::Datum { source, .. } => source.kind(),
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
        Self::Datum { index, source: Box::new(self) }
    }

    /// Returns a closure that wraps an I/O error of `action` on `path`.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, path: path.to_owned(), source }
    }

    /// Creates [`Error::BadFile`].
    pub(crate) fn bad_file(path: &Path, reason: impl Into<String>) -> Self {
        Self::BadFile { path: path.to_owned(), reason: reason.into() }
    }

    /// Creates [`Error::Invalid`].
    pub(crate) fn invalid(field: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Invalid { field: field.into(), reason: reason.into() }
    }
}

impl Display for Error {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io { action, path, .. } => write!(f, "cannot {action} {}", path.display()),
            Self::BadFile { path, reason } => write!(f, "cannot use {}: {reason}", path.display()),
            Self::UnknownArchitecture { path, name, known } => {
                let path = path.display();
                write!(f, "cannot load {path}: architecture {name:?} is not supported, ")?;
                write!(f, "expected one of {known}")
            }
            Self::MissingTensor { path, name } => {
                write!(f, "cannot use {}: tensor {name} is missing", path.display())
            }
            Self::Shape { what, expected, got } => {
                write!(f, "{what} has shape {got:?}, expected {expected:?}")
            }
            Self::Length { field, expected, got } => {
                write!(f, "{field} has {got} values, expected {expected}")
            }
            Self::MissingInput { what, field } => write!(f, "{what} requires the input {field:?}"),
            Self::Invalid { field, reason } => write!(f, "{field}: {reason}"),
            Self::NonFiniteInput { field, index, value } => {
                write!(f, "NonFiniteInTensor: {field}[{index}] is {value}")
            }
            Self::NonFiniteResult { what, index, value, hint } => {
                write!(f, "{what} is {value} at position {index}; {hint}")
            }
            Self::TokenOutOfRange { field, index, token, vocab } => {
                write!(f, "{field}[{index}] is token {token}, but the model has {vocab} tokens")
            }
            Self::Unavailable { what, reason } => write!(f, "{what} is not available: {reason}"),
            Self::Datum { index, source } => write!(f, "data[{index}]: {source}"),
            Self::CustomLoss(error) => error.fmt(f),
            Self::Memory { what, needed, available, hint } => {
                write!(f, "{what} needs {needed} bytes, the limit is {available}; {hint}")
            }
            Self::OutOfMemory { what, needed } => {
                write!(f, "cannot allocate {needed} bytes for {what}: the system refused; ")?;
                write!(f, "free memory or use less")
            }
        }
    }
}

impl std::error::Error for Error {
    /// Returns the next cause that the message does not contain yet, so that printers that follow
    /// the chain show every cause once.
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io { source, .. } => Some(source),
            Self::Datum { source, .. } => source.source(),
            Self::CustomLoss(error) => error.source(),
            _ => None,
        }
    }
}

impl From<tinkex_autodiff::Error> for Error {
    fn from(error: tinkex_autodiff::Error) -> Self {
        Self::CustomLoss(error)
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

        let refused = io::Error::from(io::ErrorKind::PermissionDenied);
        let text = refused.to_string();
        let error = Error::io("read", Path::new("a.json"))(refused).in_datum(0);
        assert_eq!(error.to_string(), "data[0]: cannot read a.json");
        assert_eq!(error.source().map(ToString::to_string), Some(text));
        assert_eq!(error.kind(), ErrorKind::System);
    }
}
