//! Free space of a file system.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Returns the number of bytes that can still be written to the file system of `path`, which must
/// exist. Returns `None` if it is not known: on platforms other than Unix, on file systems that
/// report no sizes, or after an error.
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
    // Some file systems in user space report no sizes.
    (stat.f_blocks > 0).then(|| stat.f_bavail.saturating_mul(stat.f_frsize))
}

#[cfg(not(unix))]
fn available(_: &Path) -> Option<u64> {
    None
}

/// Free space of file systems: as [`available_space`] reports it, or another function.
///
/// ```
/// use tinkex_files::DiskSpace;
///
/// let full = DiskSpace::new(|_| Some(1_100_000_000));
/// let error = full.check("not/there/yet", 2_400_000_000).unwrap_err();
/// assert_eq!(error.to_string(), "needs 2.4 GB, but only 1.1 GB are free");
/// ```
#[derive(Clone, Default)]
pub struct DiskSpace(Option<Arc<FreeSpace>>);

type FreeSpace = dyn Fn(&Path) -> Option<u64> + Send + Sync;

impl DiskSpace {
    /// Creates a `DiskSpace` that calls `free_space` with an existing folder. The function returns
    /// the free bytes of the folder's file system, or `None` if they are not known.
    pub fn new(free_space: impl Fn(&Path) -> Option<u64> + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(free_space)))
    }

    /// Returns the free bytes of the file system of `path`, which must exist, or `None` if they are
    /// not known.
    #[must_use]
    pub fn available(&self, path: impl AsRef<Path>) -> Option<u64> {
        match &self.0 {
            Some(free_space) => free_space(path.as_ref()),
            None => available_space(path),
        }
    }

    /// Checks that `needed` bytes can be written to the file system of `path`, which need not exist.
    /// Passes if the free space is not known.
    ///
    /// # Errors
    /// [`NotEnoughSpace`] if fewer bytes are free.
    pub fn check(&self, path: impl AsRef<Path>, needed: u64) -> Result<(), NotEnoughSpace> {
        let Ok(path) = std::path::absolute(path) else { return Ok(()) };
        let Some(folder) = path.ancestors().find(|folder| folder.is_dir()) else { return Ok(()) };
        match self.available(folder) {
            Some(available) if available < needed => {
                Err(NotEnoughSpace { folder: folder.to_owned(), needed, available })
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Debug for DiskSpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "DiskSpace(function)" } else { "DiskSpace(system)" })
    }
}

/// Error returned when a file system has too little free space.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NotEnoughSpace {
    /// Existing folder on the file system.
    pub folder: PathBuf,
    /// Required space in bytes.
    pub needed: u64,
    /// Free space in bytes.
    pub available: u64,
}

impl fmt::Display for NotEnoughSpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut needed = size(self.needed);
        let mut available = size(self.available);
        if needed == available {
            (needed, available) =
                (format!("{} bytes", self.needed), format!("{} bytes", self.available));
        }
        write!(f, "needs {needed}, but only {available} are free")
    }
}

impl std::error::Error for NotEnoughSpace {}

impl From<NotEnoughSpace> for io::Error {
    fn from(error: NotEnoughSpace) -> Self {
        let message = format!("{error} on {}", error.folder.display());
        Self::new(io::ErrorKind::StorageFull, message)
    }
}

/// Returns a size as text, for example `2.4 GB`.
fn size(bytes: u64) -> String {
    const UNITS: [(f64, &str); 3] = [(1e9, "GB"), (1e6, "MB"), (1e3, "kB")];
    #[expect(clippy::cast_precision_loss, reason = "one decimal is shown")]
    let value = bytes as f64;
    match UNITS.iter().find(|(unit, _)| value >= *unit) {
        Some((unit, name)) => format!("{:.1} {name}", value / unit),
        None => format!("{bytes} bytes"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_existing_folder_is_asked() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().to_owned();
        let disk = DiskSpace::new(move |path| {
            assert_eq!(path, root);
            Some(1000)
        });
        let target = folder.path().join("not/yet/there");
        disk.check(&target, 1000).unwrap();
        std::fs::write(folder.path().join("file"), "").unwrap();
        disk.check(folder.path().join("file"), 1000).unwrap();
        let error = disk.check(&target, 1001).unwrap_err();
        assert_eq!((error.needed, error.available, &*error.folder), (1001, 1000, folder.path()));
        assert_eq!(error.to_string(), "needs 1001 bytes, but only 1000 bytes are free");
        let error = io::Error::from(error);
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        assert!(error.to_string().ends_with(&format!("on {}", folder.path().display())));
        DiskSpace::new(|_| None).check(&target, u64::MAX).unwrap();
    }

    #[cfg(unix)]
    #[test]
    fn the_default_is_the_free_space_of_the_file_system() {
        let folder = tempfile::tempdir().unwrap();
        DiskSpace::default().check(folder.path(), 1).unwrap();
        DiskSpace::default().check(folder.path(), u64::MAX).unwrap_err();
    }
}
