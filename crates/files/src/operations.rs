//! File-system operations whose order decides what survives a crash.
//!
//! Each operation is announced to the observer of the thread ([`observe_thread`]) before it is
//! performed, so that tests and simulations can let it fail.
//!
//! [`observe_thread`]: crate::observe_thread

use std::fs::{self, File};
use std::io;
use std::path::Path;

use crate::observe::{FileOperation, announce};

/// Flushes content and metadata of an open file to disk (fsync).
pub(crate) fn sync_file(file: &File) -> io::Result<()> {
    announce(FileOperation::SyncFile(file))?;
    file.sync_all()
}

/// Renames a file or folder.
pub(crate) fn rename(from: &Path, to: &Path) -> io::Result<()> {
    announce(FileOperation::Rename(from, to))?;
    fs::rename(from, to)
}

/// Swaps two paths atomically. Fails on systems and file systems that cannot.
#[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple"))]
pub(crate) fn exchange(a: &Path, b: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    announce(FileOperation::Exchange(a, b))?;
    Ok(renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE)?)
}

/// Swaps two paths atomically. Fails on systems and file systems that cannot.
#[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple")))]
pub(crate) fn exchange(_a: &Path, _b: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Removes a file, a link, or a folder with its content.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    announce(FileOperation::Remove(path))?;
    if fs::symlink_metadata(path)?.is_dir() {
        fs::remove_dir_all(path)
    } else {
        fs::remove_file(path)
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
    let path = path.as_ref();
    announce(FileOperation::Remove(path))?;
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
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::*;
    use crate::observe::{ThreadObserver, observe_thread};

    /// Returns the sorted names of the files and folders in a folder.
    pub(crate) fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Lets the first operations of this thread succeed and all later ones fail, as if the process
    /// had been killed in between, until [`end`](Self::end) is called.
    #[must_use = "operations fail until `end` is called"]
    pub(crate) struct Interrupted {
        performed: Rc<RefCell<Vec<&'static str>>>,
        observer: ThreadObserver,
    }

    impl Interrupted {
        /// Lets `operations` operations succeed. Without `exchange` the file system cannot swap two
        /// paths.
        pub(crate) fn after(operations: usize, exchange: bool) -> Self {
            let performed = Rc::new(RefCell::new(Vec::new()));
            let log = Rc::clone(&performed);
            let observer = observe_thread(move |operation| {
                let name = match operation {
                    FileOperation::SyncFile(_) => "sync file",
                    FileOperation::SyncFolder(_) => "sync folder",
                    FileOperation::Rename(..) => "rename",
                    FileOperation::Exchange(..) if !exchange => {
                        return Err(io::ErrorKind::Unsupported.into());
                    }
                    FileOperation::Exchange(..) => "exchange",
                    FileOperation::Remove(_) => "remove",
                    other => panic!("a replacement does not consist of {other:?}"),
                };
                if log.borrow().len() == operations {
                    return Err(io::Error::other("interrupted"));
                }
                log.borrow_mut().push(name);
                Ok(())
            });
            Self { performed, observer }
        }

        /// Lets all operations succeed again. Returns the names of the operations that succeeded,
        /// in order.
        pub(crate) fn end(self) -> Vec<&'static str> {
            drop(self.observer);
            self.performed.take()
        }
    }
}
