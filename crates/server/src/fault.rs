//! Transient faults of the system: the same operation can succeed later.
//!
//! Too many open files, an I/O error of a disk or network file system, and a lack of memory are
//! transient. A missing, damaged or forbidden file is not: every attempt fails until a person acts.

use std::io;

use tinkex_engine::Error as EngineError;
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
            // Space is not freed within seconds: fail, so that the client learns of it.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transient_faults_are_distinguished_from_permanent_ones() {
        // Numbers of Linux: EIO, EMFILE, ENFILE, ENOMEM, EINTR.
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
