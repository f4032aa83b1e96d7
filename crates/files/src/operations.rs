//! File-system operations whose order decides what survives a crash.
//!
//! They are methods of a trait, so that tests can interrupt a replacement after each of them.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use crate::observe::{FileOperation, announce};

/// File-system operations that a replacement consists of.
pub(crate) trait Operations {
    /// Flushes content and metadata of an open file to disk (fsync).
    fn sync_file(&self, file: &File) -> io::Result<()>;
    /// Flushes the entries of a folder to disk (fsync), which makes earlier renames in it durable.
    fn sync_folder(&self, folder: &Path) -> io::Result<()>;
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Swaps two paths atomically.
    fn exchange(&self, a: &Path, b: &Path) -> io::Result<()>;
    /// Removes a file, a link, or a folder with its content.
    fn remove(&self, path: &Path) -> io::Result<()>;
}

/// Implementation by the operating system.
pub(crate) struct System;

impl Operations for System {
    fn sync_file(&self, file: &File) -> io::Result<()> {
        announce(FileOperation::SyncFile(file))?;
        file.sync_all()
    }

    fn sync_folder(&self, folder: &Path) -> io::Result<()> {
        sync_folder(folder)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        announce(FileOperation::Rename(from, to))?;
        fs::rename(from, to)
    }

    #[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple"))]
    fn exchange(&self, a: &Path, b: &Path) -> io::Result<()> {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        announce(FileOperation::Exchange(a, b))?;
        Ok(renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE)?)
    }

    #[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple")))]
    fn exchange(&self, _a: &Path, _b: &Path) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        announce(FileOperation::Remove(path))?;
        if fs::symlink_metadata(path)?.is_dir() {
            fs::remove_dir_all(path)
        } else {
            fs::remove_file(path)
        }
    }
}

/// Flushes a folder's entries to disk, so that files created or renamed in it survive a power
/// failure.
///
/// Does nothing where the system or the file system cannot flush folders (Windows, some network
/// file systems).
///
/// # Errors
/// Any other error of opening or flushing the folder.
pub fn sync_folder(folder: impl AsRef<Path>) -> io::Result<()> {
    let folder = folder.as_ref();
    if !cfg!(unix) {
        return Ok(());
    }
    announce(FileOperation::SyncFolder(folder))?;
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    match File::open(folder)?.sync_all() {
        Err(error)
            if matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) =>
        {
            Ok(())
        }
        synced => synced,
    }
}

/// Removes a file. A missing file is not an error.
///
/// # Errors
/// Any other error of removing the file.
pub fn remove_file_if_exists(path: impl AsRef<Path>) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Returns the folder that contains `path`.
pub(crate) fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Returns the last component of `path`.
pub(crate) fn file_name(path: &Path) -> io::Result<&std::ffi::OsStr> {
    path.file_name().ok_or_else(|| {
        let message = format!("path {:?} does not end with a file name", path.display());
        io::Error::new(io::ErrorKind::InvalidInput, message)
    })
}

#[cfg(test)]
pub(crate) mod testing {
    use std::cell::{Cell, RefCell};

    use super::*;

    /// Returns the sorted names of the files and folders in a folder.
    pub(crate) fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Performs the first `remaining` operations and fails every later one, as if the process had
    /// been killed in between.
    pub(crate) struct Interrupted {
        remaining: Cell<usize>,
        /// Whether the file system can swap two paths.
        exchange: bool,
        performed: RefCell<Vec<&'static str>>,
    }

    impl Interrupted {
        pub(crate) fn after(operations: usize, exchange: bool) -> Self {
            Self { remaining: Cell::new(operations), exchange, performed: RefCell::default() }
        }

        /// Returns the names of the operations that were performed, in order.
        pub(crate) fn performed(&self) -> Vec<&'static str> {
            self.performed.borrow().clone()
        }

        fn step(
            &self,
            name: &'static str,
            operation: impl FnOnce() -> io::Result<()>,
        ) -> io::Result<()> {
            let Some(remaining) = self.remaining.get().checked_sub(1) else {
                return Err(io::Error::other("interrupted"));
            };
            self.remaining.set(remaining);
            self.performed.borrow_mut().push(name);
            operation()
        }
    }

    impl Operations for Interrupted {
        fn sync_file(&self, file: &File) -> io::Result<()> {
            self.step("sync file", || System.sync_file(file))
        }

        fn sync_folder(&self, folder: &Path) -> io::Result<()> {
            self.step("sync folder", || System.sync_folder(folder))
        }

        fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
            self.step("rename", || System.rename(from, to))
        }

        fn exchange(&self, a: &Path, b: &Path) -> io::Result<()> {
            if !self.exchange {
                return Err(io::ErrorKind::Unsupported.into());
            }
            self.step("exchange", || System.exchange(a, b))
        }

        fn remove(&self, path: &Path) -> io::Result<()> {
            self.step("remove", || System.remove(path))
        }
    }
}
