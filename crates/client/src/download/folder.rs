//! The staging folder of a checkpoint download, which becomes the target when it is complete.

use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

use tinkex_files::{FileLock, LockError};

use crate::error::{Error, ErrorKind, Result};

use super::part_file::{FilePaths, write_error};

/// The folder `NAME.part` beside the target `NAME`, locked against other downloads:
///
/// ```text
/// lock    held while a download is running
/// files/  complete files
/// parts/  incomplete files
/// etags/  entity tags of both
/// ready/  all files, complete, while they replace the target
/// ```
#[derive(Debug)]
pub(super) struct StagingFolder {
    folder: PathBuf,
    target: PathBuf,
    replace: bool,
    /// `None` where the file system has no locks.
    lock: Option<FileLock>,
}

impl StagingFolder {
    /// Opens the staging folder of `target` and keeps the files of an interrupted download in it.
    ///
    /// # Errors
    /// [`ErrorKind::Conflict`] if the target exists and `replace` is false, or another download
    /// into it is running.
    pub(super) fn open(target: &Path, replace: bool) -> Result<Self> {
        let Some(name) = target.file_name() else {
            let message = format!("cannot download into {}: not a folder name", target.display());
            return Err(Error::new(ErrorKind::InvalidInput, message));
        };
        tinkex_files::recover_folder(target).map_err(|error| write_error(target, &error))?;
        if !replace && target.symlink_metadata().is_ok() {
            return Err(already_exists(target));
        }
        let mut staging = name.to_owned();
        staging.push(".part");
        let folder = target.with_file_name(staging);
        if folder.is_symlink() {
            let message = format!("{} is a symbolic link", folder.display());
            return Err(Error::new(ErrorKind::InvalidInput, message)
                .with_hint("Remove the link: an unfinished download is kept under this name."));
        }
        fs::create_dir_all(&folder).map_err(|error| write_error(&folder, &error))?;
        let lock_path = folder.join("lock");
        let lock = match FileLock::acquire(&lock_path) {
            Ok(lock) => Some(lock),
            Err(LockError::InUse) => {
                let message = format!("another download into {} is running", target.display());
                return Err(Error::new(ErrorKind::Conflict, message)
                    .with_hint("Wait until it has finished, or choose another folder."));
            }
            Err(LockError::Unsupported(error)) => {
                tracing::warn!(
                    %error,
                    folder = %folder.display(),
                    "the file system has no locks; do not start another download into this folder"
                );
                None
            }
            Err(error) => return Err(write_error(&lock_path, &error.into())),
        };
        let staging = Self { folder, target: target.to_owned(), replace, lock };
        // `ready` exists if the process was killed during the replacement. Remove it: it may hold
        // the old content of the target.
        match fs::remove_dir_all(staging.ready()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(write_error(&staging.ready(), &error))
            }
            _ => Ok(staging),
        }
    }

    /// Returns the folder that replaces the target.
    fn ready(&self) -> PathBuf {
        self.folder.join("ready")
    }

    /// Returns the paths of the file `name`.
    pub(super) fn paths(&self, name: &str) -> FilePaths {
        let under = |folder: &str| self.folder.join(folder).join(name);
        FilePaths {
            complete: under("files"),
            part: under("parts"),
            etag: under("etags"),
            managed: true,
        }
    }

    /// Returns the folder of the complete files.
    pub(super) fn files(&self) -> PathBuf {
        self.folder.join("files")
    }

    /// Returns the size of the complete files `names` in bytes.
    pub(super) fn size(&self, names: &[String]) -> Result<u64> {
        let files = self.files();
        let size = |name: &String| Ok(fs::metadata(files.join(name))?.len());
        names.iter().map(size).sum::<io::Result<u64>>().map_err(|error| write_error(&files, &error))
    }

    /// Removes the files of an earlier download that are not among `names`.
    pub(super) fn retain(&self, names: &[String]) -> Result<()> {
        let files = self.files();
        let remove = || -> io::Result<()> {
            let mut folders = vec![files.clone()];
            while let Some(folder) = folders.pop() {
                let entries = match fs::read_dir(&folder) {
                    Ok(entries) => entries,
                    Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                    Err(error) => return Err(error),
                };
                for entry in entries {
                    let path = entry?.path();
                    if path.is_dir() {
                        folders.push(path);
                    } else if !names.iter().any(|name| files.join(name) == path) {
                        fs::remove_file(path)?;
                    }
                }
            }
            Ok(())
        };
        remove().map_err(|error| write_error(&files, &error))
    }

    /// Replaces the target with the complete files and removes the staging folder.
    ///
    /// # Errors
    /// [`ErrorKind::Conflict`] if the target appeared meanwhile and must not be replaced.
    pub(super) fn finish(self) -> Result<PathBuf> {
        let failed = |error: io::Error| write_error(&self.target, &error);
        let files = self.files();
        let ready = self.ready();
        fs::create_dir_all(&files).map_err(failed)?;
        if !self.replace && self.target.symlink_metadata().is_ok() {
            return Err(already_exists(&self.target));
        }
        // Rename `files` first: after the replacement the staged folder holds the old content of
        // the target, which must not be paired with the entity tags of the new files.
        fs::rename(&files, &ready).map_err(failed)?;
        tinkex_files::replace_folder(&ready, &self.target).map_err(failed)?;
        drop(self.lock);
        if let Err(error) = fs::remove_dir_all(&self.folder) {
            tracing::warn!(%error, folder = %self.folder.display(), "cannot remove staging folder");
        }
        Ok(self.target)
    }
}

