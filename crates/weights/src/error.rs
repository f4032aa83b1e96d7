//! [`Error`]: why a model or adapter file cannot be read or written.

use std::io;
use std::path::{Path, PathBuf};

use tinkex_files::NotEnoughSpace;

/// Result of an operation on a file.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Error of reading or writing a model or an adapter.
///
/// ```
/// let error = tinkex_weights::ModelConfig::parse(b"{", "config.json").unwrap_err();
/// assert!(error.to_string().starts_with("cannot use config.json: not a model configuration"));
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file operation failed.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// Operation, for example `read` or `write`.
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// A file is truncated, corrupted, of the wrong format, or uses an unsupported feature.
    #[error("cannot use {}: {reason}", path.display())]
    BadFile {
        /// Path of the file.
        path: PathBuf,
        /// Description of the problem.
        reason: String,
    },
    /// A model has an architecture that is not supported.
    #[error(
        "cannot load {}: architecture {name:?} is not supported; supported: {known}",
        path.display()
    )]
    UnknownArchitecture {
        /// Path of the configuration.
        path: PathBuf,
        /// Architecture that the configuration names.
        name: String,
        /// Supported architectures, for the message.
        known: &'static str,
    },
    /// A required tensor is missing.
    #[error("cannot use {}: tensor {name} is missing", path.display())]
    MissingTensor {
        /// Path of the file or folder that should contain it.
        path: PathBuf,
        /// Name of the tensor.
        name: String,
    },
    /// A tensor to write is invalid: its elements do not match its shape, or its name is already
    /// taken or reserved.
    #[error("cannot write tensor {name}: {reason}")]
    InvalidTensor {
        /// Name of the tensor.
        name: String,
        /// Description of the problem.
        reason: String,
    },
    /// The target of an export exists, and the export may not
    /// [replace](crate::AdapterExport::replace) it.
    #[error("cannot write {}: it already exists", path.display())]
    AlreadyExists {
        /// Path of the target.
        path: PathBuf,
    },
    /// The file system of an export's target has too little free space.
    #[error("cannot write {}: {shortage} on {}", path.display(), shortage.folder.display())]
    NotEnoughSpace {
        /// Path of the target.
        path: PathBuf,
        /// Required and free space.
        shortage: NotEnoughSpace,
    },
    /// An option of an export is invalid, or its format does not support the option or the model.
    #[error("cannot export to {}: {reason}", path.display())]
    InvalidExport {
        /// Path of the target.
        path: PathBuf,
        /// Description of the problem.
        reason: String,
    },
    /// The export needs the Hugging Face folder of the base model, but no path was set, or a file is
    /// at the path.
    #[error("cannot export to {}: {reason}", path.display())]
    InvalidBase {
        /// Path of the target.
        path: PathBuf,
        /// Description of the problem.
        reason: String,
    },
    /// The caller stopped an export.
    #[error("the export was cancelled")]
    Cancelled,
}

impl Error {
    /// Returns a closure that wraps an I/O error of `action` on `path`.
    pub fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, path: path.to_owned(), source }
    }

    /// Creates [`Error::BadFile`].
    pub fn bad_file(path: impl AsRef<Path>, reason: impl Into<String>) -> Self {
        Self::BadFile { path: path.as_ref().to_owned(), reason: reason.into() }
    }

    /// Creates [`Error::InvalidExport`].
    pub(crate) fn invalid_export(path: &Path, reason: impl Into<String>) -> Self {
        Self::InvalidExport { path: path.to_owned(), reason: reason.into() }
    }

    /// Creates [`Error::InvalidBase`].
    pub(crate) fn invalid_base(path: &Path, reason: impl Into<String>) -> Self {
        Self::InvalidBase { path: path.to_owned(), reason: reason.into() }
    }

    /// Creates [`Error::InvalidTensor`].
    pub(crate) fn invalid_tensor(name: &str, reason: impl Into<String>) -> Self {
        Self::InvalidTensor { name: name.to_owned(), reason: reason.into() }
    }
}
