//! Classifies errors of the engine and of the system: an operation that failed because of a
//! transient fault can succeed later.
//!
//! Too many open files, an I/O error of a disk or network file system, and a lack of memory are
//! transient. A missing, damaged or forbidden file is not: every attempt fails until a person
//! repairs the file.

use std::io;

use tinkex_backend::outcome::Outcome;
use tinkex_engine::{Error as EngineError, ErrorKind};
use tinkex_store::error::ServerError;
use tinkex_store::record::FailureCategory;
use tinkex_weights::Error as FileError;

/// Returns whether an operation that failed with `error` may succeed later.
pub(crate) fn is_transient(error: &io::Error) -> bool {
    use io::ErrorKind as Kind;
    !matches!(
        error.kind(),
        Kind::NotFound
            | Kind::NotADirectory
            | Kind::PermissionDenied
            | Kind::AlreadyExists
            | Kind::InvalidData
            | Kind::InvalidInput
            | Kind::InvalidFilename
            | Kind::UnexpectedEof
            | Kind::Unsupported
            | Kind::ReadOnlyFilesystem
            // A full disk is usually not freed within seconds. Fail, so that the client learns of
            // the full disk.
            | Kind::StorageFull
            | Kind::QuotaExceeded
            | Kind::FileTooLarge
    )
}

/// Returns whether an operation of the engine that failed with `error` may succeed later. The
/// failed operation has changed nothing.
pub(crate) fn is_transient_in_engine(error: &EngineError) -> bool {
    match error {
        EngineError::File(FileError::Io { source, .. }) => is_transient(source),
        EngineError::OutOfMemory { .. } => true,
        _ => false,
    }
}

/// Returns the error of a request that the engine rejected.
#[expect(clippy::needless_pass_by_value, reason = "`map_err` passes the error by value")]
pub(crate) fn engine_error(error: EngineError) -> ServerError {
    match error.kind() {
        ErrorKind::Input | ErrorKind::Numeric => ServerError::Invalid(error.to_string()),
        _ => ServerError::Internal(error.to_string()),
    }
}

/// Returns the outcome of a request that the engine failed to execute.
#[expect(clippy::needless_pass_by_value, reason = "`map_err` passes the error by value")]
pub(crate) fn engine_failure(error: EngineError) -> Outcome {
    let category = match error.kind() {
        ErrorKind::Input | ErrorKind::Numeric => FailureCategory::User,
        // A request that exceeds a configured limit would exceed the limit again.
        _ if matches!(error, EngineError::Memory { .. }) => FailureCategory::User,
        _ => FailureCategory::Server,
    };
    let message = match &error {
        EngineError::File(_) => {
            let source = std::error::Error::source(&error).map(|source| format!(": {source}"));
            format!("{error}{}", source.unwrap_or_default())
        }
        // The messages of the other variants already contain their source.
        _ => error.to_string(),
    };
    Outcome::failed(category, message).with_transient(is_transient_in_engine(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transient_faults_are_distinguished_from_permanent_ones() {
        // Error numbers of Linux: EIO, EMFILE, ENFILE, ENOMEM, EINTR.
        for code in [5, 24, 23, 12, 4] {
            assert!(is_transient(&io::Error::from_raw_os_error(code)), "{code}");
        }
        // ENOENT, EACCES, ENOTDIR, ENOSPC, EROFS.
        for code in [2, 13, 20, 28, 30] {
            assert!(!is_transient(&io::Error::from_raw_os_error(code)), "{code}");
        }
        let file = |kind: io::ErrorKind| FileError::Io {
            action: "read",
            path: "adapter.safetensors".into(),
            source: kind.into(),
        };
        assert!(is_transient_in_engine(&file(io::ErrorKind::Other).into()));
        assert!(!is_transient_in_engine(&file(io::ErrorKind::UnexpectedEof).into()));
        let damaged = FileError::bad_file("adapter.safetensors", "truncated");
        assert!(!is_transient_in_engine(&damaged.into()));
        let memory = EngineError::OutOfMemory { what: "a test", needed: 1 };
        assert!(is_transient_in_engine(&memory));
    }
}
