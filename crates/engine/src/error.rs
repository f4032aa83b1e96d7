//! [`Error`]: why the engine said no.

use std::io;
use std::path::{Path, PathBuf};

/// The result of the engine's work.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why the engine refused or failed.
///
/// Whoever gets one finds weights, optimizer state and accumulated gradients as they were before.
/// [`Error::kind`] tells whose fault it was.
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
    /// The operating system refused.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// What was tried: `read`, `write`, …
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file is not what its name says: cut off, corrupted, or lying about its size.
    #[error("{}: {reason}", path.display())]
    BadFile {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A model of a kind that the engine does not know.
    #[error("{}: architecture {name:?} is not supported; {known} are", path.display())]
    UnknownArchitecture {
        /// The configuration that names it.
        path: PathBuf,
        /// The name.
        name: String,
        /// The names that would have been understood.
        known: &'static str,
    },
    /// A tensor that must be there is not.
    #[error("{}: there is no tensor {name}", path.display())]
    MissingTensor {
        /// Where it should be.
        path: PathBuf,
        /// Its name.
        name: String,
    },
    /// A tensor has another shape than the operation needs.
    #[error("{what} has shape {got:?}, expected {expected:?}")]
    Shape {
        /// Which tensor, or which operand of which operation.
        what: String,
        /// The shape it should have.
        expected: Vec<usize>,
        /// The shape it has.
        got: Vec<usize>,
    },
    /// A list has another length than the ones it is aligned with.
    #[error("{field} has {got} values, expected {expected}")]
    Length {
        /// Which list.
        field: String,
        /// The length it should have.
        expected: usize,
        /// The length it has.
        got: usize,
    },
    /// An input that the operation needs was not given.
    #[error("{what} needs the input {field:?}")]
    MissingInput {
        /// Which operation.
        what: String,
        /// Which input.
        field: String,
    },
    /// A setting outside its range, or one that the operation does not have.
    #[error("{field}: {reason}")]
    Invalid {
        /// Which setting.
        field: String,
        /// What is wrong with it.
        reason: String,
    },
    /// An input holds NaN or an infinity.
    #[error("NonFiniteInTensor: {field}[{index}] is {value}")]
    NonFiniteInput {
        /// Which input.
        field: String,
        /// Which of its values.
        index: usize,
        /// NaN or an infinity.
        value: f32,
    },
    /// The arithmetic left the range of numbers, from inputs that were fine.
    #[error("{what} is {value} at position {index}; {hint}")]
    NonFiniteResult {
        /// What became so.
        what: String,
        /// Where.
        index: usize,
        /// NaN or an infinity.
        value: f64,
        /// What to do.
        hint: &'static str,
    },
    /// A token that the model does not have.
    #[error("{field}[{index}] is token {token}, but the model has {vocab} tokens")]
    TokenOutOfRange {
        /// Which list.
        field: String,
        /// Which of its tokens.
        index: usize,
        /// The token.
        token: i64,
        /// How many there are.
        vocab: usize,
    },
    /// Something that the engine could do but does not unless it was switched on.
    #[error("{what} is not available: {reason}")]
    Unavailable {
        /// What was asked for.
        what: String,
        /// Why not, and how to get it.
        reason: &'static str,
    },
    /// Something about one datum of a batch.
    #[error("data[{index}]: {source}")]
    Datum {
        /// Which datum.
        index: usize,
        /// What about it.
        #[source]
        source: Box<Self>,
    },
    /// A custom loss is invalid or cannot be evaluated.
    #[error(transparent)]
    CustomLoss(#[from] tinkex_autodiff::Error),
    /// The work would need more memory than it may use.
    #[error("{what} needs {needed} bytes, but {available} are available; {hint}")]
    Memory {
        /// What does.
        what: &'static str,
        /// How much it needs.
        needed: u64,
        /// How much there is.
        available: u64,
        /// What to do.
        hint: &'static str,
    },
    /// The system has less memory than the work needs.
    #[error("{what} needs {needed} bytes, which the system refused; give it more, or ask for less")]
    OutOfMemory {
        /// What does.
        what: &'static str,
        /// How much it needs.
        needed: u64,
    },
}

/// Whose fault an [`Error`] was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The caller's: the same request fails again.
    Input,
    /// The caller's numbers led out of range while running.
    Numeric,
    /// A file's.
    File,
    /// The machine's: disk, memory.
    System,
}

impl Error {
    /// Whose fault it was.
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

    /// The same, said of datum `index` of a batch.
    #[must_use]
    pub fn in_datum(self, index: usize) -> Self {
        Self::Datum { index, source: Box::new(self) }
    }

    /// The operating system refused `action` on `path`.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, path: path.to_owned(), source }
    }

    /// The file is not what it says.
    pub(crate) fn bad_file(path: &Path, reason: impl Into<String>) -> Self {
        Self::BadFile { path: path.to_owned(), reason: reason.into() }
    }

    /// A setting makes no sense.
    pub(crate) fn invalid(field: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Invalid { field: field.into(), reason: reason.into() }
    }
}
