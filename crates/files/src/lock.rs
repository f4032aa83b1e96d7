//! Advisory file locks.

use std::error::Error;
use std::fmt;
use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::path::Path;

use crate::access::no_follow;

/// Exclusive lock on a file, held until the value is dropped or the process ends.
///
/// ```
/// # fn main() -> std::io::Result<()> {
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("lock");
/// use tinkex_files::{FileLock, LockError};
///
/// let lock = FileLock::acquire(&path)?;
/// assert!(matches!(FileLock::acquire(&path), Err(LockError::InUse)));
/// drop(lock);
/// assert!(FileLock::acquire(&path).is_ok());
/// # Ok(()) }
/// ```
#[derive(Debug)]
#[must_use = "the lock is released when this value is dropped"]
pub struct FileLock {
    _file: File,
}

impl FileLock {
    /// Locks the file at `path` without waiting. Creates the file if necessary. Neither locking nor
    /// releasing changes or removes it. A symbolic link is not followed.
    ///
    /// # Errors
    /// [`LockError::InUse`] if another process or another `FileLock` holds the lock,
    /// [`LockError::Unsupported`] if the file system has no locks, [`LockError::Io`] if the file
    /// cannot be opened or locked for another reason.
    pub fn acquire(path: impl AsRef<Path>) -> Result<Self, LockError> {
        let mut options = OpenOptions::new();
        options.create(true).truncate(false).write(true);
        let file = no_follow(&mut options).open(path);
        let file = file.map_err(LockError::Io)?;
        try_lock(&file)?;
        Ok(Self { _file: file })
    }
}

/// Locks an open file without waiting. The lock is released when the file is closed.
///
/// # Errors
/// As for [`FileLock::acquire`].
pub fn try_lock(file: &File) -> Result<(), LockError> {
    file.try_lock().map_err(LockError::from)
}

/// Error returned when a file cannot be locked.
#[derive(Debug)]
#[non_exhaustive]
pub enum LockError {
    /// Another process, or another handle of this one, holds the lock.
    InUse,
    /// The file system does not support locks, as some network file systems do not.
    Unsupported(io::Error),
    /// The file could not be opened or locked for another reason.
    Io(io::Error),
}

impl From<TryLockError> for LockError {
    fn from(error: TryLockError) -> Self {
        match error {
            TryLockError::WouldBlock => Self::InUse,
            TryLockError::Error(error) if is_unsupported(&error) => Self::Unsupported(error),
            TryLockError::Error(error) => Self::Io(error),
        }
    }
}

impl fmt::Display for LockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InUse => f.write_str("locked by another process"),
            Self::Unsupported(error) => {
                write!(f, "file locks are not supported on this file system: {error}")
            }
            Self::Io(error) => error.fmt(f),
        }
    }
}

impl Error for LockError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::InUse => None,
            Self::Unsupported(error) | Self::Io(error) => Some(error),
        }
    }
}

impl From<LockError> for io::Error {
    fn from(error: LockError) -> Self {
        match error {
            LockError::InUse => Self::new(io::ErrorKind::WouldBlock, error),
            LockError::Unsupported(_) => Self::new(io::ErrorKind::Unsupported, error),
            LockError::Io(error) => error,
        }
    }
}

/// Returns whether the file system has no locks.
fn is_unsupported(error: &io::Error) -> bool {
    // ENOSYS, ENOTSUP and EOPNOTSUPP have this kind. ENOLCK, which NFS without a lock daemon
    // returns, has no `ErrorKind` of its own.
    if error.kind() == io::ErrorKind::Unsupported {
        return true;
    }
    #[cfg(unix)]
    if rustix::io::Errno::from_io_error(error) == Some(rustix::io::Errno::NOLCK) {
        return true;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_exclusive_and_released_on_drop() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        std::fs::write(&path, "content").unwrap();
        let lock = FileLock::acquire(&path).unwrap();
        assert!(matches!(FileLock::acquire(&path), Err(LockError::InUse)));
        drop(lock);
        drop(FileLock::acquire(&path).unwrap());
        assert_eq!(std::fs::read(&path).unwrap(), b"content");
    }

    #[test]
    fn a_file_that_cannot_be_opened_is_not_reported_as_in_use() {
        let folder = tempfile::tempdir().unwrap();
        let error = FileLock::acquire(folder.path().join("missing/lock")).unwrap_err();
        assert!(matches!(&error, LockError::Io(e) if e.kind() == io::ErrorKind::NotFound));
    }

    #[cfg(unix)]
    #[test]
    fn a_file_system_without_locks_is_not_reported_as_in_use() {
        use rustix::io::Errno;
        for errno in [Errno::NOLCK, Errno::NOTSUP, Errno::OPNOTSUPP, Errno::NOSYS] {
            let error = LockError::from(TryLockError::Error(errno.into()));
            assert!(matches!(error, LockError::Unsupported(_)), "{errno}");
            assert!(error.to_string().contains("not supported"), "{error}");
            assert_eq!(io::Error::from(error).kind(), io::ErrorKind::Unsupported);
        }
        let error = LockError::from(TryLockError::Error(Errno::IO.into()));
        assert!(matches!(error, LockError::Io(_)));
        assert!(matches!(LockError::from(TryLockError::WouldBlock), LockError::InUse));
    }
}