fn already_exists(target: &Path) -> Error {
    let message = format!("{} already exists", target.display());
    Error::new(ErrorKind::Conflict, message)
        .with_hint("Choose another folder, or allow this one to be replaced.")
}

/// Checks that a file name from the server does not lead out of the folder.
///
/// # Errors
/// [`ErrorKind::Decode`] if the name is absolute or contains `..`, a drive letter or control
/// characters.
pub(super) fn check_name(name: &str) -> Result<()> {
    let is_plain = |part: Component<'_>| matches!(part, Component::Normal(_));
    let is_safe = !name.is_empty()
        && !name.ends_with('/')
        && !name.contains(['\\', ':'])
        && !name.chars().any(char::is_control)
        && Path::new(name).components().all(is_plain);
    if is_safe {
        return Ok(());
    }
    let message = format!("the checkpoint has a file with an unsafe name: {name:?}");
    Err(Error::new(ErrorKind::Decode, message)
        .with_hint("Do not use this checkpoint: it may be damaged or malicious."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_leave_the_folder_are_rejected() {
        for safe in ["a", "a/b.json", "x..y", ".hidden", "a/.b"] {
            assert!(check_name(safe).is_ok(), "{safe}");
        }
        for bad in ["", "/a", "../a", "a/../b", "a/..", "./a", "c:\\a", "a\\b", "a\n", "a/", "C:x"]
        {
            assert!(check_name(bad).is_err(), "{bad}");
        }
    }

    /// Opens the staging folder of `adapter` and puts one complete file into it.
    fn stage(root: &Path, content: &str) -> StagingFolder {
        let staging = StagingFolder::open(&root.join("adapter"), true).unwrap();
        let paths = staging.paths("file");
        fs::create_dir_all(paths.complete.parent().unwrap()).unwrap();
        fs::write(paths.complete, content).unwrap();
        staging
    }

    /// A process killed at any point of a replacement leaves a target that the next one replaces.
    #[test]
    fn leftovers_of_an_interrupted_replacement_do_not_block_the_next() {
        let leftovers: [fn(&Path, &Path); 4] = [
            // Before the swap: the new files are ready.
            |staging, _| fs::create_dir_all(staging.join("ready/new")).unwrap(),
            // After the swap: the old files await removal.
            |staging, _| {
                fs::create_dir_all(staging.join("ready")).unwrap();
                fs::write(staging.join("ready/file"), "older").unwrap();
            },
            // Where folders cannot be swapped: between the two renames.
            |_, target| {
                fs::rename(target, target.with_file_name(".adapter.tinkex-replaced")).unwrap();
            },
            // A folder that earlier versions left.
            |staging, _| fs::create_dir_all(staging.join("old/file")).unwrap(),
        ];
        for leave in leftovers {
            let root = tempfile::tempdir().unwrap();
            let target = root.path().join("adapter");
            stage(root.path(), "old").finish().unwrap();
            let staging = root.path().join("adapter.part");
            fs::create_dir_all(&staging).unwrap();
            leave(&staging, &target);

            let staging = stage(root.path(), "new");
            assert_eq!(fs::read_to_string(target.join("file")).unwrap(), "old");
            staging.finish().unwrap();
            assert_eq!(fs::read_to_string(target.join("file")).unwrap(), "new");
            assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1, "nothing else is left");
        }
    }

    #[test]
    fn a_second_download_into_the_same_folder_is_rejected() {
        let root = tempfile::tempdir().unwrap();
        let first = stage(root.path(), "x");
        let error = StagingFolder::open(&root.path().join("adapter"), true).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Conflict);
        first.finish().unwrap();
    }
}
