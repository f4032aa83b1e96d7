//! Free space of a file system.

use std::path::Path;

/// Returns the number of bytes that can still be written to the file system of `path`, which must
/// exist. Returns `None` if it is not known: on platforms other than Unix, or after an error.
///
/// ```
/// # #[cfg(unix)]
/// assert!(tinkex_files::available_space(".").is_some());
/// assert_eq!(tinkex_files::available_space("/does/not/exist"), None);
/// ```
#[must_use]
pub fn available_space(path: impl AsRef<Path>) -> Option<u64> {
    available(path.as_ref())
}

#[cfg(unix)]
fn available(path: &Path) -> Option<u64> {
    let stat = rustix::fs::statvfs(path).ok()?;
    Some(stat.f_bavail.saturating_mul(stat.f_frsize))
}

#[cfg(not(unix))]
fn available(_: &Path) -> Option<u64> {
    None
}
