//! Durable replacement of files and folders, with the errors of this crate.

use std::io::{self, Write};
use std::path::Path;

use tinkex_files::{AtomicWrite, StagedFolder};

use crate::{Error, Result};

/// Replaces the file at `path` with the bytes that `content` writes, atomically and durably.
///
/// ```
/// # fn main() -> tinkex_weights::Result<()> {
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("config.json");
/// tinkex_weights::write_file(&path, |out| out.write_all(b"{}"))?;
/// assert_eq!(std::fs::read(&path).unwrap(), b"{}");
/// # Ok(()) }
/// ```
///
/// # Errors
/// [`Error::Io`] if the file cannot be written. The old file is then unchanged.
pub fn write_file(
    path: &Path,
    content: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<()> {
    AtomicWrite::new(path).write_with(content).map_err(Error::io("write", path))
}

/// Replaces the folder at `path` with the files that `fill` writes, atomically and durably.
///
/// `fill` gets the path of an empty temporary folder beside `path`, and must fsync the files that it
/// creates there, for example by calling [`write_file`].
///
/// # Errors
/// The error of `fill`, or [`Error::Io`] if the folder cannot be replaced. The old folder is then
/// unchanged.
pub fn write_folder<E: From<Error>>(
    path: &Path,
    fill: impl FnOnce(&Path) -> Result<(), E>,
) -> Result<(), E> {
    let staged = StagedFolder::new(path).map_err(Error::io("create", path))?;
    fill(staged.path())?;
    Ok(staged.commit().map_err(Error::io("replace", path))?)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_failed_write_leaves_the_old_file_and_no_temporary_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        write_file(&path, |out| out.write_all(b"old")).unwrap();
        let failed = write_file(&path, |out| {
            out.write_all(b"new")?;
            Err(io::Error::other("disk full"))
        });
        assert!(matches!(failed, Err(Error::Io { .. })), "{failed:?}");
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(names(folder.path()), ["x"]);
    }

    #[test]
    fn a_folder_is_replaced_as_a_whole() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("checkpoint");
        let put = |name: &'static str| {
            move |folder: &Path| write_file(&folder.join(name), |out| out.write_all(b"x"))
        };
        write_folder(&path, put("a")).unwrap();
        write_folder(&path, put("b")).unwrap();
        assert_eq!(names(&path), ["b"]);
        let failed = write_folder(&path, |folder| {
            put("c")(folder)?;
            Err(Error::bad_file("c", "not allowed"))
        });
        assert!(failed.is_err());
        assert_eq!(names(&path), ["b"]);
        assert_eq!(names(root.path()), ["checkpoint"]);
    }
}
